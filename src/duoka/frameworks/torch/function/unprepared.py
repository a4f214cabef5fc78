"""A loss that depends on parameters that were not prepared: their gradients would be those of one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from duoka.errors import MismatchError
from duoka.frameworks.torch.function.side_effects import name_tensors


def refuse_unprepared(
    function: Callable[..., Any], losses: Sequence[torch.Tensor], known: set[int], title: str
) -> None:
    """Raise if a backward from these losses would reach parameters that are not among the known ones.

    Leaves that the function makes itself (an input whose gradient is a part of the loss) are its own business.
    """
    strangers = [leaf for leaf in _leaves(losses) if id(leaf) not in known]
    if not strangers:
        return
    names = name_tensors(function)
    found = [leaf for leaf in strangers if isinstance(leaf, nn.Parameter) or id(leaf) in names]
    if found:
        named = [names.get(id(leaf), f"one of shape {tuple(leaf.shape)}") for leaf in found]
        more = f" and {len(named) - 3} more" if named[3:] else ""
        raise MismatchError(
            f"The loss of {title} depends on parameters that were not prepared: {', '.join(named[:3])}{more}.",
            why="their gradients would not be exchanged: each worker would have those of its own samples.",
            do="pass their model, or the optimizer that holds them, to strategy.prepare. Where they are not trained,"
            " call requires_grad_(False) on them.",
        )


def _leaves(losses: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a backward accumulates gradients in."""
    rest: list[Any] = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen = set(rest)
    while rest:
        node = rest.pop()
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                rest.append(following)
