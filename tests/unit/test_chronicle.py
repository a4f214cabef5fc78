import os
import signal
import time

import numpy as np
import pytest

from duoka.collectives.answers import Answers, Replayed
from duoka.collectives.chronicle import Chronicle
from duoka.errors import CannotJoin


@pytest.fixture
def fd():
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def member(fd: int) -> Answers:
    return Answers(Chronicle(fd), lambda: None, is_replaying=False)


def newcomer(fd: int, wait=None) -> Answers:
    return Answers(Chronicle(fd), wait or pytest.fail, is_replaying=True)


def add(answers: Answers, name: str, *values: float) -> None:
    answers.add(name, lambda: [np.array(value) for value in values])


def test_what_two_members_called_is_there_once_and_answers_a_newcomer(fd):
    for each in (member(fd), member(fd)):
        add(each, "sum", 1.5)
        add(each, "gather", 1, 2)
    late = newcomer(fd)
    assert late.has_more()
    assert [a.item() for a in late.take("sum")] == [1.5]
    assert [a.item() for a in late.take("gather")] == [1, 2]
    assert not late.has_more() and late.num_passed == 2


def test_a_newcomer_that_calls_something_else_is_told_what_the_others_called(fd):
    add(member(fd), "broadcast from replica 0", 1)
    with pytest.raises(CannotJoin, match="it calls 'barrier', where the others called 'broadcast from replica 0'"):
        newcomer(fd).take("barrier")


def test_a_newcomer_that_is_ahead_waits_for_the_others(fd):
    other, waits = member(fd), []

    def wait() -> None:
        waits.append(1)
        if len(waits) == 3:
            add(other, "sum", 7)

    assert newcomer(fd, wait).take("sum")[0] == 7 and len(waits) == 3


def test_calls_within_steps_leave_no_record(fd):
    each = member(fd)
    each.is_in_step = True
    assert each.answer("sum", lambda: 3, lambda r: [np.array(r)], lambda a: a) == 3
    each.is_in_step = False
    with each.pausing():
        each.mark("somewhere", {})
    assert Chronicle(fd).length == 0 and each.num_passed == 0


def test_marks_of_loaders_that_end_in_another_order_are_found(fd):
    each = member(fd)
    each.mark("end of loader 1", {"step": 4})
    each.mark("end of loader 0", {"step": 5})
    add(each, "sum", 2)
    late = newcomer(fd)
    assert late.take_mark("end of loader 0") == {"step": 5}
    assert late.take_mark("end of loader 1") == {"step": 4}
    assert late.take("sum")[0] == 2 and late.num_passed == each.num_passed == 3
    with pytest.raises(CannotJoin):
        newcomer(fd).take_mark("end of loader 2")


def test_a_newcomer_jumps_to_the_last_mark_of_a_place(fd):
    each = member(fd)
    for epoch in range(3):
        each.mark("epoch", {"epoch": epoch})
        add(each, "sum", epoch)
    late = newcomer(fd)
    assert late.jump_to_last("epoch") == {"epoch": 2}
    assert late.take("sum")[0] == 2 and late.num_passed == 6
    assert late.jump_to_last("epoch") is None


def test_a_list_that_is_full_takes_no_more_and_a_newcomer_says_so(fd):
    each = Answers(Chronicle(fd, most_bytes=1000), lambda: None, is_replaying=False)
    add(each, "small", 1)
    each.add("large", lambda: [np.zeros(1000)])
    add(each, "small", 2)
    late = newcomer(fd)
    late.take("small")
    with pytest.raises(CannotJoin, match="is not known any more"):
        late.take("large")


def test_an_old_exchange_has_its_sums_and_notes_and_misses_nothing(fd):
    add(member(fd), "exchange of a, b", 5, 6)
    buffers = [object(), object()]
    exchange = Replayed(newcomer(fd), "exchange of a, b", buffers)
    exchange.carry_out(lambda replica: pytest.fail("nothing is to be computed"))
    assert exchange.result(buffers[1]) == 6


def test_one_killed_between_the_first_record_and_the_head_leaves_an_empty_list(fd):
    os.pwrite(fd, b"what came of a call", 64)
    each = member(fd)
    add(each, "sum", 3)
    assert newcomer(fd).take("sum")[0] == 3


def test_a_member_killed_while_it_writes_leaves_the_list_whole(fd):
    for attempt in range(20):
        start = Chronicle(fd).length
        if (pid := os.fork()) == 0:
            each = member(fd)
            each.num_passed = start
            while True:
                add(each, "sum", *range(50))
        time.sleep(0.0002 * attempt)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    each, late = member(fd), newcomer(fd)
    each.num_passed = Chronicle(fd).length
    add(each, "last", 1)
    while late.has_more():
        late.take("sum" if late.num_passed < each.num_passed - 1 else "last")
    assert late.num_passed == each.num_passed
