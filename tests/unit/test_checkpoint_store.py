"""A folder of checkpoints: what was saved comes back, damage is named and skipped, and the rest stays as it was."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import shutil
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from duoka.checkpoint.codec import NumpyCodec
from duoka.checkpoint.disk import Disk
from duoka.checkpoint.store import Store
from duoka.checkpoint.writer import BackgroundWriter, Receipt
from duoka.errors import CheckpointDamaged, CheckpointError, DeadlineExceeded

CODECS = [NumpyCodec()]
FILES = ["facts.json", "manifest.json", "state.safetensors"]


def state_of(step: int) -> dict:
    """A state that says of which step it is, everywhere."""
    return {
        "weights": np.full((50, 40), step, np.float32),
        "moments": [np.full(7, step, np.int64)],
        "lr": step / 4,
    }


def facts_of(step: int) -> dict:
    return {"step": step, "position": {"epoch": 0, "batch": step}, "replicas": 4, "best": float("inf")}


def save(store: Store, *steps: int) -> None:
    for step in steps:
        store.save(step, facts_of(step), state_of(step), CODECS)


def step_in(found) -> int:
    """Of which step a checkpoint is, if all of it is of the same."""
    step = found.step
    assert found.facts == facts_of(step)
    assert (found.state["weights"] == np.full((50, 40), step, np.float32)).all()
    assert (found.state["moments"][0] == step).all() and found.state["lr"] == step / 4
    return step


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path, said) -> Store:
    return Store(tmp_path / "checkpoints", say=said.append, deadline_s=5)


def folder(store: Store, step: int) -> Path:
    return Path(store.directory, f"step-{step:08}")


# Saving and loading.


def test_what_was_saved_comes_back(store, said):
    path = store.save(1200, facts_of(1200), state_of(1200), CODECS)
    assert path == str(folder(store, 1200)) and sorted(os.listdir(path)) == FILES
    found = store.newest(CODECS)
    assert (step_in(found), found.name, found.path) == (1200, "step-00001200", path)
    assert said == []


def test_the_manifest_can_be_checked_by_hand(store):
    save(store, 3)
    manifest = json.loads((folder(store, 3) / "manifest.json").read_text())
    assert manifest["step"] == 3 and sorted(manifest["files"]) == ["facts.json", "state.safetensors"]
    for name, entry in manifest["files"].items():
        data = (folder(store, 3) / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert json.loads((folder(store, 3) / "facts.json").read_text())["replicas"] == 4


def test_a_folder_without_checkpoints_has_no_newest(store, said):
    assert store.newest(CODECS) is None and store.names() == []
    os.makedirs(store.directory)
    (Path(store.directory) / "notes.txt").write_text("mine")
    assert store.newest(CODECS) is None and said == []


def test_the_newest_is_that_of_the_largest_step_whatever_the_length_of_its_number(store):
    store = Store(store.directory, keep=None)
    save(store, 99_999_999, 100_000_000, 5)
    assert step_in(store.newest(CODECS)) == 100_000_000
    assert store.names() == ["step-00000005", "step-99999999", "step-100000000"]


def test_a_second_one_of_the_same_step_does_not_touch_the_first(store):
    save(store, 7)
    before = (folder(store, 7) / "state.safetensors").stat()
    store.save(7, {"try": 2}, {"x": np.ones(1)}, CODECS)
    assert store.names() == ["step-00000007", "step-00000007-2"]
    assert store.newest(CODECS).facts == {"try": 2}
    assert (folder(store, 7) / "state.safetensors").stat() == before
    assert step_in(store.load("step-00000007", CODECS)) == 7


def test_a_checkpoint_is_loaded_by_its_name(store):
    save(store, 1, 2)
    assert step_in(store.load("step-00000001", CODECS)) == 1
    with pytest.raises(CheckpointError, match="no checkpoint step-00000009"):
        store.load("step-00000009", CODECS)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        store.load("../step-00000001", CODECS)


def test_only_the_newest_are_kept(store):
    for step in range(1, 7):
        save(store, step)
        assert store.names() == [f"step-{n:08}" for n in range(max(1, step - 2), step + 1)]
    assert sorted(os.listdir(store.directory)) == store.names()


def test_the_newest_one_up_to_the_step_at_which_replicas_agreed_is_kept_as_well(store):
    for step in range(1, 9):
        store.save(step, facts_of(step) | {"agreed_step": step // 4 * 4 if step > 4 else 2}, state_of(step), CODECS)
    assert store.names() == [f"step-{n:08}" for n in (6, 7, 8)]
    store.save(12, facts_of(12) | {"agreed_step": 7}, state_of(12), CODECS)
    store.save(13, facts_of(13) | {"agreed_step": 7}, state_of(13), CODECS)
    store.save(14, facts_of(14) | {"agreed_step": 7}, state_of(14), CODECS)
    assert store.names() == [f"step-{n:08}" for n in (7, 12, 13, 14)]


@pytest.mark.parametrize("keep", [1, 0, -1, True, "3", 2.5])
def test_fewer_than_two_are_never_kept(tmp_path, keep):
    with pytest.raises(CheckpointError, match="keep 2 or more"):
        Store(tmp_path, keep=keep)


def test_a_run_that_starts_afresh_sets_older_checkpoints_aside(store):
    save(store, 10, 20, 30)
    aside = store.set_aside(above_step=10)
    assert store.names() == ["step-00000010"] and sorted(os.listdir(aside)) == ["step-00000020", "step-00000030"]
    assert step_in(Store(aside).newest(CODECS)) == 30
    assert store.set_aside(above_step=10) is None
    assert Path(store.set_aside()).name == "set-aside-2" and store.newest(CODECS) is None


@pytest.mark.parametrize(
    ("step", "facts", "state", "match"),
    [
        (-1, {}, {}, "no number of a step"),
        (True, {}, {}, "no number of a step"),
        (10**18, {}, {}, "no number of a step"),
        (1, {"x": np.ones(1)}, {}, "is a ndarray"),
        (1, [], {}, "dictionary with names"),
        (1, {}, {"f": lambda: 1}, "is a function"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(store, step, facts, state, match):
    with pytest.raises(CheckpointError, match=match):
        store.save(step, facts, state, CODECS)
    assert not os.path.exists(store.directory)


# Damage, and files that somebody else has made.


def reseal(path: Path, **changes: bytes) -> None:
    """Put other bytes into files of a checkpoint, and a manifest that fits them: what an attacker would do."""
    manifest = json.loads((path / "manifest.json").read_text())
    for name, data in changes.items():
        name = {"facts": "facts.json", "state": "state.safetensors"}[name]
        (path / name).write_bytes(data)
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def edit_manifest(path: Path, edit) -> None:
    text = (path / "manifest.json").read_text()
    changed = edit(text)
    assert changed != text, "the fault was not there"
    (path / "manifest.json").write_text(changed)


def rename_file(path: Path, new: str) -> None:
    """The manifest names another place, where the very same file is."""
    target = Path(os.path.join(path, new))
    shutil.copy(path / "state.safetensors", target)
    edit_manifest(path, lambda text: text.replace("state.safetensors", new))


def make_link(path: Path, name: str) -> None:
    elsewhere = path.parent / f"elsewhere-{name}"
    os.rename(path / name, elsewhere)
    (path / name).symlink_to(elsewhere)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("the pickle was run",)


def flip(path: Path, name: str, where: float) -> None:
    data = bytearray((path / name).read_bytes())
    data[int(where * (len(data) - 1))] ^= 16
    (path / name).write_bytes(data)


def header(entries: dict) -> bytes:
    head = json.dumps(entries).encode()
    return struct.pack("<Q", len(head)) + head


def part(tree: object, **tensors: object) -> bytes:
    """A safetensors file with any tree in it."""
    known = {"format": "duoka part 1", "tree": tree if isinstance(tree, str) else json.dumps(tree)}
    return header({"__metadata__": known, **tensors})


DAMAGE = {
    "a bit of the tensors": (lambda path: flip(path, "state.safetensors", 0.9), "state.safetensors", "SHA-256"),
    "a bit of the header": (lambda path: flip(path, "state.safetensors", 0.01), "state.safetensors", "SHA-256"),
    "a bit of the facts": (lambda path: flip(path, "facts.json", 0.5), "facts.json", "SHA-256"),
    "a bit of the manifest": (lambda path: flip(path, "manifest.json", 0.5), "", ""),
    "a file cut off": (lambda path: os.truncate(path / "state.safetensors", 5000), "state.safetensors", "5,000 bytes"),
    "an empty file": (lambda path: os.truncate(path / "facts.json", 0), "facts.json", "0 bytes"),
    "an empty manifest": (lambda path: os.truncate(path / "manifest.json", 0), "manifest.json", ""),
    "a longer file": (lambda path: os.truncate(path / "facts.json", 5000), "facts.json", "5,000 bytes"),
    "tensors of another step": (
        lambda path: shutil.copy(path.parent / "step-00000002/state.safetensors", path),
        "state.safetensors",
        "SHA-256",
    ),
    "facts of another step": (
        lambda path: shutil.copy(path.parent / "step-00000002/facts.json", path),
        "facts.json",
        "SHA-256",
    ),
    "all files of another step": (
        lambda path: shutil.copytree(path.parent / "step-00000002", path, dirs_exist_ok=True),
        "manifest.json",
        "manifest of step 2",
    ),
    "a file missing": (lambda path: os.unlink(path / "facts.json"), "facts.json", "missing"),
    "no manifest": (lambda path: os.unlink(path / "manifest.json"), "manifest.json", "missing"),
    "an empty folder": (lambda path: (shutil.rmtree(path), os.mkdir(path)), "manifest.json", "missing"),
    "one file more": (lambda path: (path / "x.py").write_text("1"), "x.py", "does not belong"),
    "a file in the folder's place": (lambda path: (shutil.rmtree(path), path.write_text("")), "", "not a folder"),
    "a link in the folder's place": (
        lambda path: (shutil.rmtree(path), path.symlink_to(path.parent / "step-00000002")),
        "",
        "not a folder",
    ),
    "a link for a file": (lambda path: make_link(path, "state.safetensors"), "state.safetensors", "a link"),
    "a link for the manifest": (lambda path: make_link(path, "manifest.json"), "manifest.json", "a link"),
    "a pipe for a file": (
        lambda path: (os.unlink(path / "facts.json"), os.mkfifo(path / "facts.json")),
        "facts.json",
        "not a regular file",
    ),
    "a folder for a file": (
        lambda path: (os.unlink(path / "facts.json"), os.mkdir(path / "facts.json")),
        "facts.json",
        "not a regular file",
    ),
    "a name that leads out": (lambda path: rename_file(path, "../state.safetensors"), "manifest.json", "'../state"),
    "an absolute name": (
        lambda path: edit_manifest(path, lambda text: text.replace("facts.json", "/etc/passwd")),
        "manifest.json",
        "'/etc/passwd'",
    ),
    "a key twice": (
        lambda path: edit_manifest(path, lambda text: text.replace('"step": 3', '"step": 2,\n "step": 3')),
        "manifest.json",
        "stands twice",
    ),
    "a manifest written in another way": (
        lambda path: edit_manifest(path, lambda text: text.replace("\n", "\n ")),
        "manifest.json",
        "as Duoka writes",
    ),
    "a manifest that is no UTF-8": (
        lambda path: (path / "manifest.json").write_bytes(b'{"format": "\xff\xfe"}'),
        "manifest.json",
        "UTF-8",
    ),
    "a manifest without end": (
        lambda path: os.truncate(path / "manifest.json", 1 << 40),
        "manifest.json",
        "longer than",
    ),
    "a deep manifest": (
        lambda path: (path / "manifest.json").write_text("[" * 9000),
        "manifest.json",
        "too deeply",
    ),
    "a negative size": (
        lambda path: edit_manifest(path, lambda text: text.replace('"bytes": ', '"bytes": -')),
        "manifest.json",
        "how long",
    ),
    "a manifest of a later version": (
        lambda path: edit_manifest(path, lambda text: text.replace("checkpoint 4", "checkpoint 5")),
        "",
        'its format is "duoka checkpoint 5"',
    ),
    "a pickle": (
        lambda path: (path / "state.safetensors").write_bytes(pickle.dumps(Bomb())),
        "state.safetensors",
        "bytes",
    ),
    # From here on the digests are right: somebody means it.
    "a pickle that is sealed": (
        lambda path: reseal(path, state=pickle.dumps(Bomb())),
        "state.safetensors",
        "not begin like a safetensors",
    ),
    "a file of torch.save": (
        lambda path: reseal(path, state=b"PK\x03\x04" + bytes(100)),
        "state.safetensors",
        "torch.save",
    ),
    "a huge header": (
        lambda path: reseal(path, state=struct.pack("<Q", 1 << 62) + b"{}"),
        "state.safetensors",
        "not begin like a safetensors",
    ),
    "a header longer than the file": (
        lambda path: reseal(path, state=struct.pack("<Q", 99_000_000) + b"{}"),
        "state.safetensors",
        "too short",
    ),
    "a deep header": (
        lambda path: reseal(path, state=struct.pack("<Q", 50_000) + b"[" * 50_000),
        "state.safetensors",
        "",
    ),
    "a header that is no UTF-8": (
        lambda path: reseal(path, state=struct.pack("<Q", 4) + b"\xff\xfe{}"),
        "state.safetensors",
        "header cannot be read",
    ),
    "a safetensors file of others": (
        lambda path: reseal(path, state=header({"__metadata__": {"format": "pt"}})),
        "state.safetensors",
        "somebody else",
    ),
    "metadata that is no object": (
        lambda path: reseal(path, state=header({"__metadata__": [1]})),
        "state.safetensors",
        "",
    ),
    "no tree": (
        lambda path: reseal(path, state=header({"__metadata__": {"format": "duoka part 1"}})),
        "state.safetensors",
        "",
    ),
    "a deep tree": (lambda path: reseal(path, state=part("[" * 90_000 + "]" * 90_000)), "state.safetensors", "deeply"),
    "a tree with a key twice": (
        lambda path: reseal(path, state=part('{"a": 1, "a": 2}')),
        "state.safetensors",
        "twice",
    ),
    "a tree with an unknown tag": (
        lambda path: reseal(path, state=part({"$call": "os"})),
        "state.safetensors",
        "$call",
    ),
    "a tensor that is not there": (
        lambda path: reseal(path, state=part({"$stored": {"name": "x", "kind": "numpy", "form": ""}})),
        "state.safetensors",
        "x",
    ),
    "a record of another shape": (lambda path: reseal(path, state=part({"$stored": [1]})), "state.safetensors", ""),
    "a tag of another type": (lambda path: reseal(path, state=part({"$int": [1]})), "state.safetensors", ""),
    "a list for a key": (lambda path: reseal(path, state=part({"$dict": [[[1], 1]]})), "state.safetensors", ""),
    "tensors beyond the end": (
        lambda path: reseal(
            path,
            state=part(
                {"$stored": {"name": "x", "kind": "numpy", "form": ""}},
                x={"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
            ),
        ),
        "state.safetensors",
        "",
    ),
    "facts that are a list": (lambda path: reseal(path, facts=b"[]"), "facts.json", "by name"),
    "facts with NaN": (lambda path: reseal(path, facts=b'{"x": NaN}'), "facts.json", "NaN"),
    "facts with a huge number": (lambda path: reseal(path, facts=b'{"x": 1e999}'), "facts.json", "too large"),
    "facts with a key twice": (lambda path: reseal(path, facts=b'{"x": 1, "x": 2}'), "facts.json", "twice"),
    "facts that are no UTF-8": (lambda path: reseal(path, facts=b'{"x": "\xff"}'), "facts.json", "utf-8"),
    "facts with a tensor": (lambda path: reseal(path, facts=b'{"x": {"$stored": {}}}'), "facts.json", "no tensors"),
    "facts too deep": (lambda path: reseal(path, facts=b"[" * 90_000 + b"]" * 90_000), "facts.json", "deeply"),
    "facts without end": (lambda path: reseal(path, facts=b" " * 10_000_001), "facts.json", "longer than"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_skipped_and_left_as_it_is(store, said, tmp_path, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)  # where the pickle would leave its trace
    strike, name, why = DAMAGE[damage]
    save(store, 1, 2, 3)
    strike(folder(store, 3))
    before = tree_of(tmp_path)
    assert step_in(store.newest(CODECS)) == 2
    (line,) = said
    assert os.path.join(folder(store, 3), name).rstrip("/") in line and why in line and "skipped" in line, line
    assert tree_of(tmp_path) == before, "reading has changed something"


def tree_of(path: Path) -> list:
    """Everything below a folder, with what is in it."""

    def content(entry: Path):
        status = entry.lstat()
        return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns

    return sorted((str(entry), content(entry)) for entry in path.rglob("*"))


def test_a_flipped_bit_anywhere_is_noticed(store):
    store = Store(store.directory, say=lambda line: None)
    store.save(1, {"a": 1}, {"x": np.arange(3.0)}, CODECS)
    store.save(2, {"a": 2}, {"x": np.arange(3.0)}, CODECS)
    for name in FILES:
        path = folder(store, 2) / name
        whole = path.read_bytes()
        for position in range(0, len(whole), 3):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ (1 << position % 8)]) + whole[position + 1 :])
            assert store.newest(CODECS).step == 1, f"byte {position} of {name}"
        path.write_bytes(whole)
    assert store.newest(CODECS).step == 2


def test_nothing_but_damaged_ones_is_an_error_of_its_own(store, said):
    save(store, 1, 2)
    flip(folder(store, 1), "facts.json", 0.5)
    os.unlink(folder(store, 2) / "manifest.json")
    with pytest.raises(CheckpointDamaged, match=r"(?s)None of the checkpoints in .*facts\.json is damaged.*move them"):
        store.newest(CODECS)
    assert len(said) == 2 and CheckpointDamaged.exit_code not in (0, 1)
    assert len(store.names()) == 2


def test_a_framework_that_is_not_imported_is_not_damage(store):
    save(store, 1, 2)
    with pytest.raises(CheckpointError, match="tensors of numpy") as caught:
        store.newest([])
    assert not isinstance(caught.value, CheckpointDamaged)


def test_damaged_ones_do_not_count_and_are_never_removed(store, said):
    save(store, 1, 2, 3)
    flip(folder(store, 3), "state.safetensors", 0.9)
    flip(folder(store, 2), "state.safetensors", 0.9)
    save(store, 4, 5)
    assert store.names() == [f"step-{n:08}" for n in (1, 2, 3, 4, 5)]  # three that are whole
    save(store, 6)
    assert store.names() == [f"step-{n:08}" for n in (2, 3, 4, 5, 6)]
    assert len(said) == 2 and all("not counted" in line for line in said)


def test_another_process_counts_only_what_it_has_verified_itself(store, said):
    save(store, 1, 2, 3)
    flip(folder(store, 3), "state.safetensors", 0.9)
    save(Store(store.directory, say=said.append), 4)
    assert store.names() == [f"step-{n:08}" for n in (1, 2, 3, 4)]
    assert len(said) == 1 and "step-00000003" in said[0]


def test_a_save_with_a_lower_step_stays(store):
    save(store, 10, 20, 30, 5)
    assert store.names() == ["step-00000005", "step-00000020", "step-00000030"]


def test_a_directory_that_cannot_be_one_is_an_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="Not a directory"):
        Store(tmp_path / "file").newest(CODECS)
    with pytest.raises(CheckpointError, match="could not be saved"):
        save(Store(tmp_path / "file" / "below"), 1)
    assert (tmp_path / "file").read_text() == "mine"


# Disks that do not do what they should.


class FailingDisk(Disk):
    """Every call is counted, and those from `first` on fail, as long as `is_broken` says so."""

    def __init__(self, first: int, error: int, is_broken=lambda number: True) -> None:
        self.count, self.first, self.error, self.is_broken = 0, first, error, is_broken

    def __getattribute__(self, name: str):
        found = object.__getattribute__(self, name)
        if name not in Disk.__dict__ or name.startswith("_"):
            return found

        def call(*args):
            number, self.count = self.count, self.count + 1
            if number >= self.first and self.is_broken(number):
                raise OSError(self.error, os.strerror(self.error))
            return found(*args)

        return call


@pytest.mark.parametrize(("error", "stays"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_an_error_at_any_operation_leaves_the_older_ones_and_the_next_save_works(tmp_path, error, stays):
    calm = FailingDisk(10**9, error)
    for step in (1, 2, 3, 4):
        before, calm.count = calm.count, 0
        save(Store(tmp_path / "calm", disk=calm), step)
    num_operations = calm.count
    assert num_operations > before > 15
    for number in range(num_operations):
        said: list[str] = []
        directory = tmp_path / f"{number}"
        store = Store(directory, say=said.append)
        save(store, 1, 2, 3)
        disk = FailingDisk(number, error, lambda n, number=number: stays or n == number)
        try:
            save(Store(directory, say=said.append, disk=disk), 4)
            assert store.names()[-1] == "step-00000004"  # it was only in removing the oldest
        except CheckpointError as failure:
            assert os.strerror(error) in str(failure) and "older checkpoints are as they were" in str(failure)
            assert store.names()[:3] == [f"step-{n:08}" for n in (1, 2, 3)]
        assert disk.count > number, "nothing has failed"
        assert [step_in(store.load(name, CODECS)) for name in store.names()][-2:] in ([2, 3], [3, 4])
        save(store, 5)
        assert step_in(store.newest(CODECS)) == 5 and sorted(os.listdir(directory)) == store.names()


def test_what_is_read_back_differently_is_not_saved(tmp_path, said):
    class LyingDisk(Disk):
        def write(self, descriptor, data):
            changed = bytearray(data)
            changed[-1] ^= 1
            return super().write(descriptor, bytes(changed))

    save(Store(tmp_path), 1)
    with pytest.raises(CheckpointError, match=r"(?s)could not be saved.*what is read back is not what was written"):
        save(Store(tmp_path, disk=LyingDisk()), 2)
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_a_disk_may_take_a_few_bytes_at_a_time(tmp_path):
    class ShortDisk(Disk):
        def write(self, descriptor, data):
            return super().write(descriptor, memoryview(data)[:1000])

    save(Store(tmp_path, disk=ShortDisk()), 1)
    assert step_in(Store(tmp_path).newest(CODECS)) == 1


def test_only_folders_of_ours_are_cleaned_up(store):
    save(store, 1)
    root = Path(store.directory)
    names = {
        "ours": ".step-00000002.0123456789ab.partial",
        "removed": ".step-00000002-3.0123456789ab.old",
        "with more": ".step-00000003.0123456789ab.partial",
        "a link": ".step-00000004.0123456789ab.partial",
        "a file": ".step-00000005.0123456789ab.partial",
        "another's": ".step-00000006.tmp",
    }
    elsewhere = root.parent / "elsewhere"
    for path in (elsewhere, *(root / names[kind] for kind in ("ours", "removed", "with more", "another's"))):
        path.mkdir()
        (path / "facts.json").write_text("half")
    (root / names["with more"] / "thesis.tex").write_text("mine")
    (root / names["a link"]).symlink_to(elsewhere)
    (root / names["a file"]).write_text("mine")
    save(store, 7)
    assert set(os.listdir(root)) == {
        *store.names(),
        *(names[kind] for kind in names if kind not in ("ours", "removed")),
    }
    assert (root / names["with more"] / "thesis.tex").read_text() == "mine"
    assert (elsewhere / "facts.json").read_text() == "half"


def test_a_checkpoint_that_was_moved_and_linked_is_not_removed_through_the_link(store, said):
    save(store, 1, 2, 3)
    elsewhere = Path(store.directory).parent / "elsewhere"
    os.rename(folder(store, 1), elsewhere)
    folder(store, 1).symlink_to(elsewhere)
    save(store, 4, 5)
    assert sorted(os.listdir(elsewhere)) == FILES and folder(store, 1).is_symlink()
    assert len(said) == 1 and "step-00000001 is damaged: it is not a folder" in said[0]


def test_where_there_are_no_locks_nothing_is_cleaned_up(store, monkeypatch):
    def refuse(descriptor, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    (Path(store.directory) / ".step-00000002.0123456789ab.partial").mkdir(parents=True)
    save(store, 1, 2, 3, 4, 5)
    assert len(store.names()) == 3 and len(os.listdir(store.directory)) == 4
    assert step_in(store.newest(CODECS)) == 5


# Written in the background.


class SlowDisk(Disk):
    """Waits at every fsync until it is let go, and fails as it is told."""

    def __init__(self) -> None:
        self.go, self.error, self.syncs = threading.Event(), 0, 0
        self.go.set()

    def sync(self, descriptor: int) -> None:
        self.syncs += 1
        assert self.go.wait(20), "nobody has let the disk go"
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        super().sync(descriptor)


@pytest.fixture
def disk():
    disk = SlowDisk()
    yield disk
    disk.go.set()


@pytest.fixture
def writer(tmp_path, said, disk):
    store = Store(tmp_path / "checkpoints", say=said.append, disk=disk, deadline_s=5)
    writer = BackgroundWriter(store, CODECS)
    yield writer
    disk.go.set()
    writer.close(10)


def submit(writer: BackgroundWriter, step: int) -> Receipt:
    return writer.submit(step, facts_of(step), state_of(step))


def until(is_so) -> None:
    end = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_two_states_that_are_given_at_once_are_both_written(store, monkeypatch):
    """Before the thread that writes has begun."""
    begin, begun = threading.Thread.start, []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: begun.append(thread))
    writer = BackgroundWriter(store, CODECS)
    receipts = [submit(writer, 1), submit(writer, 2)]
    monkeypatch.undo()
    for thread in begun:
        begin(thread)
    writer.close(10)
    assert [receipt.is_saved for receipt in receipts] == [True, True]
    assert store.names() == ["step-00000001", "step-00000002"]


def test_what_is_written_is_the_state_of_the_moment_it_was_given(writer, disk):
    disk.go.clear()
    state, facts = state_of(3), facts_of(3)
    receipt = writer.submit(3, facts, state)
    assert receipt.stall_s > 0 and not receipt.is_saved
    state["weights"][:], state["moments"][0][:], state["lr"] = 9, 9, 9
    state["more"], facts["more"] = 1, 1
    disk.go.set()
    writer.wait(10)
    assert step_in(writer.store.newest(CODECS)) == 3
    assert writer.failure is None and writer.saved_step == 3 and receipt.is_saved


def test_training_never_waits_for_the_disk_and_the_newest_state_is_written(writer, disk, said):
    disk.go.clear()
    submit(writer, 1)
    until(lambda: disk.syncs)  # it is being written
    receipts = [submit(writer, step) for step in (2, 3, 4)]
    disk.go.set()
    writer.wait(10)
    assert [receipt.is_saved for receipt in receipts] == [receipt.failure is None for receipt in receipts]
    assert [receipt.is_saved for receipt in receipts] == [False, False, True]
    assert writer.store.names() == ["step-00000001", "step-00000004"]
    assert step_in(writer.store.newest(CODECS)) == 4 and step_in(writer.store.load("step-00000001", CODECS)) == 1
    assert [line.partition(":")[0] for line in said] == [
        "the checkpoint of step 2 is not written, that of step 3 takes its place",
        "the checkpoint of step 3 is not written, that of step 4 takes its place",
    ]


def test_a_disk_that_does_not_answer_is_waited_for_until_the_deadline(writer, disk):
    disk.go.clear()
    submit(writer, 1)
    with pytest.raises(DeadlineExceeded, match=r"(?s)checkpoint of step 1 is not on the disk after 0\.1 s"):
        writer.wait(0.1)
    disk.go.set()
    writer.wait(10)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_save_that_fails_is_said_and_the_next_one_is_tried(writer, disk, said, error):
    submit(writer, 1)
    writer.wait(10)
    before = tree_of(Path(writer.store.directory))
    disk.error = error
    for step in (2, 3):
        receipt = submit(writer, step)
        writer.wait(10)
        assert not receipt.is_saved and receipt.failure is writer.failure
        assert f"step {step} was not saved" in said[-1] and os.strerror(error) in said[-1] and "WARNING" in said[-1]
        assert "Training goes on" in said[-1] and isinstance(writer.failure, CheckpointError)
        assert tree_of(Path(writer.store.directory)) == before
    disk.error = 0
    submit(writer, 4)
    writer.wait(10)
    assert writer.failure is None and step_in(writer.store.newest(CODECS)) == 4 and len(said) == 2


def test_a_state_that_cannot_be_saved_is_an_error_where_it_is_given(writer):
    with pytest.raises(CheckpointError, match="is a function"):
        writer.submit(1, {}, {"f": lambda: 1})
    submit(writer, 2)
    writer.wait(10)
    assert writer.saved_step == 2


def test_states_of_changing_size_are_copied_whole(writer):
    for step, size in enumerate([10, 100_000, 0, 3]):
        state = {
            "x": np.arange(size),
            "flags": np.arange(5) > 2,
            "half": np.arange(3, dtype=np.float16),
            "n": np.int8(1),
        }
        writer.submit(step, {}, state)
        writer.wait(10)
        found = writer.store.newest(CODECS)
        assert found.step == step and all((found.state[name] == value).all() for name, value in state.items())


def test_memory_that_is_not_there_is_said_and_training_goes_on(writer, said):
    huge = np.broadcast_to(np.float64(1), (1 << 45,))  # 256 TB that take no memory as they are

    class HugeCodec(NumpyCodec):
        def store(self, value, place):
            from duoka.checkpoint.storage import StoredTensor

            return StoredTensor("F64", value.shape, value.size * 8, 8, lambda: value), ""

    writer._codecs = [HugeCodec()]
    writer.submit(1, {}, {"x": huge})
    assert "no memory" in said[-1] and "step 1 was not saved" in said[-1]
    writer._codecs = CODECS
    submit(writer, 2)
    writer.wait(10)
    assert writer.saved_step == 2 and writer.failure is None


def test_memory_is_made_beforehand_and_used(writer):
    writer.reserve(state_of(1))
    until(lambda: len(writer._free) == 2)
    memory = writer._free[-1]._bytes
    assert len(memory) >= 50 * 40 * 4
    submit(writer, 1)
    writer.wait(10)
    assert any(room._bytes is memory for room in writer._free)


def test_a_forked_child_neither_saves_nor_waits(writer, disk):
    disk.go.clear()
    submit(writer, 1)
    until(lambda: disk.syncs)
    child = os.fork()
    if child == 0:
        try:
            writer.wait(1000)
            writer._at_exit()
            submit(writer, 2)
        except CheckpointError:
            os._exit(7)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    disk.go.set()
    writer.wait(10)
    assert step_in(writer.store.newest(CODECS)) == 1


def test_a_closed_writer_takes_nothing_and_its_thread_is_gone(writer):
    submit(writer, 1)
    writer.close(10)
    until(lambda: not writer._thread.is_alive())
    with pytest.raises(CheckpointError, match="closed"):
        submit(writer, 2)
