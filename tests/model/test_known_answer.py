"""Variational inference against a known posterior: Bayesian linear regression with known noise."""

import pytest
import torch
from torch import Tensor, nn

import leanbayes as lb

NOISE, PRIOR, ROWS, COLUMNS = 0.5, 1.0, 64, 4


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    x[:, 1] += 0.7 * x[:, 0]  # correlated inputs: the mean-field optimum is not the marginal
    weights = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
    y = x @ weights + NOISE * torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return x, y[:, None]


def answer(x: Tensor, y: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the best mean-field Gaussian: the exact mean, and the inverse of the precision's diagonal."""
    precision = x.T @ x / (temperature * NOISE**2) + torch.eye(COLUMNS, dtype=x.dtype) / PRIOR**2
    mean = torch.linalg.solve(precision, x.T @ y / (temperature * NOISE**2))
    return mean.flatten(), precision.diagonal().rsqrt()


def train(bnn: lb.BayesianModel, x: Tensor, y: Tensor, temperature: float, samples: int, over: str) -> Tensor:
    """Train, and return σ averaged over the last third of the steps."""
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.05)
    steps = 1200
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
    total = torch.zeros_like(bnn.posterior.mean())
    for step in range(steps):
        optimizer.zero_grad()
        loss = lb.elbo_loss(bnn, x, y, num_data=ROWS, temperature=temperature, samples=samples, over=over)  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()
        schedule.step()
        if step >= 2 * steps // 3:
            total += bnn.posterior.variance().sqrt().detach()
    return total / (steps - 2 * steps // 3)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
# With one sample for a whole batch the gradient of σ is noisy, and so is the final σ.
@pytest.mark.parametrize(
    ("rule", "over", "tolerance"), [("sample", "accumulate", 0.25), ("flipout", "fold", 0.25), ("local", "fold", 0.03)]
)
def test_training_finds_the_exact_mean_field_posterior(
    rule: str, over: str, tolerance: float, temperature: float
) -> None:
    x, y = problem()
    net = nn.Linear(COLUMNS, 1, bias=False, dtype=torch.float64)
    method = lb.MeanField(prior=lb.Normal(PRIOR), init_std=0.1, relative=False, rule=rule)
    bnn = lb.bayesianize(net, method, likelihood=lb.Gaussian(NOISE))
    learned = train(bnn, x, y, temperature, 8, over)
    mean, std = answer(x, y, temperature)
    assert ((bnn.posterior.mean() - mean).abs() / std).max() < 0.15
    torch.testing.assert_close(learned, std, rtol=tolerance, atol=0.0)


def test_elbo_never_exceeds_the_log_evidence() -> None:
    x, y = problem()
    covariance = PRIOR**2 * x @ x.T + NOISE**2 * torch.eye(ROWS, dtype=x.dtype)
    evidence = torch.distributions.MultivariateNormal(torch.zeros(ROWS, dtype=x.dtype), covariance).log_prob(y[:, 0])
    net = nn.Linear(COLUMNS, 1, bias=False, dtype=torch.float64)
    method = lb.MeanField(prior=lb.Normal(PRIOR), init_std=0.1, relative=False)
    bnn = lb.bayesianize(net, method, likelihood=lb.Gaussian(NOISE))
    train(bnn, x, y, 1.0, 4, "accumulate")
    with torch.no_grad():
        bound = -ROWS * lb.elbo_loss(bnn, x, y, num_data=ROWS, temperature=1, samples=500)
    assert bound < evidence
    assert bound > evidence - 1.0  # the gap comes from the ignored correlation


def test_predictive_variance_is_that_of_the_posterior() -> None:
    x, y = problem()
    net = nn.Linear(COLUMNS, 1, bias=False, dtype=torch.float64)
    bnn = lb.bayesianize(net, lb.MeanField(init_std=0.3, relative=False), likelihood=lb.Gaussian(NOISE))
    prediction = bnn.predict(x, samples=4000)
    expected = x.square().sum(1, keepdim=True) * 0.3**2
    torch.testing.assert_close(prediction.epistemic_variance, expected, rtol=0.15, atol=0.0)
    torch.testing.assert_close(prediction.aleatoric_variance, torch.full_like(y, NOISE**2), rtol=1e-6, atol=0.0)
