"""Fused GPU kernels against plain formulas, and networks on a GPU."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network_cases import CASES
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import leanbayes as lb
from leanbayes.core import gaussian, noise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # Hints of the compiler about speed.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled"),
]


def parameters(numel: int = 70_001) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    mean = torch.randn(numel, device="cuda", generator=generator) * 0.1
    rho = torch.randn(numel, device="cuda", generator=generator) * 3 - 5
    return mean.requires_grad_(), rho.requires_grad_()


def test_noise_is_standard_normal_and_streams_are_independent() -> None:
    like = torch.empty(2_000_000, device="cuda")
    key = noise.make_key(3, 7, "cuda")
    values = [noise.normal(like, key, stream) for stream in (0, 1)]
    values += [noise.normal(like, noise.make_key(3, 8, "cuda")), noise.normal(like, noise.make_key(4, 7, "cuda"))]
    assert torch.equal(values[0], noise.normal(like, key, 0))
    for one in values:
        assert abs(one.mean()) < 4e-3
        assert abs(one.var() - 1) < 6e-3
        assert abs(one.pow(4).mean() - 3) < 5e-2
        assert abs((one < -1.6448536).double().mean() - 0.05) < 1e-3
    correlation = torch.corrcoef(torch.stack(values)) - torch.eye(4, device="cuda")
    assert correlation.abs().max() < 4e-3
    lagged = torch.corrcoef(torch.stack([values[0][:-1], values[0][1:]]))[0, 1]
    assert abs(lagged) < 4e-3


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("centered", [False, True])
def test_fused_sample_and_kl_match_autograd(per_layer: bool, centered: bool) -> None:
    mean, rho = parameters()
    key = noise.make_key(1, 2, "cuda")
    epsilon = noise.normal(mean, key).double()
    loc = torch.randn_like(mean) * 0.05 if centered else None
    scale = torch.rand_like(mean) + 0.05 if per_layer else 0.07
    weights, kl = gaussian.draw_and_kl(mean, rho, key, gaussian.NormalTerms(loc, scale))
    upstream = torch.randn_like(weights)
    (weights @ upstream + 0.3 * kl).backward()

    mean64, rho64 = (p.detach().double().requires_grad_() for p in (mean, rho))
    sigma = F.softplus(rho64)
    expected = mean64 + sigma * epsilon
    prior = torch.distributions.Normal(
        torch.zeros_like(mean64) if loc is None else loc.double(),
        scale.double() if isinstance(scale, Tensor) else torch.full_like(mean64, scale),
    )
    expected_kl = torch.distributions.kl_divergence(torch.distributions.Normal(mean64, sigma), prior).sum()
    (expected @ upstream.double() + 0.3 * expected_kl).backward()
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kl.double(), expected_kl, rtol=1e-5, atol=0.0)
    for got, want in ((mean.grad, mean64.grad), (rho.grad, rho64.grad)):
        assert got is not None
        assert want is not None
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_reparameterize(dtype: torch.dtype) -> None:
    shape = (8, 6, 5, 4)
    loc = torch.randn(shape, device="cuda", dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
    variance = torch.rand(shape, device="cuda", dtype=dtype)
    variance[0] = 0
    variance.requires_grad_()
    key = noise.make_key(1, 2, "cuda")
    out = gaussian.reparameterize(loc, variance, key, 5)
    assert out.is_contiguous(memory_format=torch.channels_last)
    epsilon = noise.normal(loc, key, 5).double()
    torch.testing.assert_close(out.double(), loc.double() + variance.double().sqrt() * epsilon, rtol=1e-2, atol=1e-2)
    upstream = torch.randn(shape, device="cuda", dtype=dtype)
    out.backward(upstream)
    torch.testing.assert_close(loc.grad, upstream)
    expected = torch.where(variance > 0, upstream.double() * epsilon / (2 * variance.double().sqrt()), 0.0)
    assert variance.grad is not None
    torch.testing.assert_close(variance.grad.double(), expected.detach(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rule", ["sample", "flipout", "local"])
@pytest.mark.parametrize("name", CASES)
def test_networks_train_on_a_gpu(name: str, rule: str) -> None:
    case = CASES[name]
    bnn = lb.bayesianize(case.build().cuda(), lb.MeanField(rule=rule))
    x = case.example().cuda()
    if name == "lstm" and rule != "sample":
        with pytest.raises(lb.UnsupportedOperation, match="lstm"):
            bnn(x)
        return
    output = bnn(x)
    y = output.argmax(1)
    optimizer = torch.optim.SGD(bnn.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = lb.elbo_loss(bnn, x, y, num_data=100_000)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert math.isfinite(sum(losses))
    assert sum(losses[-5:]) < sum(losses[:5])
    assert copy.deepcopy(bnn).predict(x, 3).probs.isfinite().all()


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # inductor recommends them
@pytest.mark.parametrize("rule", ["sample", "flipout", "local"])
def test_compiled_step_equals_eager(rule: str) -> None:
    bnn = lb.bayesianize(CASES["cnn"].build().cuda(), lb.MeanField(rule=rule))
    x = CASES["cnn"].example().cuda()
    y = torch.zeros(len(x), dtype=torch.long, device="cuda")

    def loss() -> Tensor:
        return lb.elbo_loss(bnn, x, y, num_data=1000)

    losses, gradients = [], []
    with bnn.frozen(5):
        for function in (loss, torch.compile(loss, fullgraph=True)):
            losses.append(function())
            gradients.append(torch.autograd.grad(losses[-1], list(bnn.parameters())))
    torch.testing.assert_close(losses[0], losses[1])
    for eager, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("rule", ["moments", "sample", "mean"])
def test_compiled_predictions_equal_eager_ones(rule: str) -> None:
    """With CUDA graphs: results of earlier calls do not change, new weights are used, small batches are padded."""
    bnn = lb.bayesianize(CASES["cnn"].build().cuda(), lb.MeanField(init_std=0.1)).eval()
    x = CASES["cnn"].example().cuda()
    batches = [x, x.flip(0), x + 1]

    def predict(compile: bool | None) -> list[Any]:
        with bnn.frozen(5):
            return [bnn.predict(batch, 3, rule=rule, compile=compile) for batch in batches]

    for _ in range(2):
        for compiled, eager in zip(predict(True), predict(False), strict=True):
            torch.testing.assert_close(compiled.probs, eager.probs, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(compiled.expected_entropy, eager.expected_entropy, rtol=1e-3, atol=1e-4)
        with torch.no_grad():
            for parameter in bnn.parameters():
                parameter.add_(0.01)
    with bnn.frozen(5):
        small = bnn.predict(x[:1], 3, rule=rule)
        torch.testing.assert_close(
            small.probs, bnn.predict(x[:1], 3, rule=rule, compile=False).probs, rtol=1e-3, atol=1e-4
        )


def test_channels_last_weights_are_sampled_without_a_copy() -> None:
    net = nn.Conv2d(8, 16, 3).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    bnn = lb.bayesianize(net, lb.MeanField(init_std=1e-7))
    with bnn.drawn():
        drawn = bnn.network.weight
        assert isinstance(drawn, Tensor)
        assert drawn.is_contiguous(memory_format=torch.channels_last)
        assert drawn._base is not None
        torch.testing.assert_close(drawn, net.weight)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_fit_learns_in_every_precision(precision: str) -> None:
    from leanbayes.training import fit

    torch.manual_seed(0)
    y = torch.arange(600) % 3
    x = torch.randn(600, 3, 8, 8) + 2 * F.one_hot(y).float()[:, :, None, None]
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    data = torch.utils.data.TensorDataset(x, y)
    settings: dict[str, Any] = {
        "precision": precision,
        "clip": 1.0,
        "temperature": 0.01,
        "accumulate": 2,
        "channels_last": True,
        "progress": False,
    }
    bnn = fit(net, lb.MeanField(), data, epochs=8, batch_size=50, lr=1e-2, **settings)
    assert bnn.device.type == "cuda"
    assert type(bnn.forward).__name__ == "_Forward"  # not that of accelerate
    prediction = bnn.predict(x.cuda(), samples=5)
    assert (prediction.label.cpu() == y).float().mean() > 0.95


def test_a_sparse_subspace_changes_without_recompilation() -> None:
    torch.manual_seed(0)
    network = CASES["cnn"].build().cuda()
    x = CASES["cnn"].example().cuda()
    y = network(x).argmax(1)
    method = lb.SSVI(0.3, interval=2, drop=0.5)
    bnn = lb.bayesianize(network, method).train()
    posterior: Any = bnn.posterior
    optimizers = [
        torch.optim.SGD(bnn.mean_parameters(), lr=0.05, momentum=0.9),
        torch.optim.Adam(bnn.scale_parameters()),
    ]
    training = lb.Training(bnn, 1000, 100, optimizers=list(optimizers), batch=(x, y))
    counter = CompileCounterWithBackend("inductor")
    loss_of = torch.compile(lambda: lb.elbo_loss(bnn, x, y, num_data=100, check=False), backend=counter, fullgraph=True)
    counts, before, losses = posterior.counts, posterior.index.clone(), []
    for _ in range(40):
        loss = loss_of()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        method.after_step(training)
        training.step += 1
        losses.append(loss.item())
    assert counter.frame_count == 1
    assert posterior.counts == counts
    assert (posterior.index[1:] > posterior.index[:-1]).all()
    assert not torch.equal(posterior.index, before)
    assert sum(losses[-10:]) < sum(losses[:10])
    with torch.no_grad(), bnn.frozen(3):
        eager = bnn.eval()(x)
        copied = copy.deepcopy(bnn).cpu()
        with copied.using("mean"), bnn.using("mean"):
            torch.testing.assert_close(copied(x.cpu()), bnn(x).cpu(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(torch.compile(bnn)(x), eager, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("compile", [True, False])
def test_one_pass_waits_once_for_the_gpu(compile: bool) -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    bnn, x = lb.bayesianize(network.cuda(), lb.MeanField()).eval(), torch.randn(5, 4, device="cuda")
    for _ in range(6):  # the first compiled passes are compared with others
        bnn.predict(x, rule="moments", compile=compile)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            bnn.predict(x, rule="moments", compile=compile)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing CUDA operation" in str(one.message) for one in caught) == 1
