"""One training, as its script was and converted: three epochs with a validation between them, in many kinds of loaders.

What it returns: all weights, and every number that it would print.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, get_worker_info

NUM_SAMPLES, BATCH = 41, 8  # a last batch of one sample
KINDS = ("plain", "processes", "persistent", "generator", "zip", "weighted", "opened in worker_init_fn")


class Samples(Dataset[Any]):
    """With `noise`, every sample is augmented by PyTorch's global generator."""

    def __init__(self, dtype: torch.dtype, noise: float, *, is_open: bool = True) -> None:
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64).to(dtype)
        self._noise, self.is_open = noise, is_open

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.is_open, "this dataset is opened by worker_init_fn"
        x = self._x[index]
        if self._noise:
            x = x + self._noise * torch.randn(6).to(x.dtype)
        return x, (x.sum() > 0).long()


def open_dataset(number: int) -> None:
    info: Any = get_worker_info()
    info.dataset.is_open = True


def make_loader(kind: str, dataset: Samples) -> DataLoader[Any]:
    options: dict[str, Any] = {"batch_size": BATCH}
    if kind in ("processes", "persistent", "opened in worker_init_fn"):
        options |= {"num_workers": 2, "persistent_workers": kind == "persistent"}
    if kind == "opened in worker_init_fn":
        options |= {"worker_init_fn": open_dataset}
    if kind == "weighted":
        return DataLoader(dataset, sampler=WeightedRandomSampler(torch.linspace(1, 2, len(dataset)), 41), **options)
    if kind == "generator":
        options |= {"generator": torch.Generator().manual_seed(3)}
    return DataLoader(dataset, shuffle=True, **options)


def train(kind: str, strategy: Any, dtype: torch.dtype, dropout: float, noise: float = 0.0) -> dict[str, Any]:
    """Without a strategy: the script before it was converted."""
    torch.manual_seed(5)
    dataset = Samples(dtype, noise, is_open="opened" not in kind)
    loaders = [make_loader(kind, dataset) for _ in range(2 if kind == "zip" else 1)]
    validation = DataLoader(Samples(dtype, noise), batch_size=BATCH, num_workers=2 if kind == "processes" else 0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, 2)).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    if strategy is not None:
        model, optimizer, *loaders = strategy.prepare(model, optimizer, *loaders)

    def loss_of(x: Any, y: Any, *others: Any) -> Any:
        loss = F.cross_entropy(model(x), y)
        return loss + 0.5 * F.cross_entropy(model(others[0]), others[1]) if others else loss

    def count(x: Any, y: Any) -> Any:
        return (model(x).argmax(1) == y).sum(), len(y)

    numbers = []
    for _ in range(3):
        model.train()
        for batches in _draw(loaders, strategy):
            optimizer.zero_grad()
            if strategy is None:
                loss = loss_of(*(part for batch in batches for part in batch))
                loss.backward()
            else:
                loss = strategy.backward(loss_of, *batches)
            numbers.append(loss.item())
            optimizer.step()
        model.eval()
        numbers.append(_evaluate(count, validation) if strategy is None else strategy.evaluate(count, validation))
    return {"weights": [p.detach().double().tolist() for p in model.parameters()], "numbers": numbers}


def _draw(loaders: list[Any], strategy: Any) -> Iterator[tuple[Any, ...]]:
    return zip(*(loaders if strategy is None else map(strategy.batches, loaders)), strict=True)


@torch.no_grad()
def _evaluate(count: Any, loader: DataLoader[Any]) -> float:
    parts = [count(x, y) for x, y in loader]
    return float(sum(int(good) for good, _ in parts) / sum(seen for _, seen in parts))
