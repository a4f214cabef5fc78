"""Function style or plain style: the first draw from a prepared loader, or the first call, decides for the run."""

from __future__ import annotations

from collections.abc import Callable

from duoka.collectives.collective import Collective
from duoka.errors import MismatchError

FUNCTION, PLAIN = "function", "plain"
_EXAMPLE = """train in function style, where a worker computes any number of replicas:
       def loss_of(x, y):
           return F.cross_entropy(model(x), y)
       for batch in strategy.batches(loader):
           optimizer.zero_grad()
           loss = strategy.backward(loss_of, batch)
           optimizer.step()"""


class Styles:
    def __init__(
        self,
        collective: Collective,
        begin_function: Callable[[], None],
        begin_plain: Callable[[], None],
        tell_once: Callable[..., None],
        *,
        is_synced: bool = False,
    ) -> None:
        self._collective, self._tell_once, self._is_synced = collective, tell_once, is_synced
        self._begin = {FUNCTION: begin_function, PLAIN: begin_plain}
        self.name = ""
        self.is_function = self.is_plain = self.is_known = False  # attributes: they are asked in every step

    def choose_function(self) -> None:
        """Called by `strategy.backward`, and where a pass over `strategy.batches` begins."""
        if self.is_function:
            return
        if self.is_plain:
            raise MismatchError(
                "strategy.backward or strategy.batches was called after a plain loop over a prepared loader.",
                why="the first loop over a prepared loader decides the style of a script. A plain loop, be it training"
                " or evaluation, sees the samples of one worker.",
                do="train by `for batch in strategy.batches(loader):` and strategy.backward everywhere. For an"
                " evaluation use strategy.evaluate(function, loader), or loop over a loader that is not prepared.",
            )
        if self._is_synced:
            self._refuse_shared_workers("sync_batchnorm=True needs", "use as many devices as replicas.")
        self._choose(FUNCTION, "strategy.backward runs the function once per replica")

    def choose_plain(self) -> None:
        """Called where a plain loop over a prepared loader begins."""
        if self.is_plain:
            return
        if self.is_function:
            raise MismatchError(
                "A plain loop over a prepared loader was begun in a script that trains by strategy.backward.",
                why="a plain loop sees the samples of one worker: its sums and means would be those of that worker.",
                do="for an evaluation use strategy.evaluate(function, loader), or loop over a loader that is not"
                " prepared: every worker then reads all of it. To train, write `for batch in"
                " strategy.batches(loader):`.",
            )
        self._refuse_shared_workers("A plain loop needs", _EXAMPLE)
        self._choose(PLAIN, "every worker runs the loop on its samples, and backward exchanges")

    def _choose(self, name: str, what: str) -> None:
        self.name, self.is_known = name, True
        self.is_function, self.is_plain = name == FUNCTION, name == PLAIN
        if self._collective.num_replicas > 1:
            self._tell_once(f"{name} style: {what}")
        self._begin[name]()

    def _refuse_shared_workers(self, what: str, do: str) -> None:
        num_replicas, num_workers = self._collective.num_replicas, len(self._collective.workers)
        if num_replicas > num_workers > 0 and num_replicas > 1:
            raise MismatchError(
                f"{what} one replica per worker, and there are {num_replicas} replicas on {num_workers}"
                f" worker{'' if num_workers == 1 else 's'}.",
                why="the loop body runs once on each worker.",
                do=do,
            )

    def refuse_number(self, call: str) -> None:
        """`strategy.sum`, `.mean` and `.gather` have no place in function style."""
        if self.is_function:
            raise MismatchError(
                f"strategy.{call} was called in a script that trains by strategy.backward.",
                why="code outside of the function has the numbers of the whole batch on every worker.",
                do="return it from the function: (loss, {'name': (sum, count)}), or strategy.rows(tensor).",
            )
