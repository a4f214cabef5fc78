"""Small trainings of the function style, for scripts that look at what carries their sums."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.set_num_threads(1)
Trained = tuple[nn.Module, torch.optim.Optimizer]
SCENARIOS: dict[str, Callable[[Any], Trained]] = {}


def scenario(function: Callable[[Any], Trained]) -> Callable[[Any], Trained]:
    SCENARIOS[function.__name__] = function
    return function


class Noisy(Dataset[Any]):
    """Random augmentation, drawn from all three generators."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = 0.1 * torch.randn(self.x.shape[1]) + random.random() + np.random.rand()
        return self.x[index] + noise, self.y[index]


def data(rows: int = 101, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 12, generator=generator, dtype=dtype)
    return x, torch.randint(0, 4, (rows,), generator=generator)


def mlp(dtype: torch.dtype = torch.float32, *, batch_norm: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(12, 32), nn.BatchNorm1d(32) if batch_norm else nn.Identity(), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(32, 4)).to(dtype)


def train(strategy: Any, model: nn.Module, optimizer: Any, loader: Any, epochs: int, happen: Any = None) -> Trained:
    model, optimizer, loader = strategy.prepare(model, optimizer, loader)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if happen is not None:
            happen()
        return F.cross_entropy(model(x), y)

    for _ in strategy.epochs(epochs):
        for batch in strategy.batches(loader):
            optimizer.zero_grad()
            strategy.backward(loss_of, batch, check=False)
            optimizer.step()
    return model, optimizer


@scenario
def sgd(strategy: Any, epochs: int = 2, happen: Any = None, num_workers: int = 0) -> Trained:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(*data()), batch_size=10, num_workers=num_workers)
    return train(strategy, model, optimizer, loader, epochs, happen)


@scenario
def everything_at_once(strategy: Any) -> Trained:
    """BatchNorm, dropout, shuffling, augmentation in loader workers, a short last batch, Adam."""
    model = mlp(batch_norm=True, dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(Noisy(*data(93)), batch_size=12, shuffle=True, num_workers=2)
    return train(strategy, model, optimizer, loader, 2)


@scenario
def bfloat16_parameters(strategy: Any) -> Trained:
    model = mlp(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(strategy, model, optimizer, DataLoader(TensorDataset(*data(dtype=torch.bfloat16)), batch_size=10), 1)


def describe(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    digest = hashlib.sha256()
    states = optimizer.state_dict()["state"].values()
    for tensor in (*model.state_dict().values(), *(v for s in states for v in s.values() if torch.is_tensor(v))):
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    weights = {name: parameter.detach().double().tolist() for name, parameter in model.named_parameters()}
    return {"sha256": digest.hexdigest(), "weights": weights}
