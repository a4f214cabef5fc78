"""Errors for calls of `strategy.backward` in which the workers differ: other functions, batches or learning rates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from duoka.errors import MismatchError
from duoka.frameworks.torch.learning_rates import RATES, rates_differ

_CALL = re.compile(rf".*?strategy\.backward\((.*?)\) on (.*?){RATES}(.*?)(?: of .*)?", re.DOTALL)
_DO_RATES = (
    "step schedulers and set rates on every worker, not under `if strategy.is_main`, and by numbers that are equal on"
    " all workers: the loss that strategy.backward returns, strategy.evaluate(function, loader), strategy.step."
)


def title_call(function: str, arguments: str, rates: Sequence[str]) -> str:
    """Return what workers compare before a call is exchanged."""
    return f"strategy.backward({function}) on {arguments}{RATES}{', '.join(rates) or 'none'}"


def explain(error: MismatchError, number: int) -> MismatchError:
    """Return an error that says in what the calls differ, or the error itself if they are not all of one kind."""
    found = {worker: _CALL.fullmatch(call) for worker, call in (error.calls or {}).items()}
    parts = {worker: match.groups() for worker, match in found.items() if match is not None}
    if not found or len(parts) < len(found):
        return error
    functions, batches, rates = ({worker: part[place] for worker, part in parts.items()} for place in range(3))
    if len(set(functions.values())) > 1:
        return MismatchError(
            f"At call {number} the workers passed different functions to strategy.backward.",
            why=_list(functions),
            do="pass the same function on every worker. Choose it by a number that is equal on all workers, not by"
            " `strategy.is_main` or an unseeded random number.",
        )
    if len(set(batches.values())) > 1:
        return MismatchError(
            f"At call {number} the workers passed different batches to strategy.backward.",
            why=_list(batches),
            do="pass the whole global batch on every worker, with the same shapes and types, or a batch of"
            " strategy.batches(loader). Leave a batch out on all workers, or on none.",
        )
    return rates_differ(rates, f"At call {number}", _DO_RATES) if len(set(rates.values())) > 1 else error


def _list(named: Mapping[str, str]) -> str:
    return "\n".join(f"{worker}: {text}" for worker, text in named.items())
