"""Article 0, PyTorch: one GPU, then `DataParallel` followed by `.to`, on two workers."""

from __future__ import annotations

import torch
from facts import difference, print_facts, scenario
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import duoka
import duoka.torch

torch.set_num_threads(1)
strategy = duoka.Mirrored(devices=["gpu:2", "gpu:3"], log_placement=True)


class Counting(nn.Linear):
    """Notes how many samples each call sees."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.counts: list[int] = []

    def forward(self, x):
        self.counts.append(len(x))
        return super().forward(x)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Counting(6, 8), nn.Tanh(), nn.Linear(8, 1))


def train(net: nn.Module, device: torch.device) -> list:
    x = torch.randn(21, 6, generator=torch.Generator().manual_seed(1)).to(device)
    y = x.sum(1, keepdim=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@scenario
def one_gpu() -> dict:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    net = make_net()
    net.to(device)
    net.to(strategy.device)
    with duoka.device("cuda:0") as place:
        made = nn.Linear(2, 2)
    return {"moved": str(net[0].weight.device), "made": str(made.weight.device), "place": place.name}


@scenario
def several_gpus() -> dict:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net, plain = make_net(), make_net()
    net = duoka.torch.DataParallel(net, device_ids=[2, 3])
    is_itself = net.to(device) is net
    ours, expected = train(net, device), train(plain, device)
    return {
        "is_itself": is_itself,
        "difference": difference(ours, expected),
        "counts": sorted(set(net.module[0].counts)),
        "plain": plain[0].counts[0],
    }


@scenario
def moved_after_a_step() -> dict:
    """`.to` may also come between two trainings, and may change the type of the numbers."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net, plain = duoka.torch.DataParallel(make_net(), device_ids=[2, 3]), make_net()
    for each in (net, plain):
        train(each, device)
        each.to(device, torch.float64)
        x = torch.linspace(-1, 1, 42, dtype=torch.float64, device=device).reshape(7, 6)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(x).square().mean().backward()
        optimizer.step()
    ours, expected = ([parameter.detach() for parameter in each.parameters()] for each in (net, plain))
    return {"types": sorted({str(each.dtype) for each in ours}), "difference": difference(ours, expected)}


@scenario
def logged() -> dict:
    """Not in an article, and not to be cut: a strategy logs where the parameters and modules of a step are."""
    net = make_net()
    data = TensorDataset(torch.ones(8, 6), torch.ones(8, 1))
    net, optimizer, loader = strategy.prepare(net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(data, 4))
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return {}


if __name__ == "__main__":
    print_facts(strategy.worker)
