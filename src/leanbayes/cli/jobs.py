"""Many trainings: one after the other, in processes side by side, or shared out among the processes of a launcher."""

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

from leanbayes.bayesian import BayesianModel
from leanbayes.cli.looking import look_at
from leanbayes.cli.options import Task, is_first_process
from leanbayes.cli.runs import TrainedRun, as_file_name, load_data, open_run, prepare, train
from leanbayes.cli.workers import STOPPED, side_by_side
from leanbayes.data import Data
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import Look
from leanbayes.method import Method
from leanbayes.report import AssessedRun
from leanbayes.training import Recipe, read_record
from leanbayes.training.progress import in_words, say


@dataclass(frozen=True)
class Job:
    """One method with one seed: to be trained into a folder, and looked at."""

    name: str
    method: Method
    recipe: Recipe
    task: Task
    folder: Path
    look: Look
    ood: tuple[str, ...] | None

    @property
    def place(self) -> Path:
        """Where the run goes."""
        return self.folder / as_file_name(f"{self.name}-{self.recipe.seed}")

    def __str__(self) -> str:
        return f"{self.name}, seed {self.recipe.seed}"


def do_all(jobs: Sequence[Job], data: Data, processes: int) -> list[AssessedRun]:
    """Do jobs one after the other in this process, or in several at once that share the machine's cores and GPUs."""
    done = _teller(jobs)
    if processes > 1:
        found = _in_processes(jobs, iter(range(len(jobs))), processes, done)
        return [found[number] for number in range(len(jobs))]
    runs = []
    with _terminated_as_interrupted():
        for job in jobs:
            runs.append(_do(job, data))
            done(runs[-1])
    return runs


def do_share(jobs: Sequence[Job], processes: int) -> list[AssessedRun]:
    """Do jobs under a launcher, each process taking the next that nobody has, and bring the runs of all together."""
    from torch.distributed.rendezvous import rendezvous

    store, rank, world = next(rendezvous("env://"))

    def taken() -> Iterator[int]:
        while (number := store.add("taken", 1) - 1) < len(jobs):
            yield number

    # The others may be training for days when this one is done.
    long = datetime.timedelta(days=30)
    torch.distributed.init_process_group("gloo", timeout=long, world_size=world, rank=rank, store=store)
    found = _in_processes(jobs, taken(), processes, _teller(jobs, lambda: store.add("done", 1)))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it waits for the others, Python would not see it
    every: list[dict[int, AssessedRun]] = [{}] * world
    torch.distributed.all_gather_object(every, found)
    runs = {number: run for some in every for number, run in some.items()}
    return [runs[number] for number in range(len(jobs))]


def do_together(jobs: Sequence[Job], data: Data) -> list[AssessedRun]:
    """Train each run with all processes of a launcher; then the first one looks at them, and the others have none."""
    for job in jobs:
        _train(job, data)
    if not is_first_process():
        return []
    done = _teller(jobs)
    runs = []
    for job in jobs:
        runs.append(_look(job, open_run(job.place, job.recipe.device), data))
        done(runs[-1])
    return runs


# -- one job ----------------------------------------------------------------------------------------------------------


def _do(job: Job, data: Data) -> AssessedRun:
    """Train, or take what is finished, and look at it."""
    bnn = _train(job, data)
    return _look(job, TrainedRun(job.place, bnn, read_record(job.place)), data)


def _train(job: Job, data: Data) -> BayesianModel:
    with _named(job):
        return train(prepare(job.task, job.recipe.seed, data), job.method, job.recipe, job.task, job.place)


def _look(job: Job, run: TrainedRun, data: Data) -> AssessedRun:
    task = job.task
    with _named(job):
        return look_at(
            run, data, job.look, job.ood, task.root, name=job.name, shown=not task.quiet, anew=task.overwrite
        )


@contextlib.contextmanager
def _named(job: Job) -> Iterator[None]:
    """Tell which of the runs has failed, or that one that was stopped goes on."""
    try:
        yield
    except LeanBayesError as error:
        raise LeanBayesError(f"{job}: {error}") from None
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(str(stop) or STOPPED) from None


def _in_processes(
    jobs: Sequence[Job], numbers: Iterator[int], processes: int, done: Callable[[AssessedRun], None]
) -> dict[int, AssessedRun]:
    quiet = [replace(job, task=replace(job.task, quiet=True)) for job in jobs]
    return side_by_side(_do_alone, quiet, numbers, processes, done)


def _do_alone(job: Job) -> AssessedRun:
    """Do a job in a process of its own, which reads the data once."""
    return _do(job, _data_of(job.task))


_data_of = functools.cache(load_data)


def _teller(jobs: Sequence[Job], count: Callable[[], int] | None = None) -> Callable[[AssessedRun], None]:
    """Return what tells of each run that is done, and which it is of all."""
    count = count or functools.partial(next, itertools.count(1))

    def tell(run: AssessedRun) -> None:
        text = f"{run.method}, seed {run.seed}: {in_words(run.scores)} ({count()} of {len(jobs)})"
        say(not jobs[0].task.quiet, text)

    return tell


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Take SIGTERM as Ctrl-C where no training does."""

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
