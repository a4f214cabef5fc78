"""Functions for `strategy.backward` with something wrong in them, and others that only look wrong."""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Function = Callable[..., Any]
Case = Callable[[nn.Module, Any], tuple[Function, tuple[Any, ...]]]  # (model, strategy) -> function, its arguments
WRONG: dict[str, tuple[Case, str]] = {}  # with a part of the message
WARNED: dict[str, tuple[Case, str]] = {}
FINE: dict[str, Case] = {}
NEVER = 0
# Functions that look right in their first call, then wrong: (model, strategy) -> (function, arguments) of each call.
LATE: dict[str, tuple[Callable[[nn.Module, Any], Iterator[tuple[Function, tuple[Any, ...]]]], str, int]] = {}


def inputs(num_samples: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 6, generator=generator)
    return x, torch.randint(0, 3, (num_samples,), generator=generator)


def wrong(message: str) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        WRONG[case.__name__] = case, message
        return case

    return add


def warned(message: str) -> Callable[[Case], Case]:
    def add(case: Case) -> Case:
        WARNED[case.__name__] = case, message
        return case

    return add


def late(message: str, call: int) -> Callable[[Any], Any]:
    """With the call in which it is found."""

    def add(case: Any) -> Any:
        LATE[case.__name__] = case, message, call
        return case

    return add


def fine(case: Case) -> Case:
    FINE[case.__name__] = case
    return case


# Losses.

NOT_A_MEAN = "is not a mean over samples"


@wrong(NOT_A_MEAN)
def sum_of_losses(model, strategy):
    return lambda x, y: F.cross_entropy(model(x), y, reduction="sum"), inputs()


@wrong(NOT_A_MEAN)
def class_weights(model, strategy):
    weights = torch.tensor([0.2, 1.0, 3.0])
    return lambda x, y: F.cross_entropy(model(x), y, weight=weights), inputs()


@wrong(NOT_A_MEAN)
def token_mean(model, strategy):
    x = torch.randn(9, 5, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(45).reshape(9, 5) % 3
    y[:4, 2:] = -100

    def loss_of(x, y):
        return F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=-100)

    return loss_of, (x, y)


@wrong(NOT_A_MEAN)
def contrastive(model, strategy):
    def loss_of(x, y):
        keys = F.normalize(model(x), dim=1)
        return F.cross_entropy(keys @ keys.T / 0.1, torch.arange(len(x)))

    return loss_of, inputs()


@wrong(NOT_A_MEAN)
def cut_along_time(model, strategy):
    """[T, B, ...] with a recurrence over T."""
    rnn = nn.RNN(6, 6)
    strategy.prepare(rnn)

    def loss_of(x):
        return model(rnn(x)[0]).square().mean()

    return loss_of, (torch.randn(9, 4, 6, generator=torch.Generator().manual_seed(1)),)


@fine
def weighed_tokens(model, strategy):
    loss_of, (x, y) = token_mean(model, strategy)
    return lambda x, y: strategy.weigh(loss_of(x, y), (y != -100).sum()), (x, y)


@fine
def weighed_sum(model, strategy):
    return lambda x, y: strategy.weigh(F.cross_entropy(model(x), y, reduction="sum")), inputs()


@fine
def cross_entropy(model, strategy):
    return lambda x, y: F.cross_entropy(model(x), y), inputs()


@fine
def with_decay(model, strategy):
    """A term that does not depend on samples is the mean of itself."""
    decay = 1e-3
    return (
        lambda x, y: F.cross_entropy(model(x), y) + decay * sum(p.square().sum() for p in model.parameters()),
        inputs(),
    )


# What a function changes outside of itself.


@wrong("changes count")
def counter_of_calls(model, strategy):
    count = 0

    def loss_of(x, y):
        nonlocal count
        count += 1
        return F.cross_entropy(model(x), y)

    return loss_of, inputs()


