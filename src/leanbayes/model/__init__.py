"""`BayesianModel`, `bayesianize`, the ELBO, `predict`, and the base class of methods."""
