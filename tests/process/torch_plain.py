"""Scripts of the plain style, one function each: ordinary loops over a prepared loader.

Each runs as it does on one device if its strategy is None, and returns numbers that must be the same there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

Found = dict[str, Any]
SCENARIOS: dict[str, Callable[[Any], Found]] = {}


def scenario(function: Callable[[Any], Found]) -> Callable[[Any], Found]:
    SCENARIOS[function.__name__] = function
    return function


def samples(count: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 2))


def prepare(strategy: Any, *things: Any) -> Any:
    return things if strategy is None else strategy.prepare(*things)


def epochs(strategy: Any, count: int = 2) -> Any:
    return range(count) if strategy is None else strategy.epochs(count)


def weights(*models: nn.Module) -> list[float]:
    return [value for model in models for p in model.parameters() for value in p.detach().flatten().tolist()]


def mean(strategy: Any, value: float) -> float:
    return value if strategy is None else float(strategy.mean(value))


@scenario
def ordinary(strategy: Any) -> Found:
    """A last batch of two samples; an EMA, a scheduler, clipping, and a validation by a plain loader."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    loader, test = DataLoader(samples(), 16, shuffle=True), DataLoader(samples(30), 7)
    model, optimizer, loader = prepare(strategy, model, optimizer, loader)
    average, losses, correct = copy.deepcopy(model), [], []
    for _ in epochs(strategy):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            losses += [mean(strategy, loss.item()), float(norm)]
            with torch.no_grad():
                for kept, p in zip(average.parameters(), model.parameters(), strict=True):
                    kept.lerp_(p, 0.1)
        with torch.no_grad():
            correct.append(sum((model(x).argmax(1) == y).sum().item() for x, y in test))
    return {"weights": weights(model, average), "losses": losses, "correct": correct}


@scenario
def one_sample_left(strategy: Any) -> Found:
    """The last batch leaves all workers but one without samples."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(samples(33), 16, shuffle=True, generator=torch.Generator().manual_seed(5))
    model, optimizer, loader = prepare(strategy, model, optimizer, loader)
    total = 0.0
    for _ in epochs(strategy, 3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += mean(strategy, loss.item())
    return {"weights": weights(model), "total": total}


@scenario
def sam(strategy: Any) -> Found:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(strategy, model, optimizer, DataLoader(samples(), 16))
    for _ in epochs(strategy):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            with torch.no_grad():
                steps = [0.05 * p.grad / norm for p in model.parameters()]
                for p, step in zip(model.parameters(), steps, strict=True):
                    p.add_(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p, step in zip(model.parameters(), steps, strict=True):
                    p.sub_(step)
            optimizer.step()
    return {"weights": weights(model)}


@scenario
def two_losses(strategy: Any) -> Found:
    """Two backwards that add up, and a parameter that the second one does not reach."""
    trunk, first, second = nn.Linear(8, 6), nn.Linear(6, 2), nn.Linear(6, 1)
    everything = nn.ModuleList([trunk, first, second])
    optimizer = torch.optim.SGD(everything.parameters(), lr=0.1)
    everything, optimizer, loader = prepare(strategy, everything, optimizer, DataLoader(samples(), 16))
    for _ in epochs(strategy):
        for x, y in loader:
            optimizer.zero_grad()
            hidden = torch.tanh(trunk(x))
            F.cross_entropy(first(hidden), y).backward(retain_graph=True)
            F.mse_loss(second(hidden)[:, 0], y.to(x.dtype)).backward()
            optimizer.step()
    return {"weights": weights(everything)}


@scenario
def gan(strategy: Any) -> Found:
    maker, judge = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 1))
    makes = torch.optim.Adam(maker.parameters(), lr=0.01)
    judges = torch.optim.Adam(judge.parameters(), lr=0.01)
    loader = DataLoader(samples(), 16)
    maker, judge, makes, judges, loader = prepare(strategy, maker, judge, makes, judges, loader)
    for _ in epochs(strategy):
        for x, _ in loader:
            judges.zero_grad()
            fake = maker(x.flip(1))
            (F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
            judges.step()
            makes.zero_grad()
            F.softplus(-judge(fake)).mean().backward()
            makes.step()
    return {"weights": weights(maker, judge)}


@scenario
def unfrozen_in_the_batch(strategy: Any) -> Found:
    """The judge of a GAN is frozen whenever a batch is drawn, and trains in the middle of it."""
    maker, judge = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).eval()
    makes = torch.optim.Adam(maker.parameters(), lr=0.01)
    judges = torch.optim.Adam(judge.parameters(), lr=0.01)
    loader = DataLoader(samples(), 16)
    maker, judge, makes, judges, loader = prepare(strategy, maker, judge, makes, judges, loader)
    judge.requires_grad_(False)
    for _ in epochs(strategy):
        for x, _ in loader:
            fake = maker(x.flip(1))
            judge.requires_grad_(True)
            judges.zero_grad()
            (F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
            judges.step()
            judge.requires_grad_(False)
            makes.zero_grad()
            F.softplus(-judge(fake)).mean().backward()
            makes.step()
    return {"weights": weights(maker, judge)}


@scenario
def accumulation_dropped(strategy: Any) -> Found:
    """What waits under `no_sync` at the end of an epoch is dropped by `zero_grad`; a sum begins with an exchange."""
    found = {}
    for set_to_none in (True, False):
        torch.manual_seed(4)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = prepare(strategy, model, optimizer, DataLoader(samples(55), 11))
        for _ in range(2):
            optimizer.zero_grad(set_to_none=set_to_none)
            for i, (x, y) in enumerate(loader):
                with strategy.no_sync() if strategy is not None and i in (1, 4) else nullcontext():
                    (F.cross_entropy(model(x), y) / 2).backward()
                if i == 2:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)
        found[f"set_to_none {set_to_none}"] = weights(model)
    return found


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ArithmeticError


@scenario
def tried_again(strategy: Any) -> Found:
    """A backward raises on all workers after some gradients have arrived: p.grad stays, and a second try counts."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(strategy, model, optimizer, DataLoader(samples(), 16))
    for i, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        before = [p.grad.clone() for p in model.parameters()]
        try:
            F.cross_entropy(model[2](torch.tanh(Refusing.apply(model[0](x)))), y).backward()
        except ArithmeticError:
            for p, kept in zip(model.parameters(), before, strict=True):
                assert strategy is None or strategy.replicas == 1 or torch.equal(p.grad, kept)
                p.grad = kept
        if i % 2:
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {"weights": weights(model)}


