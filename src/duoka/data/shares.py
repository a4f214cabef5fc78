"""Who gets which rows of a global batch, with which weight. Pure functions of the sizes."""

from __future__ import annotations

STAND_IN_ROWS = 2  # BatchNorm refuses one


def share(num_rows: int, num_replicas: int, replica: int) -> range:
    """The rows of a global batch that a replica computes: contiguous, the first ones one row longer.

    >>> [len(share(10, 4, replica)) for replica in range(4)]
    [3, 3, 2, 2]
    """
    each, rest = divmod(num_rows, num_replicas)
    start = replica * each + min(replica, rest)
    return range(start, start + each + (replica < rest))


def rows_to_compute(num_rows: int, num_replicas: int, replica: int) -> range:
    """The rows a replica runs through the model: its share or, without one, a stand-in of real rows.

    What comes of a stand-in is left out of every sum; it keeps the loop bodies alike.
    """
    return share(num_rows, num_replicas, replica) or range(min(STAND_IN_ROWS, num_rows))
