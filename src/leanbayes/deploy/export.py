"""Export one pass by `moments` or `adjoint` as an ONNX file or a torch.export program, which need no leanbayes.

The graph takes any number of examples. Its outputs, in single precision, are

    mean, variance       of the network's outputs (of the logits for classes), calibrated if the model is;
    probs                for classes and yes/no outputs: equal to those of `bnn.predict(x, rule=...)`;
    expected_entropy     for them: the aleatoric uncertainty in nats, as that of the prediction;
    epistemic_variance   for regression: the part of `variance` that comes from the model, not from noise in the data;
    margin_std           for classes by `adjoint`: the std of the difference of the two largest logits.

The metadata of an ONNX file (`metadata_props`, which every runtime can read) say what it needs and what its outputs
mean: `units`, the `policy` with its thresholds, and what the caller adds, such as `classes` and `normalize`.
"""

import contextlib
import importlib.util
import inspect
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leanbayes.core import config
from leanbayes.core.arguments import checked
from leanbayes.core.files import written_whole
from leanbayes.core.version import __version__
from leanbayes.deploy.one_pass_graph import ROWS, TOLERANCE, OnePassGraph, example_tensors, first_line, with_rows
from leanbayes.errors import LeanBayesError, RuleMismatchWarning, UnsupportedOperation, missing_package
from leanbayes.model.bayesian import BayesianModel
from leanbayes.rules import Rule

_LARGEST_FILE = 2 * 2**30  # bytes that an ONNX file can hold


@dataclass(frozen=True)
class Exported:
    """An ONNX file that `lb.export_onnx` wrote.

    Attributes:
        path: The file.
        bytes: Its size.
        inputs: The names of its inputs, which are the arguments of the network.
        outputs: The names of its outputs.
        error: The largest difference from torch, relative to the largest output. None if it was not checked.

    Example:
        >>> file = lb.export_onnx(bnn, "model.onnx", x)
        >>> file.outputs
        ('mean', 'variance', 'probs', 'expected_entropy')
    """

    path: Path
    bytes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    error: float | None


@checked("bnn")
def export_onnx(
    bnn: BayesianModel,
    path: str | os.PathLike[str],
    example: Any,
    *,
    rule: str | Rule = "moments",
    metadata: Mapping[str, Any] | None = None,
    check: bool = True,
) -> Exported:
    """Write one pass to an ONNX file, which needs neither Python nor leanbayes.

    The outputs of the file are `mean` and `variance`, with `probs` and `expected_entropy` for classes and yes/no
    outputs, `margin_std` for classes by "adjoint", and `epistemic_variance` for regression. Its metadata have the
    `units` of the outputs, and the `policy` of the model, if `lb.decide.fit` has fitted one to predictions with this
    rule.

    Args:
        bnn: The trained model. It is not changed.
        path: The file to write. It is replaced at once: a crash or a full disk leaves an older file intact.
        example: A batch, as for `predict`. The file takes any number of examples; all other sizes are fixed.
        rule: "moments" or "adjoint", also with settings: "adjoint:mean=moments,margins=3",
            `leanbayes.rules.MomentPropagation` or `leanbayes.rules.Adjoint`. The backward passes of "adjoint" are a
            part of the file. It needs memory for the gradient of the largest layer, separately for each example.
        metadata: More entries of the file's metadata: strings, or values that are stored as JSON. By convention
            "classes" has the names of the classes, and "normalize" the mean and std of inputs.
        check: Whether to compare the file with torch, on the example and on another number of examples, if onnxruntime
            is installed. A file that differs by more than 1e-4 of the largest output is not written.

    Returns:
        The file: its size, its inputs and outputs, and its difference from torch.

    Raises:
        LeanBayesError: A package is missing, the model has no Bayesian weights, the network cannot be traced or
            translated, the file differs from torch, or it cannot be written.
        UnsupportedOperation: The rule does not know an operation, or ONNX has none for its gradient.

    Warns:
        RuleMismatchWarning: The policy was fitted to other predictions, so the file does not have it.

    Example:
        >>> lb.export_onnx(bnn, "model.onnx", x, metadata={"classes": ["cat", "dog"]})
        >>> session = onnxruntime.InferenceSession("model.onnx")
        >>> mean, variance, probs, expected_entropy = session.run(None, {"input": x.numpy()})
        >>> json.loads(session.get_modelmeta().custom_metadata_map["classes"])
        ['cat', 'dog']
    """
    for module in ("onnx", "onnxscript"):
        if importlib.util.find_spec(module) is None:
            raise missing_package(f"export_onnx needs {module}", "export")
    graph, inputs = OnePassGraph(bnn, rule, example), example_tensors(example)
    size = sum(tensor.nbytes for tensor in graph.state_dict().values())
    if size > _LARGEST_FILE:
        raise LeanBayesError(
            f"The model takes {size / 2**30:.1f} GiB, and an ONNX file holds at most {_LARGEST_FILE / 2**30:.0f} GiB: "
            "use lb.export_program and torch.export.save."
        )
    names, outputs = _input_names(bnn, example), tuple(graph.run(inputs))
    entries = _metadata(bnn, bnn.method.make_rule(rule), outputs, metadata or {})
    with written_whole(path) as temporary:  # a bad path is reported before the long part
        temporary.write_bytes(_onnx_model(_trace(graph, inputs), inputs, names, outputs, entries))
        error = _check(graph, temporary, inputs, names) if check else None
    return Exported(Path(path), Path(path).stat().st_size, names, outputs, error)


