"""The compact file (.lbc) of a model with shared weights."""
