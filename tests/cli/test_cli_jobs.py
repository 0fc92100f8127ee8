"""Runs of a comparison in parallel: in worker processes, and distributed over the processes of a launcher."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from cli_cases import ENVIRONMENT, TINY, Cli, Output, must_not_train, run_main, without_times
from training_cases import finish, together

from leanbayes.cli import main
from leanbayes.cli.workers import _environment_of, side_by_side
from leanbayes.training import read_record
from leanbayes.training.loop import Loop

METHODS = ("deterministic", "mean-field:samples=2")
RUNS = ("deterministic-0", "mean-field-samples=2-0")
WORDS = ("compare", *METHODS, *(word for word in TINY if word != "--quiet"))
ENDLESS = ("compare", *METHODS, *TINY, "--epochs", 1_000_000, "--jobs", 2, "--out", "a")


def results_in(folder: str | Path) -> Any:
    """The results without times."""
    return without_times(json.loads(Path(folder, "compare.json").read_text())["results"])


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """With more threads, sums have another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs, one after the other."""
    folder = tmp_path_factory.mktemp("alone") / "a"
    assert main([str(word) for word in ("compare", *METHODS, *TINY, "--seeds", 2, "--out", folder)]) == 0
    return folder


def workers_of(parent: int) -> list[int]:
    """The running worker processes of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, father = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(father) == parent and state != "Z" and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has just ended
            continue
    return sorted(found)


