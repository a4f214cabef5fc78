"""Files that are there as a whole or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, TypeVar

Result = TypeVar("Result")

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


def write_atomically_by_name(path: str, write: Callable[[str], Result]) -> Result:
    """The same, where `write` wants the name of a file, or of a folder, to make; it gets one beside `path`.

    The name has the same endings, which say what kind of file it is. A killed process leaves it behind. A folder takes
    the place of an old one in two steps: between them neither is there.
    """
    path = os.path.realpath(path)
    directory, name = os.path.split(path)
    partial = os.path.join(directory, f".{secrets.token_hex(6)}.partial-{name}")
    try:
        result = write(partial)
        if os.path.isdir(partial):
            _put_folder(partial, path)
        else:
            mode = _mode_of(path)
            if mode is not None:
                os.chmod(partial, mode)
            _flush(partial)
            os.replace(partial, path)
        _flush(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            os.unlink(partial)
        raise
    return result


def _put_folder(partial: str, path: str) -> None:
    for folder, _, names in os.walk(partial):
        for name in names:
            _flush(os.path.join(folder, name))
        _flush(folder)
    if not os.path.isdir(path):
        os.rename(partial, path)
        return
    directory, name = os.path.split(path)
    old = os.path.join(directory, f".{secrets.token_hex(6)}.old-{name}")
    os.rename(path, old)
    os.rename(partial, path)
    shutil.rmtree(old, ignore_errors=True)


def _flush(path: str) -> None:
    """Until it is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
