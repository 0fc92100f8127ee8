"""Label few examples, but the right ones: active learning on handwritten digits.

Labels cost money, so we ask for 10 at a time: at random, where the entropy is highest, or those that together tell most
about the weights (`lb.decide.acquire`). In the pool most digits are 0 or 1, as real pools are mostly of the usual case,
so that random labels are mostly of what the model knows already.
"""

import statistics

import torch
from torch import Tensor

import leanbayes as lb
from leanbayes.data import Batches, load
from leanbayes.networks import build

SEEDS, FIRST, STEP, ROUNDS = 3, 20, 10, 4


def train(x: Tensor, y: Tensor, seed: int) -> lb.BayesianModel:
    bnn = lb.bayesianize(build("mlp", (64,), 10, seed=seed), lb.MeanField(), seed=seed)
    optimizer = torch.optim.Adam(bnn.parameter_groups(), lr=3e-3)
    for _ in range(200):
        loss = lb.elbo_loss(bnn, x, y, num_data=len(x), temperature=0.01)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return bnn


def accuracies(way: str, pool: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], seed: int) -> list[float]:
    """Return the accuracy on the test data after each round of labels."""
    (x, y), labeled, found = pool, [*range(FIRST)], []
    generator = torch.Generator().manual_seed(seed)
    while True:
        bnn = train(x[labeled], y[labeled], seed)
        right = bnn.predict(test[0], generator=torch.Generator().manual_seed(0)).label == test[1]
        found.append(100 * right.double().mean().item())
        if len(found) > ROUNDS:
            return found
        rest = torch.tensor([place for place in range(len(y)) if place not in labeled])
        if way == "random":
            places = torch.randperm(len(rest), generator=generator)[:STEP]
        else:
            places = lb.decide.acquire(bnn, [x[rest]], STEP, score=None if way == "joint information" else way)
        labeled += rest[places].tolist()


def main() -> None:
    """Compare the accuracy by the number of labels, averaged over seeds."""
    data = load("digits")
    sets = [next(Batches(d, len(d), shuffle=False, normalize=data.normalize).epoch()) for d in (data.train, data.test)]
    (x, y), test = [(images.flatten(1), labels) for images, labels in sets]
    scores: dict[str, list[list[float]]] = {"random": [], "entropy": [], "joint information": []}
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(y), generator=generator)
        kept = order[(y[order] < 2) | (torch.rand(len(y), generator=generator) < 0.15)]
        for way, rows in scores.items():
            rows.append(accuracies(way, (x[kept], y[kept]), test, seed))
    print(f"Accuracy on all ten digits, mean of {SEEDS} seeds")
    print(f"{'labels':17}", *(f"{FIRST + STEP * number:>8}" for number in range(ROUNDS + 1)))
    for way, rows in scores.items():
        print(f"{way:17}", *(f"{statistics.mean(column):>6.1f} %" for column in zip(*rows, strict=True)))


if __name__ == "__main__":
    main()
