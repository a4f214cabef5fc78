"""What a progress shows, with a clock that is held still and a stream that remembers."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout

import numpy as np
import pytest

from duoka.errors import MismatchError
from duoka.monitor.displays import open_display
from duoka.monitor.lines import Lines
from duoka.monitor.progress import Progress, Reading


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Loop:
    """A strategy's loop: each global batch comes by `bodies` times, with `rows` rows."""

    def __init__(self, num_batches: int, bodies: int = 1, rows: int = 32, batches_before: int = 0) -> None:
        self.num_batches, self.bodies, self.rows, self.batches_before = num_batches, bodies, rows, batches_before
        self.at: tuple[int, int] | None = None

    def __len__(self) -> int:
        return self.batches_before + self.num_batches

    def __iter__(self):
        for batch in range(self.num_batches):
            for body in range(self.bodies):
                self.at = (1000 + batch, self.rows)
                yield batch, body
        self.at = None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def progress(
    iterable, clock, stream, *, desc=None, total=None, is_main=lambda: True, position=lambda: None, interval_s=5.0
):
    return Progress(iterable, desc, total, is_main, position, Lines(lambda: stream, clock, interval_s), clock)


def test_a_loop_gives_what_it_would_give_without_a_bar(clock, stream):
    assert list(progress([3, 1, 2], clock, stream)) == [3, 1, 2]
    assert len(progress([3, 1, 2], clock, stream)) == 3


def test_lines_come_every_few_seconds_and_one_at_the_end(clock, stream):
    loop = Loop(10)
    for _ in progress(loop, clock, stream, desc="epoch 1", position=lambda: loop.at):
        clock.now += 2
    assert stream.getvalue().splitlines() == [
        "epoch 1: 3/10 batches, 16 rows/s, 14 s left",
        "epoch 1: 6/10 batches, 16 rows/s, 8.0 s left",
        "epoch 1: 9/10 batches, 16 rows/s, 2.0 s left",
        "epoch 1: 10/10 batches, 16 rows/s, 20 s",
    ]


def test_a_batch_counts_once_however_many_bodies_it_has(clock, stream):
    loop = Loop(4, bodies=3)
    num_bodies = 0
    for _ in progress(loop, clock, stream, position=lambda: loop.at):
        num_bodies += 1
        clock.now += 1
    assert num_bodies == 12
    assert stream.getvalue().splitlines()[-1] == "4/4 batches, 10.7 rows/s, 12 s"


def test_without_a_length_or_batches_items_are_counted(clock, stream):
    for _ in progress(iter(range(7)), clock, stream, desc="files"):
        clock.now += 1
    assert stream.getvalue().splitlines()[-1] == "files: 7, 1/s, 7.0 s"


def test_an_evaluation_loop_that_comes_by_once_for_each_replica_counts_global_batches(clock, stream):
    class Evaluation(list):
        items_per_batch = 2

        def __len__(self):
            return 3

    for _ in progress(Evaluation([1, 2, 3, 4, 5, 6]), clock, stream):
        clock.now += 1
    assert stream.getvalue().splitlines()[-1] == "3/3, 0.5/s, 6.0 s"


def test_other_workers_show_nothing(clock, stream):
    for _ in progress(range(5), clock, stream, is_main=lambda: False):
        clock.now += 10
    assert stream.getvalue() == ""


def test_a_worker_that_becomes_the_main_one_goes_on_showing(clock, stream):
    role = {"main": False}
    for number in progress(range(5), clock, stream, is_main=lambda: role["main"]):
        clock.now += 10
        role["main"] = number >= 2
    assert stream.getvalue().splitlines()[-1].startswith("5/5")


def test_a_loop_that_is_left_early_ends_with_what_was_done(clock, stream):
    for number in progress(range(100), clock, stream):
        clock.now += 1
        if number == 3:
            break
    assert stream.getvalue().splitlines()[-1] == "3/100, 0.75/s, 4.0 s"


def test_values_are_shown_beside_the_count(clock, stream):
    bar = progress(range(2), clock, stream)
    for number in bar:
        bar.loss = number + 0.25
        bar.set(accuracy=0.5)
        clock.now += 1
    assert stream.getvalue() == "2/2, 1/s, loss 1.25, accuracy 0.5, 2.0 s\n"
    assert bar.loss == 1.25


class Later:
    """Like what strategy.mean gives in a loop body: not known before the batch is complete."""

    known = False

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        if not self.known:
            raise MismatchError("not known yet")
        return self.value


