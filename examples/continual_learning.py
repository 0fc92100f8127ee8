"""Learn from new data without the old ones: the posterior after the first task is the prior of the second one.

The tasks are handwritten digits from two cameras, of which the second mixes up the order of the pixels. Only the data
of one camera are there at a time. A network that is trained further on the second task forgets much of the first one.
With `lb.Normal.from_posterior` the weights that the first task has determined stay, and the others learn the second.
"""

import statistics

import torch
from torch import Tensor

import leanbayes as lb
from leanbayes.data import ArrayDataset, Batches, load
from leanbayes.networks import build

SEEDS = 3


def learn(model: torch.nn.Module, method: lb.Method, x: Tensor, y: Tensor, seed: int) -> lb.BayesianModel:
    # All parameters are Bayesian, because a bias without a prior would be free to forget.
    select = ".*" if method.bayesian_weights else None
    settings = {"epochs": 12, "batch_size": 32, "temperature": 0.1, "seed": seed}
    return lb.fit(model, method, ArrayDataset(x, y), select=select, progress=False, **settings)


def main() -> None:
    """Train on one camera and then on the other, in three ways, and test on both."""
    data = load("digits")
    sets = [next(Batches(d, len(d), shuffle=False, normalize=data.normalize).epoch()) for d in (data.train, data.test)]
    (x, y), (test_x, test_y) = [(images.flatten(1), labels) for images, labels in sets]
    scores: dict[str, list[list[float]]] = {}
    for seed in range(SEEDS):
        pixels = torch.randperm(64, generator=torch.Generator().manual_seed(seed))
        network = build("mlp", (64,), 10, seed=seed)
        plain = learn(network, lb.Deterministic(), x, y, seed)
        bnn = learn(network, lb.MeanField(), x, y, seed)
        after = {
            "plain network": learn(plain, lb.Deterministic(), x[:, pixels], y, seed),
            "zero-mean prior": learn(bnn, lb.MeanField(), x[:, pixels], y, seed),
            "posterior as prior": learn(bnn, lb.MeanField(prior=lb.Normal.from_posterior(bnn)), x[:, pixels], y, seed),
        }
        for name, model in after.items():
            found = [
                (model.predict(inputs, generator=torch.Generator().manual_seed(0)).label == test_y).double().mean()
                for inputs in (test_x, test_x[:, pixels])
            ]
            scores.setdefault(name, []).append([100 * share.item() for share in found])
    print(f"Accuracy after both tasks, of {SEEDS} seeds each")
    print(f"{'':18}  first task     second task    mean")
    for name, rows in scores.items():
        first, second = zip(*rows, strict=True)
        both = [statistics.mean(row) for row in rows]
        cells = (f"{statistics.mean(c):.1f} % ± {statistics.stdev(c):.1f}".ljust(13) for c in (first, second, both))
        print(f"{name:18}  {'  '.join(cells)}".rstrip())


if __name__ == "__main__":
    main()
