"""Regression with aleatoric and epistemic uncertainty.

The data are y = sin(2x) for x from -2 to 2, plus noise that grows with x. Aleatoric uncertainty is the noise of the
data, which more data would not reduce. Epistemic uncertainty is that of the model: small near the data, large
elsewhere.
"""

import torch
from torch import Tensor, nn

import leanbayes as lb


def noise_std(x: Tensor) -> Tensor:
    """Return the true noise std: 0.06 at x = -2, and 0.41 at x = 2."""
    return 0.15 * torch.exp(x / 2)


def main() -> None:
    """Train, and predict inside and outside the range of the data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 1, generator=generator) * 4 - 2
    y = torch.sin(2 * x) + noise_std(x) * torch.randn(x.shape, generator=generator)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    likelihood = lb.HeteroscedasticGaussian()  # the two outputs are mean and variance of y given x
    method = lb.MeanField(prior=lb.Normal(1.0), rule="local")  # separate noise for each example
    bnn = lb.bayesianize(network, method, likelihood=likelihood)
    optimizer = torch.optim.Adam(bnn.parameters(), lr=1e-2)
    steps = 1000
    for step in range(steps):
        temperature = min(1.0, 2 * step / steps)  # KL warm-up over the first half
        loss = lb.elbo_loss(bnn, x, y, num_data=len(x), temperature=temperature)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    x_test = torch.tensor([-4.0, -1.5, 0.0, 1.5, 4.0]).unsqueeze(1)
    prediction = bnn.predict(x_test, samples=500, generator=torch.Generator().manual_seed(0))
    stds = prediction.aleatoric_variance.sqrt(), prediction.epistemic_variance.sqrt()
    rows = torch.cat([x_test, torch.sin(2 * x_test), prediction.mean, noise_std(x_test), *stds], 1)
    print("    x   true mean    mean   true noise   aleatoric std   epistemic std")
    for position, *values in rows.tolist():
        row = "{:11.2f} {:7.2f} {:12.2f} {:15.2f} {:15.2f}".format(*values)
        print(f"{position:5.1f} {row}" + ("   no data here" if abs(position) > 2 else ""))


if __name__ == "__main__":
    main()
