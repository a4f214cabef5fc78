"""Small scripts in the style of pytorch/examples, nanoGPT, Hugging Face and timm, converted well and badly.

Each runs as it does on one device if its strategy is None. Lists that are returned hold what a script printed.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Script = Callable[[Any, list[str]], dict[str, Any]]


# pytorch/examples: mnist.


class Net(nn.Module):
    def __init__(self, *, has_batchnorm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.bn = nn.BatchNorm2d(4) if has_batchnorm else nn.Identity()
        self.fc = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.fc(self.bn(self.pool(F.relu(self.conv(x)))).flatten(1)), dim=1)


def digits(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(num_samples)
    images = torch.randn(num_samples, 1, 8, 8, generator=generator)
    return TensorDataset(images, (images.flatten(1).mean(1) * 40).long() % 10)


class CosineScheduler:
    """As timm's: a class of its own that sets learning rates by the number of updates."""

    def __init__(self, optimizer: torch.optim.Optimizer, t_initial: int) -> None:
        self.optimizer, self.t_initial = optimizer, t_initial
        self.base_values = [group["lr"] for group in optimizer.param_groups]
        self.num_updates = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_updates = state["num_updates"]

    def step(self) -> None:
        self.num_updates += 1
        for group, base in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group["lr"] = base * 0.5 * (1 + math.cos(math.pi * min(1, self.num_updates / self.t_initial)))


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--style", choices=["function", "plain"], default="function")
    parser.add_argument("--prepare", nargs="*", default=["model", "optimizer", "train"])
    parser.add_argument("--scheduler", choices=["step", "cosine", "plateau"])
    parser.add_argument("--reduction", default="mean")
    parser.add_argument("--batchnorm", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--evaluate", choices=["loop", "function", "first"])
    parser.add_argument("--loss", choices=["own", "mean", "main"], default="own")
    return parser.parse_args(words)


def mnist(strategy: Any, words: list[str]) -> dict[str, Any]:
    args = parse(words)
    torch.manual_seed(0)
    things: dict[str, Any] = {"model": Net(has_batchnorm=args.batchnorm)}
    model = things["model"]
    optimizer = things["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.5)
    things["train"] = DataLoader(digits(args.samples), batch_size=args.batch_size)
    things["test"] = DataLoader(digits(300), batch_size=50)
    if args.scheduler == "step":
        things["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    elif args.scheduler == "cosine":
        things["scheduler"] = CosineScheduler(optimizer, 10)
    elif args.scheduler == "plateau":
        things["scheduler"] = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
    if strategy is not None and args.prepare:
        prepared = strategy.prepare(*(things[name] for name in args.prepare))
        things |= dict(zip(args.prepare, prepared if len(args.prepare) > 1 else [prepared], strict=True))
    run = Mnist(strategy, args, things)
    if args.evaluate == "first":
        run.test()
    for _ in range(args.epochs):
        run.train()
        if args.evaluate:
            run.test()
    return run.result()


class Mnist:
    """What the example keeps in global variables."""

    def __init__(self, strategy: Any, args: argparse.Namespace, things: dict[str, Any]) -> None:
        self.strategy, self.args, self.things = strategy, args, things
        self.model, self.optimizer, self.scheduler = things["model"], things["optimizer"], things.get("scheduler")
        self.ema = copy.deepcopy(self.model)
        self.num_steps, self.rates, self.correct, self.losses = 0, [], [], []

    def train(self) -> None:
        self.model.train()
        total = 0.0
        if self.strategy is not None and self.args.style == "function":
            for batch in self.strategy.batches(self.things["train"]):
                self.optimizer.zero_grad()
                total += self.strategy.backward(self.loss_of, batch).item()
                self.step()
                if self.args.dry_run:
                    break
        else:
            for data, target in self.things["train"]:
                self.optimizer.zero_grad()
                loss = self.loss_of(data, target)
                loss.backward()
                total += loss.item()
                self.step()
                if self.args.dry_run:
                    break
        if self.args.scheduler == "plateau":
            self.step_plateau(total)
        self.losses.append(total)

    def loss_of(self, data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(self.model(data), target, reduction=self.args.reduction)

    def step(self) -> None:
        self.optimizer.step()
        self.num_steps += 1
        is_here = self.args.loss != "main" or self.strategy.is_main
        if self.scheduler is not None and self.args.scheduler != "plateau" and is_here:
            self.scheduler.step()
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        with torch.no_grad():
            for average, parameter in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                average.mul_(0.9).add_(parameter, alpha=0.1)

    def step_plateau(self, total: float) -> None:
        self.scheduler.step(self.strategy.mean(total) if self.args.loss == "mean" else total)

    def test(self) -> None:
        if self.args.evaluate == "function":
            self.correct.append(self.strategy.evaluate(self.count_correct, self.things["test"]))
            return
        self.model.eval()
        correct = 0
        with torch.no_grad():
            for data, target in self.things["test"]:
                correct += (self.model(data).argmax(1) == target).sum().item()
        self.correct.append(correct)
        self.model.train()

    def count_correct(self, data: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (self.model(data).argmax(1) == target).sum() * 300, len(target)

    def result(self) -> dict[str, Any]:
        return {
            "weights": [p.detach().tolist() for p in self.model.parameters()],
            "ema": [p.detach().tolist() for p in self.ema.parameters()],
            "steps": self.num_steps,
            "rates": self.rates,
            "correct": self.correct,
            "losses": self.losses,
        }


# nanoGPT: batches of the script's own.


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.lm_head(self.wte(idx))
        return logits, F.cross_entropy(logits.view(-1, 11), targets.view(-1))


def nanogpt(strategy: Any, words: list[str]) -> dict[str, Any]:
    """Learning rates by hand, accumulation by hand, clipping. Words: "seeded", "own rows", "own generator", "head"."""
    torch.manual_seed(1337)
    data = torch.arange(400) * 7 % 11
    model = GPT()
    head = nn.Linear(8, 11) if "head" in words else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if strategy is not None:
        strategy.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(5)
    if "own generator" in words:
        generator.seed()

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        num_rows = 8 + (strategy.worker if "own rows" in words else 0)
        ix = torch.randint(390, (num_rows,), generator=generator)
        return torch.stack([data[i : i + 8] for i in ix]), torch.stack([data[i + 1 : i + 9] for i in ix])

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = model(x, y)[1] / 2
        if head is not None:
            loss = loss + F.cross_entropy(head(model.wte(x)).view(-1, 11), y.view(-1))
        return loss

    def other_loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(x, y) * 2

    losses = []
    for iter_num in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (iter_num + 1) / 4
        for _ in range(2):
            x, y = get_batch()
            if strategy is None or "plain" in words:
                loss = loss_of(x, y)
                loss.backward()
            else:
                chosen = other_loss_of if "other function" in words and strategy.worker and iter_num else loss_of
                loss = strategy.backward(chosen, x, y)
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"weights": [p.detach().tolist() for p in model.parameters()], "losses": losses}


# Hugging Face: batches are dictionaries, and the model computes a mean over tokens.


@dataclass
class Outputs:
    loss: torch.Tensor
    logits: torch.Tensor


class CausalLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Outputs:
        logits = self.head(self.embed(input_ids) * attention_mask[..., None])
        return Outputs(F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100), logits)


def sentences() -> list[dict[str, torch.Tensor]]:
    found = []
    for number in range(32):
        ids = torch.arange(12) * (number + 3) % 11
        mask = (torch.arange(12) < 3 + number % 9).long()
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def hugging_face(strategy: Any, words: list[str]) -> dict[str, Any]:
    """Words: "weigh"."""
    torch.manual_seed(0)
    model, loader = CausalLM(), DataLoader(sentences(), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if strategy is not None:
        model, optimizer, loader = strategy.prepare(model, optimizer, loader)

    def loss_of(batch: dict[str, torch.Tensor]) -> Any:
        outputs = model(**batch)
        if strategy is not None and "weigh" in words:
            return strategy.weigh(outputs.loss, (batch["labels"] != -100).sum())
        return outputs.loss

    losses = []
    for batch in loader if strategy is None else strategy.batches(loader):
        if strategy is None:
            loss = loss_of(batch)
            loss.backward()
        else:
            loss = strategy.backward(loss_of, batch)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"weights": [p.detach().tolist() for p in model.parameters()], "losses": losses}


# Bad input of strategy.backward and strategy.batches.


def linear(strategy: Any) -> tuple[Any, ...]:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, torch.arange(16) % 3), batch_size=8)
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    return model, optimizer, loader, lambda x, y: F.cross_entropy(model(x), y)


def earlier_handle(strategy: Any, words: list[str]) -> dict[str, Any]:
    _, _, loader, loss_of = linear(strategy)
    first, _ = strategy.batches(loader)
    strategy.backward(loss_of, first)
    return {}


def before_prepare(strategy: Any, words: list[str]) -> dict[str, Any]:
    model = nn.Linear(6, 3)
    strategy.backward(lambda x: model(x).mean(), torch.ones(8, 6))
    return {}


def only_a_loader(strategy: Any, words: list[str]) -> dict[str, Any]:
    loader = strategy.prepare(DataLoader(TensorDataset(torch.ones(16, 6)), batch_size=8))
    model = nn.Linear(6, 3)
    for batch in strategy.batches(loader):
        strategy.backward(lambda x: model(x).mean(), batch)
    return {}


def unpacked(strategy: Any, words: list[str]) -> dict[str, Any]:
    _, _, loader, loss_of = linear(strategy)
    for x, y in strategy.batches(loader):
        strategy.backward(loss_of, x, y)
    return {}


def items_of_a_handle(strategy: Any, words: list[str]) -> dict[str, Any]:
    _, _, loader, loss_of = linear(strategy)
    for batch in strategy.batches(loader):
        strategy.backward(loss_of, {key: value.to(strategy.device) for key, value in batch.items()})
    return {}


def key_of_a_handle(strategy: Any, words: list[str]) -> dict[str, Any]:
    _, _, loader, loss_of = linear(strategy)
    for batch in strategy.batches(loader):
        strategy.backward(loss_of, batch[0], batch[1])
    return {}


def loss_instead_of_a_function(strategy: Any, words: list[str]) -> dict[str, Any]:
    """As `accelerator.backward(loss)`."""
    model, _, _, _ = linear(strategy)
    strategy.backward(model(torch.ones(4, 6)).mean())
    return {}


def tensor_of_the_scripts_own(strategy: Any, words: list[str]) -> dict[str, Any]:
    """A leaf that is no Parameter, and that the script's own optimizer trains."""
    model, _, loader, _ = linear(strategy)
    scale = torch.ones(3, requires_grad=True)
    for batch in strategy.batches(loader):
        strategy.backward(lambda x, y: F.cross_entropy(model(x) * scale, y), batch)
    return {}


def gradient_penalty(strategy: Any, words: list[str]) -> dict[str, Any]:
    """A leaf that the function makes: nothing is wrong with it."""
    model, _, loader, _ = linear(strategy)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            out = model(x)
            (slope,) = torch.autograd.grad(out.tanh().sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + slope.square().sum(1).mean()

    return {"losses": [float(strategy.backward(loss_of, batch)) for batch in strategy.batches(loader)]}


def synced_batchnorm(strategy: Any, words: list[str]) -> dict[str, Any]:
    if strategy is not None:
        strategy = type(strategy)(respawn=False, sync_batchnorm=True)
    return mnist(strategy, ["--batchnorm", *words])


def unknown_scheduler(strategy: Any, words: list[str]) -> dict[str, Any]:
    return mnist(strategy, ["--scheduler", "cosine", "--prepare", "model", "optimizer", "train", "scheduler"])


def iterate(values: Any) -> Iterator[float]:
    """All numbers of a nested list."""
    if isinstance(values, list):
        for value in values:
            yield from iterate(value)
    else:
        yield values
