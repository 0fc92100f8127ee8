"""The methods that the papers compare with.

deterministic    The plain network.
mc_dropout       Monte Carlo dropout.
ensemble         Deep ensembles.
rigl             RigL: sparse training without uncertainty.
"""
