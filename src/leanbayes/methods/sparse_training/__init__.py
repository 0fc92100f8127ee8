"""Sparse training with a moving subspace: what SSVI and RigL share.

base                SparseMethod: the settings of sparse methods, and when and how active weights are exchanged.
densities           The number of active weights per layer (ERK or uniform).
initial_subspace    The active weights that a training starts with.
exchange            Replace active weights, together with the state that the optimizers hold for them.
"""
