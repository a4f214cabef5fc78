"""The power goes off at any moment of a save: what was not synced is lost, or only some of it, in any order.

A save is recorded. Every beginning of the record is played to a disk that forgets; the loader looks at what is left.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duoka.checkpoint.codec import NumpyCodec
from duoka.checkpoint.disk import Disk
from duoka.checkpoint.store import Store
from duoka.errors import CheckpointDamaged

CODECS = [NumpyCodec()]


class RecordingDisk(Disk):
    """Does everything, and writes down what was done to which path."""

    def __init__(self) -> None:
        self.record: list[tuple[Any, ...]] = []

    def make_folder(self, path: str) -> None:
        self.record.append(("make_folder", path))
        super().make_folder(path)

    def create(self, path: str) -> int:
        self.record.append(("create", path))
        return super().create(path)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        self.record.append(("write", _path_of(descriptor), bytes(data)))
        return super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self.record.append(("sync", _path_of(descriptor)))
        super().sync(descriptor)

    def rename(self, old: str, new: str) -> None:
        self.record.append(("rename", old, new))
        super().rename(old, new)

    def remove_file(self, folder: int, name: str) -> None:
        self.record.append(("remove", os.path.join(_path_of(folder), name)))
        super().remove_file(folder, name)

    def remove_folder(self, path: str) -> None:
        self.record.append(("remove", path))
        super().remove_folder(path)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


@dataclass
class File:
    data: bytes = b""
    safe: bytes = b""

    def sync(self) -> None:
        self.safe = self.data

    def leave(self, path: Path, comes_through: Callable[[], bool]) -> None:
        path.write_bytes(self.data if comes_through() else self.safe)


@dataclass
class Folder:
    names: dict[str, Any] = field(default_factory=dict)
    safe: dict[str, Any] = field(default_factory=dict)
    changes: list[tuple[Any, ...]] = field(default_factory=list)  # that are not safe yet

    def change(self, *what: Any) -> None:
        self.changes.append(what)
        _apply(self.names, *what)

    def sync(self) -> None:
        self.safe, self.changes = dict(self.names), []

    def leave(self, path: Path, comes_through: Callable[[], bool]) -> None:
        names = dict(self.safe)
        for what in self.changes:
            if comes_through():
                _apply(names, *what)
        path.mkdir()
        for name, node in names.items():
            node.leave(path / name, comes_through)


def _apply(names: dict[str, Any], kind: str, name: str, other: Any = None) -> None:
    if kind == "put":
        names[name] = other
    elif kind == "remove":
        names.pop(name, None)
    elif name in names:
        names[other] = names.pop(name)


class ForgetfulDisk:
    def __init__(self, root: str) -> None:
        self.root, self.top = root, Folder()

    def play(self, kind: str, path: str, *rest: Any) -> None:
        parent, name = self.find(os.path.dirname(path)) if path != self.root else None, os.path.basename(path)
        if kind in ("make_folder", "create"):
            parent.change("put", name, Folder() if kind == "make_folder" else File())
        elif kind == "write":
            parent.names[name].data += rest[0]
        elif kind == "sync":
            self.find(path).sync()
        else:
            parent.change(kind, name, *map(os.path.basename, rest))

    def find(self, path: str) -> Any:
        node = self.top
        for name in Path(path).relative_to(self.root).parts:
            node = node.names[name]
        return node


def state_of(step: int) -> dict[str, Any]:
    return {"weights": np.full(100, step, np.float32), "moments": np.full(50, step, np.float64)}


def save(store: Store, step: int) -> None:
    store.save(step, {"step": step}, state_of(step), CODECS)


def record_saves(root: Path, last: int) -> list[list[tuple[Any, ...]]]:
    root.mkdir()
    disk, records = RecordingDisk(), []
    for step in range(1, last + 1):
        disk.record = []
        save(Store(root, keep=2, disk=disk), step)
        records.append(disk.record)
    return records


def look(disk: ForgetfulDisk, tmp_path: Path, comes_through: Callable[[], bool]) -> int:
    """What is loaded after the power has gone off now; it must be whole, and nothing may look damaged."""
    left = Path(tempfile.mkdtemp(dir=tmp_path), "left")
    disk.top.leave(left, comes_through)
    said: list[str] = []
    store = Store(left, say=said.append)
    found = store.newest(CODECS)
    assert said == [], said
    assert len([store.load(name, CODECS) for name in store.names()]) >= 2
    assert found.facts == {"step": found.step}
    assert all((found.state[name] == value).all() for name, value in state_of(found.step).items())
    return found.step


def play_all(tmp_path: Path, records: list[list[tuple[Any, ...]]], root: Path) -> None:
    """Play the last save, with the power going off after each operation, in several ways."""
    disk = ForgetfulDisk(str(root))
    for record in records[:-1]:
        for operation in record:
            disk.play(*operation)
    source = random.Random(6)
    ways: list[Callable[[], bool]] = [lambda: False, lambda: True] + [lambda: source.random() < 0.5] * 4
    previous = len(records) - 1
    for operation in records[-1]:
        disk.play(*operation)
        for way in ways:
            assert look(disk, tmp_path, way) in (previous, previous + 1)
    for way in ways:
        assert look(disk, tmp_path, way) == previous + 1, "the save had returned"


def test_without_power_at_any_moment_the_new_or_the_previous_checkpoint_is_left(tmp_path):
    records = record_saves(tmp_path / "real", 4)
    assert len(records[-1]) > 20 and sum(kind == "sync" for kind, *_ in records[-1]) == 6
    play_all(tmp_path, records, tmp_path / "real")


@pytest.mark.parametrize("number", range(6))
def test_each_of_the_syncs_is_needed(tmp_path, number):
    """Leave one out, and there is a moment at which something is lost: so the test above can fail."""
    records = record_saves(tmp_path / "real", 4)
    syncs = [place for place, (kind, *_) in enumerate(records[-1]) if kind == "sync"]
    del records[-1][syncs[number]]
    with pytest.raises((AssertionError, CheckpointDamaged)):
        play_all(tmp_path, records, tmp_path / "real")
