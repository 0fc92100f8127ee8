"""The folder of a run: `fit` touches only what a run wrote, and one process at a time trains in it."""

import errno
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from training_cases import expect, finish, run_mlp, start, stopped_at, together

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.core.files import LockedError, locked, remove_parts, written_whole
from leanbayes.training import read_record

MODEL = "model.safetensors"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(*paths: Path) -> dict[Path, bytes]:
    """Write some files of the user, and return their contents."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"not part of a run")
    return {path: path.read_bytes() for path in paths}


# -- files of the user ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_only_unfinished_files_of_a_run_are_removed(overwrite: bool, tmp_path: Path) -> None:
    with stopped_at(10):
        run_mlp(lb.MeanField(), tmp_path, checkpoint_steps=4)
    own = ["download.part", "run.json.part", "other.json.0123abcd.part", "run.json.0123abcg.part", "step-9.part/a"]
    own += ["checkpoints/movie.part", "checkpoints/best.part/a", "checkpoints/step-best/a", "tensorboard/mine.txt"]
    mine = write(*(tmp_path / name for name in own))
    left = ["run.json.0123abcd.part", f"{MODEL}.89abcdef.part", f"checkpoints/step-000000009.part/{MODEL}"]
    leftovers = write(*(tmp_path / name for name in left))
    run_mlp(lb.MeanField(), tmp_path, overwrite=overwrite)
    assert read_record(tmp_path)["status"] == "finished"
    assert {path: path.read_bytes() for path in mine} == mine
    assert not any(path.exists() for path in leftovers)


def test_a_file_that_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    writer = written_whole(tmp_path / "run.json")
    left = writer.__enter__()
    assert left.exists()
    remove_parts(tmp_path, ["model.safetensors"])
    assert left.exists()
    remove_parts(tmp_path, ["model.safetensors", "run.json"])
    assert not left.exists()
    write(left)
    writer.__exit__(None, None, None)


@pytest.mark.parametrize("name", ["checkpoints/best.pt", "tensorboard/events.out.tfevents.1", MODEL, "run.json"])
def test_a_folder_that_is_no_run_is_not_overwritten(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, tmp_path / "notes.txt")
    before = contents(tmp_path)
    expect(lambda: run_mlp(lb.MeanField(), tmp_path, overwrite=True), str(tmp_path), name.partition("/")[0], "run.json")
    assert contents(tmp_path) == before


def test_a_model_that_no_run_wrote_is_not_replaced(tmp_path: Path) -> None:
    mine = write(tmp_path / MODEL)
    expect(lambda: run_mlp(lb.MeanField(), tmp_path), MODEL, "choose another folder")
    assert contents(tmp_path) == mine


def test_overwriting_a_folder_without_a_run_trains(tmp_path: Path) -> None:
    mine = write(tmp_path / "notes.txt")
    run_mlp(lb.MeanField(), tmp_path, overwrite=True, epochs=1)
    assert read_record(tmp_path)["status"] == "finished"
    assert contents(tmp_path).items() >= mine.items()
    run_mlp(lb.MeanField(), tmp_path / "new", overwrite=True, epochs=1)


def test_overwriting_leaves_nothing_of_the_earlier_run(tmp_path: Path) -> None:
    run_mlp(lb.MeanField(), tmp_path, checkpoint_steps=5)
    before = contents(tmp_path)
    with stopped_at(0):
        run_mlp(lb.MeanField(), tmp_path, overwrite=True, checkpoint_steps=5)
    left = contents(tmp_path)
    assert not any(left.get(path) == content for path, content in before.items())
    assert not (tmp_path / "checkpoints").exists()


# -- names of folders -------------------------------------------------------------------------------------------------


def test_an_empty_name_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out: Any = ""
    expect(lambda: run_mlp(lb.MeanField(), out), "out=''", "folder")
    assert not list(tmp_path.iterdir())
    run_mlp(lb.MeanField(), Path(), epochs=1)  # the current folder, by its name
    assert read_record(".")["status"] == "finished"


@pytest.mark.parametrize("words", [["--out", ""], ["--out="], ["--config", "a.yaml"]], ids=" ".join)
def test_an_empty_name_on_the_command_line_is_no_folder(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("out: ''\n")
    command = ["fit", "deterministic", "--data", "toy", "--model", "mlp", "--epochs", "1", "--device", "cpu"]
    assert main([*command, *words]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "leanbayes: --out is empty: give a path, such as . for the current folder, or leave it out."
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]


@pytest.mark.parametrize("below", ["", "run", "more/runs"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_no_folder(below: str, overwrite: bool, tmp_path: Path) -> None:
    mine = write(tmp_path / "file")
    message = expect(lambda: run_mlp(lb.MeanField(), tmp_path / "file" / below, overwrite=overwrite), "give a folder")
    assert message.startswith(f"{tmp_path / 'file'} is a file")
    assert contents(tmp_path) == mine


# -- a full disk ------------------------------------------------------------------------------------------------------


def test_the_reason_of_the_system_is_quoted_alone(tmp_path: Path) -> None:
    def write_in_vain(error: OSError) -> None:
        with written_whole(tmp_path / "file"):
            raise error

    full = os.strerror(errno.ENOSPC)
    by_safetensors = OSError(f"Error while serializing: I/O error: {full} (os error {errno.ENOSPC})")
    for error in (OSError(errno.ENOSPC, full), by_safetensors):
        message = expect(lambda error=error: write_in_vain(error), f"({full})")  # type: ignore[misc]
        assert "I/O error" not in message
    assert not list(tmp_path.iterdir())


# -- two processes in one folder --------------------------------------------------------------------------------------

LONG: dict[str, Any] = {"epochs": 5000, "checkpoint_steps": 20}


def wait_for_checkpoint(out: Path, process: BaseProcess) -> None:
    end = time.monotonic() + 60
    while not list(out.glob("checkpoints/step-*[0-9]")):
        assert process.is_alive()
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_training_in_a_folder_raises_an_error(overwrite: bool, tmp_path: Path) -> None:
    first = start(run_mlp, lb.MeanField(), tmp_path, **LONG)
    try:
        wait_for_checkpoint(tmp_path, first)
        words = str(tmp_path), f"process {first.pid}", "another folder"
        expect(lambda: run_mlp(lb.MeanField(), tmp_path, overwrite=overwrite, **LONG), *words)
        assert first.is_alive()
    finally:
        first.kill()
        first.join()
    with stopped_at(1):  # the lock ends with its process
        run_mlp(lb.MeanField(), tmp_path, overwrite=overwrite, **LONG)
    assert not list(tmp_path.glob("*.lock"))


def test_two_processes_of_one_run_share_its_folder(tmp_path: Path) -> None:
    processes = together(run_mlp, 2, lb.MeanField(), tmp_path, epochs=1)
    assert [finish(process) for process in processes] == [0, 0]
    assert not list(tmp_path.glob("*.lock"))
    with locked(tmp_path / "run.lock"):
        processes = together(run_mlp, 2, lb.MeanField(), tmp_path, epochs=1, overwrite=True)
        assert [finish(process) for process in processes] == [3, 3]  # both raise a LeanBayesError
        run_mlp(lb.MeanField(), tmp_path, epochs=1, accumulate=2)  # a finished run can be loaded by anyone
    assert read_record(tmp_path)["status"] == "finished"


def test_a_lock_ends_with_its_process_even_if_a_fork_of_it_lives_on(tmp_path: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from leanbayes.core.files import locked
with locked(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
"""
    path = tmp_path / "lock"
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(LockedError) as raised, locked(path):
                pass
            assert raised.value.process == holder.pid
            holder.kill()
            holder.wait()
            with locked(path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)
            holder.stdout.close()
    assert not path.exists()