@scenario
def accumulated(strategy: Any) -> Found:
    """By hand, every second batch, the last one of one sample; with an exchange at each batch, and with `no_sync`."""
    found = {}
    for name in ("always", "no_sync"):
        torch.manual_seed(4)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = prepare(strategy, model, optimizer, DataLoader(samples(34), 11))
        for _ in range(2):
            for i, (x, y) in enumerate(loader):
                is_last = i % 2 == 1 or i == len(loader) - 1
                waits = strategy is not None and name == "no_sync" and not is_last
                with strategy.no_sync() if waits else nullcontext():
                    (F.cross_entropy(model(x), y) / 2).backward()
                if is_last:
                    optimizer.step()
                    optimizer.zero_grad()
        found[name] = weights(model)
    return found


class Block(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        hidden = checkpoint(lambda value: torch.tanh(self.inner(value)), x, use_reentrant=self.use_reentrant)
        hidden = checkpoint(lambda value: torch.tanh(self.inner(value)), hidden, use_reentrant=self.use_reentrant)
        return self.outer(hidden)


@scenario
def checkpointed(strategy: Any) -> Found:
    """A layer that is used twice, under both kinds of activation checkpointing."""
    found = {}
    for use_reentrant in (True, False):
        torch.manual_seed(4)
        model = Block(use_reentrant=use_reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = prepare(strategy, model, optimizer, DataLoader(samples(), 16))
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.clone()), y).backward()
            optimizer.step()
        found[f"reentrant {use_reentrant}"] = weights(model)
    return found


