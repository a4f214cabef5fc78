"""CUDA_VISIBLE_DEVICES, read as CUDA reads it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Visible:
    """The cards that are left, in CUDA's order: physical numbers, or names of MIG instances."""

    cards: tuple[int | str, ...]
    notes: tuple[str, ...] = ()


def select_visible(setting: str | None, uuids: Sequence[str | None]) -> Visible:
    """Which physical cards CUDA shows, given the UUIDs of all of them in order.

    CUDA has three rules that surprise: the first entry it cannot use ends the list, a card named
    twice empties it, and UUIDs may be cut short as long as only one card fits.

    >>> select_visible("3,0", [None] * 4).cards
    (3, 0)
    >>> select_visible("0,-1,1", [None] * 2).cards
    (0,)
    """
    if setting is None:
        return Visible(tuple(range(len(uuids))))
    entries = [entry.strip() for entry in setting.split(",")]
    cards: list[int | str] = []
    for entry in entries:
        card = _find_card(entry, uuids) if _style(entry) == _style(entries[0]) else None
        if card is None:
            return _report(setting, cards, uuids, _explain_end(entry))
        if card in cards:
            return _report(setting, [], uuids, f"{entry} names a card twice, and then CUDA shows none")
        cards.append(card)
    return _report(setting, cards, uuids, "")


def _find_card(entry: str, uuids: Sequence[str | None]) -> int | str | None:
    if entry.startswith("MIG-"):
        return entry
    if entry.startswith("GPU-"):
        matches = [index for index, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    number = re.match(r"[+-]?[0-9]{1,9}", entry)  # As CUDA does: "1abc" is 1.
    index = int(number[0]) if number else -1
    return index if 0 <= index < len(uuids) else None


def _style(entry: str) -> str:
    return entry[:4] if entry.startswith(("GPU-", "MIG-")) else "number"


def _explain_end(entry: str) -> str:
    if entry in ("", "-1"):
        return ""
    return f"{entry!r} is not one card here, and CUDA stops reading there"


def _report(setting: str, cards: list[int | str], uuids: Sequence[str | None], reason: str) -> Visible:
    notes = []
    num_hidden = len(uuids) - len({card for card in cards if isinstance(card, int)})
    if reason:
        notes.append(f"CUDA_VISIBLE_DEVICES={setting}: {reason}")
    if num_hidden and not any(isinstance(card, str) for card in cards):
        notes.append(f"CUDA_VISIBLE_DEVICES={setting} hides {num_hidden} of {len(uuids)} NVIDIA cards")
    return Visible(tuple(cards), tuple(notes))
