"""VDP: its settings and objectives, and training by moments on handwritten digits."""

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from moment_cases import gaussian
from sklearn.datasets import load_digits
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core import config, noise
from leanbayes.methods import VDP, describe_method, parse_method
from leanbayes.posteriors import MeanFieldPosterior, RowPosterior
from leanbayes.rules import MomentPropagation

OBJECTIVES = ["expected_cross_entropy", "gaussian", "cross_entropy"]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(outputs: int = 4, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs)).double()


def batch(rows: int = 5, classes: int = 4) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 6, generator=generator(), dtype=torch.float64)
    return x, torch.randint(classes, (rows,), generator=generator(1))


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        VDP(),
        VDP.paper(),
        VDP(lb.ScaleMixture(), 0.1, False, "cross_entropy", "row", "none", "taylor", 3, "sample", 5),
    ],
)
def test_settings_survive_a_round_trip(method: VDP) -> None:
    assert config.decode(config.encode(method)) == method
    if isinstance(method.prior, lb.Normal):
        assert parse_method(describe_method(method)) == method


def test_settings_of_the_paper() -> None:
    paper = VDP.paper()
    assert paper.prior == lb.Normal(1.0)
    assert (paper.objective, paper.variance) == ("gaussian", "row")
    assert (paper.correlation, paper.activations, paper.min_variance) == ("none", "paper", 0.0)
    assert parse_method("vdp") == VDP()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"objective": "elbo"}, ("objective='elbo'", "'gaussian'")),
        ({"variance": "layer"}, ("variance='layer'", "'row'")),
        ({"correlation": "full"}, ("correlation='full'", "'common'")),
        ({"activations": "sampled"}, ("activations='sampled'", "'taylor'")),
        ({"min_variance": -1.0}, ("min_variance=-1.0", "not negative")),
        ({"logit_samples": 0}, ("logit_samples=0", "at least 1")),
        ({"samples": 0}, ("samples=0", "at least 1")),
        ({"init_std": -1.0}, ("init_std=-1.0", "positive")),
        ({"rule": "momenta"}, ("'momenta'", "moments")),
        ({"prior": lb.Normal}, ("prior", "lb.Normal")),
    ],
    ids=str,
)
def test_invalid_settings_raise_a_clear_error(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(lb.LeanBayesError) as caught:
        VDP(**settings)
    message = str(caught.value)
    assert message.endswith((".", "?"))
    assert "\n" not in message
    assert all(word in message for word in words)


def test_the_rule_has_the_settings_of_the_method() -> None:
    bnn = lb.bayesianize(mlp(), VDP.paper())
    assert bnn.current_rule == MomentPropagation("none", "paper")
    with bnn.using("sample"), bnn.using("moments"):
        assert bnn.current_rule == MomentPropagation("none", "paper")
    with bnn.using(MomentPropagation("common", "exact")):
        assert bnn.current_rule == MomentPropagation("common", "exact")
    assert lb.bayesianize(mlp(), VDP()).current_rule == MomentPropagation("common", "exact")


@pytest.mark.parametrize(("variance", "kind"), [("weight", MeanFieldPosterior), ("row", RowPosterior)])
def test_the_initial_std_is_relative_to_each_layer(variance: Any, kind: type) -> None:
    network = mlp()
    bnn = lb.bayesianize(network, VDP(init_std=0.2, variance=variance))
    assert type(bnn.posterior) is kind
    for name, part in bnn.weight_variances().items():
        weight = network.get_parameter(name)
        torch.testing.assert_close(part.sqrt(), torch.full_like(part, 0.2 * weight.std().item()))


# -- objectives -------------------------------------------------------------------------------------------------------


def softmax_moments(loc: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the probabilities by their Jacobian, kept below p(1 - p), which the paper does not do."""
    probs = loc.softmax(-1)
    jacobian = torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)
    first_order = (jacobian.square() @ variance.unsqueeze(-1)).squeeze(-1)
    return probs, first_order / (1 + first_order / (probs * (1 - probs)))


@pytest.mark.parametrize("std", [0.3, 2.0])
def test_equation_11_scores_one_hot_labels(std: float) -> None:
    output, y = gaussian((6, 3, 4), std=std), torch.randint(4, (6, 3), generator=generator())
    y[0, 1] = -100
    probs, variance = softmax_moments(output.loc, output.variance)
    variance = variance.clamp_min(1e-3)
    hot = F.one_hot(y.clamp_min(0), 4)
    terms = 0.5 * ((hot - probs).square() / variance + variance.log()).sum(-1)
    likelihood = lb.Categorical(class_dim=-1)
    total, observations = likelihood.gaussian_nll(output, y)
    torch.testing.assert_close(total, terms[y >= 0].sum(), rtol=1e-10, atol=0)
    assert int(observations) == 17
    moved = lb.Moments(output.loc.movedim(-1, 1), output.variance.movedim(-1, 1))
    torch.testing.assert_close(lb.Categorical().gaussian_nll(moved, y).total, total)


@pytest.mark.parametrize("std", [2.0, 0.01])
def test_the_paper_scores_one_hot_labels_by_equations_9_and_11(std: float) -> None:
    """Equation 9 as printed, by autograd: the variance of a probability is Σ_j J_ij² v_j, without bound or floor."""
    torch.manual_seed(0)
    net = nn.Linear(3, 4).double()
    bnn = lb.bayesianize(net, replace(VDP.paper(), init_std=std, relative=False), select=["weight"])
    x = torch.randn(6, 3, generator=generator(), dtype=torch.float64)
    y = torch.randint(4, (6,), generator=generator())
    output = bnn(x)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda z: z.softmax(-1)))(output.loc)
    variance = (jacobian.square() @ output.variance.unsqueeze(-1)).squeeze(-1)
    probs = output.loc.softmax(-1)
    if std == 2.0:
        assert bool((variance > probs * (1 - probs)).any())  # where the bound of the default would act
    else:
        assert bool((variance < 1e-3).all())  # where the floor of the default would act
    expected = 0.5 * ((F.one_hot(y, 4) - probs).square() / variance + variance.log()).sum()
    loss = lb.elbo_loss(bnn, x, y, num_data=50, temperature=0.0)
    torch.testing.assert_close(loss, expected / 6, rtol=1e-10, atol=0)


def test_a_variance_that_is_rounded_to_0_has_a_finite_loss() -> None:
    output = lb.Moments(torch.tensor([[200.0, 0.0]]), torch.full((1, 2), 1e-3))
    right = lb.Categorical().gaussian_nll(output, torch.tensor([0]), min_variance=0.0).total
    assert right.item() == pytest.approx(math.log(torch.finfo(torch.float32).tiny))


def test_the_paper_takes_the_statistics_of_a_layer_norm_as_constants() -> None:
    """Equation 14: σ_y² = (γ/s)² σ_x², with the mean of the plain network."""
    torch.manual_seed(0)
    linear, norm = nn.Linear(3, 5).double(), nn.LayerNorm(5).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 5))
    net = nn.Sequential(linear, norm)
    x = torch.randn(6, 3, generator=generator(), dtype=torch.float64)
    plain = net(x)
    bnn = lb.bayesianize(net, VDP.paper())
    with bnn.using("moments"):
        output = bnn(x)
    noise_of_weights = bnn.posterior.variance().view(5, 3)
    inside = F.linear(x.square(), noise_of_weights)
    scale = (
        torch.linspace(0.5, 2, 5, dtype=torch.float64) / (linear(x).var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    )
    torch.testing.assert_close(output.loc, plain)
    torch.testing.assert_close(output.variance, scale.square() * inside)
    # The equation prints the mean of the inputs in place of γ. Then a constant that is added to all inputs of the norm,
    # which cancels in every sample, would change the variance.
    with torch.no_grad():
        bnn.network.get_parameter("0.bias").add_(3.0)
    with bnn.using("moments"):
        torch.testing.assert_close(bnn(x).variance, output.variance)


@pytest.mark.parametrize("correlation", ["common", "none"])
def test_equation_14_includes_the_noise_that_tokens_share(correlation: Literal["common", "none"]) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5)), torch.randn(4, 7, 3, generator=generator())
    rule = MomentPropagation(correlation, "paper")
    with torch.no_grad():
        found, inside = (lb.bayesianize(of, lb.MeanField(init_std=0.1)).eval() for of in (net, net[:1]))
        with found.using(rule), inside.using(rule):
            output, before = found(x), inside(x)
        statistics = net[0](x).var(-1, correction=0, keepdim=True) + 1e-5
    torch.testing.assert_close(output.variance, before.variance / statistics)


def test_equation_11_scores_binary_labels() -> None:
    output, y = gaussian((6, 3), std=0.2), torch.randint(2, (6, 3), generator=generator())
    probs = output.sigmoid()
    variance = probs.variance.clamp_min(1e-3)
    expected = 0.5 * ((y - probs.loc).square() / variance + variance.log()).sum()
    torch.testing.assert_close(lb.Bernoulli().gaussian_nll(output, y).total, expected)


def test_equation_11_of_regression_adds_the_noise_variance() -> None:
    output, y = gaussian((6, 4)), torch.randn(6, 4, generator=generator(), dtype=torch.float64)
    expected = -torch.distributions.Normal(output.loc, (output.variance + 0.25).sqrt()).log_prob(y).sum()
    torch.testing.assert_close(lb.Gaussian(0.5).gaussian_nll(output, y).total, expected)
    mean, raw = output.loc.chunk(2, -1)
    variance, raw_variance = output.variance.chunk(2, -1)
    nodes = torch.linspace(-9, 9, 5001, dtype=torch.float64).view(-1, 1, 1)
    weights = torch.softmax(-0.5 * nodes.square(), 0)
    noise_variance = (weights * F.softplus(raw + raw_variance.sqrt() * nodes)).sum(0) + 1e-6
    expected = -torch.distributions.Normal(mean, (variance + noise_variance).sqrt()).log_prob(y[:, :2]).sum()
    torch.testing.assert_close(lb.HeteroscedasticGaussian().gaussian_nll(output, y[:, :2]).total, expected)


@pytest.mark.parametrize("rows", ["weight", "row"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_is_the_objective_plus_the_kl_per_example(objective: Any, rows: Any) -> None:
    bnn, (x, y) = lb.bayesianize(mlp(), VDP(objective=objective, variance=rows, logit_samples=5)), batch()
    loss = lb.elbo_loss(bnn, x, y, num_data=50, temperature=0.5, generator=generator(3))
    key = noise.key_from(generator(3), torch.device("cpu"))
    output = bnn(x)
    scored = {
        "expected_cross_entropy": lambda: bnn.likelihood.expected_nll(output, y, key, 5).total / 5,
        "gaussian": lambda: bnn.likelihood.gaussian_nll(output, y).total / 5,
        "cross_entropy": lambda: F.cross_entropy(output.loc, y),
    }[objective]()
    torch.testing.assert_close(loss, scored + 0.5 * bnn.kl() / 50, rtol=1e-12, atol=0)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_data_train_the_std_unless_only_means_are_scored(objective: Any) -> None:
    bnn, (x, y) = lb.bayesianize(mlp(), VDP(init_std=0.5, objective=objective, activations="taylor")), batch()
    rho = bnn.posterior.get_parameter("rho")
    loss = lb.elbo_loss(bnn, x, y, num_data=50, temperature=0.0)
    (gradient,) = torch.autograd.grad(loss, [rho], allow_unused=True)
    learns = gradient is not None and bool((gradient != 0).any())
    assert learns == (objective != "cross_entropy")


def test_gradient_of_the_loss_equals_finite_differences() -> None:
    """With an objective without sampling: regression."""
    method = VDP(init_std=0.3, correlation="none")
    bnn, (x, _) = lb.bayesianize(mlp(2), method, likelihood=lb.Gaussian(0.5)), batch()
    y = torch.randn(5, 2, generator=generator(), dtype=torch.float64)
    rho = bnn.posterior.get_parameter("rho")
    (gradient,) = torch.autograd.grad(lb.elbo_loss(bnn, x, y, num_data=50), [rho])
    for index in (0, 13, 50):
        losses = []
        with torch.no_grad():
            for change in (1e-5, -2e-5):
                rho[index] += change
                losses.append(lb.elbo_loss(bnn, x, y, num_data=50).item())
            rho[index] += 1e-5
        assert gradient[index].item() == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("samples", [1, 3])
def test_samples_average_the_noise_of_the_logits(samples: int) -> None:
    bnn, (x, y) = lb.bayesianize(mlp(), VDP(init_std=0.5)), batch()
    source = generator(2)
    single = [lb.elbo_loss(bnn, x, y, num_data=50, generator=source) for _ in range(samples)]
    together = lb.elbo_loss(bnn, x, y, num_data=50, samples=samples, generator=generator(2))
    torch.testing.assert_close(together, torch.stack(single).mean(), rtol=1e-12, atol=0)
    assert len({loss.item() for loss in single}) == samples
    together.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in bnn.parameters())


def test_folding_is_rejected_and_labels_are_checked() -> None:
    bnn, (x, y) = lb.bayesianize(mlp(), VDP()), batch()
    with pytest.raises(lb.LeanBayesError, match="accumulate"):
        lb.elbo_loss(bnn, x, y, num_data=50, samples=2, over="fold")
    with pytest.raises(lb.LeanBayesError, match="int64"):
        lb.elbo_loss(bnn, x, y.double(), num_data=50)
    with pytest.raises(lb.LeanBayesError, match="out of range"):
        lb.elbo_loss(bnn, x, y + 4, num_data=50)


def test_other_methods_train_by_moments_with_the_expected_likelihood() -> None:
    (x, y), losses = batch(), []
    for method in (lb.MeanField(rule="moments"), VDP()):
        losses.append(lb.elbo_loss(lb.bayesianize(mlp(), method), x, y, num_data=50, generator=generator(4)))
    assert losses[0] == losses[1]


# -- training ---------------------------------------------------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    order = torch.randperm(len(x), generator=generator())
    x, y = x[order], y[order]
    return x[:1200], y[:1200], x[1200:], y[1200:]


@pytest.mark.parametrize("method", [VDP(), VDP(variance="row", correlation="none"), VDP.paper()], ids=describe_method)
def test_it_learns_digits_without_sampling_weights(method: VDP) -> None:
    x, y, test_x, test_y = digits()
    torch.manual_seed(0)
    bnn = lb.bayesianize(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), method)
    before = bnn.posterior.get_parameter("rho").detach().clone()
    optimizer = torch.optim.Adam(
        [{"params": bnn.mean_parameters(), "lr": 3e-3}, {"params": bnn.scale_parameters(), "lr": 1e-2}]
    )
    losses = []
    for step in range(120):
        rows = torch.randint(len(x), (128,), generator=generator(step))
        loss = lb.elbo_loss(bnn, x[rows], y[rows], num_data=len(x), temperature=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10]) if losses[0] > 0 else sum(losses[-10:]) < sum(losses[:10]) - 10
    assert (bnn.posterior.get_parameter("rho") - before).abs().mean() > 0.05
    prediction = bnn.predict(test_x)
    assert prediction.samples == 1
    # Without a floor of the variance, few wrong labels are most of the loss.
    assert (prediction.label == test_y).double().mean() > (0.93 if method.min_variance else 0.8)
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(len(test_x)))
    assert torch.equal(prediction.probs, bnn.predict(test_x).probs)
    sampled = bnn.predict(test_x, 200, rule="sample", generator=generator(1))
    assert (prediction.probs - sampled.probs).abs().mean() < 0.02


@pytest.mark.parametrize("rule", ["moments", "covariance"])
def test_a_convolutional_network_trains_and_predicts_by_both_rules(rule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(16, 1, 8, 8, generator=generator)
    y = (x[:, 0, :4].mean((1, 2)) > x[:, 0, 4:].mean((1, 2))).long()
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
    bnn = lb.bayesianize(net, lb.VDP(rule=rule))
    before = [p.detach().clone() for p in bnn.scale_parameters()]
    optimizer = torch.optim.Adam(bnn.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = lb.elbo_loss(bnn, x, y, num_data=1000)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all((new - old).abs().max() > 1e-3 for new, old in zip(bnn.scale_parameters(), before, strict=True))
    assert bnn.predict(x).probs.sum(1).sub(1).abs().max() < 1e-5


def test_training_draws_new_probes_in_every_step() -> None:
    bnn = lb.bayesianize(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)), lb.VDP())
    x = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    first, second = bnn(x), bnn(x)
    assert len(first.common) < len(bnn.eval()(x).common)
    assert torch.equal(first.loc, second.loc) or not torch.equal(first.common, second.common)
    assert not torch.equal(first.common, second.common)
    assert torch.equal(bnn(x).common, bnn(x).common)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("activations", ["exact", "taylor"])
def test_training_with_two_examples_per_batch_and_one_pixel_is_stable(activations: Any, kind: Any, seed: int) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for number in range(6):
        convolution = nn.Conv2d(16 if number else 3, 16, 3, stride=2 if number < 2 else 1, padding=1)
        layers += [convolution, nn.BatchNorm2d(16), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 4))
    bnn, random = lb.bayesianize(network, VDP(activations=activations), seed=seed).train(), generator()
    optimizer = kind(bnn.parameters(), lr=0.1 if kind is torch.optim.SGD else 1e-2)
    for _ in range(30):
        x, y = torch.randn(2, 3, 4, 4, generator=random), torch.randint(4, (2,), generator=random)
        loss = lb.elbo_loss(bnn, x, y, num_data=100, temperature=0.01)
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad.abs().max() for p in bnn.parameters() if p.grad is not None]
        assert torch.stack(gradients).max() < 100
        assert loss < 20
        optimizer.step()
