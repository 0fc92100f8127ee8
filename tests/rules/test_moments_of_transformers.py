"""Networks of transformers with the rule `moments`: one pass against plain networks and weight samples."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from moment_networks import (
    assert_compiles,
    assert_plain_without_noise,
    assert_precise_variances,
    assert_predicts,
    assert_std_of_samples,
    moments_of,
    with_noise,
)
from network_cases import Case, floats, hf_cases, seeded, tokens
from torch import Tensor

from leanbayes.core.network import output_tensor

NAMES = [
    "hf_bert", "hf_gpt2", "hf_vit", "convnext", "convnext_v2", "swin", "swin_v2", "resnet", "distilbert", "llama",
    "segformer",
]  # fmt: skip
LANGUAGE_MODELS = ("hf_gpt2", "llama")


@functools.cache
def cases() -> dict[str, Case]:
    """Return the networks of `hf_cases` and more, with small configurations."""
    import transformers as t  # takes seconds to import

    small = {"num_labels": 5}
    stages = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [2, 2], **small}
    windows = {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, **small}
    pyramid = {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3],
        "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, **small,
    }  # fmt: skip
    distil = {"vocab_size": 23, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, **small}
    llama = {
        "vocab_size": 23, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 16, "use_cache": False,
    }  # fmt: skip
    builders = {
        "convnext": lambda: t.ConvNextForImageClassification(t.ConvNextConfig(**stages)),
        "convnext_v2": lambda: t.ConvNextV2ForImageClassification(t.ConvNextV2Config(**stages)),
        "swin": lambda: t.SwinForImageClassification(t.SwinConfig(**windows)),
        "swin_v2": lambda: t.Swinv2ForImageClassification(t.Swinv2Config(**windows)),
        "resnet": lambda: t.ResNetForImageClassification(
            t.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], **small)
        ),
        "segformer": lambda: t.SegformerForSemanticSegmentation(t.SegformerConfig(**pyramid)),
        "distilbert": lambda: t.DistilBertForSequenceClassification(t.DistilBertConfig(**distil)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**llama)),
    }
    more = {}
    for name, build in builders.items():
        if name in ("distilbert", "llama"):
            more[name] = Case(name, seeded(build), lambda: {"input_ids": tokens(6, 23)()}, 5)
        else:
            more[name] = Case(name, seeded(build), lambda: {"pixel_values": floats(3, 32, 32)()}, 5)
    return {**hf_cases(), **more}


@pytest.mark.parametrize("name", NAMES)
def test_means_without_noise_equal_the_plain_network(name: str) -> None:
    assert_plain_without_noise(cases()[name].build(), cases()[name].example())


@pytest.mark.parametrize("name", NAMES)
def test_std_equals_that_of_weight_samples(name: str) -> None:
    high = 1.6 if name == "swin" else 1.45  # 1.47 for swin, 1.32 for convnext_v2, 0.94 to 1.27 for others
    assert_std_of_samples(cases()[name].build(), cases()[name].example(), 0.85, high)


@pytest.mark.parametrize("name", NAMES)
def test_prediction(name: str) -> None:
    assert_predicts(cases()[name].build(), cases()[name].example(), -1 if name in LANGUAGE_MODELS else 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_output_has_the_same_structure(name: str) -> None:
    network, inputs = cases()[name].build().eval(), cases()[name].example()
    bnn = with_noise(network)
    with bnn.using("moments"):
        output = bnn(**inputs)
    assert type(output) is type(network(**inputs))
    assert output_tensor(output).shape == network(**inputs).logits.shape


@pytest.mark.parametrize("name", ["hf_bert"])
def test_compilation(name: str) -> None:
    assert_compiles(cases()[name].build(), cases()[name].example())


@pytest.mark.parametrize("name", ["hf_bert", "hf_vit", "swin"])
def test_variances_stay_in_single_precision(name: str) -> None:
    assert_precise_variances(cases()[name].build(), cases()[name].example())


def test_padding_does_not_change_the_moments() -> None:
    case = cases()["hf_bert"]
    inputs, bnn = case.example(), with_noise(case.build())
    short = {key: value[1:2, :4] for key, value in inputs.items()}  # the example whose last two tokens are padding
    padded, alone = moments_of(bnn, inputs, "none"), moments_of(bnn, short, "none")
    assert (padded.loc[1] - alone.loc[0]).abs().max() < 1e-5
    assert ((padded.variance[1] / alone.variance[0]).log().abs() < 1e-3).all()


# -- padded language models -------------------------------------------------------------------------------------------

LENGTHS = (8, 5, 2)


def language_model(name: str, attention: str) -> Any:
    """A GPT-2, or a Llama with grouped queries, rotary positions and RMSNorm."""
    import transformers as t

    torch.manual_seed(0)
    common = {"vocab_size": 31, "initializer_range": 0.2, "attn_implementation": attention}
    if name == "gpt2":
        gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}
        return t.GPT2LMHeadModel(t.GPT2Config(**common, **gpt2))
    llama = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return t.LlamaForCausalLM(t.LlamaConfig(**common, **llama, **heads))


def padded(side: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return a padded batch, and its sequences alone."""
    generator = torch.Generator().manual_seed(1)
    alone = [torch.randint(1, 31, (1, length), generator=generator) for length in LENGTHS]
    edges = [(8 - length, 0) if side == "left" else (0, 8 - length) for length in LENGTHS]
    ids = torch.cat([F.pad(one, edge) for one, edge in zip(alone, edges, strict=True)])
    mask = torch.cat([F.pad(torch.ones_like(one), edge) for one, edge in zip(alone, edges, strict=True)])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}, alone


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_padded_sequence_has_the_moments_that_it_has_alone(name: str, attention: str, side: str) -> None:
    bnn = with_noise(language_model(name, attention))
    inputs, alone = padded(side)
    found, tokens = moments_of(bnn, inputs), inputs["attention_mask"].bool()
    for row, ids in enumerate(alone):
        expected = moments_of(bnn, {"input_ids": ids})
        torch.testing.assert_close(found.loc[row, tokens[row]], expected.loc[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.variance[row, tokens[row]], expected.variance[0], rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_std_of_padded_sequences_equals_that_of_weight_samples(name: str) -> None:
    bnn = with_noise(language_model(name, "sdpa"))
    inputs, _ = padded("left")
    with torch.no_grad():
        samples = torch.stack([bnn(**inputs).logits for _ in range(300)])
    ratios = moments_of(bnn, inputs).stddev / samples.std(0)
    for row, counted in enumerate(inputs["attention_mask"].bool()):
        assert 0.8 <= ratios[row, counted].median().item() <= 1.6  # up to 1.4; up to 2.3 if padding counts
