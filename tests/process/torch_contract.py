"""Scripts of the function style, one function each: ordinary training loops that re-running a loop's body got wrong.

Each returns what the script keeps, as digests, and the numbers that it would print. They run on forked workers; see
`test_contract_torch.py`. A plan says at which call and in which phase of it a worker dies.
"""

from __future__ import annotations

import copy
import hashlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import duoka

SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {}
# Where a worker can die within a call: in its own words, and at moments of the exchange.
PHASES = ("before", "forward", "backward", "depositing", "arriving", "arrived", "reducing", "completed", "after")
SMALL = (
    "carried_state",
    "gan_with_rows",
    "lbfgs",
    "tokens_and_sums",
    "odd_sizes",
    "changing_parts",
)  # nothing is "reducing" there
WIDE = 4000
strategy: Any = None  # of this worker: set when a scenario runs


def scenario(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    SCENARIOS[function.__name__] = function
    return function


@dataclass(frozen=True)
class Death:
    worker: int
    call: int
    phase: str


class Fate:
    """Counts this worker's calls, and ends it where that was planned."""

    def __init__(self, death: Death | None) -> None:
        self.death, self.calls = death, 0

    def come_by(self, phase: str) -> None:
        if self.death == Death(strategy.worker, self.calls, phase):
            self.kill()

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


fate = Fate(None)


def run(name: str, of_worker: Any, collective: Any, death: Death | None = None) -> dict[str, Any]:
    """Run one scenario on this worker."""
    global strategy, fate
    strategy, fate = of_worker, Fate(death)
    collective.moment = fate.come_by
    torch.manual_seed(7)
    return SCENARIOS[name]() | {"calls": fate.calls}


def backward(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """strategy.backward, with moments to die at: before it, inside of the function, in the backward, after it."""
    fate.calls += 1
    fate.come_by("before")

    def struck(*own: Any) -> Any:
        fate.come_by("forward")
        returned = function(*own)
        loss = returned[0] if isinstance(returned, tuple) else returned
        first = loss if isinstance(loss, torch.Tensor) else loss.terms[0].value
        if first.requires_grad:
            first.register_hook(lambda gradient: fate.come_by("backward"))
        return returned

    struck.__qualname__ = function.__qualname__
    result = strategy.backward(struck, *args, **kwargs)
    fate.come_by("after")
    return result


def sha(*things: Any) -> str:
    digest = hashlib.sha256()
    for thing in things:
        state = thing.state_dict() if hasattr(thing, "state_dict") else thing
        for tensor in _tensors(state):
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def data(num_samples: int = 100) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def make(dropout: float = 0.2, width: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, width), nn.Dropout(dropout), nn.Tanh(), nn.Linear(width, 2))


def prepare(batch_size: int = 12) -> tuple[nn.Module, Any, Any]:
    """With a model so large that its gradients are added up in parts by all workers: one more phase to die in."""
    model = make(width=WIDE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data(), batch_size=batch_size, shuffle=True)
    return strategy.prepare(model, optimizer, loader)


@scenario
def plain() -> dict[str, Any]:
    model, optimizer, loader = prepare()

    def loss_of(x, y):
        return F.cross_entropy(model(x), y)

    for _ in strategy.epochs(2):
        for batch in strategy.batches(loader):
            optimizer.zero_grad()
            backward(loss_of, batch)
            optimizer.step()
    return {"model": sha(model, optimizer)}


@scenario
def counter() -> dict[str, Any]:
    """`n += 1; if n == 16: break`, a running loss, and a learning rate by hand."""
    model, optimizer, loader = prepare()
    state = strategy.register(count=0, running=0.0)

    def loss_of(x, y):
        return F.cross_entropy(model(x), y)

    for _ in strategy.epochs(9):
        for batch in strategy.batches(loader):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * 0.97**state.count
            optimizer.zero_grad()
            loss = backward(loss_of, batch)
            optimizer.step()
            state.running += loss.item() * len(batch)
            state.count += 1
            if state.count == 13:
                break
        if state.count == 13:
            break
    return {"model": sha(model, optimizer), "running": state.running, "count": state.count}


@scenario
def islice() -> dict[str, Any]:
    import itertools

    model, optimizer, loader = prepare()
    state = strategy.register(losses=[])
    for _ in strategy.epochs(2):
        for batch in itertools.islice(strategy.batches(loader), 6 - len(state.losses) % 6):
            optimizer.zero_grad()
            state.losses.append(backward(lambda x, y: F.cross_entropy(model(x), y), batch).item())
            optimizer.step()
    return {"model": sha(model, optimizer), "losses": state.losses}


@scenario
def ema_and_accuracy() -> dict[str, Any]:
    model, optimizer, loader = prepare()
    ema = copy.deepcopy(model)
    state = strategy.register(ema=ema, correct=0.0, seen=0)

    def loss_of(x, y):
        out = model(x)
        return F.cross_entropy(out, y), {"correct": ((out.argmax(1) == y).sum(), len(y)), "spread": out.square().mean()}

    for _ in strategy.epochs(1):
        for batch in strategy.batches(loader):
            optimizer.zero_grad()
            _, metrics = backward(loss_of, batch)
            optimizer.step()
            state.correct += metrics["correct"] * len(batch)
            state.seen += len(batch)
            with torch.no_grad():
                for old, new in zip(ema.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.1)
    return {"model": sha(model, optimizer), "ema": sha(ema), "correct": state.correct, "seen": state.seen}


@scenario
def carried_state() -> dict[str, Any]:
    """An RNN state that goes from batch to batch, through `strategy.rows`."""
    rnn, head = nn.RNNCell(8, 5), nn.Linear(5, 2)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], 1e-2)
    rnn, head, optimizer = strategy.prepare(rnn, head, optimizer)
    x, y = data(96).tensors
    state = strategy.register(hidden=torch.zeros(8, 5))

    def loss_of(own_x, own_y, own_hidden):
        new = rnn(own_x, own_hidden)
        return F.cross_entropy(head(new), own_y), strategy.rows(new)

    for step in strategy.steps(12):
        start = 8 * step
        optimizer.zero_grad()
        _, state.hidden = backward(loss_of, x[start : start + 8], y[start : start + 8], state.hidden)
        optimizer.step()
    return {"model": sha(rnn, head, optimizer), "hidden": sha([state.hidden])}