def test_a_lock_is_released_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(RuntimeError, match="reason"), locked(path):
        raise RuntimeError("reason")
    with locked(path), pytest.raises(LockedError), locked(path):
        pass
    assert not path.exists()


# -- a closed terminal ------------------------------------------------------------------------------------------------

COMMAND = "fit mean-field --data digits --model mlp --epochs 3000 --checkpoint-steps 50 --device cpu --out"


@pytest.mark.parametrize("nohup", [False, True])
def test_closing_the_terminal_writes_a_checkpoint(nohup: bool, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process, terminal = pty.fork()
    if process == 0:
        if nohup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "leanbayes", *COMMAND.split(), str(out)])
    try:
        end = time.monotonic() + 60
        while not list(out.glob("checkpoints/step-*[0-9]")):
            assert time.monotonic() < end
            if select.select([terminal], [], [], 0.1)[0]:
                os.read(terminal, 65536)
        os.close(terminal)
        if nohup:
            time.sleep(1)
            assert os.waitpid(process, os.WNOHANG) == (0, 0)
            assert read_record(out)["status"] == "running"
        else:
            while os.waitpid(process, os.WNOHANG) == (0, 0):
                assert time.monotonic() < end
                time.sleep(0.05)
            process = 0
            assert read_record(out)["status"] == "stopped"
            assert any(int(path.name.removeprefix("step-")) % 50 for path in out.glob("checkpoints/*"))
    finally:
        if process:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        shutil.rmtree(out, ignore_errors=True)
