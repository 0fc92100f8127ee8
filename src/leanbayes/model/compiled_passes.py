"""Compiled passes of one model, for `predict`.

A pass by `moments` calls many small kernels. On a GPU Python launches them more slowly than they run, so a compiled
pass in a CUDA graph is many times faster. Compiling takes long, though: by default a kind of pass is compiled once it
has taken some seconds without, so that a few predictions never wait for it.

A kind of pass is its rule, the shapes and dtypes of the inputs, and autocast. All else that a pass depends on, such as
factors and the mode, is guarded by torch.compile. Weights are inputs of the compiled code, so they may change. So is
what follows from them alone, which an eager pass computes after each change. The first passes of compiled code are
compared with eager ones; code whose outputs differ by more than rounding is not used.
Rounding in half precision grows with the depth of a network. So where outputs differ under autocast, an eager pass in
single precision shows how large the rounding errors of this network are. Samples have the same noise in all of them.
"""

import logging
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from leanbayes.core.network import call_with, map_rows, output_tensor, tensors_of
from leanbayes.errors import LeanBayesError
from leanbayes.model.pass_result import Summary, copied, first_examples, summarized
from leanbayes.rules import Moments, moments_of

if TYPE_CHECKING:
    from leanbayes.model.bayesian import BayesianModel
    from leanbayes.model.draw import Draw

_LOG = logging.getLogger("leanbayes")
_MOST = 8  # kinds of passes per model
_PAYS_AFTER = (
    30.0  # seconds, about as long as compiling takes: so no use of a model takes much more than twice the time
)
_COMPARED = 3  # passes per compiled code: a CUDA graph is warmed up, recorded, and then replayed
_ROUNDING = {True: 5e-2, False: 5e-3}  # differences relative to the largest output, in half precision or not
_TIMES = 4.0  # how many times the rounding errors of an eager pass two passes in half precision may differ by
# Compute short chains of results again where they are needed: to store them is most of the memory traffic of a pass. By
# default the compiler stores results of more than 30 operations, or of more than 4 tensors (8 if they are used once).
# With 1000 operations and 32 tensors a ResNet-18 stores a seventh less, but takes twice as long to compile.
_OPTIONS = {"realize_opcount_threshold": 60, "realize_reads_threshold": 16, "realize_acc_reads_threshold": 16}
_JOINING = (torch.cat, torch.concat, torch.concatenate, torch.stack)
_Kind = tuple[Any, ...]


@dataclass
class _Known:
    """What is known about one kind of pass."""

    seconds: float = 0.0
    call: Callable[..., Any] | None = None
    compared: int = 0  # passes of the compiled code that were compared with eager ones
    failed: bool = False
    weight: Callable[[], Tensor | None] = lambda: None  # a weak reference to one of the weights of the last pass


