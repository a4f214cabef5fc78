"""Small trainings, run as a script on some number of workers; prints one JSON line of digests and weights.

    duoka run --devices W --replicas R tests/process/torch_scenarios.py [name ...]

Without `duoka run`, --plain trains each scenario in the ordinary way, on one device and without Duoka.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

torch.set_num_threads(1)
SCENARIOS: dict[str, Callable] = {}


def scenario(function: Callable) -> Callable:
    SCENARIOS[function.__name__] = function
    return function


class Plain:
    """Duoka's words on one device: what an unconverted script does."""

    is_main = True
    replicas = 1

    def prepare(self, *things):
        return things[0] if len(things) == 1 else things

    def weigh(self, loss, count=None):
        return loss

    enumerate = staticmethod(enumerate)


class Noisy(Dataset):
    """Random augmentation, drawn from all three generators."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        import random

        import numpy as np

        return self.x[index] + 0.1 * torch.randn(self.x.shape[1]) + random.random() + np.random.rand(), self.y[index]


def data(rows: int = 101, features: int = 12, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, features, generator=generator, dtype=dtype)
    return x, torch.randint(0, 4, (rows,), generator=generator)


def mlp(dtype=torch.float32, batch_norm: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(12, 32), nn.BatchNorm1d(32) if batch_norm else nn.Identity(), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(32, 4)).to(dtype)


def train(strategy, model, optimizer, loader, epochs: int = 5, clip: float | None = 0.5, scheduler=None):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if scheduler:
                scheduler.step()
    return model, optimizer


@scenario
def sgd(strategy):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(*data()), batch_size=10)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
    model, loader, optimizer, scheduler = strategy.prepare(model, loader, optimizer, scheduler)
    return train(strategy, model, optimizer, loader, scheduler=scheduler)


@scenario
def adam_float64(strategy):
    model = mlp(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(*data(dtype=torch.float64)), batch_size=10)
    return train(strategy, *strategy.prepare(model, optimizer, loader))


@scenario
def adam(strategy):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(*data()), batch_size=10)
    return train(strategy, *strategy.prepare(model, optimizer, loader))


@scenario
def everything_at_once(strategy):
    """BatchNorm, dropout, shuffling, augmentation in loader workers, a short last batch, Adam."""
    model = mlp(batch_norm=True, dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = data(93)
    loader = DataLoader(Noisy(x, y), batch_size=12, shuffle=True, num_workers=2)
    return train(strategy, *strategy.prepare(model, optimizer, loader), epochs=2)


@scenario
def last_batch_of_one(strategy):
    """More replicas than rows: stand-ins are left out."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(*data(31)), batch_size=10)
    return train(strategy, *strategy.prepare(model, optimizer, loader))


@scenario
def two_backwards(strategy):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(*data()), batch_size=10)
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            F.cross_entropy(out, y).backward(retain_graph=True)
            (0.01 * out.pow(2).mean()).backward()
            optimizer.step()
    return model, optimizer


@scenario
def reentrant_checkpoint(strategy):
    from torch.utils.checkpoint import checkpoint

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*data()), batch_size=10)
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        hidden = checkpoint(model[:3], x.requires_grad_(), use_reentrant=True)
        F.cross_entropy(model[3:](hidden), y).backward()
        optimizer.step()
    return model, optimizer


@scenario
def frozen_then_unfrozen(strategy):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*data()), batch_size=10)
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    model[0].requires_grad_(False)
    train(strategy, model, optimizer, loader, epochs=1)
    model[0].requires_grad_(True)
    return train(strategy, model, optimizer, loader, epochs=1)


@scenario
def frozen_statistics(strategy):
    """Fine-tuning: BatchNorm in eval mode keeps what it had learned, to the last bit, with uneven batches, too."""
    torch.manual_seed(4)
    layer = nn.BatchNorm1d(16)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    model = nn.Sequential(nn.Linear(12, 16), layer, nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*data()), batch_size=10)
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    learned = [buffer.clone() for buffer in layer.buffers()]
    layer.eval()
    trained = train(strategy, model, optimizer, loader)
    assert all(map(torch.equal, layer.buffers(), learned)), "frozen statistics have drifted"
    return trained


