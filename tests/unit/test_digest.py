"""Digests of tensors: one bit, anywhere, changes them; nothing else does."""

import random
import subprocess
import sys

import numpy as np
import pytest

from duoka.frameworks.exchange.digest import as_bytes, combine, digest_bytes

SIZES = [1, 7, 8, 100, 16_384, 16_385, 100_003, 3 * (1 << 19) + 5]


@pytest.mark.parametrize("size", SIZES)
def test_any_single_flipped_bit_changes_the_digest(size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    before = digest_bytes(data)
    chance = random.Random(size)
    places = {0, 8 * size - 1, *(chance.randrange(8 * size) for _ in range(60))}
    for place in places:
        data[place // 8] ^= 1 << place % 8
        assert digest_bytes(data) != before, f"bit {place}"
        data[place // 8] ^= 1 << place % 8
    assert digest_bytes(data) == before


def test_two_numbers_that_change_their_sign_do_not_make_up_for_one_another():
    """The highest bit of a word is the weak spot of digests that only multiply."""
    numbers = np.random.default_rng(0).standard_normal(100_000)
    before = digest_bytes(as_bytes(numbers))
    chance = random.Random(0)
    for _ in range(100):
        places = chance.sample(range(len(numbers)), 2)
        numbers[places] *= -1
        assert digest_bytes(as_bytes(numbers)) != before
        numbers[places] *= -1
    assert digest_bytes(as_bytes(-numbers)) != before


def test_numbers_that_change_their_places_change_the_digest():
    numbers = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    before = digest_bytes(as_bytes(numbers))
    for one, other in [(0, 1), (0, 2), (5, 131_077), (17, 199_999)]:  # 131,072 numbers are digested at once
        numbers[[one, other]] = numbers[[other, one]]
        assert digest_bytes(as_bytes(numbers)) != before
        numbers[[one, other]] = numbers[[other, one]]


def test_the_place_in_memory_does_not_matter():
    data = np.random.default_rng(0).integers(0, 256, 100_001, dtype=np.uint8)
    moved = np.empty(len(data) + 16, np.uint8)
    for start in range(9):
        moved[start : start + len(data)] = data
        assert digest_bytes(moved[start : start + len(data)]) == digest_bytes(data)


def test_arrays_without_elements_and_single_numbers_have_digests():
    assert digest_bytes(as_bytes(np.empty((0, 3)))) == 0
    assert digest_bytes(as_bytes(np.float32(1))) != digest_bytes(as_bytes(np.float32(2)))


def test_shapes_and_types_count():
    row = np.array([1, 2], np.uint64)
    assert combine(["(2, 3) float32", "(3,) float32"], row) != combine(["(3, 2) float32", "(3,) float32"], row)
    assert combine(["(2, 3) float32", "(3,) float32"], row) != combine(["(2, 3) float32", "(3,) float32"], row[::-1])


def test_digests_are_the_same_in_every_process():
    source = (
        "import numpy as np; from duoka.frameworks.exchange.digest import combine, digest_bytes;"
        "data = np.arange(1_000_003, dtype=np.uint64).view(np.uint8);"
        "print(digest_bytes(data), combine(['a'], np.array([7], np.uint64)))"
    )
    outputs = {subprocess.run([sys.executable, "-c", source], capture_output=True, text=True).stdout for _ in range(2)}
    (only,) = outputs
    # Written down: journals of older versions must stay comparable.
    assert only == "11921547170205614339 10f69ec395f6295d\n"
