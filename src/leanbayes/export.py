"""One pass by moments as a graph that needs neither Python nor leanbayes: an ONNX file, or a program of torch.export.

The graph takes any number of examples and has these outputs, in single precision:

    mean, variance    of the network's outputs (of logits too), as calibrated;
    probs             for classes and for yes/no outputs: what `bnn.predict(x, rule="moments").probs` gives.

For regression `variance` is the total one, of the model's doubt and of the noise of the data, as that of a prediction
is, and `epistemic_variance` is the part that the doubt has in it.
"""

import contextlib
import copy
import importlib.util
import inspect
import logging
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leanbayes import noise
from leanbayes.bayesian import BayesianModel, Draw
from leanbayes.errors import LeanBayesError
from leanbayes.expectations import gaussian_means, logit_noise, softplus
from leanbayes.files import written_whole
from leanbayes.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from leanbayes.network import call_with, map_rows, output_tensor
from leanbayes.posteriors import Posterior
from leanbayes.rules import MomentPropagation, Moments, Rule
from leanbayes.rules.moments.context import Pass

TOLERANCE = 1e-4  # of what the file computes, as a share of the largest output
_LARGEST_FILE = 2 * 2**30  # bytes that a file of ONNX can hold
_ROWS = 11  # examples to trace with; a prime, so that their number is no other size by chance
_ELEMENTS = 1 << 22  # how many numbers of an example to draw at once


@dataclass(frozen=True)
class Exported:
    """A file that was written: its size, what goes in and comes out, and how far it is off (None: not checked)."""

    path: Path
    bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    error: float | None


def export_onnx(
    bnn: BayesianModel,
    path: str | os.PathLike[str],
    example: Any,
    *,
    rule: str | Rule = "moments",
    check: bool = True,
) -> Exported:
    """Write one pass by moments to an ONNX file, atomically; the model stays as it is.

    example: a batch as `predict` takes it; its sizes are those that the file accepts, but for the number of examples.
    rule: "moments", or `rules.MomentPropagation` with settings. check: compare the file with torch, on the example and
    on another number of examples, where onnxruntime is installed; one that is off by more than 1e-4 is not written.
    """
    for module in ("onnx", "onnxscript"):
        if importlib.util.find_spec(module) is None:
            raise LeanBayesError(f"export_onnx needs {module}: pip install 'leanbayes[export]'.")
    graph, inputs = _Graph(bnn, rule, example), _tensors(example)
    size = sum(tensor.nbytes for tensor in graph.state_dict().values())
    if size > _LARGEST_FILE:
        raise LeanBayesError(
            f"The model takes {size / 2**30:.1f} GiB, and a file of ONNX holds {_LARGEST_FILE / 2**30:.0f}: "
            "use lb.export_program and torch.export.save."
        )
    names, outputs = _input_names(bnn, example), tuple(graph.run(inputs))
    with written_whole(path) as temporary:  # what is wrong with the path is told before the long part
        temporary.write_bytes(_onnx_model(_trace(graph, inputs), inputs, names, outputs))
        error = _check(graph, temporary, inputs, names) if check else None
    return Exported(Path(path), Path(path).stat().st_size, names, outputs, error)


def export_program(bnn: BayesianModel, example: Any, *, rule: str | Rule = "moments") -> torch.export.ExportedProgram:
    """Make one pass by moments a program of torch.export; `.module()` of it returns a dict of the outputs.

    example: as for `export_onnx`; the program takes its tensors as arguments, those of a dict in their order.
    """
    return _trace(_Graph(bnn, rule, example), _tensors(example))


# -- the graph --------------------------------------------------------------------------------------------------------


