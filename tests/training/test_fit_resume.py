"""After any interruption the same call resumes and ends with the same bits. A checkpoint is complete or missing."""

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
    run_conv,
    run_mlp,
    run_on_a_full_disk,
    run_signaled,
    run_until_killed,
    run_wide,
    start,
    stopped_at,
    stripes,
    task,
    without_nan,
)

import leanbayes as lb
from leanbayes.cli import main
from leanbayes.data import Augment, from_datasets
from leanbayes.methods import METHODS
from leanbayes.training import fit, read_record
from leanbayes.training.checkpoints import Checkpoints
from leanbayes.training.run_folder import load_trained

# On a small machine torch warns that there are more workers than cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MODEL = "model.safetensors"


def checkpoints(out: Path) -> list[str]:
    folder = out / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def same_run(found: Path, expected: Path) -> None:
    """Check that two runs have the same model, byte by byte, and the same history except for times."""
    assert (found / MODEL).read_bytes() == (expected / MODEL).read_bytes()
    one, other = read_record(found), read_record(expected)
    assert curve(one) == curve(other)
    assert without_nan(one["scores"]) == without_nan(other["scores"])
    assert one["status"] == other["status"] == "finished"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted training, to compare with."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_mlp(lb.MeanField(), folder)
    return folder


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    """A copy of the uninterrupted training."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


# -- killed -----------------------------------------------------------------------------------------------------------


def kill_at_moments(begin: Callable[[], BaseProcess], out: Path, moments: list[tuple[int, float]]) -> int:
    """Start a training several times, and kill it some seconds after a checkpoint of some step."""
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
    "ivon": lambda out: start(run_mlp, lb.MeanField(engine="ivon"), out, checkpoint_steps=3),
    "sparse, ivon": lambda out: start(run_mlp, lb.SSVI(0.5, engine="ivon", interval=4), out, checkpoint_steps=3),
    "staged": lambda out: start(run_mlp, Staged(), out, checkpoint_steps=3),
    "swapping": lambda out: start(run_mlp, Swapping(), out, checkpoint_steps=3),
}


@pytest.mark.parametrize("case", KILLED)
def test_a_training_killed_several_times_ends_with_the_same_bytes(case: str, tmp_path: Path) -> None:
    assert finish(KILLED[case](tmp_path / "whole")) == 0
    chosen = random.Random(case)
    moments = [(steps, 0.03 * chosen.random()) for steps in sorted(chosen.sample(range(1, 24), 4))]
    kills = kill_at_moments(lambda: KILLED[case](tmp_path / "killed"), tmp_path / "killed", moments)
    assert kills >= 2  # on a busy machine a training may finish before it is killed
    same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_training_killed_while_it_writes_ends_with_the_same_bytes(tmp_path: Path) -> None:
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
        halves += [name for name in whole if len(list((out / "checkpoints" / name).iterdir())) < 3]
        run_mlp(lb.MeanField(), out, **settings)
        same_run(out, tmp_path / "whole")
        assert not list((out / "checkpoints").glob("*.part"))
    assert killed > 8
    assert not halves


def test_the_same_command_resumes_after_a_kill(tmp_path: Path) -> None:
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
        assert main(words(tmp_path / "whole")) == 0  # meanwhile, without interruption
        _, error = process.communicate()
    assert process.returncode == 0, error
    same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_after_the_step_with_a_checkpoint(number: int, tmp_path: Path, whole: Path) -> None:
    assert finish(start(run_signaled, number, 9, tmp_path / "stopped")) == 0
    assert "step 10" in (tmp_path / "stopped" / "error.txt").read_text()
    assert checkpoints(tmp_path / "stopped") == ["step-000000010"]
    run_mlp(lb.MeanField(), tmp_path / "stopped")
    same_run(tmp_path / "stopped", whole)


# -- stopped by an error ----------------------------------------------------------------------------------------------

STREAMED: dict[str, Any] = {"checkpoint_steps": 2, "epochs": 2, "accumulate": 2, "batch_size": 16}


def run_streamed(method: lb.Method, out: Path, **settings: Any) -> lb.BayesianModel:
    """Train on images that are read one by one, with noise and random crops."""
    data = from_datasets(Jittered(stripes(64)), outputs=4, augment=Augment(crop=1))
    return fit(conv(), method, data, out=out, **{**SETTINGS, **STREAMED, **settings})


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_resumed_bit_by_bit_on_streamed_data(name: str, tmp_path: Path) -> None:
    few_steps = {
        "csgmcmc": lb.CyclicalSGMCMC(cycles=2, per_cycle=1),
        "aeb": lb.AEB(snapshots=1, until=0.5),
        "mbnn": lb.MBNN(snapshots=1, interval=1, sparsity=0.3),
    }
    method = few_steps.get(name, METHODS[name])
    whole = run_streamed(method, tmp_path / "whole")
    with stopped_at(5):  # the last checkpoint is that of step 4
        run_streamed(method, tmp_path / "stopped")
    trained = [stage for stage in method.stages() if stage.share]
    before = "step-000000002" if len(trained) == 1 else "step-000000003"  # a stage ends with one
    assert checkpoints(tmp_path / "stopped") == [before, "step-000000004"]
    # The settings for reading data and writing checkpoints do not change the result.
    workers = 2 if name == "mean-field" else 0
    found = run_streamed(method, tmp_path / "stopped", workers=workers, keep=3, checkpoint_steps=3)
    assert_equal_models(found, whole)
    same_run(tmp_path / "stopped", tmp_path / "whole")


def test_exchanges_on_several_batches_are_resumed_bit_by_bit(tmp_path: Path) -> None:
    """Criterion 3 of SSVI takes other training batches than the last one, in an order that a resumed run repeats."""
    method = lb.SSVI(
        0.4, interval=2, drop=0.6, removal="sensitivity", addition="samples", addition_samples=3, until=1.0
    )
    whole = run_streamed(method, tmp_path / "whole")
    with stopped_at(3):  # after the exchange of step 2, from whose checkpoint it continues, and before that of step 4
        run_streamed(method, tmp_path / "stopped")
    assert checkpoints(tmp_path / "stopped") == ["step-000000002"]
    assert_equal_models(run_streamed(method, tmp_path / "stopped"), whole)
    same_run(tmp_path / "stopped", tmp_path / "whole")
    trained, new = (dict(bnn.posterior.named_buffers())["index"] for bnn in (whole, lb.bayesianize(conv(), method)))
    assert not torch.equal(trained, new)


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16", "clip": 0.5},
        {"channels_last": True, "samples": 2},
        {"scale_optimizer": "sgd", "scale_lr": 0.5},
        {"evaluate_every": 0, "log_every": 1000, "refresh_batchnorm": False},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_runs_with_other_settings_are_resumed(settings: dict[str, Any], tmp_path: Path) -> None:
    run_conv("adamw", tmp_path / "whole", **settings)
    for step in (3, 8):
        with stopped_at(step):
            run_conv("adamw", tmp_path / "stopped", checkpoint_steps=1, **settings)
    run_conv("adamw", tmp_path / "stopped", **settings)
    same_run(tmp_path / "stopped", tmp_path / "whole")


def test_checkpoints_are_written_by_time(tmp_path: Path) -> None:
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
    x = stripes()[:4][0]
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    probs = [
        bnn.predict(x, generator=generator).probs for bnn, generator in zip((first, again), generators, strict=True)
    ]
    assert torch.equal(*probs)


def test_a_run_that_was_stopped_after_its_last_step_is_finished(tmp_path: Path) -> None:
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
        ({"method": lb.MeanField(prior=lb.Normal(0.3))}, ["scale='auto'", "0.3"]),
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
def test_the_folder_of_a_run_with_other_arguments_is_refused(arguments: dict[str, Any], finished: Path) -> None:
    given = {"data": task(clusters()), **arguments}
    expect(lambda: fit(mlp(), lb.MeanField(), out=finished, **{**SETTINGS, **given}), str(finished))


def test_another_activation_is_another_network(finished: Path) -> None:
    network = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    expect(lambda: fit(network, lb.MeanField(), task(clusters()), out=finished, **SETTINGS), "architecture")


def test_checkpoints_without_a_record_raise_an_error(finished: Path) -> None:
    (finished / "run.json").unlink()
    expect(lambda: run_mlp(lb.MeanField(), finished, seed=1), "run.json", "remove")


def test_notes_of_any_json_type_can_be_resumed(tmp_path: Path) -> None:
    notes = {"shape": (1, 8, 8), "names": ["a"], "nested": {"rate": 0.1, "none": None}}
    first = run_mlp(lb.MeanField(), tmp_path, notes=notes)
    assert_equal_models(run_mlp(lb.MeanField(), tmp_path, notes=notes), first)


def test_overwriting_starts_again(tmp_path: Path, whole: Path) -> None:
    run_mlp(lb.MeanField(), tmp_path, seed=1)
    (tmp_path / "mine.txt").write_text("not part of the run")
    run_mlp(lb.MeanField(), tmp_path, overwrite=True)
    same_run(tmp_path, whole)
    assert (tmp_path / "mine.txt").exists()
    first = run_mlp(lb.MeanField(), tmp_path, seed=2, overwrite=True)
    assert not models_equal(first, lb.load(whole / MODEL, mlp()))


# -- files ------------------------------------------------------------------------------------------------------------


def test_incomplete_checkpoints_are_ignored_and_removed(tmp_path: Path, whole: Path) -> None:
    with stopped_at(10):
        run_mlp(lb.MeanField(), tmp_path / "stopped", checkpoint_steps=4)
    folder = tmp_path / "stopped" / "checkpoints"
    (folder / "step-000000009.part").mkdir()
    (folder / "step-000000009.part" / MODEL).write_bytes(b"half of it")
    run_mlp(lb.MeanField(), tmp_path / "stopped", checkpoint_steps=4)
    same_run(tmp_path / "stopped", whole)
    assert not list(folder.glob("*.part"))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "garbage": lambda content: b"no such file" * 50,
}


def damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(DAMAGES[how](path.read_bytes()))


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that was stopped at step 10, with checkpoints of the steps 4 and 8."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with stopped_at(10):
        run_mlp(lb.MeanField(), folder, checkpoint_steps=4)
    return folder


@pytest.fixture
def stopped(stopped_run: Path, tmp_path: Path) -> Path:
    """A copy of the stopped training."""
    return Path(shutil.copytree(stopped_run, tmp_path / "run"))


@pytest.mark.parametrize("digests", [True, False], ids=["digests", "version 0.1"])
@pytest.mark.parametrize("file", [MODEL, "training.pt"])
@pytest.mark.parametrize("how", [*DAMAGES, "missing"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_it(
    file: str, how: str, digests: bool, stopped: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not digests:
        for path in stopped.glob("checkpoints/*/digests.json"):
            path.unlink()
    damage(stopped / "checkpoints" / "step-000000008" / file, how)
    run_mlp(lb.MeanField(), stopped, checkpoint_steps=8)
    same_run(stopped, whole)
    (line,) = capsys.readouterr().err.splitlines()
    assert "step-000000008" in line
    assert line.endswith("continues from step-000000004.")
    assert checkpoints(stopped) == ["step-000000024", "step-000000032"]


def test_every_flipped_bit_in_a_checkpoint_is_found(stopped: Path) -> None:
    (latest,) = stopped.glob("checkpoints/step-000000008")
    folder, chosen = Checkpoints(latest.parent, 2), random.Random(0)
    for file in sorted(latest.iterdir()):
        content = file.read_bytes()
        for _ in range(16):
            flipped = bytearray(content)
            flipped[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
            file.write_bytes(flipped)
            found = folder.load_latest(mlp())
            assert found is not None
            assert found[0].name == "step-000000004", file
        file.write_bytes(content)
    found = folder.load_latest(mlp())
    assert found is not None
    assert found[0] == latest


def test_a_run_with_a_flipped_bit_ends_with_the_same_bytes(stopped: Path, whole: Path) -> None:
    file = stopped / "checkpoints" / "step-000000008" / MODEL
    content = bytearray(file.read_bytes())
    content[-9] ^= 64
    file.write_bytes(content)
    run_mlp(lb.MeanField(), stopped, checkpoint_steps=4)
    same_run(stopped, whole)


def test_a_run_without_an_intact_checkpoint_raises_an_error(stopped: Path) -> None:
    for path in stopped.glob("checkpoints/*/training.pt"):
        damage(path, "cut")
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    expect(
        lambda: run_mlp(lb.MeanField(), stopped), "step-000000008", "training.pt", "no older one is intact",
        "--overwrite", kind=lb.FileFormatError,
    )  # fmt: skip
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_an_intact_checkpoint_that_cannot_be_loaded_is_not_removed(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newer(*args: Any) -> Any:
        raise lb.FileFormatError("It has format version 2: update leanbayes.")

    monkeypatch.setattr("leanbayes.training.checkpoints.load", newer)
    expect(lambda: run_mlp(lb.MeanField(), stopped), "is intact, but", "update leanbayes", kind=lb.FileFormatError)
    assert checkpoints(stopped) == ["step-000000004", "step-000000008"]


# -- the model of a finished run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [*DAMAGES, "missing"])
def test_the_model_of_a_finished_run_is_restored_from_its_checkpoint(
    how: str, finished: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(finished / MODEL, how)
    assert_equal_models(run_mlp(lb.MeanField(), finished), lb.load(whole / MODEL, mlp()))
    same_run(finished, whole)
    (line,) = capsys.readouterr().err.splitlines()
    assert MODEL in line
    assert "restored from step-000000032" in line
    assert "save the model again" not in line


def test_a_damaged_model_without_checkpoints_raises_an_error(finished: Path) -> None:
    damage(finished / MODEL, "cut")
    shutil.rmtree(finished / "checkpoints")
    expect(lambda: run_mlp(lb.MeanField(), finished), MODEL, "no checkpoints", "--overwrite", kind=lb.FileFormatError)
    run_mlp(lb.MeanField(), finished, overwrite=True)
    assert read_record(finished)["status"] == "finished"


def test_the_error_for_a_damaged_model_says_how_to_restore_it(finished: Path) -> None:
    damage(finished / MODEL, "cut")
    message = expect(
        lambda: load_trained(finished, mlp()), MODEL, "step-000000032 is intact", "fit", kind=lb.FileFormatError
    )
    assert "save the model again" not in message
    shutil.rmtree(finished / "checkpoints")
    expect(lambda: load_trained(finished, mlp()), MODEL, kind=lb.FileFormatError)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"config": {}}', '{"config": 3, "history": []}', "\xff"])
def test_a_damaged_record_raises_a_clear_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(content.encode("latin-1"))
    expect(lambda: run_mlp(lb.MeanField(), tmp_path), "run.json", kind=lb.FileFormatError)


def test_a_record_without_a_status_raises_an_error(finished: Path) -> None:
    record = finished / "run.json"
    record.write_text(record.read_text().replace('"status"', '"state"'))
    expect(lambda: run_mlp(lb.MeanField(), finished), "run.json", kind=lb.FileFormatError)


def test_the_model_of_another_network_is_refused(finished: Path) -> None:
    network = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
    expect(lambda: fit(network, lb.MeanField(), task(clusters()), out=finished, **SETTINGS), "architecture")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_cannot_be_written_raises_an_error(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    expect(lambda: run_mlp(lb.MeanField(), tmp_path / "file" / "run", overwrite=overwrite), str(tmp_path / "file"))


def test_a_folder_without_a_run_raises_an_error(tmp_path: Path) -> None:
    expect(lambda: read_record(tmp_path), str(tmp_path))


@pytest.mark.parametrize("limit", [100_000, 300_000], ids=["the model", "the state"])
def test_a_full_disk_leaves_the_older_checkpoint_intact(limit: int, tmp_path: Path) -> None:
    run_wide(tmp_path / "whole")
    out = tmp_path / "stopped"
    with stopped_at(12):
        run_wide(out)
    before = {path: path.read_bytes() for path in (out / "checkpoints" / "step-000000010").iterdir()}
    sizes = sorted(len(content) for path, content in before.items() if path.suffix != ".json")
    assert 100_000 < sizes[0] < 300_000 < sizes[1]
    assert finish(start(run_on_a_full_disk, limit, "wide", out)) == 3  # a LeanBayesError
    message = (out / "error.txt").read_text()
    for words in ("Cannot write", "step-000000020", "(File too large)", "step-000000010 is intact"):
        assert words in message
    assert "\n" not in message
    for internal in ("enforce fail", "os error", "Error while serializing", "unexpected pos"):
        assert internal not in message
    assert message.count("Cannot write") == 1
    assert checkpoints(out) == ["step-000000010"]
    assert {path: path.read_bytes() for path in before} == before
    assert read_record(out)["status"] == f"failed: {message}"
    run_wide(out)
    same_run(out, tmp_path / "whole")


def test_a_full_disk_raises_a_clear_error_for_any_file(tmp_path: Path) -> None:
    assert finish(start(run_on_a_full_disk, 5000, "mlp", tmp_path / "run", log_every=1)) == 3
    run_mlp(lb.MeanField(), tmp_path / "run", log_every=1)
    run_mlp(lb.MeanField(), tmp_path / "whole", log_every=1)
    same_run(tmp_path / "run", tmp_path / "whole")


# -- numbers that are not finite --------------------------------------------------------------------------------------


def with_nan() -> Any:
    """Return a task with NaN in one example, which is in the seventh step of the first epoch."""
    data = task(clusters())
    order = torch.randperm(128, generator=_epoch_generator())
    data.train[:][0][order[6 * 16 + 3]] = torch.nan
    return data


def _epoch_generator() -> torch.Generator:
    from leanbayes.core.noise import mix

    return torch.Generator().manual_seed(mix(0, 0))


def all_finite(folder: Path) -> bool:
    bnn = lb.load(folder / MODEL, mlp())
    state = torch.load(folder / "training.pt", weights_only=True)
    tensors = [*bnn.state_dict().values()]
    tensors += [t for optimizer in state["optimizers"] for own in optimizer["state"].values() for t in own.values()]
    return all(tensor.isfinite().all() for tensor in tensors if isinstance(tensor, Tensor))


def test_nan_in_the_data_stops_the_training_at_its_step(tmp_path: Path) -> None:
    def run() -> None:
        fit(mlp(), lb.MeanField(), with_nan(), out=tmp_path, **{**SETTINGS, "checkpoint_steps": 4})

    message = expect(run, "step 6", "inputs", "step-000000004", "intact")
    assert checkpoints(tmp_path) == ["step-000000004"]
    assert all_finite(tmp_path / "checkpoints" / "step-000000004")
    assert read_record(tmp_path)["status"] == f"failed: {message}"
    expect(run, "step 6")  # it resumes from the checkpoint and fails again


@pytest.mark.parametrize(
    ("method", "compiled"),
    [(lb.MeanField(), False), (lb.Deterministic(), False), (lb.Ensemble(2), False), (lb.MeanField(), True)],
    ids=["mean-field", "deterministic", "ensemble", "mean-field, compiled"],
)
def test_diverging_parameters_stop_the_training(
    method: lb.Method, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU, a compiled loss is not checked in every step.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    settings = {"lr": 1e30, "optimizer": "sgd", "checkpoint_steps": 1, "warmup": 0.0, "compile": compiled}
    expect(lambda: run_mlp(method, tmp_path, **settings), "Training stopped at step", "learning rate")
    for name in checkpoints(tmp_path):
        assert all_finite(tmp_path / "checkpoints" / name), name
    assert read_record(tmp_path)["status"].startswith("failed")
    assert not (tmp_path / MODEL).exists()


def test_parameters_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    x, y = clusters()[:]
    data = task(TensorDataset(100 * x, y))
    settings: dict[str, Any] = {**SETTINGS, "lr": 3e38, "optimizer": "sgd", "checkpoint_steps": 1, "warmup": 0.0}
    expect(
        lambda: fit(mlp(), lb.MeanField(), data, out=tmp_path, **settings), "step 1", "NaN or infinity", "learning rate"
    )
    assert checkpoints(tmp_path) == []  # the loss of the first step was finite


def test_a_diverging_training_without_a_folder_stops_too() -> None:
    expect(lambda: run_mlp(lb.MeanField(), None, lr=1e30, optimizer="sgd"), "Training stopped at step")
