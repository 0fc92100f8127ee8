"""Checkpoints with a changed state of training, and with new digests: each is refused in one sentence, or loads."""

import hashlib
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_cases import check_message, places_in
from training_cases import mlp, run_mlp, stopped_at

import leanbayes as lb
from leanbayes.training.checkpoints import Checkpoints, restore_optimizer

MUTATIONS = 200
VALUES: list[Any] = [
    None, True, -1, 10**18, 10**30, float("nan"), "", "x", [], {}, [[]], [None], {"a": 1}, (1, 2), 1.5,
    torch.zeros(3), torch.zeros(0), torch.tensor(5),
]  # fmt: skip


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changed") / "run"
    with stopped_at(5):
        run_mlp(lb.MeanField(), folder, checkpoint_steps=4)
    return folder / "checkpoints"


def sign(checkpoint: Path) -> None:
    names = ("model.safetensors", "training.pt")
    digests = {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names}
    (checkpoint / "digests.json").write_text(json.dumps(digests))


def load(folder: Path) -> str:
    """Load the newest checkpoint as a training does, and return what happened."""
    try:
        found = Checkpoints(folder, 1).load_latest(mlp())
        assert found is not None
        _, bnn, state, _ = found
        for saved in state["optimizers"][:1]:
            restore_optimizer(torch.optim.AdamW(bnn.mean_parameters()), saved)
    except lb.FileFormatError as error:
        check_message(error)
        return "refused"
    return "loaded"


def test_changed_states_of_training_are_refused_in_one_sentence_or_load(stopped: Path) -> None:
    (checkpoint,) = stopped.iterdir()
    path = checkpoint / "training.pt"
    content, outcomes = path.read_bytes(), Counter[str]()
    try:
        for number in range(MUTATIONS):
            choice = random.Random(number)
            path.write_bytes(content)
            state = torch.load(path, weights_only=True)
            container, key = choice.choice(places_in(state))
            kind = choice.randrange(4)
            if kind == 0:
                del container[key]
            else:
                container[key] = [container[key]] if kind == 1 else choice.choice(VALUES)
            torch.save(state, path)
            sign(checkpoint)
            outcomes[load(stopped)] += 1
    finally:
        path.write_bytes(content)
        sign(checkpoint)
    assert load(stopped) == "loaded"
    assert min(outcomes["refused"], outcomes["loaded"]) > 0.1 * MUTATIONS


@pytest.mark.parametrize("name", ["digests.json", "training.pt", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_files_of_a_checkpoint_that_are_no_files_are_not_read(name: str, kind: str, stopped: Path) -> None:
    (checkpoint,) = stopped.iterdir()
    path = checkpoint / name
    content = path.read_bytes()
    path.unlink()
    {"pipe": os.mkfifo, "device": lambda at: at.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](path)
    try:
        assert load(stopped) == "refused"
    finally:
        path.rmdir() if kind == "folder" else path.unlink()
        path.write_bytes(content)


def test_digests_that_are_nested_deeply_are_refused(stopped: Path) -> None:
    (checkpoint,) = stopped.iterdir()
    (checkpoint / "digests.json").write_text("[" * 100_000)
    assert load(stopped) == "refused"
    sign(checkpoint)
