"""Whatever stops a training, the same call goes on and ends with the same bits; a checkpoint is whole or not there."""

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training_cases import (
    SETTINGS,
    Jittered,
    Staged,
    Swapping,
    assert_equal_models,
    clusters,
    conv,
    curve,
    expect,
    finish,
    mlp,
    models_equal,
    pictures,
    run_conv,
    run_mlp,
    run_on_a_full_disk,
    run_signalled,
    run_until_killed,
    run_wide,
    start,
    stopped_at,
    task,
    without_nan,
)

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.data import Augment, from_datasets
from leanbayes.methods import METHODS
from leanbayes.training import fit, read_record

# More workers than cores, which torch warns of on a small machine, are the same to these tests.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MODEL = "model.safetensors"


def checkpoints(out: Path) -> list[str]:
    folder = out / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def same_run(found: Path, expected: Path) -> None:
    """Two runs have the same model, byte by byte, and the same history but for the clock."""
    assert (found / MODEL).read_bytes() == (expected / MODEL).read_bytes()
    one, other = read_record(found), read_record(expected)
    assert curve(one) == curve(other)
    assert without_nan(one["scores"]) == without_nan(other["scores"])
    assert one["status"] == other["status"] == "finished"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that nothing has stopped, to compare with."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_mlp(lb.MeanField(), folder)
    return folder


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


# -- killed -----------------------------------------------------------------------------------------------------------


def kill_at_moments(begin: Callable[[], BaseProcess], out: Path, moments: list[tuple[int, float]]) -> int:
    """Start a training again and again, and kill it so long after so many steps are in a checkpoint."""
    kills = 0
    for steps, delay in moments:
        process = begin()
        while process.is_alive() and not any(name >= f"step-{steps:09d}" for name in checkpoints(out)):
            time.sleep(0.001)
        time.sleep(delay)
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert finish(begin()) == 0
    return kills


KILLED: dict[str, Callable[[Path], BaseProcess]] = {
    "conv, sgd": lambda out: start(run_conv, "sgd", out, checkpoint_steps=3, epochs=8),
    "conv, adamw": lambda out: start(run_conv, "adamw", out, checkpoint_steps=3, epochs=8),
    "ensemble": lambda out: start(run_mlp, lb.Ensemble(2), out, checkpoint_steps=3),
    "staged": lambda out: start(run_mlp, Staged(), out, checkpoint_steps=3),
    "swapping": lambda out: start(run_mlp, Swapping(), out, checkpoint_steps=3),
}


@pytest.mark.parametrize("case", KILLED)
def test_a_training_killed_again_and_again_ends_with_the_same_bytes(case: str, tmp_path: Path) -> None:
    assert finish(KILLED[case](tmp_path / "whole")) == 0
    chosen = random.Random(case)
    moments = [(steps, 0.03 * chosen.random()) for steps in sorted(chosen.sample(range(1, 24), 4))]
    kills = kill_at_moments(lambda: KILLED[case](tmp_path / "killed"), tmp_path / "killed", moments)
    assert kills >= 2  # a training that is done before it can be killed may happen on a busy machine
    same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_training_killed_at_any_moment_of_its_writing_ends_with_the_same_bytes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint_steps": 10, "keep": 1, "epochs": 2}
    run_mlp(lb.MeanField(), tmp_path / "whole", **settings)
    killed, halves = 0, []
    for call in range(1, 200, 3):
        out = tmp_path / str(call)
        code = finish(start(run_until_killed, call, bool(call % 2), lb.MeanField(), out, **settings))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        killed += 1
        whole = [name for name in checkpoints(out) if not name.endswith(".part")]
        if whole:
            lb.load(out / "checkpoints" / whole[-1] / MODEL, mlp())
        halves += [name for name in whole if len(list((out / "checkpoints" / name).iterdir())) < 2]
        run_mlp(lb.MeanField(), out, **settings)
        same_run(out, tmp_path / "whole")
        assert not list((out / "checkpoints").glob("*.part"))
    assert killed > 8
    assert not halves


def test_the_same_command_goes_on_after_a_kill(tmp_path: Path) -> None:
    def words(out: Path) -> list[str]:
        return ["fit", "mean-field", "--data", "digits", "--epochs", "2", "--model", "mlp", "--checkpoint-steps", "7",
                "--out", str(out), "--quiet", "--device", "cpu"]  # fmt: skip

    def begin(out: Path) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "leanbayes", *words(out)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with begin(tmp_path / "killed") as process:
        while process.poll() is None and len(checkpoints(tmp_path / "killed")) < 2:
            time.sleep(0.001)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert read_record(tmp_path / "killed")["status"] == "running"
    with begin(tmp_path / "killed") as process:
        assert main(words(tmp_path / "whole")) == 0  # meanwhile, without a stop
        _, error = process.communicate()
    assert process.returncode == 0, error
    same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_met_after_the_step_with_a_checkpoint(number: int, tmp_path: Path, whole: Path) -> None:
    assert finish(start(run_signalled, number, 9, tmp_path / "stopped")) == 0
    assert "step 10" in (tmp_path / "stopped" / "said.txt").read_text()
    assert checkpoints(tmp_path / "stopped") == ["step-000000010"]
    run_mlp(lb.MeanField(), tmp_path / "stopped")
    same_run(tmp_path / "stopped", whole)


