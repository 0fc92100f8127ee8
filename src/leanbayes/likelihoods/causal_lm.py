"""Causal language models: the next token from logits."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.core.arguments import checked
from leanbayes.core.config import configurable
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods.base import as_float
from leanbayes.likelihoods.categorical import Categorical
from leanbayes.likelihoods.predictive import ClassPrediction


def next_tokens(y: Tensor, ignore_index: int) -> Tensor:
    """Return the labels of the next positions, (batch, tokens). The last position has none."""
    # Labels are shifted, not logits, whose slice would be a copy.
    return F.pad(y[:, 1:], (0, 1), value=ignore_index)


@dataclass(frozen=True)
class SequencePrediction:
    """What a prediction says about whole sequences, each a value per sequence.

    Attributes:
        tokens: The number of labels.
        log_prob: The sum of the log-probabilities of the labels, each averaged over the weights.
        joint_log_prob: The log-probability of all labels together: the probability of the whole sequence, averaged over
            samples of the weights. It is the larger one if the weights that predict the first tokens well predict the
            others well, too. None unless several samples were predicted with `keep_outputs=True`.
        entropy: The total uncertainty in nats, the mean over the labeled positions.
        mutual_information: The epistemic uncertainty in nats, the mean over the labeled positions.

    Example:
        >>> found = bnn.predict({"input_ids": ids}).per_sequence(ids)
        >>> perplexity = (-found.log_prob / found.tokens).exp()
    """

    tokens: Tensor
    log_prob: Tensor
    joint_log_prob: Tensor | None
    entropy: Tensor
    mutual_information: Tensor


@dataclass(frozen=True, repr=False)
class TokenPrediction(ClassPrediction):
    """The next token at each position of a sequence, (batch, tokens, vocabulary).

    `entropy` and `mutual_information` are those of the next token, (batch, tokens).

    Example:
        >>> prediction = bnn.predict({"input_ids": ids})
        >>> prediction.probs[:, -1]  # of the token that continues each sequence
        >>> prediction.log_probs(ids).sum(1)  # of the sequences, given their first tokens
    """

    def log_probs(self, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """Return the log-probability of the next label at each position, (batch, tokens); 0 where there is none.

        Args:
            labels: The labels as `lb.CausalLM` takes them, usually `input_ids` itself.
            ignore_index: Labels with this value do not count.

        Example:
            >>> nll = -bnn.predict({"input_ids": ids}).log_probs(ids)
        """
        y = self.aligned(labels, ignore_index)
        counted = y != ignore_index
        probs = self.probs.gather(-1, y.where(counted, 0)[..., None])[..., 0]
        return probs.clamp_min(torch.finfo(probs.dtype).tiny).log().where(counted, 0.0)

    def per_sequence(self, labels: Tensor, ignore_index: int = -100) -> SequencePrediction:
        """Return probability and uncertainty of each sequence.

        Args:
            labels: The labels as `lb.CausalLM` takes them, usually `input_ids` itself.
            ignore_index: Labels with this value do not count.

        Example:
            >>> strange = bnn.predict({"input_ids": ids}).per_sequence(ids).mutual_information > 0.1
        """
        y = self.aligned(labels, ignore_index)
        counted = y != ignore_index
        tokens = counted.sum(1)
        joint = None
        if self.outputs is not None and self.samples > 1:
            index = y.where(counted, 0)[..., None]
            each = [as_float(one).log_softmax(-1).gather(-1, index)[..., 0].where(counted, 0) for one in self.outputs]
            joint = torch.stack([one.sum(1) for one in each]).logsumexp(0) - math.log(self.samples)

        def mean(values: Tensor) -> Tensor:
            return values.where(counted, 0.0).sum(1) / tokens.clamp_min(1)

        log_prob = self.log_probs(labels, ignore_index).sum(1)
        return SequencePrediction(tokens, log_prob, joint, mean(self.entropy), mean(self.mutual_information))

    def aligned(self, y: Tensor, ignore_index: int) -> Tensor:
        """Return the labels that each position predicts: those of the next position."""
        return next_tokens(y, ignore_index)


@configurable
class CausalLM(Categorical):
    """The next token from logits (batch, tokens, vocabulary): the default for causal language models of transformers.

    Labels are those that `labels=` of such a model takes: the token at each position, usually `input_ids` itself, with
    -100 at padding and at other tokens that do not count. The shift by one is done here: the outputs of a position
    predict the label of the next one. An observation is a labeled token, so the loss has the scale of the usual
    cross-entropy. `num_data` counts the sequences of the training data, and `labels_per_example` of `lb.IVON` their
    labeled tokens.

    Args:
        ignore_index: Labels with this value do not count.

    Example:
        >>> bnn = lb.bayesianize(AutoModelForCausalLM.from_pretrained(name), lb.MeanField())
        >>> inputs = {"input_ids": ids, "attention_mask": mask}
        >>> labels = ids.masked_fill(mask == 0, -100)
        >>> loss = lb.elbo_loss(bnn, inputs, labels, num_data=len(train_set))
        >>> bnn.predict(inputs).mutual_information  # (batch, tokens): of the token after each position
    """

    prediction_type = TokenPrediction

    @checked()
    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__(ignore_index, class_dim=-1)
        self.settings: dict[str, Any] = {"ignore_index": ignore_index}

    def aligned(self, y: Tensor) -> Tensor:
        """Return the labels of the next positions. The last position has none."""
        return next_tokens(y, self.ignore_index)

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Check that there is one integer per token."""
        if output.dim() != 3:
            raise LeanBayesError(
                f"A causal language model has logits of shape (batch, tokens, vocabulary), not {tuple(output.shape)}: "
                "pass another likelihood to lb.bayesianize, such as lb.Categorical()."
            )
        super().check_shape(output, y)
