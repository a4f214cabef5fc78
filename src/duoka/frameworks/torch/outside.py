"""Steps on batches of the user's own, outside of prepared loops: the mean over workers, each with rows of its own."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from duoka.collectives.collective import Collective
from duoka.errors import MismatchError
from duoka.frameworks.torch.loop import Loop
from duoka.frameworks.torch.note import Note, Notes, tell_story
from duoka.frameworks.torch.rounds import Round
from duoka.frameworks.torch.sparse import write_sparse
from duoka.frameworks.torch.tensors import as_bytes


class Outside:
    """One exchange for a step whose gradients came from no prepared loader."""

    def __init__(self, collective: Collective, loop: Loop, round: Round, parameters: Sequence[Any]) -> None:
        self._collective = collective
        self._loop = loop
        self._parameters = parameters
        self.round = round
        self._is_first = True

    def exchange(self, rates: Sequence[str]) -> Notes | None:
        """Put the mean over workers where the round shows it; None when a worker was lost."""
        if len(self._collective.replicas) > 1:
            raise _unprepared(f"{len(self._collective.replicas)} replicas run on this worker, and one batch came")
        replica, share = self._collective.replicas[0], 1 / self._collective.num_replicas
        round = self.round
        round.forget()
        round.taken = {n for n, parameter in enumerate(self._parameters) if parameter.grad is not None}
        exchange = round.open(f"of step {self._loop.batch}, outside of a prepared loop,")
        digest = self._write(replica, share)
        round.write_rest(replica, share)
        story = tell_story([], ["step"], rates)
        exchange.deposit(replica, Note(1.0, False, False, story, round.used_here(), digest).pack())
        if not exchange.commit():
            return None
        notes = Notes(exchange.notes, len(self._parameters), self._loop.step)
        if self._is_first and notes.are_alike:
            raise _unprepared("the first gradient is the same on all workers: they have loaded the same batch")
        self._is_first = False
        round.take_results(None)
        return notes

    def _write(self, replica: int, share: float) -> int:
        """Write this worker's gradients into its slot; the first time, with a digest of them."""
        digest = 0
        for index in sorted(self.round.taken):
            gradient, slot = self._parameters[index].grad, self.round.slots(replica)[index]
            if self._is_first:
                digest = zlib.crc32(as_bytes(gradient.to_dense()).cpu().numpy(), digest)
            if gradient.layout == torch.sparse_coo:
                write_sparse(gradient, share, slot, self.round.touched(replica, index))
            else:
                slot.copy_(gradient).mul_(share)
        return digest


def _unprepared(why: str) -> MismatchError:
    return MismatchError(
        "The model is prepared, but the batches that train it come from a loader that is not.",
        why=f"{why}.",
        do="pass the DataLoader to strategy.prepare too; without one, let each worker load rows of its own.",
    )
