"""`leanbayes acquire`: which unlabeled inputs to label next."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_cases import Cli, load_run
from PIL import Image

import leanbayes as lb
from leanbayes.data import ArrayDataset, load


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty digits, in two folders."""
    folder, data = tmp_path_factory.mktemp("pool"), load("digits")
    assert isinstance(data.test, ArrayDataset)
    for number in range(40):
        path = folder / ("a" if number < 20 else "b") / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(data.test.x[number, 0].numpy()).save(path)
    return folder


@pytest.mark.parametrize("score", [None, "entropy", "mutual_information"])
def test_the_choice_is_that_of_lb_decide_acquire(score: str | None, cli: Cli, digits: Path, pool: Path) -> None:
    words = ("--number", 4, "--seed", 2, *(() if score is None else ("--score", score)))
    found = json.loads(cli("acquire", digits, pool, *words, "--json").out)
    data = load("digits")
    assert data.normalize is not None
    assert isinstance(data.test, ArrayDataset)
    places = lb.decide.acquire(load_run(digits), [data.normalize(data.test.x[:40])], 4, score=score, seed=2)
    assert found["pool"] == 40
    assert [int(Path(one["image"]).stem) for one in found["chosen"]] == places.tolist()


def test_the_table_lists_the_chosen_images_in_their_order(cli: Cli, digits: Path, pool: Path) -> None:
    files = sorted((pool / "a").iterdir())
    chosen = json.loads(cli("acquire", digits, *files, "--number", 3, "--json").out)["chosen"]
    head, *lines, last = cli("acquire", digits, *files, "--number", 3).out.splitlines()
    assert head.split() == ["image"]
    assert [line.split() for line in lines] == [[str(rank + 1), one["image"]] for rank, one in enumerate(chosen)]
    assert last == "Label these 3 of 20 inputs next, the most useful one first."


def test_rows_of_tables_are_chosen(cli: Cli, toy: Path) -> None:
    tables = [Path("a.csv"), Path("b.csv")]
    for path, rows in zip(tables, (np.linspace(-4, 4, 30), np.linspace(-9, 9, 7)), strict=True):
        np.savetxt(path, rows, delimiter=",")
    words = ("--number", 2, "--score", "epistemic_std", "--json")
    chosen = json.loads(cli("acquire", toy, *tables, *words).out)["chosen"]
    x = torch.from_numpy(np.concatenate([np.loadtxt(path) for path in tables]))[:, None]
    data = load("toy")
    x = ((x - torch.tensor(data.input_mean)) / torch.tensor(data.input_std)).float()
    places = lb.decide.acquire(load_run(toy), [x], 2, score="epistemic_std").tolist()
    assert [(one["table"], one["row"]) for one in chosen] == [
        ("a.csv", place + 1) if place < 30 else ("b.csv", place - 29) for place in places
    ]


def test_mistakes_are_one_sentence(cli: Cli, digits: Path, toy: Path, pool: Path) -> None:
    Path("empty").mkdir()
    Path("a.csv").write_text("1\n")
    for words, sentence, code in (
        ((digits,), "give images, folders of images or tables", 2),
        ((digits, pool, "--number", 0), "--number 0 must be at least 1", 2),
        ((digits, pool, "--number", 41), "The pool has 40 inputs", 1),
        ((digits, pool, "a.csv"), "only one kind", 1),
        ((digits, "empty"), "has no images", 1),
        ((digits, "missing.png", "--number", 1), "There is no image missing.png", 1),
        ((toy, pool), "was trained on a table", 1),
        ((digits, "a.csv", "--number", 1), "was not trained on a table", 1),
        ((digits, pool, "--rule", "moments"), "rule='sample', or score='mutual_information'", 1),
        ((digits, pool, "--score", "std"), "std", 1),
    ):
        text = cli("acquire", *words, code=code).err
        assert sentence in text
        assert "Traceback" not in text