@scenario
def weighed(strategy: Any) -> Found:
    """A mean over tokens with unequal counts, one of which is nothing; then a sum."""
    model, table = nn.Linear(8, 3), nn.Embedding(5, 8, sparse=True)
    both = nn.ModuleList([model, table])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 5, (40, 6), generator=generator)
    lengths = torch.arange(40) % 7
    both, optimizer, loader = prepare(strategy, both, optimizer, DataLoader(TensorDataset(tokens, lengths), 8))
    weigh = (lambda loss, count=None: loss) if strategy is None else strategy.weigh
    for x, length in loader:
        mask = torch.arange(6) < length[:, None]
        optimizer.zero_grad()
        losses = F.cross_entropy(model(table(x)).flatten(0, 1), x.flatten() % 3, reduction="none")[mask.flatten()]
        count = int(mask.sum())
        weigh(losses.mean(), count).backward()
        optimizer.step()
        optimizer.zero_grad()
        weigh((model(table(x)) ** 2).sum() * 0.01).backward()
        optimizer.step()
    return {"weights": weights(both)}


@scenario
def weighed_and_checkpointed(strategy: Any) -> Found:
    """A count holds for the backwards inside its own (reentrant checkpointing), and for no later one."""
    model = Block(use_reentrant=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(strategy, model, optimizer, DataLoader(samples(), 16))
    weigh = (lambda loss, count: loss) if strategy is None else strategy.weigh
    for x, y in loader:
        optimizer.zero_grad()
        is_counted = x[:, 0] > -0.3
        losses = F.cross_entropy(model(x.clone()), y, reduction="none")
        weigh(losses[is_counted].mean(), is_counted.sum()).backward()
        torch.autograd.grad(weigh(model.outer(x).mean(), 7), model.outer.bias)
        F.cross_entropy(model.outer(x), y).backward()
        optimizer.step()
    return {"weights": weights(model)}


@scenario
def train_in_the_loop(strategy: Any) -> Found:
    """The model is in eval mode when an epoch begins, and an iterator of another batch size is kept open."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(strategy, model, optimizer, DataLoader(samples(35), 17))
    look = iter(loader)
    x, _ = next(look)
    total = 0.0
    for _ in epochs(strategy):
        model.eval()
        for x, y in loader:
            model.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            total += mean(strategy, loss.item())
            loss.backward()
            optimizer.step()
    return {"weights": weights(model), "total": total}


@scenario
def two_loaders(strategy: Any) -> Found:
    """`zip`, an iterator by hand, and a loop over another prepared loader without gradients in between."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one, other = DataLoader(samples(48), 16, shuffle=True), DataLoader(samples(32), 16, shuffle=True)
    test = DataLoader(samples(20), 8)
    model, optimizer, one, other, test = prepare(strategy, model, optimizer, one, other, test)
    correct = 0
    for _ in epochs(strategy):
        for (x, y), (u, _) in zip(one, other, strict=False):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + 0.1 * (model(u) ** 2).mean()).backward()
            optimizer.step()
        again = iter(other)
        x, y = next(again)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            own = sum((model(x).argmax(1) == y).sum().item() for x, y in test)
        correct += own if strategy is None else int(strategy.sum(own))
    return {"weights": weights(model), "correct": correct}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter([(x, y) for x, y in samples(37)])


@scenario
def stream(strategy: Any) -> Found:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(strategy, model, optimizer, DataLoader(Stream(), 12))
    for _ in epochs(strategy):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return {"weights": weights(model)}


class Named(Dataset[Any]):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = samples(26)[index]
        return {"x": x, "y": y, "name": str(index)}


@scenario
def synced_batchnorm(strategy: Any) -> Found:
    """Needs `sync_batchnorm=True`: the numbers of one device, running statistics too; a last batch of two samples."""
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(strategy, model, optimizer, DataLoader(Named(), 8, shuffle=True))
    for _ in epochs(strategy):
        for batch in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch["x"]), batch["y"]).backward()
            optimizer.step()
    return {"weights": weights(model), "statistics": [*model[1].running_mean.tolist(), *model[1].running_var.tolist()]}


@scenario
def in_eval_mode(strategy: Any) -> Found:
    """Fine-tuning with the whole model in eval mode, and a head that is frozen for one epoch."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(strategy, model, optimizer, DataLoader(samples(32), 16))
    model.eval()
    for epoch in epochs(strategy, 3):
        model[2].requires_grad_(epoch != 1)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return {"weights": weights(model)}


class Tied(nn.Module):
    """One weight twice, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last, self.never = nn.Linear(8, 2), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


