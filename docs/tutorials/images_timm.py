# %% [markdown]
# # Images: a network of timm
#
# Take a network of timm, make it Bayesian, train it in your own loop, and let it refuse images that it was never shown.
#
# You need `pip install . timm pillow`. To run offline and in seconds, the network is the smallest of timm without pretrained
# weights, and the images are small capital letters. With `pretrained=True` and your own images nothing else changes.

# %%
import timm
import torch
from torch.nn.functional import interpolate

import leanbayes as lb
from leanbayes.data import read_images


def letters(split):
    """Return all letters as images of 32×32 pixels, and their classes."""
    examples = read_images("letters", split)
    x = torch.stack([image for image, _ in examples]) / 255.0
    return interpolate(x, scale_factor=4, mode="bilinear") * 2 - 1, torch.tensor([int(label) for _, label in examples])


(x_all, y_all), (x_more, y_more) = letters("train"), letters("test")
x, y = x_all[y_all < 8], y_all[y_all < 8]  # eight letters to learn; four more are never shown
x_new, y_new, x_unknown = x_more[y_more < 8], y_more[y_more < 8], x_more[y_more >= 8]
print(f"{len(x)} images to train with, {len(x_new)} new ones, {len(x_unknown)} of unknown letters")

# %% [markdown]
# ## Make it Bayesian
#
# No layer is replaced: the network keeps its modules, and its weights become the means. `bnn.report` lists what became Bayesian.

# %%
torch.manual_seed(0)
network = timm.create_model("test_resnet", num_classes=8, in_chans=1, pretrained=False)
bnn = lb.bayesianize(network, lb.MeanField(engine="ivon"))
everything = sum(parameter.numel() for parameter in network.parameters())
print(f"{bnn.posterior.random_weights:,} of {everything:,} weights are Bayesian")

# %% [markdown]
# ## Train
#
# Two lines differ from a plain loop: the optimizer and the loss. `IVON` needs no temperature, and its learning rate is about ten times that of
# SGD. BatchNorm has seen other samples of the weights, so its statistics are refreshed at the end.

# %%
epochs, batch_size = 6, 50
optimizer = lb.IVON(bnn, lr=0.5, num_data=len(x))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=epochs * (len(x) // batch_size))
generator = torch.Generator().manual_seed(0)
bnn.train()
for _ in range(epochs):
    for rows in torch.randperm(len(x), generator=generator).split(batch_size):
        loss = lb.elbo_loss(bnn, x[rows], y[rows], num_data=len(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
bnn.refresh_batchnorm(x.split(batch_size))

# %% [markdown]
# ## Look at the uncertainty
#
# The network must give one of its eight letters to an unknown one. Its entropy shows that it should not.

# %%
half = len(x_new) // 2
prediction, strange = (
    bnn.predict(part, samples=20, generator=torch.Generator().manual_seed(0)) for part in (x_new[half:], x_unknown)
)
accuracy = (prediction.label == y_new[half:]).float().mean().item()
print(f"{accuracy:.1%} of the new images are right")
print(
    f"mean entropy: {prediction.entropy.mean():.3f} nats for known letters, {strange.entropy.mean():.3f} for unknown ones"
)

# %% [markdown]
# ## Decide
#
# The policy promises that at most 10 % of the known letters raise a false alarm. How many unknown ones it finds depends on the model.

# %%
policy = lb.decide.fit(bnn, [(x_new[:half], y_new[:half])], false_alarms=0.1, ood_score="entropy", samples=20)
alarms = {"known letters": policy(prediction).alarm, "unknown letters": policy(strange).alarm}
for name, alarm in alarms.items():
    print(f"{name}: {alarm.float().mean():.0%} go to a person")

# %% [markdown]
# ## What to remember
#
# - `select=` restricts what becomes Bayesian, for example to the last layers of a pretrained network.
# - `lb.fit` does all of this in one call, with checkpoints, mixed precision and several processes.
# - On the command line: `leanbayes fit mean-field --data FOLDER --model timm:NAME`.
