"""A lock that belongs to a model: copies of the model have their own."""

import threading
from typing import Any


class ModelLock:
    """A reentrant lock that can be copied and pickled with its model."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelLock":
        return ModelLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelLock, ()
