"""What a verified checkpoint holds. Whatever is wrong with it is damage, and the file is named."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from duoka.checkpoint.codec import Codec
from duoka.checkpoint.files import load_tensors, naming_errors
from duoka.checkpoint.manifest import FACTS, LARGEST_FACTS, STATE, Verified, open_verified
from duoka.checkpoint.storage import damaged, read_part_tree
from duoka.checkpoint.tree import parse_json, rebuild


@dataclass(frozen=True)
class Found:
    """A checkpoint that was verified, and what it holds."""

    step: int
    name: str
    path: str
    facts: dict[str, Any]
    state: Any


def load_folder(folder: str, step: int, codecs: Sequence[Codec], device: Any = None) -> Found:
    """Verify a checkpoint, and only then read it. A folder that is not there is a FileNotFoundError."""
    with open_verified(folder, step) as verified:
        facts = _read_facts(os.path.join(folder, FACTS), verified)
        state = _read_state(os.path.join(folder, STATE), verified, codecs, device)
    return Found(step, os.path.basename(folder), folder, facts, state)


def _read_facts(path: str, verified: Verified) -> dict[str, Any]:
    with _naming_damage(path):
        if verified.manifest.files[FACTS].nbytes > LARGEST_FACTS:
            raise ValueError(f"it is longer than {LARGEST_FACTS:,} bytes.")
        facts = rebuild(parse_json(verified.files[FACTS].read().decode()), _refuse_tensor)
        if type(facts) is not dict:
            raise ValueError("it holds no facts by name.")
        return facts


def _read_state(path: str, verified: Verified, codecs: Sequence[Codec], device: Any) -> Any:
    file = verified.files[STATE]
    with _naming_damage(path):
        return load_tensors(file, path, read_part_tree(file, path), codecs, device)


def _refuse_tensor(record: dict[str, Any]) -> Any:
    raise ValueError("facts hold no tensors.")


@contextmanager
def _naming_damage(path: str) -> Iterator[None]:
    with naming_errors(path):
        try:
            yield
        except OSError as error:
            raise damaged(path, f"{error.strerror or error}.") from error
