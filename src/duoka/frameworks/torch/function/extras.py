"""Metrics that do not fit beside the gradients: rows, large tensors, many names. They take exchanges of their own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from duoka.collectives.collective import Collective, Exchange
from duoka.data.shares import share
from duoka.errors import MismatchError, ReplicaFailed
from duoka.frameworks.torch.function.note import order_differs
from duoka.frameworks.torch.function.returned import Measured, combine, decode, encode

_LONGEST_TEXT, _MOST_NUMBERS = 1000, 64  # a note holds 4 KB


def fits_into_note(measured: Measured, packed: bytes) -> bool:
    return not measured.rows and len(packed) <= _LONGEST_TEXT and len(measured.numbers) <= _MOST_NUMBERS


def exchange_metrics(
    collective: Collective,
    name: str,
    count_samples: Callable[[], int],
    measure: Callable[[int], Measured | None],
    device: torch.device,
    places: Callable[[int], Sequence[range]] | None = None,
    patience_s: Callable[[], float] = lambda: 0.0,
    failure: Sequence[BaseException] = (),
    find_order: Callable[[], int] = lambda: 0,
) -> Any:
    """Return the metrics of all samples. `measure` computes a replica's; None if it has no samples.

    Two exchanges: a replica without samples learns from the first one what is measured. `places` says which samples a
    replica has; without it, its share of a batch. `patience_s` is added to the deadline. `failure` holds the error of
    this worker's own measurement, if there is one: it is raised here, and ReplicaFailed on all other workers.
    """
    first = collective.exchange([], f"{name}, kinds")

    def say(replica: int) -> bytes:
        measured = measure(replica)
        if failure:
            return json.dumps({"error": describe_error(failure[0])[:1500]}).encode()
        return json.dumps({"order": find_order(), **_say(measured)}).encode()

    _carry_out(first, say, collective.deadline_s, patience_s)
    told = [json.loads(note) for note in first.notes]
    if failed := [replica for replica, each in enumerate(told) if "error" in each]:
        first.release()
        collective.end_step()
        if failure:
            raise failure[0]
        error = told[failed[0]]["error"]
        raise ReplicaFailed(
            f"{name} failed on replica {failed[0]}: {error.splitlines()[0]}",
            why=error,
            do="see its traceback, from the worker that runs it. A script that catches the error continues.",
        )
    if len({each["order"] for each in told}) > 1:
        raise order_differs(f"{name} read other samples on some workers.")
    said = {replica: each for replica, each in enumerate(told) if "digest" in each}
    num_samples = count_samples()
    find_places = places or (lambda replica: [share(num_samples, collective.num_replicas, replica)])
    if len({each["digest"] for each in said.values()}) > 1:
        raise MismatchError(
            "The function returned different metrics on different replicas.",
            why="\n".join(f"replica {replica}: {each['title']}" for replica, each in said.items()),
            do="return the same names and shapes for every batch; (0, 0) where there is nothing to count.",
        )
    if not said:
        return None
    speaker = min(said)
    sizes = said[speaker]
    num_text, row_bytes = sizes["text"], sizes["rows"]
    # What is measured, then the rows; both in one buffer, because an exchange has one scratch buffer for each type.
    data = collective.scratch(num_text + num_samples * sum(row_bytes), np.uint8)
    numbers = collective.scratch(sizes["numbers"], np.float64) if sizes["numbers"] else None
    buffers = [data] if numbers is None else [data, numbers]
    second = collective.exchange(buffers, f"{name}, values")

    def place(replica: int) -> bytes:
        measured = measure(replica)
        for buffer in buffers:
            second.slot(buffer, replica)[:] = 0
        if measured is None:
            return b""
        slot = second.slot(data, replica)
        if replica == speaker:
            slot[:num_text] = np.frombuffer(encode(measured.kinds), np.uint8)
        if numbers is not None:
            second.slot(numbers, replica)[:] = measured.numbers
        _place_rows(slot[num_text:], measured, row_bytes, num_samples, find_places(replica))
        return b""

    _carry_out(second, place, collective.deadline_s, patience_s)
    result = second.result(data)
    kinds, flat = decode(result[:num_text].tobytes()), result[num_text:].copy()
    totals = np.empty(0) if numbers is None else second.result(numbers).copy()
    parts, start = [], 0
    for each in row_bytes:
        parts.append(flat[start : start + num_samples * each])
        start += num_samples * each
    second.release()
    return combine(kinds, totals, parts, device)


def _carry_out(
    exchange: Exchange, place: Callable[[int], bytes], deadline_s: float, patience_s: Callable[[], float]
) -> None:
    is_committed = False
    while not is_committed:
        for replica in exchange.missing:
            exchange.deposit(replica, place(replica))
        is_committed = exchange.commit(deadline_s + patience_s())


def _place_rows(slot: Any, measured: Measured, row_bytes: list[int], num_samples: int, places: Sequence[range]) -> None:
    """Write a replica's rows at their places. All other bytes are zero, so that the sum joins all rows."""
    start = 0
    for each, data in zip(row_bytes, measured.rows, strict=True):
        done = 0
        for own in places:
            size = len(own) * each
            slot[start + own.start * each : start + own.stop * each] = data[done : done + size]
            done += size
        start += num_samples * each


def _say(measured: Measured | None) -> dict[str, Any]:
    if measured is None:
        return {}
    text = encode(measured.kinds)
    return {
        "digest": hashlib.sha256(text).hexdigest()[:16],
        "title": text.decode()[:500],
        "text": len(text),
        "numbers": len(measured.numbers),
        "rows": [kind.row_bytes for kind in measured.kinds if kind.row_dtype],
    }


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