@checked("bnn")
def export_program(bnn: BayesianModel, example: Any, *, rule: str | Rule = "moments") -> torch.export.ExportedProgram:
    """Return one pass as a torch.export program.

    Args:
        bnn: The trained model. It is not changed.
        example: A batch, as for `predict`. The program takes any number of examples; all other sizes are fixed.
        rule: "moments" or "adjoint", also with settings, as for `lb.export_onnx`.

    Returns:
        The program. Its `.module()` takes the tensors of the example as arguments, those of a dict in their order, and
        returns a dict of the outputs, which are those of `lb.export_onnx`.

    Raises:
        LeanBayesError: The model has no Bayesian weights, or the network cannot be traced.

    Example:
        >>> program = lb.export_program(bnn, x)
        >>> torch.export.save(program, "model.pt2")
        >>> program.module()(x)["variance"]
    """
    return _trace(OnePassGraph(bnn, rule, example), example_tensors(example))


def _metadata(bnn: BayesianModel, made: Rule, outputs: Sequence[str], given: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a file: what leanbayes knows, and what the caller adds."""
    classes = "probs" in outputs
    units = {"mean": "logits", "variance": "logits²"} if classes else {"mean": "target", "variance": "target²"}
    units |= {"probs": "probability", "expected_entropy": "nats", "epistemic_variance": "target²"}
    units["margin_std"] = "logits"
    known: dict[str, Any] = {
        "leanbayes": __version__,
        "method": type(bnn.method).__name__,
        "likelihood": type(bnn.likelihood).__name__,
        "units": {name: units[name] for name in outputs},
    }
    policy, rule = bnn.policy, bnn.method.text_of_rule(made)
    if policy is not None and policy.rule == rule:
        known["policy"] = config.encode(policy)
    elif policy is not None:
        warnings.warn(
            f"The policy was fitted to predictions {policy.way}, so the file does not have it: fit it again with "
            f"lb.decide.fit(..., rule={rule!r}).",
            RuleMismatchWarning,
            stacklevel=3,
        )
    for name in given:
        if name in known:
            raise LeanBayesError(f"The file has its own {name!r} in its metadata: use another name.")
    try:
        return {name: _as_text(value) for name, value in (known | dict(given)).items()}
    except (TypeError, ValueError):
        raise LeanBayesError("Values of metadata must be strings, or values that JSON can store.") from None


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False, ensure_ascii=False)


# -- tracing and translation ------------------------------------------------------------------------------------------


def _dynamic(inputs: Sequence[Tensor], batch: Any) -> dict[str, Any]:
    """Return which inputs have the number of examples as their first size, in the form of torch.export."""
    rows = len(inputs[0])
    return {"inputs": tuple({0: batch} if t.dim() and len(t) == rows else None for t in inputs)}


def _trace(graph: OnePassGraph, inputs: Sequence[Tensor]) -> torch.export.ExportedProgram:
    graph.run(inputs)  # raises a clear error for operations without a moment rule
    dynamic = _dynamic(inputs, torch.export.Dim.DYNAMIC(min=1))
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(graph, with_rows(inputs, ROWS), dynamic_shapes=dynamic, strict=False)
    except Exception as error:
        raise LeanBayesError(
            f"torch.export cannot trace the network for any number of examples ({first_line(error)}): "
            "change what depends on the data or on their number, such as len(x), which x.shape[0] can replace."
        ) from error


def _onnx_model(
    program: torch.export.ExportedProgram,
    inputs: Sequence[Tensor],
    names: Sequence[str],
    outputs: Sequence[str],
    metadata: Mapping[str, str],
) -> bytes:
    """Translate a program to ONNX, without the exporter's notes about the source code."""
    einsum = torch.ops.aten.einsum.default
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]  # such as aten.add.Tensor
    unknown = next((name for name in called if "_backward" in name), None)
    if unknown is not None:
        name = unknown.split(".")[1].partition("_backward")[0].strip("_")
        raise UnsupportedOperation(
            f"There is no ONNX operation for the gradient of {name}: export with rule='moments', use "
            "lb.export_program, or replace the operation."
        )
    try:
        with _quiet():
            if any(node.target is einsum for node in program.graph.nodes):
                # Unlike that of torch, Einsum of ONNX does not broadcast sizes of 1.
                program = program.run_decompositions({einsum: torch.export.default_decompositions()[einsum]})
            made = torch.onnx.export(
                program, dynamo=True, input_names=names, dynamic_shapes=_dynamic(inputs, "batch"), verbose=False
            )
    except Exception as error:
        raise LeanBayesError(
            f"torch.onnx cannot translate the network ({first_line(error)}): use lb.export_program, or change the "
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
    made.model.metadata_props.update(metadata)
    return made.model_proto.SerializeToString()


def _input_names(bnn: BayesianModel, example: Any) -> tuple[str, ...]:
    """Return the names of the input tensors, which are the arguments of the network."""
    if isinstance(example, Mapping):
        return tuple(map(str, example))
    parameters = inspect.signature(bnn.network.forward).parameters.values()
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = len(example) if isinstance(example, (tuple, list)) else 1
    return tuple(known[number] if number < len(known) else f"input_{number}" for number in range(count))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings and log messages."""
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


def _check(graph: OnePassGraph, path: Path, inputs: Sequence[Tensor], names: Sequence[str]) -> float | None:
    """Run the file and the graph, and return the largest difference relative to the largest output."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    worst = 0.0
    for rows in (len(inputs[0]), len(inputs[0]) + 1):
        batch = with_rows(inputs, rows)
        feed = {name: tensor.contiguous().numpy() for name, tensor in zip(names, batch, strict=True)}
        try:
            session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            found = session.run(None, feed)
        except Exception as error:  # onnxruntime has no common base class
            raise LeanBayesError(
                f"onnxruntime cannot run the file ({first_line(error)}): use lb.export_program, or check=False."
            ) from error
        for result, (name, wanted) in zip(found, graph.run(batch).items(), strict=True):
            off = ((torch.from_numpy(result) - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()
            if not off <= TOLERANCE:
                raise LeanBayesError(
                    f"The output {name} of the file differs by {off:.1e} of the largest for {rows} examples, more than "
                    f"{TOLERANCE:.0e}: use lb.export_program, or check=False."
                )
            worst = max(worst, off)
    return worst
