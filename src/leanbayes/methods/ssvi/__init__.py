"""Sparse subspace variational inference (SSVI; Li et al. 2024).

ssvi        SSVI, the method: its settings, posterior and criteria for removal and addition.
criteria    The removal criteria in closed form.

What it shares with RigL (densities, the initial subspace, the exchange of weights) is in `methods/sparse_training`.
"""
