"""`lb.generate`: text from a causal language model, with the uncertainty of each token."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanbayes.core.arguments import checked
from leanbayes.core.network import evaluation_mode, output_tensor
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods import CausalLM
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.draw import Draw
from leanbayes.model.prediction import draws_of
from leanbayes.rules import Moments, Rule, moments_of


@dataclass(frozen=True)
class Generation:
    """Generated tokens, with the uncertainty of each.

    Attributes:
        sequences: Prompts and new tokens, (batch, prompt + new). Ended sequences are filled with the padding token.
        generated: Which new tokens were generated, (batch, new); those after the end of a sequence were not.
        log_probs: The log-probability of each new token, averaged over the weights, (batch, new).
        entropy: The total uncertainty of each new token in nats, (batch, new).
        mutual_information: The epistemic uncertainty of each new token in nats, (batch, new).

    Example:
        >>> found = lb.generate(bnn, prompt, max_new_tokens=20)
        >>> unsure = found.mutual_information > 0.1  # tokens that the weights disagree about
    """

    sequences: Tensor
    generated: Tensor
    log_probs: Tensor
    entropy: Tensor
    mutual_information: Tensor


@checked()
def generate(
    bnn: BayesianModel,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    rule: str | Rule = "moments",
    samples: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Generation:
    """Continue prompts token by token with the average over the weights, and say how certain each token is.

    Each token is predicted in one pass with the default rule. With `rule="sample"` it takes one pass for each of
    several samples of the weights, whose probabilities are averaged. The network keeps keys and values of earlier
    tokens in its cache, one cache per sample.

    `bnn.network.generate(...)` inside `with bnn.drawn():` is the text of one sample of the weights instead.

    Args:
        bnn: A causal language model, as transformers has them.
        input_ids: The prompts, (batch, tokens).
        max_new_tokens: The number of tokens to generate.
        attention_mask: 1 for tokens of the prompts and 0 for padding, which is on the left. Prompts of different
            lengths run one after the other.
        rule: The rule to predict with: "moments" for one pass, "sample" for samples, or "mean".
        samples: The number of samples, for a rule that has any. By default the method's.
        temperature: 0 takes the most probable token; other values draw from probabilities p^(1/temperature).
        top_k: Draw only from the most probable tokens, this many.
        eos_token_id: The token that ends a sequence. By default that of the network's settings.
        pad_token_id: The token after the end. By default that of the network's settings, or the one that ends it.
        generator: The source of the noise. By default the model's own stream.

    Returns:
        The tokens and their uncertainty.

    Raises:
        LeanBayesError: The model is not a causal language model, or an argument is out of range.

    Example:
        >>> found = lb.generate(bnn, tokenizer("The", return_tensors="pt").input_ids, max_new_tokens=20)
        >>> tokenizer.batch_decode(found.sequences), found.entropy
    """
    _check(bnn, input_ids, attention_mask, max_new_tokens, temperature, top_k)
    ends, padding = _special(bnn, eos_token_id, pad_token_id)
    lengths = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).sum(1)
    columns: list[Tensor] = [torch.full((len(input_ids), max_new_tokens), padding, device=input_ids.device)]
    columns += [torch.zeros(len(input_ids), max_new_tokens, device=input_ids.device) for _ in range(4)]
    with torch.no_grad(), bnn.using(rule), evaluation_mode(bnn):
        draws = draws_of(bnn, samples, generator)
        if temperature and generator is None:
            generator = torch.Generator(input_ids.device).manual_seed(int(bnn.next_draw().key.sum()))
        # Prompts of one length at a time: in one pass, tokens of padding would change the moments of the others.
        for length in lengths.unique().tolist():
            rows = (lengths == length).nonzero()[:, 0]
            new, caches = input_ids[rows, input_ids.shape[1] - length :], [None] * len(draws)
            running = torch.ones(len(rows), dtype=torch.bool, device=new.device)
            for place in range(max_new_tokens):
                prediction = _predict(bnn, draws, caches, new)
                probs = prediction.probs[:, -1]
                token = _choose(probs, temperature, top_k, generator).where(running, padding)
                log_prob = probs.gather(1, token[:, None]).clamp_min(torch.finfo(probs.dtype).tiny).log()[:, 0]
                found = (log_prob, prediction.entropy[:, -1], prediction.mutual_information[:, -1])
                values = (token, running, *(value.where(running, 0.0) for value in found))
                for column, value in zip(columns, values, strict=True):
                    column[rows, place] = value.to(column.dtype)
                running = running & ~torch.isin(token, ends)
                if not running.any():
                    break
                new = token[:, None]
    tokens, generated, *uncertainty = columns
    longest = max(1, int(generated.sum(1).max()))
    sequences = torch.cat([input_ids, tokens.to(input_ids.dtype)[:, :longest]], 1)
    return Generation(sequences, generated.bool()[:, :longest], *(column[:, :longest] for column in uncertainty))


def _predict(bnn: BayesianModel, draws: list[Draw], caches: list[Any], new: Tensor) -> Any:
    """Return the prediction of the next token after the new ones, and store keys and values in the caches."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(bnn.forward).parameters else {}
    accumulator = bnn.likelihood.accumulator()
    for number, draw in enumerate(draws):
        output = bnn(input_ids=new, use_cache=True, past_key_values=caches[number], _draw=draw, **last)
        caches[number] = getattr(output, "past_key_values", None)
        if caches[number] is None:
            raise LeanBayesError("The network returned no past_key_values: generate() needs one that has a cache.")
        logits = moments_of(output_tensor(output)[:, -1:])
        if isinstance(logits, Moments):
            return bnn.likelihood.predict_moments(logits)
        accumulator.update(logits)
    return accumulator.finish(len(draws), None)


def _choose(probs: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if not temperature:
        return probs.argmax(-1)
    logits = probs.log() / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1]), -1).values[:, -1:]
        logits = logits.where(logits >= least, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def _special(bnn: BayesianModel, eos: int | None, pad: int | None) -> tuple[Tensor, int]:
    """Return the tokens that end a sequence, and the one after the end."""
    settings = getattr(bnn.network, "generation_config", None) or getattr(bnn.network, "config", None)
    found = getattr(settings, "eos_token_id", None) if eos is None else eos
    ends = torch.tensor([] if found is None else found, dtype=torch.long, device=bnn.device).reshape(-1)
    pad = getattr(settings, "pad_token_id", None) if pad is None else pad
    return ends, pad if pad is not None else int(ends[0]) if len(ends) else 0


def _check(
    bnn: BayesianModel, ids: Tensor, mask: Tensor | None, new: int, temperature: float, top_k: int | None
) -> None:
    if not isinstance(bnn.likelihood, CausalLM):
        raise LeanBayesError(
            f"generate() needs a causal language model, but the likelihood is {type(bnn.likelihood).__name__}: pass "
            "likelihood=lb.CausalLM() to lb.bayesianize."
        )
    if ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
        raise LeanBayesError(f"input_ids must be tokens of shape (batch, tokens), not {tuple(ids.shape)} {ids.dtype}.")
    if mask is not None and (mask.shape != ids.shape or not mask[:, -1].all() or (mask[:, 1:] < mask[:, :-1]).any()):
        raise LeanBayesError("attention_mask must have the shape of input_ids, with padding on the left only.")
    if new < 1 or not 0 <= temperature < float("inf") or (top_k is not None and top_k < 1):
        raise LeanBayesError("max_new_tokens and top_k must be at least 1, and temperature at least 0.")
