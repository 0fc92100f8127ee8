"""Tools without Bayesian content: layout, network surgery, noise, Gaussian kernels, settings, names, files, counters.

This package is internal: no name in it is public, and all of them may change in any version.
"""
