"""Noise as a pure function of a key: any sample can be repeated, and the global random state is not used.

A key is an int64 tensor (seed, index) on the device of the noise. A `NoiseStream` returns a new index for every sample.
Under `torch.distributed` each rank gets its own index: rank r of w at step t has the index t·w + r, which is that of
the same sample in a single process.

A key (seed, index, start) has a third entry: its noise is a function of the position too, counted from `start`. So a
process that holds a part of a vector makes the noise of its part alone, and it is the same for any number of parts.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from leanbayes.core import kernels
from leanbayes.errors import LeanBayesError

_MASK = (1 << 64) - 1


def make_key(seed: int, index: int = 0, device: torch.device | str | None = None) -> Tensor:
    """Make the key (seed, index)."""
    if not -(2**63) <= seed < 2**63:
        raise LeanBayesError(f"seed={seed} must be a whole number from -2**63 to 2**63 - 1.")
    return torch.tensor([seed, index], dtype=torch.int64, device=device)


def key_from(generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw a key from a generator, and so advance the generator."""
    return torch.randint(2**62, (2,), generator=generator, device=generator.device).to(device)


# Far apart, so that chunk i, sample j and worker k never have the same key.
_CHUNK, _DRAW, _WORKER = 1 << 40, 0x1E3779B97F4A7C15, 0x3C6EF372FE94F82B
_FORK, _PART = 0x5AA66D2C7DDF743F, 0x2545F4914F6CDD1D
_SPAN = 16384  # positions of a CPU's noise that one seed gives


def of_chunk(key: Tensor, number: int) -> Tensor:
    """Return the key of one chunk of a batch, given the key of the batch."""
    return _fold_in(key, number, _CHUNK)


def of_member(key: Tensor, number: int) -> Tensor:
    """Return the key of one of the numbered samples of a posterior. It does not depend on the given key."""
    return torch.full_like(key, number).index_fill_(0, torch.arange(1, len(key), device=key.device), 0)


def at(key: Tensor, start: int) -> Tensor:
    """Return the key of the noise by position, for a vector whose first element is at position `start` of the whole."""
    return torch.cat((key[:2], key.new_full((1,), start)))


def of_part(key: Tensor, number: int) -> Tensor:
    """Return the key of noise that parts of a network, or processes that share its weights, do not share."""
    return _fold_in(key[:2], number, _PART)


def _fold_in(key: Tensor, number: int, step: int) -> Tensor:
    """Add a number of steps to the seed; int64 wraps around. A GPU does not wait for the host."""
    if not number:
        return key
    added = (number * step) & _MASK
    return torch.cat((key[:1] + (added - (1 << 64) if added >> 63 else added), key[1:]))


class _Forks:
    """Numbers of this process and of the processes that it forks, other than those of a DataLoader."""

    own = 0  # in a forked process: which of the forks of its parent it is
    started = 0

    @classmethod
    def count(cls) -> None:
        """Count a fork, in the parent."""
        cls.started += 1

    @classmethod
    def enter(cls) -> None:
        """Give a new process its number."""
        cls.own, cls.started = mix(cls.own, cls.started) | 1, 0


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_Forks.count, after_in_child=_Forks.enter)


class NoiseStream(nn.Module):
    """A counter that gives every sample its own key, and is saved with the model.

    Processes that `os.fork` starts have copies of the counter. The noise of a copy differs from that of its parent and
    of its siblings, whereas a model that is made or loaded in a forked process has the noise that it has anywhere.
    """

    state: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.register_buffer("state", make_key(seed))
        self.by_position = False  # whether the noise is that of a sharded model
        self.replica: tuple[int, int] | None = None  # number and count of the replicas, if ranks share their samples
        self._made_in = _Forks.own

    def next(self, number: int = 0) -> Tensor:
        """Return the next key, and advance the counter; for `number` > 0, return further keys of the last index.

        A loss of several samples takes one index, so its noise does not depend on the number of processes.
        """
        if in_transform() and not torch._C._functorch.is_functorch_wrapped_tensor(self.state):
            with temporarily_clear_interpreter_stack():  # transforms cannot change a tensor that they did not get
                return self._next(number)
        return self._next(number)

    def key(self, seed: int, index: int = 0) -> Tensor:
        """Return the key (seed, index) of noise of the kind that this stream has. The counter does not advance."""
        key = make_key(seed, index, self.state.device)
        return at(key, 0) if self.by_position else key

    def _next(self, number: int) -> Tensor:
        if number == 0:
            self.state[1] += 1
        key = _fold_in(self.state, number, _DRAW).clone()
        key[1] -= 1
        ranked = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.replica is not None:
            key[1] = key[1] * self.replica[1] + self.replica[0]
        elif ranked:
            key[1] = key[1] * torch.distributed.get_world_size() + torch.distributed.get_rank()
        worker = None if torch.compiler.is_compiling() else torch.utils.data.get_worker_info()
        if worker is not None:  # each worker has a copy of this counter; its seed is another one in each epoch
            key = _fold_in(key, worker.seed, _WORKER)
        elif not ranked and not torch.compiler.is_compiling() and self._made_in != _Forks.own:
            key = _fold_in(key, _Forks.own, _FORK)
        return at(key, 0) if self.by_position else key