# -- stopped by an error ----------------------------------------------------------------------------------------------

STREAMED: dict[str, Any] = {"checkpoint_steps": 2, "epochs": 2, "accumulate": 2, "batch_size": 16}


def run_streamed(method: lb.Method, out: Path, **settings: Any) -> lb.BayesianModel:
    """Images that are read one by one and jittered, and cropped at random on top."""
    data = from_datasets(Jittered(pictures(64)), outputs=4, augment=Augment(crop=1))
    return fit(conv(), method, data, out=out, **{**SETTINGS, **STREAMED, **settings})


@pytest.mark.parametrize("name", METHODS)
def test_every_method_goes_on_bit_by_bit_on_streamed_data(name: str, tmp_path: Path) -> None:
    method = METHODS[name]
    whole = run_streamed(method, tmp_path / "whole")
    with stopped_at(5):  # the last checkpoint is that of step 4
        run_streamed(method, tmp_path / "stopped")
    before = "step-000000002" if len(method.stages()) == 1 else "step-000000003"  # a stage ends with one
    assert checkpoints(tmp_path / "stopped") == [before, "step-000000004"]
    # Neither the way data is read nor the writing of checkpoints changes the result.
    workers = 2 if name == "mean-field" else 0
    found = run_streamed(method, tmp_path / "stopped", workers=workers, keep=3, checkpoint_steps=3)
    assert_equal_models(found, whole)
    same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16", "clip": 0.5},
        {"channels_last": True, "samples": 2},
        {"evaluate_every": 0, "log_every": 1000, "refresh_batchnorm": False},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_settings_do_not_stand_in_the_way_of_going_on(settings: dict[str, Any], tmp_path: Path) -> None:
    run_conv("adamw", tmp_path / "whole", **settings)
    for step in (3, 8):
        with stopped_at(step):
            run_conv("adamw", tmp_path / "stopped", checkpoint_steps=1, **settings)
    run_conv("adamw", tmp_path / "stopped", **settings)
    same_run(tmp_path / "stopped", tmp_path / "whole")


def test_checkpoints_also_go_by_the_clock(tmp_path: Path) -> None:
    with stopped_at(3):
        run_mlp(lb.MeanField(), tmp_path, checkpoint_minutes=0.0)
    assert checkpoints(tmp_path) == ["step-000000002", "step-000000003"]
    shutil.rmtree(tmp_path / "checkpoints")
    with stopped_at(3):
        run_mlp(lb.MeanField(), tmp_path)  # five minutes
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize("keep", [1, 3])
def test_only_the_last_checkpoints_are_kept(keep: int, tmp_path: Path) -> None:
    run_mlp(lb.MeanField(), tmp_path, checkpoint_steps=10, keep=keep)
    assert checkpoints(tmp_path) == ["step-000000020", "step-000000030", "step-000000032"][-keep:]


def test_a_finished_run_is_loaded_and_not_trained(tmp_path: Path) -> None:
    first = run_conv("sgd", tmp_path)
    record, stamp = read_record(tmp_path), (tmp_path / MODEL).stat().st_mtime_ns
    shutil.rmtree(tmp_path / "checkpoints")
    again = run_conv("sgd", tmp_path, checkpoint_steps=3, keep=7, workers=1)
    assert_equal_models(again, first)
    assert not again.training
    assert again.rule == first.rule
    assert read_record(tmp_path) == record
    assert (tmp_path / MODEL).stat().st_mtime_ns == stamp
    x = pictures()[:4][0]
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    probs = [
        bnn.predict(x, generator=generator).probs for bnn, generator in zip((first, again), generators, strict=True)
    ]
    assert torch.equal(*probs)


def test_a_run_that_was_stopped_when_all_steps_were_done_is_finished(tmp_path: Path) -> None:
    run_conv("sgd", tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    (tmp_path / "stopped" / MODEL).unlink()
    record = tmp_path / "stopped" / "run.json"
    record.write_text(record.read_text().replace('"finished"', '"running"'))
    run_conv("sgd", tmp_path / "stopped")
    same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": 0.5}, ["lr=None", "0.5"]),
        ({"seed": 1}, ["seed=0", "1"]),
        ({"epochs": 5}, ["epochs=4", "5"]),
        ({"method": lb.MeanField(prior=lb.Normal(0.3))}, ["scale=0.1", "0.3"]),
        ({"method": lb.Deterministic()}, ["MeanField", "Deterministic"]),
        ({"notes": {"place": "another"}}, ["place", "another"]),
    ],
)
def test_the_folder_of_another_run_is_refused(settings: dict[str, Any], words: list[str], finished: Path) -> None:
    settings = dict(settings)
    method = settings.pop("method", lb.MeanField())
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    expect(lambda: run_mlp(method, finished, **settings), str(finished), *words)
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def other_data() -> Any:
    x, y = clusters()[:]
    return task(TensorDataset(-x, y), held_out=48)


