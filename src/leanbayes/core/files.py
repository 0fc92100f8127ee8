"""Files that appear complete or not at all, and a lock that one process at a time can hold."""

import contextlib
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from leanbayes.errors import LeanBayesError

if sys.platform != "win32":
    import fcntl

PART = ".part"  # the suffix of unfinished files


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty file to write to, and move it to `path` when the block ends without an error."""
    target = Path(path)
    if not target.name or "\0" in os.fspath(path):
        raise LeanBayesError(f"{os.fspath(path)!r} is not the name of a file: give one such as 'runs/model'.")
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}{PART}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = temporary.stat().st_mode
        yield temporary
        os.chmod(temporary, mode)  # the writer may have replaced it by a file that others cannot read
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise LeanBayesError(
            f"Cannot write {target} ({reason_of(error)}): free some disk space, or choose a folder that exists "
            "and is writable; an older file there is unchanged."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def remove_parts(folder: Path, names: Iterable[str]) -> None:
    """Remove the unfinished files of these names that a killed process left in a folder, and no others."""
    ours = re.compile(rf"({'|'.join(map(re.escape, names))})\.[0-9a-f]{{8}}{re.escape(PART)}")
    for path in folder.glob(f"*{PART}"):
        if ours.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def system_error(error: BaseException) -> OSError | None:
    """Return the error of the system that another error was raised for, or None."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found


def reason_of(error: OSError) -> str:
    """Return the reason that the system gives, such as "No space left on device"."""
    number = re.search(r"\(os error (\d+)\)", str(error))  # as safetensors writes it
    return error.strerror or (os.strerror(int(number[1])) if number else str(error))


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure, if the system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -- locks ------------------------------------------------------------------------------------------------------------


class LockedError(LeanBayesError):
    """Raised if a file is locked.

    Attributes:
        process: The id of the process that holds the lock, or None if it is unknown.
    """

    def __init__(self, message: str, process: int | None = None) -> None:
        super().__init__(message)
        self.process = process


_held: set[int] = set()  # the descriptors of the locks that this process holds


def _close_locks_of_the_parent() -> None:
    """Close the descriptors that a forked process inherits, which would hold the locks after its parent's end."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_locks_of_the_parent)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created for this and removed afterwards.

    The system releases the lock when the process ends, however it ends. Windows and some network drives do not have
    such locks. There the block runs without one.
    """
    descriptor = _acquire(path)
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:  # not in a forked process, which has closed it
            with contextlib.suppress(OSError):
                path.unlink()  # before the lock is released: the file may be that of the next process then
            _held.discard(descriptor)
            os.close(descriptor)


def _acquire(path: Path) -> int:
    """Create and lock a file, write the id of this process to it, and return its descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor)
            if _has_name(descriptor, path):
                with contextlib.suppress(OSError):  # the id is only for the message of the next process
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, str(os.getpid()).encode())
                return descriptor
        except BlockingIOError:
            text = os.read(descriptor, 20)
            os.close(descriptor)
            raise LockedError(f"{path} is locked.", int(text) if text.isdigit() else None) from None
        os.close(descriptor)  # another process has removed it between the two calls: try again


def _lock(descriptor: int) -> None:
    if sys.platform != "win32":
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks
            pass


def _has_name(descriptor: int, path: Path) -> bool:
    """Whether this open file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
