"""`lb.compress`: write a compact file of a model whose weights share, or search for one that is small enough."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from leanbayes.core.arguments import checked
from leanbayes.core.quantization import Precision
from leanbayes.deploy.compact.compact_file import CompactFile, write_compact
from leanbayes.deploy.compact.search import Batches, Goal, parse_size, search
from leanbayes.errors import LeanBayesError
from leanbayes.model.bayesian import BayesianModel
from leanbayes.model.validation_nll import validation_nll


@checked("data", target_size="a number of bytes, or a size such as '50 KB'")
def compress(
    bnn: BayesianModel,
    path: str | os.PathLike[str],
    *,
    target_size: int | str | None = None,
    max_nll_increase: float | None = None,
    data: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    samples: int | None = None,
    seed: int = 0,
    target_scale: Sequence[float] = (),
    values: Precision = "fp16",
    rest: Precision = "fp16",
    progress: Callable[[str], None] | None = None,
) -> CompactFile:
    """Write a model as a compact file, which `lb.load` reads.

    Without `data`, the weights of the model must already be shared (`lb.WeightSharing`), and they are written as they
    are. With `data`, any model with Bayesian weights is compressed: a search shares its weights finely and coarsely,
    and scores each file by the mean negative log-likelihood (NLL) of its predictions for `data`. With `target_size` it
    keeps the best of the files that are small enough, with `max_nll_increase` the smallest of those that are good
    enough, and with neither the finest.

    Args:
        bnn: The trained model. It is not changed. If its one-pass prediction is calibrated, so is that of the file.
        path: The file to write. It is replaced at once: a crash or a full disk leaves an older file intact.
        target_size: The largest size of the file, in bytes or as a text such as "700KB" or "1.5MiB".
        max_nll_increase: By how much the NLL may increase.
        data: Validation batches (x, y) on the device of the model, which are read several times: a list, a DataLoader,
            or a function that returns the batches.
        samples: The number of Monte Carlo samples of each prediction that is scored. By default that of the method.
        seed: The seed of these samples. All files are scored with the same noise.
        target_scale: For regression: the factors from the unit of the targets to the unit of the NLL, as in
            `lb.evaluate`.
        values: The precision of codebook and outliers, "fp32", "fp16" or "int8". The search chooses its own.
        rest: The precision of biases and norms. With "int8", the variances of norms have 16 bits. A prior that is
            centered on pretrained weights is stored without its center, which is as large as the network.
        progress: Called with one line about each file that the search tries.

    Returns:
        The file: its size, the size of its parts, and what the search tried and chose.

    Raises:
        LeanBayesError: The weights share nothing and there is no `data`; `data` can be read only once; no file meets
            the goal; or the file cannot be written.

    Example:
        >>> file = lb.compress(bnn, "model.lbc", target_size="700KB", data=validation_loader)
        >>> file.bytes, file.chosen.nll - file.nll_before
        >>> bnn = lb.load("model.lbc", make_network())
    """
    goal = Goal(None if target_size is None else parse_size(target_size), max_nll_increase)
    if data is None:
        if not goal.first_is_enough:
            raise LeanBayesError(
                "target_size and max_nll_increase need data to score candidates: pass data=validation_batches."
            )
        return write_compact(bnn, path, values=values, rest=rest)
    if (values, rest) != ("fp16", "fp16"):
        raise LeanBayesError("With data, the search chooses the precision: leave out values and rest.")
    if not bnn.method.shareable_weights:
        raise LeanBayesError(
            f"The weights of {type(bnn.method).__name__} cannot be shared: compress a model such as lb.MeanField's."
        )
    batches = _readable_again(data)

    def score(model: BayesianModel) -> float:
        return validation_nll(model, batches(), samples, seed, target_scale)

    return search(bnn, Path(path), goal, batches, score, seed, progress or (lambda line: None))


def _readable_again(data: Iterable[Any] | Callable[[], Iterable[Any]]) -> Batches:
    """Return a function that reads the batches from the start."""
    if isinstance(data, Iterator):
        raise LeanBayesError(
            "data can be read only once, but the search reads it several times: pass a list, a DataLoader, or a "
            "function that returns the batches."
        )
    if isinstance(data, Iterable):
        return lambda: data
    if callable(data) and not isinstance(data, nn.Module):
        return data
    raise LeanBayesError(
        f"data must be (x, y) batches, or a function that returns them, not {type(data).__name__}: pass a list or a "
        "DataLoader."
    )
