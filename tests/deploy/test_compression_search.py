"""`lb.compress` with data: the search for a file that is small enough, or good enough."""

import builtins
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compact_cases import shared
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.deploy.compact.compact_file import Trial
from leanbayes.deploy.compact.search import parse_size
from leanbayes.evaluation import evaluate
from leanbayes.model.validation_nll import validation_nll
from leanbayes.rules import Adjoint

FINE, COARSE = Trial(64, None, "fp16"), Trial(8, None, "int8")
Batches = list[tuple[Tensor, Tensor]]


@pytest.fixture(autouse=True)
def _two_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leanbayes.deploy.compact.search.TRIALS", (FINE, COARSE))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 4))


def model(**settings: Any) -> lb.BayesianModel:
    return lb.bayesianize(network(), lb.MeanField(samples=3), **settings).eval()


@pytest.fixture
def batches() -> Batches:
    """Labels that a fine file predicts better than a coarse one: those of the network itself."""
    x = torch.randn(90, 20, generator=torch.Generator().manual_seed(1))
    y = network()(x).argmax(1)
    return [*zip(x.split(40), y.split(40), strict=True)]


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_target_size_keeps_the_best_file_that_is_small_enough(batches: Batches, tmp_path: Path) -> None:
    bnn = model()
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    large = lb.compress(bnn, tmp_path / "a", target_size="1GB", data=batches)
    assert large.chosen is not None
    assert large.chosen.trial == FINE
    assert [result.trial for result in large.tried] == [FINE, COARSE]
    small = lb.compress(bnn, tmp_path / "b", target_size=large.bytes - 1, data=batches)
    assert small.chosen is not None
    assert small.chosen.trial == COARSE
    assert small.chosen in small.tried
    assert small.path == tmp_path / "b"
    assert small.bytes == small.chosen.bytes == sum(small.parts.values()) == (tmp_path / "b").stat().st_size
    assert small.bytes < large.bytes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in bnn.state_dict().items())


def test_max_nll_increase_keeps_the_smallest_file_that_is_good_enough(batches: Batches, tmp_path: Path) -> None:
    any_file = lb.compress(model(), tmp_path / "a", max_nll_increase=100.0, data=batches)
    assert any_file.chosen is not None
    assert any_file.nll_before is not None
    assert any_file.chosen.trial == COARSE
    fine, coarse = (result.nll - any_file.nll_before for result in any_file.tried)
    assert coarse > fine
    good_file = lb.compress(model(), tmp_path / "b", max_nll_increase=max((fine + coarse) / 2, 0), data=batches)
    assert good_file.chosen is not None
    assert good_file.chosen.trial == FINE


def test_without_a_goal_the_finest_file_is_kept(batches: Batches, tmp_path: Path) -> None:
    file = lb.compress(model(), tmp_path / "a", data=batches)
    assert [result.trial for result in file.tried] == [FINE]
    assert file.chosen is file.tried[0]


def test_shared_weights_are_also_tried_as_they_are(batches: Batches, tmp_path: Path) -> None:
    bnn = lb.bayesianize(model(), lb.WeightSharing(components=16, samples=3))
    file = lb.compress(bnn, tmp_path / "a", target_size="1GB", data=batches)
    as_it_is = [Trial(None, None, "fp16"), Trial(None, None, "int8")]
    assert [result.trial for result in file.tried] == [*as_it_is, FINE, COARSE]


def test_the_score_is_the_nll_of_the_loaded_file(batches: Batches, tmp_path: Path) -> None:
    bnn = model()
    file = lb.compress(bnn, tmp_path / "a", data=batches, samples=5, seed=3)
    loaded = lb.load(tmp_path / "a", network()).eval()
    assert file.chosen is not None
    assert file.chosen.nll == pytest.approx(evaluate(loaded, batches, samples=5, seed=3)["nll"], rel=1e-9)
    assert file.nll_before == pytest.approx(evaluate(bnn, batches, samples=5, seed=3)["nll"], rel=1e-9)


def test_the_file_predicts_by_the_rule_of_the_model(batches: Batches, tmp_path: Path) -> None:
    bnn = model()
    for rule in ("moments", Adjoint(mean="moments", margins=2), "sample"):
        bnn.rule = rule
        file = lb.compress(bnn, tmp_path / "a", data=batches)
        loaded = lb.load(tmp_path / "a", network()).eval()
        assert loaded.current_rule == bnn.current_rule
        assert file.nll_before is not None
        assert file.nll_before == pytest.approx(evaluate(bnn, batches, rule=rule)["nll"], rel=1e-5)
        assert file.tried[0].nll == pytest.approx(evaluate(loaded, batches, rule=rule)["nll"], rel=1e-5)


