"""What docs/from-the-articles.md shows for PyTorch, on two workers; prints what test_articles.py looks at."""

from __future__ import annotations

import duoka
from duoka.runtime.worker import attachment

if __name__ == "__main__" and attachment() is None:
    duoka.Mirrored(devices=["gpu:2", "gpu:3"])  # becomes the supervisor, without an import of PyTorch

import json

import torch
from torch import nn

import duoka.torch

torch.set_num_threads(1)


class Counting(nn.Linear):
    """Notes how many rows each call sees."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.rows: list[int] = []

    def forward(self, x):
        self.rows.append(len(x))
        return super().forward(x)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Counting(6, 8), nn.Tanh(), nn.Linear(8, 1))


def train(net: nn.Module) -> list:
    x = torch.randn(21, 6, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def several_cards() -> dict:
    net, plain = make_net(), make_net()
    net = duoka.torch.DataParallel(net, device_ids=[2, 3])
    ours, expected = train(net), train(plain)
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, expected, strict=True))
    return {"difference": difference, "rows": sorted(set(net.module[0].rows)), "plain": plain[0].rows[0]}


def one_card() -> dict:
    strategy = duoka.Mirrored(devices=["gpu:2", "gpu:3"])
    net = make_net()
    net.to(strategy.device)
    with duoka.device("cuda:0") as place:
        made = nn.Linear(2, 2)
    return {
        "moved": str(net[0].weight.device),
        "made": str(made.weight.device),
        "place": place.name,
        "worker": strategy.worker,
    }


if __name__ == "__main__":
    print("FACTS " + json.dumps({"several_cards": several_cards(), "one_card": one_card()}), flush=True)
