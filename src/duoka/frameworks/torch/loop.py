"""Where the user's loop is: which step, whose body, and whether the batch is complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from duoka.data.seeds import derive
from duoka.frameworks.torch.randomness import seeded


@dataclass
class Body:
    """One run of the loop's body: one replica's rows of one global batch."""

    replica: int
    rows: int  # true number of rows; 0 for a stand-in
    total_rows: int
    backwards: int = 0
    calls: list[str] = field(default_factory=list)

    @property
    def weight(self) -> float:
        return self.rows / self.total_rows


class Loop:
    def __init__(self, seed: int, num_replicas: int) -> None:
        self.seed = seed
        self.num_replicas = num_replicas
        self.step = 0
        self.epoch = -1
        self.body: Body | None = None
        self.is_complete = False  # the batch of this body is: p.grad is whole, and optimizers may step

    @property
    def may_step(self) -> bool:
        """Outside of bodies the user's own business; inside, only when the batch is complete."""
        return self.body is None or self.num_replicas == 1 or self.is_complete

    @contextmanager
    def run_body(self, replica: int, rows: int, total_rows: int) -> Iterator[Body]:
        body = Body(replica, rows, total_rows)
        self.body, self.is_complete = body, False
        try:
            if self.num_replicas == 1:
                yield body
            else:
                with seeded(derive("body", self.seed, self.step, replica)):
                    yield body
        finally:
            self.body = None

    def begin_epoch(self) -> int:
        self.epoch += 1
        return self.epoch
