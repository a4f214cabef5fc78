"""Files that are there as a whole or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

# What a file system answers that cannot make files without a name.
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


def write_atomically(path: str, write: Callable[[BinaryIO], None]) -> None:
    """Let `write` fill a new file, and put it in the place of `path` once it is on the disk.

    Until then the old file stays as it is. The new one has no name while it is written, so that a killed process
    leaves nothing behind; a file system that cannot do this gets a hidden file, removed on every error. A link is
    followed, and the old file's permissions are kept.
    """
    path = os.path.realpath(path)
    mode = _mode_of(path)
    directory, name = os.path.split(path)
    hidden = os.path.join(directory, f".{name[:200]}.{secrets.token_hex(6)}.partial")
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor, is_named = _open_new(directory, hidden)
        try:
            with open(descriptor, "wb") as file:
                write(file)
                file.flush()
                if mode is not None:
                    os.fchmod(descriptor, mode)
                os.fsync(descriptor)
                if not is_named:
                    # With a folder given, links to descriptors are followed.
                    os.link(f"/proc/self/fd/{descriptor}", hidden, src_dir_fd=folder, follow_symlinks=True)
            os.replace(hidden, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(hidden)
            raise
        os.fsync(folder)
    finally:
        os.close(folder)


def _mode_of(path: str) -> int | None:
    """The permissions of the file that is to be replaced. Only files are: not folders, devices or pipes."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return stat.S_IMODE(status.st_mode)


def _open_new(directory: str, hidden: str) -> tuple[int, bool]:
    """A descriptor of a new file, and whether it has a name."""
    flags = os.O_RDWR | os.O_CLOEXEC
    unnamed = getattr(os, "O_TMPFILE", None)  # Linux
    if unnamed is not None and os.path.isdir("/proc/self/fd"):
        try:
            return os.open(directory, flags | unnamed, 0o666), False
        except OSError as error:
            if error.errno not in _NO_UNNAMED_FILES:
                raise
    return os.open(hidden, flags | os.O_CREAT | os.O_EXCL, 0o666), True
