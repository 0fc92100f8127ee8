"""One run: its stages one after the other, from the last checkpoint on, and what is left of it in its folder.

Data order, augmentation, dropout and schedules are functions of (seed, step), and the draws' counter lies in the
model. So the state of a training is the model, its optimisers and a step number, and a resumed run repeats the
uninterrupted one. A batch is cut into processes × accumulate parts; which process takes which part changes nothing.
"""

import contextlib
import copy
import hashlib
import shutil
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from leanbayes import config
from leanbayes.bayesian import BayesianModel
from leanbayes.conversion import bayesianize
from leanbayes.data import Batches, Data, fingerprint
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import evaluate
from leanbayes.files import PART
from leanbayes.layout import Select, choose
from leanbayes.likelihoods import Likelihood
from leanbayes.method import Method, Stage, Training
from leanbayes.network import input_dtype
from leanbayes.saving import load
from leanbayes.training.checkpoints import Checkpoints
from leanbayes.training.clock import Clock
from leanbayes.training.loop import Loop
from leanbayes.training.progress import Progress, in_words, say
from leanbayes.training.recipe import Recipe
from leanbayes.training.record import Record, read_record
from leanbayes.training.stopping import StopSignals

REFRESH_EXAMPLES = 30_000  # enough for BatchNorm's statistics
_MODEL = "model.safetensors"


