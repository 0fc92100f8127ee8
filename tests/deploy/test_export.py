"""`lb.export_onnx` and `lb.export_program`: ONNX files in onnxruntime, and torch.export programs, against torch."""

import copy
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from export_cases import NETWORKS, UNet, lenet, mlp, onnx_outputs
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.deploy import export, one_pass_graph
from leanbayes.likelihoods import Likelihood
from leanbayes.rules import MomentPropagation


class Sum(nn.Module):
    """Two inputs, and a third that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, a: Tensor, b: Tensor, shared: Tensor) -> Tensor:
        return self.first(a) + self.second(b).tanh() * shared


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


def assert_predicts(outputs: dict[str, Tensor], bnn: lb.BayesianModel, x: Tensor) -> None:
    """Compare outputs with `predict` and with the moments of one pass."""
    with torch.no_grad(), bnn.using("moments"):
        moments = bnn(x)
    made = bnn.predict(x, rule="moments")
    if isinstance(made, lb.RegressionPrediction):
        wanted = {"mean": made.mean, "variance": made.variance, "epistemic_variance": made.epistemic_variance}
    else:
        wanted = {"mean": moments.loc, "variance": moments.variance.expand_as(moments.loc), "probs": made.probs}
        wanted["expected_entropy"] = made.expected_entropy
    assert list(outputs) == list(wanted)
    for name, value in wanted.items():
        assert_near(outputs[name], value)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_file_predicts_as_predict_does(name: str, tmp_path: Path) -> None:
    build, shape, argument = NETWORKS[name]
    bnn = lb.bayesianize(build(), lb.MeanField(init_std=0.2)).eval()
    made = lb.export_onnx(bnn, tmp_path / "a.onnx", torch.randn(3, *shape))
    assert made.inputs == (argument,)
    assert made.error is not None
    assert made.error < 1e-5
    for rows in (1, 5):
        x = torch.randn(rows, *shape)
        outputs = onnx_outputs(made.path, x)
        assert_predicts(outputs, bnn, x)
        assert outputs["variance"].min() > 0
        torch.testing.assert_close(outputs["probs"].sum(1), torch.ones_like(outputs["probs"][:, 0]))


def test_a_file_can_take_tokens(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Embedding(7, 8), nn.Flatten(), nn.Linear(40, 3))
    bnn = lb.bayesianize(network, lb.MeanField(init_std=0.2)).eval()
    made = lb.export_onnx(bnn, tmp_path / "a.onnx", torch.randint(7, (1, 5)))
    assert made.inputs == ("input",)
    for rows in (2, 5):
        ids = torch.randint(7, (rows, 5))
        assert_predicts(onnx_outputs(made.path, ids), bnn, ids)


@pytest.mark.parametrize(
    "likelihood",
    [lb.Gaussian(0.3), lb.Gaussian(0.3, learned=True), lb.HeteroscedasticGaussian(), lb.Bernoulli(), lb.Categorical()],
    ids=lambda likelihood: f"{type(likelihood).__name__}-{likelihood.settings.get('learned', '')}",
)
def test_the_outputs_follow_the_likelihood(likelihood: Likelihood, tmp_path: Path) -> None:
    bnn = lb.bayesianize(mlp(), lb.MeanField(init_std=0.5), likelihood=likelihood)
    made = lb.export_onnx(bnn, tmp_path / "a.onnx", torch.randn(2, 3))
    for rows in (1, 5):
        x = 3 * torch.randn(rows, 3)
        assert_predicts(onnx_outputs(made.path, x), bnn, x)


def test_calibration_factors_are_in_the_file(tmp_path: Path) -> None:
    bnn = lb.bayesianize(mlp(), lb.MeanField(init_std=1.0)).eval()
    x = torch.randn(5, 3)
    before = onnx_outputs(lb.export_onnx(bnn, tmp_path / "a.onnx", x).path, x)
    mean, std = lb.calibrate(bnn, [torch.randn(50, 3)], to="samples", generator=torch.Generator().manual_seed(0))
    after = onnx_outputs(lb.export_onnx(bnn, tmp_path / "a.onnx", x).path, x)
    assert abs(std - 1) > 1e-3
    assert_predicts(after, bnn, x)
    assert_near(after["mean"], before["mean"] * mean)
    assert_near(after["variance"], before["variance"] * std**2)


def test_settings_of_the_rule_are_used(tmp_path: Path) -> None:
    bnn, x = lb.bayesianize(lenet(), lb.MeanField(init_std=0.2)).eval(), torch.randn(2, 1, 8, 8)
    rule = MomentPropagation(correlation="none", activations="taylor")
    outputs = onnx_outputs(lb.export_onnx(bnn, tmp_path / "a.onnx", x, rule=rule).path, x)
    with torch.no_grad(), bnn.using(rule):
        wanted = bnn(x)
    assert_near(outputs["variance"], wanted.variance)
    with torch.no_grad(), bnn.using("moments"):
        assert not torch.allclose(outputs["variance"], bnn(x).variance, rtol=1e-2)


def test_several_inputs_keep_their_names(tmp_path: Path) -> None:
    bnn = lb.bayesianize(Sum(), lb.MeanField(init_std=0.2))
    shared = torch.randn(4)
    for example in (
        (torch.randn(3, 3), torch.randn(3, 2), shared),
        {"a": torch.randn(3, 3), "b": torch.randn(3, 2), "shared": shared},
    ):
        made = lb.export_onnx(bnn, tmp_path / "a.onnx", example)
        assert made.inputs == ("a", "b", "shared")
        a, b = torch.randn(5, 3), torch.randn(5, 2)
        with torch.no_grad(), bnn.using("moments"):
            wanted = bnn(a, b, shared)
        outputs = onnx_outputs(made.path, a, b, shared)
        assert_near(outputs["mean"], wanted.loc)
        assert_near(outputs["variance"], wanted.variance)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # by torch 2.10 itself
def test_a_program_has_the_same_outputs(tmp_path: Path) -> None:
    bnn = lb.bayesianize(lenet(), lb.MeanField(init_std=0.2)).eval()
    torch.export.save(lb.export_program(bnn, torch.randn(1, 1, 8, 8)), tmp_path / "a.pt2")
    program = torch.export.load(tmp_path / "a.pt2").module()
    for rows in (1, 5):
        x = torch.randn(rows, 1, 8, 8)
        assert_predicts(program(x), bnn, x)


def test_the_file_is_valid_and_contains_no_paths(tmp_path: Path) -> None:
    bnn = lb.bayesianize(lenet(), lb.MeanField())
    made = lb.export_onnx(bnn, tmp_path / "a.onnx", torch.randn(2, 1, 8, 8))
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]
    assert made.bytes == made.path.stat().st_size
    model = onnx.load(made.path)
    onnx.checker.check_model(model, full_check=True)
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert str(Path(lb.__file__).parent).encode() not in made.path.read_bytes()
    assert b"OnePassGraph" not in made.path.read_bytes()


def metadata_of(path: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


def test_a_program_can_decide_from_the_file_alone(tmp_path: Path) -> None:
    bnn = lb.bayesianize(mlp(), lb.MeanField(init_std=0.8), seed=0)
    generator = torch.Generator().manual_seed(0)
    held_out = 2 * torch.randn(400, 3, generator=generator)
    labels = torch.multinomial(bnn.predict(held_out, rule="moments").probs, 1, generator=generator)[:, 0]
    settings: dict[str, Any] = {"risk": 0.45, "false_alarms": 0.1, "coverage": 0.9, "rule": "moments"}
    policy = lb.decide.fit(bnn, [(held_out, labels)], ood_score="mutual_information", **settings)
    given = {"classes": ["ä", "b"], "normalize": {"mean": [0.5], "std": [0.25]}, "note": "by hand"}
    made = lb.export_onnx(bnn, tmp_path / "a.onnx", held_out[:2], metadata=given)
    found = metadata_of(made.path)
    assert found["note"] == "by hand"
    assert [json.loads(found[name]) for name in ("classes", "normalize")] == [given["classes"], given["normalize"]]
    assert json.loads(found["units"]).keys() == {*made.outputs}
    assert (found["likelihood"], found["leanbayes"]) == ("Categorical", lb.__version__)
    session = onnxruntime.InferenceSession(str(made.path), providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map == found

    x = 4 * torch.randn(300, 3, generator=generator)
    decided, stored = policy(bnn.predict(x, rule="moments")), json.loads(found["policy"])
    probs, expected = session.run(["probs", "expected_entropy"], {made.inputs[0]: x.numpy()})
    information = -(probs * np.log(probs)).sum(1) - expected
    close = 1e-5  # rounding must not decide
    clear = np.abs(information - stored["gate"]["threshold"]) > close
    np.testing.assert_array_equal((information > stored["gate"]["threshold"])[clear], decided.alarm.numpy()[clear])
    assert 0 < decided.alarm.sum() < len(x)
    limit = stored["abstention"]["threshold"]
    clear &= np.abs(1 - probs.max(1) - limit) > close
    accepted = (information < stored["gate"]["threshold"]) & (1 - probs.max(1) < limit)
    np.testing.assert_array_equal(accepted[clear], decided.accepted.numpy()[clear])


def test_a_policy_of_other_predictions_is_left_out(tmp_path: Path) -> None:
    bnn = lb.bayesianize(mlp(), lb.MeanField(init_std=0.5))
    x = torch.randn(100, 3)
    lb.decide.fit(bnn, [(x, bnn.predict(x).label)], coverage=0.8, samples=5)
    with pytest.warns(lb.RuleMismatchWarning, match="the file does not have it"):
        made = lb.export_onnx(bnn, tmp_path / "a.onnx", x[:2])
    assert "policy" not in metadata_of(made.path)
    other = MomentPropagation(correlation="none")
    lb.decide.fit(bnn, [(x, bnn.predict(x).label)], coverage=0.8, rule=other)
    assert "policy" in metadata_of(lb.export_onnx(bnn, tmp_path / "a.onnx", x[:2], rule=other).path)
    with pytest.warns(lb.RuleMismatchWarning, match="the file does not have it"):
        lb.export_onnx(bnn, tmp_path / "a.onnx", x[:2])
    bnn.policy = None
    with pytest.raises(lb.LeanBayesError, match="'units'"):
        lb.export_onnx(bnn, tmp_path / "b.onnx", x[:2], metadata={"units": "m"})
    with pytest.raises(lb.LeanBayesError, match="JSON"):
        lb.export_onnx(bnn, tmp_path / "b.onnx", x[:2], metadata={"network": bnn})


def test_the_model_does_not_change(tmp_path: Path) -> None:
    bnn = lb.bayesianize(nn.Sequential(nn.Dropout(0.5), mlp()).double(), lb.MeanField()).train()
    next(module for module in bnn.modules() if isinstance(module, nn.Dropout)).eval()
    state, modes = copy.deepcopy(bnn.state_dict()), [module.training for module in bnn.modules()]
    lb.export_onnx(bnn, tmp_path / "a.onnx", torch.randn(2, 3, dtype=torch.float64))
    assert modes == [module.training for module in bnn.modules()]
    assert bnn.rule == lb.MeanField().rule
    assert bnn.state_dict().keys() == state.keys()
    for name, value in bnn.state_dict().items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, state[name])
    assert all(p.requires_grad for p in bnn.parameters())


def test_dense_probabilities_are_averaged_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, x = lb.bayesianize(UNet(), lb.MeanField(init_std=0.2)).eval(), torch.randn(2, 1, 8, 8)
    monkeypatch.setattr(one_pass_graph, "_ELEMENTS", 3 * 64 * 50)  # 50 samples at once, and 28 at the end
    assert_predicts(lb.export_program(bnn, x).module()(x), bnn, x)


# -- mistakes ---------------------------------------------------------------------------------------------------------


class Lengthy(nn.Module):
    """A network that reads the number of examples with len(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.zeros(len(x), 2)


@pytest.mark.parametrize(
    ("network", "method", "example", "rule", "sentence"),
    [
        (mlp, lb.Deterministic(), torch.ones(2, 3), "moments", "Deterministic has no Bayesian weights"),
        (mlp, lb.MCDropout(0.1), torch.ones(2, 3), "moments", "MCDropout has no Bayesian weights"),
        (mlp, lb.MeanField(), torch.ones(2, 3), "sample", "'sample' gives no variance in one pass"),
        (mlp, lb.MeanField(), torch.ones(0, 3), "moments", "at least one example"),
        (mlp, lb.MeanField(), (torch.ones(2, 3), True), "moments", "must be a tensor, or a tuple or dict of tensors"),
        (Lengthy, lb.MeanField(), torch.ones(2, 3), "moments", r"which x.shape\[0\] can replace"),
    ],
    ids=["deterministic", "dropout", "rule", "empty", "types", "untraceable"],
)
def test_mistakes_are_reported_in_one_sentence(
    network: Callable[[], nn.Module], method: lb.Method, example: Any, rule: str, sentence: str, tmp_path: Path
) -> None:
    bnn = lb.bayesianize(network(), method)
    with pytest.raises(lb.LeanBayesError, match=sentence):
        lb.export_onnx(bnn, tmp_path / "a.onnx", example, rule=rule)
    assert list(tmp_path.iterdir()) == []


def test_only_bayesian_models_are_exported(tmp_path: Path) -> None:
    with pytest.raises(lb.LeanBayesError, match=r"Only a model from lb\.bayesianize can be exported, not Sequential"):
        lb.export_onnx(mlp(), tmp_path / "a.onnx", torch.ones(2, 3))  # type: ignore[arg-type]


def test_a_missing_folder(tmp_path: Path) -> None:
    bnn = lb.bayesianize(mlp(), lb.MeanField())
    with pytest.raises(lb.LeanBayesError, match=r"Cannot write .*a\.onnx"):
        lb.export_onnx(bnn, tmp_path / "nowhere" / "a.onnx", torch.ones(2, 3))


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, found = lb.bayesianize(mlp(), lb.MeanField()), importlib.util.find_spec
    for missing in ("onnxscript", "onnx"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, no=missing: None if name == no else found(name))
        with pytest.raises(lb.LeanBayesError, match=rf"needs {missing}: run pip install '\.\[export\]'"):
            lb.export_onnx(bnn, tmp_path / "a.onnx", torch.ones(2, 3))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else found(name))
    assert lb.export_onnx(bnn, tmp_path / "a.onnx", torch.ones(2, 3)).error is None