def test_the_file_keeps_the_settings_that_a_method_gives_its_rule(batches: Batches, tmp_path: Path) -> None:
    """`moments` of lb.VDP.paper() is not that of weight sharing, as which the file is stored."""
    bnn = lb.bayesianize(network(), lb.VDP.paper())
    lb.compress(bnn, tmp_path / "a.lbc", data=batches)
    loaded = lb.load(tmp_path / "a.lbc", network())
    assert isinstance(loaded.method, lb.WeightSharing)
    assert loaded.current_rule == bnn.current_rule == bnn.method.make_rule("moments")
    assert loaded.current_rule != loaded.method.make_rule("moments")


def test_groups_of_weights_are_compressed_with_another_rule_than_their_own(batches: Batches, tmp_path: Path) -> None:
    bnn = lb.bayesianize(network(), lb.SBP(samples=3)).eval()
    lb.compress(bnn, tmp_path / "a", data=batches)
    loaded = lb.load(tmp_path / "a", network()).eval()
    assert (bnn.rule, loaded.rule) == ("example", "sample")
    x = batches[0][0]
    wanted, found = (of.predict(x, rule="mean").probs for of in (bnn, loaded))
    assert (wanted - found).abs().max() < 0.02


def test_a_calibrated_model_gives_a_calibrated_file(batches: Batches, tmp_path: Path) -> None:
    bnn = model()
    lb.compress(bnn, tmp_path / "a", data=batches)
    assert lb.load(tmp_path / "a", network()).moment_scale == (1, 1)
    bnn.moment_scale = (0.1, 3.0)
    lb.compress(bnn, tmp_path / "b", data=batches)
    loaded = lb.load(tmp_path / "b", network())
    found = loaded.moment_scale
    assert found == pytest.approx(lb.calibrate(loaded, batches), rel=0.02)
    assert found != pytest.approx((0.1, 3.0), rel=0.1)


# -- the score --------------------------------------------------------------------------------------------------------


def targets(likelihood: Any) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    if isinstance(likelihood, lb.Categorical):
        labels = torch.randint(4, (50,), generator=generator)
        labels[::7] = -100
        return labels
    if isinstance(likelihood, lb.Bernoulli):
        return torch.randint(2, (50, 4), generator=generator).float()
    outputs = 2 if isinstance(likelihood, lb.HeteroscedasticGaussian) else 4
    return torch.randn(50, outputs, generator=generator)


@pytest.mark.parametrize("rule", ["sample", "flipout", "moments", "mean"])
@pytest.mark.parametrize(
    "likelihood", [lb.Categorical(), lb.Bernoulli(), lb.Gaussian(0.3), lb.HeteroscedasticGaussian()], ids=repr
)
def test_the_nll_equals_that_of_evaluate(likelihood: Any, rule: str) -> None:
    bnn = model(likelihood=likelihood)
    bnn.rule = rule
    x = torch.randn(50, 20, generator=torch.Generator().manual_seed(1))
    batches = [*zip(x.split(20), targets(likelihood).split(20), strict=True)]
    several: list[dict[str, Any]] = [{}, {"samples": 1 if rule == "moments" else 4, "seed": 7}]
    for settings in several:
        wanted = evaluate(bnn, batches, details=False, **settings)["nll"]
        assert validation_nll(bnn, batches, **settings) == pytest.approx(wanted, rel=1e-12)


def test_the_nll_of_scaled_targets_equals_that_of_evaluate() -> None:
    torch.manual_seed(0)
    bnn = lb.bayesianize(nn.Linear(3, 2), lb.MeanField(), likelihood=lb.Gaussian(0.5))
    batches = [(torch.randn(5, 3), torch.randn(5, 2))]
    for scale in ((3.0,), (3.0, 0.1)):
        wanted = evaluate(bnn, batches, target_scale=scale)["nll"]
        assert validation_nll(bnn, batches, target_scale=scale) == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(lb.LeanBayesError, match="target_scale has 3 numbers for 2 targets"):
        validation_nll(bnn, batches, target_scale=(1.0, 2.0, 3.0))


def test_the_nll_of_dense_labels_in_bytes_equals_that_of_evaluate() -> None:
    torch.manual_seed(0)
    bnn = lb.bayesianize(nn.Conv2d(2, 3, 3, padding=1), lb.MeanField(), likelihood=lb.Categorical(ignore_index=255))
    y = torch.randint(3, (5, 6, 6), dtype=torch.uint8)
    y[:, :2] = 255
    batches = [(torch.randn(5, 2, 6, 6), y)]
    assert validation_nll(bnn, batches) == pytest.approx(evaluate(bnn, batches)["nll"], rel=1e-12)


