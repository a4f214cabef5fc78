"""PyTorch loops that do not fit: a clear error on all workers, never a hang, never a drift."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from duoka.collectives.solo import solo
from duoka.errors import MismatchError
from duoka.frameworks.torch.adapter import TorchAdapter
from tests.conftest import run_workers
from tests.process.test_torch_loops import adapter_for, make

pytestmark = [pytest.mark.torch]


@pytest.fixture
def alone() -> TorchAdapter:
    """One worker that runs two replicas."""
    return adapter_for(solo(2, available_bytes=lambda: 2**40))


def loss_of(model, x, y):
    return ((model(x) - y) ** 2).mean()


# One worker differs from the other.


def step_on_some_workers_only(collective) -> None:
    model, optimizer, loader = adapter_for(collective).prepare(make())
    for x, y in loader:
        loss_of(model, x, y).backward()
        if collective.worker == 0:
            optimizer.step()


def step_less_in_the_last_batch(collective) -> None:
    model, optimizer, loader = adapter_for(collective).prepare(make())
    for index, (x, y) in enumerate(loader):
        loss_of(model, x, y).backward()
        if collective.worker == 0 or index < len(loader) - 1:
            optimizer.step()


def skip_a_batch_whose_loss_is_large(collective) -> None:
    model, optimizer, loader = adapter_for(collective).prepare(make())
    for index, (x, y) in enumerate(loader):
        loss = loss_of(model, x, y)
        if index == 1 and collective.worker == 1:
            continue
        loss.backward()
        optimizer.step()


def learn_at_different_rates(collective) -> None:
    model, optimizer, loader = adapter_for(collective).prepare(make())
    for x, y in loader:
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5 if collective.worker else 1.0


def weigh_on_some_workers_only(collective) -> None:
    adapter = adapter_for(collective)
    model, optimizer, loader = adapter.prepare(make())
    for x, y in loader:
        loss = loss_of(model, x, y)
        (adapter.weigh(loss, 3) if collective.worker else loss).backward()
        optimizer.step()


def shuffle_differently(collective) -> None:
    class Sampler:
        def __iter__(self):
            return iter(range(47, -1, -1) if collective.worker else range(48))

        def __len__(self):
            return 48

    model, optimizer, loader = make()
    loader = DataLoader(loader.dataset, batch_size=12, sampler=Sampler())
    model, optimizer, loader = adapter_for(collective).prepare([model, optimizer, loader])
    for x, y in loader:
        loss_of(model, x, y).backward()


def train_on_an_unprepared_loader(collective) -> None:
    model, optimizer, loader = make()
    model, optimizer = adapter_for(collective).prepare([model, optimizer])
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (step_on_some_workers_only, "did not do the same"),
        (step_less_in_the_last_batch, "did not do the same"),
        (skip_a_batch_whose_loss_is_large, "did not call the same thing|did not run the same loop"),
        (learn_at_different_rates, "learning rates"),
        (weigh_on_some_workers_only, "some replicas gave a count"),
        (shuffle_differently, "did not call the same thing"),
        (train_on_an_unprepared_loader, "come from a loader that is not"),
    ],
)
def test_a_worker_that_differs_is_an_error_on_all(body, message):
    launched = run_workers(2, 2, body)
    assert launched.outcome.exit_code == 1, launched.outcome
    assert re.search(message, launched.outcome.failure["traceback"]), launched.outcome.failure["traceback"]


def fail_in_one_body(collective) -> None:
    model, optimizer, loader = adapter_for(collective).prepare(make())
    for index, (x, y) in enumerate(loader):
        if index == 1 and collective.worker == 1:
            raise ZeroDivisionError("mine")
        loss_of(model, x, y).backward()
        optimizer.step()


def test_an_exception_in_one_body_stops_all_and_is_shown_as_it_is():
    launched = run_workers(2, 2, fail_in_one_body)
    assert launched.outcome.exit_code == 1
    assert launched.outcome.failure["error"] == "ZeroDivisionError"


def own_rows_on_an_unprepared_loader(collective) -> list:
    adapter = adapter_for(collective)
    model, optimizer, loader = make()
    mine = torch.utils.data.Subset(loader.dataset, range(collective.worker, 48, 2))
    model, optimizer = adapter.prepare([model, optimizer])
    for x, y in DataLoader(mine, batch_size=6):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def test_workers_that_load_rows_of_their_own_train_on_the_mean():
    launched = run_workers(2, 2, own_rows_on_an_unprepared_loader)
    assert launched.outcome.exit_code == 0, launched.outcome
    adapter_for(solo(1, available_bytes=lambda: 2**40))
    model, optimizer, loader = make()
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    for worker in (0, 1):
        for ours, plain in zip(launched.results[worker], model.parameters(), strict=True):
            torch.testing.assert_close(torch.as_tensor(ours), plain.detach(), rtol=1e-5, atol=1e-7)


# Replicas of one worker differ, or the script asks for what cannot be.


def test_a_counter_of_bodies_that_decides_about_a_step_is_found_out(alone):
    model, optimizer, loader = alone.prepare(make())
    with pytest.raises(MismatchError, match=r"(?s)replicas 0 and 1 did not do the same.*strategy\.enumerate"):
        for index, (x, y) in enumerate(loader):
            loss_of(model, x, y).backward()
            if index % 2:
                optimizer.step()


def test_a_scheduler_that_is_not_prepared_is_found_out(alone):
    model, optimizer, loader = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, loader = alone.prepare([model, optimizer, loader])
    with pytest.raises(MismatchError, match="learning rates"):
        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step()
            scheduler.step()


def test_what_is_guarded_by_stepped_may_differ_between_bodies(alone):
    model, optimizer, loader = alone.prepare(make())
    steps = 0
    for x, y in loader:
        loss_of(model, x, y).backward()
        if alone.stepped:
            optimizer.step()
            steps += 1
    assert steps == alone.step == len(loader)


def test_a_loop_left_in_the_middle_of_a_batch_is_an_error_of_the_next_one(alone, capsys):
    model, _, loader = alone.prepare(make())
    for x, y in loader:
        loss_of(model, x, y).backward()
        break
    assert "left in the middle of a batch" in capsys.readouterr().err
    with pytest.raises(MismatchError, match="left in the middle of a batch"):
        for _ in loader:
            pass


def test_a_loop_that_an_error_of_ours_has_ended_is_not_called_one_that_the_user_has_left(alone, capsys):
    model, optimizer, loader = make()
    model, loader = alone.prepare([model, loader])
    with pytest.raises(MismatchError, match="was not prepared itself"):
        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step()
    with pytest.raises(MismatchError, match="given two counts"):
        for x, y in loader:
            loss = alone.weigh(loss_of(model, x, y), 3)
            if not alone.loop.body.replica:
                loss.backward()
            else:
                alone.weigh(loss, 4)
    assert "left" not in capsys.readouterr().err


def test_a_loop_left_after_a_whole_batch_counts_it_and_goes_on(alone):
    model, optimizer, loader = alone.prepare(make())
    for _ in range(2):
        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step()
            if alone.stepped:
                break
    assert alone.step == 2


def test_a_batch_smaller_than_the_number_of_replicas_is_refused(alone):
    _, _, loader = alone.prepare(make(batch_size=1))
    with pytest.raises(MismatchError, match=r"(?s)1 rows cannot be split between 2 replicas.*batch_size=2"):
        next(iter(loader))


def test_an_unprepared_loader_cannot_serve_several_replicas_of_a_worker(alone):
    model, optimizer, loader = make()
    model, optimizer = alone.prepare([model, optimizer])
    x, y = next(iter(loader))
    loss_of(model, x, y).backward()
    with pytest.raises(MismatchError, match="come from a loader that is not"):
        optimizer.step()


def test_a_gradient_set_by_hand_is_refused_at_the_step(alone):
    model, optimizer, loader = make()
    model.append(nn.Linear(5, 5))
    optimizer.add_param_group({"params": model[-1].parameters()})
    model, optimizer, loader = alone.prepare([model, optimizer, loader])
    with pytest.raises(MismatchError, match=r"exchanged with nobody: parameter 0 of group 1 \(3.weight\)"):
        for x, y in loader:
            optimizer.zero_grad()
            ((model[:3](x) - y) ** 2).mean().backward()
            model[-1].weight.grad = torch.ones(5, 5)
            optimizer.step()


def test_a_model_without_values_is_refused(alone):
    with pytest.raises(MismatchError, match="meta device"):
        alone.prepare([nn.Linear(2, 2, device="meta")])


def test_a_model_with_a_sparse_buffer_is_refused(alone):
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    with pytest.raises(MismatchError, match=r"(?s)adjacency of the Linear is a torch.sparse_coo tensor.*attribute"):
        alone.prepare([model])


def test_a_model_of_which_a_part_has_no_values_is_refused(alone):
    with pytest.raises(MismatchError, match="meta device"):
        alone.prepare([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))])


def test_training_loops_within_one_another_are_refused(alone):
    model, _, outer = make()
    model, outer, inner = alone.prepare([model, outer, make()[2]])
    with pytest.raises(MismatchError, match="within one body of another"):
        for _ in outer:
            for x, y in inner:
                loss_of(model, x, y).backward()


def test_an_optimizer_that_evaluates_the_loss_at_will_is_refused(alone):
    model, _, loader = make()
    optimizer = torch.optim.LBFGS(model.parameters())
    model, optimizer, loader = alone.prepare([model, optimizer, loader])
    with pytest.raises(MismatchError, match="LBFGS"):
        for x, y in loader:
            optimizer.step(lambda x=x, y=y: loss_of(model, x, y))


def test_a_step_with_a_closure_waits_for_the_whole_batch(alone):
    model, optimizer, loader = alone.prepare(make())
    before = model[0].weight.detach().clone()
    changed = []
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
        changed.append(not torch.equal(before, model[0].weight))
    assert changed[:2] == [False, True]


def test_accumulating_in_the_middle_of_a_batch_is_refused(alone):
    _, _, loader = alone.prepare(make())
    next(iterator := iter(loader))
    with pytest.raises(MismatchError, match="before the loop"):
        alone.accumulate(2)
    del iterator


def test_a_loss_that_is_nan_names_the_replica_once(alone, capsys):
    model, optimizer, loader = alone.prepare(make())
    for index, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        (loss_of(model, x, y) * (float("nan") if index in (1, 3) else 1)).backward()
        optimizer.step()
    told = [line for line in capsys.readouterr().err.splitlines() if "NaN" in line]
    assert told == ["duoka: the loss of replica 1 is NaN at step 0, and with it the whole gradient"]


def test_counts_that_are_not_numbers_of_things_are_refused(alone):
    model, _, loader = alone.prepare(make())
    for count in (-1, float("nan"), float("inf")):
        with pytest.raises(MismatchError, match="count of"):
            for x, y in loader:
                alone.weigh(loss_of(model, x, y), count)


def test_an_optimizer_that_was_not_prepared_is_refused(alone):
    model, optimizer, loader = make()
    model, loader = alone.prepare([model, loader])
    with pytest.raises(MismatchError, match=r"(?s)SGD steps on a prepared model.*pass the optimizer"):
        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step()


def test_a_scheduler_that_steps_before_backward_is_refused(alone):
    model, optimizer, loader = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, loader, scheduler = alone.prepare([model, optimizer, loader, scheduler])
    with pytest.raises(MismatchError, match="scheduler 1 step was called before backward"):
        for x, y in loader:
            scheduler.step()
            loss_of(model, x, y).backward()
            optimizer.step()


def test_an_optimizer_that_steps_within_backward_is_refused(alone):
    model, optimizer, loader = alone.prepare(make())
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    with pytest.raises(MismatchError, match="step within backward"):
        for x, y in loader:
            loss_of(model, x, y).backward()


def test_two_counts_for_one_backward_are_refused(alone):
    model, _, loader = alone.prepare(make())
    with pytest.raises(MismatchError, match="two counts, 3 and 4"):
        for x, y in loader:
            (alone.weigh(loss_of(model, x, y), 3) + alone.weigh(loss_of(model, x, -y), 4)).backward()


def test_training_in_eval_mode_is_refused_and_says_what_to_do(alone):
    model, optimizer, loader = alone.prepare(make())
    model.eval()
    with pytest.raises(MismatchError, match=r"(?s)evaluation loop.*model\.train"):
        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step()


def test_a_sampler_without_an_end_is_refused(alone, monkeypatch):
    monkeypatch.setattr("duoka.frameworks.torch.order._MOST_BATCHES", 1000)
    _, _, loader = make()
    endless = DataLoader(loader.dataset, batch_sampler=iter(lambda: [0, 1, 2], None))
    with pytest.raises(MismatchError, match="does not end"):
        next(iter(alone.prepare([endless])[0]))


def test_hooks_of_the_user_see_the_gradient_before_it_is_exchanged(alone):
    model, optimizer, loader = alone.prepare(make())
    before = model[0].weight.detach().clone()
    model[0].weight.register_hook(lambda gradient: gradient * 0)
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    assert torch.equal(before, model[0].weight) and not torch.equal(model[2].weight.grad, torch.zeros(5, 8))


# What p.grad shows is the user's own, whatever happens to the memory behind it.


@pytest.mark.parametrize("width", [8, 3000])
def test_gradients_that_the_user_keeps_and_changes_stay_as_they_are(width):
    def body(collective) -> list:
        adapter = adapter_for(collective)
        model, optimizer, loader = adapter.prepare(make(width))
        kept, totals = [], []
        for index, (x, y) in enumerate(loader):
            optimizer.zero_grad(set_to_none=index % 2 == 0)
            loss_of(model, x, y).backward()
            gradient = model[0].weight.grad
            gradient.mul_(2)  # nobody else sees it
            copy = gradient.clone()
            adapter._collective.barrier()
            totals.append(bool(torch.equal(model[0].weight.grad, copy)))
            kept.append((gradient, copy))
            optimizer.step()
        return [totals, float(model[0].weight.detach().double().sum())]

    launched = run_workers(2, 2, body)
    assert launched.outcome.exit_code == 0, launched.outcome
    (first, sum_0), (second, sum_1) = launched.results[0], launched.results[1]
    assert all(first) and all(second) and sum_0 == sum_1
