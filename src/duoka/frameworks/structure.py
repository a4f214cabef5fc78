"""Models that workers have built differently: the first difference, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from duoka.collectives.collective import Collective
from duoka.errors import MismatchError


def raise_difference(lines: Sequence[str], collective: Collective, compared: Callable[[str], str] = str) -> None:
    """Called by all workers once they know that their models differ; `lines` describe this worker's, a tensor each.

    `compared` gives the part of a line that has to be the same: names may differ where nobody uses them.
    """
    text = np.frombuffer("\n".join(lines).encode(), np.uint8)
    gathered = collective.all_gather([text] * len(collective.replicas))
    first, *others = [bytes(part).decode().split("\n") for part in gathered]
    workers = [collective.placement.owner(replica) for replica in range(len(gathered))]
    for worker, other in zip(workers[1:], others, strict=True):
        if difference := _find_difference(first, other, workers[0], worker, compared):
            raise MismatchError(
                f"The workers built different models: {difference}.",
                why="the script made choices that differ between workers.",
                do="build the model from the same arguments on every worker.",
            )


def _find_difference(
    first: Sequence[str], other: Sequence[str], first_worker: int, worker: int, compared: Callable[[str], str]
) -> str | None:
    for ours, theirs in zip(first, other, strict=False):
        if compared(ours) != compared(theirs):
            return f"{ours!r} on worker {first_worker}, {theirs!r} on worker {worker}"
    if len(first) != len(other):
        return f"{len(first)} tensors on worker {first_worker}, {len(other)} on worker {worker}"
    return None
