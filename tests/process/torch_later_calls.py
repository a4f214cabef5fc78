"""More functions for `strategy.backward`: wrong in later calls, or with updates, state or metrics inside."""

from __future__ import annotations

import copy
import itertools
import logging
import warnings
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.process.torch_first_calls import NEVER, NOT_A_MEAN, fine, inputs, late, token_mean, warned, wrong


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


@late("changes the parameter", 2)
def momentum_encoder_in_the_forward(model, strategy):
    """As MoCo's: past autograd, and without an effect until the first update."""
    keys = copy.deepcopy(model).requires_grad_(False)
    strategy.prepare(keys)

    def loss_of(x, y):
        for key, query in zip(keys.parameters(), model.parameters(), strict=True):
            key.data = key.data + 1e-5 * (query.data - key.data)
        return F.cross_entropy(model(x) + keys(x), y)

    yield loss_of, inputs()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= parameter.grad
    yield loss_of, inputs()


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


class Recurrent(nn.Module):
    """Keeps the state of its last call, as a pair, and a meter."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.state, self.meter = nn.LSTMCell(3, 3), None, SimpleNamespace(total=0.0)

    def forward(self, out):
        self.state = tuple(part.detach() for part in self.cell(out, self.state))
        self.meter.total += self.state[0].mean().item()
        return out + self.state[0]


@wrong("changes Recurrent.state[0], Recurrent.state[1], Recurrent.meter.total, in a prepared module")
def state_of_a_recurrent_module(model, strategy):
    recurrent = Recurrent()
    strategy.prepare(recurrent)
    return lambda x, y: F.cross_entropy(recurrent(model(x)), y), inputs()


@wrong("changes state[0], state[1], outside")
def state_in_a_global_pair(model, strategy):
    state = torch.zeros(3), torch.zeros(3)

    def loss_of(x, y):
        nonlocal state
        state = state[1], model(x).detach().mean(0)
        return F.cross_entropy(model(x) - state[0], y)

    return loss_of, inputs()


@wrong("changes unlabelled, an iterator, outside")
def batches_of_another_loader(model, strategy):
    """Semi-supervised training, with a loader that goes round."""
    unlabelled = itertools.cycle(DataLoader(TensorDataset(inputs()[0]), batch_size=3))

    def loss_of(x, y):
        (more,) = next(unlabelled)
        return F.cross_entropy(model(x), y) + 0.1 * model(more).square().mean()

    return loss_of, inputs()


@late("changes state['calls'], outside", 2)
def another_function_of_the_same_line(model, strategy):
    """It is checked as wholly as the first one."""

    def make(state):
        def loss_of(x, y):
            if state is not None:
                state["calls"] += 1
            return F.cross_entropy(model(x), y)

        return loss_of

    yield make(None), inputs()
    yield make({"calls": 0}), inputs()


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


@fine
def terms_that_cancel_out(model, strategy):
    """Gradients of normalised embeddings are orthogonal to them: each row adds up to rounding."""
    x = inputs()[0]
    embeddings = model(x).detach().requires_grad_()
    (gradients,) = torch.autograd.grad(F.normalize(embeddings).square()[:, 0].sum(), embeddings)
    return lambda x, gradients: strategy.weigh((model(x) * gradients).sum()), (x, gradients)


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


@warned("the metric 'correct' of")
def correct_as_a_number(model, strategy):
    """A mean over samples of what is a sum on each replica."""

    def loss_of(x, y):
        scores = model(x)
        return F.cross_entropy(scores, y), {"correct": torch.ones(len(x)).sum().item(), "seen": (len(x), len(x))}

    return loss_of, inputs()


@warned("on 8 samples it is 8, and from 5 and 3 of them it would be 4")
def table_with_a_count_of_one(model, strategy):
    def loss_of(x, y):
        scores = model(x)
        return F.cross_entropy(scores, y), (torch.tensor([len(x), 0]), 1)

    return loss_of, inputs()


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
