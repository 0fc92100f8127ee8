"""Noise as a pure function of a key, so that any draw can be repeated and none touches the global random state.

A key is an int64 tensor (seed, index) on the device of the noise. A `NoiseStream` hands out a new index for every
draw. Under `torch.distributed` each rank gets its own index, and rank r of w at step t has the index that a single
process would have at its draw t·w + r.
"""

import torch
from torch import Tensor, nn

from leanbayes import kernels

_MASK = (1 << 64) - 1


def make_key(seed: int, index: int = 0, device: torch.device | str | None = None) -> Tensor:
    """Make the key (seed, index)."""
    return torch.tensor([seed, index], dtype=torch.int64, device=device)


def key_from(generator: torch.Generator, device: torch.device) -> Tensor:
    """Take a key from a user's generator, which advances."""
    return torch.randint(2**62, (2,), generator=generator, device=generator.device).to(device)


_CHUNK, _DRAW = 1 << 40, 0x1E3779B97F4A7C15  # far apart, so that part i of one kind is not part j of the other


def of_chunk(key: Tensor, number: int) -> Tensor:
    """Make a key for one chunk of a batch that a draw is made for."""
    return _fold_in(key, number, _CHUNK)


def _fold_in(key: Tensor, number: int, step: int) -> Tensor:
    """Move the seed by a number of steps; int64 wraps around."""
    return key + number * torch.tensor([step, 0], dtype=torch.int64, device=key.device) if number else key


class NoiseStream(nn.Module):
    """A counter that gives every draw its own key, and is saved with the model."""

    state: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.register_buffer("state", make_key(seed))

    def next(self, number: int = 0) -> Tensor:
        """Return the next key, and advance; for `number` > 0, a further key that belongs to the last one.

        So a loss of several draws takes one index, and its noise does not depend on how many processes there are.
        """
        if number == 0:
            self.state[1] += 1
        key = _fold_in(self.state, number, _DRAW).clone()
        key[1] -= 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            key[1] = key[1] * torch.distributed.get_world_size() + torch.distributed.get_rank()
        return key


class NoiseSource:
    """One key for a whole forward pass, and a stream of its own for every use of noise in it; `streams` counts them."""

    def __init__(self, key: Tensor) -> None:
        self.key = key
        self.streams = 0

    def next_stream(self) -> int:
        """Count up; stream 0 belongs to the draw of the weights."""
        self.streams += 1
        return self.streams

    def restart(self) -> None:
        """Count from the first again."""
        self.streams = 0


def mix(*numbers: int) -> int:
    """Hash some integers to 63 bits (splitmix64), so that neighbouring keys give unrelated seeds."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def _fill(like: Tensor, key: Tensor, stream: int, signs: bool) -> Tensor:
    out = torch.empty_like(like)
    seed, index = key.tolist()
    generator = torch.Generator(like.device).manual_seed(mix(seed, index, stream))
    flat = out.as_strided((out.numel(),), (1,))  # torch fills plain memory many times faster than channels_last
    if signs:
        flat.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
    else:
        flat.normal_(generator=generator)
    return out


_noise = torch.library.custom_op("leanbayes::noise", _fill, mutates_args=())


@_noise.register_fake
def _(like: Tensor, key: Tensor, stream: int, signs: bool) -> Tensor:
    return torch.empty_like(like)


def _make(like: Tensor, key: Tensor, stream: int, signs: bool) -> Tensor:
    if kernels.usable(like):
        return kernels.ops.noise(like, key, stream, signs)
    # The operator is for the compiler; calling it otherwise would import the compiler, which takes a second.
    return (_noise if torch.compiler.is_compiling() else _fill)(like, key, stream, signs)


def normal(like: Tensor, key: Tensor, stream: int = 0) -> Tensor:
    """Standard normals of the shape, dtype and device of `like`; each (key, stream) has its own."""
    return _make(like.detach(), key, stream, False)


def signs(like: Tensor, shape: tuple[int, ...], key: Tensor, stream: int = 0) -> Tensor:
    """Draw random ±1 of a given shape, with the dtype and device of `like`."""
    return _make(like.new_empty(shape), key, stream, True)
