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
variational_dropout  Gaussian dropout with learned rates.
sparse_vd        Sparse variational dropout: a log-uniform prior prunes weights.
sbp              Structured Bayesian pruning: noise prunes inputs of layers.
cyclical_sgmcmc  Cyclical SGMCMC: networks that a chain passes through.
aeb              AEB: sparse snapshots of a chain; snapshots has what it shares with mBNN.
mbnn             mBNN: a chain of weights, and of masks of nodes; mask_moves has the births and deaths.
laplace          The Laplace approximation of a trained network.
std_search       The largest std that the loss of a trained network allows.
swa, swag        Averages, and a Gaussian, of the weights that SGD passes through.
vbll             VBLL: a Gaussian last layer without sampling.
"""
