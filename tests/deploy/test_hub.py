"""`lb.push_to_hub` and `lb.from_pretrained`: a model travels bit-equal, and nothing in a repository is executed."""

import builtins
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from hub_cases import hub as hub
from hub_cases import snapshot
from huggingface_hub import ModelCard
from torch import nn

import leanbayes as lb

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def bnn() -> lb.BayesianModel:
    return lb.bayesianize(network(), lb.MeanField(init_std=0.3), seed=0)


def same(one: lb.BayesianModel, other: lb.BayesianModel) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_model_comes_back_bit_equal_with_its_policy(hub: Path, bnn: lb.BayesianModel) -> None:
    bnn.policy = lb.decide.fit(bnn, [(X, torch.arange(6) % 3)], false_alarms=0.5, samples=3)
    address = lb.push_to_hub(bnn, "me/mine")
    assert address.startswith("https://example.org/me/mine/commit/")
    found = lb.from_pretrained("me/mine", network())
    assert same(found, bnn)
    assert found.policy == bnn.policy
    assert not found.training
    folder = snapshot(hub, "me/mine")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "model.safetensors"]
    assert same(lb.from_pretrained(folder, network()), bnn)


def test_a_card_without_an_evaluation_says_so(hub: Path, bnn: lb.BayesianModel) -> None:
    lb.push_to_hub(bnn, "me/mine")
    card = ModelCard.load(snapshot(hub, "me/mine") / "README.md")
    assert card.data.library_name == "leanbayes"
    assert "without an evaluation" in card.text
    assert "never says when to ask a person" in card.text
    assert 'lb.from_pretrained("me/mine", make_network())' in card.text


def test_a_given_card_a_private_repository_and_a_token(hub: Path, bnn: lb.BayesianModel) -> None:
    lb.push_to_hub(bnn, "mine", card="# mine", private=True, token="hf_x", commit_message="first")
    assert (snapshot(hub, "me/mine") / "README.md").read_text() == "# mine"
    api: Any = huggingface_hub.HfApi
    assert api.call_args.kwargs["token"] == "hf_x"
    assert api.return_value.create_repo.call_args.kwargs == {"private": True, "exist_ok": True}
    assert api.return_value.upload_folder.call_args.kwargs["commit_message"] == "first"


def test_only_the_model_and_its_record_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **settings: Any) -> str:
        asked.update(settings, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(lb.FileFormatError, match="There is no file"):
        lb.from_pretrained("me/mine", network(), revision="v2", token="hf_x")
    assert asked == {
        "repo_id": "me/mine", "revision": "v2", "token": "hf_x",
        "allow_patterns": ["model.safetensors", "run.json", "config.json"],
    }  # fmt: skip


def repository(folder: Path, bnn: lb.BayesianModel, **model: Any) -> Path:
    """A folder as `leanbayes push` writes it, with a record that anybody may have changed."""
    folder.mkdir()
    lb.save(bnn, folder / "model.safetensors")
    named = {"name": "mlp", "input_shape": [4], "outputs": 3, "options": {"hidden": [6]}}
    (folder / "run.json").write_text(json.dumps({"config": {"model": named | model}}))
    return folder


def test_a_network_that_the_record_names_is_built(tmp_path: Path) -> None:
    from leanbayes.networks import build

    bnn = lb.bayesianize(build("mlp", (4,), 3, hidden=(6,)), lb.MeanField(), seed=0)
    assert same(lb.from_pretrained(repository(tmp_path / "a", bnn)), bnn)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"name": "timm:hf-hub:evil/model"}, "by its name in timm"),
        ({"name": "timm:resnet18", "options": {"pretrained_cfg_x": "/etc"}}, "can only be used from Python"),
        ({"options": {"hidden": [100_000, 100_000]}}, "far more than its model file"),
        ({"name": 3}, "does not name a network"),
    ],
)
def test_a_record_cannot_name_a_file_a_host_or_much_memory(
    model: dict[str, Any], sentence: str, tmp_path: Path, bnn: lb.BayesianModel
) -> None:
    with pytest.raises(lb.LeanBayesError, match=sentence):
        lb.from_pretrained(repository(tmp_path / "a", bnn, **model))


