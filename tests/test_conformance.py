"""Every (method, rule) row of one table passes the same tests. A new method or rule is one more row."""

import contextlib
import copy
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from network_cases import CASES, LENET
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.methods import BASELINES
from leanbayes.model.method import METHODS, Method
from leanbayes.posteriors import FullPosterior, KroneckerPosterior, MaskedPosterior
from leanbayes.rules import RULES, get_rule

ROOT = Path(__file__).parents[1]
NETWORKS = {**CASES, LENET.name: LENET}
# The first test runs on all of `CASES`, the others on one network of each kind.
SOME = ("cnn", "vit_mha", "autoencoder", "lstm", "language_model")


@dataclass(frozen=True)
class Row:
    """One combination of method and rule.

    Attributes:
        method: The method with ordinary settings.
        quiet: The same method with almost no noise.
        rule: The name of its rule.
        unsupported: Networks with an operation that the rule refuses.
        compiled: Networks to compile.
        networks: Networks to test.
        training_unsupported: Networks with an operation that the rule refuses in training mode only.
        trains: Whether networks can be trained by the rule.
        prepare: Fits a new model to a batch, for methods that start from a trained network.
        prepare_quietly: The same with almost no noise, if the settings do not say how much there is.
        lacking: Networks without a layer that the method needs.
        keeps_outputs: Whether a new model without noise has the outputs of the network.
    """

    method: Method
    quiet: Method
    rule: str
    unsupported: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ("cnn",)
    networks: tuple[str, ...] = SOME
    training_unsupported: tuple[str, ...] = ()
    trains: bool = True
    lacking: tuple[str, ...] = ()
    keeps_outputs: bool = True
    prepare: Callable[[lb.BayesianModel, Tensor, Tensor], None] | None = None
    prepare_quietly: Callable[[lb.BayesianModel, Tensor, Tensor], None] | None = None

    def made(self, network: nn.Module, x: Any, quiet: bool = False) -> lb.BayesianModel:
        """Return a Bayesian model of a network, fitted to its own labels of a batch if the method needs data."""
        bnn = lb.bayesianize(network, self.quiet if quiet else self.method)
        prepare = (self.prepare_quietly if quiet else None) or self.prepare
        if prepare is not None:
            with torch.no_grad():
                y = network(x).argmax(1)
            prepare(bnn, x, y)
        return bnn


# MeanField and VDP cover the graph of each rule; other posteriors and priors add the same operations to all of them.
GRAPHS = {
    "sample": ("cnn", "vit_mha", "language_model"),
    "flipout": ("cnn", "vit_mha", "language_model"),
    "local": ("cnn", "vit_mha", "language_model"),
    "mean": ("cnn", "language_model"),  # the same graph as sample, without noise
    "moments": (),  # the same graph as VDP
}
SMALL = ("mlp",)


def mean_field(rule: str, unsupported: tuple[str, ...] = (), **settings: Any) -> Row:
    quiet = lb.MeanField(init_std=1e-7, relative=False, rule=rule, **settings)
    compiled = ("cnn",) if settings else GRAPHS[rule]
    return Row(lb.MeanField(rule=rule, **settings), quiet, rule, unsupported, compiled)


def vdp(**settings: Any) -> Row:
    quiet = lb.VDP(init_std=1e-7, relative=False, **settings)
    return Row(lb.VDP(**settings), quiet, "moments", compiled=("cnn",) if settings else ("cnn", "language_model"))


def full_covariance() -> Row:
    """The full-covariance baseline, which supports networks like LeNet: no groups, no attention, no recurrence."""
    unsupported = tuple(name for name in CASES if name not in ("mlp", "resnet"))
    return Row(
        lb.VDP(rule="covariance"),
        lb.VDP(init_std=1e-7, relative=False, rule="covariance"),
        "covariance",
        unsupported,
        compiled=(),
        networks=("mlp", "lenet", "resnet", *SOME),
        training_unsupported=("resnet",),  # BatchNorm with the statistics of a batch
    )


