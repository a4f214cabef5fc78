"""Iterators over loaders that a script keeps in variables: they go on where they were, or it is said why not."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from duoka.errors import CheckpointError
from duoka.strategies.borders import Borders
from tests.limits import START_S
from tests.process.test_torch_capture import Setting, run_from

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def walk_pairs(run: Setting, pairs) -> None:
    for (x, y), (z,) in pairs:
        run.step(x + z / 48, y)


def zip_in_a_variable(run: Setting) -> None:
    """The second iterator is never at its end: it is left when the first one is."""
    for _ in range(3):
        pairs = zip(run.loader, run.other, strict=False)
        walk_pairs(run, pairs)
        torch.rand(1)


def zip_in_a_variable_in_epochs(run: Setting) -> None:
    for _ in run.adapter.epochs.walk(3):
        pairs = zip(run.loader, run.other, strict=False)
        walk_pairs(run, pairs)


def follow(run: Setting, batches) -> None:
    for x, y in run.loader:
        (z,) = next(batches)
        run.step(x + z / 48, y)


def followed_in_each_pass(run: Setting) -> None:
    for _ in range(3):
        batches = iter(run.other)
        follow(run, batches)


def followed_in_each_epoch(run: Setting) -> None:
    for _ in run.adapter.epochs.walk(3):
        batches = iter(run.other)
        follow(run, batches)


class Endless:
    """Begins anew in a body, when it is at its end."""

    def __init__(self, loader) -> None:
        self._loader, self._batches = loader, iter(loader)

    def draw(self):
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self._loader)
            return next(self._batches)


def begun_anew_in_bodies(run: Setting) -> None:
    other = Endless(run.other)
    for _ in range(4):
        for x, y in run.loader:
            (z,) = other.draw()
            run.step(x + z / 48, y)


def begun_anew_in_bodies_in_epochs(run: Setting) -> None:
    other = Endless(run.other)
    for _ in run.adapter.epochs.walk(4):
        for x, y in run.loader:
            (z,) = other.draw()
            run.step(x + z / 48, y)


def followed_and_walked(run: Setting) -> None:
    """One loader follows another one, and is then walked by itself."""
    for _ in run.adapter.epochs.walk(3):
        for x, y in run.loader:
            z = next(iter(run.other))[0][: len(x)]
            run.step(x + z / 48, y)
        for (z,) in run.other:
            run.step(z.expand(-1, 12), z.expand(-1, 3) / 48)


def begun_anew_by_itself(run: Setting) -> None:
    """No loop around it: what counts is the step."""
    batches = Endless(run.loader)
    while True:
        x, y = batches.draw()
        run.step(x, y)
        if run.adapter.stepped and run.adapter.step == 13:
            del batches
            break


def begun_anew_and_counted(run: Setting) -> None:
    """Each end is caught, so that finished passes are counted as well."""
    passes, batches = 0, iter(run.loader)
    while passes < 3:
        try:
            x, y = next(batches)
        except StopIteration:
            passes, batches = passes + 1, iter(run.loader)
            continue
        run.step(x, y)


def walked_where_another_ends(run: Setting) -> None:
    """A whole pass where the end of another one is handled, whose iterator is still there."""
    for _ in range(2):
        batches = iter(run.loader)
        while True:
            try:
                x, y = next(batches)
            except StopIteration:
                for x, y in run.loader:
                    run.step(x * 2, y)
                break
            run.step(x, y)


def drawing_between(run: Setting) -> None:
    """With one replica, bodies draw from the same stream: here by dropout and by the rows."""
    for _ in range(3):
        for x, y in run.loader:
            run.step(x * (1 + random.random()), y)
        scale = float(torch.rand(1)) + random.random()
        for _ in range(1 + int(2 * random.random())):
            for x, y in run.loader:
                run.step(x * scale, y)


SCRIPTS = [zip_in_a_variable, zip_in_a_variable_in_epochs, followed_in_each_pass, followed_in_each_epoch]
SCRIPTS += [begun_anew_in_bodies, begun_anew_in_bodies_in_epochs, followed_and_walked, drawing_between]
SCRIPTS += [begun_anew_by_itself, begun_anew_and_counted, walked_where_another_ends]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_that_begins_again_goes_on_with_its_iterators(script, tmp_path):
    num_replicas = 1 if script is drawing_between else 2
    calm, _ = run_from(tmp_path / "unused", None, script, num_replicas)
    for border in (1, 5, 6, 9):
        run_from(tmp_path / "one", None, script, num_replicas, border)
        stopped, second = run_from(tmp_path / "two", tmp_path / "one", script, num_replicas, border + 2)
        assert stopped is None and second.adapter.batch == border + 2
        final, _ = run_from(tmp_path / "unused", tmp_path / "two", script, num_replicas)
        assert final == calm, f"stopped before batches {border} and {border + 2}"


def make_saved(num_replicas: int = 2) -> Setting:
    borders = Borders()
    borders.add(start=lambda adapter: None)  # there are checkpoints
    return Setting(borders, num_replicas)


def test_a_loop_that_was_left_while_its_iterator_is_kept_is_refused_and_del_helps():
    run = make_saved()
    batches = iter(run.loader)
    for x, y in batches:
        run.step(x, y)
        if run.adapter.stepped:
            break
    with pytest.raises(CheckpointError, match="the last batch of another one over it is under way"):
        iter(run.loader)
    with pytest.raises(CheckpointError, match="`del` the variable"):
        run.adapter.capture()
    del batches
    for x, y in run.loader:
        run.step(x, y)
    assert run.adapter.capture()["batch"] == 6


def test_two_iterators_over_one_loader_in_turns_are_refused():
    run = make_saved()
    first = iter(run.other)
    for x, y in run.loader:
        next(first)
        run.step(x, y)
        if run.adapter.stepped:
            break
    second = iter(run.other)
    with pytest.raises(CheckpointError, match="two iterators over one loader are drawn from in turns"):
        for _ in run.loader:
            next(second)
            next(first)


def test_a_pass_that_is_over_says_so_where_its_end_is_not_caught(tmp_path):
    def ask_twice(run: Setting) -> None:
        assert next(iter(run.loader), None) is None  # nothing shows that the next one is asked because of this
        with pytest.raises(StopIteration, match=r"(?s)is over in the run that is resumed.*def endless"):
            next(iter(run.loader))
        asked.append(True)

    def walk_thrice(run: Setting) -> None:
        for _ in range(3):
            for x, y in run.loader:
                run.step(x, y)

    asked: list[bool] = []
    run_from(tmp_path / "one", None, walk_thrice, 2, 12)
    run_from(tmp_path / "unused", tmp_path / "one", ask_twice, 2)
    assert asked


def test_passes_that_are_left_out_at_once_are_told_of(tmp_path, capsys):
    run_from(tmp_path / "one", None, begun_anew_by_itself, 2, 12)
    assert "counts once" not in capsys.readouterr().err
    run_from(tmp_path / "unused", tmp_path / "one", begun_anew_by_itself, 2)
    assert "what it counts there, it counts once" in capsys.readouterr().err


def make_uneven(is_saved: bool) -> Setting:
    """The first loader has five batches, and the other one two."""
    run = make_saved() if is_saved else Setting(Borders(), 2)
    few = DataLoader(TensorDataset(torch.arange(20.0).view(-1, 1)), batch_size=10, shuffle=True)
    (run.other,) = run.adapter.prepare((few,))
    return run


def walk_uneven(run: Setting, pairs) -> None:
    for (x, y), (z,) in pairs:
        run.step(x + torch.as_tensor(z).float().mean(), y)


def walk_cycle(run: Setting) -> None:
    walk_uneven(run, zip(run.loader, itertools.cycle(run.other), strict=False))


def walk_cycle_first(run: Setting) -> None:
    walk_uneven(run, ((batch, given) for given, batch in zip(itertools.cycle(run.other), run.loader, strict=False)))


def walk_cycle_later(run: Setting) -> None:
    for _ in range(2):
        for (z,) in run.other:
            run.step(z.expand(-1, 12), z.expand(-1, 3) / 48)
    walk_cycle(run)


@pytest.mark.parametrize("script", [walk_cycle, walk_cycle_first, walk_cycle_later])
def test_a_cycle_that_is_about_to_give_what_it_has_kept_is_refused_where_there_are_checkpoints(script):
    with pytest.raises(CheckpointError, match=r"(?s)itertools\.cycle keeps.*def endless"):
        script(make_uneven(is_saved=True))
    script(calm := make_uneven(is_saved=False))
    assert calm.adapter.batch >= 5


def walk_short(run: Setting) -> None:
    walk_uneven(run, zip(run.loader, run.other, strict=False))


def walk_filled_up(run: Setting) -> None:
    walk_uneven(run, itertools.zip_longest(run.loader, run.other, fillvalue=(0,)))


def walk_once(run: Setting) -> None:
    given = iter(run.other)
    walk_uneven(run, ((batch, next(given, (0,))) for batch in run.loader))


def walk_endless(run: Setting) -> None:
    other = Endless(run.other)
    walk_uneven(run, ((batch, other.draw()) for batch in run.loader))


def walk_long_cycle(run: Setting) -> None:
    walk_uneven(run, ((batch, given) for given, batch in zip(run.other, itertools.cycle(run.loader), strict=False)))


@pytest.mark.parametrize("script", [walk_short, walk_filled_up, walk_once, walk_endless, walk_long_cycle])
def test_other_ways_to_walk_loaders_of_unequal_length_are_not_taken_for_a_cycle(script):
    run = make_uneven(is_saved=True)
    for _ in range(2):
        script(run)
    assert run.adapter.batch in (4, 10)


LEFT_BEHIND = """
import ctypes, os, sys
from duoka.strategies.borders import Borders
from tests.process.test_torch_capture import Setting
os.kept = iter(Setting(Borders(), 2).loader)
next(os.kept)
for name in [name for name in sys.modules if name == "os" or name.startswith("duoka")]:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules[name]))  # held to the very end: its names become None
"""


def test_a_loop_that_is_left_when_the_interpreter_ends_is_silent():
    done = subprocess.run([sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, timeout=START_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
