"""Likelihoods p(y | network output): how a loss is counted, and how draws, or moments, become a prediction."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leanbayes import noise
from leanbayes.config import configurable
from leanbayes.errors import LeanBayesError
from leanbayes.expectations import (
    LOGIT_DRAWS,
    expect,
    expected_cross_entropy,
    gaussian_means,
    softmax_means,
    softplus,
)
from leanbayes.gaussian import inverse_softplus
from leanbayes.prediction import (
    Accumulator,
    BinaryPrediction,
    ClassPrediction,
    MomentAccumulator,
    Prediction,
    ProbabilityAccumulator,
    RegressionPrediction,
    binary_entropy,
)
from leanbayes.rules.moments.value import Moments

_LEAST_VARIANCE = 1e-3  # of a probability, where labels are scored by a Gaussian


class Likelihood(nn.Module):
    """Base of all likelihoods. `settings` holds the arguments that rebuild it from a file."""

    settings: dict[str, Any]

    def nll(self, output: Tensor | Moments, y: Tensor, key: Tensor | None = None) -> "NegativeLogLikelihood":
        """Negative log-likelihood of a batch, or where the outputs are `Moments` its expectation."""
        return self.expected_nll(output, y, key) if isinstance(output, Moments) else self.output_nll(output, y)

    def output_nll(self, output: Tensor, y: Tensor) -> "NegativeLogLikelihood":
        """Negative log-likelihood of a batch whose outputs are known."""
        raise NotImplementedError  # abstract

    def expected_nll(
        self, output: Moments, y: Tensor, key: Tensor | None = None, draws: int = LOGIT_DRAWS
    ) -> "NegativeLogLikelihood":
        """Return the mean of the negative log-likelihood over outputs N(loc, variance), independent of each other.

        key: of the noise where it has to be sampled, the same noise every time if there is none; draws: how many.
        """
        raise NotImplementedError  # abstract

    def gaussian_nll(self, output: Moments, y: Tensor) -> "NegativeLogLikelihood":
        """Score the labels by a Gaussian that has the moments of the prediction (VDP, equation 11)."""
        raise NotImplementedError  # abstract

    def predict_moments(self, output: Moments) -> Prediction:
        """Make a prediction of outputs N(loc, variance); no noise is spent on it."""
        raise NotImplementedError  # abstract

    def logits(self, values: Tensor) -> Tensor | None:
        """Lay out logits, or what belongs to them, as (outcomes, classes); None where the outputs are no logits."""
        return None

    def label_probs(self, y: Tensor, output: Tensor) -> Tensor:
        """Lay out labels as probabilities beside `logits`, all 0 where there is none, if outputs are logits."""
        raise NotImplementedError  # abstract

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Raise one clear sentence where the labels' shape or type does not fit the outputs; costs no waiting."""
        raise NotImplementedError  # abstract

    def check_values(self, output: Tensor, y: Tensor) -> None:
        """Raise one clear sentence for labels that cannot be; it has to look at them."""

    def accumulator(self) -> Accumulator:
        """Make what turns draws of the output into a prediction."""
        raise NotImplementedError  # abstract


class NegativeLogLikelihood(NamedTuple):
    """A sum over a batch, and over how many observations (examples, or labelled pixels)."""

    total: Tensor
    observations: Tensor | int


