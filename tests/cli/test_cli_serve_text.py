"""`leanbayes serve` with a text classifier of transformers, in a real browser."""

import json
import shutil
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from browser_cases import browser as browser
from cli_cases import Cli
from serve_cases import ask, dropped, served
from text_cases import CONFIG, LONGEST, WORDS, tokenizer
from torch import nn
from transformers import BertForSequenceClassification

import leanbayes as lb


def tokens(*texts: str) -> dict[str, torch.Tensor]:
    """Tokens by hand: [CLS], the words, [SEP]."""
    rows = [[2, *(WORDS.index(word) if word in WORDS else 1 for word in text.split()), 3] for text in texts]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids)}


def saved(folder: Path, network: nn.Module) -> lb.BayesianModel:
    """A model with random weights and a policy, its config and its tokenizer in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    bnn = lb.bayesianize(network, lb.MeanField(init_std=0.5), seed=0).eval()
    held_out = tokens("the film was good", "the film was bad", "the film very good")
    lb.decide.fit(bnn, [(held_out, torch.tensor([1, 0, 1]))], false_alarms=0.34, samples=5)
    lb.save(bnn, folder / "model.safetensors")
    CONFIG.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return bnn


@pytest.fixture(scope="module")
def bnn(tmp_path_factory: pytest.TempPathFactory) -> tuple[lb.BayesianModel, Path]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = BertForSequenceClassification(CONFIG)
    folder = tmp_path_factory.mktemp("texts") / "reviews"
    return saved(folder, network), folder


@pytest.fixture(scope="module")
def server(bnn: tuple[lb.BayesianModel, Path]) -> Iterator[ThreadingHTTPServer]:
    yield from served(bnn[1])


def test_a_text_is_predicted_as_from_python(server: ThreadingHTTPServer, bnn: tuple[lb.BayesianModel, Path]) -> None:
    status, (row,), _ = ask(server, body=b"the film was very good\n")
    assert status == 200
    wanted = bnn[0].predict(tokens("the film was very good"), 5, generator=torch.Generator().manual_seed(0))
    assert row["label"] == CONFIG.id2label[int(wanted.label)]
    assert row["probability"] == pytest.approx(wanted.confidence.item(), rel=1e-6)
    assert row["total_uncertainty"] == pytest.approx(wanted.entropy.item(), rel=1e-6)
    assert row["epistemic_uncertainty"] == pytest.approx(wanted.mutual_information.item(), rel=1e-5)
    assert bnn[0].policy is not None
    assert row["verdict"] == bnn[0].policy(wanted).verdict[0]
    assert "cut" not in row


def test_a_long_text_is_cut_and_the_answer_says_so(
    server: ThreadingHTTPServer, bnn: tuple[lb.BayesianModel, Path]
) -> None:
    _, (row,), _ = ask(server, body=b"good " * 20)
    assert row["cut"] == f"only the first {LONGEST} of 22 tokens were read"
    wanted = bnn[0].predict(tokens("good " * (LONGEST - 2)), 5, generator=torch.Generator().manual_seed(0))
    assert row["probability"] == pytest.approx(wanted.confidence.item(), rel=1e-6)


def test_what_is_no_text_is_refused(server: ThreadingHTTPServer) -> None:
    for body in (b"", b" \n", b"\xff\xfe\x00"):
        status, found, _ = ask(server, body=body)
        assert status == 400
        assert found["error"].endswith(": write one.")


def test_the_page_of_a_text_in_a_browser(browser: Any, server: ThreadingHTTPServer) -> None:
    page = browser.new_context().new_page()
    page.set_default_timeout(30_000)
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.goto(f"http://127.0.0.1:{server.server_port}/")
    assert page.text_content("h1") == "reviews, bert"
    page.get_by_label("A text").fill("the film was <b>bad</b>")
    page.click("button")
    page.wait_for_selector("article")
    (row,) = ask(server, body=b"the film was <b>bad</b>")[1]
    for name in ("label", "verdict"):
        assert page.text_content(f"[data-name={name}]") == row[name]
    for name in ("probability", "total_uncertainty", "epistemic_uncertainty"):
        assert float(page.text_content(f"[data-name={name}]")) == pytest.approx(row[name], rel=1e-3)
    dropped(page, "review.txt", "the film was very good " * 3)
    page.wait_for_selector("[data-name=cut]")
    assert "tokens were read" in page.text_content("[data-name=cut]")
    assert not heard
    page.context.close()


OWN = """
import torch
from transformers import BertConfig, BertForSequenceClassification

class Adapted(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bert, self.extra = BertForSequenceClassification(config), torch.nn.Linear(2, 2)
    def forward(self, **inputs):
        return self.extra(self.bert(**inputs).logits)

def make_network():
    return Adapted(BertConfig.from_pretrained("adapted"))

def nothing():
    return 3
"""


def test_a_network_of_the_user_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, bnn: tuple[lb.BayesianModel, Path]
) -> None:
    Path("own_texts.py").write_text(OWN)
    CONFIG.save_pretrained("adapted")
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_texts  # type: ignore[import-not-found]

    wanted = saved(Path("adapted"), own_texts.make_network())
    serving = served(Path("adapted"), network="own_texts:make_network")
    (row,) = ask(next(serving), body=b"the film was good")[1]
    assert next(serving, None) is None  # stops the server
    prediction: Any = wanted.predict(tokens("the film was good"), 5, generator=torch.Generator().manual_seed(0))
    assert row["probability"] == pytest.approx(prediction.confidence.item(), rel=1e-6)
    for network, sentence in (
        ("own_texts", "must be MODULE:FUNCTION"),
        ("own_texts:missing", "check the names"),
        ("no_such_module:f", "check the names"),
        ("own_texts:nothing", "must return a torch.nn.Module"),
    ):
        assert sentence in cli("serve", "adapted", "--network", network, "--port", 0, code=1).err
    assert "not" in cli("serve", "adapted", "--port", 0, code=1).err  # the plain classifier has another architecture


def test_mistakes_are_one_sentence(
    cli: Cli, bnn: tuple[lb.BayesianModel, Path], digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda self: pytest.fail("it serves"))
    shutil.copytree(bnn[1], "broken")
    Path("broken/config.json").write_text("{}")
    shutil.copytree(bnn[1], "code")
    config = json.loads(Path("code/config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "evil.Evil"}, "model_type": "evil"}
    Path("code/config.json").write_text(json.dumps(config))
    Path("code/evil.py").write_text("raise SystemExit('it ran')")
    for words, sentence in (
        (("broken",), "transformers cannot open broken"),
        (("code",), "transformers cannot open code"),
        ((digits, "--network", "a:b"), "is for text classifiers"),
    ):
        output = cli("serve", *words, "--port", 0, code=1)
        assert sentence in output.err
        assert "it ran" not in output.err
        assert output.err.count("\n") == 1