class Accuracy(nn.Module):
    """As torchmetrics does it: a module that adds up in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.correct, self.seen = torch.tensor(0), 0

    def forward(self, out, y):
        self.correct += (out.argmax(1) == y).sum()
        self.seen += len(y)


@wrong("changes accuracy.")
def metric_object(model, strategy):
    accuracy = Accuracy()

    def loss_of(x, y):
        out = model(x)
        accuracy(out, y)
        return F.cross_entropy(out, y)

    return loss_of, inputs()


@wrong("changes generator")
def own_generator(model, strategy):
    generator = torch.Generator().manual_seed(0)
    return lambda x, y: F.cross_entropy(model(x + torch.randn(x.shape, generator=generator)), y), inputs()


@wrong("changes rng")
def own_numpy_generator(model, strategy):
    rng = np.random.default_rng(0)
    return lambda x, y: F.cross_entropy(model(x * float(rng.random())), y), inputs()


@wrong("changes rng")
def own_python_generator(model, strategy):
    rng = random.Random(0)
    return lambda x, y: F.cross_entropy(model(x * rng.random()), y), inputs()


@wrong("changes queue")
def queue_of_keys(model, strategy):
    queue = torch.zeros(16, 3)

    def loss_of(x, y):
        out = model(x)
        queue[: len(x)] = out.detach()
        return F.cross_entropy(out, y)

    return loss_of, inputs()


@wrong("changes features.1.")
def frozen_features_with_batchnorm(model, strategy):
    features = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).requires_grad_(False)
    return lambda x, y: F.cross_entropy(model(features(x)), y), inputs()


@wrong("changes self.calls")
def method_of_a_trainer(model, strategy):
    class Trainer:
        calls = 0

        def __init__(self) -> None:
            self.calls = 0

        def loss_of(self, x, y):
            self.calls += 1
            return F.cross_entropy(model(x), y)

    return Trainer().loss_of, inputs()


@wrong("post-accumulate-grad hook")
def step_in_backward(model, strategy):
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None)
    return lambda x, y: F.cross_entropy(model(x), y), inputs()


@warned("lets losses grow")
def list_of_losses(model, strategy):
    losses = []

    def loss_of(x, y):
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        return loss

    return loss_of, inputs()


@warned("has a hook on its gradient")
def hook_on_a_gradient(model, strategy):
    next(model.parameters()).register_hook(lambda gradient: gradient)
    return lambda x, y: F.cross_entropy(model(x), y), inputs()


@warned("BatchNorm normalises each replica's samples by themselves")
def batchnorm(model, strategy):
    norm = nn.BatchNorm1d(3)
    strategy.prepare(norm)
    return lambda x, y: F.cross_entropy(norm(model(x)), y), inputs()


@warned("is not checked")
def three_samples(model, strategy):
    return lambda x, y: F.cross_entropy(model(x), y), inputs(3)


class Queue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 3))

    def forward(self, out):
        with torch.no_grad():
            self.keys += out.sum(0)
        return out


@warned("keys")
def queue_in_a_prepared_model(model, strategy):
    queue = Queue()
    strategy.prepare(queue)
    return lambda x, y: F.cross_entropy(queue(model(x)), y), inputs()


@fine
def frozen_teacher(model, strategy):
    teacher = nn.Linear(6, 3).requires_grad_(False)
    return lambda x, y: F.mse_loss(model(x), teacher(x)), inputs()


@fine
def dropout_and_global_generators(model, strategy):
    drop = nn.Dropout(0.3)

    def loss_of(x, y):
        scale = 1 + 0 * random.random() + 0 * np.random.rand()
        return F.cross_entropy(model(drop(x) if model.training else x) * scale, y)

    return loss_of, inputs()


# Bad input.


@wrong("a loss without a graph")
def no_graph(model, strategy):
    return lambda x, y: F.cross_entropy(model(x), y).detach(), inputs()


@wrong("returned a NoneType, not a loss")
def nothing_returned(model, strategy):
    return lambda x, y: None, inputs()


@wrong("returned a loss of shape")
def not_a_number(model, strategy):
    return lambda x, y: F.cross_entropy(model(x), y, reduction="none"), inputs()


@wrong("returned a float, not a loss")
def item(model, strategy):
    return lambda x, y: F.cross_entropy(model(x), y).item(), inputs()


@wrong("was given 8 samples in argument 2")
def other_lengths(model, strategy):
    x, y = inputs()
    return lambda x, y: F.cross_entropy(model(x), y), (x, y[:8])


@wrong("nothing that could be cut")
def nothing_to_cut(model, strategy):
    return lambda scale: model(torch.ones(2, 6)).mean() * scale, (2.0,)


@wrong("cannot cut argument 2: it is a Accuracy")
def an_object(model, strategy):
    x, _ = inputs()

    class Thing:
        pass

    thing = Thing()
    Thing.__name__ = "Accuracy"
    return lambda x, thing: model(x).mean(), (x, thing)


# Found by a hostile reader: each trained silently to other numbers, or was refused although it is right.


@wrong("changes argument 1 in place")
def normalises_in_place(model, strategy):
    return lambda x, y: F.cross_entropy(model(x.sub_(1.0)), y), inputs()


@wrong("argument 3, which requires a gradient")
def adversarial_noise_as_argument(model, strategy):
    x, y = inputs()
    return lambda x, y, noise: F.cross_entropy(model(x + noise), y), (x, y, torch.zeros_like(x, requires_grad=True))


@wrong("changes the parameter weight in place")
def clamps_weights(model, strategy):
    def loss_of(x, y):
        with torch.no_grad():
            model.weight.clamp_(-10.0, 10.0)
        return F.cross_entropy(model(x), y)

    return loss_of, inputs()


@wrong("changes log['calls']")
def counter_in_a_dictionary(model, strategy):
    log = {"calls": 0}

    def loss_of(x, y):
        log["calls"] += 1
        return F.cross_entropy(model(x), y)

    return loss_of, inputs()


@wrong("changes total[0]")
def counter_in_a_default(model, strategy):
    def loss_of(x, y, total=[0.0]):  # noqa: B006
        total[0] += 1.0
        return F.cross_entropy(model(x), y)

    return loss_of, inputs()


@wrong("a batch without samples")
def no_samples(model, strategy):
    return lambda x, y: F.cross_entropy(model(x), y), inputs(0)


@wrong("cannot cut argument 2: it is a ndarray")
def array_of_objects(model, strategy):
    x, _ = inputs()
    return lambda x, names: model(x).mean(), (x, np.array([object()] * 9))


@warned("draws random numbers")
def variational_autoencoder(model, strategy):
    def loss_of(x, y):
        mean = model(x)
        return (mean + torch.randn_like(mean)).square().mean()

    return loss_of, inputs()


@fine
def gradient_penalty(model, strategy):
    """WGAN-GP: the loss holds a gradient of its own, with respect to the samples."""

    def loss_of(x, y):
        x = x.clone().requires_grad_(True)
        score = model(x).square().sum(1)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (gradient.norm(dim=1) - 1).square().mean()

    return loss_of, inputs()


@fine
def equal_counts_of_two_terms(model, strategy):
    """Two counts that are equal on one replica and not on the other are still two counts."""

    def loss_of(x, y):
        losses, is_first = F.cross_entropy(model(x), y, reduction="none"), y == y_first
        first, second = int(is_first.sum()), int((~is_first).sum())
        return strategy.weigh(losses[is_first].mean(), first) + strategy.weigh(losses[~is_first].mean(), second)

    x, y = inputs()
    y, y_first = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0, 1]), 0  # 2 and 3 for replica 0, 2 and 2 for replica 1
    return loss_of, (x, y)


@wrong(NOT_A_MEAN)
def token_mean_with_nothing_in_one_part(model, strategy):
    """The first five samples have no token that counts: their mean is NaN."""
    loss_of, (x, y) = token_mean(model, strategy)
    y[:5] = -100
    return loss_of, (x, y)


@wrong("returned metrics on some replicas only")
def metrics_of_some_replicas(model, strategy):
    def loss_of(x, y):
        loss = F.cross_entropy(model(x), y)
        return (loss, {"loss": loss}) if len(x) == 4 else loss

    return loss_of, inputs()


# Found by a second hostile reader.


@late(NOT_A_MEAN, 2)
def zero_initialised_head(model, strategy):
    """All losses are log C until the first update."""
    loss_of, (x, y) = token_mean(model, strategy)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    yield loss_of, (x, y)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    yield loss_of, (x, y)


@late(NOT_A_MEAN, 3)
def annealing_from_zero(model, strategy):
    state = SimpleNamespace(beta=0.0)

    def loss_of(x, y):
        return F.cross_entropy(model(x), y) + state.beta * model(x).square().sum()

    for number in range(1, 5):
        state.beta = 0.01 * (number > 2)
        yield loss_of, inputs()


@late(NOT_A_MEAN, 2)
def another_loss_of_the_same_line(model, strategy):
    def make(criterion):
        return lambda x, y: criterion(model(x), y)

    yield make(nn.CrossEntropyLoss()), inputs()
    yield make(nn.CrossEntropyLoss(reduction="sum")), inputs()


@late(NOT_A_MEAN, 5)
def a_new_closure_in_a_later_call(model, strategy):
    def make(criterion):
        return lambda x, y: criterion(model(x), y)

    mean = make(nn.CrossEntropyLoss())
    for _ in range(4):
        yield mean, inputs()
    yield make(nn.CrossEntropyLoss(reduction="sum")), inputs()


@late(NOT_A_MEAN, 10)
def annealing_from_call_nine(model, strategy):
    """Between calls 3 and 10 nothing is looked at."""
    state = SimpleNamespace(beta=0.0)

    def loss_of(x, y):
        return F.cross_entropy(model(x), y) + state.beta * model(x).square().sum()

    for number in range(1, 12):
        state.beta = 0.1 * (number >= 5)
        yield loss_of, inputs()


@late(NOT_A_MEAN, 2)
def first_eight_samples_of_one_length(model, strategy):
    """Later looks are at other samples of the batch."""
    loss_of, _ = token_mean(model, strategy)
    x = torch.randn(40, 5, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(200).reshape(40, 5) % 3
    y[8::2, 2:] = -100
    for _ in range(4):
        yield loss_of, (x, y)


@late(NOT_A_MEAN, 2)
def first_eight_samples_of_a_loader_of_one_length(model, strategy):
    loss_of, _ = token_mean(model, strategy)
    x = torch.randn(80, 5, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(400).reshape(80, 5) % 3
    y[:40][8::2, 2:] = y[40:][8::2, 2:] = -100
    for batch in strategy.batches(DataLoader(TensorDataset(x, y), 40)):
        yield loss_of, (batch,)


UPDATE = "calls zero_grad, backward or step inside of the function"


def optimizer_of(model, strategy):
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    strategy.prepare(optimizer)
    return optimizer


@wrong(UPDATE)
def zero_grad_inside(model, strategy):
    optimizer = optimizer_of(model, strategy)

    def loss_of(x, y):
        optimizer.zero_grad()
        return F.cross_entropy(model(x), y)

    return loss_of, inputs()


@wrong(UPDATE)
def zero_grad_to_zeros_inside(model, strategy):
    def loss_of(x, y):
        model.zero_grad(set_to_none=False)
        return F.cross_entropy(model(x), y)

    return loss_of, inputs()


@wrong(UPDATE)
def backward_inside(model, strategy):
    def loss_of(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        return loss

    return loss_of, inputs()


@wrong(UPDATE)
def a_whole_step_inside_of_a_sum(model, strategy):
    """Before the verdict on the loss."""
    optimizer = optimizer_of(model, strategy)

    def loss_of(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        optimizer.step()
        return loss

    return loss_of, inputs()


@fine
def an_inner_step_on_a_copy(model, strategy):
    def loss_of(x, y):
        inner = copy.deepcopy(model)
        optimizer = torch.optim.SGD(inner.parameters(), 0.1)
        F.cross_entropy(inner(x[:1]), y[:1]).backward()
        optimizer.step()
        return F.cross_entropy(model(x), y)

    return loss_of, inputs()


@wrong("changes last")
def value_that_was_none(model, strategy):
    last = None

    def loss_of(x, y):
        nonlocal last
        last = model(x)
        return F.cross_entropy(last, y)

    return loss_of, inputs()


@wrong("changes self.scores")
def attribute_that_did_not_exist(model, strategy):
    class Trainer:
        def loss_of(self, x, y):
            self.scores = model(x)
            return F.cross_entropy(self.scores, y)

    return Trainer().loss_of, inputs()


@wrong("changes self.meters['loss'].total")
def meter_in_a_dictionary_of_a_trainer(model, strategy):
    class Trainer:
        def __init__(self) -> None:
            self.meters = {"loss": SimpleNamespace(total=0.0)}

        def loss_of(self, x, y):
            loss = F.cross_entropy(model(x), y)
            self.meters["loss"].total += loss.item()
            return loss

    return Trainer().loss_of, inputs()


@wrong("changes scales")
def generator_function(model, strategy):
    def make():
        number = 1
        while True:
            yield number / 10
            number += 1

    scales = make()
    next(scales)
    return lambda x, y: F.cross_entropy(model(x) * next(scales), y), inputs()


@fine
def caches_and_logs(model, strategy):
    """What only the first run makes is the same on every worker."""
    cache, kept, log = {}, SimpleNamespace(mask=None), logging.getLogger("tests.first_call")

    def loss_of(x, y):
        if kept.mask is None:
            kept.mask = torch.ones(6)
        if "scale" not in cache:
            cache["scale"] = torch.ones(())
        log.debug("called")
        return F.cross_entropy(model(x * kept.mask) * cache["scale"], y)

    return loss_of, inputs()


class Warming(nn.Module):
    """Counts its own calls, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.average = 0, torch.zeros(3)

    def forward(self, out):
        if self.training:
            self.calls += 1
            self.average = 0.9 * self.average + 0.1 * out.detach().mean(0)
        return out - self.average


