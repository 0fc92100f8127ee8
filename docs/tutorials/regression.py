# %% [markdown]
# # Regression: intervals that hold
#
# How far has a patient's diabetes progressed after one year? A network predicts a number. A Bayesian network also says how far off the
# number may be, and a policy turns that into an interval with a guarantee.
#
# You need `pip install '.[train,data]'`. The data come with scikit-learn: ten measurements of 442 patients.

# %%
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import TensorDataset

import leanbayes as lb

x, y = (torch.tensor(values, dtype=torch.float32) for values in load_diabetes(return_X_y=True))
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
x, y = x[order] / x.std(0), y[order].unsqueeze(1)
scale = y[:250].mean(), y[:250].std()  # of the training targets only
y = (y - scale[0]) / scale[1]
train, held_out, test = (slice(0, 250), slice(250, 350), slice(350, None))
print(f"{len(x[train])} patients to train with, {len(x[held_out])} held out, {len(x[test])} to test with")

# %% [markdown]
# ## Train
#
# The network has two outputs per patient: a mean, and a variance of the noise that no model can remove. `HeteroscedasticGaussian` is the
# likelihood that reads them so. For a table this small, `temperature=0.1` with the default engine works well ([tune](../guide/tune.md)).

# %%
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
bnn = lb.fit(
    network,
    lb.MeanField(),
    TensorDataset(x[train], y[train]),
    likelihood=lb.HeteroscedasticGaussian(),
    epochs=40,
    batch_size=32,
    lr=1e-2,
    temperature=0.1,
    progress=False,
)

# %% [markdown]
# ## Predict
#
# Every prediction has two stds. The aleatoric one is noise in the data: patients with the same measurements differ. The epistemic one is what
# the model does not know, and it shrinks with more patients.

# %%
prediction = bnn.predict(x[test], samples=100, generator=torch.Generator().manual_seed(0))
noise, unknown = prediction.aleatoric_variance.sqrt(), prediction.epistemic_variance.sqrt()
print("patient  mean  aleatoric  epistemic")
for row in range(4):
    values = (prediction.mean[row] * scale[1] + scale[0], noise[row] * scale[1], unknown[row] * scale[1])
    print(f"{row:7d} " + " ".join(f"{value.item():9.0f}" for value in values))

# %% [markdown]
# An impossible patient, with all measurements far outside the data, has a much larger epistemic std:

# %%
strange = bnn.predict(torch.full((1, 10), 8.0), samples=100, generator=torch.Generator().manual_seed(0))
ratio = (strange.epistemic_variance.sqrt() / unknown.median()).item()
print(f"{ratio:.0f} times the epistemic std of a typical patient")

# %% [markdown]
# ## Intervals with a guarantee
#
# `prediction.interval(0.9)` is the interval of the model itself. It holds if the model is right. `lb.decide.fit` scales it on held-out
# patients, so that it holds whether the model is right or not: for 90 % of new patients, on average.

# %%
policy = lb.decide.fit(bnn, [(x[held_out], y[held_out])], coverage=0.9, samples=100)
low, high = policy(prediction).interval
inside = ((y[test] >= low) & (y[test] <= high)).float().mean().item()
width = (high - low).mean().item() * scale[1].item()
print(f"{inside:.0%} of the test patients are inside their interval, which is {width:.0f} wide on average")

# %% [markdown]
# ## What to remember
#
# - Standardize the targets, and undo it at the end.
# - Use `HeteroscedasticGaussian` if the noise depends on the input, `Gaussian` if it does not.
# - Promise the intervals of a policy, not those of the model.
# - Look at the epistemic std before you trust a prediction for an unusual input.
