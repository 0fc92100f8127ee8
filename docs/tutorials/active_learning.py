# %% [markdown]
# # Active learning: label what teaches most
#
# Labels cost money. A model that knows what it does not know can choose which examples to label next: those about which samples of its
# weights disagree. Here two of ten digits are rare in the pool, as defects are in a factory. How fast are they found?
#
# You need `pip install 'leanbayes[train,data]'`.

# %%
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leanbayes as lb
from leanbayes.data import Batches, load

digits = load("digits")


def images(dataset):
    return next(Batches(dataset, len(dataset), shuffle=False, normalize=digits.normalize).epoch())


(x_all, y_all), (x_test, y_test) = images(digits.train), images(digits.test)
rare = y_all >= 8
kept = ~rare | (torch.cumsum(rare, 0) <= 40)  # 40 examples of the digits 8 and 9, and all of the others
x, y = x_all[kept], y_all[kept]
print(f"{len(x)} images in the pool, of which {(y >= 8).sum()} are rare")

# %% [markdown]
# ## One round
#
# Train on what is labeled. Predict the pool. Ask for the labels of the images with the highest mutual information: the part of the uncertainty
# that a label can remove. (The entropy would also choose images that are ambiguous by nature, where a label teaches little.)

# %%
START, STEP, ROUNDS = 40, 20, 4


def trained(chosen):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    recipe = {"epochs": 30, "batch_size": 20, "lr": 1e-2, "temperature": 0.01, "progress": False, "evaluate_every": 0}
    return lb.fit(network, lb.MeanField(), TensorDataset(x[chosen], y[chosen]), **recipe)


def next_images(bnn, chosen, by):
    """Return the images to label next: those with the highest mutual information, or random ones."""
    generator = torch.Generator().manual_seed(len(chosen))
    if by == "mutual information":
        score = bnn.predict(x, samples=30, generator=generator).mutual_information
    else:
        score = torch.rand(len(x), generator=generator)
    score[chosen] = -1.0  # these are labeled already
    return torch.cat([chosen, score.topk(STEP).indices])


# %% [markdown]
# ## Compare with random choice
#
# Both start from the same 40 images.

# %%
results = {}
for by in ("random", "mutual information"):
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[:START]
    for _ in range(ROUNDS):
        chosen = next_images(trained(chosen), chosen, by)
    probs = trained(chosen).predict(x_test, samples=30, generator=torch.Generator().manual_seed(0))
    right = probs.label == y_test
    results[by] = {
        "found": int((y[chosen] >= 8).sum()),
        "accuracy": right.float().mean().item(),
        "rare": right[y_test >= 8].float().mean().item(),
    }
    found, accuracy, accuracy_rare = results[by].values()
    print(
        f"{by}: {found} rare images among {len(chosen)} labels, {accuracy:.0%} right, {accuracy_rare:.0%} of the rare digits"
    )

# %% [markdown]
# ## What to remember
#
# - Choose by mutual information (by the epistemic std for regression), not by entropy.
# - Keep some random examples in every batch if you also want to measure: chosen examples are not a fair sample.
# - Images in one batch may be near copies of each other. Small steps avoid that.