def test_a_value_that_is_not_known_yet_is_shown_one_batch_later(clock, stream):
    given = []

    def batches():
        for number in range(3):
            yield number
            given[-1].known = number != 1  # the second one stays unknown
            clock.now += 10

    bar = progress(batches(), clock, stream)
    for number in bar:
        given.append(Later(number + 1.0))
        bar.loss = given[-1]
    shown = [line.partition("loss ")[2].partition(",")[0] for line in stream.getvalue().splitlines()]
    assert shown == ["1", "1", "3"]


def test_a_tensor_of_several_elements_is_refused_on_every_worker(clock, stream):
    torch = pytest.importorskip("torch")
    bar = progress(range(1), clock, stream, is_main=lambda: False)
    with pytest.raises(MismatchError, match="loss, a tensor of 3 elements"):
        bar.loss = torch.zeros(3)
    bar.loss = torch.ones(1, requires_grad=True) * 2
    assert bar.loss.grad_fn is None


def test_long_counts_and_durations_are_written_as_people_read_them():
    reading = Reading("", 1500, 20_000, "batches", 12_345.6, "rows", (("loss", 0.00012346),), 1.0, 4000.0)
    assert reading.line == "1,500/20,000 batches, 12,346 rows/s, loss 0.0001235, 1:06:40 left"


# In the words of tqdm.


def test_a_bar_can_be_counted_up_by_hand_with_postfixes_as_text_or_numbers(clock, stream):
    with progress(None, clock, stream, desc="Epoch  1/ 2", total=3) as bar:
        for number in range(3):
            clock.now += 3
            bar.set_postfix({"loss": "%.4f" % (number + 0.5), "accuracy": "%.6f" % 0.25})  # noqa: UP031
            bar.update(1)
    assert stream.getvalue().splitlines() == [
        "Epoch  1/ 2: 2/3, 0.333/s, loss 1.5000, accuracy 0.250000, 3.0 s left",
        "Epoch  1/ 2: 3/3, 0.333/s, loss 2.5000, accuracy 0.250000, 9.0 s",
    ]


def test_a_postfix_replaces_the_one_before_and_a_description_the_description(clock, stream):
    bar = progress(range(2), clock, stream, desc="first")
    for number in bar:
        bar.set_postfix(loss=number, **({} if number else {"warm": 1}))
        bar.set_description("second")
        clock.now += 6
    assert stream.getvalue().splitlines() == [
        "second: 1/2, 0.167/s, loss 0, warm 1, 6.0 s left",
        "second: 2/2, 0.167/s, loss 1, 12 s",
    ]


def test_any_name_can_be_set_and_is_shown(clock, stream):
    bar = progress(range(1), clock, stream)
    for _ in bar:
        bar.accuracy = 0.75
        clock.now += 1
    assert "accuracy 0.75" in stream.getvalue()
    assert bar.accuracy == 0.75
    with pytest.raises(AttributeError, match="nothing of that name has been set"):
        _ = bar.recall
    with pytest.raises(MismatchError, match=r"progress\.update is a method"):
        bar.update = 3


def test_a_bar_around_a_loop_shows_one_last_line(clock, stream):
    with progress([1, 2], clock, stream) as bar:
        for _ in bar:
            clock.now += 1
    bar.close()
    assert stream.getvalue() == "2/2, 1/s, 2.0 s\n"


def test_a_total_that_is_given_stands_for_a_length_that_is_unknown(clock, stream):
    for _ in progress(iter([1, 2]), clock, stream, total=2):
        clock.now += 1
    assert stream.getvalue() == "2/2, 1/s, 2.0 s\n"


def test_an_error_in_the_block_leaves_the_last_line_and_goes_on(clock, stream):
    with pytest.raises(ZeroDivisionError), progress(None, clock, stream, total=2) as bar:
        clock.now += 1
        bar.update(1)
        raise ZeroDivisionError
    assert stream.getvalue() == "1/2, 1/s, 1.0 s\n"


def test_counting_by_hand_shows_nothing_on_other_workers_until_one_becomes_the_main_one(clock, stream):
    role = {"main": False}
    with progress(None, clock, stream, total=3, is_main=lambda: role["main"]) as bar:
        for number in range(3):
            clock.now += 10
            bar.update()
            assert stream.getvalue() == ""
            role["main"] = number == 2
    assert stream.getvalue() == "3/3, 0.1/s, 30 s\n"


