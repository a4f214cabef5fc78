"""Batches with fewer rows than there are replicas: the last one of an epoch may be one, all of them are a mistake."""

from __future__ import annotations


def say_few_rows(num_rows: int, num_replicas: int) -> str | None:
    """One line on what becomes of an ordinary batch of so many rows, if that is not enough.

    >>> print(say_few_rows(3, 4))
    batches of 3 rows are split between 4 replicas: 1 has no rows and only waits; use a larger batch, or fewer replicas
    >>> print(say_few_rows(4, 4))
    None
    """
    num_empty = num_replicas - num_rows
    if num_empty <= 0:
        return None
    rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
    empty = "1 has no rows and only waits" if num_empty == 1 else f"{num_empty} have no rows and only wait"
    return (
        f"batches of {rows} are split between {num_replicas} replicas: {empty}; use a larger batch, or fewer replicas"
    )
