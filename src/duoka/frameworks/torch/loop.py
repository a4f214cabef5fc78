"""Where the user's loop is: which batch, whose body, and whether the batch is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from duoka.data.seeds import derive
from duoka.frameworks.torch.randomness import seeded


@dataclass
class Body:
    """One run of the loop's body: one replica's rows of one global batch, or those of all replicas of this worker."""

    replicas: tuple[int, ...]
    rows: int  # true number of rows; 0 for a stand-in
    total_rows: int
    backwards: int = 0
    count: float | None = None  # given with strategy.weigh
    sum_weight: float | None = None  # the loss was multiplied with its count already: this is the weight then
    fixed_weight: float | None = None  # where every worker takes the same loss of the whole batch
    is_added: bool = False  # the loss is a sum over rows
    held_back: set[str] = field(default_factory=set)  # calls that came before its backward, and so did nothing
    calls: list[str] = field(default_factory=list)  # what it called, to be compared with other bodies
    has_asked: bool = False  # it read strategy.stepped: from then on it may differ
    has_called_step: bool = False
    loss: float = 0.0  # what its last backward began from
    is_nan: bool = False  # its loss is
    is_quiet: bool = False  # what is called now was recorded as a whole
    outer: Body | None = None  # within which it runs: with one replica, loops may be walked side by side
    is_discarded: bool = False  # it turned out to need all rows of this worker at once, and runs again

    @property
    def replica(self) -> int:
        return self.replicas[0]

    @property
    def weight(self) -> float:
        return self.rows / self.total_rows

    @property
    def is_counted(self) -> bool:
        return self.count is not None

    @property
    def gradient_weight(self) -> float:
        """What this body's gradient is multiplied with. Counts are summed in the exchange and divided by once."""
        if self.fixed_weight is not None:
            return self.fixed_weight
        if self.sum_weight is not None:
            return self.sum_weight
        if self.rows == 0:
            return 0.0
        return self.weight if self.count is None else self.count

    @property
    def counted(self) -> float:
        """What the user counted here: the sum over replicas divides the gradient."""
        return 0.0 if self.rows == 0 or self.count is None else self.count

    def forget_weight(self) -> None:
        """What strategy.weigh said holds for one backward."""
        self.count, self.sum_weight, self.is_added = None, None, False

    def record(self, call: str) -> None:
        if not self.has_asked and not self.is_quiet:
            self.calls.append(call)


class Loop:
    def __init__(self, seed: int, num_replicas: int) -> None:
        self.seed = seed
        self.num_replicas = num_replicas
        self.is_managed = num_replicas > 1  # otherwise the plain loop, with nothing to add
        self.has_several_backwards = False  # bodies were seen that go on to another one
        self.runs_whole_shares = False  # a worker's rows as one batch: for steps that exchange in their middle
        self.batch = 0  # completed global batches
        self.step = 0  # committed updates: fewer than batches when gradients are accumulated
        self.last_rows = 0  # of the last batch of the pass under way, if it is a smaller one
        self.order = ""  # a digest of the epoch's order, compared between workers at every step
        self.body: Body | None = None
        self.is_complete = False  # the batch of this body is: p.grad is whole
        self.is_in_backward = False
        self.is_interrupted = False  # this body is, by an error that is on its way to the user
        self.is_due = True  # with this batch an update is due: not in the middle of an accumulation
        self.first_batch = 0  # of the pass under way: not 0 in a pass that is resumed
        self.updated: dict[int, int] = {}  # the batch in which each optimizer stepped last
        self._arrive: Callable[[], None] | None = None

    def replay_until(self, arrive: Callable[[], None]) -> None:
        """A state was restored, and the script runs from its top: until the next body, what it does has happened."""
        self._arrive = arrive

    @property
    def is_replaying(self) -> bool:
        return self._arrive is not None

    def arrive(self) -> None:
        """The script has come to where the run is."""
        if self._arrive is not None:
            arrive, self._arrive = self._arrive, None
            arrive()

    @property
    def can_be_tried(self) -> bool:
        """Whether a body can run for comparison only, before those that complete the batch."""
        return not self.runs_whole_shares and not self.has_several_backwards

    @property
    def may_step(self) -> bool:
        """Outside of bodies the user's own business; inside, only when the batch is complete."""
        return self.body is None or not self.is_managed or (self.is_complete and self.is_due)

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """What is raised here ends the loop, and the user has not left it: a loss, workers that differ, a stop."""
        self.is_interrupted = True
        yield
        self.is_interrupted = False

    @contextmanager
    def run_body(self, replicas: tuple[int, ...], rows: int, total_rows: int) -> Iterator[Body]:
        body = Body(replicas, rows, total_rows, outer=self.body)
        self.body, self.is_complete, self.is_interrupted = body, False, False
        try:
            if self.is_managed:
                with seeded(derive("body", self.seed, self.batch, replicas[0])):
                    yield self.body
            else:
                yield self.body
        finally:
            self._leave(body)

    def _leave(self, body: Body) -> None:
        """It is over, and with it those within it. One that was left behind ends within a later one, which goes on."""
        inner = self.body
        while inner is not None and inner is not body:
            inner = inner.outer
        if inner is body:
            self.body = body.outer