@pytest.mark.parametrize(
    "arguments",
    [{"data": other_data()}, {"select": lambda name, _: "2" in name}, {"likelihood": lb.Categorical(ignore_index=7)}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_the_folder_of_a_run_on_other_things_is_refused(arguments: dict[str, Any], finished: Path) -> None:
    given = {"data": task(clusters()), **arguments}
    expect(lambda: fit(mlp(), lb.MeanField(), out=finished, **{**SETTINGS, **given}), str(finished))


def test_another_activation_is_another_network(finished: Path) -> None:
    network = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    expect(lambda: fit(network, lb.MeanField(), task(clusters()), out=finished, **SETTINGS), "architecture")


def test_checkpoints_without_a_record_are_refused(finished: Path) -> None:
    (finished / "run.json").unlink()
    expect(lambda: run_mlp(lb.MeanField(), finished, seed=1), "run.json", "overwrite")


def test_notes_of_any_plain_kind_do_not_make_another_run(tmp_path: Path) -> None:
    notes = {"shape": (1, 8, 8), "names": ["a"], "nested": {"rate": 0.1, "none": None}}
    first = run_mlp(lb.MeanField(), tmp_path, notes=notes)
    assert_equal_models(run_mlp(lb.MeanField(), tmp_path, notes=notes), first)


def test_overwriting_starts_anew(tmp_path: Path, whole: Path) -> None:
    run_mlp(lb.MeanField(), tmp_path, seed=1)
    (tmp_path / "mine.txt").write_text("not of the run")
    run_mlp(lb.MeanField(), tmp_path, overwrite=True)
    same_run(tmp_path, whole)
    assert (tmp_path / "mine.txt").exists()
    first = run_mlp(lb.MeanField(), tmp_path, seed=2, overwrite=True)
    assert not models_equal(first, lb.load(whole / MODEL, mlp()))


# -- files ------------------------------------------------------------------------------------------------------------


def test_what_a_killed_process_left_half_written_is_ignored_and_removed(tmp_path: Path, whole: Path) -> None:
    with stopped_at(10):
        run_mlp(lb.MeanField(), tmp_path / "stopped", checkpoint_steps=4)
    folder = tmp_path / "stopped" / "checkpoints"
    (folder / "step-000000009.part").mkdir()
    (folder / "step-000000009.part" / MODEL).write_bytes(b"half of it")
    run_mlp(lb.MeanField(), tmp_path / "stopped", checkpoint_steps=4)
    same_run(tmp_path / "stopped", whole)
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("file", [MODEL, "training.pt"])
@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "garbage"])
def test_a_damaged_checkpoint_is_named(file: str, damage: str, tmp_path: Path, whole: Path) -> None:
    with stopped_at(10):
        run_mlp(lb.MeanField(), tmp_path, checkpoint_steps=4)
    path = tmp_path / "checkpoints" / "step-000000008" / file
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "garbage": b"no such file" * 50}[damage])
    expect(
        lambda: run_mlp(lb.MeanField(), tmp_path, checkpoint_steps=4), "step-000000008", "delete",
        kind=lb.FileFormatError,
    )  # fmt: skip
    shutil.rmtree(path.parent)  # as the error says; the one before it is still there
    run_mlp(lb.MeanField(), tmp_path, checkpoint_steps=4)
    same_run(tmp_path, whole)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"config": {}}', '{"config": 3, "history": []}', "\xff"])
def test_a_damaged_record_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(content.encode("latin-1"))
    expect(lambda: run_mlp(lb.MeanField(), tmp_path), "run.json", kind=lb.FileFormatError)


def test_a_record_without_a_status_is_named(finished: Path) -> None:
    record = finished / "run.json"
    record.write_text(record.read_text().replace('"status"', '"state"'))
    expect(lambda: run_mlp(lb.MeanField(), finished), "run.json", kind=lb.FileFormatError)


