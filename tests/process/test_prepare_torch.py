"""What strategy.prepare takes from a PyTorch script, what it refuses, and which saved states fit to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from duoka.collectives.collective import Collective
from duoka.collectives.solo import solo
from duoka.errors import CheckpointError, MismatchError
from duoka.frameworks.torch.adapter import TorchAdapter

pytestmark = [pytest.mark.torch]
schedulers = torch.optim.lr_scheduler


def adapter_for(collective: Collective) -> TorchAdapter:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return TorchAdapter(collective, torch.device("cpu"))


@pytest.fixture
def alone() -> TorchAdapter:
    """One worker that runs two replicas."""
    return adapter_for(solo(2, available_bytes=lambda: 2**40))


def test_the_same_object_is_not_prepared_twice(alone):
    model = nn.Linear(2, 2)
    alone.prepare([model])
    with pytest.raises(MismatchError, match="prepared already"):
        alone.prepare([model])


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        ({}, "A dict cannot be prepared"),
        (nn.Linear(2, 2, device="meta"), "meta device"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "meta device"),
        (nn.LazyLinear(2), "a parameter without a shape: weight"),
    ],
)
def test_what_cannot_be_prepared_is_named(alone, thing, words):
    with pytest.raises(MismatchError, match=words):
        alone.prepare([thing])


def test_a_loader_that_is_no_dataloader_is_refused(alone):
    for call in (alone.batches, lambda loader: alone.evaluate(len, loader)):
        with pytest.raises(MismatchError, match="cannot split a list"):
            call([1, 2])


def test_models_and_loaders_stay_what_they_are(alone):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    names = list(model.state_dict())
    model.share_memory()
    back, loader = alone.prepare([model, DataLoader(TensorDataset(torch.zeros(8, 2)), 4)])
    assert back is model and list(back.state_dict()) == names
    assert isinstance(loader, DataLoader) and len(loader) == 2


# A saved state.


class Script:
    """Everything that one script prepares, and its state within its second epoch."""

    def __init__(
        self,
        width: int = 16,
        optimizer: Any = torch.optim.AdamW,
        scheduler: Any = lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 7),
        *,
        lr: float = 0.01,
        scales: bool = True,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.adapter = adapter_for(solo(4, available_bytes=lambda: 2**40))
        model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2, bias=bias)).to(dtype)
        self.optimizer = optimizer(model.parameters(), lr=lr)
        self.scheduler = scheduler(self.optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scales)
        self.adapter.prepare([model, self.optimizer, self.scheduler, scaler])
        for _ in self.adapter.walk_epochs(2):
            self.saved = self.adapter.capture() if self.adapter.step else {}
            self.optimizer.zero_grad()
            self.adapter.backward(lambda x: model(x).square().mean(), [torch.ones(8, 6, dtype=dtype)], None, True)
            self.optimizer.step()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bias": False}, r"2\.bias \(2,\) float32 is in the saved model"),
        ({"dtype": torch.float64}, r"0\.weight is \(16, 6\) float64 here, and \(16, 6\) float32"),
        ({"width": 5}, r"0\.weight is \(5, 6\) float32 here, and \(16, 6\) float32"),
        ({"optimizer": torch.optim.Adam}, "optimizer 1 is Adam here, and AdamW in the saved run"),
        (
            {"scheduler": lambda optimizer: schedulers.StepLR(optimizer, 1)},
            "scheduler 1 is StepLR here, and CosineAnnealingLR in the saved run",
        ),
        ({"scales": False}, r"scaler 1 is GradScaler \(not enabled\) here, and GradScaler in the saved run"),
    ],
)
def test_a_state_of_another_model_or_optimizer_is_refused_with_the_first_difference(given, words):
    saved = Script().saved
    with pytest.raises(CheckpointError, match=words):
        Script(**given).adapter.restore(saved)


def test_the_saved_values_win_over_those_of_the_script_and_a_line_names_both(capsys):
    saved = Script().saved
    other = Script(lr=0.5, scheduler=lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 9))
    capsys.readouterr()
    other.adapter.put(saved, is_again=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "the run continues with the saved values: lr of optimizer 1 (AdamW) is 0.5 here, and was 0.01; T_max of"
        " scheduler 1 (CosineAnnealingLR) is 9 here, and was 7"
    )
    assert other.optimizer.param_groups[0]["lr"] == 0.01 and other.scheduler.T_max == 7
