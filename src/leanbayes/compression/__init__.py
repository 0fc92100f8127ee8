"""How many weights share few values: the (μ, σ) plane, its mixture of Gaussians, and who belongs to which."""
