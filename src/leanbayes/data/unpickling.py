"""Read pickled arrays without running code from the file, and with memory in proportion to its size.

Python's own unpickler allocates what an opcode asks for, and NumPy's classes trust their pickled state. So a small
interpreter reads the opcodes that arrays, lists and dicts need. Stand-ins replace NumPy's classes, and are validated.
"""

import codecs
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from leanbayes.data.reading import Array, damaged, read_bytes
from leanbayes.errors import FileFormatError

_BYTES_PER_BYTE, _SPARE_BYTES = 8, 1 << 20  # memory for each byte of the file (CIFAR needs 2 to 5), and for small files
_BYTES_PER_OPCODE = 100  # places on the stack, in the memo and in containers


def _text(value: Any) -> str:
    if not isinstance(value, (str, bytes)):
        raise TypeError(f"it has {type(value).__name__} instead of a name")
    return value.decode("latin1") if isinstance(value, bytes) else value


class _PickledType:
    """The dtype of a pickled array: kind and size, and a byte order in its state."""

    def __init__(self, name: Any) -> None:
        self.name, self.order = _text(name), "|"

    def build(self, state: Any) -> None:
        """Set the byte order."""
        self.order = _text(state[1])

    def numpy(self) -> np.dtype[Any]:
        """Return the dtype; raise an error unless it is one of plain numbers."""
        if not re.fullmatch("[<>=|][iuf][1248]", self.order + self.name):
            raise TypeError(f"it has an array of type {self.order}{self.name}")
        return np.dtype(self.order + self.name)


class _PickledArray:
    """An array, described by its pickled state."""

    def build(self, state: Any) -> None:
        """Set the shape, the dtype, the memory order and the bytes."""
        _, self.shape, self.type, self.fortran, self.content = state

    def numpy(self, spend: Callable[[int], None]) -> Array:
        """Return the array in the byte order of this machine."""
        if not isinstance(self.content, bytes) or not all(type(side) is int and side >= 0 for side in self.shape):
            raise TypeError("it has an array that is not made of bytes")
        spend(len(self.content))
        values = np.frombuffer(self.content, self.type.numpy()).reshape(self.shape, order="F" if self.fortran else "C")
        return values.astype(values.dtype.newbyteorder("="))


class _Global:
    """The name of a class or function, one of those that arrays need."""

    _ALLOWED = ("numpy.ndarray", "numpy.dtype", "multiarray._reconstruct", "multiarray.scalar", "_codecs.encode")

    def __init__(self, module: Any, name: Any) -> None:
        wanted = f"{_text(module)[:100]}.{_text(name)[:100]}"
        self.name = re.sub(r"^numpy\._?core\.", "", wanted)
        if self.name not in self._ALLOWED:
            raise _Refused(wanted)

    def call(self, arguments: Any, spend: Callable[[int], None]) -> Any:
        """Return what the function would return, with stand-ins for arrays and dtypes."""
        if self.name == "numpy.dtype":
            return _PickledType(arguments[0])
        if self.name == "multiarray.scalar":
            kind, content = arguments
            return np.frombuffer(content, kind.numpy())[0].item()
        if self.name == "_codecs.encode":  # bytes in the form that Python 3 writes for Python 2
            spend(len(arguments[0]))
            return arguments[0].encode("latin1")
        return _PickledArray()


class _Refused(Exception):
    """The pickle asks for a class or function that arrays do not need."""