@scenario
def weighed_statistics(strategy):
    """Counts are for gradients. Running statistics are means over rows: here, of the last batch alone."""
    torch.manual_seed(5)
    layer = nn.BatchNorm1d(12, momentum=1.0)
    model = nn.Sequential(layer, nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = TensorDataset(*data(100))
    model, optimizer, loader = strategy.prepare(model, optimizer, DataLoader(rows, batch_size=10))
    for x, y in loader:
        optimizer.zero_grad()
        strategy.weigh(F.cross_entropy(model(x), y), 50 * len(y)).backward()
        optimizer.step()
    assert torch.allclose(layer.running_mean, rows.tensors[0][90:].mean(0), atol=1e-6), "weighed by counts"
    return model, optimizer


@scenario
def tied_and_unused(strategy):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.first = nn.Linear(12, 12)
            self.second = nn.Linear(12, 12)
            self.second.weight = self.first.weight
            self.never = nn.Linear(3, 3)
            self.last = nn.Linear(12, 4)

        def forward(self, x):
            return self.last(F.relu(self.second(F.relu(self.first(x)))))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    loader = DataLoader(TensorDataset(*data()), batch_size=10)
    return train(strategy, *strategy.prepare(model, optimizer, loader))


@scenario
def bfloat16_parameters(strategy):
    model = mlp(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*data(dtype=torch.bfloat16)), batch_size=10)
    return train(strategy, *strategy.prepare(model, optimizer, loader), epochs=1, clip=None)


@scenario
def stream(strategy):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(*data(), strict=True))

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Stream(), batch_size=10)
    return train(strategy, *strategy.prepare(model, optimizer, loader), epochs=2)


@scenario
def padded_tokens(strategy):
    """A language model whose loss is a mean over the tokens that are not padding."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    tokens = torch.randint(1, 20, (37, 9), generator=torch.Generator().manual_seed(1))
    for row, length in enumerate(torch.randint(1, 9, (37,), generator=torch.Generator().manual_seed(2))):
        tokens[row, int(length) :] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = strategy.prepare(model, optimizer, DataLoader(TensorDataset(tokens), batch_size=8))
    for _ in range(4):
        for (batch,) in loader:
            optimizer.zero_grad()
            targets = batch[:, 1:].reshape(-1)
            count = int((targets != 0).sum())
            loss = F.cross_entropy(model(batch[:, :-1]).reshape(-1, 20), targets, ignore_index=0, reduction="sum")
            strategy.weigh(loss / max(count, 1), count).backward()
            optimizer.step()
    return model, optimizer


@scenario
def sum_loss(strategy):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(*data()), batch_size=10)
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        strategy.weigh(F.cross_entropy(model(x), y, reduction="sum")).backward()
        optimizer.step()
    return model, optimizer


def describe(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            digest.update(value.numpy().tobytes() if torch.is_tensor(value) else str(value).encode())
    return {"sha256": digest.hexdigest(), "weights": {k: _numbers(v) for k, v in model.named_parameters()}}


def _numbers(tensor: torch.Tensor) -> list:
    return torch.view_as_real(tensor).double().tolist() if tensor.is_complex() else tensor.double().tolist()


def main(scenarios: dict[str, Callable], options: dict[str, dict] | None = None) -> None:
    names = [word for word in sys.argv[1:] if not word.startswith("--")] or list(scenarios)
    results = {}
    for name in names:
        if "--plain" in sys.argv:
            strategy = Plain()
        else:
            import duoka

            strategy = duoka.Mirrored(devices=2, **(options or {}).get(name, {}))
        results[name] = describe(*scenarios[name](strategy))
    from results import print_result  # beside this script

    print_result(results)


if __name__ == "__main__":
    main(SCENARIOS)
