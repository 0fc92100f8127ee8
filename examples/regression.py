"""Regression with both uncertainties: the noise of the data (aleatoric), and what the model has not seen (epistemic).

The data are y = sin(2x) with x from -2 to 2, plus noise that grows with x. More data would not lower the first
uncertainty; the second is small where there are data, and large where there are none.
"""

import torch
from torch import Tensor, nn

import leanbayes as lb


def noise_std(x: Tensor) -> Tensor:
    """The true noise: 0.06 at x = -2, and 0.41 at x = 2."""
    return 0.15 * torch.exp(x / 2)


def main() -> None:
    """Train, and ask both where there were data and where there were none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, 1, generator=generator) * 4 - 2
    y = torch.sin(2 * x) + noise_std(x) * torch.randn(x.shape, generator=generator)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    likelihood = lb.HeteroscedasticGaussian()  # of two outputs: the mean and the variance of y at x
    method = lb.MeanField(prior=lb.Normal(1.0), rule="local")  # each example has noise of its own
    bnn = lb.bayesianize(network, method, likelihood=likelihood)
    optimiser = torch.optim.Adam(bnn.parameters(), lr=1e-2)
    steps = 1000
    for step in range(steps):
        temperature = min(1.0, 2 * step / steps)  # the KL comes in over the first half, and then counts in full
        loss = lb.elbo(bnn, x, y, num_data=len(x), temperature=temperature)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    asked = torch.tensor([-4.0, -1.5, 0.0, 1.5, 4.0]).unsqueeze(1)
    prediction = bnn.predict(asked, samples=500, generator=torch.Generator().manual_seed(0))
    stds = prediction.aleatoric_variance.sqrt(), prediction.epistemic_variance.sqrt()
    columns = torch.cat([asked, torch.sin(2 * asked), prediction.mean, noise_std(asked), *stds], 1)
    print("    x   true mean    mean   true noise   aleatoric std   epistemic std")
    for (number, *values), known in zip(columns.tolist(), (asked.abs() <= 2).flatten().tolist(), strict=True):
        row = "{:11.2f} {:7.2f} {:12.2f} {:15.2f} {:15.2f}".format(*values)
        print(f"{number:5.1f} {row}   {'' if known else 'no data here'}".rstrip())


if __name__ == "__main__":
    main()
