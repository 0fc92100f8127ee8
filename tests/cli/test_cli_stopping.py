"""Ctrl-C and SIGTERM: the step is finished, a checkpoint is written, and the same command continues."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_cases import ENVIRONMENT, TINY, Cli, Output, must_not_train

from leanbayes.cli import main
from leanbayes.training import read_record
from leanbayes.training.loop import Loop
from leanbayes.training.run import Run

STOPPED = ("fit", "mean-field", "--data", "toy", "--epochs", 2, "--model-options", "hidden=[8]", "--log-every", 4)
STEPS = 50

# The program, with a seventh step that waits for a signal.
SLOW = """
import runpy, sys, time
from pathlib import Path
from leanbayes.training.loop import Loop

step = Loop._step

def slow(self, parts):
    step(self, parts)
    if self._journal.steps_done == 7:
        Path("seventh").touch()
        while not self._stop.received:
            time.sleep(0.01)

Loop._step = slow
sys.argv[0] = "leanbayes"
runpy.run_module("leanbayes", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training, without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main([str(word) for word in (*STOPPED, "--quiet", "--out", folder)]) == 0
    return folder


def assert_same_run(one: Path, other: Path) -> None:
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    first, second = read_record(one), read_record(other)
    assert first["status"] == second["status"] == "finished"
    assert first["scores"] == second["scores"]
    assert first["config"] == second["config"]
    curves = [
        [{key: entry[key] for key in entry.keys() - {"seconds", "examples_per_second"}} for entry in record["history"]]
        for record in (first, second)
    ]
    assert curves[0] == curves[1]


def check_stopped(folder: Path, output: Output, step: int) -> None:
    assert output.code == 130
    assert output.out == ""
    assert re.fullmatch(
        rf"MeanField on toy: 810 examples, [^\n]* in {folder}\n"
        rf"leanbayes: Stopped at step {step}; run the same command again to continue\.\n",
        output.err,
    ), output.err
    assert read_record(folder)["status"] == "stopped"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{step:09d}"]
    assert not (folder / "model.safetensors").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_program_with_a_checkpoint_and_it_continues(
    number: signal.Signals, cli: Cli, whole: Path
) -> None:
    words = [sys.executable, "-c", SLOW, *map(str, STOPPED), "--out", "a"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        end = time.monotonic() + 60
        while not Path("seventh").exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        assert not Path("a/checkpoints").exists()
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    check_stopped(Path("a"), Output(process.returncode, out, err), 7)
    output = cli(*STOPPED, "--out", "a")
    assert output.err.startswith(f"MeanField on toy: 810 examples, continuing from step 7 of {STEPS} in a\n")
    assert_same_run(Path("a"), whole)


def test_a_signal_to_all_processes_does_not_stop_reading_data(pets: Path) -> None:
    """A cluster also sends it to the processes that read data."""
    words = [sys.executable, "-c", SLOW, "fit", "deterministic", "--data", str(pets), "--resize", "16", "16"]
    words += ["--model", "small-cnn", "--workers", "2", "--batch-size", "1", "--validation-share", "0.5"]
    words += ["--epochs", "100", "--out", "a"]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    )
    try:
        end = time.monotonic() + 60
        while not Path("seventh").exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "leanbayes: Stopped at step 7; run the same command again to continue."
    assert [path.name for path in Path("a/checkpoints").iterdir()] == ["step-000000007"]


class Signals:
    """Sends signals to this process during a step of a training, or after its last step."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch, self._step, self._finish = patch, Loop._step, Run._finish
        assert threading.current_thread() is threading.main_thread()  # only this thread handles signals

    def within(self, step: int, *numbers: int) -> None:
        def interrupted(loop: Loop, parts: Any) -> None:
            if loop._journal.steps_done == step - 1:
                for number in numbers:
                    signal.raise_signal(number)
            self._step(loop, parts)

        self._patch.setattr(Loop, "_step", interrupted)

    def when_finishing(self, number: int) -> None:
        def interrupted(*args: Any) -> None:
            signal.raise_signal(number)
            self._finish(*args)

        self._patch.setattr(Run, "_finish", interrupted)

    def no_more(self) -> None:
        self._patch.undo()


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Signals]:
    """Check that the handlers are restored, and keep SIGTERM from ending pytest."""

    def uncaught(number: int, frame: Any) -> None:
        raise AssertionError("SIGTERM was not caught")

    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: uncaught}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    with monkeypatch.context() as patch:
        yield Signals(patch)
    left = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert left == usual


@pytest.mark.parametrize(
    ("step", "number"),
    # The first step, the last of an epoch, one in an epoch, and the very last.
    [(1, signal.SIGTERM), (25, signal.SIGINT), (33, signal.SIGTERM), (STEPS, signal.SIGINT)],
)
def test_a_signal_is_handled_after_the_step(step: int, number: int, cli: Cli, whole: Path, signals: Signals) -> None:
    signals.within(step, number)
    check_stopped(Path("a"), cli(*STOPPED, "--out", "a", code=130), step)
    signals.no_more()
    assert f"continuing from step {step} of {STEPS} in a\n" in cli(*STOPPED, "--out", "a").err
    assert_same_run(Path("a"), whole)


def test_a_run_may_be_stopped_several_times(cli: Cli, whole: Path, signals: Signals) -> None:
    for step in (3, 4, 40):
        signals.within(step, signal.SIGINT)
        assert f"Stopped at step {step};" in cli(*STOPPED, "--out", "a", "--quiet", code=130).err
        assert (Path("a/checkpoints") / f"step-{step:09d}").is_dir()
    signals.no_more()
    cli(*STOPPED, "--out", "a", "--quiet")
    assert_same_run(Path("a"), whole)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(second: int, cli: Cli, whole: Path, signals: Signals) -> None:
    signals.within(20, signal.SIGINT, second)
    output = cli(*STOPPED, "--out", "a", "--quiet", "--checkpoint-steps", 8, code=130)
    assert output.err == "leanbayes: Stopped.\n"
    assert [path.name for path in sorted(Path("a/checkpoints").iterdir())] == ["step-000000008", "step-000000016"]
    signals.no_more()
    assert f"continuing from step 16 of {STEPS}" in cli(*STOPPED, "--out", "a").err
    assert_same_run(Path("a"), whole)


def test_a_signal_stops_a_comparison_and_it_continues(cli: Cli, signals: Signals) -> None:
    words = ("compare", "deterministic", "ensemble:members=2", *TINY, "--out", "a")
    signals.within(5, signal.SIGINT)
    assert cli(*words, code=130).err == "leanbayes: Stopped at step 5; run the same command again to continue.\n"
    assert sorted(path.name for path in Path("a").iterdir()) == ["deterministic-0"]
    signals.no_more()
    assert re.search(r"^ensemble:members=2 +\d", cli(*words).out, re.MULTILINE)
    before = Path("a/compare.json").read_bytes()
    assert len(json.loads(before)["results"]) == 2
    signals.within(5, signal.SIGTERM)
    cli(*words, "--seeds", 2, code=130)
    assert Path("a/compare.json").read_bytes() == before  # it is replaced only by a complete one


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_an_evaluation_and_it_continues(
    number: int, cli: Cli, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("compare", "deterministic", *TINY, "--out", "a")
    with monkeypatch.context() as patch:
        patch.setattr("leanbayes.cli.evaluations.evaluated", lambda *args, **kwargs: signal.raise_signal(number))
        assert cli(*words, code=130).err == "leanbayes: Stopped; run the same command again to continue.\n"
    assert not Path("a/deterministic-0/evaluation.json").exists()
    monkeypatch.setattr(Loop, "run", must_not_train)
    cli(*words)


def test_a_signal_between_two_methods_is_not_lost(cli: Cli, signals: Signals) -> None:
    signals.when_finishing(signal.SIGINT)
    output = cli("compare", "deterministic", "ensemble:members=2", *TINY, "--out", "a", code=130)
    assert re.fullmatch(r"leanbayes: Stopped[^\n]*\.\n", output.err)
    assert not Path("a/ensemble-members=2-0").exists()


def test_a_signal_at_the_end_of_a_run_loses_nothing(cli: Cli, whole: Path, signals: Signals) -> None:
    signals.when_finishing(signal.SIGINT)
    output = cli(*STOPPED, "--quiet", "--out", "a", code=130)
    assert re.fullmatch(r"leanbayes: Stopped[^\n]*\.\n", output.err)
    signals.no_more()
    assert f"continuing from step {STEPS} of {STEPS}" in cli(*STOPPED, "--out", "a").err
    assert_same_run(Path("a"), whole)