class _KnownMoments(Posterior):
    """Means and variances of the weights, computed once: the graph need not know how the posterior keeps them."""

    def __init__(self, posterior: Posterior) -> None:
        super().__init__(posterior.layout)
        self._random = list(posterior.random_slots())
        for name, values in (("mean", posterior.mean()), ("variance", posterior.variance())):
            for number, part in enumerate(self.layout.split(values.detach())):
                if name == "mean" or self._random[number]:
                    self.register_buffer(f"{name}_{number}", part.to("cpu", torch.float32, copy=True))

    def random_slots(self) -> Sequence[bool]:
        """Whether each parameter has any variance."""
        return self._random

    def parts(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Mean and variance of each parameter; None for points."""
        for number, random in enumerate(self._random):
            yield getattr(self, f"mean_{number}"), getattr(self, f"variance_{number}") if random else None


class _OfKnownMoments(MomentPropagation):
    def weights(self, posterior: Posterior, key: Tensor, with_kl: bool) -> tuple[Sequence[Any], Tensor | None]:
        assert isinstance(posterior, _KnownMoments)
        within = Pass(self.correlation, self.activations)
        parts = posterior.parts()
        return [mean if variance is None else Moments(mean, variance, within=within) for mean, variance in parts], None


class _Graph(nn.Module):
    """A copy of the model, on the CPU and in single precision, that returns the outputs by name."""

    def __init__(self, bnn: BayesianModel, rule: str | Rule, example: Any) -> None:
        super().__init__()
        if not isinstance(bnn, BayesianModel):
            raise LeanBayesError(f"Only what lb.bayesianize returns can be exported, not {type(bnn).__name__}.")
        if not len(bnn.layout):
            raise LeanBayesError(
                f"{type(bnn.method).__name__} has no Bayesian weights, so one pass has no variance to export: "
                "use torch.onnx.export(bnn.to_deterministic(), ...)."
            )
        inputs = _tensors(example)
        made = bnn.method.make_rule(rule)
        if not isinstance(made, MomentPropagation):
            raise LeanBayesError(f"The rule {made.name!r} gives no variance in one pass: export with 'moments'.")
        self.names = list(example) if isinstance(example, Mapping) else None
        with torch.inference_mode(False), torch.no_grad():
            model = copy.deepcopy(bnn, {id(bnn.posterior): _KnownMoments(bnn.posterior)})
        self.model = model.to("cpu").float().eval().requires_grad_(False)
        self.model.rule = _OfKnownMoments(made.correlation, made.activations, made.maps)
        self.key = noise.make_key(0)  # none is spent
        self.register_buffer("logit_noise", None)
        if isinstance(bnn.likelihood, Categorical):
            with torch.no_grad():
                classes = self._moments(*inputs).shape[bnn.likelihood.class_dim]
            self.logit_noise = logit_noise(classes).float()

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        return _outputs(self.model.likelihood, self._moments(*inputs), self.logit_noise)

    def _moments(self, *inputs: Tensor) -> Moments:
        args: Any = inputs if self.names is None else dict(zip(self.names, inputs, strict=True))
        output = output_tensor(call_with(self.model, args, _draw=Draw(self.key)))
        if not isinstance(output, Moments):
            raise LeanBayesError("The output does not depend on a Bayesian weight: there is no variance to export.")
        return output

    def run(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Compute the outputs without a graph."""
        with torch.no_grad():
            outputs: dict[str, Tensor] = self(*inputs)
        return outputs


def _outputs(likelihood: Likelihood, output: Moments, noise_of_logits: Tensor | None) -> dict[str, Tensor]:
    """What the likelihood's `predict_moments` computes, in a form that does not ask for the number of examples."""
    loc, variance = output.loc, output.variance.expand_as(output.loc)
    if isinstance(likelihood, Categorical):
        assert noise_of_logits is not None
        probs = _mean_softmax(loc, variance, noise_of_logits, likelihood.class_dim)
        return {"mean": loc, "variance": variance, "probs": probs}
    if isinstance(likelihood, Bernoulli):
        (probs,) = torch.vmap(lambda m, v: gaussian_means(lambda z: (z.sigmoid(),), m, v))(loc, variance)
        return {"mean": loc, "variance": variance, "probs": probs}
    if isinstance(likelihood, HeteroscedasticGaussian):
        (mean, raw), (epistemic, raw_variance) = loc.chunk(2, -1), variance.chunk(2, -1)
        (softplus_mean, *_) = torch.vmap(lambda m, v: gaussian_means(softplus, m, v))(raw, raw_variance)
        aleatoric = softplus_mean + likelihood.settings["min_variance"]
        return {"mean": mean, "variance": aleatoric + epistemic, "epistemic_variance": epistemic}
    if isinstance(likelihood, Gaussian):
        aleatoric = likelihood.std.square().to(variance)
        return {"mean": loc, "variance": aleatoric + variance, "epistemic_variance": variance}
    return {"mean": loc, "variance": variance}


def _mean_softmax(loc: Tensor, variance: Tensor, epsilons: Tensor, class_dim: int) -> Tensor:
    """Return E softmax(z), z ~ N(loc, variance), by the noise of `softmax_means`, some draws of a map at a time."""
    loc, std = loc.movedim(class_dim, -1), variance.clamp_min(0).sqrt().movedim(class_dim, -1)
    shape = (-1, *[1] * (loc.dim() - 1), loc.shape[-1])
    at_once = max(1, _ELEMENTS // math.prod(loc.shape[1:]))
    probs = sum((loc + std * part.view(shape)).softmax(-1).sum(0) for part in epsilons.split(at_once))
    assert isinstance(probs, Tensor)
    return (probs / len(epsilons)).movedim(-1, class_dim)


# -- tracing and checking ---------------------------------------------------------------------------------------------


def _tensors(example: Any) -> list[Tensor]:
    """Return the tensors of a batch on the CPU, real ones in single precision."""
    values = [example] if isinstance(example, Tensor) else example.values() if isinstance(example, Mapping) else example
    if not isinstance(values, Iterable) or not all(isinstance(value, Tensor) for value in values):
        raise LeanBayesError("The example must be a tensor, or a tuple or dict of tensors.")
    tensors = [t.detach().to("cpu", torch.float32 if t.is_floating_point() else t.dtype) for t in values]
    if not tensors or tensors[0].dim() == 0 or len(tensors[0]) == 0:
        raise LeanBayesError("The example holds no batch: pass inputs of at least one example.")
    return tensors


def _with_rows(inputs: Sequence[Tensor], rows: int) -> tuple[Tensor, ...]:
    """Repeat the examples of a batch until there are so many."""
    return tuple(map_rows(lambda tensor: tensor[torch.arange(rows) % len(tensor)], list(inputs), len(inputs[0])))


def _dynamic(inputs: Sequence[Tensor], batch: Any) -> dict[str, Any]:
    """Say of every input whether its first size is the number of examples, as torch.export wants it."""
    rows = len(inputs[0])
    return {"inputs": tuple({0: batch} if t.dim() and len(t) == rows else None for t in inputs)}


def _trace(graph: _Graph, inputs: Sequence[Tensor]) -> torch.export.ExportedProgram:
    graph.run(inputs)  # tells in one sentence what moments cannot go through
    dynamic = _dynamic(inputs, torch.export.Dim.DYNAMIC(min=1))
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(graph, _with_rows(inputs, _ROWS), dynamic_shapes=dynamic, strict=False)
    except Exception as error:
        raise LeanBayesError(
            f"torch.export cannot trace the network for any number of examples ({_first_line(error)}): "
            "change what depends on the data or on their number, such as len(x), which x.shape[0] can replace."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _onnx_model(
    program: torch.export.ExportedProgram, inputs: Sequence[Tensor], names: Sequence[str], outputs: Sequence[str]
) -> bytes:
    """Translate a program, without what the exporter notes down of the source."""
    einsum = torch.ops.aten.einsum.default
    try:
        with _quiet():
            if any(node.target is einsum for node in program.graph.nodes):
                # Einsum of ONNX does not stretch sizes of 1 as that of torch does.
                program = program.run_decompositions({einsum: torch.export.default_decompositions()[einsum]})
            made = torch.onnx.export(
                program, dynamo=True, input_names=names, dynamic_shapes=_dynamic(inputs, "batch"), verbose=False
            )
    except Exception as error:
        raise LeanBayesError(
            f"torch.onnx cannot translate the network ({_first_line(error)}): use lb.export_program, or change the "
            "operation that it names."
        ) from error
    assert made is not None
    graph = made.model.graph
    for node in graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
            if value.name in (*names, *outputs):  # the exporter names values after operations, such as mean
                value.name = f"{value.name}_within"
    for value, name in zip(graph.outputs, outputs, strict=True):
        value.name = name
    return made.model_proto.SerializeToString()


def _input_names(bnn: BayesianModel, example: Any) -> tuple[str, ...]:
    """Name the tensors of an input after the arguments of the network."""
    if isinstance(example, Mapping):
        return tuple(map(str, example))
    parameters = inspect.signature(bnn.network.forward).parameters.values()
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = len(example) if isinstance(example, (tuple, list)) else 1
    return tuple(known[number] if number < len(known) else f"input_{number}" for number in range(count))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what the exporter tells of its own workings."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _check(graph: _Graph, path: Path, inputs: Sequence[Tensor], names: Sequence[str]) -> float | None:
    """Run the file beside torch, and return the largest difference as a share of the largest output."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    worst = 0.0
    for rows in (len(inputs[0]), len(inputs[0]) + 1):
        batch = _with_rows(inputs, rows)
        feed = {name: tensor.contiguous().numpy() for name, tensor in zip(names, batch, strict=True)}
        try:
            session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            found = session.run(None, feed)
        except Exception as error:  # of no common kind
            raise LeanBayesError(
                f"onnxruntime cannot run the file ({_first_line(error)}): use lb.export_program, or check=False."
            ) from error
        for result, (name, wanted) in zip(found, graph.run(batch).items(), strict=True):
            off = ((torch.from_numpy(result) - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()
            if not off <= TOLERANCE:
                raise LeanBayesError(
                    f"The file's {name} is off by {off:.1e} of the largest for {rows} examples, where {TOLERANCE:.0e} "
                    "is allowed: use lb.export_program, or check=False."
                )
            worst = max(worst, off)
    return worst
