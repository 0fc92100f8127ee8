"""Shared posteriors: a codebook of Gaussians, and the label of each weight's code."""
