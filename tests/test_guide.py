"""The code of the guide and of the reference runs as it is printed, and its numbers are right."""

import json
import math
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_cases import hub as hub
from hub_cases import snapshot
from text_cases import CONFIG, tokenizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertForSequenceClassification

import leanbayes as lb
from leanbayes.cli.predict import PredictOptions
from leanbayes.cli.text_models import open_text_model
from leanbayes.deploy.hub import write_repository
from leanbayes.likelihoods.decisions.abstention import least_examples
from leanbayes.networks import build

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path for folder in ("guide", "reference") for path in sorted((ROOT / "docs" / folder).glob("*.md"))}


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGES[page].read_text(), re.DOTALL)


def run(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run all blocks of a page, one after the other, in one namespace."""
    for block in blocks(page):
        exec(block, names)
    return names


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a reader is taken to have, in an empty folder: a network, and data that it can learn."""
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 5, generator=generator)
    y = (x[:, 0] > 0).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
    return {
        "lb": lb,
        "model": model,
        "epochs": 1,
        "train_set": TensorDataset(x, y),
        "x_test": x,
        "test_loader": DataLoader(TensorDataset(x, y), batch_size=64),
        "x_held_out": x,
        "y_held_out": y,
    }


@pytest.fixture
def trained(names: dict[str, Any]) -> dict[str, Any]:
    recipe: dict[str, Any] = {"epochs": 10, "batch_size": 24, "lr": 3e-2, "temperature": 0.01, "progress": False}
    names["bnn"] = lb.fit(names["model"], lb.MeanField(), names["train_set"], **recipe)
    names["held_out"] = [(names["x_held_out"], names["y_held_out"])]
    return names


def test_choose_scales_the_temperature(names: dict[str, Any]) -> None:
    x, y = names["x_test"], names["y_held_out"]
    y[::5] = 1 - y[::5]  # a fifth of the labels is wrong, so the network is overconfident
    names["model"] = model = nn.Linear(5, 2)
    with torch.no_grad():
        model.weight.zero_()[1, 0] = 20.0
        model.bias.zero_()
    run("choose", names)
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(model(x) / t, y).item()
            for t in (names["temperature"] * factor for factor in (0.9, 1.0, 1.1))
        ]
    assert losses[1] < min(losses[0], losses[2])
    assert names["temperature"] > 1.5
    assert torch.equal(names["probs"].argmax(-1), model(x).argmax(-1))


def test_choose_names_every_method() -> None:
    text = PAGES["choose"].read_text()
    methods = [
        name for name in lb.__all__ if isinstance(getattr(lb, name), type) and issubclass(getattr(lb, name), lb.Method)
    ]
    for name in {*methods} - {"Method"}:
        assert f"| `lb.{name}` |" in text, name


def test_first_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    found = run("first_model", {})
    assert found["accuracy"] > 0.9
    assert found["decision"].verdict == ["ask a person: unlike the training data"] * 4
    assert found["bnn"].policy is not None
    assert "parameters are Bayesian" in capsys.readouterr().out


def test_tune(names: dict[str, Any], tmp_path: Path) -> None:
    run("tune", names)
    assert names["by_ivon"].optimized_by == "ivon"
    assert (tmp_path / "runs" / "tuned" / "temperatures" / "choice.json").is_file()
    assert names["bnn"].method.init_std == 0.02
    text = PAGES["tune"].read_text()
    assert lb.MeanField().init_std == 0.05
    assert lb.MeanField().relative
    assert lb.MeanField().prior == lb.Normal("auto")
    assert "| 0.05 of each layer's std, the default |" in text


def test_numbers(trained: dict[str, Any]) -> None:
    run("numbers", trained)
    assert len(trained["answers"]) + len(trained["for_a_person"]) == 240
    assert trained["scores"]["accuracy"] > 0.9
    text = PAGES["numbers"].read_text()
    for risk, words in ((0.01, "1 %"), (0.05, "5 %")):
        assert f"| at most {words} of the answers are wrong | `risk={risk}` | {least_examples(risk, 0.05)} |" in text


@pytest.mark.parametrize(("argument", "value"), [("false_alarms", 0.05), ("coverage", 0.9)])
def test_numbers_says_how_many_examples_a_promise_needs(argument: str, value: float, trained: dict[str, Any]) -> None:
    (least,) = re.findall(rf"`{argument}={value}` \| (\d+) \|", PAGES["numbers"].read_text())
    x, y = trained["x_held_out"], trained["y_held_out"]
    settings: dict[str, Any] = {argument: value}
    lb.decide.fit(trained["bnn"], [(x[: int(least)], y[: int(least)])], **settings)
    with pytest.raises(lb.LeanBayesError, match="too few"):
        lb.decide.fit(trained["bnn"], [(x[: int(least) - 1], y[: int(least) - 1])], **settings)


