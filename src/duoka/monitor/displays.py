"""Which display a run has: a bar where it ends on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from duoka.monitor.bars import Bars
from duoka.monitor.lines import Lines
from duoka.monitor.progress import Display


def open_display(stream: TextIO, columns: int | None, clock: Callable[[], float] = time.monotonic) -> Display:
    """`columns` is the width of a terminal that the stream reaches in the end, through the supervisor.

    0 says that it reaches none, and None that nobody is in between: the stream is asked itself.
    """
    if columns == 0 or (columns is None and not stream.isatty()):
        return Lines(lambda: sys.stderr, clock)
    from rich.console import Console

    console = Console(file=stream, force_terminal=True, width=columns and columns - 1)
    if console.is_dumb_terminal:
        return Lines(lambda: sys.stderr, clock)
    return Bars(console, stream, clock)