class _Interpreter:
    """Run the opcodes of a pickle. Every object counts against a budget of memory that the size of the file sets."""

    def __init__(self, content: bytes) -> None:
        self.content, self.place = content, 0
        self.left = _BYTES_PER_BYTE * len(content) + _SPARE_BYTES
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def spend(self, count: int) -> None:
        """Count bytes of memory; raise an error if they are too many for the file."""
        self.left -= count
        if self.left < 0:
            raise ValueError(f"it needs more than {_BYTES_PER_BYTE} times its size in memory")

    def run(self) -> Any:
        """Return the pickled value."""
        while (opcode := self.take(1)) != b".":
            if opcode not in _OPCODES:
                raise ValueError(f"it has the opcode {opcode!r}, which arrays do not need")
            self.spend(_BYTES_PER_OPCODE)
            _OPCODES[opcode](self)
        return self.stack.pop()

    def take(self, count: int) -> bytes:
        """Return the next bytes of the file."""
        if not 0 <= count <= len(self.content) - self.place:
            raise ValueError("it is truncated")
        self.place += count
        return self.content[self.place - count : self.place]

    def check_frame(self, count: int) -> None:
        """Raise an error for a frame that is longer than the file."""
        if count > len(self.content) - self.place:
            raise ValueError("it is truncated")

    def line(self) -> bytes:
        """Return the bytes up to the end of the line."""
        return self.take(self.content.index(b"\n", self.place) + 1 - self.place)[:-1]

    def number(self, count: int, signed: bool = False) -> int:
        """Return an integer of some bytes."""
        return int.from_bytes(self.take(count), "little", signed=signed)

    def sized(self, count: int) -> bytes:
        """Return bytes after their length, which is a number of `count` bytes."""
        return self.take(self.number(count))

    def push(self, value: Any) -> None:
        """Put a new object on the stack."""
        self.spend(sys.getsizeof(value))
        self.stack.append(value)

    def after_mark(self) -> list[Any]:
        """Remove the objects after the last mark from the stack."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def last(self, count: int) -> list[Any]:
        """Remove some objects from the stack."""
        if count > len(self.stack) - (self.marks[-1] if self.marks else 0):
            raise ValueError("its stack is too short")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def memoize(self, index: int) -> None:
        """Remember the object on top of the stack."""
        self.memo[index] = self.stack[-1]

    def extend(self, items: list[Any]) -> None:
        """Append to the list on top of the stack."""
        if not isinstance(self.stack[-1], list):
            raise TypeError("it appends to something that is not a list")
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        """Add keys and values to the dict on top of the stack."""
        if not isinstance(self.stack[-1], dict):
            raise TypeError("it sets items of something that is not a dict")
        self.stack[-1].update({_text(key): value for key, value in zip(items[::2], items[1::2], strict=True)})

    def dict_of(self, items: list[Any]) -> None:
        """Put a dict with keys and values on the stack."""
        self.push({})
        self.update(items)

    def find(self, module: Any, name: Any) -> None:
        """Put a class or function on the stack."""
        self.push(_Global(module, name))

    def call(self) -> None:
        """Call a function."""
        function, arguments = self.last(2)
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            raise TypeError("it calls something that is not a function")
        self.push(function.call(arguments, self.spend))

    def build(self) -> None:
        """Set the state of a stand-in."""
        target, state = self.last(2)
        if not isinstance(target, (_PickledArray, _PickledType)) or not isinstance(state, tuple):
            raise TypeError("it sets the state of something that is not an array")
        target.build(state)
        self.stack.append(target)


def _integer(line: bytes) -> int | bool:
    return {b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line.removesuffix(b"L"))


def _quoted(line: bytes) -> bytes:
    """Return a text of Python 2, which is written with quotes and escapes."""
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[:1] != line[-1:]:
        raise ValueError("it has a text without quotes")
    return codecs.escape_decode(line[1:-1])[0]


def _utf8(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass")


_OPCODES: dict[bytes, Callable[[_Interpreter], Any]] = {
    b"\x80": lambda vm: vm.take(1),  # version
    b"\x95": lambda vm: vm.check_frame(vm.number(8)),
    b"N": lambda vm: vm.push(None),
    b"\x88": lambda vm: vm.push(True),
    b"\x89": lambda vm: vm.push(False),
    b"I": lambda vm: vm.push(_integer(vm.line())),
    b"L": lambda vm: vm.push(_integer(vm.line())),
    b"J": lambda vm: vm.push(vm.number(4, signed=True)),
    b"K": lambda vm: vm.push(vm.number(1)),
    b"M": lambda vm: vm.push(vm.number(2)),
    b"\x8a": lambda vm: vm.push(int.from_bytes(vm.sized(1), "little", signed=True)),
    b"F": lambda vm: vm.push(float(vm.line())),
    b"G": lambda vm: vm.push(struct.unpack(">d", vm.take(8))[0]),
    b"S": lambda vm: vm.push(_quoted(vm.line())),
    b"T": lambda vm: vm.push(vm.sized(4)),
    b"U": lambda vm: vm.push(vm.sized(1)),
    b"B": lambda vm: vm.push(vm.sized(4)),
    b"C": lambda vm: vm.push(vm.sized(1)),
    b"\x8e": lambda vm: vm.push(vm.sized(8)),
    b"V": lambda vm: vm.push(vm.line().decode("raw-unicode-escape")),
    b"X": lambda vm: vm.push(_utf8(vm.sized(4))),
    b"\x8c": lambda vm: vm.push(_utf8(vm.sized(1))),
    b"\x8d": lambda vm: vm.push(_utf8(vm.sized(8))),
    b"(": lambda vm: vm.marks.append(len(vm.stack)),
    b"]": lambda vm: vm.push([]),
    b"l": lambda vm: vm.push(vm.after_mark()),
    b"a": lambda vm: vm.extend(vm.last(1)),
    b"e": lambda vm: vm.extend(vm.after_mark()),
    b")": lambda vm: vm.push(()),
    b"t": lambda vm: vm.push(tuple(vm.after_mark())),
    b"\x85": lambda vm: vm.push(tuple(vm.last(1))),
    b"\x86": lambda vm: vm.push(tuple(vm.last(2))),
    b"\x87": lambda vm: vm.push(tuple(vm.last(3))),
    b"}": lambda vm: vm.push({}),
    b"d": lambda vm: vm.dict_of(vm.after_mark()),
    b"s": lambda vm: vm.update(vm.last(2)),
    b"u": lambda vm: vm.update(vm.after_mark()),
    b"p": lambda vm: vm.memoize(int(vm.line())),
    b"q": lambda vm: vm.memoize(vm.number(1)),
    b"r": lambda vm: vm.memoize(vm.number(4)),
    b"\x94": lambda vm: vm.memoize(len(vm.memo)),
    b"g": lambda vm: vm.stack.append(vm.memo[int(vm.line())]),
    b"h": lambda vm: vm.stack.append(vm.memo[vm.number(1)]),
    b"j": lambda vm: vm.stack.append(vm.memo[vm.number(4)]),
    b"c": lambda vm: vm.find(vm.line(), vm.line()),
    b"\x93": lambda vm: vm.find(*vm.last(2)),
    b"R": lambda vm: vm.call(),
    b"b": lambda vm: vm.build(),
}


def read_arrays(path: Path) -> dict[str, Any]:
    """Read a pickled dict of arrays and lists; its keys may be bytes, which Python 2 wrote."""
    interpreter = _Interpreter(read_bytes(path))
    try:
        value = interpreter.run()
        if not isinstance(value, dict):
            raise TypeError(f"it holds {type(value).__name__}, not a dict")
        return {
            key: item.numpy(interpreter.spend) if isinstance(item, _PickledArray) else item
            for key, item in value.items()
        }
    except _Refused as error:
        raise FileFormatError(
            f"{path} asks to run {error}, which image files do not need, so it was not run: download the file again."
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise damaged(path, error) from None
