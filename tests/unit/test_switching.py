"""Methods that do something else for a while, in one thread."""

from __future__ import annotations

from threading import Event, Thread

import pytest

from duoka.frameworks.switching import keeping_switches, places_of, switching


class Base:
    def speak(self) -> str:
        return "base"


class Below(Base):
    pass


class Own(Base):
    def speak(self) -> str:
        return "own"


def louder(former, self):
    return former(self) + "!"


def test_a_method_does_something_else_inside_and_is_as_it_was_afterwards():
    before = vars(Base)["speak"]
    with switching([(Base, "speak", louder)]):
        assert (Base().speak(), Below().speak(), Own().speak()) == ("base!", "base!", "own")
    assert vars(Base)["speak"] is before


def test_an_inherited_method_is_inherited_again_afterwards():
    with switching([(Below, "speak", louder)]):
        assert (Base().speak(), Below().speak()) == ("base", "base!")
    assert "speak" not in vars(Below)


def test_another_thread_goes_on_with_the_former_method():
    heard = []
    with switching([(Base, "speak", louder)]):
        thread = Thread(target=lambda: heard.append(Base().speak()))
        thread.start()
        thread.join(10)
    assert heard == ["base"]


def test_two_threads_that_watch_at_the_same_time_see_each_its_own():
    heard, watches, is_over = [], Event(), Event()

    def quieter(former, self):
        return former(self) + "."

    def watch():
        with switching([(Base, "speak", quieter)]):
            watches.set()
            is_over.wait(10)
            heard.append(Base().speak())

    thread = Thread(target=watch)
    with keeping_switches():
        with switching([(Base, "speak", louder)]):
            thread.start()
            assert watches.wait(10)
            assert Base().speak() == "base!"
        assert Base().speak() == "base"
        is_over.set()
        thread.join(10)
    assert heard == ["base."]


def test_inner_switches_call_outer_ones():
    with switching([(Base, "speak", louder)]), switching([(Base, "speak", louder)]):
        assert Base().speak() == "base!!"
    assert Base().speak() == "base"


def test_what_is_kept_stands_in_between_and_hands_on_until_it_is_taken_away():
    before = vars(Base)["speak"]
    with keeping_switches():
        with switching([(Base, "speak", louder)]):
            kept = vars(Base)["speak"]
        assert vars(Base)["speak"] is kept is not before
        assert Base().speak() == "base"
        with switching([(Base, "speak", louder)]):
            assert vars(Base)["speak"] is kept and Base().speak() == "base!"
    assert vars(Base)["speak"] is before


def test_an_error_inside_switches_back():
    with pytest.raises(ValueError), keeping_switches(), switching([(Base, "speak", louder)]):
        raise ValueError
    assert Base().speak() == "base"


def test_a_function_that_somebody_else_puts_there_meanwhile_stays(monkeypatch):
    with keeping_switches():
        with switching([(Own, "speak", louder)]):
            pass
        ours = Own.speak
        monkeypatch.setattr(Own, "speak", lambda self: ours(self) + "?")
    assert Own().speak() == "own?"


def test_a_class_that_is_defined_while_switches_are_kept_has_a_place():
    class Root:
        def speak(self):
            return "root"

    with keeping_switches():
        assert places_of(Root, ("speak",)) == [(Root, "speak")]

        class Late(Root):
            def speak(self):
                return "late"

        assert places_of(Root, ("speak",)) == [(Root, "speak"), (Late, "speak")]


def test_places_are_where_a_method_is_defined():
    assert places_of(Base, ("speak", "listen")) == [(Base, "speak"), (Own, "speak")]
