"""The costs of models: FLOPs agree with closed forms and torch's counter, sizes with the file. No test is on time."""

import copy
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_cases import CASES
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

import leanbayes as lb
from leanbayes.core.config import configurable
from leanbayes.core.counters import CostCounter, PeakMemory
from leanbayes.core.flops import FlopCounter, Flops
from leanbayes.core.layout import Layout
from leanbayes.evaluation import cost
from leanbayes.evaluation.cost import Comparison, Costs, costs_of, count_flops, deterministic_of, training_flops
from leanbayes.networks import resnet18, unet, vit_tiny
from leanbayes.posteriors import Posterior

MLP = 2 * 4 * (6 * 16 + 16 * 16 + 16 * 3)  # FLOPs of the batch of four through the network "mlp"


def model(name: str, method: lb.Method, **settings: Any) -> tuple[lb.BayesianModel, Any]:
    case = CASES[name]
    return lb.bayesianize(case.build(), method, **settings), case.example()


# -- a posterior with zeros -------------------------------------------------------------------------------------------


class SparsePosterior(Posterior):
    """Every n-th weight has a mean, and every m-th a std; all else is exactly zero."""

    kept: Tensor
    random: Tensor

    def __init__(self, layout: Layout, mean: Tensor, every: int, random_every: int) -> None:
        super().__init__(layout)
        self.mu = nn.Parameter(torch.ones_like(mean))
        position = layout.join([torch.arange(slot.numel).view(slot.shape) for slot in layout])
        self.register_buffer("kept", (position % every == 0).to(mean))
        self.register_buffer("random", (position % random_every == 0).to(mean))

    def mean(self) -> Tensor:
        return self.mu * self.kept

    def variance(self) -> Tensor:
        return 0.01 * self.random

    def sample(self, key: Tensor) -> Tensor:
        return self.mean() + 0.1 * self.random

    def kl(self, key: Tensor) -> Tensor:
        return self.mu.sum() * 0


@configurable
@dataclass(frozen=True)
class Sparse(lb.Method):
    """A method for the tests: 1/every of the weights is nonzero, and 1/random_every is random."""

    every: int = 4
    random_every: int = 4
    samples = 5

    def posterior(self, layout: Layout, mean: Tensor, variance: Tensor | None) -> SparsePosterior:
        return SparsePosterior(layout, mean, self.every, self.random_every)


@pytest.mark.parametrize(
    ("rule", "every", "random_every", "dense", "effective"),
    [
        ("sample", 4, 4, 1, 1 / 4),  # a sparse subspace
        ("mean", 4, 4, 1, 1 / 4),
        ("sample", 1, 8, 1, 1),  # some of the weights are random: every sample has all weights
        ("mean", 1, 8, 1, 1),
        ("local", 4, 8, 2, 1 / 4 + 1 / 8),  # one product with the means, one with the stds
        ("flipout", 4, 8, 2, 1 / 4 + 1 / 8),
        ("local", 1, 16, 2, 1 + 1 / 16),  # (1 + r) · f, as in the paper on partially Bayesian networks
        ("flipout", 1, 16, 2, 1 + 1 / 16),
    ],
)
def test_density_of_what_the_rule_puts_into_the_network(
    rule: str, every: int, random_every: int, dense: float, effective: float
) -> None:
    bnn, x = model("mlp", Sparse(every, random_every))
    assert count_flops(bnn, x, 1, rule) == Flops(round(dense * MLP), round(effective * MLP))


