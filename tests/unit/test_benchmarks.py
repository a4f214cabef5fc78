"""The statistics and the tables of the benchmarks, without a framework."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch):
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in set(sys.modules) - before:
        if (BENCHMARKS / f"{name}.py").exists():
            del sys.modules[name]


def test_each_contestant_has_each_position_equally_often():
    import paired

    names = ["a", "b", "c", "d"]
    positions = [paired.order(names, number).index("a") for number in range(8)]
    assert sorted(positions) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_direction_changes_so_that_no_contestant_always_follows_the_same_one():
    import paired

    orders = [paired.order(["a", "b", "c", "d"], number) for number in range(8)]
    before_b = {order[order.index("b") - 1] for order in orders if order[0] != "b"}
    assert before_b == {"a", "c"}


def test_a_round_runs_the_peer_twice_and_the_warm_up_is_not_counted():
    import paired

    ran = []

    def run_burst(name):
        ran.append(name)
        return [len(ran) * 1.0]

    found = paired.run_rounds(paired.arrange(["ddp"]), run_burst, num_rounds=3)
    assert ran.count("ddp") == 2 * (1 + 3)
    assert ran.count("duoka") == ran.count("floor") == 1 + 3
    assert {name: len(rounds) for name, rounds in found.items()} == dict.fromkeys(paired.arrange(["ddp"]), 3)


def test_a_contestant_that_fails_is_left_out_of_all_rounds():
    import paired

    calls = []

    def run_burst(name):
        calls.append(name)
        return None if name == "hangs" and calls.count("hangs") == 3 else [1.0]

    found = paired.run_rounds(paired.arrange(["ddp", "hangs"]), run_burst, num_rounds=4)
    assert sorted(found) == ["ddp", "ddp again", "duoka", "floor"]
    assert calls.count("hangs") == 3
    assert all(len(rounds) == 4 for rounds in found.values())


def test_the_first_step_of_a_burst_is_left_out_unless_it_is_the_only_one():
    import paired

    assert paired.typical([9.0, 1.0, 2.0, 3.0]) == 2.0
    assert paired.typical([9.0]) == 9.0


def test_the_range_holds_the_middle_eighty_percent():
    import paired

    spread = paired.Spread.of([float(n) for n in range(11)])
    assert (spread.median, spread.low, spread.high, spread.count) == (5.0, 1.0, 9.0, 11)


def test_a_machine_that_slows_down_does_not_change_a_paired_ratio():
    import paired

    slowness = [1.0, 1.0, 1.0, 3.0, 3.0]
    contest = paired.Contest({"duoka": [10 * s for s in slowness], "ddp": [15 * s for s in slowness]})
    ratio = contest.against("ddp")
    assert (ratio.median, ratio.low, ratio.high) == (1.5, 1.5, 1.5)


def test_each_burst_of_the_peer_is_a_ratio_of_its_own():
    import paired

    contest = paired.Contest({"ddp": [10.0] * 3, "ddp again": [15.0] * 3, "duoka": [6.0] * 3})
    assert contest.against("ddp").median == pytest.approx((10 / 6 + 15 / 6) / 2)
    assert contest.in_times_of("ddp").median == pytest.approx((6 / 10 + 6 / 15) / 2)
    assert contest.against("ddp").count == contest.in_times_of("ddp").count == 6
    assert contest.typical("ddp") == 12.5


@pytest.mark.parametrize(("second", "is_noise"), [(10.2, False), (10.5, True), (9.5, True)])
def test_a_row_whose_peer_differs_from_itself_says_noise(second, is_noise):
    import paired

    contest = paired.Contest({"ddp": [10.0] * 15, "ddp again": [second] * 15, "duoka": [8.0] * 15, "floor": [6.0] * 15})
    assert ("noise" in paired.quick_row("a case", contest, "ddp")) == is_noise


def test_the_quick_row_has_as_many_cells_as_its_header():
    import paired

    contest = paired.Contest({"ddp": [10.0, 11.0], "ddp again": [10.0, 11.0], "duoka": [8.0, 8.0], "floor": [4.0, 4.0]})
    row = paired.quick_row("a case", contest, "ddp")
    assert row.count("|") == paired.QUICK_HEADER.splitlines()[0].count("|")
    assert row == (
        "| a case, against ddp | 1.31 | 1.25 to 1.38 | 1.00 (1.00 to 1.00) | 2.00 (2.00 to 2.00)"
        " | ddp 10.5, duoka 8, floor 4, duoka - floor 4 ms |"
    )


def test_the_better_peer_is_found_by_its_kind_at_any_number_of_threads():
    import paired

    contest = paired.Contest({"plain 1": [4.0], "mirrored 1": [3.0], "mirrored 2": [2.0], "duoka": [1.0]})
    assert contest.better(("mirrored", "hierarchical")) == "mirrored 2"
    assert contest.better(("plain 1",)) == "plain 1"
    assert contest.better(("dataparallel",)) is None


def test_numbers_survive_a_file():
    import paired

    contest = paired.Contest({"duoka": [1.23456789, 2.0], "ddp": [3.0, 4.0]})
    assert paired.Contest.read(json.loads(json.dumps(contest.write()))).times == {
        "duoka": [1.2346, 2.0],
        "ddp": [3.0, 4.0],
    }


def test_all_headlines_are_rows_of_the_numbers_on_file():
    import run

    rows = run.headlines(run.make_rows(run.merge(json.loads(run.NUMBERS.read_text()))))
    assert [row.what for row in rows] == list(run.HEADLINES)
    assert len(rows) == 10


def test_numbers_of_before_the_rounds_show_no_range_and_new_ones_do():
    import run

    numbers = run.merge(json.loads(run.NUMBERS.read_text()))
    old = {"ddp": 100.0, "accelerate": 90.0, "fabric": 95.0, "duoka": 50.0, "half": 40.0, "alone": 80.0, "memcpy": 4.0}
    numbers["torch_step_ms"] = dict.fromkeys((run.MLP_16, run.MLP_128, run.RESNET), old)
    assert _row(run, numbers, f"{run.MLP_16}, against ddp").measured == "2.00x"
    new = {name: [value, 1.1 * value] for name, value in old.items() if name != "half"}
    new |= {"ddp again": new["ddp"], "duoka": [50.0, 50.0], "floor": [40.0, 40.0]}
    numbers["torch_step_ms"] = dict.fromkeys((run.MLP_16, run.MLP_128, run.RESNET), new)
    row = _row(run, numbers, f"{run.MLP_16}, against ddp")
    assert (row.measured, row.control) == ("2.10x (2.00 to 2.20)", "1.00")
    known = json.loads(run.NUMBERS.read_text())
    assert "| floor |" in run.make_results(known, numbers, run.make_rows(numbers))


def _row(run, numbers, what):
    return next(row for row in run.make_rows(numbers) if row.what == what)


def test_round_times_stay_on_one_line_of_the_numbers_file():
    import run

    text = run.to_json({"a": {"numbers": {"duoka": [1.0, 2.0, 3.0]}}})
    assert '"duoka": [ 1.0, 2.0, 3.0 ]' in text
    assert json.loads(text) == {"a": {"numbers": {"duoka": [1.0, 2.0, 3.0]}}}


def test_the_quick_table_has_ten_rows():
    import run

    def rounds(*names):
        return {name: [10.0] * 15 for peer in names for name in (peer, f"{peer} again")} | {
            "duoka": [8.0] * 15,
            "floor": [6.0] * 15,
        }

    numbers = {
        "torch_step_ms": {f"case {n}": rounds("ddp") for n in range(5)},
        "keras_step_ms": {
            "Reuters CNN": {"tensorflow": rounds("plain 2", "hierarchical 1"), "jax": rounds("dataparallel 1")},
            "MobileNetV2": {"tensorflow": rounds("mirrored 1")},
            "a loop, Reuters CNN": {"tensorflow": rounds("mirrored 1")},
        },
    }
    lines = run.quick_lines(numbers)
    assert len(lines) == 10
    assert sum("1.25" in line for line in lines) == 10


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import torch\ntorch.nn.Module.forward = mine", 1),
        ("from keras import Model\nModel.fit = mine", 1),
        ("import torch\nsetattr(torch.Tensor, 'backward', mine)", 1),
        ("setattr(owner, name, mine)", 1),
        ("thing.__class__ = Other", 1),
        ("import sys\nframe = sys._getframe(1)", 1),
        ("import gc\ngc.get_referrers(x)", 1),
        ("self.fit = mine\nsetattr(self, 'fit', mine)", 0),
        ("import torch\nx = torch.nn.Module()", 0),
    ],
)
def test_interceptions_are_found(source, count):
    import size

    assert len(size.find_interceptions(ast.parse(source))) == count


def test_size_counts_files_code_and_duplicate_names_by_folder(tmp_path):
    import size

    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text('"""One."""\n\nclass Place:  # why\n    x = 1\n')
    (tmp_path / "inner" / "b.py").write_text("class Place:\n    pass\n\n\nclass Only:\n    pass\n")
    found = size.measure(tmp_path)
    assert (found["."].files, found["."].lines, found["."].code) == (1, 4, 2)
    assert found["."].duplicates == found["inner"].duplicates == {"Place"}
    assert found["inner"].code == 4
