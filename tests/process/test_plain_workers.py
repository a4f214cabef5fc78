"""Plain loops whose workers differ, or lose one of them: an error on all, never a hang and never a drift."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset

from tests.conftest import die_at, run_workers
from tests.process.test_plain_torch import one_thread, strategy_of  # noqa: F401 - a fixture of this module as well
from tests.process.torch_plain import network, samples
from tests.process.torch_plain_misuse import ready

pytestmark = [pytest.mark.torch]


def train(collective: Any, happen: Any = None, **settings: Any) -> str:
    """What happens to one worker before a backward: a word for what it does otherwise."""
    strategy = strategy_of(collective, **settings)
    model, optimizer, loader = ready(strategy, batch_size=8)
    for index, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        word = happen(index) if happen is not None and collective.worker == 1 else ""
        if word == "continue":
            continue
        if word == "break":
            break
        optimizer.zero_grad()
        (strategy.weigh(loss, 3) if word == "weigh" else loss).backward(retain_graph=True)
        if word == "twice":
            loss.backward()
        if word == "rate":
            optimizer.param_groups[0]["lr"] *= 0.5
        if word != "no step":
            optimizer.step()
    return "finished"


def differ(word: str, at: int = 1) -> Any:
    return lambda index: word if index == at else ""


def raise_one(index: int) -> str:
    if index == 1:
        raise ZeroDivisionError("mine")
    return ""


def build_differently(collective: Any) -> None:
    strategy_of(collective).prepare(torch.nn.Linear(4 + collective.worker, 2))


def shuffle_differently(collective: Any) -> None:
    order = range(31, -1, -1) if collective.worker else range(32)
    _train_over(collective, DataLoader(samples(32), 16, sampler=list(order)))


def split_differently(collective: Any) -> None:
    """As `random_split` does without a seed: the order is equal, and the samples are not."""
    _train_over(collective, DataLoader(Subset(samples(64), range(collective.worker, 64, 2)), 16))


def _train_over(collective: Any, loader: Any) -> None:
    model, loader = strategy_of(collective).prepare(network(), loader)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()


DIFFERENT = {
    "a batch left out": (train, [differ("continue")], "(?s)did not call the same thing.*backward 1 in batch"),
    "a loop left early": (train, [differ("break")], "WorkerLeft"),
    "a backward more": (train, [differ("twice")], "did not call the same thing|WorkerLeft"),
    "learning rates": (train, [differ("rate")], "learning rates differ"),
    "a count": (train, [differ("weigh")], "MismatchError"),
    "an exception": (train, [raise_one], "ZeroDivisionError: mine"),
    "another model": (build_differently, [], "MismatchError"),
    "another order": (shuffle_differently, [], "MismatchError"),
    "other samples": (split_differently, [], "MismatchError"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_worker_that_differs_is_an_error_on_all(name):
    body, given, message = DIFFERENT[name]
    launched = run_workers(2, 2, body, *given)
    assert launched.outcome.exit_code == 1, launched.outcome
    assert 0 not in launched.results, "it is told of the other one"
    assert re.search(message, launched.outcome.failure["traceback"]), launched.outcome.failure["traceback"]


def miss_a_step(collective: Any) -> str:
    return train(collective, differ("no step", 0), check_every=2)


def test_weights_that_drift_apart_are_found_at_the_next_comparison():
    launched = run_workers(2, 2, miss_a_step)
    assert launched.outcome.exit_code != 0 and not launched.results
    assert "0.weight" in launched.outcome.failure["traceback"]


def look_again(collective: Any) -> int:
    """A second forward in train mode after the step, for an accuracy: running statistics differ until the next one."""
    strategy = strategy_of(collective, check_every=2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = strategy.prepare(model, optimizer, DataLoader(samples(64), 16))
    correct = 0
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                correct += int((model(x).argmax(1) == y).sum())
    return correct


def test_running_statistics_of_a_forward_after_the_step_do_not_end_the_run():
    launched = run_workers(2, 2, look_again)
    assert launched.outcome.exit_code == 0, launched.outcome.failure


def die_in_the_loop(collective: Any, victim: int, moment: int) -> str:
    """Before a backward, or at a moment of the exchange."""
    if moment >= 0 and collective.worker == victim:
        die_at(collective, moment)

    def die(index: int) -> str:
        if moment < 0 and index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return ""

    return train(collective, die if victim == 1 else None)


@pytest.mark.parametrize(("victim", "moment"), [(1, -1), (1, 12), (0, 15)])
def test_a_lost_worker_ends_a_plain_loop_on_the_others(victim, moment, capfd):
    launched = run_workers(2, 2, die_in_the_loop, victim, moment)
    assert launched.outcome.lost == [(victim, signal.SIGKILL)], launched.outcome
    assert not launched.results and launched.outcome.exit_code == 128 + signal.SIGKILL
    shown = str(launched.outcome)
    assert "WorkerLost" in shown and "a plain loop" in shown and "strategy.backward" in shown
    assert "was ended by SIGKILL" in "\n".join([*launched.said, *capfd.readouterr()])
