"""Detect out-of-distribution images: a model learns digits and is then shown letters.

Entropy is the total uncertainty of a prediction, which a deterministic network also has. Mutual information is the
disagreement between Monte Carlo samples: the uncertainty that more data would remove. AUROC is the probability that a
letter has a higher score than a digit; 0.5 is chance.
"""

import torch
from torch import Tensor

import leanbayes as lb
from leanbayes.data import ArrayDataset, Batches, load, read_images
from leanbayes.evaluation.detection import auroc
from leanbayes.networks import build


def main() -> None:
    """Train a deterministic and a Bayesian network on digits, and compare their uncertainty on letters."""
    data = load("digits")
    network = build("small-cnn", data.input_shape, data.outputs, seed=0)

    def images(dataset: ArrayDataset) -> Tensor:
        return next(Batches(dataset, len(dataset), shuffle=False, normalize=data.normalize).epoch())[0]

    digits, letters = images(data.test), images(read_images("letters", "test"))
    print(f"{len(digits)} digits (in distribution), {len(letters)} letters (out of distribution)")
    for method in (lb.Deterministic(), lb.MeanField()):
        bnn = lb.fit(network, method, data, epochs=12, batch_size=64, temperature=0.01, progress=False)
        known, ood = (bnn.predict(x, generator=torch.Generator().manual_seed(0)) for x in (digits, letters))
        print(type(method).__name__)
        print(f"  AUROC of entropy: {auroc(known.entropy, ood.entropy):.3f}")
        if bnn.current_rule.random:
            print(f"  AUROC of mutual information: {auroc(known.mutual_information, ood.mutual_information):.3f}")
        rejected = (ood.entropy > known.entropy.quantile(0.95)).float().mean()
        print(f"  Letters rejected at a threshold that rejects 5 % of the digits: {rejected:.0%}")


if __name__ == "__main__":
    main()
