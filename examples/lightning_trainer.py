"""Train a Bayesian network with Lightning, on handwritten digits.

    pip install '.[train]' lightning
    python examples/lightning_trainer.py

The mixin needs nothing but the model and the number of training examples.
"""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import leanbayes as lb
from leanbayes.data import Batches, load
from leanbayes.networks import build
from leanbayes.training import LightningMixin


class BayesianModule(LightningMixin, lightning.LightningModule):
    """The whole integration."""


def main() -> None:
    """Train by both engines, and print accuracy and uncertainty."""
    data = load("digits")
    parts = [
        TensorDataset(*next(Batches(part, len(part), shuffle=False, normalize=data.normalize).epoch()))
        for part in (data.train, data.validation, data.test)
    ]
    for engine, lr in (("backprop", 2e-3), ("ivon", 0.5)):
        bnn = lb.bayesianize(
            build("small-cnn", data.input_shape, data.outputs, seed=0), lb.MeanField(engine=engine, samples=10), seed=0
        )
        module = BayesianModule(bnn, num_data=len(parts[0]), lr=lr, temperature=0.01)
        trainer = lightning.Trainer(
            max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        loader = DataLoader(parts[0], 64, shuffle=True, generator=torch.Generator().manual_seed(0))
        trainer.fit(module, loader, DataLoader(parts[1], 600))
        bnn.refresh_batchnorm(loader)
        (scores,) = trainer.test(module, DataLoader(parts[2], 600), verbose=False)
        print(f"{engine}: accuracy {scores['test_accuracy']:.3f}, NLL {scores['test_nll']:.3f}")


if __name__ == "__main__":
    main()