class NoiseSource:
    """The key of a forward pass, and a separate stream for every use of noise in it; `streams` counts them."""

    def __init__(self, key: Tensor) -> None:
        self.key = key
        self.streams = 0

    def next_stream(self) -> int:
        """Return the number of a new stream; stream 0 is that of the weights."""
        self.streams += 1
        return self.streams

    def restart(self) -> None:
        """Start again with the first stream."""
        self.streams = 0


def mix(*numbers: int) -> int:
    """Hash integers to 63 bits (splitmix64), so that neighboring keys give unrelated seeds."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def _fill(like: Tensor, key: Tensor, stream: int, signs: bool) -> Tensor:
    # In half precision torch draws other numbers, so a pass under autocast would have other noise than one without.
    half = like.dtype in (torch.float16, torch.bfloat16)
    out = torch.empty_like(like, dtype=torch.float32 if half else like.dtype)
    seed, index, *start = key.tolist()
    hashed, generator = mix(seed, index, stream), torch.Generator(like.device)
    flat = out.as_strided((out.numel(),), (1,))  # torch fills plain memory many times faster than channels_last
    if signs:
        flat.bernoulli_(0.5, generator=generator.manual_seed(hashed)).mul_(2).sub_(1)
    elif start:
        _fill_by_position(flat, hashed, start[0], generator)
    else:
        flat.normal_(generator=generator.manual_seed(hashed))
    return out.to(like.dtype)


def _fill_by_position(flat: Tensor, hashed: int, start: int, generator: torch.Generator) -> None:
    """Fill a vector whose first element is at position `start`: each span of positions has its own seed."""
    stop, span = start + flat.numel(), torch.empty(_SPAN, dtype=flat.dtype, device=flat.device)
    for number in range(start // _SPAN, -(-stop // _SPAN)):
        # The step is odd and below 2^32, so that no two spans of a sample have the same lower half of a seed.
        generator.manual_seed((hashed + number * 0x9E3779B1) & (_MASK >> 1))
        first, last = number * _SPAN, (number + 1) * _SPAN
        if start <= first and last <= stop:
            flat[first - start : last - start].normal_(generator=generator)
        else:  # a part of a span; torch's numbers depend on how many are drawn
            span.normal_(generator=generator)
            flat[max(first, start) - start : min(last, stop) - start] = span[max(start - first, 0) : stop - first]


def _fill_anywhere(like: Tensor, key: Tensor, stream: int, signs: bool) -> Tensor:
    return (kernels.ops.noise if kernels.usable(like) else _fill)(like, key, stream, signs)


_noise = torch.library.custom_op("leanbayes::noise", _fill, mutates_args=())
_transformed_noise = torch.library.custom_op("leanbayes::transformed_noise", _fill_anywhere, mutates_args=())


@_noise.register_fake
@_transformed_noise.register_fake
def _(like: Tensor, key: Tensor, stream: int, signs: bool) -> Tensor:
    return torch.empty_like(like)


@_transformed_noise.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, ...], like: Tensor, key: Tensor, stream: int, signs: bool
) -> tuple[Tensor, int | None]:
    """Use the same noise for all elements, or separate noise if they have their own keys."""
    like = like if in_dims[0] is None else like.select(in_dims[0], 0)
    if in_dims[1] is None:
        return _transformed_noise(like, key, stream, signs), None
    return torch.stack([_transformed_noise(like, own, stream, signs) for own in key.unbind(in_dims[1])]), 0


def in_transform() -> bool:
    """Whether a transform of `torch.func` (grad, vmap, jacrev) runs, which hand-written passes do not support."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _make(like: Tensor, key: Tensor, stream: int, signs: bool) -> Tensor:
    if in_transform():
        return _transformed_noise(like, key, stream, signs)
    if kernels.usable(like):
        return kernels.ops.noise(like, key, stream, signs)
    # The operator is for the compiler only: calling it in eager mode imports the compiler, which takes a second.
    return (_noise if torch.compiler.is_compiling() else _fill)(like, key, stream, signs)


def normal(like: Tensor, key: Tensor, stream: int = 0) -> Tensor:
    """Return standard normals with the shape, dtype and device of `like`, as a function of (key, stream)."""
    return _make(like.detach(), key, stream, False)


def signs(like: Tensor, shape: tuple[int, ...], key: Tensor, stream: int = 0) -> Tensor:
    """Return random signs ±1 of a given shape, with the dtype and device of `like`, as a function of (key, stream)."""
    return _make(like.new_empty(shape), key, stream, True)
