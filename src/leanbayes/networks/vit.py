"""Vision transformers (Dosovitskiy et al. 2021), with the tiny and small sizes of Touvron et al. (2021)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes.core.arguments import checked
from leanbayes.errors import LeanBayesError
from leanbayes.networks.checks import check_counts, check_image
from leanbayes.networks.docstrings import arguments_of
from leanbayes.networks.layers import NarrowLinear

_IMAGENET = (3, 224, 224)


class SelfAttention(nn.Module):
    """Self-attention with one linear layer for query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = NarrowLinear(width, 3 * width)
        self.out = NarrowLinear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Self-attention and a perceptron of four times the width, with pre-normalization and residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(NarrowLinear(width, 4 * width), nn.GELU(), NarrowLinear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """A vision transformer with learned positions and a linear layer on the class token.

    See Dosovitskiy et al., "An image is worth 16x16 words: Transformers for image recognition at scale", 2021.

    Args:
        num_classes: number of classes.
        input_shape: (channels, height, width) of an image.
        patch: side of a patch in pixels. None means 16 if sides have 128 pixels or more, else an eighth of the side.
        width: length of a token.
        depth: number of blocks.
        heads: number of attention heads.

    Raises:
        LeanBayesError: The patch does not divide the image, `heads` does not divide `width`, or an argument is invalid.

    Example:
        >>> import torch
        >>> from leanbayes.networks import VisionTransformer
        >>> VisionTransformer(10, (3, 32, 32), width=24, depth=2, heads=3)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    @checked()
    def __init__(
        self,
        num_classes: int = 1000,
        input_shape: tuple[int, ...] = _IMAGENET,
        *,
        patch: int | None = None,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
    ) -> None:
        super().__init__()
        channels, *self.sides = check_image(input_shape)
        check_counts(num_classes=num_classes, width=width, depth=depth, heads=heads)
        if width % heads:
            raise LeanBayesError(f"width={width} must be a multiple of heads={heads}.")
        patch = _patch(self.sides) if patch is None else patch
        _check_patch(patch, self.sides)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 1 + self.sides[0] // patch * (self.sides[1] // patch), width))
        self.reset_parameters()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = NarrowLinear(width, num_classes)

    def reset_parameters(self) -> None:
        """Draw a new class token and new positions."""
        nn.init.normal_(self.class_token, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, *input_shape) to (batch, num_classes)."""
        if list(x.shape[-2:]) != self.sides:
            raise LeanBayesError(
                f"This transformer takes images of {self.sides[0]}×{self.sides[1]} pixels, not "
                f"{x.shape[-2]}×{x.shape[-1]}: resize them, or build it for their shape."
            )
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(tokens.shape[0], -1, -1), tokens], dim=1) + self.positions
        return self.head(self.norm(self.blocks(tokens))[:, 0])


def _patch(sides: list[int]) -> int:
    side = min(sides)
    return 16 if side >= 128 else max(1, (side + 4) // 8)


def _check_patch(patch: int, sides: list[int]) -> None:
    check_counts(patch=patch)
    if any(side % patch for side in sides):
        fitting = [str(size) for size in range(1, min(sides) + 1) if not any(side % size for side in sides)]
        raise LeanBayesError(
            f"patch={patch} does not divide images of {sides[0]}×{sides[1]} pixels: use one of {', '.join(fitting)}."
        )


@arguments_of(VisionTransformer)
def vit_tiny(
    num_classes: int = 1000, input_shape: tuple[int, ...] = _IMAGENET, *, patch: int | None = None, depth: int = 12
) -> VisionTransformer:
    """Build ViT-Ti, a vision transformer of width 192 with 3 heads.

    It has 5.7 million parameters for ImageNet. See Touvron et al. (2021).

    Example:
        >>> import torch
        >>> from leanbayes.networks import vit_tiny
        >>> vit_tiny(10, (3, 32, 32), depth=1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return VisionTransformer(num_classes, input_shape, patch=patch, width=192, depth=depth, heads=3)


@arguments_of(VisionTransformer)
def vit_small(
    num_classes: int = 1000, input_shape: tuple[int, ...] = _IMAGENET, *, patch: int | None = None, depth: int = 12
) -> VisionTransformer:
    """Build ViT-S, a vision transformer of width 384 with 6 heads.

    It has 22 million parameters for ImageNet. See Touvron et al. (2021).

    Example:
        >>> import torch
        >>> from leanbayes.networks import vit_small
        >>> vit_small(10, (3, 32, 32), depth=1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return VisionTransformer(num_classes, input_shape, patch=patch, width=384, depth=depth, heads=6)


@arguments_of(VisionTransformer)
def vit_base(
    num_classes: int = 1000, input_shape: tuple[int, ...] = _IMAGENET, *, patch: int | None = None, depth: int = 12
) -> VisionTransformer:
    """Build ViT-B, a vision transformer of width 768 with 12 heads.

    It has 86.6 million parameters for ImageNet. See Dosovitskiy et al. (2021).

    Example:
        >>> import torch
        >>> from leanbayes.networks import vit_base
        >>> vit_base(10, (3, 32, 32), depth=1)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return VisionTransformer(num_classes, input_shape, patch=patch, width=768, depth=depth, heads=12)
