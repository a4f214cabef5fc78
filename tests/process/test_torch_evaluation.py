"""Evaluation on real workers: every row once, in order, with the same bits for every number of workers."""

from __future__ import annotations

import os
import signal
from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from duoka.runtime.worker import attachment
from duoka.session import WorkerSession
from duoka.strategies.mirrored import Mirrored
from tests.conftest import die_at, run_workers
from tests.process.torch_evaluations import SCENARIOS, SIZES, WRONG, changing_functions, make_data, make_model

pytestmark = [pytest.mark.torch]
WORKERS = [1, 2, 3]


@pytest.fixture(scope="module", autouse=True)
def optimizers_are_loaded():
    """What the first optimizer of a process imports takes seconds: once here, and not in every fork."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1)


def strategy_of(collective) -> Mirrored:
    """A strategy on the collective of this worker, which is a fork: no other test sees the change."""
    torch.set_num_threads(1)
    session = WorkerSession(attachment().plan, collective.worker, collective)
    Mirrored.connect = staticmethod(lambda request: session)
    return Mirrored(respawn=False)


def run_all(collective) -> dict:
    found = {}
    for name, scenario in SCENARIOS.items():
        torch.manual_seed(0)
        try:
            found[name] = scenario(strategy_of(collective))
        except Exception as error:
            raise AssertionError(f"the scenario {name} failed") from error
    return found


@lru_cache
def results(num_workers: int) -> dict:
    """What each scenario gave: the same on all workers."""
    launched = run_workers(num_workers, 4, run_all)
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    first, *others = [launched.results[worker] for worker in range(num_workers)]
    for other in others:
        assert {name: freeze(value) for name, value in other.items()} == {n: freeze(v) for n, v in first.items()}
    return first


def freeze(value):
    """Something that compares by its bits."""
    if isinstance(value, dict):
        return {key: freeze(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [freeze(part) for part in value]
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()


every_number_of_workers = pytest.mark.parametrize("num_workers", WORKERS)


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_a_scenario_gives_the_same_bits_on_one_two_and_three_workers(name):
    frozen = [freeze(results(num_workers)[name]) for num_workers in WORKERS]
    assert frozen[0] == frozen[1] == frozen[2]


@every_number_of_workers
@pytest.mark.parametrize("rows", SIZES[:-1])
def test_gathered_predictions_are_those_of_the_plain_loop_in_the_order_of_the_dataset(num_workers, rows):
    found = results(num_workers)["predictions_in_order"][str(rows)]
    x, _, numbers = make_data(rows).tensors
    assert found["numbers"].tolist() == numbers.tolist()
    expected = make_model()(x).detach().numpy()
    np.testing.assert_allclose(found["predictions"], expected, rtol=1e-5, atol=1e-6)


@every_number_of_workers
@pytest.mark.parametrize("rows", SIZES[:-1])
@pytest.mark.parametrize("kind", ["", " in a stream"])
def test_evaluate_gives_the_numbers_of_the_plain_loop(num_workers, rows, kind):
    found = results(num_workers)["accuracy"][f"{rows}{kind}"]
    x, y, _ = make_data(rows).tensors
    out = make_model(dropout=0.5, batch_norm=True).eval()(x).detach()
    correct = out.argmax(1) == y
    assert found["accuracy"] == int(correct.sum()) / rows
    assert found["loss"] == pytest.approx(float(F.cross_entropy(out, y)), rel=1e-6)
    by_class = [float(correct[y == label].double().mean()) if (y == label).any() else np.nan for label in range(4)]
    np.testing.assert_array_equal(found["by class"], by_class)


def test_a_shuffled_loader_gives_one_order_and_a_dropped_last_batch_stays_dropped():
    found = results(3)["order"]
    first, second = found["shuffled"]
    assert sorted(first) == sorted(second) == list(range(37)) and first != second, "two passes, each shuffled"
    assert found["drop_last"] == list(range(32))
    assert found["stream"] == list(range(37))


def test_what_a_batch_sampler_puts_together_is_not_mixed():
    assert results(3)["batches_of_a_batch_sampler_are_not_mixed"] == list(range(37))


def test_one_value_is_gathered_in_the_place_of_the_first_replica():
    assert results(3)["one_value_for_all_replicas_of_a_worker"] == [0, 1, 2, 3]
    assert results(3)["one_value_with_several_counts_is_refused"] is True


def test_types_that_numpy_does_not_have_are_gathered():
    found = results(3)["gathered_types"]
    assert found["torch.bfloat16"] == found["torch.float8_e4m3fn"] == [0, 1, 2, 3]
    assert found["torch.bool"] == [0, 1, 1, 1]


def test_nothing_to_count_is_nan():
    assert results(3)["nothing_to_count"] == [True, True, 1.0, {}]


def test_every_pass_of_evaluate_draws_numbers_of_its_own():
    first, second, _ = results(1)["random_numbers_in_evaluate"]
    assert first != second


def test_evaluate_puts_back_every_training_flag():
    assert results(2)["flags_are_put_back"] == [True, False, True]


@every_number_of_workers
def test_what_a_function_should_not_return_is_named(num_workers):
    assert results(num_workers)["wrong_return_values"] == {**dict.fromkeys(WRONG, True), "works": 2.0}


@every_number_of_workers
def test_a_function_that_changes_something_outside_of_itself_is_an_error_on_every_worker(num_workers):
    found = results(num_workers)["functions_that_change_something"]
    assert found == {**dict.fromkeys(changing_functions(None), True), "a cache": 1.0}


def test_a_module_that_was_not_prepared_and_is_in_training_mode_is_told_of():
    assert results(1)["an_average_in_training_mode"] == [1]


def test_replicas_that_measure_different_things_are_an_error_on_all():
    assert results(3)["replicas_that_measure_different_things"] is True


# Losses.


def lose_a_worker(collective, kind: str, victim: int = -1, moment: int = -1, batch_number: int = -1) -> list[float]:
    """Evaluate twice; the victim dies at a moment of the exchanges, or while it computes."""
    strategy = strategy_of(collective)
    model = strategy.prepare(make_model())

    class Seen:  # Duoka does not look into classes, else it would refuse to count here
        batches = 0

    def measure(batch):
        Seen.batches += 1
        if collective.worker == victim and Seen.batches == batch_number:
            os.kill(os.getpid(), signal.SIGKILL)
        out = model(batch[0])
        losses = F.cross_entropy(out, batch[1], reduction="sum") + torch.rand(1)[0]
        return losses if kind == "large" else losses.reshape(()), len(batch[1])

    def measure_large(batch):
        losses, count = measure(batch)
        return losses * torch.arange(20_000), count

    if collective.worker == victim and moment >= 0:
        die_at(collective, moment)
    loader = DataLoader(make_data(), batch_size=3)  # three batches or more for each replica
    answers = [strategy.evaluate(measure_large if kind == "large" else measure, loader) for _ in range(2)]
    return [np.asarray(answer).tobytes().hex()[:64] for answer in answers]


@lru_cache
def calm(kind: str) -> list[str]:
    return run_workers(1, 4, lose_a_worker, kind).results[0]


@pytest.mark.parametrize("kind", ["small", "large"])
@pytest.mark.parametrize(("num_workers", "victim"), [(2, 0), (3, 1)])
def test_a_worker_killed_while_it_evaluates_changes_no_bit(kind, num_workers, victim):
    for batch_number in (1, 3):
        launched = run_workers(num_workers, 4, lose_a_worker, kind, victim, -1, batch_number)
        check_loss(launched, kind, victim)


@pytest.mark.parametrize("kind", ["small", "large"])
def test_a_worker_killed_while_totals_are_exchanged_changes_no_bit(kind):
    for num_workers, victim, moment in [(2, 1, m) for m in range(1, 14, 2)] + [(3, 0, m) for m in range(0, 14, 2)]:
        check_loss(run_workers(num_workers, 4, lose_a_worker, kind, victim, moment), kind, victim)


def check_loss(launched, kind: str, victim: int) -> None:
    assert launched.outcome.lost == [(victim, signal.SIGKILL)], launched.outcome
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    assert list(launched.results.values()) == [calm(kind)] * len(launched.results)


def evaluate_within_training(collective, victim: int = -1) -> list:
    """The victim dies in an evaluation that is called in a training loop, after the step has been committed."""
    strategy = strategy_of(collective)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = strategy.prepare(model, optimizer, DataLoader(make_data(32), batch_size=8))
    test_loader = DataLoader(make_data(), batch_size=8)
    answers = []

    def measure(batch):
        if collective.worker == victim and strategy.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    for batch in strategy.batches(loader):
        optimizer.zero_grad()
        strategy.backward(lambda x, y, _: F.cross_entropy(model(x), y), batch)
        optimizer.step()
        answers.append(strategy.evaluate(measure, test_loader))
    return [answers, torch.cat([p.detach().reshape(-1) for p in model.parameters()]), strategy.step]


@pytest.mark.parametrize(("num_workers", "victim"), [(2, 1), (3, 0)])
def test_a_worker_killed_in_an_evaluation_within_training_changes_no_bit(num_workers, victim):
    expected = freeze(run_workers(1, 4, evaluate_within_training).results[0])
    launched = run_workers(num_workers, 4, evaluate_within_training, victim)
    assert launched.outcome.lost == [(victim, signal.SIGKILL)], launched.outcome
    assert launched.outcome.exit_code == 0, launched.outcome.failure
    assert all(freeze(result) == expected for result in launched.results.values())


def fail_on_one_worker(collective) -> None:
    strategy = strategy_of(collective)

    def fail(batch):
        if collective.worker == 1:
            raise KeyError("only here")
        return 1, 1

    strategy.evaluate(fail, DataLoader(make_data(), batch_size=8))


def order_by_worker(collective) -> None:
    strategy = strategy_of(collective)
    sampler = list(range(37)) if collective.worker == 0 else list(range(36, -1, -1))
    strategy.evaluate(lambda batch: (1, 1), DataLoader(make_data(), batch_size=8, sampler=sampler))


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (fail_on_one_worker, "KeyError", "only here"),
        (order_by_worker, "MismatchError", "read other samples on some workers"),
    ],
)
def test_evaluations_that_do_not_fit_are_an_error_and_never_a_hang(body, error, words):
    launched = run_workers(2, 4, body)
    assert launched.outcome.exit_code != 0
    assert launched.outcome.failure["error"] == error and words in launched.outcome.failure["traceback"]


# One replica: the user's own loader.


def run_alone(collective) -> list:
    strategy = strategy_of(collective)
    loader = DataLoader(make_data(), batch_size=8, shuffle=True)
    torch.manual_seed(5)
    plain = [batch[-1].tolist() for batch in loader]
    list(loader)
    drawn = torch.rand(1).item()
    model, prepared = strategy.prepare(make_model(), loader)
    torch.manual_seed(5)
    with torch.no_grad():
        ours = [strategy.sum(batch[-1]).tolist() for batch in prepared]  # collectives wait for no worker
    accuracy = strategy.evaluate(lambda batch: ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1])), prepared)
    return [plain == ours, torch.rand(1).item() == drawn, accuracy]


def test_one_replica_runs_the_loader_as_it_is():
    same_batches, leaves_no_trace, accuracy = run_workers(1, 1, run_alone).results[0]
    x, y, _ = make_data().tensors
    assert same_batches
    assert leaves_no_trace, "strategy.evaluate draws what a loop over its loader draws"
    assert accuracy == int((make_model()(x).argmax(1) == y).sum()) / 37