def adjoint() -> Row:
    """The rule for predictions only: it refuses training mode, every loss, and outputs with many pixels."""
    return Row(
        lb.MeanField(rule="adjoint"),
        lb.MeanField(init_std=1e-7, relative=False, rule="adjoint"),
        "adjoint",
        ("lstm", "autoencoder"),
        compiled=(),
        training_unsupported=SOME,
        trains=False,
    )


def ssvi(rule: str, unsupported: tuple[str, ...] = (), **settings: Any) -> Row:
    quiet = lb.SSVI(1.0, init_std=1e-7, rule=rule, **settings)  # a lower density would set most weights to zero
    return Row(lb.SSVI(0.4, init_std=0.02, rule=rule, **settings), quiet, rule, unsupported, SMALL)


def pbn(rule: str, unsupported: tuple[str, ...] = (), rate: float = 0.1, **settings: Any) -> Row:
    settings = {"sensitivity": "random", **settings}  # needs no data
    quiet = lb.PBN(rate, init_std=1e-7, relative=False, rule=rule, **settings)
    return Row(lb.PBN(rate, rule=rule, init_std=0.5, **settings), quiet, rule, unsupported, SMALL)


def shared(rule: str, unsupported: tuple[str, ...] = (), **settings: Any) -> Row:
    settings = {"components": 16, "minimum": 4, **settings}
    quiet = lb.WeightSharing(**{**settings, "components": None}, init_std=1e-7, relative=False, rule=rule)
    return Row(lb.WeightSharing(**settings, rule=rule), quiet, rule, unsupported, SMALL)


def fit_to_batch(bnn: lb.BayesianModel, x: Tensor, y: Tensor) -> None:
    """Fit the posterior of a method that starts from a trained network."""
    bnn.method.choose(bnn, [(x, y)])


def laplace(rule: str, unsupported: tuple[str, ...] = (), **settings: Any) -> Row:
    made = functools.partial(lb.Laplace, rule=rule, probes=8, **settings)
    quiet = made(prior=lb.Normal(1e-7))
    return Row(made(prior=lb.Normal(0.05)), quiet, rule, unsupported, SMALL, prepare=fit_to_batch)


def kronecker() -> Row:
    """Only for networks whose layers are linear or convolutional, without groups."""
    made = functools.partial(lb.Laplace, covariance="kronecker", probes=8)
    lacking = tuple(name for name in CASES if name not in ("mlp", "resnet", "vit_timm"))
    quiet = made(prior=lb.Normal(1e-7))
    row = Row(made(prior=lb.Normal(0.05)), quiet, "sample", compiled=SMALL, networks=("mlp", "resnet", "vit_timm"))
    return dataclasses.replace(row, lacking=lacking, prepare=fit_to_batch)


def swag(**settings: Any) -> Row:
    """Weights that are collected from a random walk, which makes its noise."""

    def walk(size: float) -> Callable[[lb.BayesianModel, Tensor, Tensor], None]:
        def prepare(bnn: lb.BayesianModel, x: Tensor, y: Tensor) -> None:
            training = lb.Training(bnn, steps=4, num_data=1)
            for training.step in range(4):
                with torch.no_grad():
                    noise = torch.randn(bnn.layout.numel, generator=torch.Generator().manual_seed(training.step))
                    bnn.posterior.mean().add_(size * noise)
                bnn.method.after_step(training)

        return prepare

    method = lb.SWAG(snapshots=4, **settings)
    return Row(method, method, "sample", compiled=SMALL, prepare=walk(0.01), prepare_quietly=walk(1e-8))


def sgmcmc() -> Row:
    """Two members that differ by noise."""

    def walk(size: float) -> Callable[[lb.BayesianModel, Tensor, Tensor], None]:
        def prepare(bnn: lb.BayesianModel, x: Tensor, y: Tensor) -> None:
            for seed in range(2):
                generator = torch.Generator().manual_seed(seed)
                with torch.no_grad():
                    for p in bnn.network.networks[-1].parameters():  # type: ignore[index, union-attr]
                        p.add_(size * torch.randn(p.shape, generator=generator, dtype=p.dtype))
                bnn.network.collect()  # type: ignore[operator]

        return prepare

    method = lb.CyclicalSGMCMC(cycles=1, per_cycle=2)
    return Row(method, method, "sample", compiled=(), prepare=walk(0.01), prepare_quietly=walk(1e-8))


