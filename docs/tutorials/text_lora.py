# %% [markdown]
# # Text: a Bayesian LoRA adapter on a transformer
#
# A language model is too large to give every weight a std, and its pretrained weights should stay as they are. So freeze it, add a
# low-rank adapter (LoRA) to its attention, and make only the adapter and the head Bayesian. That is a few thousand numbers.
#
# You need `pip install '.[train]' transformers`. To run offline and in seconds, the model below is a tiny BERT from a config, and the
# reviews are made of a few dozen words. A pretrained model and its tokenizer go in the same places.

# %%
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import leanbayes as lb

GOOD, BAD = ("great", "good", "lovely", "fine"), ("poor", "awful", "dull", "weak")
OTHER = ("the", "film", "plot", "was", "and", "music", "a", "bit", "very", "quite", "actor", "end")
UNKNOWN = tuple(f"word{number}" for number in range(20))  # never in the training data
VOCABULARY = {word: number for number, word in enumerate(("[PAD]", *GOOD, *BAD, *OTHER, *UNKNOWN))}


def pick(words, generator):
    return words[int(torch.randint(len(words), (1,), generator=generator))]


def review(label, generator):
    """Write a review of eight words, three of which say whether it is good."""
    words = [pick(OTHER, generator) for _ in range(5)] + [pick(GOOD if label else BAD, generator) for _ in range(3)]
    return [VOCABULARY[words[place]] for place in torch.randperm(8, generator=generator).tolist()]


generator = torch.Generator().manual_seed(0)
labels = torch.arange(400) % 2
tokens = torch.tensor([review(label, generator) for label in labels.tolist()])
strange = torch.tensor([[VOCABULARY[pick(UNKNOWN, generator)] for _ in range(8)] for _ in range(100)])
print(f"{len(tokens)} reviews, {len(VOCABULARY)} words")

# %% [markdown]
# ## The adapter
#
# LoRA adds a product of two thin matrices to a frozen weight: y = Wx + BAx. B starts at zero, so the model starts as it was. The library peft has
# this as a ready-made layer, with the same names `lora_A` and `lora_B`; ten lines show that nothing in it is special.


# %%
class LoRA(nn.Module):
    """A frozen linear layer with a low-rank correction."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


torch.manual_seed(0)
config = BertConfig(
    vocab_size=len(VOCABULARY),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=16,
    num_labels=2,
    initializer_range=0.2,
)
network = BertForSequenceClassification(config).requires_grad_(False)  # stands for a pretrained model
for layer in network.bert.encoder.layer:
    attention = layer.attention.self
    attention.query, attention.value = LoRA(attention.query), LoRA(attention.value)
network.classifier.requires_grad_(True)

# %% [markdown]
# ## Make the adapter Bayesian
#
# `select=` names what becomes Bayesian, here by a regular expression. The report says what happened to the rest.

# %%
bnn = lb.bayesianize(network, lb.MeanField(), select=r"lora_[AB]|classifier\.weight")
everything = sum(parameter.numel() for parameter in network.parameters())
print(f"{bnn.posterior.random_weights:,} of {everything:,} weights are Bayesian")

# %% [markdown]
# ## Train
#
# The examples are dicts, as those of a Hugging Face data set: `labels` is the label, and the other entries are keywords of the model.

# %%
examples = [
    {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": label}
    for row, label in zip(tokens, labels, strict=True)
]
bnn = lb.fit(bnn, bnn.method, examples[:300], epochs=12, batch_size=25, lr=2e-2, temperature=0.3, progress=False)

# %% [markdown]
# ## Predict
#
# Reviews with words that the model has never seen should be uncertain.


# %%
def predict(rows):
    inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
    return bnn.predict(inputs, samples=30, generator=torch.Generator().manual_seed(0))


known, unknown = predict(tokens[300:]), predict(strange)
accuracy = (known.label == labels[300:]).float().mean().item()
print(f"{accuracy:.0%} of 100 new reviews are right")
print(f"mean entropy: {known.entropy.mean():.3f} nats for these, {unknown.entropy.mean():.3f} for unknown words")

# %% [markdown]
# ## Decide
#
# A gate asks a person about reviews that are unlike the training data. It is fitted to half of the new reviews, and tried on the others.

# %%
held_out = {"input_ids": tokens[300:350], "attention_mask": torch.ones_like(tokens[300:350])}
policy = lb.decide.fit(bnn, [(held_out, labels[300:350])], false_alarms=0.1)
alarms = {"familiar": policy(predict(tokens[350:])).alarm, "unknown words": policy(unknown).alarm}
for name, alarm in alarms.items():
    print(f"{name}: {alarm.float().mean():.0%} go to a person")

# %% [markdown]
# ## Save
#
# The file holds the whole model, so that it can be loaded alone. `lb.load` takes a network of the same architecture, adapter included.

# %%
lb.save(bnn, "reviews.safetensors")
loaded = lb.load("reviews.safetensors", network)
print(f"loaded: {loaded.posterior.random_weights:,} Bayesian weights")