@wrong("changes Warming.calls, Warming.average, in a prepared module")
def counter_in_a_prepared_module(model, strategy):
    warming = Warming()
    strategy.prepare(warming)
    return lambda x, y: F.cross_entropy(warming(model(x)), y), inputs()


class Attending(nn.Module):
    """Keeps what it computes from its input, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.longest, self.seen = None, 0, []

    def forward(self, out):
        self.attention = out.softmax(-1)
        self.longest = max(self.longest, out.shape[-1])
        self.seen = [self.attention]
        return out * self.attention


@fine
def attention_that_is_kept(model, strategy):
    attending = Attending()
    strategy.prepare(attending)
    return lambda x, y: F.cross_entropy(attending(model(x)), y), inputs()


@fine
def weight_norm(model, strategy):
    """It keeps its weight as an attribute, and computes it in each forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        normed = nn.utils.weight_norm(nn.Linear(3, 3))
    strategy.prepare(normed)
    return lambda x, y: F.cross_entropy(normed(model(x)), y), inputs()


@wrong(NOT_A_MEAN)
def variational_autoencoder_with_a_sum(model, strategy):
    def loss_of(x, y):
        mean = model(x)
        return (mean + 0.1 * torch.randn_like(mean) - 2.0).square().sum()

    return loss_of, inputs()


