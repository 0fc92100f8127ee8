"""Sparse posteriors, which store the active weights only."""
