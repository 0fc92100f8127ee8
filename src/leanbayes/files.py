"""Writing files whole: an older one is there until the new one is, whatever happens in between."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from leanbayes.errors import LeanBayesError

PART = ".part"  # the ending of what is not finished


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give an empty file to write to; when the block ends well, and it is on the disk, it takes the place of `path`."""
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}{PART}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = temporary.stat().st_mode
        yield temporary
        os.chmod(temporary, mode)  # whoever wrote it may have put a file of its own there, closed to others
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise LeanBayesError(
            f"Cannot write {target} ({error.strerror or error}): make room there, or choose a folder that exists and "
            "is writable; an older file there is intact."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
