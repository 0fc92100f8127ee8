"""Recurrent layers (LSTM, GRU, RNN), step by step, with the rules of the functions that their gates use.

The weights are the same at every step, and so is their noise. If common noise is kept, each step uses the same signs
for the recurrent weight, so its noise accumulates along the sequence, as that of one weight sample does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanbayes.rules.moments.context import Pass
from leanbayes.rules.moments.conversions import loc_of
from leanbayes.rules.moments.registry import moment_rule
from leanbayes.rules.moments.value import Moments

State = tuple[Any, ...]  # (h,), or (h, c) for an LSTM
Cell = Callable[[Any, Any, State], State]  # arguments: gates of the input, gates of the state, and the state


def _lstm(inputs: Any, recurrent: Any, state: State) -> State:
    i, f, g, o = (inputs + recurrent).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(inputs: Any, recurrent: Any, state: State) -> State:
    (r, z, n), (own_r, own_z, own_n) = inputs.chunk(3, -1), recurrent.chunk(3, -1)
    old, new, keep = state[0], torch.tanh(n + torch.sigmoid(r + own_r) * own_n), torch.sigmoid(z + own_z)
    # (1 - z) new + z old to first order. The plain formula would use each noise twice, as if it were independent.
    share, gap = loc_of(keep), loc_of(old) - loc_of(new)
    return ((1 - share) * new + share * old + gap * torch.sub(keep, share),)


def _tanh(inputs: Any, recurrent: Any, state: State) -> State:
    return (torch.tanh(inputs + recurrent),)


def _relu(inputs: Any, recurrent: Any, state: State) -> State:
    return (torch.relu(inputs + recurrent),)


_CELLS: dict[str, Cell] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _tanh, "rnn_relu": _relu}


def _register(name: str, cell: Cell) -> None:
    layer, step = getattr(torch, name), getattr(torch, f"{name}_cell")

    @moment_rule(layer)
    def run_layer(*args: Any) -> Any:
        if isinstance(args[3], bool):
            return _run(layer, cell, *args)
        return _run_packed(layer, cell, *args)

    @moment_rule(step)
    def run_step(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        hidden = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
        plain = step(loc_of(input), _locs(hx), *map(loc_of, (w_ih, w_hh, b_ih, b_hh)))
        state = cell(F.linear(input, w_ih, b_ih), F.linear(hidden[0], w_hh, b_hh), hidden)
        state = tuple(
            _exact_without_noise(s, p) for s, p in zip(state, plain if len(hidden) > 1 else [plain], strict=True)
        )
        return state if len(state) > 1 else state[0]


def _run(
    function: Callable[..., Any],
    cell: Cell,
    input: Any,
    hx: Any,
    weights: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Compute torch.lstm and the like: the outputs of the last layer, and the last states of all layers."""
    hidden = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
    settings = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
    within = next(x for x in (input, *weights, *hidden) if isinstance(x, Moments)).within
    directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * directions)
    x = input if batch_first else input.transpose(0, 1)
    last: list[State] = []
    outer, within.batch_first = within.batch_first, True  # x has the batch first
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            own = _Weights(weights[number * each : (number + 1) * each], has_biases)
            steps, state = _walk(cell, x, tuple(h[number] for h in hidden), own, direction == 1, within)
            outputs.append(_stack(steps, 1))
            last.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if train and dropout > 0 and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    within.batch_first = outer
    results = [x if batch_first else x.transpose(0, 1), *(_stack(part, 0) for part in zip(*last, strict=True))]
    if not (train and dropout > 0 and num_layers > 1):
        plain = function(loc_of(input), _locs(hx), _locs(weights), *settings)
        results = [_exact_without_noise(value, loc) for value, loc in zip(results, plain, strict=True)]
    return tuple(results)


