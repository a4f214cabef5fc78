"""What things were like at places of a script, kept where they have changed."""

from __future__ import annotations

import numpy as np

from duoka.data.changes import Changes


def filled(states: list, most_bytes: int = 1 << 12) -> Changes:
    changes = Changes(most_bytes)
    for place, state in enumerate(states):
        changes.add(place, {"thing": state})
    return changes


def num_kept(changes: Changes) -> int:
    return len(changes.capture()["thing"]["states"])


def test_what_has_not_changed_is_kept_once_and_known_at_each_place():
    changes = filled([np.arange(4), np.arange(4), np.ones(4), np.ones(4)])
    assert num_kept(changes) == 2
    for place, first in enumerate([0, 0, 1, 1]):
        known, unknown = changes.at(place)
        assert known["thing"][0] == first and not unknown


def test_it_does_not_grow_without_end_and_what_was_left_out_is_named():
    changes = filled([{"count": place} for place in range(5000)])
    assert num_kept(changes) == (1 << 12) // 40 + 1, "and where it is not known"
    assert changes.at(4999) == ({"thing": {"count": 4999}}, [])
    assert changes.at(10) == ({}, ["thing"])


def test_the_newest_is_kept_whatever_its_size_and_what_is_called_too_large_is_not_known():
    changes = filled([[0.5] * 1000, [0.5] * 2000])
    assert changes.at(0) == ({}, ["thing"]) and len(changes.at(1)[0]["thing"]) == 2000
    changes = filled([1, None, None, 2])
    assert [changes.at(place)[0].get("thing") for place in range(4)] == [1, None, None, 2]
    assert num_kept(changes) == 3


def test_a_thing_that_came_later_was_not_there_before_and_one_that_is_not_given_is_as_it_was():
    changes = filled([1, 2])
    changes.add(2, {"other": 5})
    assert changes.at(1) == ({"thing": 2}, [])
    assert changes.at(2) == ({"thing": 2, "other": 5}, [])


def test_a_script_that_comes_by_a_place_again_forgets_what_came_after_it():
    changes = filled([1, 2, 3])
    changes.add(1, {"thing": 7})
    assert changes.at(2) == ({"thing": 7}, [])


def test_what_was_kept_comes_back_and_goes_on():
    changes, again = filled([{"count": place} for place in range(300)]), Changes(1 << 12)
    again.restore(changes.capture())
    assert [again.at(place) for place in range(300)] == [changes.at(place) for place in range(300)]
    again.add(300, {"thing": {"count": 300}})
    assert num_kept(again) == num_kept(changes)
