"""Compress and ship: a trained model as one small file, and as an ONNX graph that runs without torch.

Weights that share few Gaussians are stored as labels, which are entropy-coded; the graph gives mean and variance of a
prediction in one pass.
"""

import tempfile
from pathlib import Path

import onnxruntime
import torch

import leanbayes as lb
from leanbayes.data import Batches, load
from leanbayes.models import build


def main() -> None:
    """Train, share, write both files, and read them as a receiver would."""
    data = load("digits")
    network = build("small-cnn", data.input_shape, data.outputs, seed=0)
    x, y = next(Batches(data.test, len(data.test), shuffle=False, normalise=data.normalise).epoch())
    recipe = {"batch_size": 64, "temperature": 1e-3, "progress": False}

    dense = lb.fit(network, lb.MeanField(), data, epochs=10, **recipe)
    shared = lb.bayesianize(dense, lb.WeightSharing(components=32, pretrain_spreads=0.0))
    shared = lb.fit(shared, shared.method, data, epochs=3, lr=1e-4, **recipe)  # the codebook, not the labels

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dense.save(folder / "dense.safetensors")
        compact = lb.compress(shared, folder / "model.lbc")
        loaded = lb.load(folder / "model.lbc", network)
        exported = lb.export_onnx(loaded, folder / "model.onnx", x[:8])  # any number of images may come later
        session = onnxruntime.InferenceSession(exported.path, providers=["CPUExecutionProvider"])
        outputs = session.run(None, {exported.inputs[0]: x.numpy()})
        megabytes = (folder / "dense.safetensors").stat().st_size / 1e6

    prediction = loaded.predict(x, rule="moments")
    shipped = torch.from_numpy(outputs[exported.outputs.index("probs")])
    before = dense.predict(x, rule="moments")
    print(f"dense model: {megabytes:.3f} MB, {(before.label == y).float().mean():.1%} right")
    print(f"compact file: {compact.bytes / 1e6:.3f} MB, {(prediction.label == y).float().mean():.1%} right")
    print(f"onnxruntime: {(shipped.argmax(1) == y).float().mean():.1%} right")
    print(f"largest difference of a probability to torch: {(shipped - prediction.probs).abs().max():.1e}")


if __name__ == "__main__":
    main()
