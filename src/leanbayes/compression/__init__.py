"""How many weights share few values (the (μ, σ) plane, its mixture of Gaussians), and the compact file of them."""
