"""Networks of transformers, unmodified: each becomes Bayesian, trains, predicts, generates and is saved."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_every_slot_has_a_gradient
from network_cases import Case, hf_cases
from torch import Tensor

import leanbayes as lb
from leanbayes.errors import UnsupportedOperation

NAMES = ["hf_bert", "hf_gpt2", "hf_vit"]
RULES = ["sample", "flipout", "local", "mean"]


@functools.cache
def case_of(name: str) -> Case:
    return hf_cases()[name]


def bayesian(name: str, rule: str = "sample", init_std: float = 0.05, **settings: Any) -> lb.BayesianModel:
    likelihood = lb.Categorical(class_dim=-1 if name == "hf_gpt2" else 1)
    method = lb.MeanField(rule=rule, init_std=init_std, samples=3, **settings)
    return lb.bayesianize(case_of(name).build(), method, likelihood=likelihood)


def labels(name: str) -> Tensor:
    inputs = case_of(name).example()
    return inputs["input_ids"].roll(-1, 1) if name == "hf_gpt2" else torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_without_noise_it_is_the_plain_network(name: str, rule: str) -> None:
    inputs, bnn = case_of(name).example(), bayesian(name, rule, 1e-7).eval()
    with torch.no_grad():
        plain, output = case_of(name).build().eval()(**inputs), bnn(**inputs)
    assert type(output) is type(plain)
    torch.testing.assert_close(output.logits, plain.logits, rtol=1e-4, atol=1e-5)  # single precision, two blocks
    assert plain.logits.shape[-1] == case_of(name).num_outputs


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_gives_every_layer_a_gradient(name: str, rule: str) -> None:
    bnn = bayesian(name, rule).train()
    lb.elbo_loss(bnn, case_of(name).example(), labels(name), num_data=100, temperature=0.0).backward()
    assert_every_slot_has_a_gradient(bnn, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss(name: str, rule: str) -> None:
    bnn, inputs, y = bayesian(name, rule), case_of(name).example(), labels(name)
    optimizer = torch.optim.Adam(bnn.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = lb.elbo_loss(bnn, inputs, y, num_data=100_000)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize("rule", ["sample", "flipout", "local"])
@pytest.mark.parametrize("name", NAMES)
def test_predict_averages_the_probabilities_of_the_logits(name: str, rule: str) -> None:
    bnn, inputs = bayesian(name, rule, 0.5), case_of(name).example()
    prediction = bnn.predict(inputs, generator=torch.Generator().manual_seed(2), keep_outputs=True)
    assert prediction.outputs.shape == (3, *case_of(name).build()(**inputs).logits.shape)
    torch.testing.assert_close(prediction.probs, prediction.outputs.softmax(-1).mean(0))
    assert not torch.equal(prediction.outputs[0], prediction.outputs[1])
    one_by_one = bnn.predict(inputs, generator=torch.Generator().manual_seed(2), memory_budget=1)
    if rule == "sample":  # other rules have separate noise in each chunk
        torch.testing.assert_close(one_by_one.probs, prediction.probs)


@pytest.mark.parametrize("prior", [lb.Normal("fan_in", "pretrained"), lb.ScaleMixture()], ids=["normal", "mixture"])
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_is_bit_equal(name: str, prior: Any, tmp_path: Path) -> None:
    bnn, inputs = bayesian(name, prior=prior), case_of(name).example()
    bnn(**inputs)
    lb.save(bnn, tmp_path / "model.safetensors")
    loaded = lb.load(tmp_path / "model.safetensors", case_of(name).build())
    state = loaded.state_dict()
    assert state.keys() == bnn.state_dict().keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in bnn.state_dict().items())
    assert torch.equal(bnn(**inputs).logits, loaded(**inputs).logits)
    assert torch.equal(bnn.predict(inputs).probs, loaded.predict(inputs).probs)
    assert str(loaded.report) == str(bnn.report)


def test_weights_stored_transposed_have_the_fan_in_of_a_linear_layer() -> None:
    fan_in = {slot.name: slot.fan_in for slot in bayesian("hf_gpt2").layout}
    assert fan_in["transformer.h.0.mlp.c_fc.weight"] == 16
    assert fan_in["transformer.h.0.mlp.c_proj.weight"] == 64


@pytest.mark.parametrize("rule", RULES)
def test_one_sample_can_generate(rule: str) -> None:
    bnn, prompt = bayesian("hf_gpt2", rule, 0.5).eval(), torch.tensor([[5, 3, 8]])

    def generate(model: Any) -> list[int]:
        mask = torch.ones_like(prompt)
        return model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)[
            0
        ].tolist()

    with bnn.frozen(1), torch.no_grad(), bnn.drawn() as call:
        text = generate(bnn.network)
        if rule in ("sample", "mean"):  # one weight sample for all calls: decoding is greedy with the same weights
            ids = prompt
            for _ in text[3:]:
                ids = torch.cat([ids, call(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
            assert text == ids[0].tolist()
    assert text[:3] == [5, 3, 8]
    assert len(text) > 3
    if rule == "mean":
        assert text == generate(case_of("hf_gpt2").build().eval())
    assert all(getattr(bnn.network.get_submodule(s.name.rpartition(".")[0]), "weight") is None for s in bnn.layout)  # noqa: B009


# -- language models in one pass --------------------------------------------------------------------------------------


def language_model(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, **sizes)
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
        **sizes,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_causal_models_fill_and_use_their_cache_in_one_pass(name: str, attention: str) -> None:
    net = language_model(name)
    net.set_attn_implementation(attention)
    bnn = lb.bayesianize(net, lb.MeanField(init_std=1e-6), likelihood=lb.Categorical(class_dim=-1)).eval()
    words = torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(words)
    mask[2, 5:] = 0
    with torch.no_grad(), bnn.using("moments"):
        full = bnn(input_ids=words)
        masked = bnn(input_ids=words, attention_mask=mask, use_cache=True)
        start = bnn(input_ids=words[:, :6], use_cache=True)
        assert start.past_key_values.get_seq_length() == 6
        step = bnn(input_ids=words[:, 6:], past_key_values=start.past_key_values)
        plain = net(input_ids=words).logits
        plain_masked = net(input_ids=words, attention_mask=mask).logits
    assert full.past_key_values is not None  # use_cache is the default
    assert (full.logits.variance > 0).all()
    torch.testing.assert_close(full.logits.loc, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(masked.logits.loc[mask == 1], plain_masked[mask == 1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step.logits.loc, plain[:, 6:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_has_no_moments_is_refused_by_name(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    net = language_model(name)
    bnn = lb.bayesianize(net, lb.MeanField(), likelihood=lb.Categorical(class_dim=-1)).eval()
    words = torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), bnn.using("moments"):
        with pytest.raises(UnsupportedOperation, match="cross_entropy"):
            bnn(input_ids=words, labels=words)
        cache = transformers.StaticCache(config=net.config, max_cache_len=16)
        with pytest.raises(UnsupportedOperation, match="index_copy_"):
            bnn(input_ids=words, past_key_values=cache)
        network: Any = bnn.network
        with bnn.drawn(), pytest.raises(UnsupportedOperation, match="generate"):
            network.generate(words, max_new_tokens=2)


def test_layers_of_a_causal_model_are_corrected() -> None:
    bnn = lb.bayesianize(language_model("gpt2"), lb.MeanField(), likelihood=lb.Categorical(class_dim=-1)).eval()
    words = torch.randint(50, (8, 7), generator=torch.Generator().manual_seed(1))
    lb.calibrate(bnn, [{"input_ids": words}], layers=True, samples=4, generator=torch.Generator().manual_seed(0))
    assert len(bnn.moment_layers) == 8  # four per block; the embedding is tied to the head, so it has two layers
    assert bnn.predict({"input_ids": words}, rule="moments").probs.isfinite().all()


def test_mixtures_of_experts_need_the_implementation_by_batched_products() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2,
    )  # fmt: skip
    network = transformers.MixtralForCausalLM(config).eval()
    words = {"input_ids": torch.randint(50, (8, 7), generator=torch.Generator().manual_seed(1))}
    bnn = lb.bayesianize(network, lb.MeanField(init_std=0.01), select="self_attn", seed=0).eval()
    with pytest.raises(UnsupportedOperation, match="_grouped_mm"):
        bnn.predict(words, rule="moments")
    bnn.network.set_experts_implementation("batched_mm")  # type: ignore[operator]
    one = bnn.predict(words, rule="moments")
    many = bnn.predict(words, samples=200, generator=torch.Generator().manual_seed(0))
    assert (one.probs - many.probs).abs().mean() < 5e-4  # means choose the experts, so a few tokens differ more
    assert 0.4 < float(one.mutual_information.mean() / many.mutual_information.mean()) < 1.5
    with torch.no_grad(), bnn.using("mean"):
        torch.testing.assert_close(bnn(**words).logits, network(**words).logits, rtol=1e-4, atol=1e-5)