class CompiledPasses:
    """The compiled passes of one model. Copies of it, also by pickle, are empty."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[_Kind, int], _Known] = OrderedDict()  # by kind and number of examples
        self._eager: list[tuple[_Known, int]] = []  # passes since the last `add_time`, with their numbers of examples
        self._logged: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledPasses":
        return CompiledPasses()

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledPasses, ()

    def run(
        self,
        bnn: "BayesianModel",
        draw: "Draw | None",
        x: Any,
        rows: int,
        compile: bool | None,
        are_separate: Callable[[], bool],
        summarize: bool,
    ) -> Any:
        """Run a pass, compiled if that is asked for or pays. Without `draw` the weights are in the network already.

        Args:
            bnn: The model.
            draw: The sample.
            x: The inputs.
            rows: The number of examples.
            compile: Whether to compile; by default if it pays.
            are_separate: Returns whether the outputs of an example do not depend on the others.
            summarize: Whether to return a `Summary` of an output with moments, not the output.
        """
        if compile is False or (compile is None and not _is_automatic(bnn)):
            return _one_pass(bnn, draw, x, summarize)
        kind = _kind_of(bnn, x, rows, summarize)
        if not self._is_compiled(kind, rows):
            obstacle = _obstacle(bnn)
            if obstacle is not None and compile:
                raise LeanBayesError(f"compile=True is not possible, because {obstacle}: leave it out.")
            if obstacle is not None:
                return _one_pass(bnn, draw, x, summarize)
        known = None if kind is None else self._find(kind, rows)
        if kind is None or known is None or (known.failed and not compile):
            return _one_pass(bnn, draw, x, summarize)
        if known.call is None and not compile and known.seconds < _PAYS_AFTER:
            larger = self._larger(kind, rows, bnn)
            if larger is None or not are_separate():
                self._eager.append((known, rows))
                return _one_pass(bnn, draw, x, summarize)
            return self._padded(larger, kind, bnn, draw, x, rows, summarize)
        return self._compiled(known, bnn, draw, x, compile, summarize)

    def add_time(self, seconds: float) -> None:
        """Share the time of a prediction among its passes that were not compiled."""
        total = sum(rows for _, rows in self._eager)
        for known, rows in self._eager:
            known.seconds += seconds * rows / total
        self._eager.clear()

    def _is_compiled(self, kind: _Kind | None, rows: int) -> bool:
        known = None if kind is None else self._known.get((kind, rows))
        return known is not None and known.call is not None

    def _find(self, kind: _Kind, rows: int) -> _Known:
        known = self._known.setdefault((kind, rows), _Known())
        self._known.move_to_end((kind, rows))
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return known

    def _larger(self, kind: _Kind, rows: int, bnn: "BayesianModel") -> int | None:
        """Return the number of examples of a compiled pass of the same kind that has room for a smaller batch."""
        if bnn.noise_per_example:  # more examples would have other noise
            return None
        sizes = [size for (own, size), known in self._known.items() if own == kind and size > rows and known.call]
        return min(sizes, default=None)

    def _padded(
        self, size: int, kind: _Kind, bnn: "BayesianModel", draw: "Draw | None", x: Any, rows: int, summarize: bool
    ) -> Any:
        """Repeat the last example until the batch has a size that is compiled, and drop the outputs of the copies."""

        def padded(tensor: Tensor) -> Tensor:
            return torch.cat([tensor, tensor[-1:].expand(size - rows, *tensor.shape[1:])])

        known = self._find(kind, size)
        return first_examples(self._compiled(known, bnn, draw, map_rows(padded, x, rows), None, summarize), rows)

    def _compiled(
        self,
        known: _Known,
        bnn: "BayesianModel",
        draw: "Draw | None",
        x: Any,
        compile: bool | None,
        summarize: bool,
    ) -> Any:
        if known.call is None:
            self._log_once(
                logging.INFO, "Compiling a pass of the network; pass compile=False to predict() to avoid it."
            )
            known.call = _compile(bnn)
        call_with(bnn.learn_outputs, x)
        if bnn.members is None and draw is not None:
            draw = draw._replace(number=0)  # it would be a constant of the compiled code
        try:
            eager = None
            if _are_new(known, bnn):
                # It computes what follows from the weights alone and is the same in all passes.
                eager = _one_pass(bnn, draw, x, summarize)
            if bnn.device.type == "cuda":
                if eager is not None or known.weight() is None:
                    _mark_fixed(bnn)
                torch.compiler.cudagraph_mark_step_begin()
            with _without_advice() if known.compared < _COMPARED else nullcontext():
                parts = known.call(bnn, draw, x, summarize)
                result = _result(bnn, parts, bnn.device.type == "cuda", summarize)
            if known.compared < _COMPARED:
                known.compared += 1
                eager = _one_pass(bnn, draw, x, summarize) if eager is None else eager
                _compare(result, eager, lambda: _one_pass(bnn, draw, x, summarize), bnn)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the network is the user's, and the compiler may raise anything
            known.call, known.compared, known.failed = None, 0, True
            result = _one_pass(bnn, draw, x, summarize)  # if this fails too, its error is the clearer one
            reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")
            if compile:
                raise LeanBayesError(
                    f"The network cannot be compiled ({type(error).__name__}: {reason}): leave out compile=True."
                ) from error
            self._log_once(
                logging.WARNING, f"The network is not compiled for predict(): {type(error).__name__}: {reason}."
            )
        return result

    def _log_once(self, level: int, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            _LOG.log(level, text)


# -- one pass ---------------------------------------------------------------------------------------------------------


def _one_pass(bnn: "BayesianModel", draw: "Draw | None", x: Any, summarize: bool) -> Any:
    called = call_with(bnn.call_with_values, x) if draw is None else call_with(bnn, x, _draw=draw)
    output = moments_of(output_tensor(called))
    if not torch.compiler.is_compiling():
        bnn.likelihood.check_output(output)
    return summarized(bnn, output) if summarize and isinstance(output, Moments) else output


def _parts_of_pass(bnn: "BayesianModel", draw: "Draw | None", x: Any, summarize: bool) -> Any:
    """Run a pass and return tensors, because compiled code cannot return `Moments`."""
    with _TraceableCalls():
        output = _one_pass(bnn, draw, x, False)
    if not isinstance(output, Moments):
        return output
    output = output.plain()
    if summarize and bnn.likelihood.compiles(output):
        return summarized(bnn, output)
    return output.loc, output.variance, output.common


class _TraceableCalls(TorchFunctionMode):
    """Changes calls that the compiler cannot trace into others that do the same.

    It looks for `Moments` in a list, torch.cat([x, y]), but not in a tuple, torch.cat((x, y)), as rotary position
    embeddings call it. Up to torch 2.11 it cannot trace the method `unflatten` below such a mode.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in _JOINING and args and isinstance(args[0], tuple):
            args = (list(args[0]), *args[1:])
        func = torch.unflatten if func is Tensor.unflatten else func
        return func(*args, **(kwargs or {}))


