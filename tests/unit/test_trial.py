"""One replica computed by two workers: what each of them does in one exchange."""

import numpy as np
import pytest

from duoka.collectives.arrays import Array
from duoka.collectives.trial import Hearing, Kind, Trial, is_something, kind_of

TRIAL = Trial(worker=2, replica=3, witness=0)


class Slots:
    """With what an earlier step has left in them."""

    def __init__(self, count: int = 4) -> None:
        self.dtype, self.count = np.dtype(np.float32), count
        self.shared = np.full(count, 7, np.float32)

    def slot(self, replica: int) -> Array:
        return self.shared


def hear(worker: int, values: list[float], trial: Trial | None = TRIAL) -> tuple[int, bytes]:
    hearing, buffer = Hearing(worker, lambda: trial), Slots()
    hearing.kind = Kind.STEP
    hearing.begin([buffer])
    hearing.slot(buffer, 3)[: len(values)] = values
    hearing.testify([buffer], 3)
    assert hearing.testimony is not None
    return hearing.testimony


def test_equal_numbers_are_told_alike_whatever_lay_in_the_slots_and_others_are_not():
    (place, of_newcomer), (other_place, of_witness) = hear(2, [1, 2]), hear(0, [1, 2])
    assert (place, other_place) == (0, 1) and of_newcomer == of_witness
    assert hear(0, [1, 2.0000002])[1] != of_newcomer
    assert hear(0, [1, -0.0])[1] != hear(2, [1, 0.0])[1], "bits, not values"


def test_a_replica_without_rows_says_nothing():
    assert is_something(hear(2, [0, 1])[1]) and kind_of(hear(2, [0, 1])[1]) is Kind.STEP
    assert not is_something(hear(2, [0, 0])[1])


def test_the_witness_writes_into_memory_of_its_own_and_the_newcomer_into_its_slots():
    for worker in (0, 2):
        buffer = Slots()
        Hearing(worker, lambda: TRIAL).slot(buffer, 3)[:] = 5
        assert buffer.shared.tolist() == [5 if worker == 2 else 7] * 4


def test_only_the_witness_has_more_to_compute_and_only_once():
    hearing = Hearing(0, lambda: TRIAL)
    assert hearing.awaited == (3,)
    hearing.kind = Kind.EVALUATION
    hearing.testify([], 3)
    assert hearing.awaited == ()
    assert [Hearing(worker, lambda: TRIAL).awaited for worker in (1, 2)] == [(), ()]
    assert Hearing(0, lambda: None).awaited == ()


def test_without_a_trial_nothing_is_witnessed_and_nothing_is_concerned():
    hearing = Hearing(0, lambda: None)
    assert not hearing.is_witness(3) and not hearing.concerns(3)


def test_memory_is_asked_for_before_anything_is_computed():
    with pytest.raises(MemoryError):
        Hearing(0, lambda: TRIAL).begin([Slots(), Slots.__new__(_Endless)])


class _Endless(Slots):
    dtype, count = np.dtype(np.float64), 1 << 56
