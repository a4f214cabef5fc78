"""A PyTorch run whose state is taken at a border between steps, and put into a script that begins at its top."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from duoka.checkpoint.files import load_state, save_state
from duoka.collectives.solo import solo
from duoka.errors import CheckpointError, MismatchError
from duoka.frameworks.saving import list_codecs
from duoka.frameworks.torch.adapter import TorchAdapter
from duoka.strategies.borders import Borders
from duoka.strategies.strategy import Options

pytestmark = [pytest.mark.torch, pytest.mark.slow]


class Stop(Exception):
    pass


class Counting(Dataset := torch.utils.data.Dataset):  # type: ignore[misc]
    """Remembers which rows were read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._rows = torch.randn(48, 12, generator=generator), torch.randn(48, 3, generator=generator)
        self.read: list[int] = []

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int):
        self.read.append(index)
        return self._rows[0][index] + 0.1 * torch.randn(12), self._rows[1][index]


class Stream(IterableDataset):
    def __iter__(self):
        for _ in range(48):
            yield torch.randn(12), torch.randn(3)


class Reversing(Sampler):
    """An order that depends on how often it was asked for."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        return iter([(index + self.passes) % 48 for index in range(48)])

    def __len__(self) -> int:
        return 48


class Remembering(nn.Dropout):
    """A module with a state of its own, which it goes on with as it is given."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.counts = {"epochs": 0}

    def get_extra_state(self):
        return self.counts

    def set_extra_state(self, state) -> None:
        self.counts = state


class Setting:
    """One script's worth of objects, as a run begins with them."""

    def __init__(self, borders: Borders, num_replicas: int, **given) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        collective = solo(num_replicas, available_bytes=lambda: 2**40)
        self.adapter = TorchAdapter(collective, 0, torch.device("cpu"), Options(borders=borders))
        self.data = given.get("data") or Counting()
        sampler = given.get("sampler")
        shuffle = None if sampler or isinstance(self.data, IterableDataset) else True
        loader = DataLoader(self.data, batch_size=given.get("batch_size", 10), shuffle=shuffle, sampler=sampler)
        rows = TensorDataset(torch.arange(48.0).view(-1, 1))
        model = nn.Sequential(
            nn.Linear(12, given.get("width", 16)), nn.BatchNorm1d(16), Remembering(0.3), nn.Linear(16, 3)
        )
        optimizer = given.get("optimizer", torch.optim.AdamW)(model.parameters(), lr=given.get("lr", 0.01))
        schedulers = torch.optim.lr_scheduler
        make = given.get("scheduler", lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 7))
        scheduler = make(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, enabled=given.get("scales", True))
        things = (model, optimizer, loader, DataLoader(rows, batch_size=10, shuffle=True), scheduler, scaler)
        self.model, self.optimizer, self.loader, self.other, self.scheduler, self.scaler = self.adapter.prepare(things)

    def step(self, x, y, *, is_update: bool = True) -> None:
        loss = ((self.model(x) - y) ** 2).mean()
        self.scaler.scale(loss).backward()
        if is_update:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def digest(self) -> str:
        state = self.adapter.capture()
        parts = [p.numpy().tobytes() for p in state["tensors"].values() if not p.requires_grad]
        parts += [p.detach().numpy().tobytes() for p in state["tensors"].values()]
        for values in state["optimizers"][0]["state"].values():
            parts += [value.numpy().tobytes() for value in values.values()]
        parts.append(repr((state["schedulers"], state["scalers"], state["step"], state["batch"])).encode())
        parts += [torch.rand(3).numpy().tobytes(), np.random.rand(3).tobytes(), str(random.random()).encode()]
        return hashlib.sha256(b"".join(parts)).hexdigest()


def plain(run: Setting) -> None:
    for _ in range(3):
        torch.rand(1)  # drawn outside of bodies
        for x, y in run.loader:
            run.optimizer.zero_grad()
            run.step(x, y)
        run.scheduler.step()
        random.random()


def with_epochs(run: Setting) -> None:
    for epoch in run.adapter.epochs.walk(2):
        for x, y in run.loader:
            run.step(x, y)
        run.scheduler.step()
        np.random.rand(epoch + 1)
    for _ in run.adapter.epochs.walk(2):
        for x, y in run.loader:
            run.step(x, y)
            if run.adapter.stepped and run.loader.passes.position[1] == 3:
                break
        for x, y in run.loader:
            run.step(x * 2, y)
        run.scheduler.step()


