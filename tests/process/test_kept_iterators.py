"""Iterators over loaders that a script keeps in variables: they go on where they were, or it is said why not."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from duoka.errors import CheckpointError
from duoka.strategies.borders import Borders
from tests.process.test_torch_capture import Setting, run_from

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]


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
    done = subprocess.run([sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
