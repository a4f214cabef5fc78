"""What changes files and folders, one call each: so that a test can watch a save, or let it fail at any moment."""

from __future__ import annotations

import os


class Disk:
    def make_folder(self, path: str) -> None:
        os.mkdir(path)

    def create(self, path: str) -> int:
        """A descriptor of a new file. One that is there already, or a link, is an error."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        """How many of the bytes were written: perhaps not all."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Returns when the file, or the folder's list of names, is on the disk."""
        os.fsync(descriptor)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def remove_file(self, folder: int, name: str) -> None:
        """A file, or a link, in the folder with this descriptor."""
        os.unlink(name, dir_fd=folder)

    def remove_folder(self, path: str) -> None:
        os.rmdir(path)


def open_folder(path: str) -> int:
    """A descriptor of a folder; a link to one is an error."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def sync_folder(disk: Disk, path: str) -> None:
    descriptor = open_folder(path)
    try:
        disk.sync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(disk: Disk, path: str) -> None:
    """This folder and those above it, each of them on the disk before anything is put into it."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folders(disk, parent)
    try:
        disk.make_folder(path)
    except FileExistsError:
        if not os.path.isdir(path):  # another worker may have been faster
            raise
    sync_folder(disk, parent)