def test_density_in_convolutions_and_attention() -> None:
    for name in ("cnn", "autoencoder", "conv1d", "conv3d", "vit_mha"):
        bnn, x = model(name, Sparse(4))
        dense = count_flops(deterministic_of(bnn), x).dense
        attention = 2 * 2 * 4 * 2 * 5 * 5 * (8 + 8) if name == "vit_mha" else 0  # has no weights; in two layers
        assert count_flops(bnn, x, 1) == Flops(dense, (dense - attention) // 4 + attention), name


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_pruned_deterministic_network(name: str) -> None:
    network, x = CASES[name].build(), CASES[name].example()
    layers = [module for module in network.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    dense = count_flops(lb.bayesianize(network, lb.Deterministic()), x)
    assert dense.effective == dense.dense
    with torch.no_grad():
        for layer in layers:
            layer.weight.view(-1)[: layer.weight.numel() // 4] = 0
    pruned = count_flops(lb.bayesianize(network, lb.Deterministic()), x)
    assert pruned == Flops(dense.dense, dense.dense * 3 // 4)


def test_network_pruned_by_torch() -> None:
    network, x = CASES["mlp"].build(), CASES["mlp"].example()
    for layer in network.children():
        if isinstance(layer, nn.Linear):
            prune.l1_unstructured(layer, "weight", amount=0.75)
    with torch.no_grad():
        network(x)  # so that the pruned weights are not part of a graph, which cannot be copied
    assert count_flops(lb.bayesianize(network, lb.Deterministic()), x) == Flops(MLP, MLP // 4)


def test_autocast_counts_the_same() -> None:
    for method in (Sparse(), lb.Deterministic()):
        network = CASES["mlp"].build()
        with torch.no_grad():
            network.get_parameter("2.weight")[:4] = 0
        bnn, x = lb.bayesianize(network, method), CASES["mlp"].example()
        expected = count_flops(bnn, x, 1)
        assert expected.effective < expected.dense
        with torch.autocast("cpu", torch.bfloat16):
            bnn.predict(x, 1)  # autocast caches its casts of parameters
            assert count_flops(bnn, x, 1) == expected


# -- samples, members, reuse ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "samples", "rule", "passes"),
    [
        (lb.Deterministic(), None, None, 1),
        (lb.Deterministic(), None, "sample", 1),
        (lb.MeanField(), None, None, 30),
        (lb.MeanField(samples=7), None, None, 7),
        (lb.MeanField(), 3, None, 3),
        (lb.MeanField(), None, "mean", 1),
        (lb.MeanField(), 3, "flipout", 6),  # two products per layer
        (lb.MeanField(), 3, "local", 6),
        (lb.Ensemble(3), None, None, 3),
        (lb.Ensemble(3), 2, None, 2),
        (lb.MCDropout(0.5), 4, None, 4),
        (lb.MCDropout(0.5), None, "mean", 1),
    ],
)
def test_flops_of_a_prediction(method: lb.Method, samples: int | None, rule: str | None, passes: int) -> None:
    bnn, x = model("mlp", method)
    assert count_flops(bnn, x, samples, rule) == Flops(passes * MLP, passes * MLP)


@pytest.mark.parametrize("rule", ["moments", "adjoint"])
def test_one_pass_is_counted_for_any_number_of_samples(rule: str) -> None:
    bnn, x = model("mlp", lb.MeanField())
    calls: list[int] = []
    handle = bnn.network.register_forward_hook(lambda *_: calls.append(1))
    bnn.predict(x, 7, rule=rule)
    handle.remove()
    assert len(calls) == 1
    assert count_flops(bnn, x, 7, rule) == count_flops(bnn, x, None, rule)


def test_each_member_has_its_own_density() -> None:
    bnn, x = model("mlp", lb.Ensemble(3))
    with torch.no_grad():
        for parameter in bnn.network.get_submodule("networks.1").parameters():
            parameter.zero_()
    assert count_flops(bnn, x) == Flops(3 * MLP, 2 * MLP)
    assert count_flops(bnn, x, 2) == Flops(2 * MLP, MLP)


def test_only_one_sample_is_run() -> None:
    bnn, x = model("mlp", lb.MeanField())
    calls: list[None] = []
    bnn.network.register_forward_hook(lambda *_: calls.append(None))
    count_flops(bnn, x, 1000)
    assert len(calls) == 1


def test_tied_weight_counts_at_each_use() -> None:
    bnn, x = model("language_model", lb.MeanField())
    tied = count_flops(bnn, x, 1)
    network = CASES["language_model"].build()
    network.get_submodule("head").weight = nn.Parameter(network.get_parameter("head.weight").clone())
    assert count_flops(lb.bayesianize(network, lb.MeanField()), x, 1) == tied


def test_products_of_the_sampling_itself_count() -> None:
    class LowRank(SparsePosterior):
        def sample(self, key: Tensor) -> Tensor:
            return self.mu + self.mu[:, None].expand(-1, 2) @ torch.zeros(2)

    bnn, x = model("mlp", Sparse(1))
    bnn.posterior.__class__ = LowRank
    assert count_flops(bnn, x, 3).dense == 3 * (MLP + 2 * 2 * bnn.layout.numel)


@pytest.mark.parametrize("name", ["cnn", "vit_mha"])
def test_counting_does_not_change_the_model(name: str) -> None:
    bnn, x = model(name, lb.MeanField())
    bnn.train()
    state, fast = copy.deepcopy(bnn.state_dict()), torch.backends.mha.get_fastpath_enabled()
    count_flops(bnn, x, rule="local")
    costs_of(bnn, x, samples=2, rule="flipout", repeats=1)
    assert all(torch.equal(tensor, state[name]) for name, tensor in bnn.state_dict().items())
    assert (bnn.training, bnn.rule, bnn._values) == (True, "sample", None)
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_counting_raises_the_errors_of_predict() -> None:
    bnn, x = model("mlp", lb.Ensemble(3))
    with pytest.raises(lb.LeanBayesError, match=r"samples=4 must be .*from 1 to 3"):
        count_flops(bnn, x, 4)
    with pytest.raises(lb.LeanBayesError, match="guess"):
        count_flops(bnn, x, rule="guess")


# -- whole networks ---------------------------------------------------------------------------------------------------


def torch_flops(network: nn.Module, x: Any) -> int:
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network.train()(x)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", sorted(set(CASES) - {"lstm"}))  # torch does not count this operation
def test_dense_flops_agree_with_torch(name: str) -> None:
    bnn, x = model(name, lb.MeanField())
    assert count_flops(bnn, x, 2).dense == 2 * torch_flops(CASES[name].build(), x) > 0


def test_flops_of_an_lstm() -> None:
    bnn, x = model("lstm", lb.MeanField())
    gates = 2 * 4 * 8 * ((6 + 8) + (16 + 8))  # both directions, of two layers
    assert count_flops(bnn, x, 1).dense == 2 * 4 * (3 * gates + 16 * 3)


def test_flops_of_resnet18() -> None:
    x = torch.randn(1, 3, 32, 32)
    first = 1024 * 3 * 64 * 9
    stages = [4 * 1024 * 64 * 64 * 9]
    for channels, pixels in ((128, 256), (256, 64), (512, 16)):
        half = channels // 2
        stages.append(pixels * (half * channels * 9 + 3 * channels * channels * 9 + half * channels))
    assert count_flops(lb.bayesianize(resnet18(), lb.Deterministic()), x).dense == 2 * (first + sum(stages) + 512 * 10)
    assert (first + sum(stages) + 512 * 10) / 1e9 == pytest.approx(0.56, abs=0.005)  # as in the papers


def test_flops_of_a_vision_transformer() -> None:
    network, x = vit_tiny(10, (3, 32, 32), depth=2), torch.randn(2, 3, 32, 32)
    tokens, width = 65, 192
    block = tokens * 12 * width**2 + 2 * tokens**2 * width  # query, key, value, out, four times the width; attention
    expected = 2 * 2 * (64 * 3 * 16 * width + 2 * block + width * 10)
    assert count_flops(lb.bayesianize(network, lb.Deterministic()), x).dense == expected == torch_flops(network, x)


# -- training ---------------------------------------------------------------------------------------------------------


def test_training_flops() -> None:
    assert training_flops(Flops(10, 4), 7, 3) == Flops(3 * 10 * 7 * 3, 3 * 4 * 7 * 3)
    assert training_flops(Flops(10, 4), 7, 3, samples=2) == Flops(6 * 10 * 7 * 3, 6 * 4 * 7 * 3)


@pytest.mark.parametrize("rule", ["sample", "flipout", "local"])
def test_a_step_takes_three_times_the_forward_pass(rule: str) -> None:
    bnn, x = model("mlp", lb.MeanField(rule=rule))
    forward = count_flops(bnn, x, 1).dense
    with FlopCounter() as counter:
        lb.elbo_loss(bnn, x, torch.zeros(4, dtype=torch.long), num_data=100).backward()
    first = forward // MLP * 2 * 4 * 6 * 16  # whose inputs need no gradient
    assert counter.flops.dense == training_flops(Flops(forward), 1, 1).dense - first


def test_training_flops_of_the_paper_on_sparse_subspaces() -> None:
    """ResNet-18 on CIFAR-10, 200 epochs, `local`, 5 % of the weights in all layers but the first."""
    x = torch.randn(1, 3, 32, 32)
    bnn = lb.bayesianize(resnet18(), Sparse(20, 20), select=lambda name, p: p.dim() > 1 and name != "conv1.weight")
    flops = training_flops(count_flops(bnn, x, 1, "local"), 50_000, 200)
    first = 3 * 2 * 1024 * 3 * 64 * 9 * 50_000 * 200  # deterministic here, with one product; in the paper it has two
    assert flops.dense + first == pytest.approx(6.7e16, rel=0.01)  # its table 2 for VD, which is dense: 67.1e15
    assert flops.effective + first == pytest.approx(3.5e15, rel=0.02)


# -- costs ------------------------------------------------------------------------------------------------------------


def test_costs_of_a_mean_field(tmp_path: Path) -> None:
    bnn, x = model("cnn", lb.MeanField())
    network = CASES["cnn"].build()
    costs = costs_of(bnn, x, samples=3, repeats=1)
    ours, plain = costs.ours, costs.plain
    assert costs.examples == 4
    # Besides the parameters there are the mean, variance and count of two norms, and the counter of the noise.
    points = sum(p.numel() for p in network.parameters())
    assert plain.trainable == points
    assert ours.trainable == points + bnn.layout.numel
    assert plain.stored == points + 2 * (8 + 12) + 2 + bnn.noise.state.numel()
    assert ours.stored == plain.stored + bnn.posterior.size() - bnn.layout.numel
    lb.save(bnn, tmp_path / "ours")
    lb.save(lb.bayesianize(bnn.to_deterministic(), lb.Deterministic()), tmp_path / "plain")
    assert ours.file_bytes == (tmp_path / "ours").stat().st_size
    assert plain.file_bytes == (tmp_path / "plain").stat().st_size
    flops = torch_flops(network, x)
    assert (ours.samples, plain.samples) == (3, 1)
    assert ours.predict_flops == ours.predict_effective_flops == 3 * flops / 4
    assert plain.predict_flops == plain.predict_effective_flops == flops / 4
    with PeakMemory() as memory, CostCounter() as counter:
        bnn.predict(x, 3, generator=torch.Generator())
    assert ours.predict_bytes_moved * 4 == counter.bytes
    assert ours.predict_peak_bytes == memory.peak_bytes + _size(bnn)
    network = bnn.to_deterministic().eval()
    with PeakMemory() as memory, CostCounter() as counter, torch.no_grad():
        probs = network(x).softmax(1)
        torch.special.entr(probs).sum(1)
    divided = 2 * 4 * 4 * (5 + 1)  # both by the number of samples
    assert plain.predict_bytes_moved * 4 == counter.bytes + divided
    assert plain.predict_peak_bytes == memory.peak_bytes + _size(network) + bnn.noise.state.nbytes
    assert 0 < ours.predict_ms_per_1000 < math.inf
    assert 0 < plain.predict_ms_per_1000 < math.inf


def _size(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def test_plain_network_has_no_zeros() -> None:
    bnn, x = model("mlp", Sparse(4))
    costs = costs_of(bnn, x, repeats=1)
    assert costs.plain.predict_effective_flops == costs.plain.predict_flops == MLP / 4
    assert costs.ours.predict_flops == 5 * MLP / 4
    assert costs.ratios()["predict_effective_flops"] == 5 / 4


@pytest.mark.parametrize(
    ("method", "ratios"),
    [
        (lb.Deterministic(), {"trainable": 1, "stored": 1, "file_bytes": 1, "samples": 1, "predict_flops": 1}),
        (lb.Ensemble(3), {"trainable": 3, "samples": 3, "predict_flops": 3, "predict_effective_flops": 3}),
        (lb.MCDropout(0.2), {"trainable": 1, "stored": 1, "samples": 30, "predict_flops": 30}),
    ],
)
def test_ratios(method: lb.Method, ratios: dict[str, float]) -> None:
    bnn, x = model("cnn", method)
    found = costs_of(bnn, x, repeats=1).ratios()
    assert {name: found[name] for name in ratios} == ratios
    assert set(found) == {field.name for field in dataclasses.fields(Costs)}


def test_ratios_of_zero_costs() -> None:
    nothing = Costs(0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0.0)
    something = dataclasses.replace(nothing, trainable=2, stored=3)
    ratios = Comparison(1, something, dataclasses.replace(nothing, stored=6)).ratios()
    assert (ratios["trainable"], ratios["stored"]) == (math.inf, 0.5)
    assert math.isnan(ratios["file_bytes"])


def test_tied_numbers_are_stored_once() -> None:
    bnn, x = model("language_model", lb.Deterministic())
    network = CASES["language_model"].build()
    assert len({p.data_ptr() for p in network.state_dict().values()}) < len(network.state_dict())
    costs = costs_of(bnn, x, repeats=1)
    assert costs.plain.stored == costs.ours.stored == costs.ours.trainable + bnn.noise.state.numel()


def test_every_kind_of_prediction() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
            return {"logits": self.layer(F.relu(a + b))}

    x = torch.randn(8, 6)
    for inputs in ({"a": x, "b": x}, (x, x)):
        for likelihood in (lb.HeteroscedasticGaussian(), lb.Gaussian(), lb.Bernoulli(), lb.Categorical()):
            bnn = lb.bayesianize(Pair(), lb.MeanField(), likelihood=likelihood)
            costs = costs_of(bnn, inputs, samples=3, repeats=1)
            assert (costs.examples, costs.ours.predict_flops, costs.plain.predict_flops) == (8, 3 * 24, 24)
    dense = lb.bayesianize(unet(3, width=2), lb.MeanField())
    costs = costs_of(dense, torch.randn(2, 3, 16, 16), samples=2, repeats=1)
    assert costs.ratios()["predict_flops"] == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # which torch itself uses
def test_padding_that_fused_encoders_would_skip_is_counted() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])

    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    bnn = lb.bayesianize(Encoder(), lb.MeanField())
    costs = costs_of(bnn, (torch.randn(2, 5, 8), padding), samples=2, repeats=1)
    assert costs.plain.predict_flops == 2 * (5 * (4 * 8 * 8 + 2 * 8 * 16) + 2 * 5 * 5 * 8 + 8 * 3)
    assert costs.ratios()["predict_flops"] == 2


def test_another_rule_than_in_training_is_measured_without_a_warning() -> None:
    bnn, x = model("cnn", lb.MeanField())
    bnn.trained_rule = "sample"
    assert count_flops(bnn, x, 1, "local") == count_flops(bnn, x, 2)  # and no warning
    assert costs_of(bnn, x, samples=2, rule="local", repeats=1).ratios()["predict_flops"] == 4


def test_both_networks_alternate_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, x = model("mlp", lb.MeanField())
    now, order = [0.0], []
    # The first round is the warm-up; then ours takes 5, 1 and 3 seconds, and plain 20, 40 and 10.
    lengths = {"ours": iter([1000.0, 5.0, 1.0, 3.0]), "plain": iter([1000.0, 20.0, 40.0, 10.0])}

    def timed(name: str, function: Any) -> Any:
        def run(*args: Any) -> int:
            if torch.backends.mha.get_fastpath_enabled():  # else this is a run that counts bytes
                order.append(name)
                now[0] += next(lengths[name])
            return function(*args)

        return run

    monkeypatch.setattr(cost, "perf_counter", lambda: now[0])
    monkeypatch.setattr(cost, "_predict", timed("ours", cost._predict))
    monkeypatch.setattr(cost, "_predict_alone", timed("plain", cost._predict_alone))
    costs = costs_of(bnn, x, samples=2, repeats=3)
    assert order == ["ours", "plain"] * 4
    assert costs.ours.predict_ms_per_1000 == 1e3 * 3 * 1000 / 4
    assert costs.plain.predict_ms_per_1000 == 1e3 * 20 * 1000 / 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"samples": 0}, "samples=0 must be"),
        ({"rule": "guess"}, "guess"),
    ],
)
def test_invalid_settings_raise_errors(settings: dict[str, Any], message: str) -> None:
    bnn, x = model("mlp", lb.MeanField())
    with pytest.raises(lb.LeanBayesError, match=message):
        costs_of(bnn, x, **settings)


def test_an_empty_batch_raises_an_error() -> None:
    bnn, x = model("mlp", lb.MeanField())
    with pytest.raises(lb.LeanBayesError, match="no examples"):
        costs_of(bnn, x[:0])
