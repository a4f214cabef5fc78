"""The files of one checkpoint: written, made durable, and listed with their digests in a manifest that comes last."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable

from duoka.checkpoint.disk import Disk, open_folder, sync_folder
from duoka.checkpoint.manifest import FACTS, LARGEST_FACTS, MANIFEST, STATE, Entry, Manifest
from duoka.checkpoint.snapshot import Snapshot
from duoka.checkpoint.storage import PART_FORMAT, list_parts
from duoka.errors import CheckpointError


def fill_folder(disk: Disk, folder: str, snapshot: Snapshot) -> None:
    """Make this folder with the files of a checkpoint. When it returns, they are on the disk."""
    disk.make_folder(folder)
    parts = list_parts(snapshot.tree, snapshot.tensors, {"format": PART_FORMAT})
    files = {
        STATE: _write(disk, os.path.join(folder, STATE), parts),
        FACTS: _write(disk, os.path.join(folder, FACTS), [_write_facts(snapshot)]),
    }
    _write(disk, os.path.join(folder, MANIFEST), [Manifest(snapshot.step, files).as_bytes()])
    sync_folder(disk, folder)


def remove_folder(disk: Disk, folder: str) -> None:
    """Remove the files of a checkpoint and the folder. Anything else in it stays, and so does the folder then."""
    descriptor = open_folder(folder)
    try:
        for name in {MANIFEST, FACTS, STATE}.intersection(os.listdir(descriptor)):
            disk.remove_file(descriptor, name)
    finally:
        os.close(descriptor)
    disk.remove_folder(folder)


def _write_facts(snapshot: Snapshot) -> bytes:
    data = (json.dumps(snapshot.facts, allow_nan=False, indent=1) + "\n").encode()
    if len(data) > LARGEST_FACTS:
        raise CheckpointError(f"The facts of a checkpoint take {len(data):,} bytes; {LARGEST_FACTS:,} fit.")
    return data


def _write(disk: Disk, path: str, parts: Iterable[bytes | memoryview]) -> Entry:
    digest, nbytes = hashlib.sha256(), 0
    descriptor = disk.create(path)
    try:
        for part in parts:
            digest.update(part)
            _write_all(disk, descriptor, part)
            nbytes += len(part)
        disk.sync(descriptor)
    finally:
        os.close(descriptor)
    return Entry(nbytes, digest.hexdigest())


def _write_all(disk: Disk, descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[disk.write(descriptor, rest) :]
