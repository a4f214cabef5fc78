"""Functions for `strategy.backward` with something wrong in them, and others that only look wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

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
        known = self.keys[0].clone()
        with torch.no_grad():
            self.keys += out.sum(0)
        return out + known


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


# Each of these once trained silently to other numbers, or was refused although it is right.


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
