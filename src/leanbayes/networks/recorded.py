"""Build networks from names and options in files, which may come from a stranger.

A name in a file cannot point to a path or a host, and options are limited to those below. So a file that names a
network cannot open another file, contact the network, or allocate more memory than its weights justify.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from leanbayes.errors import LeanBayesError
from leanbayes.networks.by_name import build, library_of, own_options
from leanbayes.networks.libraries import NORMALIZE_INSIDE

# Options that say where weights come from. A run has its own weights, so they are left out when it is opened.
_WEIGHT_SOURCES = (
    *("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "cache_dir"),
    *("weights", "weights_backbone", "progress"),
)
_COUNTS = "depth depths layers num_blocks num_stages"  # each adds layers, which need memory even without weights
_LIBRARY_OPTIONS = {
    "timm": frozenset(
        f"""{_COUNTS} act_layer attn_drop_rate avg_down base_width block_reduce_first cardinality channels class_token
        dims drop_block_rate drop_path_rate drop_rate dynamic_img_pad dynamic_img_size embed_dim embed_dims fc_norm
        global_pool growth_rate head_hidden_size img_size init_values kernel_size kernel_sizes mlp_ratio mlp_ratios
        no_embed_class norm_layer num_heads output_stride patch_drop_rate patch_size pos_drop_rate pre_norm
        proj_drop_rate qk_norm qkv_bias reg_tokens stem_chs stem_type stem_width strict_img_size width window_size
        zero_init_last""".split()
    ),
    "torchvision": frozenset(
        """attention_dropout aux_logits aux_loss bn_size drop_rate dropout growth_rate groups image_size init_weights
        memory_efficient replace_stride_with_dilation stochastic_depth_prob transform_input width_mult width_per_group
        zero_init_residual""".split()
    ),
}
_WORDS = frozenset(
    """avg avgmax batchnorm batchnorm2d catavgmax celu deep deep_tiered elu fast frozenbatchnorm2d gelu gelu_tanh
    groupnorm groupnorm1 hard_mish hard_sigmoid hard_swish identity imagenet layernorm layernorm2d leaky_relu map max
    mish none prelu quick_gelu relu relu6 rmsnorm rmsnorm2d selu sigmoid silu small swish tanh token""".split()
) | {""}
_MOST_LAYERS, _MOST_NUMBER, _MOST_ITEMS = 1024, 1 << 20, 256
_MOST_VALUES = 1 << 26  # of one example
_SPARE_WEIGHTS, _WEIGHTS_PER_BYTE = 1 << 20, 256  # sparse files have a fraction of a byte per weight


def build_listed(
    name: str, input_shape: tuple[int, ...], outputs: int, options: Mapping[str, Any], *, seed: int | None = None
) -> nn.Module:
    """Build a network from the settings of a command or config file; `pretrained` is the only source of weights."""
    source = next((option for option in options if option in _WEIGHT_SOURCES and option != "pretrained"), None)
    if source is not None:
        raise LeanBayesError(
            f"The option {source!r} of {name} can only be used from Python, because it may open any file or address."
        )
    if not isinstance(options.get("pretrained", False), bool):
        raise LeanBayesError(f"pretrained={options['pretrained']!r} must be true or false.")
    _check(name, {option: value for option, value in options.items() if option != "pretrained"})
    return build(name, input_shape, outputs, seed=seed, **options)


def rebuild(name: Any, input_shape: Any, outputs: Any, options: Any, *, file_bytes: int) -> nn.Module:
    """Build the network that the record of a run describes, for a model file of `file_bytes`.

    Options that load weights are left out, because the file of the run has them. The network is first built without
    memory, and refused if it has far more weights than the file can hold.
    """
    named = isinstance(name, str) and len(name) <= 200 and isinstance(options, dict)
    shaped = isinstance(input_shape, Sequence) and len(input_shape) and all(map(_is_size, [*input_shape, outputs]))
    if not named or not shaped:
        raise LeanBayesError("The record of the run does not describe its network: use a run folder that is complete.")
    shape = tuple(input_shape)
    if len(shape) > 8 or math.prod(shape) > _MOST_VALUES:
        raise LeanBayesError(f"The run takes inputs of shape {shape[:8]}, but at most {_MOST_VALUES} values are read.")
    kept = {option: value for option, value in options.items() if option not in _WEIGHT_SOURCES}
    _check(name, kept)
    library, rest = library_of(name)
    if library == "torchvision" and rest in NORMALIZE_INSIDE and options.get("pretrained") is True:
        kept.setdefault("transform_input", True)
    with torch.device("meta"):
        network = build(name, shape, outputs, **kept)
    weights = sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers()))
    if weights > _WEIGHTS_PER_BYTE * file_bytes + _SPARE_WEIGHTS:
        raise LeanBayesError(
            f"The network {name} of the run has {weights} weights, far more than its model file of {file_bytes} bytes "
            "can hold: the record is damaged or does not belong to the file."
        )
    return build(name, shape, outputs, **kept)


def _check(name: str, options: Mapping[str, Any]) -> None:
    """Raise an error for a name or an option that could reach another file, a host, or a lot of memory."""
    library, rest = library_of(name)
    plain = rest.removeprefix("segmentation/") if library == "torchvision" else rest
    if library and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", plain):
        raise LeanBayesError(
            f"The network {name[:100]!r} must be named by its name in {library}, without a path or an address."
        )
    allowed = _LIBRARY_OPTIONS[library] if library else own_options(name)
    for option, value in options.items():
        if option not in allowed and not library:
            raise LeanBayesError(f"{name} has no option {option[:100]!r}: it has {', '.join(allowed) or 'none'}.")
        if option not in allowed:
            raise LeanBayesError(
                f"The option {option[:100]!r} of {name} can only be used from Python: use one of "
                f"{', '.join(sorted(allowed))}."
            )
        if not _is_plain(value) or not all(abs(number) <= _MOST_NUMBER for number in _numbers(value)):
            raise LeanBayesError(
                f"The option {option} of {name} must be a number of at most {_MOST_NUMBER}, a list of them, true, "
                f"false or a word such as 'relu', not {repr(value)[:100]}."
            )
        if option in _COUNTS.split() and sum(_numbers(value)) > _MOST_LAYERS:
            raise LeanBayesError(f"The option {option} of {name} must add up to at most {_MOST_LAYERS} layers.")


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (list, tuple)):
        return depth < 2 and len(value) <= _MOST_ITEMS and all(_is_plain(item, depth + 1) for item in value)
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and value in _WORDS)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, (int, float)):
        yield value


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST_VALUES
