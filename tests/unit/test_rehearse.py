"""The comparison of two records, and what a rehearsal makes of its runs."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pytest

from duoka.cli import rehearse
from duoka.cli.main import main
from duoka.cli.rehearse import add_arguments, render, split_words
from duoka.errors import DeadlineExceeded, RehearsalError, ScriptFailed
from duoka.runtime.plan import Plan
from duoka.runtime.rehearsal.compare import TOLERANCE, compare, count_noise, find_noise
from duoka.runtime.rehearsal.record import Line, Record, Tensor, WorkerRecord, read_record
from duoka.runtime.rehearsal.recorder import PrintedLines, Recorder
from duoka.runtime.rehearsal.rehearsing import KINDS, ONE_REPLICA, REPEATED, RESUMED, Rehearsing
from duoka.runtime.rehearsal.runs import Finished, Run
from duoka.runtime.rehearsal.settings import Death, Rehearsal
from tests.conftest import plan_for


def tensor(name: str, *values: float, dtype: str = "float32") -> Tensor:
    return Tensor(name, f"({len(values)},) torch.{dtype}", np.array(values, dtype).tobytes())


def record(
    *lines: str, tensors: tuple[Tensor, ...] = (), losses: tuple[float, ...] = (), others: tuple[str, ...] = (), **facts
) -> Record:
    calls = [{"loss": [loss]} for loss in losses]
    main = WorkerRecord(0, True, 3, [Line(text, "train.py:1") for text in lines], calls, **facts)
    other = WorkerRecord(1, False, 3, [Line(text, "train.py:1") for text in others], phases=["arrived"])
    return Record(main, (other,), tensors)


# Comparing.


def test_equal_records_are_equal():
    one = record("a", tensors=(tensor("w", 1, float("nan")),), losses=(float("nan"),))
    assert compare(one, one).is_equal
    assert compare(one, record("a", tensors=(tensor("w", 1, float("nan")),), losses=(float("nan"),))).is_equal


def test_one_bit_of_a_weight_is_a_difference():
    one, other = (record(tensors=(tensor("w", 1, value),)) for value in (2, np.nextafter(np.float32(2), np.float32(3))))
    found = compare(one, other).found["weights"]
    assert found is not None and found.what.startswith("w, element 1")
    assert compare(one, other, tolerance=TOLERANCE).is_equal


def test_a_tolerance_is_relative_to_the_tensor():
    one, near, far = (record(tensors=(tensor("w", 100, value),)) for value in (0, 0.009, 0.02))
    assert compare(one, near, tolerance=TOLERANCE).is_equal
    assert not compare(one, far, tolerance=TOLERANCE).is_equal


def test_noise_in_the_momentum_of_one_tensor_is_measured_by_the_whole_momentum():
    names = ("momentum_buffer of weight in optimizer 1", "momentum_buffer of bias in optimizer 1")
    one, other = (record(tensors=(tensor(names[0], 1), tensor(names[1], noise))) for noise in (1e-9, -1e-9))
    assert compare(one, other, tolerance=TOLERANCE).is_equal
    assert not compare(one, other).is_equal


def test_other_tensors_are_a_difference():
    one, other = record(tensors=(tensor("w", 1),)), record(tensors=(tensor("w", 1), tensor("b", 1)))
    assert compare(one, other).found["weights"].right == "2 tensors"


def test_the_first_line_that_differs_is_shown_with_its_statement():
    found = compare(record("a", "b", "c"), record("a", "x", "y")).found["printed lines"]
    assert (found.what, found.left, found.right) == ("line 2, printed by train.py:1", "b", "x")


def test_a_missing_line_is_a_difference():
    assert compare(record("a"), record("a", "b")).found["printed lines"].left == "no such line"


def test_a_line_that_only_another_worker_prints_is_compared():
    one, other = record("a", others=("a", "I am worker 1")), record("a", others=("a",))
    found = compare(one, other).found["printed lines"]
    assert (found.left, found.right) == ("[w1] I am worker 1", "no such line")


@pytest.mark.parametrize(
    ("left", "right", "is_equal"),
    [
        ("loss 0.50001", "loss 0.50002", True),
        ("loss 0.12", "loss 0.13", True),  # one unit of the last digit
        ("loss 0.12", "loss 0.14", False),
        ("loss 1.2345e-05", "loss 1.2346e-05", True),
        ("correct 12", "correct 13", False),
        ("step 1 of worker", "step 1 of workers", False),
        ("model-v2 0.5", "model-v3 0.5", False),
    ],
)
def test_printed_numbers_have_a_tolerance_and_words_and_counts_do_not(left, right, is_equal):
    assert compare(record(left), record(right), tolerance=TOLERANCE).is_equal is is_equal
    assert not compare(record(left), record(right)).is_equal


def test_metrics_are_compared_call_by_call():
    found = compare(record(losses=(1.0, 2.0)), record(losses=(1.0, 2.5))).found["metrics"]
    assert (found.what, found.left, found.right) == ("loss of call 2 of strategy.backward", "2.0", "2.5")
    assert compare(record(losses=(1.0,)), record(losses=(1.0, 2.0))).found["metrics"].right == "2 calls"


def test_times_are_left_out_of_all_comparisons():
    first, second = record("loss 1", "took 0.1 s", "took 0.3 s"), record("loss 1", "took 0.2 s", "took 0.3 s")
    noise = find_noise(first, second)
    assert count_noise(first, noise) == 2, "all lines of that statement, although one of them is equal by chance"
    assert compare(first, record("loss 1", "took 9 s", "took 8 s"), noise).is_equal
    assert not compare(first, record("loss 2", "took 0.1 s", "took 0.3 s"), noise).is_equal


def test_lines_that_come_at_times_only_are_left_out():
    first, second = record("loss 1", "loss 2"), record("loss 1", "still here", "loss 2")
    assert compare(first, second, find_noise(first, second)).is_equal


# Recording.


class Stream:
    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


def test_printed_lines_are_passed_on_and_remembered_with_their_statement():
    stream = Stream()
    lines = PrintedLines(stream)
    print("a", 1, file=lines)
    print("b\nc", end="", file=lines)
    print(file=lines)
    assert stream.text == "a 1\nb\nc\n" and lines.encoding == "utf-8"
    assert [line.text for line in lines.lines] == ["a 1", "b", "c"]
    assert all("test_rehearse.py:" in line.where for line in lines.lines)


class State:
    lines = ("w: (2,) torch.float32", "step: int")

    def read(self, place: int):
        return (np.array([1, 2], np.float32), np.array([7]))[place].view(np.uint8)


def test_a_record_is_read_as_it_was_written(tmp_path):
    recorder = Recorder(Rehearsal("title", str(tmp_path), num_steps=2), worker=0)
    recorder.at_boundary(0, State)
    recorder.note_returned(0.5)
    recorder.at_boundary(1, State)
    with pytest.raises(SystemExit) as ended:
        recorder.at_boundary(2, State)
    assert ended.value.code == 0
    found = read_record(tmp_path)
    assert found.main.num_steps == 2 and found.main.calls == [{"loss": [0.5]}]
    assert found.tensors[0] == tensor("w", 1, 2) and found.tensors[1].name == "step"


def test_a_script_that_ends_by_itself_leaves_a_record(tmp_path):
    recorder = Recorder(Rehearsal("title", str(tmp_path), num_steps=20), worker=0)
    recorder.at_boundary(0, State)
    recorder.come_to_end()
    assert read_record(tmp_path).main.num_steps == 1


def test_settings_travel_in_the_plan():
    settings = Rehearsal("title", "/tmp/x", 3, Death(1, 2, "arrived"), dropout=False)
    plan = replace(plan_for(2, 2), rehearsal=settings)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan_for(2, 2).to_json()).rehearsal is None


# A rehearsal.


class FakeRuns:
    """Answers each run by the first of these records whose key is part of its name."""

    def __init__(self, default: Record | Run, **records: Record | Run) -> None:
        self._default, self._records = default, records
        self.names: list[str] = []
        self.deaths: list[Death] = []

    def run(self, name, plan, *, death=None, dropout=True, batchnorm=True, stop=None, resumes=False) -> Run:
        self.names.append(name)
        found = next((each for key, each in self._records.items() if key in name), self._default)
        if isinstance(found, Run):
            return found
        if death is not None:
            self.deaths.append(death)
            found = replace(found, others=(replace(found.others[0], killed=(death.step, death.phase)),))
        return Run(Finished(0, "", 1.0), found)


def carry_out(runs: FakeRuns, seed: int = 1):
    return Rehearsing(plan_for(2, 2), runs, 3, seed, tell=lambda text: None).carry_out()


def failed(exit_code: int | None = 1) -> Run:
    return Run(Finished(exit_code, "Traceback: it broke", 2.0), None)


GOOD = record("a", tensors=(tensor("w", 1),), losses=(1.0,), knows_layers=True)
OTHER = record("a", tensors=(tensor("w", 2),), losses=(1.0,), knows_layers=True)


def test_equal_runs_have_no_findings():
    report = carry_out(runs := FakeRuns(GOOD))
    assert not report.has_findings and [row.kind for row in report.rows] == list(KINDS)
    assert len(runs.names) == 6, "without dropout the first run is compared with one replica"


def test_dropout_needs_one_more_run():
    carry_out(runs := FakeRuns(replace(GOOD, main=replace(GOOD.main, has_dropout=True))))
    assert "2-replicas-dropout-off" in runs.names


def test_the_same_seed_kills_the_same_worker_in_the_same_place():
    first, second, *others = (FakeRuns(GOOD) for _ in range(12))
    for seed, runs in enumerate((first, second, *others)):
        carry_out(runs, seed=max(0, seed - 1))
    assert first.deaths == second.deaths
    assert {death.worker for death in first.deaths} == {1}, "never the main worker"
    assert len({runs.deaths[0] for runs in others}) > 1


def test_two_undisturbed_runs_that_differ_are_a_finding_and_end_the_rehearsal():
    report = carry_out(runs := FakeRuns(GOOD, repeated=OTHER))
    assert report.has_findings and len(runs.names) == 2
    assert [row.kind for row in report.rows if row.is_finding] == [REPEATED]
    assert "seed every generator" in render(report)


def test_a_difference_that_batchnorm_explains_is_no_finding():
    normal = replace(GOOD, main=replace(GOOD.main, has_batchnorm=True))
    explained = {"held": normal, "1-replica-dropout-off": OTHER}
    report = carry_out(FakeRuns(normal, **explained))
    assert not report.has_findings and report.rows[-1].is_batchnorm
    assert "BatchNorm" in render(report)


def test_a_difference_that_batchnorm_does_not_explain_is_a_finding():
    normal = replace(GOOD, main=replace(GOOD.main, has_batchnorm=True))
    report = carry_out(FakeRuns(normal, **{"1-replica-batchnorm-held": OTHER, "1-replica-dropout-off": OTHER}))
    assert report.has_findings and not report.rows[-1].is_batchnorm


def test_one_replica_is_left_out_where_layers_are_not_known():
    report = carry_out(FakeRuns(replace(GOOD, main=replace(GOOD.main, knows_layers=False))))
    assert report.rows[-1].kind == ONE_REPLICA and report.rows[-1].reason and not report.has_findings


def test_a_run_that_fails_only_when_disturbed_is_a_finding():
    report = carry_out(FakeRuns(GOOD, killed=failed()))
    assert report.has_findings and "Traceback: it broke" in render(report)


def test_what_a_stopped_and_a_resumed_run_have_printed_is_put_together():
    begin = record("a", losses=(1.0,), stopped="in epoch 0")
    whole = record("a", "b", losses=(1.0, 2.0), tensors=(tensor("w", 1),))
    rest = record("b", losses=(2.0,), tensors=(tensor("w", 1),))
    report = carry_out(FakeRuns(whole, stopped=begin, resumed=rest))
    assert next(row for row in report.rows if row.kind == RESUMED).comparison.is_equal
    report = carry_out(FakeRuns(whole, stopped=begin, resumed=record("c", losses=(2.0,), tensors=(tensor("w", 1),))))
    assert [row.kind for row in report.rows if row.is_finding] == [RESUMED]


def test_a_kill_that_never_happened_is_a_finding():
    runs = FakeRuns(GOOD, killed=Run(Finished(0, "", 1.0), GOOD))
    assert carry_out(runs).has_findings


def test_a_script_that_fails_by_itself_is_an_error():
    with pytest.raises(ScriptFailed, match="it broke"):
        carry_out(FakeRuns(failed()))
    with pytest.raises(DeadlineExceeded):
        carry_out(FakeRuns(failed(None)))
    with pytest.raises(RehearsalError, match="without training"):
        carry_out(FakeRuns(replace(GOOD, main=replace(GOOD.main, num_steps=0))))


# The command line.


@pytest.mark.parametrize(("of_one_worker", "code"), [(GOOD, 0), (OTHER, 1)])
def test_the_exit_code_tells_whether_something_differs(tmp_path, monkeypatch, capsys, of_one_worker, code):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rehearse, "find_plan", lambda *args: plan_for(2, 2))
    monkeypatch.setattr(rehearse, "Runs", lambda *args: FakeRuns(GOOD, **{"on-1-worker": of_one_worker}))
    assert main(["rehearse", "train.py"]) == code
    assert ("differs" in capsys.readouterr().out) is (code == 1)


@pytest.mark.parametrize("words", [["missing.py"], ["--steps", "0", "train.py"], ["--timeout", "0", "train.py"]])
def test_a_refusal_has_another_exit_code_than_a_difference(tmp_path, monkeypatch, words):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["rehearse", *words]) == 2


def split(*words: str):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return split_words(parser.parse_args(words))


@pytest.mark.parametrize(
    ("words", "steps", "rest"),
    [
        (("train.py",), None, ["train.py"]),
        (("train.py", "--steps", "5", "--data", "d"), 5, ["train.py", "--data", "d"]),
        (("train.py", "--steps=5", "--devices", "4", "x"), 5, ["train.py", "x"]),
        (("--steps", "5", "train.py", "--steps", "900"), 5, ["train.py", "--steps", "900"]),
        (("train.py", "--", "--steps", "900"), None, ["train.py", "--steps", "900"]),
        (("train.py", "--data", "d", "--steps", "900"), None, ["train.py", "--data", "d", "--steps", "900"]),
        (("-m", "package.train", "--steps", "5", "x"), 5, ["-m", "package.train", "x"]),
    ],
)
def test_options_stand_before_the_script_or_right_behind_it(words, steps, rest):
    options, found = split(*words)
    assert (options.steps, found) == (steps, rest)
