"""Scripts in the style of pytorch/examples, nanoGPT, Hugging Face and timm: right, or told what is wrong at once."""

from __future__ import annotations

import contextlib
import gc
import io
import re
from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.conftest import run_workers
from tests.process import torch_never_silent as scripts
from tests.process.scripts import DUOKA_RUN, run
from tests.process.test_contract_torch import strategy_of

pytestmark = [pytest.mark.torch]
PLAIN = ["--style", "plain"]
ALL = ["model", "optimizer", "train", "test"]
# In each launch, all scripts of it run one after the other, on the same two workers.
CASES: dict[str, tuple[scripts.Script, list[str]]] = {
    "nothing prepared": (scripts.mnist, [*PLAIN, "--prepare"]),
    "only the loader": (scripts.mnist, [*PLAIN, "--prepare", "train"]),
    "only the loader, function": (scripts.only_a_loader, []),
    "a head not prepared": (scripts.nanogpt, ["head"]),
    "a tensor not prepared": (scripts.tensor_of_the_scripts_own, []),
    "a gradient penalty": (scripts.gradient_penalty, []),
    "a sum": (scripts.mnist, ["--reduction", "sum"]),
    "tokens": (scripts.hugging_face, []),
    "tokens, weighed": (scripts.hugging_face, ["weigh"]),
    "own batches": (scripts.nanogpt, []),
    "own batches, plain": (scripts.nanogpt, ["plain"]),
    "ema and scheduler": (scripts.mnist, ["--scheduler", "step"]),
    "ema and scheduler, plain": (scripts.mnist, [*PLAIN, "--scheduler", "step"]),
    "timm": (scripts.mnist, ["--scheduler", "cosine"]),
    "timm, plain": (scripts.mnist, [*PLAIN, "--scheduler", "cosine"]),
    "timm, prepared": (scripts.unknown_scheduler, []),
    "test loop": (scripts.mnist, ["--evaluate", "loop"]),
    "test loop, prepared": (scripts.mnist, ["--evaluate", "loop", "--prepare", *ALL]),
    "test loop, before training": (scripts.mnist, ["--evaluate", "first", "--prepare", *ALL]),
    "test function": (scripts.mnist, ["--evaluate", "function", "--prepare", *ALL]),
    "test loop, plain": (scripts.mnist, [*PLAIN, "--evaluate", "loop", "--prepare", *ALL]),
    "batchnorm, last batch": (scripts.mnist, ["--batchnorm", "--samples", "35", "--dry-run"]),
    "batchnorm, last batch, plain": (scripts.mnist, [*PLAIN, "--batchnorm", "--samples", "35", "--dry-run"]),
    "batchnorm, small batches": (scripts.mnist, ["--batchnorm", "--batch-size", "3"]),
    "batchnorm, synced": (scripts.synced_batchnorm, []),
    "batchnorm, synced, plain": (scripts.synced_batchnorm, PLAIN),
    "plateau": (scripts.mnist, ["--scheduler", "plateau", "--epochs", "3"]),
    "plateau, mean, plain": (
        scripts.mnist,
        [*PLAIN, "--scheduler", "plateau", "--loss", "mean", "--prepare", "model", "optimizer", "train", "scheduler"],
    ),
    "earlier handle": (scripts.earlier_handle, []),
    "before prepare": (scripts.before_prepare, []),
    "unpacked": (scripts.unpacked, []),
    "items of a handle": (scripts.items_of_a_handle, []),
    "key of a handle": (scripts.key_of_a_handle, []),
    "loss, not a function": (scripts.loss_instead_of_a_function, []),
}
# These end a run: a launch for each.
FATAL: dict[str, tuple[scripts.Script, list[str]]] = {
    "batchnorm, small batches, plain": (scripts.mnist, [*PLAIN, "--batchnorm", "--batch-size", "3"]),
    "plateau, plain": (
        scripts.mnist,
        [*PLAIN, "--scheduler", "plateau", "--prepare", "model", "optimizer", "train", "scheduler"],
    ),
    "scheduler on the main worker": (scripts.mnist, ["--scheduler", "step", "--loss", "main"]),
    "other function": (scripts.nanogpt, ["other function"]),
    "own rows": (scripts.nanogpt, ["own rows"]),
    "own generator": (scripts.nanogpt, ["own generator"]),
}


