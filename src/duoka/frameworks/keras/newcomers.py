"""A worker in the place of a lost one comes through the script: past each `fit` that is over, into the one under way.

Members of a run leave a mark at the end of each `fit`, with what came of it. A newcomer that finds the mark leaves that
`fit` out. In one without, on arrays, it takes the first batch, which builds its model, and is given the state of the
others at their next border; then it begins that `fit` once more, and is led to their batch. A stream cannot be begun
twice: there it hears at first where the others are, reads up to their batch while they go on, and joins when it is
near. Nothing that is exchanged within a `fit` is written down: the state makes up for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from duoka.collectives.joining import Joining, Later, unrecorded
from duoka.errors import CannotJoin, CheckpointError
from duoka.frameworks.handing import take
from duoka.frameworks.marks import choose_handed, pack, unpack

if TYPE_CHECKING:
    from duoka.strategies.borders import Borders
    from duoka.strategies.strategy import Restorable

Record = dict[str, Any]


class Newcomers:
    def __init__(self, joining: Joining | None, adapter: Restorable, borders: Borders) -> None:
        self._joining, self._adapter, self._borders = joining, adapter, borders
        self._is_refused = False

    @property
    def is_newcomer(self) -> bool:
        """Whether this worker has not joined the others yet."""
        return self._joining is not None and self._joining.is_newcomer

    @property
    def are_expected(self) -> bool:
        """Whether one may come to this run."""
        return self._joining is not None and not self._is_refused

    def refuse(self, reason: str) -> None:
        """This program cannot be joined. A newcomer ends here."""
        if self._joining is not None:
            self._is_refused = True
            self._joining.refuse(reason)

    def refuse_unknown_weights(self, call: str, model: Any) -> None:
        """What a model gives follows from weights that a newcomer does not have yet."""
        if self.is_newcomer:
            raise CannotJoin(
                f"{call} of {model.name} was called between trainings, before this worker has joined the others.",
                why="its model has no trained weights before that.",
            )

    def begin_fit(self, number: int) -> Record | None:
        """A member lets it be known that its state can be had. A newcomer hears what came of a fit that is over."""
        if self._joining is None:
            return None
        if not self._joining.is_newcomer:
            if not self._is_refused:
                self._joining.allow()
        elif self._joining.is_behind:
            return unpack(self._joining.take_mark(_name(number)))
        return None

    def join(self, number: int) -> Record | None:
        """A newcomer waits for the others' next border. None: it has joined; otherwise they have ended this fit."""
        assert self._joining is not None
        facts = self._joining.pass_by(_name(number), partial(take, self._adapter, self._borders.also))
        return None if facts is None else unpack(facts)

    def approach(self, number: int, is_near: Callable[[], bool]) -> Record | None:
        """The same, once the state has been read and `is_near` says so; before that nobody waits for this worker."""

        def take_or_go_on(fd: int) -> None:
            take(self._adapter, self._borders.also, fd)
            if not is_near():
                raise Later

        assert self._joining is not None
        try:
            facts = self._joining.pass_by(_name(number), take_or_go_on)
        except Later:
            return None
        return None if facts is None else unpack(facts)

    def compare_batches(self, here: int, others: int | None) -> None:
        """A batch of a stream, and theirs: what this worker reads must be what they have read."""
        if self.is_newcomer and others is not None and here != others:
            raise CannotJoin(
                "Its data come in another order than those of the others.",
                why="a stream that draws from a generator without a seed, or from a clock, is another one each time.",
            )

    def refuse_end(self) -> None:
        if self.is_newcomer:
            raise CannotJoin("A fit ends here before the batch at which the others are: it has fewer data.")

    def wait_for_end(self, number: int) -> Record:
        """A fit that trains nothing has no border to join at."""
        assert self._joining is not None
        return unpack(self._joining.take_mark(_name(number)))

    def unrecorded(self) -> Any:
        return unrecorded(self._joining)

    def end_fit(self, number: int, record: Record) -> None:
        if self._joining is None or self._is_refused or self._joining.is_newcomer:
            return
        try:
            facts = pack(record | {"also": choose_handed(record["also"])})
        except CheckpointError as error:
            self.refuse(f"what a callback keeps cannot be handed over ({error.what})")
        else:
            self._joining.mark(_name(number), facts)


def _name(number: int) -> str:
    return f"the end of fit {number}"