@scenario
def sam() -> dict[str, Any]:
    """Sharpness-aware minimisation: p.grad is used between two backwards of a batch."""
    model, optimizer, loader = prepare()

    def loss_of(x, y):
        return F.cross_entropy(model(x), y)

    for _ in strategy.epochs(2):
        for batch in strategy.batches(loader):
            optimizer.zero_grad()
            backward(loss_of, batch)
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                steps = [p.grad * (0.05 / norm) for p in model.parameters()]
                for p, step in zip(model.parameters(), steps, strict=True):
                    p.add_(step)
            optimizer.zero_grad()
            backward(loss_of, batch)
            with torch.no_grad():
                for p, step in zip(model.parameters(), steps, strict=True):
                    p.sub_(step)
            optimizer.step()
    return {"model": sha(model, optimizer)}


@scenario
def accumulation_and_unprepared_scheduler() -> dict[str, Any]:
    model, optimizer, loader = prepare()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    strategy.register(scheduler=scheduler)
    optimizer.zero_grad()
    for _ in strategy.epochs(2):
        for batch in strategy.batches(loader):
            backward(lambda x, y: F.cross_entropy(model(x), y) / 2, batch)
            if (batch.index + 1) % 2 == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return {"model": sha(model, optimizer), "rate": optimizer.param_groups[0]["lr"]}


@scenario
def two_optimizers() -> dict[str, Any]:
    model, optimizer, loader = prepare()
    critic = nn.Linear(2, 1)
    second = torch.optim.Adam(critic.parameters(), 1e-2)
    critic, second = strategy.prepare(critic, second)
    for _ in strategy.epochs(1):
        for batch in strategy.batches(loader):
            optimizer.zero_grad()
            backward(lambda x, y: F.cross_entropy(model(x), y), batch)
            optimizer.step()
            second.zero_grad()
            backward(lambda x, y: critic(model(x).detach()).square().mean(), batch)
            second.step()
    return {"model": sha(model, optimizer), "critic": sha(critic, second)}


