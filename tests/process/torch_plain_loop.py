"""Everything that a plain loop can call, in one script: `test_torch_helpers.py` runs it."""

import json
import os

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import duoka


def train() -> None:
    strategy = duoka.Mirrored(devices=2)

    torch.manual_seed(0)
    x = torch.randn(200, 8)
    y = (x.sum(1) > 0).long()
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    loader = DataLoader(TensorDataset(x[:160], y[:160]), batch_size=32, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[160:], y[160:]), batch_size=16)

    model, optimizer, scheduler, loader = strategy.prepare(model, optimizer, scheduler, loader)

    losses = []
    for _ in strategy.epochs(3):
        for a, b in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(strategy.mean(loss.detach()))

    if strategy.is_main:
        with torch.no_grad():
            print("a sample:", model(x[:1].to(strategy.device)).argmax(1).tolist())

    best = 0.0
    for epoch in strategy.epochs(2):
        bar = strategy.progress(loader, desc=f"epoch {epoch + 1}")
        for a, b in bar:
            targets = b.clone()
            targets[::3] = -100
            optimizer.zero_grad()
            loss = F.cross_entropy(model(a), targets, ignore_index=-100)
            strategy.weigh(loss, (targets != -100).sum()).backward()
            optimizer.step()
            bar.loss = strategy.mean(loss.detach())
            bar.set(lr=scheduler.get_last_lr()[0])
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "best": best}
        strategy.save("digits.state", state)

    state = strategy.load("digits.state")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

    with strategy.main_first():
        if not os.path.exists("words.txt"):
            with open("words.txt", "w") as file:
                file.write("downloaded once")

    with open("words.txt") as file:
        words = file.read()

    def count_correct(a, b):
        return (model(a).argmax(1) == b).sum(), len(b)

    accuracy = strategy.evaluate(count_correct, test_loader)
    strategy.print(f"accuracy {accuracy:.3f}")

    test_loader = strategy.prepare(test_loader)
    model.eval()
    with torch.no_grad():
        right = torch.cat([model(a).argmax(1) == b for a, b in strategy.progress(test_loader, desc="test")])
    everything = torch.cat(strategy.gather(right))
    model.train()

    print(
        json.dumps(
            {
                "step": strategy.step,
                "words": words,
                "accuracy": accuracy,
                "best": state["best"],
                "gathered": len(everything),
                "right": float(everything.double().mean()),
                "losses": [float(loss) for loss in losses],
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    train()
