"""How the C library treats memory that tensors free on a CPU."""

import functools

import numpy as np

_KEPT = 1 << 24  # bytes


@functools.cache
def keep_freed_memory() -> None:
    """Let the process reuse memory that it frees, up to 32 MiB, in place of returning it to the system each time.

    The activations of a small network are freed and allocated again in every pass. If the system has to give their
    pages again, that takes up to a fifth of the time of a pass. By default glibc keeps twice the size of the largest
    block that was mapped by itself and freed. So to allocate and free one block that is never touched is enough, and
    costs some microseconds once. Other C libraries have limits of their own.
    """
    np.empty(_KEPT, dtype=np.uint8)  # not a tensor: it would count as memory of the first prediction
