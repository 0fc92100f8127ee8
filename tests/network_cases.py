"""Small networks of many kinds for the tests, deterministic in their weights and inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 4


@dataclass(frozen=True)
class Case:
    """A network and an input for it: a tensor, or a dict of keyword arguments for networks of transformers.

    The output is logits with `num_outputs` classes in dimension 1: (B, C), (B, C, T) or (B, C, H, W). Networks of
    transformers return an object with `.logits`, which are (B, T, C) for language models.
    """

    name: str
    build: Callable[[], nn.Module]
    example: Callable[[], Any]
    num_outputs: int


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Make a builder return the same parameters at every call, without changing the global random state."""

    def build_seeded() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build()

    return build_seeded


def floats(*shape: int) -> Callable[[], Tensor]:
    """Return a function that makes a batch of normal inputs, the same at every call."""
    return lambda: torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1))


def tokens(length: int, vocabulary: int) -> Callable[[], Tensor]:
    """Return a function that makes a batch of token sequences, the same at every call."""
    return lambda: torch.randint(vocabulary, (BATCH, length), generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(12),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 5),
    )


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.stem(x))))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Attention(nn.Module):
    """Self-attention as in timm, with one linear layer for query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        )
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, length, width))


class TimmBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, blocks: nn.Module, width: int, patches: int, outputs: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, patches + 1, width))
        self.blocks = blocks
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit_mha() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
    return VisionTransformer(nn.Sequential(*layers), width=16, patches=4, outputs=5)


def vit_timm() -> nn.Module:
    return VisionTransformer(nn.Sequential(TimmBlock(16, 2), TimmBlock(16, 2)), width=16, patches=4, outputs=5)


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 8, 3, stride=2, padding=1, output_padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 2, 3, stride=2, padding=1, output_padding=1),
    )


class LSTMClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        return self.head(hidden[:, -1])


class LanguageModel(nn.Module):
    """A causal transformer with one block, whose output layer is its embedding."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=self.mask, need_weights=False)[0]
        x = x + self.mlp(self.norm2(x))
        return self.head(x).transpose(1, 2)


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 8, 5, padding=2),
        nn.BatchNorm1d(8),
        nn.SiLU(),
        nn.ConvTranspose1d(8, 8, 2, stride=2),
        nn.AvgPool1d(2),
        nn.Conv1d(8, 8, 3, padding=2, dilation=2),
        nn.Tanh(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 6, 3, padding=1),
        nn.GroupNorm(2, 6),
        nn.LeakyReLU(0.1),
        nn.MaxPool3d(2),
        nn.Conv3d(6, 8, 2),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


CASES = {
    case.name: case
    for case in (
        Case("mlp", seeded(mlp), floats(6), 3),
        Case("cnn", seeded(cnn), floats(3, 8, 8), 5),
        Case("resnet", seeded(ResNet), floats(3, 8, 8), 5),
        Case("vit_mha", seeded(vit_mha), floats(3, 8, 8), 5),
        Case("vit_timm", seeded(vit_timm), floats(3, 8, 8), 5),
        Case("autoencoder", seeded(autoencoder), floats(3, 8, 8), 2),
        Case("lstm", seeded(LSTMClassifier), floats(3, 6), 3),
        Case("language_model", seeded(lambda: LanguageModel(11, 16, 6)), tokens(6, 11), 11),
        Case("conv1d", seeded(conv1d), floats(3, 12), 3),
        Case("conv3d", seeded(conv3d), floats(2, 4, 4, 4), 3),
    )
}

LENET = Case("lenet", seeded(lenet), floats(1, 8, 8), 3)  # only for the rule `covariance`, which supports few others


def hf_cases() -> dict[str, Case]:
    """Return networks of transformers, built from a configuration, with the default attention (sdpa)."""
    import transformers  # takes seconds to import, and few tests need it

    def bert() -> nn.Module:
        config = transformers.BertConfig(
            vocab_size=23,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        )
        return transformers.BertForSequenceClassification(config)

    def gpt2() -> nn.Module:
        config = transformers.GPT2Config(
            vocab_size=23,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        return transformers.GPT2LMHeadModel(config)

    def vit() -> nn.Module:
        config = transformers.ViTConfig(
            image_size=8,
            patch_size=4,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=5,
        )
        return transformers.ViTForImageClassification(config)

    def text() -> dict[str, Tensor]:
        mask = torch.ones(BATCH, 6, dtype=torch.long)
        mask[1, 4:] = 0  # one sequence is shorter than the others
        return {"input_ids": tokens(6, 23)(), "attention_mask": mask}

    cases = (
        Case("hf_bert", seeded(bert), text, 3),
        Case("hf_gpt2", seeded(gpt2), lambda: {"input_ids": tokens(6, 23)()}, 23),
        Case("hf_vit", seeded(vit), lambda: {"pixel_values": floats(3, 8, 8)()}, 5),
    )
    return {case.name: case for case in cases}
