"""`lb.decide.fit` turns held-out data into a policy, which the model file keeps."""

import copy
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_cases import expect

import leanbayes as lb
from leanbayes.deploy.loading import describe
from leanbayes.likelihoods.decisions.abstention import fit_abstention
from leanbayes.likelihoods.decisions.conformal import fit_intervals, fit_sets
from leanbayes.likelihoods.decisions.ood_gate import fit_gate
from leanbayes.rules import Adjoint, MomentPropagation


def network(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, outputs))


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of the plane, and the number of their positive coordinates, of which some labels are wrong."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(count, 2, generator=generator)
    noisy = x + 0.3 * torch.randn(count, 2, generator=generator)
    return x, (noisy > 0).sum(-1)


def trained(likelihood: Any = None, outputs: int = 3, method: Any = None) -> lb.BayesianModel:
    torch.manual_seed(0)
    bnn = lb.bayesianize(network(outputs), method or lb.MeanField(samples=8), likelihood=likelihood or lb.Categorical())
    x, y = points(600, 0)
    y = y if outputs == 3 else y[:, None].float()
    optimizer = torch.optim.Adam(bnn.parameter_groups(), 2e-2)
    for _ in range(150):
        optimizer.zero_grad()
        lb.elbo_loss(bnn, x, y, num_data=600, temperature=0.1).backward()
        optimizer.step()
    return bnn.eval()


@pytest.fixture(scope="module")
def classifier() -> lb.BayesianModel:
    return trained()


@pytest.fixture
def bnn(classifier: lb.BayesianModel) -> lb.BayesianModel:
    return copy.deepcopy(classifier)


def batches(count: int = 1500, seed: int = 1, size: int = 400) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = points(count, seed)
    return zip(x.split(size), y.split(size), strict=True)


def predict(bnn: lb.BayesianModel, x: Tensor, **settings: Any) -> Any:
    return bnn.predict(x, generator=torch.Generator().manual_seed(0), **settings)


def test_a_policy_is_fitted_to_the_held_out_predictions(bnn: lb.BayesianModel) -> None:
    policy = lb.decide.fit(bnn, batches(), risk=0.03, false_alarms=0.05, coverage=0.9)
    assert policy is bnn.policy
    assert (policy.rule, policy.samples) == ("sample", 8)
    x, y = points(1500, 1)
    prediction = predict(bnn, x)  # batches share the samples of the weights
    gate = fit_gate(prediction.mutual_information, 0.05, "mutual_information")
    assert policy.gate is not None
    assert policy.gate.threshold == pytest.approx(gate.threshold, rel=1e-4)
    below = prediction.mutual_information < gate.threshold
    wrong, score = prediction.label != y, 1 - prediction.confidence.double()
    abstention = fit_abstention(score[below], wrong[below], 0.03, 0.95, "confidence", not_answered=int((~below).sum()))
    assert policy.abstention is not None
    assert policy.abstention.threshold == pytest.approx(abstention.threshold, rel=1e-4)
    assert policy.abstention.answered == pytest.approx(abstention.answered, abs=0.002)
    assert policy.abstention.examples == 1500
    assert policy.sets is not None
    assert policy.sets.quantile == pytest.approx(fit_sets(prediction.probs, y, 0.9, "adaptive").quantile, abs=1e-5)
    decision = policy(prediction)
    assert decision.accepted.double().mean().item() == pytest.approx(policy.abstention.answered, abs=0.002)
    assert decision.alarm.sum() <= 0.05 * 1501


def test_the_guarantees_hold_on_new_data(bnn: lb.BayesianModel) -> None:
    policy = lb.decide.fit(bnn, batches(3000), risk=0.05, false_alarms=0.1, coverage=0.9)
    x, y = points(20_000, 2)
    prediction = predict(bnn, x)
    decision = policy(prediction)
    assert (prediction.label != y)[decision.accepted].double().mean() <= 0.05
    assert decision.accepted.double().mean() > 0.5
    assert decision.alarm.double().mean().item() == pytest.approx(0.1, abs=0.02)
    assert decision.sets is not None
    assert decision.sets.gather(-1, y[:, None]).double().mean() >= 0.88
    assert len(decision.verdict) == 20_000