def _result(bnn: "BayesianModel", parts: Any, copy: bool, summarize: bool) -> Any:
    """Return the result of a pass from its tensors, which the next replay of a CUDA graph overwrites."""
    if isinstance(parts, Tensor):
        return parts.clone() if copy else parts
    if isinstance(parts, Summary):
        return copied(parts) if copy else parts
    loc, variance, common = (part.clone() if copy and part is not None else part for part in parts)
    output = Moments(loc, total=variance, common=common)
    return summarized(bnn, output) if summarize else output


def _compare(compiled: Any, eager: Any, run_eager: Callable[[], Any], bnn: "BayesianModel") -> None:
    """Raise an error if the first results of compiled code are not those of the network."""
    device = bnn.device.type
    ours, theirs = _tensors(compiled), _tensors(eager)
    in_half = torch.is_autocast_enabled(device)
    relative = _ROUNDING[in_half or any(p.dtype.itemsize < 4 for p in bnn.parameters())]
    if _are_close(ours, theirs, relative):
        return
    if not in_half or not _are_as_close_as_rounding(ours, theirs, relative, run_eager, device):
        raise LeanBayesError("its compiled outputs differ from those of the network by more than rounding")


def _are_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], relative: float) -> bool:
    """Whether outputs differ by at most a share of the largest one."""
    return all(
        one.shape == other.shape
        and torch.allclose(one, other, rtol=0.0, atol=relative * _size(other)[0], equal_nan=True)
        for one, other in zip(ours, theirs, strict=True)
    )


def _are_as_close_as_rounding(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], relative: float, run_eager: Callable[[], Any], device: str
) -> bool:
    """Whether outputs differ by as much as those of an eager pass differ from a pass in single precision.

    The mean of the differences counts too. A few outputs may be very sensitive, and all others must be close.
    """
    try:
        with torch.autocast(device, enabled=False):
            single = _tensors(run_eager())
    except torch.OutOfMemoryError:
        return False  # a pass in half precision may be the largest that fits
    for one, other, exact in zip(ours, theirs, single, strict=True):
        if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
            return False
        sizes, errors = _size(other), _size(other.float() - exact.float())
        allowed = (relative * size + _TIMES * error for size, error in zip(sizes, errors, strict=True))
        if any(found > most for found, most in zip(_size(one.float() - other.float()), allowed, strict=True)):
            return False
    return True