def test_the_model_of_another_network_is_refused(finished: Path) -> None:
    network = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    expect(lambda: fit(network, lb.MeanField(), task(clusters()), out=finished, **SETTINGS), "architecture")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_place_that_cannot_be_written_is_told(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    expect(lambda: run_mlp(lb.MeanField(), tmp_path / "file" / "run", overwrite=overwrite), str(tmp_path / "file"))


def test_there_is_no_run_to_read(tmp_path: Path) -> None:
    expect(lambda: read_record(tmp_path), str(tmp_path))


@pytest.mark.parametrize("limit", [100_000, 300_000], ids=["the model", "the state"])
def test_a_full_disk_leaves_the_older_checkpoint_intact(limit: int, tmp_path: Path) -> None:
    run_wide(tmp_path / "whole")
    out = tmp_path / "stopped"
    with stopped_at(12):
        run_wide(out)
    before = {path: path.read_bytes() for path in (out / "checkpoints" / "step-000000010").iterdir()}
    sizes = sorted(len(content) for content in before.values())
    assert 100_000 < sizes[0] < 300_000 < sizes[1]
    assert finish(start(run_on_a_full_disk, limit, "wide", out)) == 3  # a LeanBayesError
    message = (out / "said.txt").read_text()
    for words in ("Cannot write", "step-000000020", "step-000000010 is intact"):
        assert words in message
    assert "\n" not in message
    assert checkpoints(out) == ["step-000000010"]
    assert {path: path.read_bytes() for path in before} == before
    assert read_record(out)["status"] == f"failed: {message}"
    run_wide(out)
    same_run(out, tmp_path / "whole")


def test_a_full_disk_is_told_in_one_sentence_whatever_is_written_first(tmp_path: Path) -> None:
    assert finish(start(run_on_a_full_disk, 5000, "mlp", tmp_path / "run", log_every=1)) == 3
    run_mlp(lb.MeanField(), tmp_path / "run", log_every=1)
    run_mlp(lb.MeanField(), tmp_path / "whole", log_every=1)
    same_run(tmp_path / "run", tmp_path / "whole")


# -- numbers that are not finite --------------------------------------------------------------------------------------


def spoilt() -> Any:
    """A task with NaN in one example, which the first epoch meets in its seventh step."""
    data = task(clusters())
    order = torch.randperm(128, generator=_epoch_generator())
    data.train[:][0][order[6 * 16 + 3]] = torch.nan
    return data


def _epoch_generator() -> torch.Generator:
    from leanbayes.noise import mix

    return torch.Generator().manual_seed(mix(0, 0))


def all_finite(folder: Path) -> bool:
    bnn = lb.load(folder / MODEL, mlp())
    state = torch.load(folder / "training.pt", weights_only=True)
    tensors = [*bnn.state_dict().values()]
    tensors += [t for optimiser in state["optimisers"] for own in optimiser["state"].values() for t in own.values()]
    return all(tensor.isfinite().all() for tensor in tensors if isinstance(tensor, Tensor))


def test_nan_in_the_data_stops_the_training_at_its_step(tmp_path: Path) -> None:
    def run() -> None:
        fit(mlp(), lb.MeanField(), spoilt(), out=tmp_path, **{**SETTINGS, "checkpoint_steps": 4})

    message = expect(run, "step 6", "inputs", "step-000000004", "intact")
    assert checkpoints(tmp_path) == ["step-000000004"]
    assert all_finite(tmp_path / "checkpoints" / "step-000000004")
    assert read_record(tmp_path)["status"] == f"failed: {message}"
    expect(run, "step 6")  # it goes on from the checkpoint, and fails again


@pytest.mark.parametrize(
    ("method", "compiled"),
    [(lb.MeanField(), False), (lb.Deterministic(), False), (lb.Ensemble(2), False), (lb.MeanField(), True)],
    ids=["mean-field", "deterministic", "ensemble", "mean-field, compiled"],
)
def test_parameters_that_blow_up_stop_the_training(
    method: lb.Method, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU, a compiled loss is not looked at in every step.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    settings = {"lr": 1e30, "optimiser": "sgd", "checkpoint_steps": 1, "warmup": 0.0, "compile": compiled}
    expect(lambda: run_mlp(method, tmp_path, **settings), "Training stopped at step", "learning rate")
    for name in checkpoints(tmp_path):
        assert all_finite(tmp_path / "checkpoints" / name), name
    assert read_record(tmp_path)["status"].startswith("failed")
    assert not (tmp_path / MODEL).exists()


def test_parameters_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    x, y = clusters()[:]
    data = task(TensorDataset(100 * x, y))
    settings: dict[str, Any] = {**SETTINGS, "lr": 3e38, "optimiser": "sgd", "checkpoint_steps": 1, "warmup": 0.0}
    expect(
        lambda: fit(mlp(), lb.MeanField(), data, out=tmp_path, **settings), "step 1", "NaN or infinity", "learning rate"
    )
    assert checkpoints(tmp_path) == []  # the loss of the first step was finite


def test_a_training_without_a_folder_stops_too() -> None:
    expect(lambda: run_mlp(lb.MeanField(), None, lr=1e30, optimiser="sgd"), "Training stopped at step")
