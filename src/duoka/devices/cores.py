"""The cores of a worker: its own, where the workers together take all there are."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# Whoever sets one of these has a plan of their own.
_PLACED_BY_USER = ("OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY")
_left: dict[int, set[int]] = {}  # all cores there were, by process, before it kept to its own


def keep_to_own_cores(worker: int, num_workers: int, threads: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Let this worker run on its own cores only. Says whether it does.

    A worker that is woken by another one is put beside it, and both then share a core until the kernel notices,
    milliseconds later, while the other core is idle. Where cores are left over, other runs may need them: then the
    kernel decides. Processes that are forked from here, such as those that load data, may run anywhere.
    """
    if not hasattr(os, "sched_setaffinity") or any(name in environ for name in _PLACED_BY_USER):
        return False
    everything = os.sched_getaffinity(0)
    if num_workers == 1 or num_workers * threads != len(everything):
        return False
    mine = own_cores(worker, threads, sorted(everything))
    os.sched_setaffinity(0, mine)
    _left[os.getpid()] = everything

    def leave() -> None:
        if os.sched_getaffinity(0) == mine:
            os.sched_setaffinity(0, everything)

    os.register_at_fork(after_in_child=leave)
    # PyTorch counts the cores of this process; its loaders are forked, and have all of them.
    warnings.filterwarnings("ignore", message="This DataLoader will create .* worker processes")
    return True


@contextmanager
def on_all_cores() -> Iterator[None]:
    """For this thread, and for good for those it starts meanwhile. Nothing where a worker has no cores of its own."""
    everything = _left.get(os.getpid())
    if everything is None:
        yield
        return
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, everything)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def count_all_cores() -> int:
    """Of this process before it kept to its own."""
    everything = _left.get(os.getpid())
    if everything is None:
        everything = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return len(everything)


def own_cores(worker: int, threads: int, cores: list[int]) -> set[int]:
    """
    >>> own_cores(1, threads=2, cores=[0, 1, 4, 5])
    {4, 5}
    """
    return set(cores[worker * threads : (worker + 1) * threads])
