"""Detect what the model has never seen: it learns digits, and is then shown letters.

Entropy is all of its uncertainty, which a plain network has too. Mutual information is how much the draws of a Bayesian
one disagree: the part that more data would remove. AUROC is the probability that a letter is found less certain than a
digit; 0.5 is guessing.
"""

import torch
from torch import Tensor

import leanbayes as lb
from leanbayes.data import ArrayDataset, Batches, load, read_images
from leanbayes.evaluation.detection import auroc
from leanbayes.models import build


def main() -> None:
    """Train a plain network and a Bayesian one on digits, and see what they make of letters."""
    data = load("digits")
    network = build("small-cnn", data.input_shape, data.outputs, seed=0)

    def images(dataset: ArrayDataset) -> Tensor:
        return next(Batches(dataset, len(dataset), shuffle=False, normalise=data.normalise).epoch())[0]

    digits, letters = images(data.test), images(read_images("letters", "test"))
    for method in (lb.Deterministic(), lb.MeanField()):
        bnn = lb.fit(network, method, data, epochs=12, batch_size=64, progress=False)
        seen, unseen = (bnn.predict(x, generator=torch.Generator().manual_seed(0)) for x in (digits, letters))
        print(f"{type(method).__name__}, {len(letters)} letters against {len(digits)} digits")
        print(f"  AUROC of entropy: {auroc(seen.entropy, unseen.entropy):.3f}")
        if bnn.current_rule.random:
            print(f"  AUROC of mutual information: {auroc(seen.mutual_information, unseen.mutual_information):.3f}")
        turned_away = (unseen.entropy > seen.entropy.quantile(0.95)).float().mean()
        print(f"  Where the least sure 5 % of the digits are turned away, {turned_away:.0%} of the letters are.")


if __name__ == "__main__":
    main()