def accumulating(run: Setting) -> None:
    run.adapter.accumulate(4)
    for _ in range(3):
        for x, y in run.loader:
            run.step(x, y)
        run.scheduler.step()


def accumulating_more_later(run: Setting) -> None:
    for num_batches in (2, 3):
        run.adapter.accumulate(num_batches)
        for _ in range(2):
            for x, y in run.loader:
                run.step(x, y)


def accumulating_by_hand(run: Setting) -> None:
    for _ in range(3):
        for x, y in run.loader:
            is_last_replica = run.adapter.position[0] % 3 == 2
            loss = ((run.model(x) - y) ** 2).mean()
            loss.backward()
            if is_last_replica:
                run.optimizer.step()
                run.optimizer.zero_grad()


def two_loaders(run: Setting) -> None:
    for epoch in range(3):
        for (x, y), (z,) in zip(run.loader, run.other, strict=True):
            run.step(x + z / 48, y)
        if epoch:
            for (z,) in run.other:
                run.step(z.expand(-1, 12), z.expand(-1, 3) / 48)


def _halve_rate(run: Setting) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5


def _shrink(run: Setting) -> None:
    with torch.no_grad():
        run.model[0].weight.mul_(0.75)
    for moments in run.optimizer.state.values():
        moments["exp_avg"].mul_(0.5)


def changing_between(run: Setting) -> None:
    """Changes by hand what is restored, before and after its loops."""
    for _ in range(3):
        _halve_rate(run)
        for x, y in run.loader:
            run.step(x, y)
        _shrink(run)


def changing_what_it_holds(run: Setting) -> None:
    """Has got hold of a group, before its loop, and sets its rate in bodies; and of a module's own state."""
    (group,) = run.optimizer.param_groups
    for _ in run.adapter.epochs.walk(3):
        run.model[2].counts["epochs"] += 1
        for x, y in run.loader:
            group["lr"] = 0.01 / (1 + run.adapter.step) * run.model[2].counts["epochs"]
            run.step(x, y)


def changing_in_epochs(run: Setting) -> None:
    for _ in run.adapter.epochs.walk(3):
        _halve_rate(run)
        _shrink(run)
        for x, y in run.loader:
            run.step(x, y)
        _shrink(run)


def _measure(run: Setting) -> float:
    def sum_up(batch):
        x, y = batch
        return ((run.model(x) - y) ** 2).sum(), y.numel()

    return run.adapter.evaluate(sum_up, run.loader)


def deciding(run: Setting) -> None:
    """What it draws, measures and counts between its loops goes into the next one."""
    scale = 1.0
    for _ in range(3):
        scale += float(torch.rand(1)) + random.random()
        for x, y in run.loader:
            run.step(x * scale, y)
        scale = _measure(run) / (1 + run.adapter.step)


def deciding_between_epochs(run: Setting) -> None:
    for epoch in run.adapter.epochs.walk(9):
        scale = 1 + float(torch.rand(1))
        for x, y in run.loader:
            run.step(x * scale, y)
        if _measure(run) > 0 and epoch == 1:
            break
    order, scale = torch.randperm(12), _measure(run) / run.adapter.step
    for _ in run.adapter.epochs.walk(1):
        for x, y in run.loader:
            run.step(scale * x[:, order], y)


def deciding_at_the_top_of_epochs(run: Setting) -> None:
    for _ in run.adapter.epochs.walk(3):
        scale = _measure(run)
        for x, y in run.loader:
            run.step(x * scale, y)
        scale = _measure(run) + random.random()
        for x, y in run.loader:
            run.step(x * scale, y)


def passes_after_epochs(run: Setting) -> None:
    for _ in run.adapter.epochs.walk(1):
        for x, y in run.loader:
            run.step(x, y)
    for _ in range(3):
        scale = _measure(run) + run.adapter.step + float(torch.rand(1))
        for x, y in run.loader:
            run.step(x / scale, y)


def following_then_leading(run: Setting) -> None:
    """A loader follows another one, then leads; passes are counted by those that lead."""
    for _ in range(2):
        for (x, y), (z,) in zip(run.loader, run.other, strict=True):
            run.step(x + z / 48, y)
        run.step_scale = _measure(run) / (1 + run.adapter.step)
    for _ in range(2):
        for (z,) in run.other:
            run.step(z.expand(-1, 12) * run.step_scale, z.expand(-1, 3) / 48)
        run.step_scale = _measure(run) / (1 + run.adapter.step)


