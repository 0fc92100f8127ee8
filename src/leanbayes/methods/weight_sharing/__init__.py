"""Stochastic weight sharing (2DGBNN, Lin et al. 2025).

weight_sharing     WeightSharing, the method: its settings, posterior and training stages.
codebook           From (μ, σ) of all weights to components, outliers and blends (Algorithm 1).
plane, tiles       The plane in which weights are clustered, and its points in tiles for fast searches.
outliers           The weights that share with no other weight.
clustering, em     k-means, and then EM for the mixture of Gaussians.
mixture            The mixture and its density.
assignment         The component of each weight, and the blends.
merging            Merge similar components.
rate_distortion    Labels with few bits: a price on bits.
"""