@scenario
def gan_with_rows() -> dict[str, Any]:
    maker, judge = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(8, 1)
    optimizers = torch.optim.Adam(maker.parameters(), 1e-2), torch.optim.Adam(judge.parameters(), 1e-2)
    loader = DataLoader(data(), batch_size=12)
    maker, judge, first, second, loader = strategy.prepare(maker, judge, *optimizers, loader)

    def make_fakes(noise):
        fakes = maker(noise)
        return F.softplus(-judge(fakes)).mean(), strategy.rows(fakes)

    def judge_both(x, y, fakes):
        return F.softplus(judge(fakes)).mean() + F.softplus(-judge(x)).mean()

    for _ in strategy.epochs(2):
        for batch in strategy.batches(loader):
            noise = torch.randn(len(batch), 4)
            maker.zero_grad()
            _, fakes = backward(make_fakes, noise)
            first.step()
            judge.zero_grad()
            backward(judge_both, batch, fakes)
            second.step()
    return {"maker": sha(maker, first), "judge": sha(judge, second)}


@scenario
def lbfgs() -> dict[str, Any]:
    model = make(dropout=0.0)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    model, optimizer = strategy.prepare(model, optimizer)
    x, y = data(40).tensors

    def closure():
        optimizer.zero_grad()
        return backward(lambda own_x, own_y: F.cross_entropy(model(own_x), own_y), x, y)

    for _ in strategy.steps(2):
        optimizer.step(closure)
    return {"model": sha(model)}


@scenario
def grad_scaler() -> dict[str, Any]:
    model, optimizer, loader = prepare()
    scaler = strategy.prepare(torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3))
    state = strategy.register(losses=[])
    for _ in strategy.epochs(1):
        for batch in strategy.batches(loader):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = backward(lambda x, y: F.cross_entropy(model(x), y), batch, scaler=scaler)
            state.losses.append(loss.item())
            scaler.step(optimizer)
            scaler.update()
    return {"model": sha(model, optimizer), "losses": state.losses, "scale": scaler.get_scale()}


@scenario
def tokens_and_sums() -> dict[str, Any]:
    """Terms that are means over other things than samples: one count, then two counts and a sum."""
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = strategy.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 9, (10, 7), generator=generator)
    mask = torch.rand(10, 7, generator=generator) > 0.4

    def one(own, keep):
        losses = F.cross_entropy(model(own).transpose(1, 2), own.roll(-1, 1), reduction="none")
        return strategy.weigh(losses[keep].mean(), keep.sum())

    def two(own, keep):
        losses = F.cross_entropy(model(own).transpose(1, 2), own.roll(-1, 1), reduction="none")
        dropped = ~keep
        kept = strategy.weigh(losses[keep].mean(), keep.sum())
        both = kept + 0.1 * strategy.weigh(losses[dropped].mean(), dropped.sum())
        return both + strategy.weigh(1e-3 * losses.sum()) + losses.mean()

    state = strategy.register(losses=[])
    for _ in strategy.steps(6):
        for function in (one, two):
            optimizer.zero_grad()
            state.losses.append(backward(function, ids, mask).item())
            optimizer.step()
    return {"model": sha(model, optimizer), "losses": state.losses}