def wait_until(there: Callable[[], Any], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not there() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(there())


def status_of(run: str) -> str:
    try:
        return str(read_record(Path("a", run))["status"])
    except ValueError:  # it does not exist yet
        return ""


# -- worker processes -------------------------------------------------------------------------------------------------


def test_a_failed_run_is_named_and_finished_runs_are_kept(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("compare", "deterministic", "mean-field:init_std=1e30", *TINY, "--out", "a")
    for jobs in (2, 1):
        output = cli(*words, "--jobs", jobs, code=1)
        pattern = r"leanbayes: mean-field:init_std=1e30, seed 0: [^\n]*loss is (inf|nan)[^\n]*lower[^\n]*\.\n"
        assert re.fullmatch(pattern, output.err), output.err
        assert output.out == ""
    assert not Path("a/compare.json").exists()
    monkeypatch.setattr(Loop, "run", must_not_train)
    assert re.search(r"^deterministic +\d", cli("compare", "deterministic", *TINY, "--out", "a").out, re.MULTILINE)


def start_method(item: int) -> tuple[int, str]:
    return item, multiprocessing.get_start_method()


def test_workers_keep_the_start_method() -> None:
    """Otherwise the processes that read data would be spawned, and import torch again in every epoch."""
    done: list[Any] = []
    found = side_by_side(start_method, [7, 8, 9], iter([0, 2]), 2, done.append)
    expected = {0: (7, multiprocessing.get_start_method()), 2: (9, multiprocessing.get_start_method())}
    assert found == expected
    assert sorted(done) == sorted(expected.values())


@pytest.fixture
def when_training() -> Iterator[Callable[[Callable[[list[int]], None]], None]]:
    """Call a function with the workers of this process when two of them train; at the end none may be left."""
    assert threading.current_thread() is threading.main_thread()  # only this thread handles signals
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def act(what: Callable[[list[int]], None]) -> None:
        if wait_until(lambda: [status_of(run) for run in RUNS] == ["running"] * 2):
            what(workers_of(os.getpid()))
        if not ended.wait(60):  # otherwise this test would wait forever
            for worker in workers_of(os.getpid()):
                os.kill(worker, signal.SIGKILL)

    def start(what: Callable[[list[int]], None]) -> None:
        threads.append(threading.Thread(target=act, args=(what,)))
        threads[-1].start()

    yield start
    ended.set()
    for thread in threads:
        thread.join()
    assert workers_of(os.getpid()) == []


def check_stopped(run: str) -> None:
    assert status_of(run) == "stopped"
    assert len(list(Path("a", run, "checkpoints").glob("step-*"))) == 1
    assert not Path("a", run, "model.safetensors").exists()


def test_a_killed_process_is_reported_and_the_others_stop(cli: Cli, when_training: Any) -> None:
    when_training(lambda workers: os.kill(workers[0], signal.SIGKILL))
    output = cli(*ENDLESS, code=1)
    killed = next(name for name, run in zip(METHODS, RUNS, strict=True) if status_of(run) == "running")
    assert output.err == (
        f"leanbayes: {killed}, seed 0: its process was killed (signal 9), often because memory ran out: use fewer "
        "--jobs. Finished runs are stored, and the same command continues.\n"
    )
    check_stopped(next(run for name, run in zip(METHODS, RUNS, strict=True) if name != killed))


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Keep SIGTERM from ending pytest, and check that its handler is restored."""

    def uncaught(number: int, frame: Any) -> None:
        raise AssertionError("SIGTERM was not caught")

    before = signal.signal(signal.SIGTERM, uncaught)
    yield
    assert signal.signal(signal.SIGTERM, before) is uncaught


@pytest.mark.usefixtures("sigterm")
def test_a_signal_to_the_first_process_stops_all_with_checkpoints(cli: Cli, when_training: Any) -> None:
    when_training(lambda workers: os.kill(os.getpid(), signal.SIGTERM))
    assert cli(*ENDLESS, code=130).err == "leanbayes: Stopped; run the same command again to continue.\n"
    for run in RUNS:
        check_stopped(run)


@pytest.mark.usefixtures("sigterm")
def test_a_second_signal_does_not_wait_for_checkpoints(cli: Cli, when_training: Any) -> None:
    def stop_twice(workers: list[int]) -> None:
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)  # it never writes its checkpoint
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            time.sleep(1)

    when_training(stop_twice)
    assert re.fullmatch(r"leanbayes: Stopped[^\n]*\.\n", cli(*ENDLESS, code=130).err)
    for run in RUNS:
        assert not list(Path("a", run).glob("checkpoints/step-*"))


# The program, whose seventh steps wait for a signal; its worker processes import this file, too.
SLOW = """
import os, sys, time
from pathlib import Path
from leanbayes.cli import main
from leanbayes.training.loop import Loop

step = Loop._step

def slow(self, parts):
    step(self, parts)
    if self._journal.steps_done == 7:
        Path(f"seventh-{os.getpid()}").touch()
        while not self._stop.received:
            time.sleep(0.01)
        for _ in range(100):  # long enough for a second signal, if there were one
            time.sleep(0.01)

Loop._step = slow
if __name__ == "__main__":
    sys.exit(main())
"""


class Program:
    """The slow program as the leader of a process group, when both of its workers are in their seventh step."""

    def __init__(self) -> None:
        Path("program.py").write_text(SLOW)
        self._process = subprocess.Popen(
            [sys.executable, "program.py", *map(str, WORDS), "--seeds", "2", "--jobs", "2", "--out", "a"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        self._workers: list[int] = []

    def __enter__(self) -> Self:
        wait_until(lambda: len(list(Path().glob("seventh-*"))) == 2 or self._process.poll() is not None)
        self._workers = workers_of(self._process.pid)
        return self

    def __exit__(self, *error: object) -> None:
        for process in (*self._workers, self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.communicate()

    def interrupt(self) -> None:
        """Press Ctrl-C, which reaches the whole group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def end(self) -> Output:
        out, err = self._process.communicate(timeout=60)
        assert len(self._workers) == 2, err
        assert not any(Path(f"/proc/{worker}").exists() for worker in self._workers)
        return Output(self._process.returncode, out, err)


def test_ctrl_c_stops_all_processes_with_checkpoints_and_the_same_command_continues(cli: Cli, alone: Path) -> None:
    with Program() as program:
        program.interrupt()
        assert program.end() == (130, "", "leanbayes: Stopped; run the same command again to continue.\n")
    for run in RUNS:
        check_stopped(run)
        assert Path("a", run, "checkpoints", "step-000000007").is_dir()
    output = cli(*WORDS, "--seeds", 2, "--jobs", 2, "--out", "a")
    # Two runs were continued and two are new, and all are the same as if trained one after the other.
    assert results_in("a") == results_in(alone)
    for model in alone.glob("*/model.safetensors"):
        assert Path("a", model.parent.name, model.name).read_bytes() == model.read_bytes()
    lines = output.err.splitlines()
    assert len(lines) == 4
    for number, line in enumerate(lines, start=1):
        assert re.fullmatch(rf"\S+, seed [01]: RMSE [\d.]+, NLL [\d.]+ \({number} of 4\)", line)
    reported = {line.partition(": RMSE")[0] for line in lines}
    assert reported == {f"{name}, seed {seed}" for name in METHODS for seed in (0, 1)}
    assert workers_of(os.getpid()) == []


# -- launchers --------------------------------------------------------------------------------------------------------


def test_torchrun_distributes_the_runs(cli: Cli, alone: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "leanbayes"]
    words = [*WORDS, "--seeds", 2, "--device", "cpu", "--out", "a"]
    environment = {
        name: value for name, value in ENVIRONMENT.items() if name != "PYTHONWARNINGS"
    }  # torchrun gives some itself
    done = subprocess.run(
        [*launch, *map(str, words)], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert results_in("a") == results_in(alone)
    assert done.stdout == cli(*words).out  # printed from the same files, and only once
    found = re.findall(r"(\S+, seed \d): RMSE [\d.]+, NLL [\d.]+ \((\d) of 4\)", done.stderr)
    assert {name for name, _ in found} == {f"{name}, seed {seed}" for name in METHODS for seed in (0, 1)}
    assert sorted(number for _, number in found) == ["1", "2", "3", "4"]
    for run in Path("a").glob("*/run.json"):
        assert read_record(run.parent)["config"]["parts_of_a_batch"] == 1


def by_two(*words: object) -> list[str]:
    """Run a command in two processes of one group, and return what each printed."""
    folder = Path.cwd()
    processes = together(run_main, 2, [str(word) for word in words], folder)
    assert [finish(process) for process in processes] == [0, 0]
    return [(folder / f"{rank}.out").read_text() for rank in range(2)]


def test_there_may_be_fewer_runs_than_processes(cli: Cli, alone: Path) -> None:
    words = ("compare", "deterministic", *TINY, "--out", Path("a").resolve())
    first, second = by_two(*words)
    assert second == ""
    assert first == cli(*words).out
    assert results_in("a") == results_in(alone)[:1]


def test_together_trains_each_run_with_all_processes(cli: Cli) -> None:
    words = ("compare", *METHODS, *TINY, "--optimizer", "sgd", "--lr", 0.01)
    first, second = by_two(*words, "--together", "--out", Path("a").resolve())
    assert second == ""
    assert first.count("deterministic ") == 2  # a row of its own is with temperature
    cli(*words, "--accumulate", 2, "--out", "b")
    for run in RUNS:
        assert read_record(Path("a", run))["config"]["parts_of_a_batch"] == 2
    for one, other in zip(results_in("a"), results_in("b"), strict=True):
        assert one["scores"] == pytest.approx(other["scores"], rel=1e-4)
        assert one["scores"]["examples"] == 100


def test_workers_do_not_see_the_launcher_and_have_their_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x", "ACCELERATE_USE_FSDP": "1"}
    kept = {"ACCELERATE_MIXED_PRECISION": "bf16", "OMP_NUM_THREADS": "1"}
    for name, value in {**launcher, **kept, "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    before = dict(os.environ)
    for gpus, given, expected in (
        (0, None, [None, None, None]),
        (1, "7", ["7", "7", "7"]),
        (3, None, ["1", "2", "0"]),
        (2, "4,6", ["6", "4", "6"]),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=gpus: count)
        if given:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
            before["CUDA_VISIBLE_DEVICES"] = given
        elif "CUDA_VISIBLE_DEVICES" in before:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
            del before["CUDA_VISIBLE_DEVICES"]
        for place, seen in enumerate(expected):
            with _environment_of(place):
                assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen
                assert not {*launcher, "LOCAL_RANK"} & os.environ.keys()
                assert {name: os.environ[name] for name in kept} == kept
            assert dict(os.environ) == before