def _float(tensor: Tensor) -> Tensor:
    """Bring half precisions to single, and leave double."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _moments(output: Moments) -> tuple[Tensor, Tensor]:
    """Return mean and variance, in single precision at least."""
    loc = _float(output.loc)
    return loc, output.variance.to(loc.dtype).expand_as(loc)


def _single(output: Moments) -> Moments:
    """Bring the mean to single precision at least."""
    return output.like(_float(output.loc), output.independent, output.common, output.grid)


def _label_density(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """½[(y - m)²/v + log v], with a floor of v: where it vanishes, labels that are off would cost without limit."""
    variance = variance.clamp_min(_LEAST_VARIANCE)
    return 0.5 * ((y - mean).square() / variance + variance.log())


@configurable
class Categorical(Likelihood):
    """Classes from logits along `class_dim`: (batch, classes), or (batch, classes, height, width) for dense prediction.

    Labels equal to `ignore_index` do not count. An observation is a labelled position, so a dense loss has the size of
    a usual cross-entropy, and the KL is divided by the number of labelled positions in the data set.
    """

    def __init__(self, ignore_index: int = -100, class_dim: int = 1) -> None:
        super().__init__()
        self.settings = {"ignore_index": ignore_index, "class_dim": class_dim}
        self.ignore_index, self.class_dim = ignore_index, class_dim

    def output_nll(self, output: Tensor, y: Tensor) -> NegativeLogLikelihood:
        """Cross-entropy, summed over the labelled positions."""
        logits = _float(output).movedim(self.class_dim, 1)
        total = F.cross_entropy(logits, y, ignore_index=self.ignore_index, reduction="sum")
        return NegativeLogLikelihood(total, self._observations(y))

    def _observations(self, y: Tensor) -> Tensor:
        labelled = (y != self.ignore_index).sum()
        # A batch without labels has no loss, and its KL counts as if all were labelled.
        return torch.where(labelled > 0, labelled, y.numel())

    def expected_nll(
        self, output: Moments, y: Tensor, key: Tensor | None = None, draws: int = LOGIT_DRAWS
    ) -> NegativeLogLikelihood:
        """Cross-entropy by draws of the logits."""
        loc, variance = (part.movedim(self.class_dim, -1) for part in _moments(output))
        key = noise.make_key(0, device=loc.device) if key is None else key
        labelled = y != self.ignore_index
        total = expected_cross_entropy(loc, variance, y.where(labelled, 0), labelled, key, draws)
        return NegativeLogLikelihood(total, self._observations(y))

    def gaussian_nll(self, output: Moments, y: Tensor) -> NegativeLogLikelihood:
        """Score one-hot labels by the mean and variance of the probabilities."""
        probs = _single(output).softmax(self.class_dim)
        mean, variance = (part.movedim(self.class_dim, -1) for part in _moments(probs))
        labelled = y != self.ignore_index
        target = torch.zeros_like(mean).scatter(-1, y.where(labelled, 0).unsqueeze(-1), 1.0)
        total = (_label_density(mean, variance, target).sum(-1) * labelled).sum()
        return NegativeLogLikelihood(total, self._observations(y))

    def predict_moments(self, output: Moments) -> ClassPrediction:
        """Average the softmax over fixed draws of the logits."""
        loc, variance = (part.movedim(self.class_dim, -1) for part in _moments(output))
        probs, entropy = softmax_means(loc, variance)
        return ClassPrediction(1, None, probs.movedim(-1, self.class_dim), entropy, self.class_dim)

    def logits(self, values: Tensor) -> Tensor:
        """Bring the classes to the end."""
        values = values.movedim(self.class_dim, -1)
        return values.reshape(-1, values.shape[-1])

    def label_probs(self, y: Tensor, output: Tensor) -> Tensor:
        """Give 1 to the label's class."""
        labelled = (y != self.ignore_index).flatten()
        probs = F.one_hot(y.flatten().where(labelled, 0), output.shape[self.class_dim])
        return (probs * labelled[:, None]).to(output.dtype)

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Check that there is one integer a position."""
        positions = output.movedim(self.class_dim, -1).shape[:-1]
        if y.dtype != torch.long or y.shape != positions:
            raise LeanBayesError(
                f"Labels must be int64 class indices of shape {tuple(positions)}, but are {y.dtype} of shape "
                f"{tuple(y.shape)}: convert them, or set class_dim."
            )

    def check_values(self, output: Tensor, y: Tensor) -> None:
        """Check that labels lie in the range of the classes."""
        classes = output.shape[self.class_dim]
        counted = y[y != self.ignore_index]
        if counted.numel() and (counted.min() < 0 or counted.max() >= classes):
            wrong = counted[(counted < 0) | (counted >= classes)][0].item()
            raise LeanBayesError(
                f"The label {wrong} is out of range for {classes} classes (0 to {classes - 1}): mend the labels, "
                "set ignore_index, or widen the network's output."
            )

    def accumulator(self) -> Accumulator:
        """Average the softmax."""
        dim = self.class_dim

        def kind(**fields: Any) -> Prediction:
            return ClassPrediction(class_dim=dim, **fields)

        return ProbabilityAccumulator(
            lambda output: _float(output).softmax(dim), lambda probs: torch.special.entr(probs).sum(dim), kind
        )


@configurable
class Bernoulli(Likelihood):
    """Independent yes/no outputs from logits; an example with several is one observation."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {}

    def output_nll(self, output: Tensor, y: Tensor) -> NegativeLogLikelihood:
        """Binary cross-entropy, summed over the outputs."""
        logits = _float(output)
        total = F.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="sum")
        return NegativeLogLikelihood(total, len(y))

    def expected_nll(
        self, output: Moments, y: Tensor, key: Tensor | None = None, draws: int = LOGIT_DRAWS
    ) -> NegativeLogLikelihood:
        """Binary cross-entropy E softplus(z) - y·m, by quadrature."""
        (loc, variance), y = _moments(output), y.to(_float(output.loc).dtype)
        yes = (y > 0.5).to(y.dtype)
        # softplus(z) = softplus(-z) + z keeps the small loss of a sure and right yes from drowning in a large m.
        terms = expect(softplus, (1 - 2 * yes) * loc, variance) + (yes - y) * loc
        return NegativeLogLikelihood(terms.sum(), len(y))

    def gaussian_nll(self, output: Moments, y: Tensor) -> NegativeLogLikelihood:
        """Score the labels by the mean and variance of the probabilities."""
        mean, variance = _moments(_single(output).sigmoid())
        return NegativeLogLikelihood(_label_density(mean, variance, y.to(mean.dtype)).sum(), len(y))

    def predict_moments(self, output: Moments) -> BinaryPrediction:
        """Average the sigmoid by quadrature."""

        def functions(logits: Tensor) -> tuple[Tensor, Tensor]:
            probs = logits.sigmoid()
            return probs, binary_entropy(probs)

        probs, entropy = gaussian_means(functions, *_moments(output))
        return BinaryPrediction(1, None, probs, entropy)

    def logits(self, values: Tensor) -> Tensor:
        """Set a logit of 0, which is no, beside each: their softmax is the sigmoid."""
        return torch.stack([values.flatten(), torch.zeros_like(values).flatten()], -1)

    def label_probs(self, y: Tensor, output: Tensor) -> Tensor:
        """Yes and no."""
        yes = y.to(output.dtype).flatten()
        return torch.stack([yes, 1 - yes], -1)

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Check that there is one target for each output."""
        _check_shape(output, y)

    def check_values(self, output: Tensor, y: Tensor) -> None:
        """Check that targets lie in [0, 1]."""
        if y.numel() and not (y.min() >= 0 and y.max() <= 1):
            raise LeanBayesError("Bernoulli targets must lie in [0, 1]: mend the labels.")

    def accumulator(self) -> Accumulator:
        """Average the sigmoid."""
        return ProbabilityAccumulator(lambda output: _float(output).sigmoid(), binary_entropy, BinaryPrediction)


def _check_shape(mean: Tensor, y: Tensor) -> None:
    if mean.shape != y.shape:
        raise LeanBayesError(
            f"Targets of shape {tuple(y.shape)} do not fit outputs of shape {tuple(mean.shape)}: reshape one of them "
            "(a missing last dimension is the usual cause)."
        )


def _gaussian_nll(mean: Tensor, variance: Tensor, y: Tensor) -> NegativeLogLikelihood:
    terms = (y - mean).square() / variance + (variance.log() + math.log(2 * math.pi))
    return NegativeLogLikelihood(0.5 * terms.sum(), len(y))


@configurable
class Gaussian(Likelihood):
    """y ~ N(output, std²), with a fixed noise or (`learned=True`) one that is trained with the weights."""

    def __init__(self, std: float = 1.0, learned: bool = False) -> None:
        super().__init__()
        if not (math.isfinite(std) and std > 0):
            raise LeanBayesError(f"std={std} must be a positive number.")
        self.settings = {"std": std, "learned": learned}
        self.rho = nn.Parameter(inverse_softplus(torch.tensor(float(std)))) if learned else None

    @property
    def std(self) -> Tensor:
        """The noise of the data."""
        if self.rho is None:
            return torch.tensor(self.settings["std"], dtype=torch.float64)
        return F.softplus(_float(self.rho))

    def output_nll(self, output: Tensor, y: Tensor) -> NegativeLogLikelihood:
        """Gaussian log-density, summed over the outputs of an example."""
        return _gaussian_nll(_float(output), self.std.square(), y)

    def expected_nll(
        self, output: Moments, y: Tensor, key: Tensor | None = None, draws: int = LOGIT_DRAWS
    ) -> NegativeLogLikelihood:
        """½[((y - m)² + v)/s² + log s² + log 2π]."""
        loc, variance = _moments(output)
        total, observations = self.output_nll(loc, y)
        return NegativeLogLikelihood(total + 0.5 * (variance / self.std.square()).sum(), observations)

    def gaussian_nll(self, output: Moments, y: Tensor) -> NegativeLogLikelihood:
        """Score the targets with the variance of the output and of the noise."""
        loc, variance = _moments(output)
        return _gaussian_nll(loc, variance + self.std.square(), y)

    def predict_moments(self, output: Moments) -> RegressionPrediction:
        """The variance of the output is epistemic."""
        loc, variance = _moments(output)
        return RegressionPrediction(1, None, loc, self.std.square().to(loc).expand_as(loc).clone(), variance)

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Check that there is one target for each output."""
        _check_shape(output, y)

    def accumulator(self) -> Accumulator:
        """Average the outputs; their spread is epistemic."""
        return MomentAccumulator(lambda output: (_float(output), self.std.square().to(_float(output))))


