"""The journal of a run, and `duoka verify`, which compares two of them."""

import json
import threading

import pytest

from duoka.cli.main import main
from duoka.errors import JournalError
from duoka.events import Checked, Drifted
from duoka.monitor.journal import FILE_NAME, Journal, read_journal

RUN = {"replicas": 4, "seed": 0, "threads": 1, "duoka": "0"}


def journal_in(directory, *, is_main=True, warn=None, run=RUN) -> Journal:
    directory.mkdir(exist_ok=True)
    standing = {"generation": 1, "workers": [0, 2]}
    return Journal(directory / FILE_NAME, run, lambda: standing, lambda: is_main, warn or pytest.fail, lambda: 12.0)


def write(directory, digests, run=RUN):
    journal = journal_in(directory, run=run)
    for step, digest in digests.items():
        journal.see(Checked(step, digest, 0.01, 0.002))
    journal.flush()
    return directory


def test_a_journal_begins_with_the_run_and_has_a_strict_line_for_each_event(tmp_path):
    journal = journal_in(tmp_path)
    journal.see(Checked(100, "ab", 0.01, 0.002))
    journal.see(Drifted(200, (1,), "bias", 3))
    journal.flush()
    first, checked, drifted = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert first == {"kind": "run"} | RUN
    standing = {"generation": 1, "workers": [0, 2], "time": 12.0}
    assert checked == {"kind": "checked", "step": 100, "digest": "ab", "seconds": 0.01, "share": 0.002} | standing
    assert drifted == {"kind": "drifted", "step": 200, "drifted": [1], "first": "bias", "num_tensors": 3} | standing


def test_a_worker_that_becomes_the_main_one_goes_on_in_the_same_file(tmp_path):
    write(tmp_path, {0: "a", 100: "b"})
    write(tmp_path, {200: "c"})
    lines = (tmp_path / FILE_NAME).read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["run", "checked", "checked", "checked"]


def test_other_workers_write_nothing(tmp_path):
    journal = journal_in(tmp_path, is_main=False)
    journal.see(Checked(100, "ab", 0.01, 0.002))
    journal.flush()
    assert not (tmp_path / FILE_NAME).exists()


def test_a_directory_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path):
    said: list[str] = []
    journal = journal_in(tmp_path / "run", warn=said.append)
    (tmp_path / "run").rmdir()
    for step in range(3):
        journal.see(Checked(step, "ab", 0.01, 0.002))
    journal.flush()
    assert said == [f"{tmp_path / 'run' / FILE_NAME} is not complete (No such file or directory); the run goes on."]


def test_a_disk_that_hangs_holds_nobody_up(tmp_path, monkeypatch):
    hanging = threading.Event()
    said: list[str] = []
    journal = journal_in(tmp_path, warn=said.append)
    monkeypatch.setattr(journal, "_append", lambda line: hanging.wait(20))
    for step in range(1500):
        journal.see(Checked(step, "ab", 0.01, 0.002))
    assert said == [f"{tmp_path / FILE_NAME} is not complete (its disk is too slow); the run goes on."]
    hanging.set()


def test_a_last_line_that_was_cut_off_does_not_count(tmp_path):
    path = write(tmp_path, {0: "a", 100: "b"}) / FILE_NAME
    path.write_text(path.read_text()[:-5])
    assert list(read_journal(tmp_path).checks) == [0]


@pytest.mark.parametrize(
    "damage", ["[1]", '{"kind": "checked"}', '{"kind": "checked", "step": NaN, "digest": "a"}', "{"]
)
def test_a_line_that_is_no_record_is_named(tmp_path, damage):
    path = write(tmp_path, {0: "a"}) / FILE_NAME
    path.write_text(path.read_text() + damage + "\n")
    with pytest.raises(JournalError, match="line 3"):
        read_journal(tmp_path)


def verify(capsys, a, b) -> tuple[int, str]:
    code = main(["verify", str(a), str(b)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_runs_with_equal_digests_at_all_common_steps_are_equal(tmp_path, capsys):
    a = write(tmp_path / "a", {0: "x", 100: "y", 200: "z"})
    b = write(tmp_path / "b", {0: "x", 50: "w", 100: "y"})
    assert verify(capsys, a, b) == (0, "equal: 2 steps checked in both, from 0 to 100\n")
    assert verify(capsys, a / FILE_NAME, b)[0] == 0


def test_the_first_step_where_runs_part_is_printed(tmp_path, capsys):
    a = write(tmp_path / "a", {0: "x", 100: "y", 200: "z", 300: "u"})
    b = write(tmp_path / "b", {0: "x", 100: "y", 200: "other", 300: "u"})
    code, text = verify(capsys, a, b)
    assert code == 1
    assert "they part at step 200 (equal until step 100; 4 steps checked in both)" in text
    assert "z (generation 1, workers [0, 2])" in text and "other (generation 1" in text


def test_of_a_step_that_was_done_again_the_later_check_counts(tmp_path, capsys):
    a, b = write(tmp_path / "a", {0: "x", 100: "wrong"}), write(tmp_path / "b", {0: "x", 100: "y"})
    assert verify(capsys, a, b)[0] == 1
    write(a, {100: "y"})
    assert verify(capsys, a, b)[0] == 0


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ((RUN, {0: "x"}), (RUN | {"replicas": 2}, {0: "x"}), "replicas is 4 in one and 2 in the other"),
        ((RUN, {0: "x"}), (RUN | {"seed": 1}, {0: "x"}), "seed is 0 in one and 1 in the other"),
        ((RUN, {10: "x"}), (RUN, {3: "x", 6: "x"}), "no step was checked in both"),
    ],
)
def test_runs_that_cannot_be_compared_are_not_called_different(tmp_path, capsys, a, b, said):
    code, text = verify(capsys, write(tmp_path / "a", a[1], a[0]), write(tmp_path / "b", b[1], b[0]))
    assert code == 2
    assert said in text


def test_a_directory_without_a_journal_is_said(tmp_path, capsys):
    code, text = verify(capsys, tmp_path, tmp_path)
    assert code == 2
    assert f"{tmp_path / FILE_NAME} cannot be read: No such file or directory." in text


def test_what_explains_a_difference_is_said(tmp_path, capsys):
    a, b = write(tmp_path / "a", {0: "x", 100: "y"}), write(tmp_path / "b", {0: "x"})
    journal = journal_in(b, run=RUN)
    journal.see(Drifted(100, (1,), "bias", 3))
    journal.see(Checked(100, "other", 0.01, 0.002))
    journal.flush()
    code, text = verify(capsys, a, b)
    assert code == 1
    assert "worker 1 drifted, and was removed before step 100" in text