def test_mistakes_are_one_sentence(hub: Path, bnn: lb.BayesianModel, tmp_path: Path) -> None:
    for repo in ("me/nothing", "a b//c"):
        with pytest.raises(lb.LeanBayesError, match="is no folder, and cannot be downloaded") as error:
            lb.from_pretrained(repo, network())
        assert "\n" not in str(error.value)
        assert error.value.__suppress_context__
    (tmp_path / "empty").mkdir()
    with pytest.raises(lb.LeanBayesError, match="does not name its network: give a network"):
        lb.from_pretrained(tmp_path / "empty")
    api: Any = huggingface_hub.HfApi
    api.return_value.create_repo.side_effect = OSError("401 Client Error.\nwith a second line")
    with pytest.raises(lb.LeanBayesError, match=r"'me/x' cannot be uploaded \(401 Client Error\)") as error:
        lb.push_to_hub(bnn, "me/x")
    assert "second line" not in str(error.value)


def test_without_huggingface_hub_folders_still_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bnn: lb.BayesianModel
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ModuleNotFoundError(name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for call in (lambda: lb.push_to_hub(bnn, "me/x"), lambda: lb.from_pretrained("me/x")):
        with pytest.raises(lb.MissingPackageError, match=r"'\.\[hub\]'"):
            call()
    lb.save(bnn, tmp_path / "model.safetensors")
    assert same(lb.from_pretrained(tmp_path, network()), bnn)


# -- the mixin --------------------------------------------------------------------------------------------------------


class Net(lb.HubMixin, nn.Module):
    def __init__(self, width: int, classes: Any = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Loose(Net):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)


@pytest.mark.parametrize("method", [lb.MeanField(), lb.MCDropout(), lb.Ensemble(2)], ids=["mean", "dropout", "members"])
def test_a_class_with_the_mixin_is_rebuilt_with_its_arguments(hub: Path, method: lb.Method) -> None:
    bnn = lb.bayesianize(Net(5, classes=2), method)
    Net.push_to_hub(bnn, "me/net")
    folder = snapshot(hub, "me/net")
    assert json.loads((folder / "config.json").read_text()) == {"width": 5, "classes": 2}
    for repo in ("me/net", folder):
        found = Net.from_pretrained(repo)
        assert same(found, bnn)
        assert not found.training
    assert same(lb.from_pretrained("me/net", Net(5, 2)), bnn)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json, so it was not uploaded"),
        ("[1]", "has no arguments for Net"),
        ("{", "has no arguments for Net"),
        ('{"depth": 3}', "has no arguments for Net"),
        ("{}", "has no arguments for Net"),
    ],
)
def test_a_repository_without_arguments_for_the_class_is_refused(hub: Path, text: str | None, message: str) -> None:
    Net.push_to_hub(lb.bayesianize(Net(5), lb.MeanField()), "me/net")
    place = snapshot(hub, "me/net") / "config.json"
    place.unlink()
    if text is not None:
        place.write_text(text)
    with pytest.raises(lb.LeanBayesError, match=message) as caught:
        Net.from_pretrained("me/net")
    assert "\n" not in str(caught.value)


def test_arguments_that_cannot_be_stored_are_refused(hub: Path) -> None:
    for network in (Net(5, classes=torch.tensor(2)), Loose(5, 2)):
        with pytest.raises(lb.LeanBayesError, match="cannot be stored: pass JSON values by name"):
            lb.push_to_hub(lb.bayesianize(network, lb.MeanField()), "me/net")
    with pytest.raises(TypeError):
        Net()  # type: ignore[call-arg]