@scenario
def tied_and_unused(strategy: Any) -> Found:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    model, optimizer, loader = prepare(strategy, model, optimizer, DataLoader(samples(), 16))
    for _ in epochs(strategy):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return {"weights": weights(model), "unused": model.never.weight.grad is None}


@scenario
def statistics(strategy: Any) -> Found:
    """Frozen ones keep what they had learned; others are means over samples, whatever the count of the loss."""
    frozen, trained = nn.BatchNorm1d(8, dtype=torch.float32), nn.BatchNorm1d(8, momentum=1.0)
    frozen.running_mean.normal_()
    learned = [buffer.clone() for buffer in frozen.buffers()]
    model = nn.Linear(8, 2)
    both = nn.ModuleList([frozen, model, trained])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both, optimizer, loader = prepare(strategy, both, optimizer, DataLoader(samples(48), 16))
    frozen.eval()
    weigh = (lambda loss, count: loss) if strategy is None else strategy.weigh
    for _ in epochs(strategy):
        for x, y in loader:
            trained(x)
            optimizer.zero_grad()
            weigh(F.cross_entropy(model(frozen(x.float()).double()), y), 50 * len(y)).backward()
            optimizer.step()
    is_kept = all(torch.equal(*pair) for pair in zip(frozen.buffers(), learned, strict=True))
    return {"weights": weights(model), "kept": is_kept, "means": trained.running_mean.tolist()}


@scenario
def several_kinds(strategy: Any) -> Found:
    """A complex parameter, a scale that only the optimizer holds, and a layer that is added later."""
    model = nn.ParameterDict({"turn": nn.Parameter(torch.ones(8, dtype=torch.complex128))})
    turn, scale, head = model["turn"], nn.Parameter(torch.ones(())), nn.Linear(8, 2)
    optimizer = torch.optim.SGD([turn, scale, *head.parameters()], lr=0.05)
    model, head, optimizer, loader = prepare(strategy, model, head, optimizer, DataLoader(samples(), 16))
    for epoch in epochs(strategy):
        if epoch == 1:
            head.add_module("more", nn.Linear(8, 8, bias=False))
            nn.init.eye_(head.more.weight)
            optimizer.add_param_group({"params": head.more.parameters()})
        for x, y in loader:
            optimizer.zero_grad()
            hidden = (x.to(turn.dtype) * turn).abs() * scale
            hidden = head.more(hidden) if epoch else hidden
            F.cross_entropy(head(hidden), y).backward()
            optimizer.step()
    return {"weights": [*torch.view_as_real(turn.detach()).flatten().tolist(), scale.item(), *weights(head)]}


@scenario
def scaled(strategy: Any) -> Found:
    """Two losses overflow: a GradScaler skips these steps on all workers, and halves its scale."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=4)
    model, optimizer, scaler, loader = prepare(strategy, model, optimizer, scaler, DataLoader(samples(), 16))
    for _ in epochs(strategy):
        for x, y in loader:
            optimizer.zero_grad()
            huge = 1e306 if scaler.get_scale() > 2.0**14 else 1.0
            scaler.scale(F.cross_entropy(model(x), y) * huge).backward()
            scaler.step(optimizer)
            scaler.update()
    return {"weights": weights(model), "scale": scaler.get_scale()}


@scenario
def evaluated(strategy: Any) -> Found:
    """Loops without gradients that are left in the middle; what is drawn afterwards is the same on all workers."""
    model = network()
    model, loader = prepare(strategy, model, DataLoader(samples(48), 16, shuffle=True))
    correct = rows = 0
    with torch.no_grad():
        for x, y in loader:
            torch.rand(len(x))
            correct, rows = correct + int((model(x).argmax(1) == y).sum()), rows + len(y)
        for x, _ in loader:
            torch.rand(len(x) + (0 if strategy is None else strategy.worker))
            break
    if strategy is None or strategy.replicas == 1:
        return {"sums": [correct, rows]}
    own = [int(strategy.sum(correct)), int(strategy.sum(rows))]
    return {"sums": own, "drawn": torch.rand(1).item()}
