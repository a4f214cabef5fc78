"""What the workers print: the main worker unchanged, the others once and only if they say something else."""

import errno
import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.errors import LaunchError
from duoka.runtime import output
from duoka.runtime.output import LONGEST_LINE, Fold, Logs, make_run_directory, name_workers


class Screen:
    """A fold with a clock held still; ``out`` and ``err`` hold what was written, one entry per write."""

    def __init__(self, **options):
        self.now = 0.0
        self.out, self.err = [], []
        self.fold = Fold(self.out.append, self.err.append, lambda: self.now, **options)
        self.feed = self.fold.feed

    def wait(self, seconds):
        self.now += seconds
        self.fold.flush_due()

    @property
    def text(self):
        return b"".join(self.out)


def test_the_main_worker_passes_at_once_and_byte_for_byte():
    screen = Screen()
    for data in (b"50%\r", b"\xff\xfe", b"100%\r\n", b"no newline"):
        screen.feed(0, "out", data)
        assert screen.out[-1] == data


def test_a_line_the_main_worker_has_printed_disappears():
    screen = Screen()
    screen.feed(0, "out", b"loss 1\n")
    screen.feed(1, "out", b"loss 1\n")
    screen.fold.close()
    assert screen.text == b"loss 1\n"


def test_a_line_the_main_worker_prints_meanwhile_disappears():
    screen = Screen()
    screen.feed(1, "out", b"loss 1\n")
    screen.wait(0.2)
    screen.feed(0, "out", b"loss")
    screen.feed(0, "out", b" 1\n")
    assert screen.fold.next_due() is None
    screen.wait(1)
    assert screen.text == b"loss 1\n"


def test_each_line_of_the_main_worker_stands_for_one_line_of_every_other():
    screen = Screen()
    screen.feed(1, "out", b"x\nx\nx\n")
    screen.feed(0, "out", b"x\nx\n")
    screen.feed(2, "out", b"x\nx\nx\n")
    screen.fold.close()
    assert screen.text == b"x\nx\n[w1-2] x\n"


MESSAGES = [
    (b"%s: I tensorflow/core/util/port.cc:153] oneDNN\n", b"2026-11-18 02:54:23.123456", b"2026-11-18 02:54:24.7"),
    (b"I0000 00:00:%s service.cc:152] XLA\n", b"1763434463.123456    4221", b"1763434464.654321   14222"),
    (b"E1118 02:54:%s cuda_dnn.cc:8310] of no use\n", b"23.123456 140001", b"24.654321 140002"),
    (b"I0000 00:00:1763434463.1 7 x.cc:1] service %s (Host)\n", b"0x7f3a2c004e70", b"0x55d0c1"),
]


@pytest.mark.parametrize(("form", "first", "second"), MESSAGES)
def test_log_messages_that_differ_in_time_process_and_address_only_are_shown_once(form, first, second):
    screen = Screen()
    screen.feed(1, "err", form % second)  # before the main worker, and after it
    screen.feed(0, "err", form % first)
    screen.feed(2, "err", form % second)
    screen.fold.close()
    assert screen.err == [form % first]


def test_log_messages_of_several_workers_are_shown_as_one_that_names_them():
    screen = Screen()
    form = b"I0000 00:00:176343446%d.1   4221 service.cc:152] %s\n"
    for worker in (1, 2):
        screen.feed(worker, "err", form % (worker, b"XLA"))
    screen.feed(3, "err", form % (3, b"something else"))
    screen.fold.close()
    assert screen.err == [b"[w1-2] " + form % (1, b"XLA"), b"[w3] " + form % (3, b"something else")]


def test_times_and_addresses_in_what_a_script_prints_are_its_own():
    screen = Screen()
    for worker, line in enumerate((b"2026-11-18 02:54:23.1: loss 0x1f\n", b"2026-11-18 02:54:24.1: loss 0x1f\n")):
        screen.feed(worker, "err", line)
    screen.fold.close()
    assert len(screen.err) == 2


def test_streams_are_matched_apart():
    screen = Screen()
    screen.feed(0, "out", b"x\n")
    screen.feed(1, "err", b"x\n")
    screen.fold.close()
    assert (screen.text, screen.err) == (b"x\n", [b"[w1] x\n"])