def leading_between_epochs(run: Setting) -> None:
    """A loader follows another one in a loop over epochs, which a script that begins again leaves out, then leads."""
    for _ in run.adapter.epochs.walk(1):
        for (x, y), (z,) in zip(run.loader, run.other, strict=True):
            run.step(x + z / 48, y)
    for (z,) in run.other:
        run.step(z.expand(-1, 12) / 48, z.expand(-1, 3) / 48)
    scale = _measure(run) / (1 + run.adapter.step) + float(torch.rand(1))
    for _ in run.adapter.epochs.walk(2):
        for x, y in run.loader:
            run.step(x * scale, y)


def changing_modes(run: Setting) -> None:
    """Layers that do not train at first, set by hand, once."""
    run.model[0].requires_grad_(False)
    run.model[1].eval()
    for epoch in run.adapter.epochs.walk(4):
        if epoch == 1:
            run.model[0].requires_grad_(True)
            run.model[1].train()
        for x, y in run.loader:
            run.step(x, y)


SCRIPTS = [plain, with_epochs, accumulating, accumulating_more_later, accumulating_by_hand, two_loaders]
SCRIPTS += [changing_between, changing_in_epochs, changing_what_it_holds, deciding, deciding_between_epochs]
SCRIPTS += [deciding_at_the_top_of_epochs, passes_after_epochs, following_then_leading, changing_modes]
SCRIPTS += [leading_between_epochs]


def run_from(path, state, script, num_replicas: int, stop_at: int | None = None, **given) -> tuple[str | None, Setting]:
    """A run of the script, from a saved state or from the beginning, to a border or to its end."""
    borders = Borders()

    def leave(adapter) -> None:
        if stop_at is not None and adapter.batch >= stop_at:
            save_state(path, adapter.capture(), list_codecs())
            raise Stop

    borders.add(border=leave)
    run = Setting(borders, num_replicas, **given)
    if state is not None:
        run.adapter.restore(load_state(state, list_codecs()))
    try:
        script(run)
    except Stop:
        return None, run
    return run.digest(), run


def _cases() -> list:
    """With one replica not those where the batches of loaders walked side by side are counted one by one."""
    side_by_side = (two_loaders, following_then_leading, leading_between_epochs)
    alone = [script for script in SCRIPTS if script not in side_by_side]
    some = (plain, with_epochs, accumulating_by_hand, deciding, deciding_between_epochs, passes_after_epochs)
    marks = {script: [] if script in some else [pytest.mark.slow] for script in alone}
    return [(script, 4) for script in SCRIPTS] + [pytest.param(each, 1, marks=marks[each]) for each in alone]


