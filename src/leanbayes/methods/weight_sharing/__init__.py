"""Stochastic weight sharing (2DGBNN, Lin et al. 2025)."""
