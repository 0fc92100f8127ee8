"""Which weights of a sparse network are active, how they are written down, and how layers multiply by them."""
