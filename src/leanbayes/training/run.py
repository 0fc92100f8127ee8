"""One run: its stages, from the last checkpoint if there is one, to the files that it leaves in its folder.

Data order, augmentation, dropout and schedules are functions of (seed, step), and the model stores the counter of its
noise. So the state of a training is the model, its optimizers and a step number, and a resumed run repeats the
uninterrupted one. A batch is split into processes × accumulate parts. The result does not depend on which process
computes which part.
"""

import contextlib
import copy
import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from leanbayes.core.layout import Select
from leanbayes.core.network import input_dtype
from leanbayes.core.parts import local_part
from leanbayes.data import Batches, Data
from leanbayes.data.base import in_memory
from leanbayes.deploy.model_file import save
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import evaluate
from leanbayes.likelihoods import Likelihood
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.conversion import bayesianize, default_likelihood
from leanbayes.model.method import Method, Training
from leanbayes.training.checkpoints import TrainingState
from leanbayes.training.estimate import pass_seconds
from leanbayes.training.identity import identity
from leanbayes.training.journal import Journal
from leanbayes.training.label_counts import labels_per_example
from leanbayes.training.loop import Loop
from leanbayes.training.plan import StagePlan, plan_stages
from leanbayes.training.posterior_check import posterior_problem
from leanbayes.training.progress import Progress, say
from leanbayes.training.recipe import Recipe
from leanbayes.training.record import Record, read_record
from leanbayes.training.run_folder import MODEL, TENSORBOARD, locked_folder, remove_run
from leanbayes.training.saved_run import SavedRun
from leanbayes.training.sharded_run import check_shardable, make_equal, shard_for_training
from leanbayes.training.stopping import StopSignals
from leanbayes.training.tracking import OnLog, listening

REFRESH_EXAMPLES = 30_000  # enough for the statistics of BatchNorm
LEAST_REFRESH_EXAMPLES = 2_000  # of each member, if there are many


