"""One file with tensors and what belongs to them: the safetensors format, with a state's shape and a digest inside.

Any reader of safetensors opens it. It is written tensor after tensor, so that saving needs no second copy of a model
in memory, and read back only if its SHA-256 is right.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from duoka.checkpoint.tree import parse_json
from duoka.errors import CheckpointDamaged, CheckpointError

FORMAT = "duoka 1"
PART_FORMAT = "duoka part 1"  # without a digest of its own: the manifest beside it has one
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
_DIGEST_AT = _LENGTH.size + len('{"__metadata__":{"sha256":"')  # it comes first, so that its place is known


class StoredTensor(NamedTuple):
    """One tensor on its way into a file. A tuple: hundreds are made while training waits."""

    dtype: str  # as safetensors calls it: "F32"
    shape: tuple[int, ...]
    nbytes: int
    item_bytes: int
    read: Callable[[], Any]  # its bytes in order, as something with the buffer protocol; called once, when it is due


def write_storage(file: BinaryIO, tree: Any, tensors: dict[str, StoredTensor]) -> None:
    """A file that carries its own digest, of all that follows its first eight bytes."""
    parts = list_parts(tree, tensors, {"sha256": _NO_DIGEST, "format": FORMAT})
    file.write(next(parts))
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
        file.write(part)
    file.seek(_DIGEST_AT)
    file.write(digest.hexdigest().encode())


def list_parts(tree: Any, tensors: dict[str, StoredTensor], known: dict[str, str]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, in order and in pieces: the header's length, the header, the tensors."""
    text = json.dumps(tree, allow_nan=False, separators=(",", ":"))
    # Larger items first: then every tensor lies at a multiple of its item's size.
    names = sorted(tensors, key=lambda name: -tensors[name].item_bytes)
    head = _header(known | {"tree": text}, names, tensors)
    yield _LENGTH.pack(len(head))
    yield head
    for name in names:
        num_written = 0
        for chunk in _chunks(tensors[name].read()):
            yield chunk
            num_written += len(chunk)
        assert num_written == tensors[name].nbytes, f"{name}: {num_written} bytes instead of {tensors[name].nbytes}"


def _header(known: dict[str, str], names: Sequence[str], tensors: dict[str, StoredTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": known}
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
    known = _read_known(head, path, FORMAT)
    digest = str(known.get("sha256"))
    found = hashlib.sha256(head.replace(digest.encode(), _NO_DIGEST.encode(), 1))
    while chunk := file.read(_CHUNK_BYTES):
        found.update(chunk)
    if found.hexdigest() != digest:
        raise damaged(path, f"its SHA-256 is {found.hexdigest()[:16]}..., and {digest[:16]}... was written down.")
    return parse_json(known["tree"])


def read_part_tree(file: BinaryIO, path: str) -> Any:
    """The same of a file that is part of a checkpoint, and whose digest was found to be right already."""
    return parse_json(_read_known(_read_header(file, path), path, PART_FORMAT)["tree"])


def _read_header(file: BinaryIO, path: str) -> bytes:
    start = file.read(_LENGTH.size)
    if start.startswith(b"PK\x03\x04"):
        raise _foreign(path, "it looks like a file of torch.save.", "read it with torch.load(path, weights_only=True).")
    length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else -1
    if not 0 < length <= _LONGEST_HEADER:
        raise _foreign(path, "it does not begin like a safetensors file.")
    head = file.read(length)
    if len(head) < length:
        raise damaged(path, "it ends in its header.") if b'"sha256"' in head else _foreign(path, "it is too short.")
    return head


def _read_known(head: bytes, path: str, wanted: str) -> dict[str, str]:
    """What stands in the header of a file of ours beside the tensors; anything else is an error."""
    try:
        known = parse_json(head.decode()).get("__metadata__", {})
        found = known.get("format")
    except (ValueError, AttributeError, RecursionError):
        raise damaged(path, "its header cannot be read.") from None
    if found == PART_FORMAT != wanted:
        raise _foreign(path, "it is part of a checkpoint.", "resume from the folder of checkpoints that it lies in.")
    if found != wanted:
        do = "read it with safetensors, for example safetensors.torch.load_file(path)."
        raise _foreign(path, "it is a safetensors file of somebody else, or of another version.", do)
    return dict(known)


def damaged(path: str, why: str) -> CheckpointDamaged:
    return CheckpointDamaged(f"{path} is damaged.", why=why, do="use an older file, or a copy.")


def _foreign(
    path: str, why: str, do: str = "give the path of a file that strategy.save has written."
) -> CheckpointDamaged:
    return CheckpointDamaged(f"{path} was not written by strategy.save.", why=why, do=do)