def test_what_cannot_be_shown_is_refused_on_every_worker(clock, stream):
    bar = progress(range(1), clock, stream, is_main=lambda: False)
    with pytest.raises(MismatchError, match=r"loss, which is of type list(.|\n)*strategy\.reduce"):
        bar.set_postfix(loss=[1.0])
    with pytest.raises(MismatchError, match="loss, a tensor of 4 elements"):
        bar.loss = np.zeros((2, 2))
    with pytest.raises(MismatchError, match="nothing to iterate over"):
        next(iter(progress(None, clock, stream, total=3)))


# On a terminal.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """What is left to be seen: carriage returns and erasures carried out, colours left out."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue())
        return [line.split("\r\x1b[2K")[-1] for line in text.split("\n")]


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


def test_a_stream_that_is_no_terminal_gets_lines(stream, clock):
    assert isinstance(open_display(stream, None, clock), Lines)
    assert isinstance(open_display(Terminal(), 0, clock), Lines)


def test_a_dumb_terminal_gets_lines(terminal, clock, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_display(terminal, None, clock), Lines)


def test_on_a_terminal_one_line_is_drawn_again_and_a_last_one_stays(terminal, clock):
    display = open_display(terminal, 100, clock)
    loop = Loop(3)
    bar = Progress(loop, "epoch 1", None, lambda: True, lambda: loop.at, display, clock)
    seen = []
    for number, _ in bar:
        seen.append(terminal.screen()[-1])
        bar.loss = number + 0.5
        clock.now += 1
    assert all("━" in line and "epoch 1" in line for line in seen)
    assert "2/3 batches 32 rows/s, loss 1.5, 1.0 s left" in seen[2]
    assert terminal.screen() == ["epoch 1: 3/3 batches, 32 rows/s, loss 2.5, 3.0 s", ""]


def test_a_pass_that_goes_on_counts_from_where_it_was_and_its_speed_from_here(clock, stream):
    loop = Loop(2, batches_before=3)
    bar = progress(loop, clock, stream, desc="epoch 3", position=lambda: loop.at, interval_s=0)
    for _ in bar:
        clock.now += 1
    assert stream.getvalue().splitlines() == [
        "epoch 3: 3/5 batches",
        "epoch 3: 4/5 batches, 32 rows/s, 1.0 s left",
        "epoch 3: 5/5 batches, 32 rows/s, 2.0 s",
    ]


def test_what_the_script_prints_meanwhile_stays_above_the_bar(terminal, clock):
    display = open_display(terminal, 100, clock)
    with redirect_stdout(terminal):
        for number in Progress(range(3), "files", None, lambda: True, lambda: None, display, clock):
            print("line", number)
            clock.now += 1
        assert sys.stdout is terminal
    assert terminal.screen() == ["line 0", "line 1", "line 2", "files: 3/3, 1/s, 3.0 s", ""]


def test_a_line_that_the_script_has_begun_is_not_overwritten(terminal, clock):
    display = open_display(terminal, 100, clock)
    with redirect_stdout(terminal):
        for _ in Progress(range(3), "files", None, lambda: True, lambda: None, display, clock):
            print(".", end="")
            clock.now += 1
    assert terminal.screen() == ["...", "files: 3/3, 1/s, 3.0 s", ""]


def test_loops_within_loops_share_the_line(terminal, clock):
    display = open_display(terminal, 100, clock)
    seen = []
    for epoch in Progress(range(2), "epochs", None, lambda: True, lambda: None, display, clock):
        for _ in Progress(range(2), f"epoch {epoch}", None, lambda: True, lambda: None, display, clock):
            clock.now += 1
            seen.append(terminal.screen()[-1])
    assert "epochs" in seen[-1] and "epoch 1" in seen[-1]
    assert terminal.screen()[-2].startswith("epochs: 2/2")
    assert [line.split(":")[0] for line in terminal.screen()] == ["epoch 0", "epoch 1", "epochs", ""]


def test_a_line_is_never_longer_than_the_terminal(terminal, clock):
    display = open_display(terminal, 40, clock)
    bar = Progress(
        range(2), "a description of [some] length, with brackets", None, lambda: True, lambda: None, display, clock
    )
    for _ in bar:
        assert len(terminal.screen()[-1]) < 40
        bar.set(one=1.0, two=2.0, three=3.0)
        clock.now += 1
