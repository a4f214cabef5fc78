"""What lies in a folder of checkpoints, by its names."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass

from duoka.errors import CheckpointError

# The second one of a step is `step-00001200-2`: nothing is ever written over.
_CHECKPOINT = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})(?:-([2-9]|[1-9][0-9]{1,5}))?")
_LEFT_OVER = re.compile(r"\.step-[0-9-]{8,26}\.[0-9a-f]{12}\.(?:partial|old)")
LARGEST_STEP = 10**18 - 1


@dataclass(frozen=True, order=True)
class Place:
    """A folder that has the name of a checkpoint; whether it is one is not known yet. The newest is the largest."""

    step: int
    number: int
    name: str


def list_places(directory: str) -> list[Place]:
    """Oldest first. None in a directory that is not there."""
    found = ((name, _CHECKPOINT.fullmatch(name)) for name in _list(directory))
    return sorted(Place(int(match[1]), int(match[2] or 1), name) for name, match in found if match)


def list_left_overs(directory: str) -> list[str]:
    """The folders of checkpoints that were being written, or removed; links are none of ours."""
    names = (name for name in _list(directory) if _LEFT_OVER.fullmatch(name))
    paths = (os.path.join(directory, name) for name in names)
    return [path for path in paths if os.path.isdir(path) and not os.path.islink(path)]


def next_name(directory: str, step: int) -> str:
    """A name for a checkpoint of this step that is not taken.

    >>> next_name("/nowhere", 1200)
    'step-00001200'
    """
    numbers = [place.number for place in list_places(directory) if place.step == step]
    return f"step-{step:08}" + (f"-{max(numbers) + 1}" if numbers else "")


def partial_name(name: str) -> str:
    """Where it is until it is whole: no reader looks there, and who comes later may remove it."""
    return f".{name}.{secrets.token_hex(6)}.partial"


def old_name(name: str) -> str:
    """Where it is while it is being removed."""
    return f".{name}.{secrets.token_hex(6)}.old"


def aside_name(directory: str) -> str:
    """A name for a folder of checkpoints that no longer count."""
    taken, number = set(_list(directory)), 1
    while f"set-aside-{number}" in taken:
        number += 1
    return f"set-aside-{number}"


def _list(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read.", why=f"{error.strerror}.") from error
