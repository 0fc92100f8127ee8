"""The training loop, on accelerate: `fit`, checkpoints, resumption, progress."""

from leanbayes.training.fit import fit
from leanbayes.training.recipe import Recipe
from leanbayes.training.record import read_record

__all__ = ["Recipe", "fit", "read_record"]