def test_a_line_waits_as_long_as_it_was_told():
    screen = Screen(hold_s=0.3)
    assert screen.fold.next_due() is None
    screen.feed(2, "out", b"hello\n")
    assert screen.fold.next_due() == 0.3
    screen.wait(0.29)
    assert screen.text == b""
    screen.wait(0.02)
    assert screen.text == b"[w2] hello\n"
    assert screen.fold.next_due() is None


def test_equal_lines_of_several_workers_are_folded_into_one():
    screen = Screen()
    for worker in (3, 1, 2, 5):
        screen.feed(worker, "out", b"hello\n")
    screen.feed(1, "out", b"bye\n")
    screen.feed(3, "out", b"bye\n")
    screen.wait(1)
    assert screen.text == b"[w1-3,w5] hello\n[w1,w3] bye\n"


def test_folding_never_changes_the_order_of_one_worker():
    screen = Screen()
    screen.feed(1, "out", b"a\nb\n")
    screen.feed(2, "out", b"b\na\n")
    screen.wait(1)
    assert screen.text == b"[w1] a\n[w1-2] b\n[w2] a\n"


def test_lines_of_others_start_on_a_fresh_line():
    screen = Screen()
    screen.feed(0, "out", b"epoch 1:")
    screen.feed(1, "out", b"hello\n")
    screen.wait(1)
    screen.feed(0, "out", b" done\n")
    screen.feed(1, "out", b"bye\n")
    screen.wait(1)
    assert screen.text == b"epoch 1:\n[w1] hello\n done\n[w1] bye\n"


@pytest.mark.parametrize(("one_screen", "expected"), [(True, [b"\n[w1] x\n"]), (False, [b"[w1] x\n"])])
def test_a_progress_bar_on_the_other_stream_counts_when_both_share_a_screen(one_screen, expected):
    screen = Screen(one_screen=one_screen)
    screen.feed(0, "err", b"\r50%")
    screen.feed(1, "out", b"x\n")
    screen.wait(1)
    assert (screen.out, screen.err) == (expected, [b"\r50%"])


def test_only_the_last_state_of_a_progress_bar_of_others_counts():
    screen = Screen()
    for part in (b"\r10%", b"\r50%", b"\r90%\r", b"\n"):
        screen.feed(1, "err", part)
    screen.feed(2, "err", b"windows\r\n")
    screen.fold.close()
    assert screen.err == [b"[w1] 90%\n", b"[w2] windows\n"]


def test_an_endless_progress_bar_keeps_its_last_state_only():
    screen = Screen()
    for step in range(20_000):
        screen.feed(1, "err", b"%d of many\r" % step)
    screen.fold.close()
    assert screen.err == [b"[w1] 19999 of many\n"]


def test_others_cannot_move_the_cursor_but_may_use_colour():
    screen = Screen()
    screen.feed(1, "out", b"\x1b[A\x1b[2K\x1b[31mred\x1b[0m\n")
    screen.fold.close()
    assert screen.text == b"[w1] \x1b[31mred\x1b[0m\n"


def test_unfinished_lines_are_shown_at_the_end_unless_the_main_worker_left_the_same():
    screen = Screen()
    screen.feed(0, "out", b"bye")
    screen.feed(1, "out", b"bye")
    screen.feed(2, "out", b"\xff")
    screen.fold.close()
    assert screen.text == b"bye\n[w2] \xff\n"


def test_a_worker_that_is_gone_leaves_its_unfinished_line_to_no_successor():
    screen = Screen()
    screen.feed(1, "out", b"half")
    screen.fold.end(1)
    screen.feed(1, "out", b"new\n")
    screen.fold.close()
    assert screen.text == b"[w1] half\n[w1] new\n"


def test_an_empty_line_of_another_worker_is_shown_without_trailing_space():
    screen = Screen()
    screen.feed(1, "out", b"\n")
    screen.fold.close()
    assert screen.text == b"[w1]\n"


