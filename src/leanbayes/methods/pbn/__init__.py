"""Partial Bayesian networks (PBN): only the weights that the outputs are most sensitive to are Bayesian.

pbn            PBN, the method: its settings, posterior and two training stages.
sensitivity    `lb.sensitivity`, which scores the weights of any network, and its result.
estimators     How each kind of sensitivity is computed.
selection      Select the weights, rows or layers with the highest scores.
restriction    `lb.restrict`: fewer Bayesian weights in a trained model, without training.
"""
