"""Outcomes of replicas, through an exchange, without Keras."""

from __future__ import annotations

import numpy as np
import pytest

from duoka.collectives.solo import solo
from duoka.data.shares import share
from duoka.errors import MismatchError
from duoka.frameworks.exchange.memory import Memory
from duoka.frameworks.exchange.note import Note, compare
from duoka.frameworks.exchange.outcome import Outcome, Slices, Total
from duoka.frameworks.exchange.transfer import Transfer

ROWS, REPLICAS, PER_ROW = 5, 4, 3


def outcome_of(replica: int) -> Outcome:
    generator = np.random.default_rng(replica)
    rows = share(ROWS, REPLICAS, replica)
    entries = PER_ROW * len(rows)
    return Outcome(
        gradients=[
            generator.standard_normal((3, 2)).astype("float32"),
            Slices(generator.integers(0, 9, entries), generator.standard_normal((entries, 2)).astype("float32")),
            generator.standard_normal(()).astype("float64"),
        ],
        moving=[generator.standard_normal(7).astype("float32")],
        others=[np.array([replica, 5], "int64"), np.array(True)],
        metrics=[np.array(float(len(rows)), "float32")],
        logs=[np.array(replica, "float32")],
    )


def exchanged() -> Total:
    collective = solo(REPLICAS, available_bytes=lambda: 1 << 30)
    transfer = Transfer(collective, Memory(collective), outcome_of(0), len(share(ROWS, REPLICAS, 0)), ROWS)
    exchange = transfer.open("of a test")
    for replica in range(REPLICAS):
        transfer.write(exchange, replica, outcome_of(replica), len(share(ROWS, REPLICAS, replica)))
        exchange.deposit(replica)
    assert exchange.commit()
    return transfer.read(exchange)


def test_gradients_state_and_logs_are_weighted_by_rows_and_metrics_are_added_up():
    total, outcomes = exchanged(), [outcome_of(replica) for replica in range(REPLICAS)]
    weights = [len(share(ROWS, REPLICAS, replica)) / ROWS for replica in range(REPLICAS)]
    gradients, moving, logs, metrics = total.parts(total.flats)
    reads = (lambda o: o.gradients[0], lambda o: o.gradients[2], lambda o: o.moving[0], lambda o: o.logs[0])
    for part, read in zip((*gradients, moving[0], logs[0]), reads, strict=True):
        expected = sum(weight * read(outcome) for weight, outcome in zip(weights, outcomes, strict=True))
        np.testing.assert_allclose(part, expected, rtol=1e-5)
        assert part.dtype == read(outcomes[0]).dtype
    assert metrics[0] == ROWS


def test_slices_come_one_behind_the_other_and_are_not_merged():
    total, outcomes = exchanged(), [outcome_of(replica) for replica in range(REPLICAS)]
    (slices,) = total.slices
    assert slices.indices.tolist() == np.concatenate([o.gradients[1].indices for o in outcomes]).tolist()
    weights = [len(share(ROWS, REPLICAS, replica)) / ROWS for replica in range(REPLICAS)]
    expected = np.concatenate([w * o.gradients[1].values for w, o in zip(weights, outcomes, strict=True)])
    np.testing.assert_allclose(slices.values, expected, rtol=1e-6)


def test_other_state_is_that_of_replica_0():
    total = exchanged()
    assert total.others[0].tolist() == [0, 5] and total.others[0].dtype == np.int64
    assert total.others[1].tolist() is True


def test_uneven_slices_are_refused():
    collective, outcome = solo(1, available_bytes=lambda: 1 << 30), outcome_of(0)
    with pytest.raises(MismatchError, match="7 rows has 6 entries"):
        Transfer(collective, Memory(collective), outcome, 7, 7)


def test_different_batches_and_learning_rates_are_an_error_and_other_state_is_told():
    said: list[str] = []
    note = Note(data=1, rate=0.5, others=3)
    compare([note.pack(), b"", note.pack()], 4, said.append)
    assert said == []
    with pytest.raises(MismatchError, match="different global batches"):
        compare([note.pack(), Note(2, 0.5, 3).pack()], 4, said.append)
    with pytest.raises(MismatchError, match=r"learning rate is 0\.5 for replica 0 and 0\.25"):
        compare([note.pack(), Note(1, 0.25, 3).pack()], 4, said.append)
    compare([note.pack(), Note(1, 0.5, 9).pack()], 4, said.append)
    assert len(said) == 1