def _run_packed(
    function: Callable[..., Any],
    cell: Cell,
    data: Any,
    batch_sizes: Tensor,
    hx: Any,
    weights: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> Any:
    """Compute torch.lstm and the like for a packed sequence: all first steps, then all second ones, and so on."""
    hidden = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
    within = next(x for x in (data, *weights, *hidden) if isinstance(x, Moments)).within
    directions = 2 if bidirectional else 1
    each = len(weights) // (num_layers * directions)
    sizes, places = batch_sizes.tolist(), _places(batch_sizes).to(data.device)
    x, last = data, list[State]()
    outer, within.batch_first = within.batch_first, True
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            own = _Weights(weights[number * each : (number + 1) * each], has_biases)
            steps, state = _walk_packed(
                cell, x[places], tuple(h[number] for h in hidden), own, direction == 1, within, sizes
            )
            outputs.append(torch.cat(steps))
            last.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if train and dropout > 0 and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    within.batch_first = outer
    results = [x, *(_stack(part, 0) for part in zip(*last, strict=True))]
    if not (train and dropout > 0 and num_layers > 1):
        settings = (has_biases, num_layers, dropout, train, bidirectional)
        plain = function(loc_of(data), batch_sizes, _locs(hx), _locs(weights), *settings)
        results = [_exact_without_noise(value, loc) for value, loc in zip(results, plain, strict=True)]
    return tuple(results)


def _places(batch_sizes: Tensor) -> Tensor:
    """Return the row of a packed sequence for each example and step; after the end of an example, that of its end."""
    steps = torch.arange(len(batch_sizes))
    starts = batch_sizes.cumsum(0) - batch_sizes
    examples = torch.arange(int(batch_sizes[0]))
    ends = (batch_sizes[None] > examples[:, None]).sum(1) - 1
    return starts[torch.minimum(steps[None], ends[:, None])] + examples[:, None]


def _walk_packed(
    cell: Cell, x: Any, state: State, own: "_Weights", backwards: bool, within: Pass, sizes: Sequence[int]
) -> tuple[list[Any], State]:
    """Process sequences (batch, length, channels), of which only the first `sizes[step]` have a step.

    The states of the others, which have ended or have not started yet, stay the same.
    """
    gates = F.linear(x, own.w_ih, own.b_ih)
    start, order = within.taken, range(len(sizes))
    outputs: list[Any] = []
    for step in reversed(order) if backwards else order:
        within.taken, rows = start, sizes[step]
        new = _step(cell, gates[:rows, step], tuple(part[:rows] for part in state), own)
        outputs.append(new[0])
        ended = rows < len(state[0])
        state = tuple(torch.cat([n, s[rows:]]) for n, s in zip(new, state, strict=True)) if ended else new
    return outputs[::-1] if backwards else outputs, state


def _step(cell: Cell, gates: Any, state: State, own: "_Weights") -> State:
    """Compute the next state, given the gates of an input."""
    # A sequence of length 1, so that the noise of the weight is common.
    recurrent = F.linear(state[0].unsqueeze(1), own.w_hh, own.b_hh).squeeze(1)
    h, *rest = cell(gates, recurrent, state)
    if own.projection is not None:
        h = F.linear(h.unsqueeze(1), own.projection).squeeze(1)
    return h, *rest


@moment_rule(torch._pack_padded_sequence)
def _pack(input: Any, lengths: Tensor, batch_first: bool) -> tuple[Any, Tensor]:
    """Collect the first steps of all sequences, then the second ones, and so on."""
    x = input.transpose(0, 1) if batch_first else input
    _, batch_sizes = torch._pack_padded_sequence(x.loc, lengths, False)
    return torch.cat([x[step, :rows] for step, rows in enumerate(batch_sizes.tolist())]), batch_sizes


@moment_rule(torch._pad_packed_sequence)
def _pad(
    data: Any, batch_sizes: Tensor, batch_first: bool, padding_value: Any, total_length: int
) -> tuple[Any, Tensor]:
    """Return the sequences of a packed one, with the padding after their ends."""
    loc, lengths = torch._pad_packed_sequence(data.loc, batch_sizes, False, padding_value, total_length)
    padding = torch.full_like(loc[0], padding_value)
    steps: list[Any] = []
    for part in torch.split(data, batch_sizes.tolist()):
        steps.append(torch.cat([part, padding[len(part) :]]) if len(part) < len(padding) else part)
    steps += [padding] * (len(loc) - len(steps))
    padded = torch.stack(steps)
    return padded.transpose(0, 1) if batch_first else padded, lengths


class _Weights:
    """The weights of one layer in one direction."""

    def __init__(self, weights: Sequence[Any], has_biases: bool) -> None:
        self.w_ih, self.w_hh = weights[:2]
        self.b_ih: Any = weights[2] if has_biases else None
        self.b_hh: Any = weights[3] if has_biases else None
        rest = weights[4:] if has_biases else weights[2:]
        self.projection = rest[0] if rest else None


def _walk(cell: Cell, x: Any, state: State, own: _Weights, backwards: bool, within: Pass) -> tuple[list[Any], State]:
    """Process a sequence (batch, length, channels), and return its outputs in order and the last state."""
    gates = F.linear(x, own.w_ih, own.b_ih)
    start, length = within.taken, x.shape[1]
    outputs = []
    for step in range(length):
        within.taken = start  # the same noise for the same weights
        state = _step(cell, gates[:, length - 1 - step if backwards else step], state, own)
        outputs.append(state[0])
    return outputs[::-1] if backwards else outputs, state


def _locs(values: Any) -> Any:
    return [loc_of(value) for value in values] if isinstance(values, (tuple, list)) else loc_of(values)


def _exact_without_noise(value: Any, plain: Tensor) -> Any:
    """Replace the mean by the exact result of torch for elements without variance."""
    if not isinstance(value, Moments):
        return plain
    loc = torch.where(value.variance > 0, value.loc, plain)
    return value.like(loc, value.independent, value.common, value.grid)


def _stack(values: Sequence[Any], dim: int) -> Any:
    """Stack values with different common parts."""
    parts = [value.plain() for value in values if isinstance(value, Moments)]
    if not parts:
        return torch.stack(list(values), dim)
    loc = torch.stack([loc_of(value) for value in values], dim)
    independent = torch.stack([p.independent.expand(p.shape) for p in parts], dim)
    if all(p.common is None for p in parts):
        return parts[0].like(loc, independent)
    probes = next(len(p.common) for p in parts if p.common is not None)
    none = independent.new_zeros(probes, *[1] * parts[0].dim())
    commons = [(none if p.common is None else p.common).expand(-1, *p.shape) for p in parts]
    return parts[0].like(loc, independent, torch.stack(commons, dim + 1))


for _name, _cell in _CELLS.items():
    _register(_name, _cell)