@configurable
class HeteroscedasticGaussian(Likelihood):
    """y ~ N(m(x), v(x)): the network's last dimension holds the means, then as many raw variances (softplus)."""

    def __init__(self, min_variance: float = 1e-6) -> None:
        super().__init__()
        if not 0 < min_variance < math.inf:
            raise LeanBayesError(f"min_variance={min_variance} must be a positive number.")
        self.settings = {"min_variance": min_variance}

    def split(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Cut an output into mean and variance."""
        mean, raw = self._halves(_float(output))
        return mean, F.softplus(raw) + self.settings["min_variance"]

    def _halves(self, output: Tensor) -> tuple[Tensor, ...]:
        if output.shape[-1] % 2:
            raise LeanBayesError(
                f"HeteroscedasticGaussian needs a mean and a raw variance for each target, but the network's last "
                f"dimension is {output.shape[-1]}, which is odd: double its outputs."
            )
        return output.chunk(2, dim=-1)

    def output_nll(self, output: Tensor, y: Tensor) -> NegativeLogLikelihood:
        """Gaussian log-density with the network's own variance."""
        return _gaussian_nll(*self.split(output), y)

    def expected_nll(
        self, output: Moments, y: Tensor, key: Tensor | None = None, draws: int = LOGIT_DRAWS
    ) -> NegativeLogLikelihood:
        """½[((y - m)² + v)·E[1/s²] + E[log s²] + log 2π], where s² is taken from a Gaussian output of its own."""
        (mean, raw), (variance, raw_variance) = map(self._halves, _moments(output))
        precision = expect(self._precision, raw, raw_variance)
        log_noise = expect(self._log_noise, raw, raw_variance)
        terms = ((y - mean).square() + variance) * precision + log_noise + math.log(2 * math.pi)
        return NegativeLogLikelihood(0.5 * terms.sum(), len(y))

    def _precision(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """1/s² and its derivatives."""
        value, first, second = self._noise(raw)
        return 1 / value, -first / value, (2 * first.square() - second) / value

    def _log_noise(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log s² and its derivatives."""
        value, first, second = self._noise(raw)
        return value.log(), first, second - first.square()

    def _noise(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """s² = softplus(raw) + min_variance, and its two derivatives over itself."""
        value, first, second = softplus(raw)
        value = value + self.settings["min_variance"]
        return value, first / value, second / value

    def gaussian_nll(self, output: Moments, y: Tensor) -> NegativeLogLikelihood:
        """Score the targets with the variance of the mean and the expected one of the noise."""
        (mean, raw), (variance, raw_variance) = map(self._halves, _moments(output))
        return _gaussian_nll(mean, variance + self._mean_noise(raw, raw_variance), y)

    def _mean_noise(self, raw: Tensor, variance: Tensor) -> Tensor:
        return expect(softplus, raw, variance) + self.settings["min_variance"]

    def predict_moments(self, output: Moments) -> RegressionPrediction:
        """The variance of the mean is epistemic, and the expected noise aleatoric."""
        (mean, raw), (variance, raw_variance) = map(self._halves, _moments(output))
        return RegressionPrediction(1, None, mean, self._mean_noise(raw, raw_variance), variance)

    def check_shape(self, output: Tensor, y: Tensor) -> None:
        """Check that there is one target for each output."""
        _check_shape(self.split(output)[0], y)

    def accumulator(self) -> Accumulator:
        """Average means and variances."""
        return MomentAccumulator(self.split)
