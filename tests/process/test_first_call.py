"""The check of a function's first call, and bad input of `strategy.backward`: found before anything is exchanged."""

from __future__ import annotations

import contextlib
import io
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import run_workers
from tests.process.test_contract_torch import strategy_of
from tests.process.torch_first_calls import FINE, WARNED, WRONG

pytestmark = [pytest.mark.torch]


def call_each(collective: Any, cases: dict[str, Any]) -> dict[str, tuple[str, list[str], bool]]:
    """For each case: the error's text, what was told, and whether gradients and generators were left alone."""
    found = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        strategy, told = strategy_of(collective), io.StringIO()
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        strategy.prepare(model, optimizer)
        function, args = case(model, strategy)
        before, error = torch.get_rng_state(), ""
        try:
            with contextlib.redirect_stderr(told):
                strategy.backward(function, *args)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        is_same = torch.equal(before, torch.get_rng_state())
        lines = [line for line in told.getvalue().splitlines() if "function style" not in line]
        found[name] = error, lines, is_same and (not error or model.weight.grad is None)
    return found


@lru_cache
def results() -> list[dict[str, tuple[str, list[str], bool]]]:
    cases = {name: case for name, (case, _) in {**WRONG, **WARNED}.items()} | FINE
    launched = run_workers(2, 2, call_each, cases)
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    return [launched.results[worker] for worker in range(2)]


@pytest.mark.parametrize("name", WRONG)
def test_what_would_train_wrongly_is_an_error_on_every_worker(name):
    for error, _, is_untouched in (result[name] for result in results()):
        assert WRONG[name][1] in error
        assert is_untouched


@pytest.mark.parametrize("name", WARNED)
def test_what_may_be_meant_is_told(name):
    error, told, is_untouched = results()[0][name]
    assert not error
    assert any(WARNED[name][1] in text for text in told), told
    assert is_untouched


@pytest.mark.parametrize("name", FINE)
def test_nothing_is_found_where_nothing_is_wrong(name):
    for error, told, is_untouched in (result[name] for result in results()):
        assert (error, told) == ("", [])
        assert is_untouched