def test_ten_megabytes_without_a_newline_are_cut_and_still_matched():
    screen = Screen()
    for _ in range(160):
        screen.feed(1, "out", b"x" * LONGEST_LINE)
        screen.feed(0, "out", b"x" * LONGEST_LINE)
    screen.fold.close()
    assert screen.text == b"x" * 160 * LONGEST_LINE


def test_a_line_that_is_too_long_is_shown_in_pieces():
    screen = Screen()
    screen.feed(2, "err", b"y" * (LONGEST_LINE + 1))
    screen.fold.close()
    assert screen.err == [b"[w2] " + b"y" * LONGEST_LINE + b"\n", b"[w2] y\n"]


def test_a_flood_is_shown_early_rather_than_kept():
    screen = Screen()
    screen.feed(1, "out", b"".join(b"%d\n" % k for k in range(50_000)))
    assert len(screen.out) == 50_000 - output.HELD_LINES
    screen.feed(1, "err", (b"z" * 60_000 + b"\n") * 200)
    assert sum(map(len, screen.err)) > 200 * 60_000 - output.HELD_BYTES - 60_000
    screen.fold.close()
    assert len(screen.out) == 50_000


def test_the_last_thousand_lines_of_the_main_worker_are_remembered():
    screen = Screen()
    screen.feed(0, "out", b"".join(b"%d\n" % k for k in range(output.REMEMBERED_LINES + 1)))
    screen.out.clear()
    screen.feed(1, "out", b"0\n1\n")
    screen.fold.close()
    assert screen.out == [b"[w1] 0\n"]


def test_a_forgotten_line_does_not_stand_for_a_later_one():
    screen = Screen()
    screen.feed(0, "out", b"x\n" * (output.REMEMBERED_LINES + 5))
    screen.out.clear()
    screen.feed(1, "out", b"x\n" * (output.REMEMBERED_LINES + 1))
    screen.fold.close()
    assert screen.out == [b"[w1] x\n"]


def test_the_new_main_worker_speaks_without_a_prefix():
    screen = Screen()
    screen.feed(0, "out", b"a\nbroken of")
    screen.feed(1, "out", b"a\nb\nhalf")
    screen.feed(2, "out", b"a\nb\n")
    screen.fold.move_main(1)
    screen.feed(1, "out", b" done\n")
    screen.feed(2, "out", b"half done\n")
    screen.feed(0, "out", b"f\n")
    screen.fold.close()
    assert screen.text == b"a\nbroken of\nb\nhalf done\n[w0] f\n"


def test_the_new_main_worker_starts_below_what_the_former_one_left_unfinished():
    screen = Screen()
    screen.feed(0, "out", b"broken of")
    screen.fold.move_main(1)
    screen.feed(1, "out", b"next\n")
    assert screen.text == b"broken of\nnext\n"


def test_what_a_late_main_worker_repeats_stands_for_nothing_twice():
    screen = Screen()
    screen.feed(0, "out", b"x\n")
    screen.fold.move_main(1)
    screen.feed(1, "out", b"x\n")
    screen.feed(2, "out", b"x\nx\n")
    screen.fold.close()
    assert screen.text == b"x\nx\n[w2] x\n"


PIECES = st.sampled_from([b"a\n", b"a\n", b"b\n", b"[w1] a\n", b"a", b"\n", b"\r", b"\xff"])
CHUNKS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["out", "out", "out", "err"]),
        st.lists(PIECES, min_size=1, max_size=5).map(b"".join),
        st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    ),
    min_size=4,
    max_size=30,
)


@given(CHUNKS)
def test_nothing_the_main_worker_prints_is_lost_or_altered(chunks):
    screen = Screen()
    for worker, stream, data, pause in chunks:
        before = [list(screen.out), list(screen.err)]
        screen.feed(worker, stream, data)
        if worker == 0 and data:
            before[stream == "err"].append(data)
        assert [screen.out, screen.err] == before
        screen.wait(pause)


def lines_of(chunks, worker, stream):
    text = b"".join(data for who, where, data, _ in chunks if (who, where) == (worker, stream))
    lines = text.split(b"\n")
    lines = lines if lines[-1] else lines[:-1]
    return Counter(line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)


