"""Many trainings: one after the other, in several processes, or distributed over the processes of a launcher."""

import contextlib
import datetime
import functools
import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from leanbayes.cli.decide import add_alarms
from leanbayes.cli.evaluations import evaluation_of
from leanbayes.cli.options import Task, is_first_process
from leanbayes.cli.runs import TrainedRun, as_file_name, load_data, open_run, prepare, train
from leanbayes.cli.workers import STOPPED, side_by_side
from leanbayes.data import Data
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import EvaluationSettings
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.method import Method
from leanbayes.report import EvaluatedRun
from leanbayes.training import Recipe, read_record
from leanbayes.training.progress import in_words, say


@dataclass(frozen=True)
class Job:
    """One method with one seed, to be trained into a folder and evaluated."""

    name: str
    method: Method
    recipe: Recipe
    task: Task
    folder: Path
    evaluation: EvaluationSettings
    ood: tuple[str, ...] | None

    @property
    def run_folder(self) -> Path:
        """The folder of the run."""
        return self.folder / as_file_name(f"{self.name}-{self.recipe.seed}")

    def __str__(self) -> str:
        return f"{self.name}, seed {self.recipe.seed}"


def do_all(jobs: Sequence[Job], data: Data, processes: int) -> list[EvaluatedRun]:
    """Do jobs one after the other in this process, or in several processes that share the cores and GPUs."""
    done = _reporter(jobs)
    if processes > 1:
        found = _in_processes(jobs, iter(range(len(jobs))), processes, done)
        return [found[number] for number in range(len(jobs))]
    runs = []
    with _terminated_as_interrupted():
        for job in jobs:
            runs.append(_do(job, data))
            done(runs[-1])
    return runs


def do_share(jobs: Sequence[Job], processes: int) -> list[EvaluatedRun]:
    """Do jobs under a launcher: each process takes the next free job, and all runs are gathered at the end."""
    from torch.distributed.rendezvous import rendezvous

    store, rank, world = next(rendezvous("env://"))

    def taken() -> Iterator[int]:
        while (number := store.add("taken", 1) - 1) < len(jobs):
            yield number

    # Other processes may still train for days when this one is done.
    long = datetime.timedelta(days=30)
    torch.distributed.init_process_group("gloo", timeout=long, world_size=world, rank=rank, store=store)
    found = _in_processes(jobs, taken(), processes, _reporter(jobs, lambda: store.add("done", 1)))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would not handle it while it waits for the others
    every: list[dict[int, EvaluatedRun]] = [{}] * world
    torch.distributed.all_gather_object(every, found)
    runs = {number: run for some in every for number, run in some.items()}
    return [runs[number] for number in range(len(jobs))]


def do_together(jobs: Sequence[Job], data: Data) -> list[EvaluatedRun]:
    """Train each run with all processes of a launcher. The first process evaluates them, and the others return none."""
    for job in jobs:
        _train(job, data)
    if not is_first_process():
        return []
    done = _reporter(jobs)
    runs = []
    for job in jobs:
        runs.append(_evaluate(job, open_run(job.run_folder, job.recipe.device), data))
        done(runs[-1])
    return runs


# -- one job ----------------------------------------------------------------------------------------------------------


def _do(job: Job, data: Data) -> EvaluatedRun:
    """Train, or load the finished run, and evaluate it."""
    bnn = _train(job, data)
    return _evaluate(job, TrainedRun(job.run_folder, bnn, read_record(job.run_folder)), data)


def _train(job: Job, data: Data) -> BayesianModel:
    with _named(job):
        return train(prepare(job.task, job.recipe.seed, data), job.method, job.recipe, job.task, job.run_folder)


def _evaluate(job: Job, run: TrainedRun, data: Data) -> EvaluatedRun:
    task = job.task
    with _named(job):
        add_alarms(run, data)
        return evaluation_of(
            run, data, job.evaluation, job.ood, task.root, name=job.name, shown=not task.quiet, again=task.overwrite
        )


@contextlib.contextmanager
def _named(job: Job) -> Iterator[None]:
    """Say which of the runs has failed, or that a stopped run can be continued."""
    try:
        yield
    except LeanBayesError as error:
        raise LeanBayesError(f"{job}: {error}") from None
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(str(stop) or STOPPED) from None


def _in_processes(
    jobs: Sequence[Job], numbers: Iterator[int], processes: int, done: Callable[[EvaluatedRun], None]
) -> dict[int, EvaluatedRun]:
    quiet = [replace(job, task=replace(job.task, quiet=True)) for job in jobs]
    return side_by_side(_do_alone, quiet, numbers, processes, done)


def _do_alone(job: Job) -> EvaluatedRun:
    """Do a job in a worker process, which reads the data once."""
    return _do(job, _data_of(job.task))


_data_of = functools.cache(load_data)


def _reporter(jobs: Sequence[Job], count: Callable[[], int] | None = None) -> Callable[[EvaluatedRun], None]:
    """Return a function that reports each run that is done, and how many of all are done."""
    count = count or functools.partial(next, itertools.count(1))

    def report(run: EvaluatedRun) -> None:
        text = f"{run.method}, seed {run.seed}: {in_words(run.scores)} ({count()} of {len(jobs)})"
        say(not jobs[0].task.quiet, text)

    return report


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Handle SIGTERM as Ctrl-C outside of a training."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
