"""The plan of a run: which method, recipe and number of epochs each of its stages has."""

from dataclasses import dataclass
from itertools import pairwise

from leanbayes.errors import LeanBayesError
from leanbayes.model.method import Method, Stage
from leanbayes.training.recipe import WHOLE_RUN, Recipe


@dataclass(frozen=True)
class StagePlan:
    """One stage of a run.

    Attributes:
        number: Its place among the stages, from 0.
        method: The method that it trains with.
        recipe: The recipe of the run with the settings that the stage changes.
        epochs: Its number of epochs.
    """

    number: int
    method: Method
    recipe: Recipe
    epochs: int


def plan_stages(method: Method, recipe: Recipe) -> list[StagePlan]:
    """Return the stages of a method, with the epochs of the recipe divided among them by their shares."""
    stages = method.stages()
    total = sum(stage.share for stage in stages) or 1.0
    ends, reached = [0], 0.0
    for stage in stages:
        reached += stage.share
        ends.append(round(recipe.epochs * reached / total))
    for number, stage in enumerate(stages):  # each that trains has an epoch, if there are enough
        ends[number + 1] = max(ends[number + 1], ends[number] + (stage.share > 0))
    left = recipe.epochs if any(stage.share for stage in stages) else 0
    for number, stage in reversed([*enumerate(stages)]):
        ends[number + 1] = min(ends[number + 1], left)
        left = ends[number + 1] - (stage.share > 0)
    epochs = [end - start for start, end in pairwise(ends)]
    trained = [count for stage, count in zip(stages, epochs, strict=True) if stage.share]
    if min(trained, default=1) < 1:
        raise LeanBayesError(f"epochs={recipe.epochs} are too few for {len(trained)} stages: each needs at least one.")
    return [
        StagePlan(number, stage.method, _stage_recipe(recipe, stage), count)
        for number, (stage, count) in enumerate(zip(stages, epochs, strict=True))
    ]


def _stage_recipe(recipe: Recipe, stage: Stage) -> Recipe:
    for name in stage.settings:
        if name in WHOLE_RUN:
            raise LeanBayesError(f"{name} is the same in a whole run: leave it out of the settings of a stage.")
    changed = recipe.changed(stage.settings)
    if stage.method.engine != "ivon":
        return changed
    if changed.temperature_end is not None:
        raise LeanBayesError("The engine 'ivon' has a constant temperature: leave temperature_end out.")
    return changed.changed({"temperature_warmup": 0.0})
