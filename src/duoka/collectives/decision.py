"""What the survivors of a loss agree on, how a worker in a meeting hears of it, and why workers are removed."""

from __future__ import annotations

from dataclasses import dataclass

from duoka.topology.membership import Membership


@dataclass(frozen=True)
class Decision:
    """What all survivors of a loss do next."""

    membership: Membership
    lost: tuple[int, ...]
    completed: int  # the last call that anybody completed
    steps: int  # the steps that the furthest survivor has behind it


@dataclass(frozen=True)
class Difference:
    """Why workers are removed: they have done something that the others have not."""

    reason: str  # in one word: a worker that is removed twice for the same reason is not started again
    what: str  # a phrase about such a worker, for the log line
    listing: str = ""  # for its log; as `what` if there is no more to say

    def as_fields(self) -> dict[str, str]:
        return {"reason": self.reason, "what": self.what[:400], "listing": (self.listing or self.what)[:4000]}


class Regrouped(Exception):
    """A meeting was interrupted by a loss, and the survivors have agreed."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)
        self.decision = decision