@warned("strategy.weigh(loss) for a sum")
def noise_on_the_samples(model, strategy):
    return lambda x, y: F.cross_entropy(model(F.dropout(x)), y), inputs()


@fine
def autocast_inside(model, strategy):
    def loss_of(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return (model(x) - 1.0).square().mean().float()

    return loss_of, inputs()


@fine
def loss_of_a_model_in_16_bits(model, strategy):
    half = nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 3)).bfloat16()
    strategy.prepare(half)
    return lambda x, y: F.cross_entropy(half(x.bfloat16()).float(), y), inputs()


@fine
def difference_near_zero(model, strategy):
    def loss_of(x, y):
        score = 100.0 * model(x)[:, 0]
        return score.mean() - (score + 1e-5 * x[:, 0]).mean()

    return loss_of, inputs()


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(6, 3)

    def forward(self, out, x):
        return (out, self.side(x)) if self.training else out


@warned("is not checked: it raises in eval mode (ValueError: too many values to unpack")
def two_values_in_training_mode(model, strategy):
    inception = Inception()
    strategy.prepare(inception)

    def loss_of(x, y):
        out, side = inception(model(x), x)
        return F.cross_entropy(out, y) + 0.4 * F.cross_entropy(side, y)

    return loss_of, inputs()


@wrong("KeyError: 'in training mode'")
def raises_in_both_modes(model, strategy):
    def loss_of(x, y):
        raise KeyError("in training mode" if model.training else "in eval mode")

    return loss_of, inputs()