def vbll() -> Row:
    """Only for networks with a linear layer."""
    quiet = lb.VBLL(init_std=1e-7, relative=False)
    networks = tuple(name for name in SOME if name != "autoencoder")
    return Row(lb.VBLL(), quiet, "moments", compiled=SMALL, networks=networks, lacking=WITHOUT_LINEAR)


WITHOUT_LINEAR = tuple(
    name for name, case in CASES.items() if not any(isinstance(m, nn.Linear) for m in case.build().modules())
)


def rank_one(**settings: Any) -> Row:
    quiet = lb.RankOne(1, factor_std=0.0, init_std=1e-9, **settings)
    return Row(lb.RankOne(2, **settings), quiet, "sample", compiled=("cnn",))


def aeb() -> Row:
    """Weights that are collected from a random walk, which makes its noise."""

    def walk(size: float) -> Callable[[lb.BayesianModel, Tensor, Tensor], None]:
        def prepare(bnn: lb.BayesianModel, x: Tensor, y: Tensor) -> None:
            training = lb.Training(bnn, steps=6, num_data=1)
            for training.step in range(6):
                with torch.no_grad():
                    noise = torch.randn(bnn.layout.numel, generator=torch.Generator().manual_seed(training.step))
                    bnn.posterior.mean().add_(size * noise)
                bnn.method.after_step(training)
            bnn.method.finish(training)

        return prepare

    method, quiet = (lb.AEB(density, snapshots=4, until=0.2, temperature=0.0) for density in (0.6, 1.0))
    return Row(method, quiet, "sample", compiled=(), prepare=walk(0.01), prepare_quietly=walk(1e-8))


def mbnn() -> Row:
    """Weights that are collected from a random walk, with other masks in each snapshot."""

    def walk(size: float, masks: bool) -> Callable[[lb.BayesianModel, Tensor, Tensor], None]:
        def prepare(bnn: lb.BayesianModel, x: Tensor, y: Tensor) -> None:
            posterior, training = bnn.posterior, lb.Training(bnn, steps=6, num_data=1)
            assert isinstance(posterior, MaskedPosterior)
            for training.step in range(6):
                generator = torch.Generator().manual_seed(training.step)
                with torch.no_grad():
                    posterior.mu.add_(size * torch.randn(bnn.layout.numel, generator=generator))
                for layer in posterior.masked_layers() if masks else ():
                    posterior.mask[layer][training.step % 2] = False
                bnn.method.after_step(training)
            bnn.method.finish(training)

        return prepare

    method = lb.MBNN(snapshots=4, until=0.2, temperature=0.0, interval=100)
    return Row(method, method, "sample", compiled=(), prepare=walk(0.01, True), prepare_quietly=walk(1e-8, False))


def sparse_vd(rule: str, unsupported: tuple[str, ...] = ()) -> Row:
    quiet = lb.SparseVD(init_std=1e-7, relative=False, rule=rule)
    return Row(lb.SparseVD(rule=rule), quiet, rule, unsupported, SMALL)


def sbp(rule: Literal["example", "sample"], unsupported: tuple[str, ...] = ()) -> Row:
    quiet = lb.SBP(init_std=1e-7, rule=rule)
    return Row(lb.SBP(rule=rule), quiet, rule, unsupported, SMALL)


def variational_dropout(rule: str, unsupported: tuple[str, ...] = (), **settings: Any) -> Row:
    ordinary, quiet = (lb.VariationalDropout(init_alpha=alpha, rule=rule, **settings) for alpha in (1e-3, 1e-12))
    return Row(ordinary, quiet, rule, unsupported, SMALL)


def packed() -> Row:
    """Narrow members with new weights, of networks without parameters outside of layers that can be narrowed."""
    lacking = ("vit_mha", "vit_timm", "lstm", "language_model")
    networks = ("resnet", *(name for name in SOME if name not in lacking))
    method = lb.PackedEnsemble(2, alpha=2)
    return Row(method, method, "sample", networks=networks, lacking=lacking, keeps_outputs=False)