@pytest.mark.parametrize("borders", [(1, 4, 8, 12), pytest.param((0, 5), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("script", "num_replicas"), _cases())
def test_a_script_that_begins_again_with_a_captured_state_ends_with_the_same_bits(
    tmp_path, script, num_replicas, borders
):
    calm, _ = run_from(tmp_path / "unused", None, script, num_replicas)
    for border in borders:
        stopped, first = run_from(tmp_path / "one", None, script, num_replicas, border)
        assert stopped is None and first.adapter.batch >= border
        stopped, second = run_from(tmp_path / "two", tmp_path / "one", script, num_replicas, border + 2)
        assert stopped is None and second.adapter.batch >= border + 2
        final, third = run_from(tmp_path / "unused", tmp_path / "two", script, num_replicas)
        assert final == calm, f"stopped before batches {border} and {border + 2}"
        if script is plain:
            assert len(third.data.read) == 3 * 48 - sum(min(10, 48 - 10 * (n % 5)) for n in range(border + 2))


def saving_by_itself(run: Setting, save) -> None:
    """Saves at several places between its loops, and changes something before and after each."""
    save()
    _halve_rate(run)
    save()
    for epoch in run.adapter.epochs.walk(3):
        _halve_rate(run)
        torch.rand(1)
        for x, y in run.loader:
            run.step(x, y)
        _shrink(run)
        save()
        np.random.rand(epoch + 1)
        if epoch == 1:
            _shrink(run)
            save()
    _shrink(run)
    save()
    random.random()


def run_saving(path, state, stop_at: int | None = None) -> tuple[str, int]:
    """From a saved state or the beginning; and how many saves were new. The one that is asked for is kept."""
    run, num_new = Setting(Borders(), 4), 0
    if state is not None:
        run.adapter.restore(load_state(state, list_codecs()))

    def save() -> None:
        nonlocal num_new
        if run.adapter.come_to_save():
            num_new += 1
            if num_new == stop_at:
                save_state(path, run.adapter.capture(), list_codecs())
                raise Stop

    try:
        saving_by_itself(run, save)
    except Stop:
        return "", num_new
    return run.digest(), num_new


def test_a_script_that_saves_by_itself_goes_on_at_the_very_place_and_saves_nothing_before(tmp_path):
    calm, num_saves = run_saving(tmp_path / "unused", None)
    assert num_saves == 7
    for number in range(1, num_saves + 1):
        run_saving(tmp_path / "saved", None, number)
        # The save to which the script is led is as good as new: nothing of it is lost.
        assert run_saving(tmp_path / "unused", tmp_path / "saved") == (calm, num_saves - number + 1), number


class Tracker:
    """Goes on with the very list that it is given."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state) -> None:
        self.losses = state["losses"]


def test_what_the_user_has_named_is_put_back_once_more_where_the_run_goes_on(tmp_path):
    borders, tracker = Borders(), Tracker()
    borders.also.objects["tracker"] = tracker
    run_from(tmp_path / "saved", None, with_epochs, 4, 7)
    run = Setting(borders, 4)
    borders.also.restore({"tracker": {"losses": [3.0, 2.0]}})
    run.adapter.restore(load_state(tmp_path / "saved", list_codecs()))
    seen = []
    assert tracker.losses == [], "as at the top of the script that was saved"
    for epoch in run.adapter.epochs.walk(2):
        tracker.losses.append(9.0)  # as in the run that was saved
        for x, y in run.loader:
            seen.append((epoch, list(tracker.losses)))
            run.step(x, y)
            break
        break
    assert seen == [(1, [3.0, 2.0])] and tracker.losses == [3.0, 2.0]


def test_a_second_loop_over_what_is_left_of_the_epochs_is_an_error_with_checkpoints():
    for is_saved in (False, True):
        borders = Borders()
        if is_saved:
            borders.add(start=lambda adapter: None, border=lambda adapter: None)
        epochs = Setting(borders, 4).adapter.epochs.walk(4)
        for epoch in epochs:
            if epoch == 1:
                break
        if is_saved:
            with pytest.raises(CheckpointError, match=r"A second loop goes on with what strategy\.epochs gave"):
                list(epochs)
        else:
            assert list(epochs) == [2, 3]


def test_a_script_that_ends_in_the_middle_of_a_batch_is_told_so(capsys):
    def train(draws_first: bool) -> Setting:
        run = Setting(Borders(), 2)
        run.batches = iter(run.loader)
        while draws_first or run.adapter.step < 3:
            x, y = next(run.batches)
            if draws_first and run.adapter.step == 3:
                break
            run.step(x, y)
        run.adapter.come_to_end()
        return run

    assert train(draws_first=True).adapter.step == 3 and capsys.readouterr().err == ""
    train(draws_first=False)
    assert "the script has ended in the middle of a batch" in capsys.readouterr().err


def test_a_scheduler_that_was_not_prepared_is_named_when_the_run_is_saved(tmp_path, capsys):
    run = Setting(Borders(), 4)
    other = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run.adapter.prepare([other, optimizer])
    run.adapter.capture()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("duoka: optimizer 2 has a scheduler that was not given to strategy.prepare")


@pytest.mark.parametrize(
    "make", [lambda: {"data": Stream()}, lambda: {"sampler": Reversing()}], ids=["stream", "sampler"]
)
def test_streams_are_read_from_their_beginning_and_samplers_that_remember_are_asked_again(tmp_path, make, capsys):
    calm, _ = run_from(tmp_path / "unused", None, plain, 4, **make())
    for border in (1, 8, 12):
        run_from(tmp_path / "saved", None, plain, 4, border, **make())
        assert run_from(tmp_path / "unused", tmp_path / "saved", plain, 4, **make())[0] == calm
    told = capsys.readouterr().err
    assert ("a stream is read from its beginning" in told) == ("data" in make())


def test_a_state_put_back_at_its_own_border_changes_nothing(tmp_path):
    calm, _ = run_from(tmp_path / "unused", None, with_epochs, 4)
    borders, visits = Borders(), []

    def put_back(adapter) -> None:
        visits.append(adapter.batch)
        save_state(tmp_path / "saved", adapter.capture(), list_codecs())
        adapter.restore(load_state(tmp_path / "saved", list_codecs()))

    borders.add(border=put_back)
    run = Setting(borders, 4)
    with_epochs(run)
    assert visits == list(range(26)) and run.digest() == calm


def test_a_finished_run_that_is_started_again_trains_no_more(tmp_path):
    borders, ends = Borders(), []
    borders.add(end=lambda adapter: ends.append(save_state(tmp_path / "saved", adapter.capture(), list_codecs())))
    run = Setting(borders, 4)
    with_epochs(run)
    calm = run.digest()
    final, again = run_from(tmp_path / "unused", tmp_path / "saved", with_epochs, 4)
    assert len(ends) == 2 and final == calm and again.data.read == []


def drawing(run: Setting, num_epochs: int) -> None:
    """Draws before, within and after its passes, and has a loader for each epoch."""
    for epoch in run.adapter.epochs.walk(num_epochs):
        torch.rand(1), random.random()
        own = run.adapter.prepare([DataLoader(run.data, batch_size=16, shuffle=True)])[0]
        for x, y in run.loader:
            run.step(x, y)
        for x, y in own:
            run.step(x * 2, y)
        run.scheduler.step()
        np.random.rand(epoch + 1)


@pytest.mark.parametrize("num_replicas", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_finished_run_that_is_given_more_epochs_ends_with_the_bits_of_a_longer_one(tmp_path, num_replicas):
    calm, _ = run_from(tmp_path / "unused", None, lambda run: drawing(run, 4), num_replicas)
    borders = Borders()
    borders.add(end=lambda adapter: save_state(tmp_path / "two", adapter.capture(), list_codecs()))
    drawing(Setting(borders, num_replicas), 2)
    final, longer = run_from(tmp_path / "unused", tmp_path / "two", lambda run: drawing(run, 4), num_replicas)
    assert longer.adapter.step == 4 * (5 + 3) and final == calm
    for border in (17, 23):  # and stopped in the middle of the first new epoch
        run_from(tmp_path / "three", tmp_path / "two", lambda run: drawing(run, 4), num_replicas, border)
        final, _ = run_from(tmp_path / "unused", tmp_path / "three", lambda run: drawing(run, 4), num_replicas)
        assert final == calm, f"stopped before batch {border}"


def test_a_state_of_another_model_or_order_is_refused_with_the_first_difference(tmp_path):
    run_from(tmp_path / "saved", None, plain, 4, 7)
    other = Setting(Borders(), 4)
    other.model[3] = nn.Linear(16, 3, bias=False)
    with pytest.raises(CheckpointError, match=r"3\.bias \(3,\) float32 is in the saved model"):
        other.adapter.restore(load_state(tmp_path / "saved", list_codecs()))
    other.model[3] = nn.Linear(16, 3).double()
    with pytest.raises(CheckpointError, match=r"3\.weight is \(3, 16\) float64 here, and \(3, 16\) float32"):
        other.adapter.restore(load_state(tmp_path / "saved", list_codecs()))
    with pytest.raises(MismatchError, match="Pass 2 over a loader has another order"):
        run_from(tmp_path / "unused", tmp_path / "saved", plain, 4, batch_size=12)


def test_another_optimizer_scheduler_or_scaler_is_refused_and_other_values_are_named(tmp_path, capsys):
    run_from(tmp_path / "saved", None, plain, 4, 7)
    saved = load_state(tmp_path / "saved", list_codecs())
    schedulers = torch.optim.lr_scheduler
    for other, words in (
        ({"optimizer": torch.optim.Adam}, "optimizer 1 is Adam here, and AdamW in the saved run"),
        (
            {"scheduler": lambda optimizer: schedulers.StepLR(optimizer, 1)},
            "scheduler 1 is StepLR here, and CosineAnnealingLR in the saved run",
        ),
        ({"scales": False}, "scaler 1 is GradScaler \\(not enabled\\) here, and GradScaler in the saved run"),
    ):
        with pytest.raises(CheckpointError, match=words):
            Setting(Borders(), 4, **other).adapter.restore(saved)
    assert capsys.readouterr().err == ""
    other = Setting(Borders(), 4, lr=0.5, scheduler=lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 9))
    other.adapter.restore(saved)
    assert capsys.readouterr().err == (
        "duoka: the saved run goes on with its own values, not with those of this script: lr of optimizer 1 (AdamW) is"
        " 0.5 here, and was 0.01; T_max of scheduler 1 (CosineAnnealingLR) is 9 here, and was 7\n"
    )
    assert other.optimizer.param_groups[0]["lr"] < 0.01 and other.scheduler.T_max == 7
    assert other.adapter.capture()["given"] == saved["given"]
