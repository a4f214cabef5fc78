"""Runs what test_placement.py looks at on two workers, and prints it."""

from __future__ import annotations

import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import duoka
from duoka.errors import DuokaError


def error_of(name: str) -> str:
    try:
        with duoka.device(name):
            return "nothing"
    except DuokaError as error:
        return str(error)


def limit_is_held(half_mb: int) -> bool:
    """A quarter of the memory each: a half cannot be had, a sixteenth can."""
    torch.empty(half_mb // 8, 2**20, dtype=torch.uint8)
    try:
        torch.empty(half_mb, 2**20, dtype=torch.uint8)
    except RuntimeError as error:
        return "DefaultCPUAllocator" in str(error)
    return False


def main() -> None:
    strategy = duoka.Mirrored(
        duoka.virtual_devices("cpu:0", count=2),
        memory_fraction=0.5,
        device_count={"CPU": 4},
        log_placement=True,
        soft_placement=False,
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Sequential(nn.ReLU(), nn.Linear(8, 1)))
    data = TensorDataset(torch.ones(16, 4), torch.ones(16, 1))
    model, optimizer, loader = strategy.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, batch_size=8)
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    with torch.device("meta"), duoka.device("/gpu:3", soft_placement=True) as place:
        made = [str(torch.ones(2).device), str(nn.Linear(2, 2).weight.device)]
    facts = {
        "worker": strategy.worker,
        "place": place.name,
        "made": made,
        "error": error_of(f"cpu:0/v{1 - strategy.worker}"),
        "hooks": sum(len(module._forward_hooks) for module in model.modules()),
        "limit_is_held": limit_is_held(duoka.devices()[-1].total_mb // 2),
    }
    print("FACTS", json.dumps(facts))


if __name__ == "__main__":
    main()
