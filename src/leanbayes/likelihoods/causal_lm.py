"""Causal language models: the next token from logits."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from leanbayes.core.arguments import checked
from leanbayes.core.config import configurable
from leanbayes.errors import LeanBayesError
from leanbayes.likelihoods.categorical import Categorical
from leanbayes.likelihoods.predictive import ClassPrediction


def next_tokens(y: Tensor, ignore_index: int) -> Tensor:
    """Return the labels of the next positions, (batch, tokens). The last position has none."""
    # Labels are shifted, not logits, whose slice would be a copy.
    return F.pad(y[:, 1:], (0, 1), value=ignore_index)


@dataclass(frozen=True, repr=False)
class TokenPrediction(ClassPrediction):
    """The next token at each position of a sequence, (batch, tokens, vocabulary).

    Example:
        >>> prediction = bnn.predict({"input_ids": ids})
        >>> prediction.probs[:, -1]  # of the token that continues each sequence
    """

    def aligned(self, y: Tensor, ignore_index: int) -> Tensor:
        """Return the labels that each position predicts: those of the next position."""
        return next_tokens(y, ignore_index)


@configurable
class CausalLM(Categorical):
    """The next token from logits (batch, tokens, vocabulary): the default for causal language models of transformers.

    Labels are those that `labels=` of such a model takes: the token at each position, usually `input_ids` itself, with
    -100 at padding and at other tokens that do not count. The shift by one is done here: the outputs of a position
    predict the label of the next one. An observation is a labeled token, so the loss has the scale of the usual
    cross-entropy, and `num_data` counts the sequences of the training data.

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
