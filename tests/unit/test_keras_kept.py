"""What is known of a stream is known for as long as the stream lives, and of that one only."""

import gc

from duoka.frameworks.keras.kept import Kept


class Stream:
    """Equal to all others, and without a hash."""

    def __eq__(self, other):
        return True


def test_a_value_is_made_once_for_each_owner():
    kept: Kept[list] = Kept()
    one, other = Stream(), Stream()
    assert kept.of(one, list) is kept.of(one, list)
    assert kept.of(other, list) is not kept.of(one, list)
    assert one in kept and Stream() not in kept


def test_nothing_is_kept_of_what_is_gone():
    kept: Kept[list] = Kept()
    owner = (number for number in range(3))
    kept.of(owner, list).append(1)
    del owner
    gc.collect()
    assert not kept._values


def test_an_owner_that_cannot_be_referred_to_weakly_is_not_kept():
    kept: Kept[list] = Kept()
    owner = iter([1, 2])
    assert kept.of(owner, list) is not kept.of(owner, list)
    assert owner not in kept
