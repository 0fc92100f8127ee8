"""Predictions of causal language models per token and per sequence, and generation with uncertainty."""

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import leanbayes as lb
from leanbayes.likelihoods.expectations import softmax_means

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 49, "initializer_range": 0.3}
IDS = torch.randint(3, 49, (3, 6), generator=torch.Generator().manual_seed(0))
RULES = ["moments", "sample", "mean"]


@functools.cache
def model(name: str = "gpt2", std: float = 0.02) -> lb.BayesianModel:
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, **SIZES)
        network: Any = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
            max_position_embeddings=32, **SIZES,
        )  # fmt: skip
        network = transformers.LlamaForCausalLM(config)
    return lb.bayesianize(network.eval(), lb.MeanField(init_std=std, samples=4), seed=0).eval()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# -- predictions ------------------------------------------------------------------------------------------------------


def test_uncertainty_of_tokens_and_sequences_is_that_of_the_samples() -> None:
    labels = IDS.clone()
    labels[0, 3:] = -100
    prediction = model(std=0.1).predict({"input_ids": IDS}, samples=5, generator=seeded(), keep_outputs=True)
    logits: Any = prediction.outputs
    probs = logits.double().softmax(-1)
    entropy = lambda p: -(p * p.log()).sum(-1)  # noqa: E731
    expected = entropy(probs.mean(0)) - entropy(probs).mean(0)
    torch.testing.assert_close(prediction.mutual_information.double(), expected, rtol=1e-4, atol=1e-5)
    found, log_probs = prediction.per_sequence(labels), prediction.log_probs(labels)
    for row, count in enumerate((2, 5, 5)):
        p = torch.stack([probs[:, row, t, IDS[row, t + 1]] for t in range(count)])  # (tokens, samples)
        assert int(found.tokens[row]) == count
        assert (log_probs[row, count:] == 0).all()
        torch.testing.assert_close(log_probs[row, :count].double(), p.mean(1).log(), rtol=1e-4, atol=1e-5)
        assert float(found.log_prob[row]) == pytest.approx(float(p.mean(1).log().sum()), rel=1e-4)
        assert found.joint_log_prob is not None
        assert float(found.joint_log_prob[row]) == pytest.approx(math.log(float(p.prod(0).mean())), rel=1e-4)
        assert float(found.mutual_information[row]) == pytest.approx(float(expected[row, :count].mean()), rel=1e-3)
        whole = entropy(probs.mean(0))[row, :count].mean()
        assert float(found.entropy[row]) == pytest.approx(float(whole), rel=1e-4)


def test_one_pass_finds_the_uncertain_tokens() -> None:
    ids = torch.randint(3, 49, (16, 9), generator=seeded())
    sampled = model().predict({"input_ids": ids}, samples=300, generator=seeded())
    one = model().predict({"input_ids": ids}, rule="moments")
    pair = torch.stack([sampled.mutual_information.flatten(), one.mutual_information.flatten()])
    assert torch.corrcoef(pair)[0, 1] > 0.75
    assert 0.6 < float(pair[1].mean() / pair[0].mean()) < 1.5
    assert one.per_sequence(ids).joint_log_prob is None  # which needs samples


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("variance", [0.01, 0.5])
def test_a_large_vocabulary_needs_samples_of_few_classes(scale: float, variance: float) -> None:
    generator, classes = seeded(), 3000
    loc = scale * torch.randn(2, classes, generator=generator, dtype=torch.float64)
    variances = 2 * variance * torch.rand(2, classes, generator=generator, dtype=torch.float64)
    probs, expected_entropy = softmax_means(loc, variances)
    noise = torch.randn(3000, 2, classes, generator=generator, dtype=torch.float64)
    samples = (loc + variances.sqrt() * noise).softmax(-1)
    entropies = torch.special.entr(samples).sum(-1)
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, dtype=torch.float64))
    assert 0.5 * (probs - samples.mean(0)).abs().sum(-1).max() < 0.02
    information = torch.special.entr(samples.mean(0)).sum(-1) - entropies.mean(0)
    found = torch.special.entr(probs).sum(-1) - expected_entropy
    torch.testing.assert_close(found, information, rtol=0.08, atol=1e-3)
    assert (expected_entropy - entropies.mean(0)).abs().max() < 0.03


# -- generation -------------------------------------------------------------------------------------------------------


