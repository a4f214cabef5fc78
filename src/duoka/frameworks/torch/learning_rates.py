"""Learning rates, which workers compare in every step: a scheduler may have got a number of one worker alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from duoka.errors import MismatchError

RATES = "; learning rates "
_PLATEAU = re.compile(r"(ReduceLROnPlateau \(scheduler \d+\)): best ([^\s,]+)")
_CALL = re.compile(rf"(.*?){RATES}(.*?)(?: of .*)?", re.DOTALL)
_DO = (
    "step schedulers and set rates on every worker, not under `if strategy.is_main`, and by numbers that are equal on"
    " all workers: strategy.mean(loss), strategy.evaluate(function, loader), strategy.step."
)


def describe_rates(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> list[str]:
    """Return the learning rates of each optimizer, and the best number that each ReduceLROnPlateau was passed.

    Workers compare them. A number of one worker alone is found as soon as a scheduler gets it, long before the rates
    differ.
    """
    found = []
    for number, optimizer in enumerate(optimizers, start=1):
        rates = [repr(float(group["lr"])) for group in optimizer.param_groups if "lr" in group]
        found.append(f"optimizer {number}: {', '.join(rates) or 'none'}")
    for number, scheduler in enumerate(schedulers, start=1):
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            found.append(f"ReduceLROnPlateau (scheduler {number}): best {scheduler.best!r}")
    return found


def rates_differ(rates: Mapping[str, str], when: str, do: str) -> MismatchError:
    """Return the error for learning rates, or numbers passed to ReduceLROnPlateau, that differ.

    >>> rates = {"worker 0": "optimizer 1: 0.1, ReduceLROnPlateau (scheduler 1): best 0.5"}
    >>> rates["worker 1"] = "optimizer 1: 0.1, ReduceLROnPlateau (scheduler 1): best 0.7"
    >>> print(rates_differ(rates, "At step 3", "").what)
    At step 3 ReduceLROnPlateau (scheduler 1) was passed numbers that differ between workers.
    """
    listing = "\n".join(f"{owner}: {text}" for owner, text in rates.items())
    found = {text: dict(_PLATEAU.findall(text)) for text in rates.values()}
    first, *others = found.values()
    for name in first:
        if any(other.get(name) != first[name] for other in others):
            return MismatchError(
                f"{when} {name} was passed numbers that differ between workers.",
                why=f"{listing}\nIt would change the learning rate at a different time on each worker.",
                do="pass a number that is equal on all workers: strategy.evaluate(function, loader), or"
                " strategy.mean(loss) after the loop. In function style, pass the loss that strategy.backward"
                " returns: it is the loss of the global batch. Step it on every worker, not under"
                " `if strategy.is_main`.",
            )
    return MismatchError(f"{when} the learning rates differ.", why=listing, do=do)


def explain(error: MismatchError, when: str) -> MismatchError:
    """Return an error that names the rates, if calls of several workers differ in nothing else."""
    found = {worker: _CALL.fullmatch(call) for worker, call in (error.calls or {}).items()}
    matches = {worker: match for worker, match in found.items() if match is not None}
    if not found or len(matches) < len(found) or len({match[1] for match in matches.values()}) > 1:
        return error
    return rates_differ({worker: match[2] for worker, match in matches.items()}, when, _DO)