def _size(tensor: Tensor) -> tuple[float, float]:
    """Return the largest and the mean absolute value; what is not finite counts as zero."""
    sizes = tensor.abs().float().nan_to_num(0.0, 0.0)
    return (sizes.amax().item(), sizes.mean().item()) if tensor.numel() else (0.0, 0.0)


def _tensors(result: Any) -> tuple[Tensor, ...]:
    if isinstance(result, Summary):  # `margin_std` is that of two classes, which rounding may exchange for others
        fields = {name: value for name, value in vars(result.prediction).items() if name != "margin_std"}
        return tuple(value for value in fields.values() if isinstance(value, Tensor))
    return (result.loc, result.stddev) if isinstance(result, Moments) else (result,)


def _compile(bnn: "BayesianModel") -> Callable[..., Any]:
    # Compiled code is stored with the code object of a function. A new one is freed together with the function, and
    # does not count towards torch's limit of recompilations for other kinds of passes.
    function = FunctionType(_parts_of_pass.__code__.replace(), _parts_of_pass.__globals__, _parts_of_pass.__name__)
    # Up to torch 2.12 CUDA graphs work only in the thread that imported torch.
    in_main = threading.current_thread() is threading.main_thread()
    options: dict[str, Any] = {**_OPTIONS, "triton.cudagraphs": bnn.device.type == "cuda" and in_main}
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


@contextmanager
def _without_advice() -> Iterator[None]:
    """Ignore the compiler's warnings, which are about its own choices and are the same for all networks."""
    with warnings.catch_warnings():
        for start in ("The CUDA Graph is empty", "TensorFloat32 tensor cores", r"\s*Online softmax is disabled"):
            warnings.filterwarnings("ignore", start, UserWarning)
        yield


def _are_new(known: _Known, bnn: "BayesianModel") -> bool:
    """Whether passes share the weights, and these are not those of the last pass of this kind."""
    shared = next((value for value in bnn.values if isinstance(value, Moments) and value.derived is not None), None)
    if shared is None or known.weight() is shared.loc:
        return False
    known.weight = weakref.ref(shared.loc)
    return True


def _mark_fixed(bnn: "BayesianModel") -> None:
    """Let a CUDA graph read weights that passes share where they are, instead of copying them for every pass."""
    if bnn.current_rule.random:
        return
    for value in bnn.values:
        for tensor in tensors_of(value if isinstance(value, Tensor) else vars(value)):
            torch._dynamo.mark_static_address(tensor)


def _is_automatic(bnn: "BayesianModel") -> bool:
    """Whether a pass may be compiled without asking. The results differ by rounding, from some call on."""
    return bnn.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()


def _obstacle(bnn: "BayesianModel") -> str | None:
    """Return why the passes of a model cannot be compiled, or None."""
    if bnn.current_rule.needs_graph:
        return f"the rule {bnn.rule!r} runs a backward pass"
    if bnn.root_units is not None:
        return "a sharded model gathers its weights while it runs"
    if bnn.members is not None:
        return "each member of an ensemble would be compiled separately"
    if is_compiled(bnn):
        return "the network is compiled already"
    return None


def is_compiled(bnn: "BayesianModel") -> bool:
    """Whether parts of the network are compiled by the user."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in bnn.modules()
    )


def _kind_of(bnn: "BayesianModel", x: Any, rows: int, summarize: bool) -> _Kind | None:
    """Return what passes of one compiled code have in common, besides the number of examples; None if unknown."""
    device = bnn.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    modes = (autocast, torch.is_inference_mode_enabled(), threading.current_thread() is threading.main_thread())
    kind = (bnn.current_rule, bnn.device, modes, summarize, _described(x, rows))
    try:
        hash(kind)
    except TypeError:
        return None
    return kind


def _described(x: Any, rows: int) -> Any:
    if isinstance(x, Tensor):
        shape = x.shape[1:] if x.dim() and len(x) == rows else (None, x.shape)
        return shape, x.stride(), x.dtype, x.device
    if isinstance(x, Mapping):
        return type(x), tuple((key, _described(value, rows)) for key, value in x.items())
    if isinstance(x, (tuple, list)):
        return type(x), tuple(_described(value, rows) for value in x)
    return x
