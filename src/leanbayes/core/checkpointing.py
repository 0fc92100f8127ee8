"""Activation checkpointing: a function that runs again in the backward pass sees the state of its own forward pass.

`torch.utils.checkpoint` frees the activations of a function and runs it again in the backward pass. By then the sampled
weights of the forward pass have left the network. So while a network runs, every function that it checkpoints is
wrapped: the wrapper remembers the state at the start of the function, and restores it when the function runs again.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from leanbayes.core.tensor_like import TensorLike

Restore = Callable[[], AbstractContextManager[None]]
Snapshot = Callable[[], Restore]


class _Running(threading.local):
    """The forward passes that run in this thread, the innermost last, each as a function that takes a snapshot."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []


_running = _Running()
_lock = threading.Lock()
_users = 0  # how many passes run in all threads; the functions of torch are wrapped while there is one
_torch_apply = torch_checkpoint.CheckpointFunction.apply
_torch_generator = torch_checkpoint._checkpoint_without_reentrant_generator


@contextlib.contextmanager
def running(snapshot: Snapshot) -> Iterator[None]:
    """Let functions that are checkpointed inside the block be recomputed with their state.

    Args:
        snapshot: Returns a function that restores the state of this moment for a block.
    """
    _running.snapshots.append(snapshot)
    _wrap(1)
    try:
        yield
    finally:
        _wrap(-1)
        _running.snapshots.pop()


def in_backward_pass() -> bool:
    """Whether this thread runs a backward pass, in which only functions that are checkpointed are called again."""
    return not torch.compiler.is_dynamo_compiling() and torch._C._current_graph_task_id() != -1


def _wrap(change: int) -> None:
    """Wrap the two functions behind `torch.utils.checkpoint.checkpoint` while any pass runs."""
    global _users
    with _lock:
        _users += change
        module: Any = torch_checkpoint
        module.CheckpointFunction.apply = _apply if _users else _torch_apply
        module._checkpoint_without_reentrant_generator = _generator if _users else _torch_generator


def _generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand in for use_reentrant=False, where torch calls this function only to recompute it."""
    restores = [snapshot() for snapshot in _running.snapshots]
    # Tensor-like values cache what they compute. The recomputation must find them as the first run did.
    values = {id(arg): copy.copy(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, TensorLike)}

    def recompute(*inputs: Any, **named: Any) -> Any:
        inputs = tuple(copy.copy(values[id(one)]) if id(one) in values else one for one in inputs)
        named = {name: copy.copy(values[id(one)]) if id(one) in values else one for name, one in named.items()}
        with contextlib.ExitStack() as state:
            for restore in restores:
                state.enter_context(restore())
            return function(*inputs, **named)

    return _torch_generator(recompute if restores else function, *args, **kwargs)


def _apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Stand in for use_reentrant=True, which loses the gradients of sampled weights: they are not its inputs.

    The other implementation computes the same, and has no such limit.
    """
    if not _running.snapshots:
        return _torch_apply(function, preserve_rng_state, *args)
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
