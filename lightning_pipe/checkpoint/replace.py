"""Put a file or directory in the place of another, so that there always is a whole one.

The new one is written beside the old one, under a hidden name, and then changes places with it. A
process that is killed meanwhile leaves something under a hidden name, which the next write to the
same place removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

_EXCHANGE = 2  # RENAME_EXCHANGE of <linux/fs.h>
_HERE = -100  # AT_FDCWD of <fcntl.h>: relative paths are those of the working directory


def unfinished(path: Path) -> Path:
    """Where to write what will be put at ``path``.

    The hidden name does not contain the real one: ModelCheckpoint takes every file with "last" in
    its name for a last checkpoint.
    """
    return _beside(path, "unfinished")


def existing(path: Path) -> Path:
    """Where ``path`` is: elsewhere only if a replacement was interrupted halfway (see `put`)."""
    replaced = _beside(path, "replaced")
    return replaced if not os.path.lexists(path) and os.path.lexists(replaced) else path


def put(new: Path, path: Path) -> None:
    """Put a file or directory, written whole, in the place of what is there, if anything is.

    It is one step of the file system. Only where a directory is replaced (or replaces something)
    on a file system that cannot exchange (NFS, say) it is two steps: a process killed between them
    leaves the old one under a hidden name, where `existing` finds it.

    Args:
        new: What `unfinished` gave; it is gone afterwards, or left for the next write to remove.
        path: The place.

    Raises:
        OSError: It cannot be done; what was there is still there.
    """
    aside = _beside(path, "replaced")
    if not (os.path.lexists(path) and (_is_directory(new) or _is_directory(path))):
        os.replace(new, path)
    elif not _exchange(new, path):
        remove(aside)
        os.rename(path, aside)
        try:
            os.rename(new, path)
        except BaseException:
            os.rename(aside, path)
            raise
    _sync_directory(path.parent)
    remove_if_possible(new)
    remove_if_possible(aside)


def write_file(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file and wait until the disk has it. What a failed write leaves is removed.

    Raises:
        OSError: There is no room, or no permission.
    """
    try:
        with showing_system_errors(), path.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def showing_system_errors() -> Iterator[None]:
    """Raise what the system said (no room, say) where `torch.save` inside fails over that.

    It says something about a position in its archive instead.
    """
    handled = sys.exception()
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause not in (None, handled):
            if isinstance(cause, OSError):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        raise


def remove(path: Path) -> None:
    """Remove a file, a link or a directory, if it is there."""
    if _is_directory(path):
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_if_possible(path: Path) -> None:
    """Remove what is left of a write: the outcome does not depend on it."""
    with contextlib.suppress(OSError):
        remove(path)


def remove_replaced(path: Path) -> None:
    """Remove what a replacement that was interrupted has left, where `existing` looks."""
    remove(_beside(path, "replaced"))


def remove_directory(path: Path) -> None:
    """Remove a directory in one step, as far as anyone sees."""
    aside = _beside(path, "removed")
    remove(aside)
    os.rename(path, aside)
    remove(aside)


def _beside(path: Path, what: str) -> Path:
    name = hashlib.sha256(path.name.encode()).hexdigest()[:12]
    return path.with_name(f".{name}.{what}")


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths change places in one step; False where that is not possible."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    if not rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def _sync_directory(path: Path) -> None:
    """Let the new name be on the disk, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
