"""A network of transformers, unmodified: a small vision transformer becomes Bayesian and learns handwritten digits.

The network comes from a config, so nothing is downloaded; one with pretrained weights is used alike, and keeps them.
"""

import torch
from transformers import ViTConfig, ViTForImageClassification

import leanbayes as lb
from leanbayes.data import Batches, load


def main() -> None:
    """Train all attention and linear layers as Bayesian ones, and let the least sure digits go to a person."""
    torch.manual_seed(0)
    data = load("digits")
    network = ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=2,
            num_channels=1,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            num_labels=data.outputs,
            initializer_range=0.1,
        )
    )
    bnn = lb.fit(network, lb.MeanField(), data, epochs=15, batch_size=32, lr=5e-3, temperature=1e-3, progress=False)
    print(f"{bnn.layout.numel} weights in {len(bnn.layout)} tensors are Bayesian.")

    x, y = next(Batches(data.test, len(data.test), shuffle=False, normalise=data.normalise).epoch())
    prediction = bnn.predict({"pixel_values": x}, samples=30, generator=torch.Generator().manual_seed(0))
    right = prediction.label == y
    surest = prediction.entropy.argsort()[: round(0.8 * len(y))]
    print(f"{right.float().mean():.1%} of {len(y)} digits are right.")
    print(f"{right[surest].float().mean():.1%} of the 80 % that it is surest of are right.")


if __name__ == "__main__":
    main()
