"""The base seed of a run: the script's own, so that another `torch.manual_seed` changes order and dropout."""

from __future__ import annotations

import torch


class BaseSeed:
    """Read from PyTorch when it is first needed, and the same from then on.

    A script that seeds nothing has the seed that its workers were started with, which the first log line shows.
    """

    def __init__(self) -> None:
        self._number: int | None = None

    @property
    def number(self) -> int:
        if self._number is None:
            self._number = torch.initial_seed()
        return self._number
