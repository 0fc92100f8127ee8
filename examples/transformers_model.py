"""Make an unmodified Hugging Face model Bayesian: a small vision transformer learns handwritten digits.

The network is built from a config, so nothing is downloaded. A pretrained network works the same way, and keeps its
weights.
"""

import torch
from transformers import ViTConfig, ViTForImageClassification

import leanbayes as lb
from leanbayes.data import Batches, load


def main() -> None:
    """Train a ViT with Bayesian attention and linear layers, and keep only its most certain predictions."""
    torch.manual_seed(0)
    data = load("digits")
    config = ViTConfig(
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
    network = ViTForImageClassification(config)
    bnn = lb.fit(network, lb.MeanField(), data, epochs=15, batch_size=32, lr=5e-3, temperature=1e-3, progress=False)
    print(f"Bayesian weights: {bnn.layout.numel} in {len(bnn.layout)} tensors")

    x, y = next(Batches(data.test, len(data.test), shuffle=False, normalize=data.normalize).epoch())
    prediction = bnn.predict({"pixel_values": x}, samples=30, generator=torch.Generator().manual_seed(0))
    correct = prediction.label == y
    most_certain = prediction.entropy.argsort()[: round(0.8 * len(y))]
    print(f"Accuracy on all {len(y)} digits: {correct.float().mean():.1%}")
    print(f"Accuracy on the 80 % with the lowest entropy: {correct[most_certain].float().mean():.1%}")


if __name__ == "__main__":
    main()