def brute_force(bnn: Any, ids: Tensor, new: int, rule: str) -> tuple[Tensor, list[Any]]:
    """Continue prompts without a cache: predict all tokens again for each new one."""
    predictions = []
    for _ in range(new):
        predictions.append(bnn.predict({"input_ids": ids}, rule=rule, generator=seeded()))
        ids = torch.cat([ids, predictions[-1].probs[:, -1].argmax(-1, keepdim=True)], 1)
    return ids, predictions


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generated_tokens_are_those_of_a_loop_without_a_cache(name: str, rule: str) -> None:
    bnn = model(name, 0.005 if rule == "moments" else 0.02)
    found = lb.generate(bnn, IDS, max_new_tokens=5, rule=rule, generator=seeded())
    ids, predictions = brute_force(bnn, IDS, 5, rule)
    assert torch.equal(found.sequences, ids)
    assert found.generated.all()
    # One pass averages the noise of positions, and a pass with a cache has other positions: both are approximations.
    atol = 0.01 if rule == "moments" else 1e-5
    for place, one in enumerate(predictions):
        chosen = one.probs[:, -1].gather(1, ids[:, 6 + place, None])[:, 0].log()
        for values, expected in (
            (found.entropy, one.entropy[:, -1]),
            (found.mutual_information, one.mutual_information[:, -1]),
            (found.log_probs, chosen),
        ):
            torch.testing.assert_close(values[:, place], expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_generate_of_the_network_uses_one_sample_for_the_whole_text(name: str) -> None:
    bnn, texts = model(name, 0.1), []
    for seed in range(3):
        with torch.no_grad(), bnn.drawn(generator=torch.Generator().manual_seed(seed)) as call:
            network: Any = bnn.network
            text = network.generate(input_ids=IDS, max_new_tokens=5, do_sample=False, pad_token_id=0)
            ids = IDS
            for _ in range(5):  # without a cache, with the same sample
                ids = torch.cat([ids, call(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
        assert torch.equal(text.where(text != 0, ids), ids)  # 0 is behind the end of a text
        texts.append(text)
    assert not torch.equal(texts[0], texts[1]) or not torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("rule", RULES)
def test_padded_prompts_continue_as_they_do_alone(rule: str) -> None:
    mask = torch.ones_like(IDS)
    mask[1, :2] = 0
    found = lb.generate(model("llama"), IDS, attention_mask=mask, max_new_tokens=4, rule=rule, generator=seeded())
    alone = lb.generate(model("llama"), IDS[1:2, 2:], max_new_tokens=4, rule=rule, generator=seeded())
    assert torch.equal(found.sequences[1, 6:], alone.sequences[0, 4:])
    torch.testing.assert_close(found.entropy[1], alone.entropy[0], rtol=1e-4, atol=1e-5)


def test_threads_generate_what_they_would_alone() -> None:
    def run(number: int) -> Tensor:
        rule = RULES[number % 3]
        return lb.generate(model(), IDS, max_new_tokens=3, rule=rule, generator=seeded()).entropy

    alone = [run(number) for number in range(6)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(run, range(6)))
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


def test_a_sequence_ends_at_its_last_token() -> None:
    bnn = model()
    free = lb.generate(bnn, IDS, max_new_tokens=5, rule="mean")
    end = int(free.sequences[0, 7])  # the second new token of the first sequence
    found = lb.generate(bnn, IDS, max_new_tokens=5, rule="mean", eos_token_id=end, pad_token_id=0)
    for row in range(3):
        tokens = free.sequences[row, 6:].tolist()
        count = tokens.index(end) + 1 if end in tokens else 5
        width = found.generated.shape[1]
        assert found.generated[row].tolist() == [place < count for place in range(width)]
        assert found.sequences[row, 6:].tolist() == (tokens[:count] + [0] * 5)[:width]
        assert (found.entropy[row, count:] == 0).all()


def test_tokens_are_drawn_from_the_average_probabilities() -> None:
    bnn = model()
    prompt = IDS[:1].repeat(400, 1)
    state = torch.get_rng_state()
    drawn = lb.generate(bnn, prompt, max_new_tokens=1, rule="mean", temperature=2.0, generator=seeded())
    few = lb.generate(bnn, prompt, max_new_tokens=1, rule="mean", temperature=2.0, top_k=2)
    assert torch.equal(torch.get_rng_state(), state)
    probs = bnn.predict({"input_ids": IDS[:1]}, rule="mean").probs[0, -1]
    expected = probs.sqrt() / probs.sqrt().sum()
    counts = torch.bincount(drawn.sequences[:, -1], minlength=50) / 400
    assert 0.5 * (counts - expected).abs().sum() < 0.2  # 0.07 is usual
    assert {*few.sequences[:, -1].tolist()} == {*probs.topk(2).indices.tolist()}


def test_wrong_arguments_are_refused_with_a_sentence() -> None:
    bnn = model()
    with pytest.raises(lb.LeanBayesError, match="padding on the left"):
        lb.generate(bnn, IDS, attention_mask=torch.tensor([[1] * 5 + [0]] * 3), max_new_tokens=1)
    with pytest.raises(lb.LeanBayesError, match="must be tokens of shape"):
        lb.generate(bnn, IDS[0], max_new_tokens=1)
    with pytest.raises(lb.LeanBayesError, match="max_new_tokens"):
        lb.generate(bnn, IDS, max_new_tokens=0)
    plain = lb.bayesianize(torch.nn.Linear(2, 2), lb.MeanField())
    with pytest.raises(lb.LeanBayesError, match="needs a causal language model"):
        lb.generate(plain, IDS, max_new_tokens=1)
