"""Logits of many tokens: their loss against double precision and against transformers, and what it costs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import count_cost
from torch import Tensor

import leanbayes as lb
from leanbayes.core.counters import PeakMemory
from leanbayes.likelihoods import cross_entropy as module

transformers = pytest.importorskip("transformers")


def gpt2(vocabulary: int = 50, width: int = 32, positions: int = 64, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_embd=width, n_layer=2, n_head=2, n_positions=positions, bos_token_id=1,
        eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM", **settings,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


# -- the cross-entropy of a few rows at a time ------------------------------------------------------------------------


def logits_and_labels(dtype: torch.dtype, classes: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(13, classes, generator=generator, dtype=torch.float64)).to(dtype)
    y = torch.randint(classes, (13,), generator=generator)
    logits[3, y[3]] = logits[3].amax() + 8  # a class that is almost certain
    y[5] = -100
    return logits, y


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-9)],
)
def test_rows_in_chunks_have_the_loss_and_gradient_of_double_precision(
    dtype: torch.dtype, rtol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 30)  # four rows at a time
    logits, y = logits_and_labels(dtype)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, y, reduction="sum")
    (0.37 * expected).backward()
    logits.requires_grad_()
    total, observations = lb.Categorical().nll(logits, y)
    assert total.dtype == (
        torch.float64 if dtype == torch.float64 else torch.float32
    )  # the sum, also of half precision
    torch.testing.assert_close(
        total.double(), expected.detach(), rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0
    )
    (0.37 * total).backward()
    assert int(observations) == 12
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    # Relative to each entry, also the tiny one of the class that is almost certain.
    torch.testing.assert_close(
        logits.grad.double(), exact.grad, rtol=rtol, atol=1e-7 if dtype in (torch.float16, torch.float32) else 0
    )


def test_chunks_can_be_differentiated_twice_and_transformed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 10)
    logits, y = logits_and_labels(torch.float64)
    logits = logits[:4].clone()
    loss = lambda z: lb.Categorical().nll(z, y[:4]).total  # noqa: E731
    plain = lambda z: F.cross_entropy(z, y[:4], reduction="sum")  # noqa: E731
    expected = torch.func.jacrev(torch.func.jacrev(plain))(logits)
    torch.testing.assert_close(torch.autograd.functional.hessian(loss, logits), expected)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(loss))(logits), expected)


# -- causal language models -------------------------------------------------------------------------------------------


def batch_with_padding() -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(3, 50, (4, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:], mask[3, 2:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :3] = -100  # a prompt that is not scored
    return {"input_ids": ids, "attention_mask": mask}, labels


def test_the_loss_of_a_causal_model_is_that_of_transformers() -> None:
    network, (inputs, labels) = gpt2(), batch_with_padding()
    bnn = lb.bayesianize(network, lb.MeanField(rule="mean"))
    assert isinstance(bnn.likelihood, lb.CausalLM)  # chosen by default
    expected = network(**inputs, labels=labels)
    loss = lb.elbo_loss(bnn, inputs, labels, num_data=100, temperature=0.0)
    torch.testing.assert_close(loss, expected.loss)
    loss.backward()
    expected.loss.backward()
    posterior: Any = bnn.posterior
    embedding = bnn.layout.split(posterior.mu.grad)[0]
    torch.testing.assert_close(embedding, network.transformer.wte.weight.grad, rtol=1e-4, atol=1e-7)


def test_labels_among_the_inputs_are_not_given_to_the_network() -> None:
    inputs, labels = batch_with_padding()
    bnn = lb.bayesianize(gpt2(), lb.MeanField(), seed=0)
    with bnn.frozen(0):
        both = [lb.elbo_loss(bnn, x, labels, num_data=100) for x in (inputs, {**inputs, "labels": labels})]
    assert both[0] == both[1]
    bnn.rule = "moments"  # which could not compute the network's own loss
    assert lb.elbo_loss(bnn, {**inputs, "labels": labels}, labels, num_data=100).isfinite()


def test_fit_takes_sequences_with_labels() -> None:
    pytest.importorskip("accelerate")
    ids = (torch.arange(40)[:, None] + torch.arange(10)) % 10 + 1
    rows: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()} for row in ids]
    bnn = lb.fit(gpt2(), lb.MeanField(), rows, epochs=20, batch_size=12, lr=0.05, temperature=0.1, progress=False)
    assert isinstance(bnn.likelihood, lb.CausalLM)
    assert lb.evaluate(bnn, [({"input_ids": ids}, ids)])["nll"] < 2.5  # log 50 is 3.9


def test_the_kl_counts_once_per_labeled_token() -> None:
    network, (inputs, labels) = gpt2(), batch_with_padding()
    bnn = lb.bayesianize(network, lb.MeanField(rule="mean"))
    with torch.no_grad():
        loss = lb.elbo_loss(bnn, inputs, labels, num_data=100, temperature=1.0)
        difference = loss - network(**inputs, labels=labels).loss
    tokens = int((labels[:, 1:] != -100).sum())
    torch.testing.assert_close(difference, (bnn.kl() / (100 * tokens / 4)).detach(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("rule", ["sample", "moments"])
def test_scores_of_tokens_use_the_shifted_labels(rule: str) -> None:
    network, (inputs, labels) = gpt2(), batch_with_padding()
    bnn = lb.bayesianize(network, lb.MeanField(init_std=0.05)).eval()
    prediction = bnn.predict(inputs, samples=4, rule=rule, generator=torch.Generator().manual_seed(0))
    assert isinstance(prediction, lb.TokenPrediction)
    assert prediction.probs.shape == (4, 9, 50)
    from leanbayes.evaluation.outcomes import outcome_of

    outcome: Any = outcome_of(prediction, labels)
    places = [(row, t) for row in range(4) for t in range(8) if labels[row, t + 1] != -100]
    expected = torch.stack([prediction.probs[row, t, labels[row, t + 1]] for row, t in places])
    torch.testing.assert_close(outcome.chosen, expected)


@pytest.mark.parametrize(
    ("name", "dim"),
    [("BertForTokenClassification", -1), ("BertForMaskedLM", -1), ("BertForSequenceClassification", 1)],
)
def test_networks_of_transformers_say_what_their_outputs_are(name: str, dim: int) -> None:
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    network = getattr(transformers, name)(config)
    bnn = lb.bayesianize(network, lb.MeanField(rule="mean"))
    ids = torch.randint(20, (3, 5), generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 1]) if dim == 1 else (ids % 2 if "Token" in name else ids)
    assert bnn.class_dim == dim
    loss = lb.elbo_loss(bnn.eval(), {"input_ids": ids}, y, num_data=100, temperature=0.0)
    torch.testing.assert_close(loss, network.eval()(input_ids=ids, labels=y).loss)


def test_other_shapes_are_refused_with_a_sentence() -> None:
    bnn = lb.bayesianize(torch.nn.Linear(4, 3), lb.MeanField(), likelihood=lb.CausalLM())
    with pytest.raises(lb.LeanBayesError, match="has logits of shape"):
        lb.elbo_loss(bnn, torch.randn(2, 4), torch.zeros(2, dtype=torch.long), num_data=10)


# -- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["backprop", "ivon"])
def test_a_step_of_a_language_model_costs_little_more_than_a_plain_one(engine: Any) -> None:
    ids = torch.randint(50_257, (8, 64), generator=torch.Generator().manual_seed(0))
    network = gpt2(50_257, positions=64)
    bnn = lb.bayesianize(network, lb.MeanField(engine=engine))
    if engine == "ivon":
        lb.IVON(bnn, num_data=10_000, labels_per_example=63)

    def plain() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = network(input_ids=ids, labels=ids).loss
        loss.backward()

    def bayesian() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = lb.elbo_loss(bnn, {"input_ids": ids}, ids, num_data=10_000, check=False)
        loss.backward()

    costs = []
    for model, step in ((network, plain), (bnn, bayesian)):
        cost = count_cost(step)
        model.zero_grad()
        with PeakMemory() as memory:
            step()
        model.zero_grad()
        costs.append((cost.bytes, memory.peak_bytes))
    # 0.7 of both: the loss keeps no copies of the logits in single precision.
    assert costs[1][0] <= 0.8 * costs[0][0]
    assert costs[1][1] <= 0.8 * costs[0][1]
