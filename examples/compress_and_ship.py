"""Compress a trained model into one small file, and export it as an ONNX graph that runs without PyTorch.

Weight sharing replaces the weights by labels of a few Gaussians, which the compact file stores with entropy coding. The
ONNX graph computes mean and variance of a prediction in one pass.
"""

import tempfile
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

import leanbayes as lb
from leanbayes.data import Batches, load
from leanbayes.networks import build


def main() -> None:
    """Train, share the weights, write both files, and load them again."""
    data = load("digits")
    network = build("small-cnn", data.input_shape, data.outputs, seed=0)
    x, y = next(Batches(data.test, len(data.test), shuffle=False, normalize=data.normalize).epoch())
    recipe = {"batch_size": 64, "temperature": 1e-3, "progress": False}

    dense = lb.fit(network, lb.MeanField(), data, epochs=10, **recipe)
    shared = lb.bayesianize(dense, lb.WeightSharing(components=32, pretrain_std=0.0))
    shared = lb.fit(shared, shared.method, data, epochs=3, lr=1e-4, **recipe)  # trains the Gaussians, not the labels

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lb.save(dense, folder / "dense.safetensors")
        dense_bytes = (folder / "dense.safetensors").stat().st_size
        compact = lb.compress(shared, folder / "model.lbc")
        loaded = lb.load(folder / "model.lbc", network)
        exported = lb.export_onnx(loaded, folder / "model.onnx", x[:8])  # the batch size stays variable
        session = onnxruntime.InferenceSession(exported.path, providers=["CPUExecutionProvider"])
        outputs = session.run(None, {exported.inputs[0]: x.numpy()})

    def accuracy(probs: Tensor) -> str:
        return f"{(probs.argmax(1) == y).float().mean():.1%} accuracy"

    probs = loaded.predict(x, rule="moments").probs
    onnx_probs = torch.from_numpy(outputs[exported.outputs.index("probs")])
    print(f"Dense file:   {dense_bytes / 1e3:6.1f} kB, {accuracy(dense.predict(x, rule='moments').probs)}")
    print(f"Compact file: {compact.bytes / 1e3:6.1f} kB, {accuracy(probs)}")
    print(f"ONNX Runtime: {accuracy(onnx_probs)}")
    print(
        f"Largest difference of a probability between PyTorch and ONNX Runtime: {(onnx_probs - probs).abs().max():.1e}"
    )


if __name__ == "__main__":
    main()