def mimo() -> Row:
    """Several inputs and outputs, with new weights in the first and the last layer, which must be usual ones."""
    lacking = ("lstm", "language_model")
    networks = tuple(name for name in SOME if name not in lacking)
    method = lb.MIMO(2)
    return Row(method, method, "sample", networks=networks, lacking=lacking, keeps_outputs=False)


def sngp() -> Row:
    """A Gaussian process in place of the last linear layer, which an autoencoder does not have."""
    lacking = ("autoencoder",)
    networks = tuple(name for name in SOME if name not in lacking)
    return Row(
        lb.SNGP(32), lb.SNGP(32), "sample", compiled=("cnn",), networks=networks, lacking=lacking, keeps_outputs=False
    )


def abnn() -> Row:
    """Noise in normalization layers, which some networks do not have."""
    lacking = ("mlp", "autoencoder", "lstm")
    networks = ("resnet", *(name for name in SOME if name not in lacking))
    return Row(lb.ABNN(), lb.ABNN(1e-9), "sample", networks=networks, lacking=lacking)


ROWS: dict[str, Row] = {
    "MeanField sample": mean_field("sample"),
    "MeanField flipout": mean_field("flipout", ("lstm",)),
    "MeanField local": mean_field("local", ("lstm",)),
    "MeanField mean": mean_field("mean"),
    "MeanField sample, prior per layer": mean_field("sample", prior=lb.Normal("fan_in", center="pretrained")),
    "MeanField flipout, prior per layer": mean_field("flipout", ("lstm",), prior=lb.Normal("std", center="pretrained")),
    "MeanField sample, mixture prior": mean_field("sample", prior=lb.ScaleMixture()),
    "MeanField moments": mean_field("moments"),
    "MeanField adjoint": adjoint(),
    "VDP": vdp(),
    "VDP, the paper's": vdp(variance="row", correlation="none", activations="taylor", objective="gaussian"),
    "VDP covariance": full_covariance(),
    "SSVI sample": ssvi("sample"),
    "SSVI moments": ssvi("moments"),
    "SSVI flipout, prior per layer": ssvi("flipout", ("lstm",), prior=lb.Normal("std")),
    "SSVI local, mixture prior": ssvi("local", ("lstm",), prior=lb.ScaleMixture()),
    "PBN sample, prior per layer": pbn("sample", prior=lb.Normal("fan_in"), per="row"),
    "PBN flipout, mixture prior": pbn("flipout", ("lstm",), prior=lb.ScaleMixture()),
    "PBN local": pbn("local", ("lstm",)),
    "PBN moments": pbn("moments"),
    "WeightSharing sample": shared("sample"),
    "WeightSharing local, blends": shared("local", ("lstm",), border=2.0, threshold=0.4),
    "WeightSharing moments": shared("moments", bit_price=0.1),
    "WeightSharing, hierarchical": shared("sample", sampling="hierarchical", scope="layer", border=2.0),
    "Laplace sample": laplace("sample"),
    "Laplace local, subnetwork": laplace("local", ("lstm",), rate=0.5),
    "Laplace kronecker": kronecker(),
    "Laplace full": laplace("sample", rate=0.02, covariance="full", subnetwork="magnitude"),
    "StdSearch": Row(lb.StdSearch(), lb.StdSearch(max_std=1e-7), "sample", compiled=SMALL, prepare=fit_to_batch),
    "SWAG": swag(),
    "SWAG, variances only": swag(rank=0),
    "SWA": Row(lb.SWA(), lb.SWA(), "mean", compiled=SMALL),
    "VBLL": vbll(),
    "CyclicalSGMCMC": sgmcmc(),
    "RigL": Row(lb.RigL(0.4), lb.RigL(1.0), "mean"),
    "Deterministic": Row(lb.Deterministic(), lb.Deterministic(), "mean"),
    "Ensemble": Row(lb.Ensemble(2), lb.Ensemble(1), "sample"),
    "SparseVD local": sparse_vd("local", ("lstm",)),
    "SparseVD sample": sparse_vd("sample"),
    "VariationalDropout local": variational_dropout("local", ("lstm",)),
    "VariationalDropout moments, per weight": variational_dropout("moments", per="weight"),
    "VariationalDropout, factors of inputs": variational_dropout("example", ("lstm",), noise="inputs", per="input"),
    "AEB": aeb(),
    "MBNN": mbnn(),
    "SBP": sbp("example", ("lstm",)),
    "SBP sample": sbp("sample"),
    "BatchEnsemble": Row(
        lb.BatchEnsemble(2), lb.BatchEnsemble(1, factor_std=0.0), "sample", compiled=("cnn", "vit_mha")
    ),
    "PackedEnsemble": packed(),
    "MIMO": mimo(),
    "ABNN": abnn(),
    "SNGP": sngp(),
    "LPBNN": Row(lb.LPBNN(2, latent=4), lb.LPBNN(1, latent=4, factor_std=0.0, init_std=1e-9), "sample"),
    "RankOne": rank_one(),
    "RankOne, Cauchy": rank_one(distribution="cauchy"),
    "MCDropout": Row(lb.MCDropout(0.2), lb.MCDropout(1e-9), "sample", compiled=("cnn", "vit_mha")),
}