@pytest.mark.parametrize("rule", ["sample", "moments"])
def test_samples_and_one_pass_have_policies(bnn: lb.BayesianModel, rule: str) -> None:
    policy = lb.decide.fit(bnn, batches(), coverage=0.9, false_alarms=0.05, rule=rule)
    assert (policy.rule, policy.samples) == (rule, 1 if rule == "moments" else 8)
    x, y = points(4000, 3)
    sets = policy(predict(bnn, x, rule=rule)).sets
    assert sets is not None
    assert sets.gather(-1, y[:, None]).double().mean() >= 0.87


@pytest.mark.parametrize("as_current", [True, False])
def test_a_policy_remembers_the_settings_of_a_rule(bnn: lb.BayesianModel, tmp_path: Path, as_current: bool) -> None:
    rule, x = Adjoint(mean="moments", margins=2), points(50, 2)[0]
    if as_current:
        bnn.rule = rule
    policy = lb.decide.fit(bnn, batches(), coverage=0.9, rule=None if as_current else rule)
    lb.save(bnn, tmp_path / "model.safetensors")
    loaded = lb.load(tmp_path / "model.safetensors", network())
    assert loaded.policy == policy
    found, expected = loaded.predict(x, rule=policy.rule), bnn.predict(x, rule=rule)
    assert torch.equal(found.probs, expected.probs)
    assert not torch.equal(found.probs, bnn.predict(x, rule="adjoint").probs)


@pytest.mark.parametrize("other", ["mean", "adjoint", "moments:correlation=none"])
def test_a_policy_warns_of_another_rule_with_as_many_passes(bnn: lb.BayesianModel, other: str) -> None:
    policy, x = lb.decide.fit(bnn, batches(), coverage=0.9, rule="moments"), points(5, 2)[0]
    policy(bnn.predict(x, rule=MomentPropagation()))
    with pytest.warns(lb.RuleMismatchWarning, match=rf"\(rule moments\), but this one is .* \(rule {other}\): its"):
        policy(bnn.predict(x, rule=other))


def test_a_plain_network_raises_alarms_by_entropy() -> None:
    policy = lb.decide.fit(trained(method=lb.Deterministic()), batches(), false_alarms=0.05)
    assert policy.gate is not None
    assert policy.gate.score == "entropy"


def test_examples_without_a_label_do_not_count(bnn: lb.BayesianModel) -> None:
    x, y = points(1000, 1)
    known = lb.decide.fit(bnn, [(x, y)], coverage=0.9)
    ignored = torch.full((300,), -100)
    some = lb.decide.fit(bnn, [(torch.cat([x, torch.zeros(300, 2)]), torch.cat([y, ignored]))], coverage=0.9)
    assert some.sets is not None
    assert known.sets is not None
    assert some.sets.quantile == pytest.approx(known.sets.quantile, abs=1e-5)
    assert some.sets.examples == 1000


def test_a_regression_has_intervals_and_a_tolerance() -> None:
    bnn = trained(lb.Gaussian(0.3), outputs=1)
    x, y = points(2000, 1)
    policy = lb.decide.fit(bnn, [(x, y[:, None].float())], coverage=0.9, risk=0.25, tolerance=0.8, false_alarms=0.1)
    prediction = predict(bnn, x)
    expected = fit_intervals(y[:, None] - prediction.mean, prediction.std, 0.9).quantile
    assert policy.intervals is not None
    assert policy.intervals.quantile == pytest.approx(expected, rel=1e-4)
    assert policy.abstention is not None
    assert (policy.abstention.score, policy.abstention.tolerance) == ("std", 0.8)
    assert policy.gate is not None
    assert policy.gate.score == "epistemic_std"
    new, target = points(5000, 2)
    decision = policy(predict(bnn, new))
    assert decision.interval is not None
    low, high = decision.interval
    assert ((low <= target[:, None]) & (target[:, None] <= high)).double().mean().item() == pytest.approx(0.9, abs=0.03)
    far = (predict(bnn, new).mean[:, 0] - target).abs() > 0.8
    assert far[decision.accepted].double().mean() <= 0.25
    expect(lambda: lb.decide.fit(bnn, [(x, y[:, None].float())], risk=0.1), "needs a tolerance")


