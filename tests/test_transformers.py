"""Networks of transformers, unmodified: each becomes Bayesian, trains, predicts, generates and is saved."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_every_slot_has_a_gradient
from networks import Case, hf_cases
from torch import Tensor

import leanbayes as lb

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
def test_without_spread_it_is_the_plain_network(name: str, rule: str) -> None:
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
    lb.elbo(bnn, case_of(name).example(), labels(name), num_data=100, temperature=0.0).backward()
    assert_every_slot_has_a_gradient(bnn, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss(name: str, rule: str) -> None:
    bnn, inputs, y = bayesian(name, rule), case_of(name).example(), labels(name)
    optimiser = torch.optim.Adam(bnn.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        optimiser.zero_grad()
        loss = lb.elbo(bnn, inputs, y, num_data=100_000)
        loss.backward()
        optimiser.step()
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
    if rule == "sample":  # other rules have noise of their own in each chunk
        torch.testing.assert_close(one_by_one.probs, prediction.probs)


@pytest.mark.parametrize("prior", [lb.Normal("fan_in", "pretrained"), lb.ScaleMixture()], ids=["normal", "mixture"])
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_one_is_bit_equal(name: str, prior: Any, tmp_path: Path) -> None:
    bnn, inputs = bayesian(name, prior=prior), case_of(name).example()
    bnn(**inputs)
    bnn.save(tmp_path / "model.safetensors")
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
def test_one_draw_can_generate(rule: str) -> None:
    bnn, prompt = bayesian("hf_gpt2", rule, 0.5).eval(), torch.tensor([[5, 3, 8]])

    def generate(model: Any) -> list[int]:
        mask = torch.ones_like(prompt)
        return model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)[
            0
        ].tolist()

    with bnn.frozen(1), torch.no_grad(), bnn.drawn() as call:
        text = generate(bnn.network)
        if rule in ("sample", "mean"):  # one weight draw for every call: the text is greedy under the same draw
            ids = prompt
            for _ in text[3:]:
                ids = torch.cat([ids, call(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
            assert text == ids[0].tolist()
    assert text[:3] == [5, 3, 8]
    assert len(text) > 3
    if rule == "mean":
        assert text == generate(case_of("hf_gpt2").build().eval())
    assert all(getattr(bnn.network.get_submodule(s.name.rpartition(".")[0]), "weight") is None for s in bnn.layout)  # noqa: B009
