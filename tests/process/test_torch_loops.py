"""PyTorch loops that lose a worker, and loops that do not fit: forked workers under the real supervisor."""

from __future__ import annotations

import hashlib
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from duoka.collectives.solo import solo
from duoka.errors import MismatchError
from duoka.frameworks.torch.adapter import TorchAdapter
from duoka.strategies.strategy import Options
from tests.conftest import die_at, run_workers

pytestmark = [pytest.mark.torch]
WIDTHS = {"small": 8, "large": 3000}


def adapter_for(collective) -> TorchAdapter:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return TorchAdapter(collective, 0, torch.device("cpu"))


def make(width: int = 8, rows: int = 48, batch_size: int = 12):
    model = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 5))
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(rows, 20, generator=generator), torch.randn(rows, 5, generator=generator))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), DataLoader(data, batch_size=batch_size)


def train(collective, size: str, backwards: int, victim: int = -1, moment: int = -1) -> str:
    if collective.worker == victim:
        die_at(collective, moment)
    model, optimizer, loader = adapter_for(collective).prepare(make(WIDTHS[size]))
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        ((out - y) ** 2).mean().backward(retain_graph=backwards > 1)
        if backwards > 1:
            (0.3 * out.abs().mean()).backward()
        optimizer.step()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


class Fading(nn.Module):
    """Has a buffer that its forward changes, and its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.9)
        return x * self.scale


LAYERS = {
    "trained": lambda: nn.BatchNorm1d(8),
    "at rest": lambda: nn.BatchNorm1d(8).eval(),
    "fading": Fading,
}


def train_gan(collective, layer: str) -> list[str]:
    """Both steps of a batch go through one forward of the maker. What its layer holds after the first one, and all."""
    adapter = adapter_for(collective)
    _, _, loader = make(batch_size=13)  # 48 rows: shares are uneven, and weighing rounds
    maker, judge = nn.Sequential(nn.Linear(5, 8), LAYERS[layer](), nn.Linear(8, 20)), nn.Linear(20, 1)
    for buffer in maker[1].buffers():
        buffer.add_(torch.rand(8)) if buffer.shape else None
    steps = [torch.optim.Adam(model.parameters(), 0.01) for model in (maker, judge)]
    maker, judge, maker_step, judge_step, loader = adapter.prepare([maker, judge, *steps, loader])
    held = []
    for x, z in loader:
        judge_step.zero_grad()
        fake = maker(z)
        (judge(fake.detach()).mean() - judge(x).mean()).backward()
        judge_step.step()
        if adapter.stepped:
            held.append(digest_of(maker[1].buffers()))
        if layer == "at rest":
            (before,) = torch.autograd.grad(judge(fake).mean(), maker[0].weight, retain_graph=True)
            (now,) = torch.autograd.grad(judge(maker(z)).mean(), maker[0].weight)
            assert torch.equal(before, now)
        maker_step.zero_grad()
        (-judge(fake).mean()).backward()
        maker_step.step()
    return [*held, digest_of([*maker.state_dict().values(), *judge.state_dict().values()])]


def digest_of(tensors) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_backward_through_a_forward_from_before_the_first_of_two_steps_is_that_of_plain_pytorch(layer):
    plain, alone = (train_gan(solo(number, available_bytes=lambda: 2**40), layer) for number in (1, 2))
    assert alone == plain and len(plain) == 5
    launched = run_workers(2, 2, train_gan, layer)
    assert launched.outcome.exit_code == 0, launched.outcome
    assert launched.results[0] == launched.results[1] and len(launched.results[0]) == 5


@pytest.mark.parametrize(
    ("size", "backwards"),
    [
        ("large", 2),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in (("small", 1), ("small", 2), ("large", 1))),
    ],
)
def test_a_loop_that_loses_a_worker_ends_with_the_bits_of_a_calm_one(size, backwards):
    calm = train(solo(4, available_bytes=lambda: 2**40), size, backwards)
    for num_workers, victim, moment in [(2, 1, m) for m in range(8, 24, 3)] + [(3, 0, m) for m in range(8, 24, 3)]:
        launched = run_workers(num_workers, 4, train, size, backwards, victim, moment)
        assert launched.outcome.lost == [(victim, signal.SIGKILL)], launched.outcome
        assert launched.outcome.exit_code == 0, launched.outcome
        assert set(launched.results.values()) == {calm}, f"{num_workers} workers, moment {moment}"


def lose_a_worker_before_two_steps(collective, is_synced: bool) -> None:
    torch.manual_seed(0)
    adapter = TorchAdapter(collective, 0, torch.device("cpu"), Options(sync_batchnorm=is_synced))
    model, optimizer, loader = make()
    model.append(nn.BatchNorm1d(5))
    model, optimizer, loader = adapter.prepare([model, optimizer, loader])
    for x, y in loader:
        if adapter.step == 2 and collective.worker == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2):
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_loop_that_ends_because_a_worker_was_lost_is_not_called_one_that_the_user_has_left(is_synced, capfd):
    launched = run_workers(2, 2, lose_a_worker_before_two_steps, is_synced)
    assert launched.outcome.lost == [(0, signal.SIGKILL)], launched.outcome
    assert "WorkerLost" in str(launched.outcome)
    said = "\n".join([*launched.said, *capfd.readouterr()])
    assert "was ended by SIGKILL" in said
    assert "left" not in said


def leave_out_a_batch(collective) -> str:
    model, optimizer, loader = adapter_for(collective).prepare(make())
    for index, (x, y) in enumerate(loader):
        if index == 2 and collective.worker == 1:
            continue
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    return "finished"


def break_early(collective) -> str:
    model, _, loader = adapter_for(collective).prepare(make())
    for index, (x, y) in enumerate(loader):
        if index == 2 and collective.worker == 1:
            break
        ((model(x) - y) ** 2).mean().backward()
    return "finished"


def build_differently(collective) -> None:
    model = nn.Linear(4 + collective.worker, 2)
    adapter_for(collective).prepare([model])


@pytest.mark.parametrize(
    ("body", "errors"),
    [
        (leave_out_a_batch, {"MismatchError", "WorkerLeft"}),
        (break_early, {"WorkerLeft"}),
        (build_differently, {"MismatchError"}),
    ],
)
def test_loops_that_do_not_fit_are_an_error_and_never_a_hang(body, errors):
    launched = run_workers(2, 2, body)
    assert launched.outcome.exit_code != 0
    assert launched.outcome.failure["error"] in errors, launched.outcome.failure["traceback"]


@pytest.fixture
def alone():
    return adapter_for(solo(2, available_bytes=lambda: 2**40))


def test_an_optimizer_of_other_parameters_is_refused(alone):
    _, _, loader = make()
    prepared = alone.prepare([nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1), loader])
    with pytest.raises(MismatchError, match="parameters of no prepared model"):
        iter(prepared[2])  # a plain loop begins


def test_the_same_object_is_not_prepared_twice(alone):
    model = nn.Linear(2, 2)
    alone.prepare([model])
    with pytest.raises(MismatchError, match="prepared already"):
        alone.prepare([model])


def test_what_cannot_be_prepared_is_named(alone):
    with pytest.raises(MismatchError, match="A dict cannot be prepared"):
        alone.prepare([{}])


def test_a_share_of_one_row_under_batch_norm_names_three_ways_out(alone):
    model = nn.Sequential(nn.Linear(20, 4), nn.BatchNorm1d(4))
    _, _, loader = make(rows=15, batch_size=12)
    model, loader = alone.prepare([model, loader])
    with pytest.raises(MismatchError, match=r"(?s)BatchNorm1d 1 .*drop_last.*fewer replicas.*sync_batchnorm"):
        for x, _ in loader:
            model(x).sum().backward()


def test_a_gradient_set_by_hand_on_a_stranger_is_refused_at_the_step(alone):
    model, optimizer, loader = make()
    stranger = nn.Parameter(torch.zeros(2))
    model, optimizer, loader = alone.prepare([model, optimizer, loader])
    batches = iter(loader)
    optimizer.add_param_group({"params": [stranger]})
    with pytest.raises(MismatchError, match="exchanged with nobody"):
        for x, y in batches:
            ((model(x) - y) ** 2).mean().backward()
            stranger.grad = torch.ones(2)
            optimizer.step()


def test_the_model_stays_the_same_object_with_the_same_names(alone):
    model, optimizer, loader = make()
    names = list(model.state_dict())
    back, _, _ = alone.prepare([model, optimizer, loader])
    assert back is model and list(back.state_dict()) == names


def test_gradients_show_the_whole_batch_after_the_last_body_and_the_replicas_own_before(alone):
    model, optimizer, loader = alone.prepare(make(rows=12))
    shown = []
    for x, y in loader:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        shown.append((model[0].weight.grad.clone(), alone.stepped, len(x)))
    plain = torch.autograd.grad(((model(loader.dataset[:][0]) - loader.dataset[:][1]) ** 2).mean(), model[0].weight)[0]
    assert [stepped for _, stepped, _ in shown] == [False, True]
    torch.testing.assert_close(shown[1][0], plain)
    assert not torch.allclose(shown[0][0], plain)
