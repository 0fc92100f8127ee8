"""Worker processes: each does one item of work after the other, and all of them stop when this process stops."""

import _thread
import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from leanbayes.cli.console import one_line_warnings
from leanbayes.errors import LeanBayesError
from leanbayes.training.stopping import StopSignals

STOPPED = "Stopped; run the same command again to continue."
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "ROLE_")
_KEPT = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")  # how to train, not with which processes


@dataclass(frozen=True)
class _Worker:
    """A process. `pipe` carries items and answers. It stops when `leash` is closed, also by the end of this process."""

    process: BaseProcess
    pipe: Connection
    leash: Connection

    def answer(self, item: Any) -> Any:
        """Return the answer to an item."""
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            raise LeanBayesError(f"{item}: {_how_it_ended(self.process.exitcode)}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def side_by_side(
    function: Callable[[Any], Any],
    items: Sequence[Any],
    numbers: Iterator[int],
    processes: int,
    done: Callable[[Any], None],
) -> dict[int, Any]:
    """Call a function of a module on some of the items, in several processes, and return the answers by number.

    Ctrl-C and SIGTERM reach the workers as one Ctrl-C.

    Args:
        function: The function, which is called with one item.
        items: All items.
        numbers: The numbers of the items to do.
        processes: How many processes to use.
        done: Called with each answer.
    """
    answers: dict[int, Any] = {}
    first = list(itertools.islice(numbers, processes))
    if not first:
        return answers
    at_work: dict[Any, tuple[_Worker, int]] = {}

    def give_work(worker: _Worker, number: int) -> None:
        with contextlib.suppress(OSError):  # if the process has ended, `answer` reports it
            worker.pipe.send(items[number])
        at_work[worker.pipe] = worker, number

    # A launcher sends signals repeatedly, which does not mean that the processes should stop at once.
    with StopSignals(True, repeated="WORLD_SIZE" in os.environ) as stop, _started(function, len(first)) as workers:
        for worker, number in zip(workers, first, strict=True):
            give_work(worker, number)
        while at_work:
            for pipe in wait([*at_work], timeout=0.2):
                worker, number = at_work.pop(pipe)
                answers[number] = worker.answer(items[number])
                done(answers[number])
                for next_number in itertools.islice(numbers, 1):
                    give_work(worker, next_number)
            if stop.received:
                raise KeyboardInterrupt(STOPPED)
    return answers


@contextlib.contextmanager
def _started(function: Callable[[Any], Any], processes: int) -> Iterator[list[_Worker]]:
    """Start processes. If the block fails, stop their work, and let them write checkpoints."""
    workers: list[_Worker] = []
    threads = max(1, torch.get_num_threads() // processes)
    try:
        for place in range(processes):
            workers.append(_start(function, threads, place))
        yield workers
        _end(workers)
    except BaseException:
        for worker in workers:
            worker.leash.close()
        _end(workers)
        raise


def _end(workers: Sequence[_Worker]) -> None:
    """Wait until all processes have ended. Ctrl-C during this kills them, without checkpoints."""
    try:
        for worker in workers:
            worker.pipe.close()
        for worker in workers:
            worker.process.join()
    except KeyboardInterrupt:
        for worker in workers:
            worker.process.kill()
        raise


def _start(function: Callable[[Any], Any], threads: int, place: int) -> _Worker:
    context = multiprocessing.get_context("spawn")
    pipe, other_pipe = context.Pipe()
    other_leash, leash = context.Pipe(duplex=False)
    method = multiprocessing.get_start_method()
    process = context.Process(target=_work, args=(function, threads, method, other_pipe, other_leash))
    resource_tracker.ensure_running()  # otherwise it would start with the process, and unblock the signals
    with _environment_of(place), _signals_blocked():
        process.start()
    other_pipe.close()
    other_leash.close()
    return _Worker(process, pipe, leash)


def _work(function: Callable[[Any], Any], threads: int, start_method: str, pipe: Connection, leash: Connection) -> None:
    """Do the items that come through the pipe, until it is closed.

    This process starts with signals blocked: only the leash stops its work, and only once. A training takes a second
    signal to mean that there is no time for a checkpoint.
    """
    torch.set_num_threads(threads)
    # Otherwise the processes that read data would be spawned, and import torch again in every epoch.
    multiprocessing.set_start_method(start_method, force=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=_watch, args=(leash,), daemon=True).start()
        with one_line_warnings():
            while True:
                try:
                    item = pipe.recv()
                except (EOFError, OSError):
                    return
                try:
                    answer = function(item)
                except (LeanBayesError, ModuleNotFoundError) as error:
                    answer = error
                with contextlib.suppress(OSError):  # the parent process is gone
                    pipe.send(answer)
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _watch(leash: Connection) -> None:
    """Interrupt the main thread, as Ctrl-C does, when the leash is closed."""
    with contextlib.suppress(EOFError, OSError):
        leash.recv()
    _thread.interrupt_main()


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        how = f"its process was killed (signal {-code}), often because memory ran out: use fewer --jobs"
    else:
        how = f"its process ended with code {code}: its messages above say why"
    return f"{how}. Finished runs are stored, and the same command continues."


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment_of(place: int) -> Iterator[None]:
    """Hide the launcher from a process, and if there are several GPUs, all but one."""
    before = dict(os.environ)
    for name in before:
        if name in _OF_LAUNCHERS or (name.startswith(_PREFIXES) and name not in _KEPT):
            del os.environ[name]
    gpus = torch.cuda.device_count()
    if gpus > 1:
        names = before.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = names[(int(before.get("LOCAL_RANK", 0)) + place) % gpus]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