@given(CHUNKS, st.booleans())
def test_every_line_of_others_is_shown_or_was_equal_to_one_of_the_main_worker(chunks, one_screen):
    screen = Screen(one_screen=one_screen)
    shown = {"out": [], "err": []}
    show = screen.fold._show_held
    screen.fold._show_held = lambda line: (shown[line.stream].append(line), show(line))
    for worker, stream, data, pause in chunks:
        screen.feed(worker, stream, data)
        screen.wait(pause)
    screen.fold.close()
    for stream, written in (("out", screen.out), ("err", screen.err)):
        main = lines_of(chunks, 0, stream)
        for worker in (1, 2):
            said = lines_of(chunks, worker, stream)
            visible = Counter(line.text for line in shown[stream] if worker in line.workers)
            assert visible <= said
            assert said - visible <= main, "a line disappeared that the main worker did not say"
        for line in shown[stream]:
            label = f"[{name_workers(line.workers)}]".encode()
            text = label + b" " + line.text if line.text else label
            assert text + b"\n" in written or b"\n" + text + b"\n" in written


@given(CHUNKS)
def test_lines_of_others_never_start_inside_another_line(chunks):
    screen = Screen()
    position = {"out": b"\n", "err": b"\n"}
    is_main = False

    def check(stream):
        def write(data):
            if not is_main:
                assert position[stream].endswith(b"\n") or data.startswith(b"\n")
                assert data.endswith(b"\n")
            position[stream] = data

        return write

    screen.fold = Fold(check("out"), check("err"), lambda: screen.now)
    for worker, stream, data, pause in chunks:
        is_main = worker == 0
        screen.fold.feed(worker, stream, data)
        is_main = False
        screen.wait(pause)
    screen.fold.close()


def test_logs_hold_every_byte_at_once_and_are_appended(tmp_path):
    logs = Logs(tmp_path, pytest.fail)
    logs.write(1, b"first \xff")
    assert logs.path(1).read_bytes() == b"first \xff"
    logs.close()
    logs = Logs(tmp_path, pytest.fail)
    logs.write(1, b" second\r")
    logs.close()
    assert (tmp_path / "worker-1.log").read_bytes() == b"first \xff second\r"
    assert not logs.path(0).exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path):
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    (tmp_path / "worker-1.log").symlink_to("/dev/full")
    said = []
    logs = Logs(tmp_path, said.append)
    for worker in (0, 1, 0, 1):
        logs.write(worker, b"x")
    logs.write(2, b"fits")
    logs.close()
    assert len(said) == 1
    assert "worker-0.log" in said[0] and os.strerror(errno.ENOSPC) in said[0]
    assert (tmp_path / "worker-2.log").read_bytes() == b"fits"


def test_a_run_directory_is_named_by_time(tmp_path):
    moment = time.mktime((2031, 2, 3, 4, 5, 6, 0, 0, -1))
    made = make_run_directory(tmp_path / "deep" / "runs", clock=lambda: moment)
    assert made.note is None and made.path.is_dir()
    assert made.path.parent == tmp_path / "deep" / "runs"
    assert made.path.name.startswith("20310203-040506-") and len(made.path.name) > 16


def test_runs_that_start_at_once_never_share_a_directory(tmp_path):
    tokens = iter("aaab")
    paths = {make_run_directory(tmp_path, None, lambda: 0.0, lambda: next(tokens)).path for _ in range(2)}
    assert len(paths) == 2
    made = []
    threads = [
        threading.Thread(target=lambda: made.append(make_run_directory(tmp_path, "mine").path)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert {path.name for path in made} == {"mine", *(f"mine-{k}" for k in range(2, 9))}


def test_a_base_that_cannot_be_written_gives_a_temporary_directory_and_a_note(tmp_path):
    (tmp_path / "file").write_text("")
    made = make_run_directory(tmp_path / "file" / "runs")
    try:
        assert made.path.is_dir()
        assert str(made.path) in made.note and os.strerror(errno.ENOTDIR) in made.note
    finally:
        made.path.rmdir()


def test_no_place_at_all_is_an_error_that_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(LaunchError, match="no place for the logs"):
        make_run_directory(Path(tmp_path / "file"))
