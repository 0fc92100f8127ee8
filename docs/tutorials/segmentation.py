# %% [markdown]
# # Segmentation: which pixels to check
#
# A segmentation network labels every pixel. A Bayesian one marks the pixels that a person should check: borders, where the image is
# ambiguous, and objects that it was never shown.
#
# You need `pip install '.[train]'`. The images are drawn below: gray discs and bright squares on a dark ground.

# %%
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leanbayes as lb

SIZE, GROUND, DISC, SQUARE, IGNORED = 16, 0, 1, 2, 255


def scene(generator, unknown=False):
    """Draw an image and its label map. The unknown object, a checkered square, has no class: its pixels are ignored."""
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    image = torch.zeros(SIZE, SIZE)
    labels = torch.full((SIZE, SIZE), GROUND)
    for kind in (DISC, SQUARE):
        row, column = torch.randint(3, SIZE - 3, (2,), generator=generator).tolist()
        distance = [(rows - row).abs(), (columns - column).abs()]
        inside = distance[0] ** 2 + distance[1] ** 2 <= 9 if kind == DISC else torch.maximum(*distance) <= 2
        image[inside], labels[inside] = (0.5 if kind == DISC else 1.0), kind
    if unknown:
        image[:5, :5] = 2.0 * ((rows + columns)[:5, :5] % 2) - 0.5
        labels[:5, :5] = IGNORED
    return image.add(0.1 * torch.randn(SIZE, SIZE, generator=generator)).unsqueeze(0), labels


generator = torch.Generator().manual_seed(0)
x, y = (torch.stack(part) for part in zip(*(scene(generator) for _ in range(160)), strict=True))
x_new, y_new = (torch.stack(part) for part in zip(*(scene(generator, unknown=True) for _ in range(20)), strict=True))
print(f"{len(x)} images of {SIZE}×{SIZE} pixels to train with, {len(x_new)} with an unknown object")

# %% [markdown]
# ## Train
#
# Any network works whose output has shape (images, classes, height, width): a U-Net (`leanbayes.networks.build("unet", ...)`), one of
# torchvision, or the four layers below. `Categorical(ignore_index=255)` leaves out pixels without a label.

# %%
torch.manual_seed(0)
network = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
    *(nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.ReLU()),
    *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()),
    nn.Conv2d(16, 3, 1),
)
bnn = lb.fit(
    network,
    lb.MeanField(),
    TensorDataset(x, y),
    likelihood=lb.Categorical(ignore_index=IGNORED),
    epochs=15,
    batch_size=16,
    lr=1e-2,
    temperature=0.1,
    progress=False,
)

# %% [markdown]
# ## Predict
#
# Each pixel has its own probabilities, and its own total and epistemic uncertainty.

# %%
prediction = bnn.predict(x_new, samples=20, generator=torch.Generator().manual_seed(0))
labeled = y_new != IGNORED
accuracy = (prediction.label == y_new)[labeled].float().mean().item()
print(f"{accuracy:.1%} of the labeled pixels are right")

# %% [markdown]
# ## Which pixels to check
#
# Wrong pixels and pixels of the unknown object should be more uncertain than right ones.

# %%
right, wrong, unknown = (prediction.label == y_new) & labeled, (prediction.label != y_new) & labeled, ~labeled
entropies = {
    name: prediction.entropy[mask].mean().item()
    for name, mask in (("right", right), ("wrong", wrong), ("unknown object", unknown))
}
for name, entropy in entropies.items():
    print(f"mean entropy of {name}: {entropy:.3f} nats")

# %% [markdown]
# A map says more than a mean. Dots are certain pixels, `+` and `#` uncertain ones. The unknown object is in the upper left corner.

# %%
for row in prediction.entropy[0]:
    print("".join(".+#"[(value > 0.1) + (value > 0.4)] for value in row.tolist()))

# %% [markdown]
# ## A budget of pixels
#
# If a person can check 10 % of the pixels, which ones? Those with the highest entropy:

# %%
checked = prediction.entropy > prediction.entropy.flatten().quantile(0.9)
found = (wrong & checked).sum().item() / max(1, wrong.sum().item())
print(f"checking 10 % of the pixels finds {found:.0%} of the wrong ones")

# %% [markdown]
# ## What to remember
#
# - Uncertainty at borders is aleatoric: better images help, more images do not.
# - `ignore_index` is for pixels without a label. They count in no loss and in no metric.
# - `lb.evaluate` adds the mean IoU for label maps.
