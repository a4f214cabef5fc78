"""Scripts written against nn.DataParallel, with and without Duoka's; prints one JSON line."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


def wrap(net: nn.Module) -> nn.Module:
    if "--plain" in sys.argv:
        return net
    import duoka.torch

    return duoka.torch.DataParallel(net, device_ids=list(range(2, 2 + int(sys.argv[1]))))


def data(rows: int = 37) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 12, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def train(net: nn.Module, forward, optimizer, loss_of=F.cross_entropy, batch: int = 9) -> None:
    x, y = data()
    for _ in range(3):
        for start in range(0, 37, batch):  # the last batch has one row: all workers but the first have none
            optimizer.zero_grad()
            out = forward(net, x[start : start + batch])
            assert len(out) == len(x[start : start + batch])
            loss_of(out, y[start : start + batch]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()


def mlp(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), *more, nn.Linear(32, 4))


def usual() -> nn.Module:
    net = wrap(mlp())
    train(net, lambda net, x: net(x), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    return net


def contrastive() -> nn.Module:
    """A loss across samples: it sees the whole batch, on every worker."""
    net = wrap(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    train(net, lambda net, x: net(x), optimizer, lambda out, y: (out @ out.T).square().mean())
    return net


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, batch, *, scale):
        out = self.net(batch["x"])
        return {"out": out * scale, "parts": [out[:, :1], out[:, 1:]]}


def nested_inputs_and_two_passes() -> nn.Module:
    net = wrap(Nested())

    def forward(net, x):
        one, two = net({"x": x}, scale=2.0), net({"x": -x}, scale=1.0)
        return one["out"] + torch.cat(two["parts"], 1)

    train(net, forward, torch.optim.SGD(net.parameters(), lr=0.05))
    return net


def evaluated() -> nn.Module:
    net = wrap(mlp(nn.Dropout(0.5)))
    net.eval()
    with torch.no_grad():
        out = net(data()[0])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.full_like(parameter, float(out.sum())))
    return net


def main() -> None:
    results = {}
    for make in (usual, contrastive, nested_inputs_and_two_passes, evaluated):
        state = {k.removeprefix("module."): v.double().tolist() for k, v in make().state_dict().items()}
        results[make.__name__] = state
    from results import print_result  # beside this script

    print_result(results)


if __name__ == "__main__":
    main()