def mean_of(output: Any) -> Tensor:
    """Return the mean of an output that has moments, and any other output unchanged."""
    return output if isinstance(output, Tensor) else output.loc


def supported(row: Row, network: str, run: Callable[[], Any], training: bool = False, loss: bool = False) -> bool:
    """Run a step if the rule supports the network, and check the error message if it does not.

    The message is one sentence that names the operation and what to do.
    """
    refused = row.unsupported + row.training_unsupported if training else row.unsupported
    if network in refused or (loss and not row.trains):
        with pytest.raises(lb.UnsupportedOperation) as error:
            run()
        sentence = rf"The rule '{row.rule}' has no formula for [^:]*\w[^:]*: [^\n]*use bnn\.using\(\"\w+\"\)[^\n]*\."
        assert re.fullmatch(sentence, str(error.value)), str(error.value)
        return False
    run()
    return True


def build(row: Row, network: str, dtype: torch.dtype = torch.float32) -> tuple[lb.BayesianModel, Tensor, Tensor]:
    """Return a Bayesian model of a network, a batch of inputs, and labels for them."""
    bnn, x, y = _built(row, network, dtype)
    return copy.deepcopy(bnn), x, y


@functools.cache
def _built(row: Row, network: str, dtype: torch.dtype) -> tuple[lb.BayesianModel, Tensor, Tensor]:
    """Build a model once for all tests, because some methods take long to initialize."""
    case = NETWORKS[network]
    net = case.build().to(dtype)
    x = case.example()
    x = x.to(dtype) if x.is_floating_point() else x
    return row.made(net, x), x, net(x).detach().argmax(1)


