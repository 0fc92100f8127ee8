"""The methods that the papers compare with.

deterministic    The plain network.
mc_dropout       Monte Carlo dropout.
ensemble         Deep ensembles.
rigl             RigL: sparse training without uncertainty.
batch_ensemble   BatchEnsemble: members that share weights; rank_one_network has their factors.
packed_ensemble  Packed ensembles: narrow members in one network; narrow_network makes them.
mimo             MIMO: one network that predicts several inputs at once.
rank_one         Rank-1 Bayesian networks: BatchEnsemble with random factors.
lp_bnn           LP-BNN: BatchEnsemble with factors from small autoencoders.
abnn             ABNN: a trained network with noise in its normalization layers.
sngp             SNGP: bounded layers, and a Gaussian process in place of the last one.
"""