class Run:
    """One call of `fit`, whose arguments it takes."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        data: Data,
        recipe: Recipe,
        accelerator: Accelerator,
        folder: Path | None,
        likelihood: Likelihood | None,
        select: Select,
        notes: dict[str, Any],
        on_log: OnLog | None = None,
    ) -> None:
        self._start, self._on_log = model, on_log
        if isinstance(model, BayesianModel):
            model = model.to_deterministic()
        if recipe.channels_last:
            model = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._network, self._method, self._data, self._recipe = model, method, data, recipe
        if likelihood is None:
            regression = data.task == "regression"
            likelihood = data.likelihood() if regression else default_likelihood(model, data.ignore_index)
        self._accelerator, self._likelihood, self._select = accelerator, likelihood, select
        self._folder = folder
        world, rank = accelerator.num_processes, accelerator.process_index
        parts = world * recipe.accumulate
        # Processes of a sharded model share a sample, so their number does not change the training.
        separate = recipe.accumulate if recipe.shard else parts
        own = identity(model, method, recipe, data, self._likelihood, select, accelerator.mixed_precision, separate)
        for name in notes:
            if name in own:
                raise LeanBayesError(f"notes cannot contain {name!r}, which run.json has already: use another name.")
        self._record = Record(folder, {**own, **notes})
        self._saved = None if folder is None else SavedRun(folder, self._network, self._record, recipe, accelerator)
        self._batches = self._in_batches(data.train, True, parts=parts, mine=range(rank, parts, world))
        # All processes of a sharded model must run the same passes, so each of them evaluates all examples.
        share = {} if recipe.shard else {"parts": world, "mine": [rank]}
        self._held_out = self._in_batches(data.validation, False, **share)
        self._plans = plan_stages(method, recipe)
        if recipe.shard:
            check_shardable(self._plans, accelerator.mixed_precision)

    def _in_batches(self, dataset: Any, train: bool, augment: bool = True, **share: Any) -> Batches:
        return Batches(
            dataset,
            self._recipe.batch_size,
            device=self._accelerator.device,
            seed=self._recipe.seed,
            shuffle=train,
            augment=self._data.augmentation(self._recipe.augment) if train and augment else None,
            normalize=self._data.normalize,
            workers=self._recipe.workers,
            channels_last=self._recipe.channels_last,
            ignore_index=getattr(self._likelihood, "ignore_index", self._data.ignore_index),
            dtype=input_dtype(self._network),
            **share,
        )

    def train(self, overwrite: bool, shown: bool) -> BayesianModel:
        """Train all stages and return the model. If the run is finished already, only load it.

        Args:
            overwrite: Whether to remove an earlier run from the folder first.
            shown: Whether this process shows the progress.
        """
        saved = self._saved
        if saved is None:
            return self._train(None, None, shown)
        if not overwrite:
            bnn = saved.finished()
            if bnn is not None:
                say(shown, f"The run in {saved.folder} is finished: nothing was trained. --overwrite starts again.")
                return bnn
        with contextlib.ExitStack() as stack:
            saved.agreed(lambda: stack.enter_context(locked_folder(saved.folder)))
            if overwrite:
                saved.agreed(lambda: remove_run(saved.folder))
            return self._train(*saved.latest(), shown)

    def _train(self, bnn: BayesianModel | None, state: TrainingState | None, shown: bool) -> BayesianModel:
        """Train the remaining stages, from the model and state of a checkpoint if they are given."""
        first = self._accelerator.is_main_process
        tensorboard = self._folder / TENSORBOARD if self._folder is not None and first else None
        name, steps = type(self._method).__name__, sum(plan.epochs for plan in self._plans) * len(self._batches)
        done = state["steps_done"] if state else 0
        with (
            Progress(name, steps, shown, tensorboard, done) as progress,
            listening(self._accelerator, self._on_log, self._record.config) as log,
        ):
            where = f" in {self._folder}" if self._folder is not None else ""
            length = f"continuing from step {done} of {steps}" if state else f"{steps} steps"
            progress.say(f"{name} on {self._data.name}: {self._batches.examples:,} examples, {length}{where}")
            checkpoints = None if self._saved is None else self._saved.checkpoints
            journal = Journal(
                self._record, progress, checkpoints, self._accelerator, self._batches.batch_size, state, log
            )
            with journal.recording():
                with StopSignals(self._folder is not None, repeated=self._accelerator.num_processes > 1) as stop:
                    journal.running()
                    if shown or self._accelerator.num_processes > 1:  # processes measure together, though one speaks
                        self._say_if_long(journal)
                    if self._accelerator.device.type == "cuda":  # the peak is that of the training
                        torch.cuda.reset_peak_memory_stats(self._accelerator.device)
                    for plan in self._plans[state["stage"] if state else 0 :]:
                        bnn = self._train_stage(plan, bnn, state, journal, stop)
                        state = None
                assert bnn is not None
                self._finish(bnn, journal)
        return bnn

    def _say_if_long(self, journal: Journal) -> None:
        """Say before the first step that the training will take hours, by a pass of the plain network."""
        seconds = pass_seconds(self._network, self._likelihood, self._batches, self._accelerator)
        if seconds is not None:
            passes = self._recipe.accumulate * getattr(self._method, "members", self._recipe.samples)
            journal.say_if_long(seconds * passes)

    def held_out_nll(self) -> float:
        """Return the NLL of the trained model on the held-out split, nan if it has none."""
        scores = self._record.scores
        if not scores and self._folder is not None:  # the run was finished before
            scores = read_record(self._folder)["scores"]
        return float(scores.get("validation", {}).get("nll", math.nan))

    # -- stages -------------------------------------------------------------------------------------------------------

    def _train_stage(
        self,
        plan: StagePlan,
        bnn: BayesianModel | None,
        state: TrainingState | None,
        journal: Journal,
        stop: StopSignals,
    ) -> BayesianModel:
        """Train one stage, from the model of the stage before it (if any) or from the state of a checkpoint."""
        if state is None:
            bnn = self._next_model(plan, bnn)
        assert bnn is not None
        shard = self._recipe.shard and plan.method.bayesian_weights
        if shard:
            make_equal(bnn, self._accelerator.device)
        # A model to shard may be too large for the device, which `start` of a few methods needs.
        early = not shard or type(plan.method).start is not Method.start
        bnn = bnn.to(self._accelerator.device if early else "cpu").train()
        training = Training(
            bnn,
            plan.epochs * len(self._batches),
            self._batches.examples,
            self._plain_batches,
            held_out=self._all_held_out,
            average=self._average,
            autocast=self._accelerator.autocast,
        )
        journal.stage(type(plan.method).__name__)
        if state is None:
            if not training.steps:
                journal.start()  # what follows is all that the stage does
            plan.method.start(training)
            bnn = training.model.to(
                self._accelerator.device if early else "cpu"
            ).train()  # `start` may have replaced it
        else:
            training.step = state["step"]
        if not training.steps:  # nor a checkpoint: a resumed run starts the stage again
            journal.epoch_done(None)
            return bnn
        if shard:
            shard_for_training(bnn, self._accelerator)
        training.labels_per_example = self._labels_per_example(bnn) if plan.method.counts_labels else None
        training.optimizers = plan.recipe.optimizers(
            bnn,
            training.num_data,
            keep_std=state is not None,
            labels_per_example=training.labels_per_example,
        )
        Loop(plan, training, self._batches, self._accelerator, journal, self._validate, stop, state).run()
        plan.method.finish(training)
        return bnn

    def _labels_per_example(self, bnn: BayesianModel) -> float | None:
        """Return the mean number of labels of a training example, the same in every process."""
        known = in_memory(self._data.train)
        labels = (y for _, y in self._plain_batches()) if known is None else [known.labels()]
        return labels_per_example(bnn.likelihood, labels)

    def _next_model(self, plan: StagePlan, bnn: BayesianModel | None) -> BayesianModel:
        """Return the model that a stage starts from."""
        first = self._start if isinstance(self._start, BayesianModel) else self._network
        return bayesianize(
            first if bnn is None else bnn,
            plan.method,
            select=self._select if plan.method.bayesian_weights else None,
            likelihood=copy.deepcopy(self._likelihood) if bnn is None else None,
            seed=self._recipe.seed + plan.number,
        )

    def _finish(self, bnn: BayesianModel, journal: Journal) -> None:
        """Refresh BatchNorm, save the model, and evaluate it on the held-out split."""
        bnn.eval()
        if self._recipe.refresh_batchnorm:
            # Augmented as in training: the statistics of plain images cost ResNet-18 on CIFAR-10 1 % of accuracy.
            batches = self._in_batches(self._data.train, True).epoch()
            examples = max(REFRESH_EXAMPLES // bnn.loss_passes, LEAST_REFRESH_EXAMPLES)
            some = islice(batches, max(1, examples // self._recipe.batch_size))
            with self._accelerator.autocast():
                bnn.refresh_batchnorm((x for x, _ in some), torch.Generator().manual_seed(self._recipe.seed))
        costs = {"trainable": sum(p.numel() for p in bnn.parameters() if p.requires_grad)}
        # tied tensors count once
        tensors = {(local_part(t).data_ptr(), t.numel()): t.numel() for t in bnn.state_dict().values()}
        costs["stored"] = sum(tensors.values())
        first = self._accelerator.is_main_process
        if self._folder is not None and (first or bnn.root_units is not None):
            save(bnn, self._folder / MODEL)
        if self._folder is not None and first:
            costs["file_bytes"] = (self._folder / MODEL).stat().st_size
        journal.add_costs(costs)
        scores = self._validate(bnn, samples=None)
        journal.finish(scores)
        temperature = self._recipe.temperature
        assert isinstance(temperature, (int, float))  # `fit` has chosen it
        problem = posterior_problem(scores, bnn.method, temperature, self._data)
        if problem is not None:
            journal.warn(problem)
        self._accelerator.wait_for_everyone()

    # -- what loops and hooks are given -------------------------------------------------------------------------------

    def _validate(self, bnn: BayesianModel, samples: int | None = 1) -> dict[str, float]:
        """Score a model on the held-out split, with noise that does not touch that of the training."""
        batches, scale = self._held_out.epoch(), self._data.target_std
        with self._accelerator.autocast():
            return evaluate(bnn, batches, samples=samples, seed=self._recipe.seed, target_scale=scale, details=False)

    def _plain_batches(self) -> Iterable[tuple[Any, Tensor]]:
        """Return training batches (x, y) without augmentation, the same in every process.

        They have all examples, also those of the last, smaller batch: methods sum over them. But BatchNorm in training
        mode cannot take a batch of one example, so that one is left out.
        """
        alone = self._batches.examples % self._recipe.batch_size == 1
        return self._in_batches(self._data.train, True, augment=False, drop_last=alone).epoch()

    def _all_held_out(self) -> Iterable[tuple[Any, Tensor]]:
        """Return the held-out batches (x, y), the same in every process."""
        return self._in_batches(self._data.validation, False).epoch()

    def _average(self, tensor: Tensor) -> Tensor:
        """Return the mean of a tensor over all processes."""
        return self._accelerator.reduce(tensor.clone(), "mean")
