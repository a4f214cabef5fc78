"""What the survivors of a loss have agreed on, and how whoever was in a meeting comes to know of it."""

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


class Regrouped(Exception):
    """A meeting was interrupted by a loss, and the survivors have agreed."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)
        self.decision = decision
