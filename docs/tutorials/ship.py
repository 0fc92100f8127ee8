# %% [markdown]
# # Compress and ship
#
# From a network to a file of a few kilobytes that predicts with uncertainty, and to an ONNX graph that needs no Python. Four steps: train
# sparse, share weights, calibrate, export.
#
# You need `pip install '.[train,data,compress,export]'`.

# %%
from pathlib import Path

import onnxruntime
import torch

import leanbayes as lb
from leanbayes.data import Batches, load
from leanbayes.networks import build

data = load("digits")
network = build("small-cnn", data.input_shape, data.outputs, seed=0)


def batches(split):
    return list(Batches(split, 128, shuffle=False, normalize=data.normalize).epoch())


held_out = batches(data.validation)
x_test, y_test = (torch.cat(part) for part in zip(*batches(data.test), strict=True))

# %% [markdown]
# ## 1. Train sparse
#
# `SSVI` keeps a fifth of the weights, and all others are exactly zero from the first step. Zeros cost nothing in the file.

# %%
bnn = lb.fit(
    network,
    lb.SSVI(density=0.2, interval=20),
    data,
    epochs=15,
    batch_size=64,
    lr=5e-3,
    temperature=0.01,
    progress=False,
)
lb.save(bnn, "sparse.safetensors")
plain_bytes = 4 * sum(parameter.numel() for parameter in network.parameters())
print(
    f"plain network: {plain_bytes / 1e3:.0f} kB, sparse with stds: {Path('sparse.safetensors').stat().st_size / 1e3:.0f} kB"
)

# %% [markdown]
# ## 2. Share weights
#
# `compress` lets the weights share few Gaussians and codes their labels by entropy. It tries several settings, scores each file on held-out
# data, and keeps the smallest one whose NLL rises by at most 0.05.

# %%
small = lb.compress(bnn, "model.lbc", max_nll_increase=0.05, data=held_out)
print(f"compact file: {small.bytes / 1e3:.1f} kB, {plain_bytes / small.bytes:.0f} times smaller than the plain network")

# %% [markdown]
# ## 3. Load, calibrate, decide
#
# The file is loaded into a network of the same architecture. `calibrate` learns two numbers from held-out data so that 80 % means 80 % in one
# pass, and the policy then learns when to answer.

# %%
shipped = lb.load("model.lbc", build("small-cnn", data.input_shape, data.outputs))
lb.calibrate(shipped, held_out, to="labels")
policy = lb.decide.fit(shipped, held_out, risk=0.1, rule="moments")
prediction = shipped.predict(x_test, rule="moments")
decision = policy(prediction)
right = prediction.label == y_test
print(f"all {len(x_test)} digits: {right.float().mean():.1%} right")
print(
    f"the {decision.accepted.float().mean():.0%} that are answered: {right[decision.accepted].float().mean():.1%} right"
)

# %% [markdown]
# ## 4. Export
#
# The ONNX file computes mean and variance of the logits, and the calibrated probabilities, in one pass. It is checked against PyTorch before
# it is written.

# %%
file = lb.export_onnx(shipped, "model.onnx", x_test[:2])
session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
outputs = dict(zip(file.outputs, session.run(None, {file.inputs[0]: x_test.numpy()}), strict=True))
difference = (torch.from_numpy(outputs["probs"]) - prediction.probs).abs().max().item()
print(f"largest difference of a probability between PyTorch and onnxruntime: {difference:.0e}")

# %% [markdown]
# ## What to remember
#
# - Sparse first, shared second. Each step works alone, too.
# - Calibrate and fit the policy after compression: both belong to the predictions of one model.
# - [Serve](../guide/serve.md) has an HTTP server for the ONNX file in forty lines.
