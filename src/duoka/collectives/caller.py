"""The user's line that a call comes from: for errors about calls that differ between workers."""

from __future__ import annotations

import os
import sys

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_THE_USERS = (_PACKAGE, os.path.dirname(os.__file__) + os.sep, "<")
_NOT_IN_STEPS = ("barrier", "broadcast", "all_gather", "all_reduce", "exchange strategy.")
STEP = "exchange strategy.backward"


def find_line(call: str) -> str:
    """`train.py:31`; empty for a call of a step, which is made too often to look for it."""
    if not call.startswith(_NOT_IN_STEPS) or call.startswith(STEP):
        return ""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
