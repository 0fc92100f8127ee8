"""The fused kernels of the engine `ivon` agree with plain torch on a CPU in double precision."""

import pytest
import torch
from torch import Tensor, nn

import leanbayes as lb
from leanbayes.core import gaussian, noise
from leanbayes.core.gaussian import NormalTerms

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SIZE = 10_007  # not a multiple of a block


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean, momentum, grad = (0.1 * torch.randn(SIZE, generator=generator, dtype=torch.float64) for _ in range(3))
    rho = -6 + torch.rand(SIZE, generator=generator, dtype=torch.float64) * 5
    grad_rho = 1e-3 * torch.randn(SIZE, generator=generator, dtype=torch.float64)
    return [mean, rho, momentum, grad, grad_rho]


@pytest.mark.parametrize("per_weight", [False, True])
def test_the_fused_step_is_that_of_plain_torch(per_weight: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    loc = 0.1 * torch.randn(SIZE, generator=generator, dtype=torch.float64) if per_weight else None
    scale = 0.1 + torch.rand(SIZE, generator=generator, dtype=torch.float64) if per_weight else 0.15
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        values = [tensor.to(device, dtype) for tensor in tensors()]
        terms = [t.to(device, dtype) if isinstance(t, Tensor) else t for t in (loc, scale)]
        for count in (1, 2):
            gaussian.natural_step_(
                *(values[0], values[1], values[2], values[3], values[4]),
                NormalTerms(*terms),  # type: ignore[arg-type]
                rate=torch.tensor(0.7, device=device, dtype=dtype),
                count=torch.tensor(float(count), device=device, dtype=dtype),
                beta=0.9,
                gap=0.01,
                precision=2e4,
                weight=4e4,
            )
        results.append([value.double().cpu() for value in values[:3]])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4)


def test_gradients_without_a_kl_are_those_of_autograd() -> None:
    mean, rho, *_ = (tensor.float().cuda().requires_grad_() for tensor in tensors())
    key = noise.make_key(3, 4, "cuda")
    weights = gaussian.draw(mean, rho, key)
    found = torch.autograd.grad(weights.pow(3).sum(), [mean, rho])
    epsilon = noise.normal(mean, key)
    plain = mean + nn.functional.softplus(rho) * epsilon
    expected = torch.autograd.grad(plain.pow(3).sum(), [mean, rho])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled")  # advice of the compiler
@pytest.mark.parametrize("compiled", [False, True])
def test_training_on_a_gpu_lowers_the_loss(compiled: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 5)).cuda()
    x, y = torch.randn(64, 3, 8, 8, device="cuda"), torch.randint(5, (64,), device="cuda")
    bnn = lb.bayesianize(net, lb.MeanField(engine="ivon"), seed=0)
    optimizer = lb.IVON(bnn, lr=0.3, num_data=1000)
    loss_of = lambda: lb.elbo_loss(bnn, x, y, num_data=1000)  # noqa: E731
    loss_of = torch.compile(loss_of) if compiled else loss_of
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])
    assert torch.isfinite(bnn.posterior.variance()).all()
