# %% [markdown]
# # Active learning: label what teaches most
#
# Labels cost money. A model that knows what it does not know can choose which examples to label next: those about which samples of its
# weights disagree. Here two of ten digits are rare in the pool, as defects are in a factory. How fast are they found?
#
# You need `pip install '.[train,data]'`.

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
# Train on what is labeled, and let `lb.decide.acquire` choose from the rest of the pool. It takes the images that together tell most about the
# weights (BatchBALD), so no two of them are alike.

# %%
START, STEP, ROUNDS = 40, 20, 4


def trained(chosen):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    recipe = {"epochs": 30, "batch_size": 20, "lr": 1e-2, "temperature": 0.01, "progress": False, "evaluate_every": 0}
    return lb.fit(network, lb.MeanField(), TensorDataset(x[chosen], y[chosen]), **recipe)


def next_images(chosen, by):
    """Return the labeled images, and the next ones to label."""
    rest = torch.tensor([place for place in range(len(x)) if place not in set(chosen.tolist())])
    if by == "random":
        places = torch.randperm(len(rest), generator=torch.Generator().manual_seed(len(chosen)))[:STEP]
    else:
        places = lb.decide.acquire(trained(chosen), [x[rest]], STEP)
    return torch.cat([chosen, rest[places]])


# %% [markdown]
# ## Compare with random choice
#
# Both start from the same 40 images.

# %%
results = {}
for by in ("random", "information"):
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[:START]
    for _ in range(ROUNDS):
        chosen = next_images(chosen, by)
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
# - Choose by information, not by entropy: the entropy is also high for images that are ambiguous by nature, where a label teaches little.
# - Keep some random examples in every batch if you also want to measure: chosen examples are not a fair sample.
# - For regression, `lb.decide.acquire(..., score="epistemic_std")`.