def pairs(more: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Return each row with each of its networks, and with some more networks."""
    all_pairs = ((name, network) for name, row in ROWS.items() for network in dict.fromkeys((*more, *row.networks)))
    return [(name, network) for name, network in all_pairs if network not in ROWS[name].lacking]


def cases(more: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Parametrize a test with `pairs`."""
    params = [pytest.param(ROWS[name], network, id=f"{network}-{name}") for name, network in pairs(more)]
    return pytest.mark.parametrize(("row", "network"), params)


def test_every_rule_has_a_row() -> None:
    own = {name for name, rule in RULES.items() if type(rule).__module__.startswith("leanbayes.")}  # not those of tests
    assert {row.rule for row in ROWS.values()} == own
    for name, row in ROWS.items():
        case = NETWORKS[row.networks[0]]
        bnn = row.made(case.build(), case.example())
        assert bnn.rule == row.rule, name


def documented_rules() -> dict[str, set[str]]:
    """Return the rules of each method in the tables of the docs: what stands before a semicolon or a condition."""
    found = {}
    for page in ("baselines", "after_training"):
        for line in (ROOT / "docs" / f"{page}.md").read_text().splitlines():
            if match := re.match(r"\| `lb\.(\w+)`.*\| ([^|]+) \|$", line):
                rules = re.split(r";|, with", match[2])[0]
                every = (
                    {"sample", "flipout", "local", "mean", "moments", "adjoint"} if rules.startswith("all") else set()
                )
                found[match[1]] = every or set(re.findall("`([a-z]+)`", rules))
    return found


@pytest.mark.parametrize("name", documented_rules())
def test_the_docs_say_which_rules_work(name: str) -> None:
    row = next(row for row in ROWS.values() if type(row.method).__name__ == name)
    network = "mlp" if "mlp" not in row.lacking else row.networks[0]
    bnn, x, _ = build(row, network)
    works = set()
    for rule in RULES:
        with contextlib.suppress(lb.LeanBayesError), warnings.catch_warnings(action="ignore"):
            bnn.predict(x, rule=rule)
            works.add(rule)
    expected = documented_rules()[name]
    if expected == {"mean"}:  # without noise all rules are the same
        assert "mean" in works
        return
    if not bnn.method.bayesian_weights:
        expected |= {"local", "flipout"}
    assert works - {"covariance"} == expected  # of small networks only


def test_every_baseline_is_in_a_table_of_the_docs() -> None:
    assert set(documented_rules()) == {type(METHODS[name]).__name__ for name in BASELINES}
    assert {type(row.method) for row in ROWS.values()} == {type(method) for method in METHODS.values()}


@cases(CASES)
def test_pretrained_outputs_are_kept_without_noise(row: Row, network: str) -> None:
    case = NETWORKS[network]
    net, x = case.build().double().eval(), case.example()
    x = x.double() if x.is_floating_point() else x
    bnn = row.made(net, x, quiet=True)
    assert not bnn.training
    if supported(row, network, lambda: bnn(x)):
        if not row.keeps_outputs:
            assert not torch.allclose(mean_of(bnn(x)), net(x), atol=1e-2)
            return
        torch.testing.assert_close(mean_of(bnn(x)), net(x), rtol=1e-4, atol=1e-4)


@cases()
def test_kl_is_that_of_torch_distributions(row: Row, network: str) -> None:
    bnn, _, _ = build(row, network, torch.float64)
    if isinstance(
        row.method, (lb.ABNN, lb.LPBNN, lb.RankOne, lb.SparseVD, lb.SBP, lb.AEB, lb.MBNN, lb.VariationalDropout)
    ):
        return  # tests/methods compares the KL of factors and of log-uniform priors, and ABNN and chains have none
    random = bnn.posterior.variance() > 0  # pruned weights have no KL
    if not random.any() or isinstance(bnn.method, lb.SWAG):  # which has no prior
        assert bnn.kl() == 0
        return
    q: torch.distributions.Distribution
    q = torch.distributions.Normal(bnn.posterior.mean()[random], bnn.posterior.variance()[random].sqrt())
    if bnn.kl_kind == "monte-carlo":  # then it is the log ratio at one sample
        with bnn.frozen(0):
            weights = bnn.posterior.sample(bnn.next_draw().key)[random]
            mixture = torch.distributions.Categorical(torch.tensor([0.5, 0.5], dtype=torch.float64))
            parts = torch.distributions.Normal(torch.zeros(2), torch.tensor([0.5, 0.01], dtype=torch.float64))
            prior = torch.distributions.MixtureSameFamily(mixture, parts)
            torch.testing.assert_close(bnn.kl(), (q.log_prob(weights) - prior.log_prob(weights)).sum())
        return
    terms = bnn.posterior.prior.normal_terms()  # type: ignore[union-attr, operator]
    loc, scale = (torch.as_tensor(0.0 if t is None else t).expand(random.shape)[random] for t in terms)
    p: torch.distributions.Distribution = torch.distributions.Normal(loc, scale)
    if isinstance(bnn.posterior, KroneckerPosterior):
        return  # tests/methods compares it
    if isinstance(bnn.posterior, FullPosterior):
        q = torch.distributions.MultivariateNormal(bnn.posterior.mean()[random], scale_tril=bnn.posterior.root)
        p = torch.distributions.MultivariateNormal(torch.zeros_like(q.mean), torch.diag(scale.to(q.mean) ** 2))
    torch.testing.assert_close(bnn.kl(), torch.distributions.kl_divergence(q, p).sum())


def temperature_of(bnn: lb.BayesianModel) -> float | None:
    """Return a temperature at which the gradient of the KL counts, or None for that of the method or its engine."""
    return 0.01 if bnn.method.engine == "backprop" and bnn.method.default_temperature is None else None


@pytest.mark.parametrize(
    ("name", "network", "samples"),
    [*((*pair, 2) for pair in pairs()), *((*pair, 1) for pair in pairs() if pair[1] in ("cnn", "lenet"))],
)
def test_gradient_of_the_elbo_matches_central_differences(name: str, network: str, samples: int) -> None:
    """With fixed noise the ELBO is a deterministic function of the parameters."""
    row = ROWS[name]
    bnn, x, y = build(row, network, torch.float64)
    bnn.eval()  # with batch statistics the loss of a ReLU network has too many kinks
    parameters = [p for p in bnn.parameters() if p.requires_grad]

    def loss() -> Tensor:
        generator = torch.Generator().manual_seed(7)
        temperature = temperature_of(bnn)
        return lb.elbo_loss(bnn, x, y, num_data=100, samples=samples, generator=generator, temperature=temperature)

    if not supported(row, network, loss, loss=True):
        return
    gradients = torch.autograd.grad(loss(), parameters, allow_unused=True)
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True) if g is not None)
    step = 1e-6

    @torch.no_grad()
    def moved(distance: float) -> Tensor:
        for p, d in zip(parameters, directions, strict=True):
            p.add_(d, alpha=distance)
        value = loss()
        for p, d in zip(parameters, directions, strict=True):
            p.sub_(d, alpha=distance)
        return value

    expected = (moved(step) - moved(-step)) / (2 * step)
    # For moments the gradient of an expectation is not that of its own few samples, but a less noisy estimate.
    rtol = 1e-2 if row.rule in ("moments", "covariance") else 1e-4
    torch.testing.assert_close(torch.as_tensor(slope), expected, rtol=rtol, atol=1e-6)


