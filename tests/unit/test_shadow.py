"""One replica computed by two workers: what each of them does in one exchange, and what comes of it."""

import numpy as np

from duoka.collectives.arrays import Array
from duoka.collectives.shadow import Digest, Shadow, Shadowing, compare

SHADOW = Shadow(replica=3, owner=0, juniors=(2,))
OWNER, JUNIOR, OTHER = 0, 2, 1


class Slots:
    """With what an earlier step has left in them."""

    def __init__(self, count: int = 4) -> None:
        self.dtype, self.count = np.dtype(np.float32), count
        self.shared = np.full(count, 7, np.float32)

    def slot(self, replica: int) -> Array:
        return self.shared


def own_of(worker: int) -> tuple[int, ...]:
    return (3,) if worker == OWNER else ()


def digest(worker: int, values: list[float], common: bytes = b"") -> Digest:
    buffer = Slots()
    shadowing = Shadowing(worker, SHADOW, [buffer])
    is_shadow = shadowing.is_shadow(3, own_of(worker))
    slot = shadowing.slot(buffer) if is_shadow else buffer.slot(3)
    slot[: len(values)] = values
    assert shadowing.take(3, own_of(worker), common) == (worker == JUNIOR)
    assert shadowing.digest is not None
    return Digest.unpack(shadowing.digest.pack())


def compare_two(owner: list[float], junior: list[float], common: bytes = b"") -> tuple[list[int], list[int]]:
    return compare({OWNER: digest(OWNER, owner), JUNIOR: digest(JUNIOR, junior, common)})


def test_equal_numbers_agree_whatever_lay_in_the_slots_and_others_differ():
    assert compare_two([1, 2], [1, 2]) == ([JUNIOR], [])
    assert compare_two([1, 2], [1, 2.0000002]) == ([], [JUNIOR])
    assert compare_two([1, 0.0], [1, -0.0]) == ([], [JUNIOR]), "bits, not values"
    assert compare_two([1, 2], [1, 2], b"another learning rate") == ([], [JUNIOR])


def test_a_replica_without_samples_says_nothing():
    assert compare_two([0, 0], [0, 0]) == ([], [])


def test_juniors_are_compared_with_an_owner_of_the_same_replica_only():
    junior = digest(JUNIOR, [1])
    assert compare({JUNIOR: junior}) == ([], [])
    assert compare({JUNIOR: junior, OWNER: Digest(0, True, True, bytes(32))}) == ([], [])


def test_only_the_junior_has_more_to_compute_and_only_once():
    shadowing = Shadowing(JUNIOR, SHADOW, [])
    assert shadowing.awaited(()) == (3,)
    shadowing.take(3, (), b"")
    assert shadowing.awaited(()) == ()
    assert [Shadowing(worker, SHADOW, []).awaited(own_of(worker)) for worker in (OWNER, OTHER)] == [(), ()]


def test_a_junior_that_has_inherited_the_replica_computes_it_as_its_own():
    shadowing = Shadowing(JUNIOR, SHADOW, [Slots()])
    assert shadowing.is_shadow(3, ()) and not shadowing.is_shadow(3, (1, 3))
    assert shadowing.awaited((1, 3)) == () and not shadowing.take(3, (1, 3), b"")
    assert shadowing.digest is None


def test_another_worker_that_has_inherited_the_replica_says_nothing_of_it():
    """Between the arrays of its slots may lie what an earlier step has left there."""
    shadowing = Shadowing(OTHER, SHADOW, [Slots()])
    assert not shadowing.take(3, (1, 3), b"") and shadowing.digest is None
