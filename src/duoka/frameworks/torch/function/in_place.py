"""Arguments and parameters that a function changes in place: an error, because it may run on them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from duoka.errors import MismatchError
from duoka.frameworks.torch.function.arguments import fingerprint
from duoka.frameworks.torch.nested import map_tensors


def version_of(tensor: torch.Tensor) -> int:
    """0 for a tensor made in inference mode, which has no version."""
    return 0 if tensor.is_inference() else tensor._version


def read_versions(data: Sequence[Any]) -> list[int]:
    """Return a number for each tensor of the arguments that grows with each change in place."""
    versions: list[int] = []
    for value in data:
        if isinstance(value, torch.Tensor):
            versions.append(0 if value.is_inference() else value._version)  # not called: it is done in every step
        else:
            parts: list[torch.Tensor] = []
            map_tensors(value, parts.append)
            versions += read_versions(parts)
    return versions


def refuse_changed_arguments(data: Sequence[Any], before: list[int], title: str) -> None:
    """Raise, naming the argument. `before` differs from what `read_versions` returns now."""
    changed = [position for position, value in enumerate(data, start=1) if isinstance(value, torch.Tensor)]
    changed = [n for n in changed if [version_of(data[n - 1])] != before[n - 1 : n]] if len(before) == len(data) else []
    raise MismatchError(
        f"{title} changes {f'argument {changed[0]}' if changed else 'its arguments'} in place.",
        why="it may run on the same samples again: for the check of its first call, in another call, after a loss.",
        do="write x = x - 1 instead of x -= 1 or x.sub_(1); or begin with x = x.clone().",
    )


def read_parameter_marks(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return versions, and digests of some words: changes through `.data`, as MoCo makes them, leave the versions."""
    return [(version_of(each), fingerprint([each.detach()], is_whole=False)) for each in parameters]


def refuse_changed_parameters(
    parameters: Sequence[torch.Tensor], names: Sequence[str], before: list[tuple[int, int]], title: str
) -> None:
    """Raise, naming the first one. `before` is what `read_parameter_marks` returned."""
    now = read_parameter_marks(parameters)
    changed = [name for name, mark, then in zip(names, now, before, strict=True) if mark != then]
    if changed:
        raise MismatchError(
            f"{title} changes the parameter {changed[0]} in place.",
            why="it runs once for each replica: workers with different samples would train different weights.",
            do="change weights after strategy.backward, outside of the function: also those of a momentum encoder."
            " nn.Embedding(max_norm=...) changes its weight in the forward: renormalise it in the loop instead.",
        )
