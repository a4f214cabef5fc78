"""Where the user's loop is: which step, whose body, and whether the batch is complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from duoka.data.seeds import derive
from duoka.frameworks.torch.randomness import seeded


@dataclass
class Body:
    """One run of the loop's body: one replica's rows of one global batch."""

    replica: int
    rows: int  # true number of rows; 0 for a stand-in
    total_rows: int
    backwards: int = 0
    count: float | None = None  # given with strategy.weigh

    @property
    def weight(self) -> float:
        return self.rows / self.total_rows

    @property
    def is_counted(self) -> bool:
        return self.count is not None

    @property
    def gradient_weight(self) -> float:
        """What this replica's gradient is multiplied with. Counts are summed in the exchange and divided by once."""
        if self.rows == 0:
            return 0.0
        return self.weight if self.count is None else self.count


class Loop:
    def __init__(self, seed: int, num_replicas: int) -> None:
        self.seed = seed
        self.num_replicas = num_replicas
        self.step = 0
        self.order = ""  # a digest of the epoch's order, compared between workers at every step
        self.body: Body | None = None
        self.is_complete = False  # the batch of this body is: p.grad is whole, and optimizers may step

    @property
    def may_step(self) -> bool:
        """Outside of bodies the user's own business; inside, only when the batch is complete."""
        return self.body is None or self.num_replicas == 1 or self.is_complete

    @contextmanager
    def run_body(self, replica: int, rows: int, total_rows: int) -> Iterator[Body]:
        self.body, self.is_complete = Body(replica, rows, total_rows), False
        try:
            if self.num_replicas == 1:
                yield self.body
            else:
                with seeded(derive("body", self.seed, self.step, replica)):
                    yield self.body
        finally:
            self.body = None
