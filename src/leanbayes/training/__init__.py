"""Training on accelerate: `fit` with checkpoints, resuming and progress, its `Recipe`, and the records of runs."""

from leanbayes.training.fit import fit
from leanbayes.training.mixins import LightningMixin, TrainerMixin
from leanbayes.training.recipe import Recipe, RecipeSettings
from leanbayes.training.record import read_record

__all__ = ["LightningMixin", "Recipe", "RecipeSettings", "TrainerMixin", "fit", "read_record"]
