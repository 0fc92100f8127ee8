"""Many trainings: one after the other, in processes side by side, or shared out among the processes of a launcher."""

import contextlib
import datetime
import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from leanbayes.cli.looking import look_at
from leanbayes.cli.options import Task
from leanbayes.cli.runs import TrainedRun, as_file_name, load_data, prepare, train
from leanbayes.data import Data
from leanbayes.errors import LeanBayesError
from leanbayes.evaluation import Look
from leanbayes.method import Method
from leanbayes.report import AssessedRun
from leanbayes.training import Recipe, read_record

_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "ROLE_")

Done = Callable[[AssessedRun], None]


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


def do(job: Job, data: Data) -> AssessedRun:
    """Train, or take what is finished, and look at it."""
    bnn = train(prepare(job.task, job.recipe.seed, data), job.method, job.recipe, job.task, job.place)
    run = TrainedRun(job.place, bnn, read_record(job.place))
    return look_at(run, data, job.look, job.ood, job.task.root, job.name, shown=not job.task.quiet)


def do_all(jobs: Sequence[Job], data: Data, processes: int, done: Done) -> list[AssessedRun]:
    """Do jobs in this process, or in several at once that share the machine's cores and GPUs."""
    if processes == 1:
        finished = []
        for job in jobs:
            finished.append(do(job, data))
            done(finished[-1])
        return finished
    return list(_side_by_side(jobs, min(processes, len(jobs)), done))


def do_share(jobs: Sequence[Job], processes: int, done: Done) -> list[AssessedRun]:
    """Do this process's share of the jobs under a launcher, and bring the runs of all its processes together."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The others may be training for days when the first is done.
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(days=30))
    mine = jobs[rank::world]
    finished = list(_side_by_side(mine, min(processes, len(mine)), done)) if mine else []
    every: list[list[AssessedRun]] = [[] for _ in range(world)]
    torch.distributed.all_gather_object(every, finished)
    order = {(job.name, job.recipe.seed): place for place, job in enumerate(jobs)}
    return sorted((run for runs in every for run in runs), key=lambda run: order[run.method, run.seed])


# -- processes side by side -------------------------------------------------------------------------------------------


def _side_by_side(jobs: Sequence[Job], processes: int, done: Done) -> Iterator[AssessedRun]:
    """Give jobs to as many processes; they come back in the order of the jobs, and are told of as they are done."""
    context = multiprocessing.get_context("spawn")
    waiting, answers = context.Queue(), context.Queue()
    for number, job in enumerate(jobs):
        waiting.put((number, replace(job, task=replace(job.task, quiet=True))))
    threads = max(1, torch.get_num_threads() // processes)
    workers = []
    found: dict[int, AssessedRun] = {}
    try:
        with _terminated_as_interrupted():
            for place in range(processes):
                with _environment_of(place):
                    worker = context.Process(target=_work, args=(waiting, answers, threads), daemon=False)
                    worker.start()
                    workers.append(worker)
            while len(found) < len(jobs):
                number, answer = _next_answer(answers, workers)
                if isinstance(answer, BaseException):
                    raise answer
                found[number] = answer
                done(answer)
    finally:
        _end(workers, orderly=len(found) == len(jobs))
    return (found[number] for number in range(len(jobs)))


def _work(waiting: Any, answers: Any, threads: int) -> None:
    """Do jobs until there are none left; a failure is told, and ends this process."""
    torch.set_num_threads(threads)
    data: dict[Task, Data] = {}
    while True:
        try:
            number, job = waiting.get(timeout=1)
        except queue.Empty:
            return
        try:
            if job.task not in data:
                data[job.task] = load_data(job.task)
            answers.put((number, do(job, data[job.task])))
        except KeyboardInterrupt:
            return
        except LeanBayesError as error:
            answers.put((number, LeanBayesError(f"{job.name}, seed {job.recipe.seed}: {error}")))
            return


def _next_answer(answers: Any, workers: Sequence[Any]) -> tuple[int, Any]:
    while True:
        with contextlib.suppress(queue.Empty):
            return answers.get(timeout=0.5)
        failed = [worker for worker in workers if worker.exitcode not in (None, 0)]
        if failed:
            raise LeanBayesError(
                f"A process ended with code {failed[0].exitcode}, usually for lack of memory: use fewer --jobs. "
                "What is finished is kept, and the same command goes on."
            )
        if not any(worker.is_alive() for worker in workers) and answers.empty():
            raise KeyboardInterrupt("Stopped. The same command goes on from there.")


def _end(workers: Sequence[Any], orderly: bool) -> None:
    """Let the processes end; those that still train write a checkpoint first."""
    for worker in workers:
        if not orderly and worker.is_alive():
            worker.terminate()
    for worker in workers:
        worker.join()


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Take SIGTERM as Ctrl-C, so that the processes are told."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt("Stopped. The same command goes on from there.")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _environment_of(place: int) -> Iterator[None]:
    """Start a process that knows of no launcher, and sees one GPU of its own where there are several."""
    before = dict(os.environ)
    visible = [name for name in os.environ if name in _LAUNCHERS or name.startswith(_PREFIXES)]
    for name in visible:
        del os.environ[name]
    gpus = torch.cuda.device_count()
    if gpus > 1:
        names = before.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        first = int(before.get("LOCAL_RANK", 0))
        os.environ["CUDA_VISIBLE_DEVICES"] = names[(first + place) % gpus]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
