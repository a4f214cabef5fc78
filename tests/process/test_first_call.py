"""The check of a function's first call, and bad input of `strategy.backward`: found before anything is exchanged."""

from __future__ import annotations

import contextlib
import io
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

from duoka.collectives.solo import solo
from duoka.errors import MismatchError
from duoka.frameworks.torch.function.arguments import fingerprint
from duoka.frameworks.torch.function.returned import Measured, Rows
from duoka.frameworks.torch.function.shares import digest_sample
from duoka.frameworks.torch.state import TorchState
from duoka.frameworks.torch.tensors import as_bytes
from tests.conftest import run_workers
from tests.process import torch_later_calls  # noqa: F401 - it adds its cases
from tests.process.test_contract_torch import strategy_of
from tests.process.test_prepare_torch import adapter_for
from tests.process.torch_first_calls import FINE, LATE, NEVER, WARNED, WRONG

pytestmark = [pytest.mark.torch]


def call_each(collective: Any, cases: dict[str, Any]) -> dict[str, tuple[str, list[str], bool]]:
    """For each case: the error's text, what was told, and whether gradients, weights and generators were left alone."""
    found = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        strategy, told = strategy_of(collective), io.StringIO()
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        strategy.prepare(model, optimizer)
        function, args = case(model, strategy)
        before, error, weight = torch.get_rng_state(), "", model.weight.detach().clone()
        try:
            with contextlib.redirect_stderr(told):
                strategy.backward(function, *args)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        is_same = torch.equal(before, torch.get_rng_state()) and torch.equal(weight, model.weight)
        lines = [line for line in told.getvalue().splitlines() if "function style" not in line]
        found[name] = error, lines, is_same and (not error or model.weight.grad is None)
    return found


def call_late(collective: Any) -> dict[str, tuple[str, int, bool]]:
    """For each case: the error's text, the number of the call that raised it, and whether `p.grad` was left alone."""
    found = {}
    for name, (case, _, _) in LATE.items():
        torch.manual_seed(0)
        strategy, model = strategy_of(collective), nn.Linear(6, 3)
        strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        found[name] = "", NEVER, True
        for number, (function, args) in enumerate(case(model, strategy), 1):
            before = None if model.weight.grad is None else model.weight.grad.clone()
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    strategy.backward(function, *args)
            except Exception as error:
                is_same = before is not None and torch.equal(before, model.weight.grad)
                found[name] = f"{type(error).__name__}: {error}", number, is_same
                break
    return found


@lru_cache
def late_results() -> list[dict[str, tuple[str, int, bool]]]:
    launched = run_workers(2, 2, call_late)
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    return [launched.results[worker] for worker in range(2)]


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


@pytest.mark.parametrize("name", [name for name, (_, _, call) in LATE.items() if call == NEVER])
def test_rounding_is_never_found(name):
    assert [list(result[name]) for result in late_results()] == [["", NEVER, True]] * 2


@pytest.mark.parametrize("name", [name for name, (_, _, call) in LATE.items() if call != NEVER])
def test_a_loss_that_looks_right_at_first_is_found_later_on_every_worker(name):
    for error, number, is_untouched in (result[name] for result in late_results()):
        assert LATE[name][1] in error
        assert number == LATE[name][2]
        assert is_untouched


def test_the_number_of_calls_of_each_function_is_saved_and_restored():
    """A resumed run checks a loss in the same calls."""
    model = nn.Linear(6, 3)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

    def call(adapter: Any, times: int) -> dict[str, Any]:
        adapter.prepare([model])
        for _ in range(times):
            adapter.backward(lambda x: model(x).mean(), [x], None, True)
        return adapter._calls.capture()

    saved = call(adapter_for(solo(2, available_bytes=lambda: 2**40)), 4)
    assert [num_calls for num_calls, _ in saved["functions"].values()] == [4]
    resumed = adapter_for(solo(2, available_bytes=lambda: 2**40))
    resumed._calls.restore(saved)
    later = call(resumed, 3)["functions"]
    assert {title: [num_calls + 3, loss] for title, (num_calls, loss) in saved["functions"].items()} == later


def test_parameters_that_were_not_prepared_are_an_error_without_a_check_and_in_later_calls():
    adapter, model = adapter_for(solo(2, available_bytes=lambda: 2**40)), nn.Linear(6, 3)
    adapter.prepare([model])
    x, stranger = torch.ones(8, 6), nn.Linear(6, 3)
    for _ in range(5):
        adapter.backward(lambda x: model(x).mean(), [x], None, False)
    with pytest.raises(MismatchError, match=r"not prepared: stranger\.weight"):
        adapter.backward(lambda x: model(x).mean() + stranger(x).mean(), [x], None, False)


def test_no_check_leaves_anything_in_a_list_of_the_script():
    adapter, model, sizes = adapter_for(solo(2, available_bytes=lambda: 2**40)), nn.Linear(6, 3), []
    adapter.prepare([model])

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return model(x).mean()

    for _ in range(3):
        adapter.backward(loss_of, [torch.ones(20, 6)], None, True)
    assert sizes == [10] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_one_row_with_the_strides_of_its_table_is_read_as_any_other(dtype):
    table = torch.arange(36).reshape(4, 9).to(dtype)
    row = table[1:2, 8]
    plain = row.clone(memory_format=torch.contiguous_format).reshape(1, 1)[0]
    assert row.stride() == (9,)
    assert torch.equal(as_bytes(row), as_bytes(plain)) and as_bytes(row).numel() == dtype.itemsize
    assert fingerprint([row], is_whole=True) == fingerprint([plain], is_whole=True)
    assert digest_sample(row, 1) == digest_sample(plain, 1)
    (rows,) = Measured.of({"rows": Rows(row)}, 1).rows
    assert rows.tolist() == as_bytes(plain).tolist()
    model = nn.Module()
    model.register_buffer("row", row)
    assert TorchState([model], []).read(0).tolist() == as_bytes(plain).tolist()


def test_a_loss_that_is_nan_names_the_replica_once(capsys):
    adapter, model = adapter_for(solo(2, available_bytes=lambda: 2**40)), nn.Linear(6, 3)
    adapter.prepare([model])
    for _ in range(2):
        x = torch.ones(8, 6)
        x[-1] = float("nan")
        adapter.backward(lambda x: model(x).mean(), [x], None, False)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "NaN" in line]
    assert line == "duoka: the loss of replica 1 is NaN at call 1, and with it the whole gradient"