@pytest.fixture(scope="module", autouse=True)
def optimizers_are_loaded():
    """What the first optimizer of a process imports takes seconds: once here, and not in every fork."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)


def run_each(collective: Any, names: list[str]) -> dict[str, tuple[str, list[str], dict[str, Any]]]:
    """For each script: its error, what was told, and its result."""
    gc.collect()
    gc.freeze()  # what the fork has from its parent: collecting it again and again takes seconds
    found = {}
    for name in names:
        gc.collect()  # strategies of scripts before it
        script, words = {**CASES, **FATAL}[name]
        told, error, result = io.StringIO(), "", {}
        with contextlib.redirect_stderr(told):
            try:
                result = script(strategy_of(collective), words)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
        lines = [line for line in told.getvalue().splitlines() if "style: " not in line]
        found[name] = error, lines, result
    return found


@lru_cache
def ended() -> list[dict[str, tuple[str, list[str], dict[str, Any]]]]:
    launched = run_workers(2, 2, run_each, list(CASES))
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    return [launched.results[worker] for worker in range(2)]


def errors_of(name: str) -> list[str]:
    return [results[name][0] for results in ended()]


def results_of(name: str) -> list[dict[str, Any]]:
    """Of a script that ends well, on both workers."""
    assert errors_of(name) == ["", ""]
    return [results[name][2] for results in ended()]


def told_of(name: str) -> list[str]:
    return [line for results in ended() for line in results[name][1]]


@lru_cache
def on_one_device(name: str) -> dict[str, Any]:
    script, words = {**CASES, **FATAL}[name]
    return script(None, [word for word in words if word != "mean"] if "--loss" not in words else words[:4])


def check_numbers(name: str, *keys: str) -> None:
    """Both workers have the numbers of one device."""
    expected = on_one_device(name)
    for result in results_of(name):
        for key in keys:
            found = list(scripts.iterate(result[key]))
            torch.testing.assert_close(found, list(scripts.iterate(expected[key])), rtol=1e-4, atol=1e-6)


def failure_of(name: str) -> str:
    launched = run_workers(2, 2, lambda collective: FATAL[name][0](strategy_of(collective), FATAL[name][1]))
    assert launched.outcome.exit_code == 1, launched.outcome
    return launched.outcome.failure["traceback"]


# Nothing prepared, or half of it.


def test_an_optimizer_that_steps_with_nothing_prepared_is_told_once_by_the_main_worker():
    assert errors_of("nothing prepared") == ["", ""]
    (line,) = told_of("nothing prepared")
    assert re.search(r"SGD steps on a model that was not prepared.*strategy\.prepare\(", line)
    assert ended()[0]["nothing prepared"][1] == [line], "the main worker says it"
    assert not any(
        "was not prepared:" in line for name in CASES if name != "nothing prepared" for line in told_of(name)
    )


SCRIPT = """
    import torch
    from torch import nn

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(4, 3)).mean().backward()
        optimizer.step()
    print("done")
    """


def test_a_script_without_a_strategy_is_told_of_by_duoka_run(tmp_path):
    result = run(tmp_path, SCRIPT, program=(*DUOKA_RUN, "--devices", "2"))
    assert result.code == 0, result.err
    (line,) = result.said()
    assert line.startswith("SGD steps on a model that was not prepared"), result.err


def test_only_the_loader_prepared_is_an_error_at_the_first_step_on_every_worker():
    for error in errors_of("only the loader"):
        assert re.search(r"(?s)SGD steps on parameters that were not prepared.*strategy\.prepare\(model,", error)
    for error in errors_of("only the loader, function"):
        assert "before anything was prepared that could be trained" in error


def test_a_function_that_trains_parameters_which_were_not_prepared_is_an_error_on_every_worker():
    for name, parameters in {"a head not prepared": "head.weight, head.bias", "a tensor not prepared": "scale"}.items():
        for error in errors_of(name):
            assert re.search(rf"(?s)parameters that were not prepared: {parameters}\..*strategy\.prepare", error), error


def test_a_leaf_that_a_function_makes_itself_is_no_parameter():
    first, second = results_of("a gradient penalty")
    assert first == second and len(first["losses"]) == 2


# Losses that are no means over samples.


def test_sums_and_means_over_tokens_are_found_at_the_first_call():
    for name in ("a sum", "tokens"):
        for error in errors_of(name):
            assert re.search(r"(?s)is not a mean over samples.*strategy\.weigh", error)
    check_numbers("tokens, weighed", "weights", "losses")


# The loop runs once per global batch.


@pytest.mark.parametrize("name", ["ema and scheduler", "ema and scheduler, plain", "timm", "timm, plain"])
def test_averages_and_schedulers_that_were_not_prepared_are_those_of_one_device(name):
    check_numbers(name, "weights", "ema", "rates", "steps")
    assert len(set(on_one_device(name)["rates"])) > 2, "else no scheduler has stepped"


def test_batches_of_ones_own_train_as_on_one_device():
    check_numbers("own batches", "weights", "losses")
    for error in errors_of("own batches, plain"):
        assert "outside of a loop over a prepared loader" in error


def test_a_scheduler_of_another_library_need_not_be_prepared():
    for error in errors_of("timm, prepared"):
        assert re.search(r"(?s)A CosineScheduler cannot be prepared, and need not be.*once per global batch", error)
        assert "leave it out of strategy.prepare" in error


# Evaluations.


def test_a_test_loop_over_a_prepared_loader_is_refused_in_function_style_with_two_ways_out():
    for error in errors_of("test loop, prepared"):
        assert re.search(r"(?s)plain loop over a prepared loader.*strategy\.evaluate.*loader that is not", error)
    for error in errors_of("test loop, before training"):
        assert re.search(r"(?s)after a plain loop.*evaluation.*strategy\.evaluate.*not prepared", error)


def test_both_ways_out_count_as_one_device_does():
    check_numbers("test loop", "correct")
    expected = on_one_device("test loop")["correct"]
    assert expected[-1] > 20, "else there is nothing to count"
    for result in results_of("test function"):
        assert [round(count) for count in result["correct"]] == expected


def test_a_test_loop_over_a_prepared_loader_in_plain_style_logs_once_that_sums_are_those_of_a_worker():
    lines = [line for line in told_of("test loop, plain") if "its sums are those of this worker" in line]
    assert len(lines) == 1 and "strategy.evaluate(" in lines[0] and "not prepared" in lines[0]
    first, second = (result["correct"] for result in results_of("test loop, plain"))
    assert all(first) and all(second), "else one worker has the whole"
    assert [a + b for a, b in zip(first, second, strict=True)] == on_one_device("test loop, plain")["correct"]


# BatchNorm.


@pytest.mark.parametrize("name", ["batchnorm, last batch", "batchnorm, last batch, plain"])
def test_a_last_batch_that_leaves_a_replica_one_sample_is_found_in_the_first_one(name):
    own = "BatchNorm2d bn will not be able to normalise one value per channel: replica 1 has 1 sample of the last batch"
    assert errors_of(name) == ["", ""]
    (line,) = [line for line in told_of(name) if own in line]
    assert "drop_last=True" in line


def test_a_share_of_one_sample_is_one_short_error():
    own, other = errors_of("batchnorm, small batches")[::-1]
    expected = "BatchNorm2d bn cannot normalise one value per channel: replica 1 has 1 sample of this batch of 3."
    assert own.startswith("MismatchError") and expected in own
    assert other.startswith("ReplicaFailed") and expected in other
    shown = failure_of("batchnorm, small batches, plain")
    assert expected in shown and "Expected more than 1 value" not in shown
    assert len(shown.splitlines()) < 25, shown


@pytest.mark.parametrize("name", ["batchnorm, synced", "batchnorm, synced, plain"])
def test_synced_batchnorm_has_the_numbers_of_one_device_in_both_styles(name):
    check_numbers(name, "weights", "ema")


# Learning rates.


def test_a_plateau_scheduler_on_the_loss_of_one_worker_is_named():
    shown = failure_of("plateau, plain")
    assert re.search(r"(?s)ReduceLROnPlateau \(scheduler 1\) was passed numbers that differ.*strategy\.mean", shown)
    assert "In batch 0 of pass 1 " in shown, "at the first batch after it"


def test_a_plateau_scheduler_on_a_number_that_all_workers_have_is_right():
    check_numbers("plateau", "weights", "losses", "rates")
    assert len(set(results_of("plateau")[0]["rates"])) > 1, "else it has never lowered the rate"
    first, second = results_of("plateau, mean, plain")
    assert first["rates"] == second["rates"] and first["weights"] == second["weights"]


def test_a_scheduler_that_steps_on_the_main_worker_is_found_at_the_next_call():
    shown = failure_of("scheduler on the main worker")
    assert re.search(
        r"(?s)At call 3 the learning rates differ.*worker 0.*optimizer 1: 0\.25.*if strategy\.is_main", shown
    )


# Calls that differ between workers, and other bad input.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other function", r"(?s)different functions.*py:\d+ nanogpt\.<locals>\.loss_of.*py:\d+ \S*other_loss_of"),
        ("own rows", r"(?s)different batches.*int64\[8, 8\].*int64\[9, 8\].*whole global batch"),
        ("own generator", r"(?s)global tensors given to strategy\.backward at call 1 differ.*seed what makes"),
    ],
)
def test_a_call_that_differs_on_one_worker_names_both(name, message):
    shown = failure_of(name)
    assert re.search(message, shown), shown


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("earlier handle", r"(?s)batch 0 of pass 0.*until the next batch of its loader is drawn.*do   "),
        ("before prepare", r"(?s)for PyTorch models that were prepared.*strategy\.prepare"),
        ("unpacked", r"(?s)was taken apart.*handle.*strategy\.backward\(loss_of, batch\)"),
        ("items of a handle", r"(?s)has no 'items'.*handle.*strategy\.backward\(loss_of, batch\)"),
        ("key of a handle", r"(?s)was taken apart.*handle.*strategy\.backward\(loss_of, batch\)"),
        ("loss, not a function", r"(?s)a Tensor, not a function.*strategy\.backward\(loss_of, batch\)"),
    ],
)
def test_bad_input_says_what_why_and_how_to_fix_it(name, message):
    for error in errors_of(name):
        assert re.search(message, error), error