def test_a_model_that_is_too_large_for_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_LARGEST_FILE", 100)
    with pytest.raises(lb.LeanBayesError, match=r"use lb\.export_program and torch\.export\.save"):
        lb.export_onnx(lb.bayesianize(mlp(), lb.MeanField()), tmp_path / "a.onnx", torch.ones(2, 3))


def test_a_network_that_onnx_cannot_express_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("No ONNX function found for aten.strange.\nMore lines.")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(lb.LeanBayesError, match=r"cannot translate the network \(No ONNX .* aten.strange\): use lb"):
        lb.export_onnx(lb.bayesianize(mlp(), lb.MeanField()), tmp_path / "a.onnx", torch.ones(2, 3))
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_file_does_not_replace_a_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, path, make = lb.bayesianize(mlp(), lb.MeanField()), tmp_path / "a.onnx", export._onnx_model
    lb.export_onnx(bnn, path, torch.ones(2, 3))
    good = path.read_bytes()

    def damaged(*args: Any) -> bytes:
        model = onnx.ModelProto.FromString(make(*args))
        for weights in model.graph.initializer:
            if weights.name.endswith("mean_0"):
                weights.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weights) * 1.01, weights.name))
        return model.SerializeToString()

    monkeypatch.setattr(export, "_onnx_model", damaged)
    with pytest.raises(lb.LeanBayesError, match="The output mean of the file differs by") as raised:
        lb.export_onnx(bnn, path, torch.ones(2, 3))
    off = float(str(raised.value).split("differs by ")[1].split()[0])
    assert 1e-4 < off < 0.1
    monkeypatch.setattr(export, "_onnx_model", lambda *args: b"nothing")
    with pytest.raises(lb.LeanBayesError, match="onnxruntime cannot run the file"):
        lb.export_onnx(bnn, path, torch.ones(2, 3))
    assert path.read_bytes() == good
    assert list(tmp_path.iterdir()) == [path]
