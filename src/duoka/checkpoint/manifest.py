"""The list of a checkpoint's files with their sizes and digests, and the check of a folder against it.

Nothing of a checkpoint is used before this check. It opens no links, no pipes and nothing outside of the folder, reads
no more than was written down, and names the file that is not as it should be.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from duoka.checkpoint.disk import open_folder
from duoka.checkpoint.storage import damaged
from duoka.checkpoint.tree import parse_json
from duoka.errors import CheckpointDamaged, CheckpointOfOtherVersion

_FORMATS = "duoka checkpoint "
FORMAT = f"{_FORMATS}4"
MANIFEST, FACTS, STATE = "manifest.json", "facts.json", "state.safetensors"
_LARGEST_MANIFEST = 10_000
LARGEST_FACTS = 10_000_000
_CHUNK_BYTES = 1 << 24


class OtherVersion(ValueError):
    """Says which."""


@dataclass(frozen=True)
class Entry:
    """What one file must be."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: int
    files: dict[str, Entry]

    def as_bytes(self) -> bytes:
        """Always the same bytes for the same values: a manifest that is written in another way is not ours."""
        files = {name: {"bytes": entry.nbytes, "sha256": entry.sha256} for name, entry in sorted(self.files.items())}
        return (json.dumps({"format": FORMAT, "step": self.step, "files": files}, indent=1) + "\n").encode()


def parse_manifest(data: bytes) -> Manifest:
    """The manifest that these bytes are; a ValueError says why they are none."""
    try:
        known = parse_json(data.decode())
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    written = known.get("format") if isinstance(known, dict) else None
    if isinstance(written, str) and written.startswith(_FORMATS) and written != FORMAT:
        raise OtherVersion(written)
    if written != FORMAT:
        raise ValueError("it is not the manifest of a checkpoint")
    if known.keys() != {"format", "step", "files"} or not _is_count(known["step"]):
        raise ValueError("it does not say what a manifest says")
    manifest = Manifest(known["step"], _parse_files(known["files"]))
    if manifest.as_bytes() != data:
        raise ValueError("it is not written as Duoka writes it")
    return manifest


def _parse_files(files: Any) -> dict[str, Entry]:
    if not isinstance(files, dict):
        raise ValueError("it lists no files")
    for name, entry in files.items():
        if name not in (FACTS, STATE):
            raise ValueError(f"it names {name[:100]!r}, which is no file of a checkpoint")
        if not isinstance(entry, dict) or entry.keys() != {"bytes", "sha256"} or not _is_count(entry["bytes"]):
            raise ValueError(f"it does not say how long {name} is, and its SHA-256")
        if not isinstance(entry["sha256"], str) or len(entry["sha256"]) != 64:
            raise ValueError(f"what it says about {name} is no SHA-256")
    if files.keys() != {FACTS, STATE}:
        raise ValueError(f"it does not name {FACTS} and {STATE}")
    return {name: Entry(entry["bytes"], entry["sha256"]) for name, entry in files.items()}


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


@dataclass(frozen=True)
class Verified:
    """The open files of a checkpoint that is what was written. They stay what they are, whatever is renamed."""

    manifest: Manifest
    files: dict[str, BinaryIO]


@contextmanager
def open_verified(folder: str, step: int) -> Iterator[Verified]:
    """Open a checkpoint's files, once each of them has been read and is what its manifest says.

    A folder that is not there is a FileNotFoundError; everything else is a CheckpointDamaged that names the file.
    """
    with ExitStack() as stack:
        descriptor = _open_folder(folder)
        stack.callback(os.close, descriptor)
        _check_names(folder, descriptor)
        manifest = _read_manifest(folder, descriptor, stack)
        if manifest.step != step:
            raise damaged(os.path.join(folder, MANIFEST), f"it is the manifest of step {manifest.step}.")
        files = {name: _open(folder, descriptor, name, stack) for name in manifest.files}
        for name, entry in manifest.files.items():
            _check(os.path.join(folder, name), files[name], entry)
        yield Verified(manifest, files)


def signature(folder: str) -> tuple[Any, ...]:
    """Changes with every change of a checkpoint's files that goes through the file system."""
    descriptor = _open_folder(folder)
    try:
        return tuple(
            (name, *_signature(os.stat(name, dir_fd=descriptor, follow_symlinks=False)))
            for name in sorted(os.listdir(descriptor))
        )
    finally:
        os.close(descriptor)


def _signature(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _open_folder(folder: str) -> int:
    try:
        return open_folder(folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        is_other = error.errno in (errno.ELOOP, errno.ENOTDIR)
        raise damaged(folder, "it is not a folder." if is_other else f"{error.strerror}.") from None


def _check_names(folder: str, descriptor: int) -> None:
    names = set(os.listdir(descriptor))
    for name in (MANIFEST, FACTS, STATE):
        if name not in names:
            raise damaged(os.path.join(folder, name), "it is missing.")
    if more := sorted(names - {MANIFEST, FACTS, STATE}):
        raise damaged(os.path.join(folder, more[0]), "it does not belong to the checkpoint.")


def _open(folder: str, descriptor: int, name: str, stack: ExitStack) -> BinaryIO:
    """A regular file in this folder; a link or a pipe is neither followed nor waited for."""
    path = os.path.join(folder, name)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        opened = os.open(name, flags, dir_fd=descriptor)
    except OSError as error:
        why = "it is a link." if error.errno == errno.ELOOP else f"{error.strerror}."
        raise damaged(path, why) from None
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise damaged(path, "it is not a regular file.")
    return stack.enter_context(os.fdopen(opened, "rb"))


def _read_manifest(folder: str, descriptor: int, stack: ExitStack) -> Manifest:
    path = os.path.join(folder, MANIFEST)
    file = _open(folder, descriptor, MANIFEST, stack)
    try:
        data = file.read(_LARGEST_MANIFEST + 1)
        if len(data) > _LARGEST_MANIFEST:
            raise ValueError(f"it is longer than {_LARGEST_MANIFEST:,} bytes")
        return parse_manifest(data)
    except OtherVersion as error:
        raise CheckpointOfOtherVersion(
            f"{folder} was written by another version of Duoka.",
            why=f'its format is "{str(error)[:40]}", and this version reads "{FORMAT}".',
            do="resume with the version that wrote it, or begin a new run in another directory.",
        ) from None
    except (ValueError, OSError) as error:
        raise damaged(path, f"{error}.") from None


def _check(path: str, file: BinaryIO, entry: Entry) -> None:
    """Whether this is the file that was written. It can be read from its start again afterwards."""
    nbytes = os.fstat(file.fileno()).st_size
    if nbytes != entry.nbytes:
        raise damaged(path, f"it has {nbytes:,} bytes, and {entry.nbytes:,} were written.")
    digest = hashlib.sha256()
    try:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        file.seek(0)
    except OSError as error:
        raise damaged(path, f"{error.strerror}.") from None
    if digest.hexdigest() != entry.sha256:
        raise damaged(path, f"its SHA-256 is {digest.hexdigest()[:16]}..., and {entry.sha256[:16]}... was written.")


def explain(error: CheckpointDamaged) -> str:
    """What is wrong with a checkpoint, in one line."""
    return f"{error.what.rstrip('.')}: {error.why}".replace("\n", " ")
