"""Tables by hand: importing rich would double the time a small command takes."""

from __future__ import annotations

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """
    >>> align([("name", "device"), ("kernel", "cpu:0")])
    ['name    device', 'kernel  cpu:0']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
