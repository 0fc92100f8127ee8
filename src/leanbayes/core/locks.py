"""A lock that belongs to a model: copies of the model have their own."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class ModelLock:
    """A reentrant lock that can be copied and pickled with its model."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holders: list[int] = []  # the thread that holds the lock, once for each time it took the lock

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holders.append(threading.get_ident())

    def __exit__(self, *error: object) -> None:
        self._holders.pop()
        self._lock.release()

    @contextlib.contextmanager
    def for_thread(self, thread: int) -> Iterator[None]:
        """Hold the lock on behalf of a thread that waits for this one, and which may hold it itself.

        The backward pass of a GPU runs in a thread of its own.
        """
        if thread in self._holders:
            yield
        else:
            with self:
                yield

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelLock":
        return ModelLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelLock, ()
