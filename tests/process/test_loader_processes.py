"""Processes of data loaders pass SIGTERM over, unless their own worker sends it; they end with it, and it with them."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from duoka.frameworks.torch.loader_processes import start
from tests.limits import START_S
from tests.process.scripts import run

pytestmark = [pytest.mark.torch]

# What PyTorch and multiprocessing leave where they are killed: empty folders, and ten files, with which a loader that
# cannot read from its process sees whether there are too many.
LEAVES = ("torchinductor_", "pymp-", "tmp")


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_signal_from_outside_is_passed_over_and_one_from_the_worker_is_not(method):
    loader = DataLoader(TensorDataset(torch.arange(8.0)), 2, num_workers=1, multiprocessing_context=method)
    batches = start(loader)
    (process,) = batches._batches._workers
    if method == "spawn":
        os.kill(process.pid, signal.SIGTERM)  # while it starts, too
    assert next(batches)[0].tolist() == [0.0, 1.0]
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.3)
    assert process.is_alive() and [batch[0].tolist() for batch in batches][-1] == [6.0, 7.0]
    assert loader.worker_init_fn is None, "nothing of it stays on the user's loader"
    batches = start(loader)
    next(batches)
    (process,) = batches._batches._workers
    process.terminate()
    process.join(5)
    assert process.exitcode == 0
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


SCRIPT = """
    import sys
    import torch
    from torch.utils.data import DataLoader, IterableDataset
    import duoka

    class Wrapping(DataLoader):
        def __iter__(self):
            return map(lambda batch: batch, super().__iter__())

    class Rows(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.ones(4)

    strategy = duoka.Mirrored(devices=1)
    model = torch.nn.Linear(4, 1)
    loader = Wrapping(Rows(), batch_size=4, num_workers=1, persistent_workers="kept" in sys.argv)
    model, optimizer, loader = strategy.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    batches = iter(loader)
    for _ in range(3):
        model(next(batches)).sum().backward()
        optimizer.step()
    print("ends", flush=True)
    """


@pytest.mark.parametrize("kept", ["dropped", pytest.param("kept", marks=pytest.mark.slow)])
def test_a_script_whose_loader_wraps_its_iterator_comes_to_its_end(kept, tmp_path):
    ended = run(tmp_path, SCRIPT, kept, timeout_s=START_S, leaves=["torchinductor_", "pymp-"])
    assert ended.code == 0 and "ends" in ended.out, ended.err


STRUCK = """
    import hashlib, os, signal, sys
    from pathlib import Path
    import duoka

    strategy = duoka.Mirrored(devices=2)
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            if index == 43 and sys.argv[1] == "killed" and not Path("../struck").exists():
                Path("../struck").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if index == 43 and sys.argv[1] == "aborts":
                os.abort()
            generator = torch.Generator().manual_seed(index)
            return torch.randn(8, generator=generator), torch.randn(2, generator=generator)

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    loader = DataLoader(Rows(), batch_size=8, num_workers=1)
    model, optimizer, loader = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)

    def loss_of(x, y):
        return ((model(x) - y) ** 2).mean()

    for epoch in strategy.epochs(2):
        for batch in strategy.batches(loader):
            optimizer.zero_grad()
            strategy.backward(loss_of, batch)
            optimizer.step()
    strategy.print("hash", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
    """


@pytest.mark.slow
def test_one_that_the_system_kills_is_a_loss_and_not_an_error_of_the_script(tmp_path):
    calm, ended = (run(tmp_path, STRUCK, kind, timeout_s=START_S, leaves=LEAVES) for kind in ("calm", "killed"))
    assert (tmp_path / "struck").exists()
    assert ended.code == 0 and ended.out == calm.out and "hash" in calm.out, ended.err
    assert "is killed by signal: Killed. This worker ends with it." in ended.err
    assert any("was ended by SIGKILL; 1 worker goes on" in line for line in ended.said())


@pytest.mark.slow
def test_one_that_crashes_is_an_error_of_the_script(tmp_path):
    ended = run(tmp_path, STRUCK, "aborts", timeout_s=START_S, leaves=LEAVES)
    assert ended.code == 1 and "is killed by signal: Aborted" in ended.err.splitlines()[-1], ended.err
    assert "goes on" not in ended.err
