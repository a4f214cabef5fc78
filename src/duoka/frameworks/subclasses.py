"""All classes below a class."""

from __future__ import annotations


def subclasses_of(kind: type) -> list[type]:
    """The class itself first."""
    found: dict[type, None] = {kind: None}
    below: type
    for below in kind.__subclasses__():
        found.update(dict.fromkeys(subclasses_of(below)))
    return list(found)
