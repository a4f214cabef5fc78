"""Workers that have come back: what one of them does otherwise than the others ends it alone, and not the run.

Such a worker has the state of the run, and not what the script keeps by itself: a best value, a counter, a list of
losses. Sooner or later it may stumble over that, and nobody else does. So it is taken out of the run, and is not
started again, when an older worker is there and

- its code raises, or exits, between two steps: the others come by the same line, and stop the run there if they fail;
- its code stumbles within a step over something that is not there, as a script does that has not run from its top (a
  name, an attribute, a value that is None, a list that is empty), and it has not run as many steps yet as it has
  missed: others compute its replicas, and what they raise ends the run. Any other error, or a later one, or one in the
  replica and step in which another worker has raised, is like that of any worker, and is not tried again;
- it calls other things than the others, has other learning rates, or leaves its loop before them.
"""

from __future__ import annotations

from collections.abc import Iterable

from duoka.collectives.ages import Ages
from duoka.collectives.board import Work

# Raised on workers that have done nothing wrong themselves.
_OF_ALL = {"WorkerLost", "WorkerLeft", "WorkerFailed", "DeadlineExceeded", "ReplicasDiffer"}
_OF_WHAT_IS_MISSING = {
    *("NameError", "UnboundLocalError", "AttributeError", "TypeError"),
    *("KeyError", "IndexError", "ZeroDivisionError"),
}


class Comebacks:
    def __init__(self) -> None:
        self.ages = Ages()
        self._missed: dict[int, int] = {}  # steps that the run had behind it then
        self._stumbled: list[Work] = []

    def add(self, number: int, generation: int, steps: int) -> None:
        self.ages.learn([(number, generation)])
        self._missed[number] = steps

    def has_come_back(self, number: int) -> bool:
        return self.ages.has_anybody_come_back([number])

    def stumbles(self, number: int, error: str, work: Work, steps: int, others: Iterable[int]) -> bool:
        """Whether this failure is its own: of the one that has come back, and perhaps of no other.

        `steps`: those that it has behind it; `others`: who trains, or has finished.
        """
        if error in _OF_ALL or not self.ages.is_younger(number, others):
            return False
        if work.is_under_way:
            is_new = steps - self._missed[number] < self._missed[number] and error in _OF_WHAT_IS_MISSING
            if not is_new or any(work.overlaps(before) for before in self._stumbled):
                return False
            self._stumbled.append(work)
        return True