@cases()
def test_frozen_noise_gives_equal_outputs_and_new_noise_does_not(row: Row, network: str) -> None:
    bnn, x, _ = build(row, network)
    bnn.eval()
    if not supported(row, network, lambda: bnn(x)):
        return
    with bnn.frozen(3):
        assert torch.equal(mean_of(bnn(x)), mean_of(bnn(x)))
    differs = not torch.equal(mean_of(bnn(x)), mean_of(bnn(x)))
    assert differs == get_rule(row.rule).random


@cases()
def test_training_lowers_the_loss(row: Row, network: str) -> None:
    bnn, x, y = build(row, network)
    optimizer = torch.optim.Adam(bnn.parameters(), lr=2e-2)

    def step() -> float:
        optimizer.zero_grad()
        loss = lb.elbo_loss(bnn, x, y, num_data=10_000, temperature=temperature_of(bnn))
        loss.backward()
        optimizer.step()
        return loss.item()

    if not supported(row, network, step, training=True):
        return
    losses = [step() for _ in range(20)]
    assert sum(losses[-5:]) < sum(losses[:5])
    moved = [p for p in bnn.scale_parameters() if p.grad is not None and p.grad.abs().max() > 0]
    assert len(moved) == len(bnn.scale_parameters())


@cases()
def test_a_loaded_model_equals_the_saved_one(row: Row, network: str, tmp_path: Any) -> None:
    bnn, x, _ = build(row, network)
    if not supported(row, network, lambda: bnn(x), training=True):
        return
    lb.save(bnn, tmp_path / "model.safetensors")
    other = lb.load(tmp_path / "model.safetensors", NETWORKS[network].build())
    state, loaded = bnn.state_dict(), other.state_dict()
    assert state.keys() == loaded.keys()
    assert all(torch.equal(state[name], loaded[name]) for name in state)
    assert torch.equal(bnn.predict(x, 2).probs, other.predict(x, 2).probs)