# -- what data may be -------------------------------------------------------------------------------------------------


def test_data_may_be_a_list_a_loader_or_a_function(batches: Batches, tmp_path: Path) -> None:
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))

    def read() -> Iterator[tuple[Tensor, Tensor]]:
        yield from batches

    loader = DataLoader(TensorDataset(x, y), batch_size=40)
    files = [lb.compress(model(), tmp_path / "a", target_size="1MB", data=data) for data in (batches, loader, read)]
    assert files[0] == files[1] == files[2]


def test_data_that_cannot_be_read_again_are_refused(batches: Batches, tmp_path: Path) -> None:
    once = iter(batches)
    for data, message in (
        (iter(batches), "data can be read only once, but the search reads it several times: pass a list"),
        ((batch for batch in batches), "data can be read only once"),
        (lambda: once, "data has no labels, or can be read only once"),
        ([], "data has no labels"),
        ([x for x, _ in batches], "needs data of \\(x, y\\) batches"),
        (5, "data must be \\(x, y\\) batches, or a function that returns them, not int"),
    ):
        with pytest.raises(lb.LeanBayesError, match=message) as caught:
            lb.compress(model(), tmp_path / "a", target_size="1MB", data=data)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert not [*tmp_path.iterdir()]


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_sizes_are_numbers_or_texts() -> None:
    for text, size in (("700KB", 700_000), ("1.5 MiB", 3 << 19), ("90000", 90_000), ("0.7mb", 700_000), (12, 12)):
        assert parse_size(text) == size
    for wrong in ("", "KB", "-1KB", "1 kilo", "0", "nan", 0, -5, True):
        with pytest.raises(lb.LeanBayesError, match="cannot be read: write it as 700KB"):
            parse_size(wrong)


def test_mistakes_are_reported_in_one_sentence(batches: Batches, tmp_path: Path) -> None:
    for settings, message in (
        ({"target_size": "700KB"}, "need data to score candidates: pass data=validation_batches"),
        ({"max_nll_increase": 0.1}, "need data to score candidates"),
        ({"target_size": "much", "data": batches}, "The size 'much' cannot be read"),
        ({"target_size": 9, "max_nll_increase": 0.1, "data": batches}, "exclude each other"),
        ({"max_nll_increase": -0.1, "data": batches}, "max_nll_increase=-0.1 must not be negative"),
        ({"max_nll_increase": float("nan"), "data": batches}, "must not be negative"),
        ({"values": "int8", "data": batches}, "the search chooses the precision: leave out values and rest"),
        ({"target_size": 100, "data": batches}, "No file is as small as 100 bytes: the smallest has"),
    ):
        with pytest.raises(lb.LeanBayesError, match=message) as caught:
            lb.compress(model(), tmp_path / "a", **settings)
        assert "\n" not in str(caught.value)
    with pytest.raises(lb.LeanBayesError, match="The weights of Ensemble cannot be shared"):
        lb.compress(lb.bayesianize(network(), lb.Ensemble(2)), tmp_path / "a", data=batches)
    assert not [*tmp_path.iterdir()]


def test_no_file_is_good_enough(batches: Batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leanbayes.deploy.compact.search.TRIALS", (Trial(1, None, "int8"),))
    with pytest.raises(lb.LeanBayesError, match=r"No file is good enough: the best has .* bytes and NLL"):
        lb.compress(model(), tmp_path / "a", max_nll_increase=0.0, data=batches)


def test_a_network_with_too_few_weights_is_refused(tmp_path: Path) -> None:
    bnn = lb.bayesianize(nn.Linear(3, 2), lb.MeanField())
    with pytest.raises(lb.LeanBayesError, match="The network has too few weights to share: keep its safetensors"):
        lb.compress(bnn, tmp_path / "a", data=[(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))])


def test_other_errors_end_the_search(batches: Batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is missing is not mistaken for a network with too few weights."""
    usual = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "constriction":
            raise ModuleNotFoundError(name=name)
        return usual(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(lb.LeanBayesError, match="Compact files need constriction"):
        lb.compress(model(), tmp_path / "a", target_size="1MB", data=batches)


def test_a_path_that_cannot_be_written(batches: Batches, tmp_path: Path) -> None:
    with pytest.raises(lb.LeanBayesError, match="choose a folder"):
        lb.compress(model(), tmp_path / "nowhere" / "a", data=batches)


def test_without_data_shared_weights_are_written_as_they_are(tmp_path: Path) -> None:
    file = lb.compress(shared(), tmp_path / "a")
    assert (file.chosen, file.tried, file.nll_before) == (None, (), None)
