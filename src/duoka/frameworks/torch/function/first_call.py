"""The check of a function's first call: does it give the numbers of one device, and does it change nothing else?

It runs on the worker of replica 0, on at most eight samples, without gradients and with the models in eval mode. What
it finds is an error of that replica, and so is raised on all workers before anything is added to `p.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from duoka.errors import MismatchError
from duoka.frameworks.additivity import FEWEST_SAMPLES, TOLERANCES, Finding, Terms, probe, split
from duoka.frameworks.torch.function.in_place import read_versions, refuse_changed_arguments
from duoka.frameworks.torch.function.returned import Returned, read
from duoka.frameworks.torch.function.side_effects import Watch
from duoka.frameworks.torch.generators import digest_generators

Tell = Callable[..., None]
_SEED = 0x5EED


def check_models(
    models: Sequence[nn.Module], parameters: Sequence[nn.Parameter], names: Sequence[str], tell: Tell
) -> None:
    """What can be seen without a call; the same on all workers."""
    for name, parameter in zip(names, parameters, strict=True):
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise MismatchError(
                f"{name} has a post-accumulate-grad hook, which would see the gradient of one replica.",
                do="do what it does after strategy.backward, on p.grad.",
            )
        if parameter._backward_hooks:
            tell(f"{name} has a hook on its gradient: it runs once per replica, on that replica's gradient", "hooks")
    normalised = any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        for model in models
        for module in model.modules()
    )
    if normalised:
        tell(
            "BatchNorm normalises each replica's samples by themselves: the numbers are close to those of one device,"
            " not equal; sync_batchnorm=True makes them equal, in a plain loop over the loader",
            "batchnorm",
        )


def check_function(
    function: Callable[..., Any],
    cut: Callable[[int, int], Sequence[Any]],
    num_samples: int,
    models: Sequence[nn.Module],
    known: set[int],
    tell: Tell,
    title: str,
    seeded: Callable[[int], Any],
) -> None:
    """Raise what would make a training wrong. `cut(start, stop)` returns the arguments for these samples."""
    if num_samples < FEWEST_SAMPLES:
        tell(f"{title} is not checked: its first batch has {num_samples} samples, fewer than {FEWEST_SAMPLES}")
        return
    watch = Watch(function, known)
    tolerance, draws = 0.0, False

    def evaluate(start: int, stop: int) -> Terms:
        nonlocal tolerance, draws
        data = cut(start, stop)
        versions = read_versions(data)
        with seeded(_SEED):
            before = digest_generators()
            returned = read(function(*data), needs_graph=False)
            draws |= digest_generators() != before
        if read_versions(data) != versions:
            refuse_changed_arguments(data, versions, title)
        tolerance = _tolerance_of(returned)
        return _terms_of(returned)

    sizes = split(num_samples)
    # With a graph, although nothing is differentiated here: a gradient penalty calls autograd.grad itself.
    with torch.enable_grad(), in_eval_mode(models):
        finding = probe(evaluate, sizes)
    _report_side_effects(watch, tell, title)
    if finding.difference > tolerance and draws:
        tell(f"{title} draws random numbers, so whether its loss is a mean over samples is not checked")
    elif finding.difference > tolerance:
        raise _not_additive(finding, sizes, title)


def _report_side_effects(watch: Watch, tell: Tell, title: str) -> None:
    changed, grown = watch.find_changes(), watch.find_grown()
    if changed:
        more = f" and {len(changed) - 3} more" if changed[3:] else ""
        raise MismatchError(
            f"{title} changes {', '.join(changed[:3])}{more}, outside of itself.",
            why="it runs once for each replica, and again on another worker after a loss: such a change would happen"
            " several times, or not at all.",
            do="return it as a metric, (loss, {'name': (sum, count)}) or strategy.rows(tensor), and change it after"
            " strategy.backward; prepare a module that has buffers; draw from the global generators. If it is"
            " harmless, pass check=False.",
        )
    if grown:
        tell(
            f"{title} lets {', '.join(grown[:3])} grow: it runs once per replica, so each batch adds several items;"
            " return what it collects as a metric"
        )


def _not_additive(finding: Finding, sizes: tuple[int, int], title: str) -> MismatchError:
    return MismatchError(
        f"The loss of {title} is not a mean over samples.",
        why=f"on {sum(sizes)} samples it is {finding.together:.6g}; from {sizes[0]} and {sizes[1]} of them, weighted by"
        f" their numbers, it would be {finding.combined:.6g} (relative difference {finding.difference:.1e}).",
        do="return strategy.weigh(loss, count) for a mean over `count` other things (tokens, pixels, class weights),\n"
        "strategy.weigh(loss) for a sum over samples; or divide by the number of samples.\n"
        "A loss that compares samples with each other (contrastive) cannot be split: use one replica, or\n"
        "strategy.rows to gather its inputs. check=False leaves this check out.",
    )


def _terms_of(returned: Returned) -> Terms:
    means = sum(term.value.item() for term in returned.terms if term.kind == "samples")
    sums = sum(term.value.item() for term in returned.terms if term.kind == "sum")
    counted = tuple((term.value.item(), term.number) for term in returned.terms if term.kind == "count")
    return means, sums, counted


def _tolerance_of(returned: Returned) -> float:
    value = returned.terms[0].value
    if torch.is_autocast_enabled(value.device.type):
        return TOLERANCES["bfloat16"]
    return TOLERANCES.get(str(value.dtype).removeprefix("torch."), TOLERANCES["float32"])


@contextmanager
def in_eval_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Every module's flag is put back; layers frozen by hand within a model in training stay frozen."""
    flags = [(module, module.training) for model in models for module in model.modules()]
    try:
        for module, _ in flags:
            module.training = False
        yield
    finally:
        for module, is_training in flags:
            module.training = is_training