@scenario
def odd_sizes() -> dict[str, Any]:
    """BatchNorm, a last batch of one sample, replicas without samples, frozen, unused, tied and 16-bit parameters."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 4, sparse=True)
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.second.weight = self.first.weight
            self.norm = nn.BatchNorm1d(8, affine=False)
            self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(8, 8)
            self.frozen.requires_grad_(False)
            self.low = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
            self.last = nn.Linear(12, 2)

        def forward(self, x):
            y = self.second(torch.tanh(self.first(x)))
            y = (self.norm(y) if len(y) > 1 else y) * self.low.float() + self.frozen(x)
            rows = self.table((x[:, 0].abs() * 20).long().clamp(max=49))
            return self.last(torch.cat([y, rows], 1))

    model = Odd()
    dense = [p for name, p in model.named_parameters() if not name.startswith("table")]
    optimizers = torch.optim.SGD(dense, 0.1), torch.optim.SparseAdam(model.table.parameters(), 1e-2)
    loader = DataLoader(data(37), batch_size=12, shuffle=True)
    model, first, second, loader = strategy.prepare(model, *optimizers, loader)
    for _ in strategy.epochs(2):
        for batch in strategy.batches(loader):
            first.zero_grad()
            second.zero_grad()
            backward(lambda x, y: F.cross_entropy(model(x), y), batch)
            first.step()
            second.step()
    return {"model": sha(model, first, second), "unused": model.unused.weight.grad is None}


@scenario
def checkpointing() -> dict[str, Any]:
    from torch.utils.checkpoint import checkpoint

    model, optimizer, loader = prepare()
    for epoch in strategy.epochs(2):
        is_reentrant = epoch == 0

        def loss_of(x, y, is_reentrant=is_reentrant):
            x = x.requires_grad_(is_reentrant)
            return F.cross_entropy(checkpoint(model, x, use_reentrant=is_reentrant), y)

        for batch in strategy.batches(loader):
            optimizer.zero_grad()
            backward(loss_of, batch)
            optimizer.step()
    return {"model": sha(model, optimizer)}


@scenario
def kept_gradients() -> dict[str, Any]:
    """Gradients that a script keeps are not overwritten by the next call."""
    model, optimizer, loader = prepare()
    kept = []
    for _ in strategy.epochs(1):
        for batch in strategy.batches(loader):
            optimizer.zero_grad()
            backward(lambda x, y: F.cross_entropy(model(x), y), batch)
            kept.append((next(model.parameters()).grad, next(model.parameters()).grad.clone()))
            optimizer.step()
    return {"model": sha(model), "kept": all(torch.equal(now, then) for now, then in kept)}


@scenario
def changing_parts() -> dict[str, Any]:
    """Parts are frozen in turns, a layer is replaced, a buffer is set by the script; gradients have their strides."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 2)
            self.register_buffer("center", torch.zeros(4))
            self.register_buffer("center_of_all", torch.zeros(4))

        def forward(self, x):
            features = self.body(x.view(-1, 2, 2, 2)).mean((2, 3)) - self.center
            if self.training:
                self.center_of_all.data.mul_(0.9).add_(features.detach().mean(0))  # past autograd, as old scripts do
            if self.training and self.is_moving:
                self.center = self.center + 0.1 * features.detach().mean(0)
            return self.head(features)

        is_moving = False

    model = Parts().to(memory_format=torch.channels_last)
    loader = DataLoader(data(48), batch_size=12)
    model, loader = strategy.prepare(model, loader)
    for number, batch in enumerate(strategy.batches(loader)):
        model.body.requires_grad_(number % 2 == 0)
        if number == 1:
            model.center.fill_(0.5)
        model.is_moving = number >= 2
        if number == 2:
            model.head = nn.Linear(4, 2)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2, fused=True)
        model.zero_grad()
        backward(lambda x, y: F.cross_entropy(model(x), y), batch, check=False)
        if number % 2 == 0:
            has_strides = model.body.weight.grad.stride() == model.body.weight.stride()
        has_gradient = bool(model.head.weight.grad.abs().sum() > 0)
        optimizer.step()
    centers = model.center.tolist(), model.center_of_all.tolist()
    return {"model": sha(model), "strides": has_strides, "gradient": has_gradient, "centers": centers}


@scenario
def caught_errors() -> dict[str, Any]:
    """An error in the function leaves everything as it was; caught on all workers, the run goes on."""
    model, optimizer, loader = prepare()
    state = strategy.register(caught=0)
    for _ in strategy.epochs(1):
        for batch in strategy.batches(loader):
            optimizer.zero_grad()

            def loss_of(x, y, number=batch.index):
                if number == 3 and bool((y == 0).any()):
                    raise ValueError("a bad sample")
                return F.cross_entropy(model(x), y)

            before = sha(model), torch.get_rng_state().sum().item()
            try:
                backward(loss_of, batch)
            except (ValueError, duoka.errors.ReplicaFailed) as error:
                assert "a bad sample" in str(error)
                state.caught += 1
                assert before == (sha(model), torch.get_rng_state().sum().item())
                assert all(p.grad is None for p in model.parameters())
                continue
            optimizer.step()
    return {"model": sha(model, optimizer), "caught": state.caught}