def test_large_models(names: dict[str, Any]) -> None:
    names["loader"] = names["test_loader"]
    *usual, sharded = blocks("large_models")
    for block in usual:
        exec(block, names)
    assert names["prediction"].samples == 10
    # One process, without a GPU.
    sharded = re.sub(r"^torch\.cuda\.set_device.*\n", "", sharded, flags=re.MULTILINE)
    try:
        exec(sharded.replace('"nccl"', '"gloo", store=dist.HashStore(), rank=0, world_size=1'), names)
        assert names["bnn"].optimized_by == "ivon"
    finally:
        torch.distributed.destroy_process_group()
    assert lb.load("model.safetensors", names["network"]).layout.numel == names["bnn"].layout.numel
    bnn = lb.bayesianize(names["model"], lb.MeanField())
    assert sum(p.numel() for p in bnn.posterior.parameters()) == 2 * bnn.layout.numel


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_language_models(names: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    run("language_models", names)
    assert all("lora_" in slot.name for slot in names["bnn"].layout)
    assert names["found"].tokens.tolist() == [11] * 8
    assert (names["perplexity"] > 50).all()  # of 100 tokens, hardly trained
    assert names["text"].sequences.shape == names["sampled"].shape == (2, 11)
    assert Path("adapter.safetensors").stat().st_size < 20_000
    x = {"input_ids": names["ids"]}
    seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
    assert torch.isfinite(names["loaded"].predict(x, samples=2, generator=seeds[0]).probs).all()


def test_serve(trained: dict[str, Any], hub: Path) -> None:
    classifier = BertForSequenceClassification(CONFIG)
    trained |= {
        "tokenizer": tokenizer(),
        "classifier": classifier,
        "bayesian_classifier": lb.bayesianize(classifier, lb.MeanField()),
        "test_set": trained["train_set"],
    }
    named = {"name": "mlp", "input_shape": [5], "outputs": 2, "options": {}}
    shared = lb.bayesianize(build("mlp", (5,), 2), lb.MeanField())
    write_repository(Path("digits"), shared, "a card", {"config": {"model": named}})
    run("serve", trained)
    assert open_text_model(Path("reviews"), None, "cpu").predict("good", PredictOptions(Path("reviews"), ()))
    for found, wanted in ((trained["shared"], shared), (trained["again"], trained["bnn"])):
        assert torch.equal(found.posterior.mean(), wanted.posterior.mean())
    assert "## What it is unsure about" in (snapshot(hub, "me/mine") / "README.md").read_text()
    server, x = trained["server"], trained["x_test"]
    assert server.server_address[0] == "127.0.0.1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        trained["Handler"].log_message = lambda *_: None

        def post(body: bytes) -> Any:
            with urllib.request.urlopen(urllib.request.Request(address, data=body), timeout=30) as reply:
                return json.load(reply)

        answers = post(json.dumps(x.tolist()).encode())
        for body, code in ((b"[[1]]", 400), (b"nothing", 400), (b"[" * (1 << 20) + b"[", 413)):
            with pytest.raises((urllib.error.HTTPError, urllib.error.URLError)) as refused:
                post(body)
            if isinstance(refused.value, urllib.error.HTTPError):
                assert refused.value.code == code
                refused.value.close()
            else:
                assert code == 413  # the server may close before it has read everything
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    probs = trained["bnn"].predict(x, rule="moments").probs
    expected = trained["policy"](trained["bnn"].predict(x, rule="moments")).accepted
    assert [row["label"] for row in answers] == probs.argmax(-1).tolist()
    assert [row["probability"] for row in answers] == pytest.approx(probs.amax(-1).tolist(), abs=1e-4)
    assert [row["decision"] == "answer" for row in answers] == expected.tolist()
    assert all(math.isfinite(row["std"]) for row in answers)
    assert (trained["prediction"].label == probs.argmax(-1)).float().mean() > 0.9
    assert trained["small"].bytes == Path("model.lbc").stat().st_size


def test_file_formats(names: dict[str, Any]) -> None:
    run("file_formats", names)
    text = PAGES["file_formats"].read_text()
    assert not {key for key in json.loads(names["header"]) if f"`{key}`" not in text}
    assert {name.split(".")[0] for name in names["tensors"]} <= {*re.findall(r"\| `(\w+)\.\*` \|", text)}


def test_every_page_with_code_has_a_test() -> None:
    tested = {name.removeprefix("test_").split("_says_")[0] for name in globals() if name.startswith("test_")}
    for page in PAGES:
        assert not blocks(page) or any(name == page or name.startswith(f"{page}_") for name in tested), page