@wrong("for one row per sample return strategy.rows(t)")
def predictions_as_a_metric(model, strategy):
    def loss_of(x, y):
        scores = model(x)
        return F.cross_entropy(scores, y), {"predictions": scores.argmax(1)}

    return loss_of, inputs(10)


@wrong("for one row per sample return strategy.rows(t)")
def predictions_and_targets_as_a_pair(model, strategy):
    def loss_of(x, y):
        scores = model(x)
        return F.cross_entropy(scores, y), (scores.argmax(1), y)

    return loss_of, inputs(10)


@fine
def counts_of_each_class(model, strategy):
    def loss_of(x, y):
        scores = model(x)
        classes = F.one_hot(y, 3)
        correct = classes * (scores.argmax(1) == y)[:, None]
        by_class = correct.sum(0), classes.sum(0)
        return F.cross_entropy(scores, y), {"recall": by_class, "share": (classes.sum(0), len(y))}

    return loss_of, inputs(10)


@wrong("detach it: strategy.weigh(term, count.detach())")
def count_that_is_learned(model, strategy):
    def loss_of(x, y):
        weights = model(x)[:, 0].sigmoid()
        return strategy.weigh((weights * x[:, 0]).sum() / weights.sum(), weights.sum())

    return loss_of, inputs()


