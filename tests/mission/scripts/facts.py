"""Scenarios of a script: each runs once on every worker, and the worker prints their facts in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

SCENARIOS: list[Callable[[], Any]] = []


def scenario(function: Callable[[], Any]) -> Callable[[], Any]:
    SCENARIOS.append(function)
    return function


def print_facts(worker: int = 0) -> None:
    facts = {function.__name__: function() for function in SCENARIOS}
    sys.stderr.flush()
    print("FACTS " + json.dumps({"worker": worker, **facts}), flush=True)


def difference(ours: Any, plain: Any) -> float:
    """The largest difference between tensors, relative to the largest value of each tensor."""
    pairs = zip(map(np.asarray, ours), map(np.asarray, plain), strict=True)
    return float(np.max([np.abs(a - b).max() / max(np.abs(b).max(), 1e-12) for a, b in pairs]))  # NaN stays NaN