@cases()
def test_a_deep_copy_is_equal_and_independent(row: Row, network: str) -> None:
    bnn, x, y = build(row, network)
    if not supported(row, network, lambda: bnn(x), training=True):
        return
    twin = copy.deepcopy(bnn)
    with bnn.frozen(0), twin.frozen(0):
        assert torch.equal(mean_of(bnn.eval()(x)), mean_of(twin.eval()(x)))
        lb.elbo_loss(twin, x, y, num_data=100).backward()
        torch.optim.SGD(twin.parameters(), lr=1.0).step()
        assert not torch.equal(mean_of(bnn(x)), mean_of(twin(x)))


@cases()
def test_a_model_changes_its_dtype(row: Row, network: str) -> None:
    bnn, x, y = build(row, network)
    if not supported(row, network, lambda: bnn(x), training=True):
        return
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        bnn.to(dtype)
        inputs = x.to(dtype) if x.is_floating_point() else x
        assert bnn(inputs).dtype == dtype
        lb.elbo_loss(bnn, inputs, y, num_data=100).backward()
        bnn.zero_grad()


@cases()
def test_bf16_autocast(row: Row, network: str) -> None:
    bnn, x, y = build(row, network)

    def loss(enabled: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), bnn.frozen(1):
            return lb.elbo_loss(bnn, x, y, num_data=10_000)

    if supported(row, network, lambda: loss(False), training=True):
        torch.testing.assert_close(loss(True), loss(False), rtol=5e-2, atol=5e-2)
        loss(True).backward()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in bnn.parameters())


@pytest.mark.parametrize(("name", "network"), [(name, network) for name in ROWS for network in ROWS[name].compiled])
def test_compiled_full_graph_equals_eager(name: str, network: str) -> None:
    row = ROWS[name]
    torch.compiler.reset()
    bnn, x, y = build(row, network)
    bnn.eval()
    if isinstance(row.method, lb.Ensemble):  # several members break the graph: see below
        bnn = lb.bayesianize(CASES[network].build().eval(), lb.Ensemble(1))

    def results(bnn: lb.BayesianModel, compiled: bool) -> list[Tensor | None]:
        """Return two losses, each with new noise, and their gradients."""

        def loss() -> Tensor:
            return lb.elbo_loss(bnn, x, y, num_data=100)

        parameters = [p for p in bnn.parameters() if p.requires_grad]
        step = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
        values = [step(), step()]
        return [*values, *torch.autograd.grad(values[0] + values[1], parameters, allow_unused=True)]

    for eager, graph in zip(results(copy.deepcopy(bnn), False), results(bnn, True), strict=True):
        torch.testing.assert_close(graph, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch warns where it continues after the break
@pytest.mark.parametrize(("method", "samples"), [(lb.MeanField(), 2), (lb.Ensemble(2), 1)])
def test_several_samples_compile_with_graph_breaks(method: Method, samples: int) -> None:
    torch.compiler.reset()
    bnn, x = lb.bayesianize(CASES["mlp"].build(), method), CASES["mlp"].example()
    y = bnn(x).argmax(1)

    def loss() -> Tensor:
        return lb.elbo_loss(bnn, x, y, num_data=100, samples=samples)

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        with bnn.frozen(2):
            value = function()
            results.append([value, *torch.autograd.grad(value, list(bnn.parameters()))])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


def test_new_noise_does_not_recompile() -> None:
    torch.compiler.reset()
    bnn = lb.bayesianize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), lb.MeanField())
    x, y = torch.randn(3, 4), torch.zeros(3, dtype=torch.long)
    step = torch.compile(lambda: lb.elbo_loss(bnn, x, y, num_data=100), fullgraph=True)
    first = step()
    with torch.compiler.set_stance("fail_on_recompile"):
        others = [step() for _ in range(3)]
    assert len({loss.item() for loss in [first, *others]}) == 4