@wrong("keep the term before strategy.weigh")
def item_of_a_weighed_loss(model, strategy):
    def loss_of(x, y):
        loss = strategy.weigh(F.cross_entropy(model(x), y), len(x))
        return loss, {"loss": loss.item()}

    return loss_of, inputs()


@wrong("keep the term before strategy.weigh")
def weighed_loss_as_a_metric(model, strategy):
    def loss_of(x, y):
        loss = strategy.weigh(F.cross_entropy(model(x), y), len(x))
        return loss, {"loss": loss}

    return loss_of, inputs()


@warned("fewer than 4")
def one_row_of_a_wider_table(model, strategy):
    """One sample for each replica, with the strides of the table that it was cut from."""
    table = torch.randn(2, 9, generator=torch.Generator().manual_seed(1))

    def loss_of(x, y):
        out = model(x)
        return (out[:, 0] - y).square().mean(), strategy.rows(torch.cat([out, out])[:1, 1])

    return loss_of, (table[:, :6], table[:, 8])


@late("", NEVER)
def a_loss_that_falls_to_nothing(model, strategy):
    """What is left of it is rounding, which depends on the number of samples, and never a finding."""
    x, _ = inputs(40)
    state = SimpleNamespace(size=1.0)

    def loss_of(x):
        rounding = 1e-9 * len(x)
        return (state.size * model(x)).square().mean() + rounding

    for _ in range(11):
        yield loss_of, (x,)
        state.size /= 10
