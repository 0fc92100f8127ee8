"""Reading pickled arrays without running what is in the file.

Stand-ins take the place of numpy's own classes, whose pickled state can spoil memory, and are looked at afterwards.
"""

import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from leanbayes.data.files import Array, damaged, read_bytes
from leanbayes.errors import FileFormatError


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


class _PickledType:
    """The dtype of a pickled array: a kind and a size, and in its state a byte order."""

    def __init__(self, name: Any, align: Any = False, copy: Any = False) -> None:
        self.name, self.order = _text(name), "|"

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])

    def numpy(self) -> np.dtype[Any]:
        """Make the dtype, which has to be one of plain numbers."""
        if not re.fullmatch("[<>=|][iuf][1248]", self.order + self.name):
            raise TypeError(f"it has an array of type {self.order}{self.name}")
        return np.dtype(self.order + self.name)


class _PickledArray:
    """An array, as its pickled state tells it."""

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.type, self.fortran, self.content = state

    def numpy(self) -> Array:
        """Make the array, in the byte order of this machine."""
        values = np.frombuffer(self.content, self.type.numpy()).reshape(self.shape, order="F" if self.fortran else "C")
        return values.astype(values.dtype.newbyteorder("="))


def _number(kind: _PickledType, content: bytes) -> Any:
    return np.frombuffer(content, kind.numpy())[0].item()


_ALLOWED: dict[str, Callable[..., Any]] = {
    "numpy.ndarray": _PickledArray,
    "numpy.dtype": _PickledType,
    "multiarray._reconstruct": lambda *_: _PickledArray(),
    "multiarray.scalar": _number,
    "_codecs.encode": lambda text, _: text.encode("latin1"),  # bytes, as Python 3 writes them for Python 2
}


class _Refused(Exception):
    """The pickle asks for something that no array needs."""


class _ArrayUnpickler(pickle.Unpickler):
    """Builds stand-ins of arrays and builtin containers, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few allowed functions, in a wrapping that the file may spoil."""
        asked = f"{module}.{name}"
        allowed = _ALLOWED.get(re.sub(r"^numpy\._?core\.", "", asked))
        if allowed is None:
            raise _Refused(asked)
        return lambda *arguments: allowed(*arguments)


def read_arrays(path: Path) -> dict[str, Any]:
    """Read a pickled dict of arrays and lists; its keys may be bytes, as Python 2 wrote them."""
    content = read_bytes(path)
    try:
        value = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(value, dict):
            raise TypeError(f"it holds {type(value).__name__}, not a dict")
        return {_text(key): item.numpy() if isinstance(item, _PickledArray) else item for key, item in value.items()}
    except _Refused as error:
        raise FileFormatError(
            f"{path} asks to run {error}, which a file of images has no need of: it was not run; download it again."
        ) from None
    except Exception as error:  # a damaged pickle fails in every way
        raise damaged(path, error) from None
