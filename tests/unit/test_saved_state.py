"""States in files: everything comes back as it was, damage is noticed, and a file is whole or not there at all."""

from __future__ import annotations

import errno
import math
import os
import signal
import stat
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path

import numpy as np
import pytest

from duoka.checkpoint.atomic import write_atomically, write_atomically_by_name
from duoka.checkpoint.codec import NumpyCodec
from duoka.checkpoint.files import load_state, save_state
from duoka.errors import CheckpointError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from duoka.frameworks.torch.saving import TorchCodec  # noqa: E402

CODECS = [NumpyCodec(), TorchCodec()]


def save(path, state) -> None:
    save_state(path, state, CODECS)


def load(path, device=None):
    return load_state(path, CODECS, device)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "state.of anything"


def same(ours, theirs) -> bool:
    """Equal values of equal types, all the way down."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.equal(theirs)
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs or (ours != ours and theirs != theirs)


@pytest.mark.parametrize(
    "state",
    [
        {"epoch": 3, "best": 0.1 + 0.2, "name": '多卡 "quoted" \ud800 \0', "none": None, "flags": [True, False, 1, 0]},
        {0: "int", "0": "str", (1, "a"): "tuple", None: "none", 1.5: "float", "$tensor": "a dollar", "": "empty"},
        {"nan": math.nan, "inf": [math.inf, -math.inf], "zero": -0.0, "small": 5e-324, "complex": complex(1, math.inf)},
        {"big": 2**64, "bigger": -(10**5000), "edge": [2**53, 2**53 + 1]},
        {"nested": [[], {}, (), [[1, (2, {"x": ({},)})]]]},
        OrderedDict([("b", 1), ("a", 2)]),
        {"milestones": Counter({30: 1, 80: 2})},
        [1, 2, 3],
        "a text",
        {"dict": {"$float": "nan"}, "$list": 1},
        {
            "array": np.arange(6.0).reshape(2, 3),
            "number": np.float32(0.1),
            "flag": np.bool_(True),
            "c": np.array(1 - 2j),
        },
        {"swapped": np.arange(3, dtype="<i4"), "transposed": np.arange(6).reshape(2, 3).T, "empty": np.zeros((0, 2))},
    ],
)
def test_plain_values_come_back_as_they_were(path, state):
    save(path, state)
    assert same(load(path), state)
    assert math.copysign(1, load(path)["zero"]) == -1 if "zero" in state else True


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.tensor([True, False]),
        torch.randn(3, 4).to(torch.bfloat16),
        torch.randn(3).to(torch.float8_e4m3fn),
        torch.randn(5, 7).half(),
        torch.randn(4, 6).T,
        torch.randn(8)[::2],
        torch.randn(3, 1).expand(3, 5),
        torch.randn(2, 3, dtype=torch.complex128),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(2, dtype=torch.complex64).conj().imag,
        torch.zeros(0, 3),
        torch.tensor([0, 1, 65535], dtype=torch.uint16),
        torch.randint(0, 255, (5056,), dtype=torch.uint8),
        torch.tensor([math.nan, math.inf]),
        torch.randn(2, 3).to(memory_format=torch.contiguous_format),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=lambda tensor: f"{str(tensor.dtype)[6:]}{list(tensor.shape)}",
)
def test_tensors_come_back_bit_for_bit(path, tensor):
    save(path, {"x": tensor, "again": [torch.ones(1), tensor.clone()]})
    loaded = load(path)
    for ours in (loaded["x"], loaded["again"][1]):
        assert ours.dtype == tensor.dtype and ours.shape == tensor.shape and not ours.requires_grad
        torch.testing.assert_close(ours, tensor.resolve_conj().resolve_neg(), rtol=0, atol=0, equal_nan=True)


def test_every_common_state_dict_comes_back_and_can_be_used(path):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3, bias=False))
        model[2].weight = torch.nn.Parameter(model[0].weight.detach().T.clone())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
        schedulers = [
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
            torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        ]
        scaler = torch.amp.GradScaler("cpu")
        return model, optimizer, *schedulers, scaler

    def train(model, optimizer, *schedulers_and_scaler):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3) * torch.arange(2.0)[:, None]).square().sum().backward()
            optimizer.step()
            for scheduler in schedulers_and_scaler[:-1]:
                takes_loss = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*([1.0] if takes_loss else []))

    trained, fresh = make(), make()
    train(*trained)
    states = [thing.state_dict() for thing in trained]
    save(path, states)
    loaded = load(path)
    assert same(loaded, states)
    assert loaded[0]._metadata == states[0]._metadata
    for thing, state in zip(fresh, loaded, strict=True):
        thing.load_state_dict(state)
    train(*trained)
    train(*fresh)
    assert same([t.state_dict() for t in fresh], [t.state_dict() for t in trained])


def test_tied_tensors_are_stored_once_and_come_back_tied(path):
    weight = torch.nn.Parameter(torch.randn(100, 100))
    save(path, {"encoder": weight, "decoder": weight, "view": weight[:50], "alias": weight.detach()})
    loaded = load(path)
    assert path.stat().st_size < 4 * (100 * 100 + 50 * 100) + 2000
    assert loaded["encoder"].data_ptr() == loaded["decoder"].data_ptr() == loaded["alias"].data_ptr()
    assert loaded["view"].data_ptr() != loaded["encoder"].data_ptr()
    assert loaded["view"].equal(weight[:50])


def test_any_reader_of_safetensors_opens_the_file(path):
    from safetensors.torch import load_file

    save(
        path,
        {
            "model": {"0.weight": torch.ones(2, 3), "0.bias": torch.zeros(3, dtype=torch.bfloat16)},
            "list": [torch.ones(1)],
        },
    )
    found = load_file(path)
    assert sorted(found) == ["list.0", "model.0.bias", "model.0.weight"]
    assert found["model.0.weight"].equal(torch.ones(2, 3))


def test_names_that_would_be_the_same_are_told_apart(path):
    state = {
        "a": {"b": torch.zeros(1)},
        "a.b": torch.ones(1),
        "__metadata__": torch.full((1,), 2.0),
        "a.b#2": torch.full((1,), 3.0),
    }
    save(path, state)
    assert same(load(path), state)


def test_what_was_loaded_does_not_change_when_the_file_is_overwritten_in_place(path):
    save(path, {"x": torch.ones(1000)})
    loaded = load(path)["x"]
    with open(path, "r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert loaded.equal(torch.ones(1000))


def test_tensors_go_to_the_device_that_was_asked_for(path):
    save(path, {"x": torch.ones(2), "array": np.ones(2)})
    assert load(path, "meta")["x"].device.type == "meta"
    assert load(path, torch.device("cpu"))["x"].device.type == "cpu"


Point = namedtuple("Point", "x y")
CIRCLE: list = []
CIRCLE.append(CIRCLE)
DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (torch.eye(2).to_sparse(), r"state\['x'\]\[0\] is a sparse tensor \(sparse_coo\)(?s:.*)to_dense"),
        (torch.eye(2).to_sparse_csr(), "sparse_csr"),
        (torch.ones(2, device="meta"), "meta device"),
        (object(), r"state\['x'\]\[0\] is a object, which cannot be saved"),
        (torch.nn.Linear(1, 1), "is a Linear(?s:.*)state_dict"),
        (lambda: 1, "is a function"),
        ({1, 2}, "is a set"),
        (b"bytes", "is a bytes"),
        (defaultdict(list), "is a defaultdict"),
        (Point(1, 2), "is a Point"),
        ({torch.ones(1): 1}, "a key of .* is a Tensor"),
        (np.array(["a"]), "array of <U1"),
        (np.array([None]), "array of object"),
        (CIRCLE, "contains itself"),
        (DEEP, "too deeply"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_saved_is_named_and_the_old_file_stays(path, value, match):
    save(path, {"old": 1})
    with pytest.raises(CheckpointError, match=match):
        save(path, {"x": [value]})
    assert load(path) == {"old": 1}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_flipped_bit_anywhere_is_noticed(path):
    save(path, {"x": torch.arange(20.0), "epoch": 3, "best": 0.25})
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(CheckpointError, match=r"state\.of anything"):
            load(path)


def test_a_file_that_was_cut_off_is_noticed(path):
    save(path, {"x": torch.arange(20.0)})
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"state\.of anything"):
            load(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)


def test_files_of_others_are_told_from_damaged_ones(path):
    from safetensors.torch import save_file

    torch.save({"x": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=r"(?s)not written by strategy.save.*torch.load"):
        load(path)
    save_file({"x": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=r"(?s)not written by strategy.save.*load_file"):
        load(path)
    path.write_text("a text that is longer than eight bytes")
    with pytest.raises(CheckpointError, match=r"not written by strategy\.save"):
        load(path)


def test_a_path_that_cannot_be_read_or_written_is_an_error_of_ours(tmp_path):
    with pytest.raises(CheckpointError, match=r"(?s)missing cannot be read.*No such file"):
        load(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"(?s)make the directory .*nowhere first"):
        save(tmp_path / "nowhere" / "x", {})
    with pytest.raises(CheckpointError, match="directory"):
        save(tmp_path, {})
    with pytest.raises(CheckpointError, match="not a regular file"):
        save("/dev/null", {})
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    for path in (3, None, b"bytes", ""):
        with pytest.raises(CheckpointError, match="is no path"):
            save(path, {})
    with pytest.raises(CheckpointError, match="nothing to save"):
        save(tmp_path / "x", None)


# Writing as a whole or not at all.


def test_links_are_followed_and_permissions_kept(tmp_path):
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "file"
    target.write_text("old")
    target.chmod(0o640)
    (tmp_path / "link").symlink_to(target)
    write_atomically(str(tmp_path / "link"), lambda file: file.write(b"new"))
    assert (tmp_path / "link").is_symlink() and target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_new_file_has_the_permissions_of_any_other(tmp_path):
    (tmp_path / "other").write_text("")
    write_atomically(str(tmp_path / "new"), lambda file: None)
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("can_be_unnamed", [True, False])
def test_an_error_half_way_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, can_be_unnamed):
    if not can_be_unnamed:
        monkeypatch.delattr(os, "O_TMPFILE")
    path = tmp_path / "file"
    path.write_text("old")

    def write(file):
        file.write(b"x" * 100_000)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_atomically(str(path), write)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
    write_atomically(str(path), lambda file: file.write(b"new"))
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_a_file_made_by_name_is_whole_or_not_there(tmp_path):
    path = tmp_path / "model.weights.h5"
    path.write_text("old")
    path.chmod(0o640)

    def fail(name):
        assert name.endswith(".weights.h5") and os.path.dirname(name) == str(tmp_path)
        Path(name).write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_atomically_by_name(str(path), fail)
    assert path.read_text() == "old" and os.listdir(tmp_path) == [path.name]
    assert write_atomically_by_name(str(path), lambda name: Path(name).write_text("newer")) == 5
    assert path.read_text() == "newer" and os.listdir(tmp_path) == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_folder_made_by_name_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "exported"

    def make(name, *, fails=False):
        Path(name, "inside").mkdir(parents=True)
        Path(name, "inside", "file").write_text("new")
        if fails:
            raise OSError(errno.ENOSPC, "No space left on device")

    for _ in range(2):
        write_atomically_by_name(str(path), make)
        (path / "more").write_text("")
    with pytest.raises(OSError, match="No space"):
        write_atomically_by_name(str(path), lambda name: make(name, fails=True))
    assert sorted(os.listdir(path)) == ["inside", "more"] and os.listdir(tmp_path) == ["exported"]
    assert (path / "inside" / "file").read_text() == "new"


def test_a_full_disk_is_an_error_that_says_so(tmp_path, monkeypatch):
    """/dev/full answers as a full disk does; the file is written there and must not take the old one's place."""
    path = tmp_path / "file"
    save(path, {"old": 1})
    open_file = os.open
    monkeypatch.setattr(
        "duoka.checkpoint.atomic._open_new", lambda directory, hidden: (open_file("/dev/full", os.O_WRONLY), True)
    )
    with pytest.raises(CheckpointError, match=r"(?s)could not be saved.*No space left.*untouched.*make room"):
        save(path, {"x": torch.ones(100_000)})
    assert load(path) == {"old": 1}


@pytest.mark.parametrize("last_call", ["fsync", "link"])
def test_a_process_killed_in_the_middle_leaves_the_old_file_whole(path, last_call):
    save(path, {"old": torch.ones(10)})
    new = torch.zeros(1_000_000)  # made here: PyTorch's threads do not survive a fork
    child = os.fork()
    if child == 0:
        setattr(os, last_call, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
        try:
            save(path, {"new": new})
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "it was not killed in the middle"
    assert load(path)["old"].equal(torch.ones(10))
    assert os.listdir(path.parent) == [path.name]