def test_yes_or_no_has_sets_of_two_classes() -> None:
    bnn = lb.bayesianize(network(1), lb.MeanField(), likelihood=lb.Bernoulli())
    x, y = points(500, 1)
    yes = (y > 0).float()[:, None]
    policy = lb.decide.fit(bnn, [(x, yes)], coverage=0.9)
    sets = policy(bnn.predict(x)).sets
    assert sets is not None
    assert sets.shape == (500, 2)
    assert sets.gather(-1, yes.long()).double().mean() >= 0.88


def test_what_cannot_be_fitted_is_refused(bnn: lb.BayesianModel) -> None:
    expect(lambda: lb.decide.fit(bnn, batches()), "nothing to decide")
    expect(lambda: lb.decide.fit(bnn, [], risk=0.1), "no held-out batches")
    expect(lambda: lb.decide.fit(bnn, batches(20), risk=0.01), "20 held-out examples are too few")
    expect(lambda: lb.decide.fit(bnn, batches(), risk=0.0011, confidence=0.8), "risk", "0.0011")
    expect(lambda: lb.decide.fit(bnn, batches(), risk=0.1, score="std"), "no score 'std'")
    expect(lambda: lb.decide.fit(bnn, batches(), risk=0.1, tolerance=1.0), "for regressions")
    expect(lambda: lb.decide.fit(bnn, batches(), risk=1.5), "risk=1.5")
    expect(lambda: lb.decide.fit(bnn, batches(), coverage=0.9, sets="small"), "kind='small'")  # type: ignore[arg-type]
    assert bnn.policy is None


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_file_keeps_the_policy(bnn: lb.BayesianModel, tmp_path: Path) -> None:
    lb.save(bnn, tmp_path / "plain")
    policy = lb.decide.fit(bnn, batches(), risk=0.05, false_alarms=0.05, coverage=0.9)
    lb.save(bnn, tmp_path / "decides")
    assert lb.load(tmp_path / "decides", network()).policy == policy
    assert lb.load(tmp_path / "plain", network()).policy is None
    assert describe(tmp_path / "decides")["policy"] == str(policy)
    assert describe(tmp_path / "plain")["policy"] is None
    bnn.policy = None
    lb.save(bnn, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "plain").read_bytes()


@pytest.mark.parametrize("wrong", [1, "a", [], {"type": "MeanField"}, {"type": "Policy", "rule": 1, "samples": 2}])
def test_a_damaged_policy_is_refused(bnn: lb.BayesianModel, tmp_path: Path, wrong: Any) -> None:
    lb.save(bnn, tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    start = json.loads(data[8 : 8 + length])
    header = json.loads(start["__metadata__"]["leanbayes"])
    header["policy"] = wrong
    del header["digest"]
    del header["module_versions"]
    start["__metadata__"]["leanbayes"] = json.dumps(header)
    text = json.dumps(start).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "b").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(lb.FileFormatError):
        lb.load(tmp_path / "b", network())


def test_a_policy_is_dropped_when_predictions_change(bnn: lb.BayesianModel, tmp_path: Path) -> None:
    lb.decide.fit(bnn, batches(), coverage=0.9)
    assert lb.restrict(bnn, 0.5).policy is None
    shared = lb.bayesianize(bnn, lb.WeightSharing(components=8))
    assert shared.policy is None
    lb.decide.fit(shared, batches(), coverage=0.9)
    assert lb.compress(shared, tmp_path / "a").left_out[-1] == "policy"
    assert lb.load(tmp_path / "a", network()).policy is None
    assert copy.deepcopy(bnn).policy == bnn.policy
    lb.calibrate(bnn, batches())
    assert bnn.policy is None