class Run:
    """One call of fit."""

    progress: Progress
    stop: StopSignals
    clock: Clock

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        data: Data,
        recipe: Recipe,
        accelerator: Accelerator,
        out: str | Path | None,
        likelihood: Likelihood | None,
        select: Select,
        notes: dict[str, Any],
    ) -> None:
        self.start = model
        if isinstance(model, BayesianModel):
            model = model.to_deterministic()
        if recipe.channels_last:
            model = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network, self.method, self.data, self.recipe, self.accelerator = model, method, data, recipe, accelerator
        self.likelihood, self.select = likelihood or data.likelihood(), select
        self.folder = None if out is None else Path(out).expanduser()
        self.checkpoints = None if self.folder is None else Checkpoints(self.folder / "checkpoints", recipe.keep)
        world, rank = accelerator.num_processes, accelerator.process_index
        parts = world * recipe.accumulate
        identity = self._identity(parts)
        for name in notes:
            if name in identity:
                raise LeanBayesError(f"notes cannot have {name!r}, which run.json has already: choose another name.")
        self.record = Record(self.folder, {**identity, **notes})
        self.batches = self._batches(data.train, True, parts=parts, mine=range(rank, parts, world))
        self.held_out = self._batches(data.validation, False, parts=world, mine=[rank])
        self.stages = _with_epochs(method.stages(), recipe.epochs)
        self.recipes = [_of_stage(recipe, stage) for stage, _ in self.stages]
        self.steps_done = 0  # of all stages
        self.steps = recipe.epochs * len(self.batches)

    def _identity(self, parts: int) -> dict[str, Any]:
        """Describe what a run is: two that differ in this are not one run that goes on."""
        shapes = [(name, tuple(tensor.shape)) for name, tensor in self.network.state_dict().items()]
        modules = [(name, type(module).__qualname__) for name, module in self.network.named_modules()]
        selected = None if self.select is None else [slot.name for slot in choose(self.network, self.select)[0]]
        return {
            "method": config.encode(self.method),
            "recipe": config.encode(self.recipe),
            "precision": self.accelerator.mixed_precision,
            "data": self.data.name,
            "examples": fingerprint(self.data.train),
            "architecture": hashlib.sha256(repr([shapes, modules]).encode()).hexdigest()[:16],
            "likelihood": config.encode(self.likelihood),
            "selected": selected,
            "parts_of_a_batch": parts,  # processes × accumulate
        }

    def _batches(self, dataset: Any, train: bool, augment: bool = True, **share: Any) -> Batches:
        return Batches(
            dataset,
            self.recipe.batch_size,
            device=self.accelerator.device,
            seed=self.recipe.seed,
            shuffle=train,
            augment=self.data.augment if train and augment else None,
            normalise=self.data.normalise,
            workers=self.recipe.workers,
            channels_last=self.recipe.channels_last,
            ignore_index=getattr(self.likelihood, "ignore_index", self.data.ignore_index),
            dtype=input_dtype(self.network),
            **share,
        )

    # -- the whole ----------------------------------------------------------------------------------------------------

    def train(self, overwrite: bool, shown: bool) -> BayesianModel:
        """Run the stages; a finished run is only loaded."""
        if self.folder is not None and overwrite:
            self._empty(self.folder)
        bnn, state = self._from_checkpoint()
        if bnn is not None and state is None:
            say(shown, f"The run in {self.folder} is finished: nothing was trained. --overwrite starts anew.")
            return bnn
        self.steps_done = state["steps_done"] if state else 0
        self.clock = Clock(self.accelerator.device, state["seconds"] if state else 0.0)
        if self.accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.accelerator.device)
        first = self.accelerator.is_main_process
        tensorboard = self.folder / "tensorboard" if self.folder is not None and first else None
        name = type(self.method).__name__
        with Progress(name, self.steps, shown, tensorboard, self.steps_done) as self.progress:
            where = f" in {self.folder}" if self.folder is not None else ""
            begin = f"going on from step {self.steps_done} of {self.steps}" if state else f"{self.steps} steps"
            self.progress.say(f"{name} on {self.data.name}: {self.batches.examples:,} examples, {begin}{where}")
            self._write_record()
            try:
                with StopSignals(self.folder is not None, repeated=self.accelerator.num_processes > 1) as self.stop:
                    for number in range(state["stage"] if state else 0, len(self.stages)):
                        bnn = self._train_stage(number, bnn, state)
                        state = None
                assert bnn is not None
                return self._finish(bnn)
            except BaseException as error:
                stopped = isinstance(error, KeyboardInterrupt)
                self.record.values["status"] = "stopped" if stopped else f"failed: {error}"
                with contextlib.suppress(LeanBayesError):  # the first error is the one to tell
                    self._write_record()
                raise

    def _empty(self, folder: Path) -> None:
        """Remove what an earlier run has left."""
        if self.accelerator.is_main_process and folder.is_dir():
            for name in ("checkpoints", "tensorboard"):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in ("run.json", _MODEL):
                (folder / name).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()

    def _from_checkpoint(self) -> tuple[BayesianModel | None, dict[str, Any] | None]:
        """Return what the folder holds: the model of a finished run, or a model with the state to go on from."""
        bnn, state = None, None
        if self.folder is None or self.checkpoints is None:
            return None, None
        if not (self.folder / "run.json").is_file() and self.checkpoints.latest() is not None:
            raise LeanBayesError(
                f"{self.folder} holds checkpoints, but no run.json that tells what they are: remove them, or overwrite."
            )
        if (self.folder / "run.json").is_file():
            old = read_record(self.folder)
            self.record.check_same(old)
            latest = self.checkpoints.latest()
            if old["status"] == "finished":
                bnn = load(self.folder / _MODEL, self.network).to(self.accelerator.device).eval()
            elif latest is not None:
                bnn, state = self.checkpoints.load(latest, self.network)
                self.record.values |= {"history": state["history"], "costs": state["costs"]}
                # The counter of draws counts those of one process.
                bnn.noise.state[1] = bnn.noise.state[1] * state["processes"] // self.accelerator.num_processes
        self.accelerator.wait_for_everyone()  # nobody writes before all have read
        if self.accelerator.is_main_process:
            for leftover in self.folder.glob(f"*{PART}"):  # of a process that was killed while it wrote
                leftover.unlink(missing_ok=True)
            self.checkpoints.clean()
        return bnn, state

    def _train_stage(self, number: int, bnn: BayesianModel | None, state: dict[str, Any] | None) -> BayesianModel:
        stage, epochs = self.stages[number]
        if state is None:
            bnn = self._next_model(number, stage, bnn)
        assert bnn is not None
        bnn = bnn.to(self.accelerator.device).train()
        steps = epochs * len(self.batches)
        training = Training(
            bnn,
            steps,
            self.batches.examples,
            self.plain_batches,
            average=self.average,
            autocast=self.accelerator.autocast,
        )
        if state is None:
            stage.method.start(training)
            bnn = training.model.to(self.accelerator.device).train()  # which it may have replaced
        else:
            training.step = state["step"]
        recipe = self.recipes[number]
        training.optimisers = recipe.optimisers(bnn)
        self.progress.stage(type(stage.method).__name__)
        Loop(self, number, recipe, stage.method, training, state).run()
        return bnn

    def _next_model(self, number: int, stage: Stage, bnn: BayesianModel | None) -> BayesianModel:
        return bayesianize(
            self._first() if bnn is None else bnn,
            stage.method,
            select=self.select if stage.method.bayesian_weights else None,
            likelihood=copy.deepcopy(self.likelihood) if bnn is None else None,
            seed=self.recipe.seed + number,
        )

    def _first(self) -> nn.Module:
        """Return what the first stage starts from: the network, or a Bayesian model with its variances."""
        return self.start if isinstance(self.start, BayesianModel) else self.network

    def _finish(self, bnn: BayesianModel) -> BayesianModel:
        """Refresh BatchNorm, score on the held-out split, and save."""
        bnn.eval()
        if self.recipe.refresh_batchnorm:
            # Augmented as in training: the statistics of plain images cost ResNet-18 on CIFAR-10 1 % of accuracy.
            batches = self._batches(self.data.train, True).epoch()
            some = islice(batches, max(1, REFRESH_EXAMPLES // self.recipe.batch_size))
            with self.accelerator.autocast():
                bnn.refresh_batchnorm((x for x, _ in some), torch.Generator().manual_seed(self.recipe.seed))
        values = self.record.values
        values["costs"]["trainable"] = sum(p.numel() for p in bnn.parameters() if p.requires_grad)
        tensors = {(t.data_ptr(), t.numel()): t.numel() for t in bnn.state_dict().values()}  # tied ones once
        values["costs"]["stored"] = sum(tensors.values())
        if self.folder is not None and self.accelerator.is_main_process:
            bnn.save(self.folder / _MODEL)
            values["costs"]["file_bytes"] = (self.folder / _MODEL).stat().st_size
        values["scores"]["validation"] = scores = self.evaluate(bnn)
        values["status"] = "finished"
        self._write_record()
        self.progress.say(f"Held-out split: {in_words(scores)}")
        self.accelerator.wait_for_everyone()
        return bnn

    # -- what the loop needs ------------------------------------------------------------------------------------------

    def evaluate(self, bnn: BayesianModel, samples: int | None = None) -> dict[str, float]:
        """Score on the held-out split, with noise that leaves the training's alone."""
        batches, scale = self.held_out.epoch(), self.data.target_std
        with self.accelerator.autocast():
            return evaluate(bnn, batches, samples=samples, seed=self.recipe.seed, target_scale=scale, details=False)

    def plain_batches(self) -> Iterable[tuple[Any, Tensor]]:
        """Give training batches (x, y) without augmentation, the same in every process."""
        return self._batches(self.data.train, True, augment=False).epoch()

    def average(self, tensor: Tensor) -> Tensor:
        """Average over the processes."""
        return self.accelerator.reduce(tensor.clone(), "mean")

    def checkpoint(self, number: int, training: Training, state: dict[str, Any]) -> None:
        """Write a checkpoint: the model, and where its training stands; a model that went astray is not written."""
        if self.checkpoints is None or not self.accelerator.is_main_process:
            return
        for name, parameter in training.model.named_parameters():
            if not parameter.isfinite().all():
                raise self.stopped(f"{name} contains NaN or infinity: lower the learning rate or clip the gradient.")
        state |= {
            "stage": number,
            "step": training.step,
            "steps_done": self.steps_done,
            "optimisers": [optimiser.state_dict() for optimiser in training.optimisers],
            "history": self.record.values["history"],
            "costs": self.record.values["costs"],
            "seconds": self.clock.read(),
            "processes": self.accelerator.num_processes,
        }
        self.checkpoints.save(self.steps_done, training.model, state)
        self._write_record()

    def stopped(self, reason: str) -> LeanBayesError:
        """Make the error of a training that went astray."""
        latest = self.checkpoints.latest() if self.checkpoints is not None else None
        intact = f" The checkpoint {latest.name} in {self.folder} is intact." if latest else ""
        return LeanBayesError(f"Training stopped at step {self.steps_done}. {reason}{intact}")

    def _write_record(self) -> None:
        if self.accelerator.is_main_process:
            self.record.write()


_FIXED = (
    "accumulate",
    "batch_size",
    "channels_last",
    "device",
    "epochs",
    "keep",
    "precision",
    "refresh_batchnorm",
    "seed",
    "unused_parameters",
    "workers",
)


def _of_stage(recipe: Recipe, stage: Stage) -> Recipe:
    """Change the recipe for a stage, save for what holds for the whole run."""
    for name in stage.settings:
        if name in _FIXED:
            raise LeanBayesError(f"{name} holds for a whole training: leave it out of the settings of a stage.")
    return recipe.changed(stage.settings)


def _with_epochs(stages: Sequence[Stage], epochs: int) -> list[tuple[Stage, int]]:
    """Share the epochs out, so that they add up."""
    total = sum(stage.share for stage in stages)
    ends, reached = [0], 0.0
    for stage in stages:
        reached += stage.share
        ends.append(round(epochs * reached / total))
    counts = [end - start for start, end in pairwise(ends)]
    if min(counts, default=0) < 1:
        raise LeanBayesError(f"epochs={epochs} are too few for {len(stages)} stages: each needs at least one.")
    return list(zip(stages, counts, strict=True))
