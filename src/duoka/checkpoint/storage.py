"""One file with tensors and what belongs to them: the safetensors format, with a state's shape and a digest inside.

Any reader of safetensors opens it. It is written tensor after tensor, so that saving needs no second copy of a model
in memory, and read back only if its SHA-256 is right.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from duoka.errors import CheckpointError

FORMAT = "duoka 1"
# What safetensors calls the types that NumPy and the frameworks name alike.
TYPE_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100_000_000  # what the safetensors library accepts
_CHUNK_BYTES = 1 << 24
_NO_DIGEST = "0" * 64


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on its way into a file."""

    dtype: str  # as safetensors calls it: "F32"
    shape: tuple[int, ...]
    nbytes: int
    item_bytes: int
    read: Callable[[], Any]  # its bytes in order, as something with the buffer protocol; called once, when it is due


def write_storage(file: BinaryIO, tree: Any, tensors: dict[str, StoredTensor]) -> None:
    text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
    # Larger items first: then every tensor lies at a multiple of its item's size.
    names = sorted(tensors, key=lambda name: -tensors[name].item_bytes)
    head = _header(text, names, tensors)
    digest = hashlib.sha256(head)
    file.write(_LENGTH.pack(len(head)) + head)
    for name in names:
        num_written = 0
        for chunk in _chunks(tensors[name].read()):
            digest.update(chunk)
            file.write(chunk)
            num_written += len(chunk)
        assert num_written == tensors[name].nbytes, f"{name}: {num_written} bytes instead of {tensors[name].nbytes}"
    file.seek(_LENGTH.size + head.index(_NO_DIGEST.encode()))
    file.write(digest.hexdigest().encode())


def _header(text: str, names: Sequence[str], tensors: dict[str, StoredTensor]) -> bytes:
    # The digest comes first: nothing before it can look like it.
    entries: dict[str, Any] = {"__metadata__": {"sha256": _NO_DIGEST, "format": FORMAT, "tree": text}}
    start = 0
    for name in names:
        tensor = tensors[name]
        end = start + tensor.nbytes
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    if len(head) > _LONGEST_HEADER:
        raise CheckpointError(
            f"What is not tensors in this state takes {len(head):,} bytes; {_LONGEST_HEADER:,} fit.",
            do="turn long lists of numbers into tensors.",
        )
    return head


def _chunks(data: Any) -> Iterator[memoryview]:
    view = memoryview(data)
    view = view.cast("B") if view.nbytes else memoryview(b"")
    for start in range(0, len(view), _CHUNK_BYTES):
        yield view[start : start + _CHUNK_BYTES]


def read_tree(file: BinaryIO, path: str) -> Any:
    """The shape of the saved state, once the whole file has been read and its digest is right."""
    head = _read_header(file, path)
    known = json.loads(head)["__metadata__"]
    digest = str(known.get("sha256"))
    found = hashlib.sha256(head.replace(digest.encode(), _NO_DIGEST.encode(), 1))
    while chunk := file.read(_CHUNK_BYTES):
        found.update(chunk)
    if found.hexdigest() != digest:
        raise damaged(path, f"its SHA-256 is {found.hexdigest()[:16]}..., and {digest[:16]}... was written down.")
    return json.loads(known["tree"], parse_constant=_refuse_constant)


def _read_header(file: BinaryIO, path: str) -> bytes:
    """The header of a file of ours; anything else is an error."""
    start = file.read(_LENGTH.size)
    if start.startswith(b"PK\x03\x04"):
        raise _foreign(path, "it looks like a file of torch.save.", "read it with torch.load(path, weights_only=True).")
    length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else -1
    if not 0 < length <= _LONGEST_HEADER:
        raise _foreign(path, "it does not begin like a safetensors file.")
    head = file.read(length)
    if len(head) < length:
        raise damaged(path, "it ends in its header.") if b'"sha256"' in head else _foreign(path, "it is too short.")
    try:
        known = json.loads(head).get("__metadata__", {})
    except (ValueError, AttributeError):
        raise damaged(path, "its header cannot be read.") from None
    if known.get("format") != FORMAT:
        do = "read it with safetensors, for example safetensors.torch.load_file(path)."
        raise _foreign(path, "it is a safetensors file of somebody else, or of another version.", do)
    return head


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def damaged(path: str, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged.", why=why, do="use an older file, or a copy.")


def _foreign(
    path: str, why: str, do: str = "give the path of a file that strategy.save has written."
) -> CheckpointError:
    return CheckpointError(f"{path} was not written by strategy.save.", why=why, do=do)
