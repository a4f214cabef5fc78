"""BatchNorm over the whole global batch, forward and backward, on any device.

`torch.nn.functional.batch_norm`, which every BatchNorm layer goes through, asks the other workers while one worker's
part of a batch is computed. So no layer is replaced, and copies of a model (an average of weights) work as before.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from duoka.collectives.collective import Collective
from duoka.errors import WorkerLost


@dataclass(frozen=True)
class SyncedPart:
    """What is computed now: one worker's part of a global batch."""

    num_samples: int  # 0: on samples of others, which are left out
    weight: float  # of its gradient in that of the whole batch


class Syncing(Protocol):
    """Whoever knows which part is computed."""

    @property
    def synced_part(self) -> SyncedPart | None:
        """None outside of training."""
        ...


_runs: weakref.WeakKeyDictionary[Syncing, Collective] = weakref.WeakKeyDictionary()


def sync_batch_norm(syncing: Syncing, collective: Collective) -> None:
    """From now on BatchNorm normalises with the statistics of the whole batch, while a part of one is computed."""
    if not hasattr(F.batch_norm, "_asks_duoka"):
        F.batch_norm = _ask(F.batch_norm)
    _runs[syncing] = collective


def restart_needed(num_lost: int, num_workers: int) -> WorkerLost:
    """The error where a worker was lost whose part of a step no other worker can compute."""
    return WorkerLost(
        f"{num_lost} of {num_workers} workers {'was' if num_lost == 1 else 'were'} lost in a step that cannot be"
        " computed again.",
        why="a plain loop, or sync_batchnorm=True, computes one replica per worker.",
        do="nothing, where the log says that all workers restart. They can from a checkpoint, and from snapshots in"
        " memory: these need strategy.epochs or strategy.steps around the training, and a prepared optimizer. Without"
        " sync_batchnorm, strategy.backward needs no restart.",
    )


def _ask(batch_norm: Any) -> Any:
    def asked(
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        syncing = next((each for each in _runs if each.synced_part is not None), None) if training else None
        if syncing is None:
            return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        mean, variance, count = _whole_batch(input, syncing, _runs[syncing])
        _update(running_mean, running_var, mean, variance, count, momentum)
        out = _Normalise.apply(input, mean, torch.rsqrt(variance + eps), count, syncing, _runs[syncing])
        shape = _per_channel(input)
        out = out if weight is None else out * weight.view(shape)
        out = out if bias is None else out + bias.view(shape)
        return out.to(input.dtype)

    asked._asks_duoka = True  # type: ignore[attr-defined]
    return asked


def _whole_batch(
    input: torch.Tensor, syncing: Syncing, collective: Collective
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Mean and (biased) variance over all rows of all workers, and how many values they were made of."""
    own = input.detach().to(_statistics_dtype(input))
    axes = _all_but_channels(input)
    values = own.numel() // own.shape[1]
    variance, mean = torch.var_mean(own, axes, correction=0)
    part = syncing.synced_part
    is_counted = part is not None and part.num_samples > 0  # a stand-in is left out
    packed = np.append(torch.cat([mean, variance * values]).double().cpu().numpy(), float(values))
    gathered = [each for each in _gather(packed if is_counted else packed[:0], collective) if each.size]
    channels = own.shape[1]
    count, whole_mean, whole_squares = 0.0, np.zeros(channels), np.zeros(channels)
    for each in gathered:  # in the order of workers, so that all of them get the same bits
        n = each[-1]
        shift = each[:channels] - whole_mean
        whole_squares = whole_squares + each[channels:-1] + shift**2 * (count * n / (count + n))
        whole_mean = whole_mean + shift * (n / (count + n))
        count += n
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}")
    as_tensor = {"dtype": _statistics_dtype(input), "device": input.device}
    return (
        torch.as_tensor(whole_mean, **as_tensor),
        torch.as_tensor(whole_squares / count, **as_tensor),
        int(count),
    )


def _gather(mine: np.ndarray, collective: Collective) -> list[np.ndarray]:
    nothing = mine[:0]
    return collective.all_gather([mine] + [nothing] * (len(collective.replicas) - 1))


@torch.no_grad()
def _update(
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    count: int,
    momentum: float,
) -> None:
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)


class _Normalise(torch.autograd.Function):
    """(x - mean) / std, where mean and std came from everybody's x: so gradients come from everybody too."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        mean: torch.Tensor,
        inverse_std: torch.Tensor,
        count: int,
        syncing: Syncing,
        collective: Collective,
    ) -> torch.Tensor:
        shape = _per_channel(input)
        normal = (input - mean.view(shape)) * inverse_std.view(shape)
        ctx.save_for_backward(normal, inverse_std)
        ctx.count, ctx.syncing, ctx.collective = count, syncing, collective
        return normal.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        normal, inverse_std = ctx.saved_tensors
        shape, axes = _per_channel(normal), _all_but_channels(normal)
        gradient = gradient.to(normal.dtype)
        sums = torch.cat([gradient.sum(axes), (gradient * normal).sum(axes)])
        # Every worker's loss is the mean over its own rows; the sums need the weights of the whole batch.
        part = ctx.syncing.synced_part
        weight = 1.0 if part is None else part.weight
        own = (sums.double() * weight).cpu().numpy()
        gathered = [each for each in _gather(own if weight else own[:0], ctx.collective) if each.size]
        total = np.sum(gathered, axis=0) / weight if weight else np.zeros_like(own)
        mean_gradient, mean_product = torch.as_tensor(total / ctx.count).to(sums).chunk(2)
        result = gradient - mean_gradient.view(shape) - normal * mean_product.view(shape)
        return result * inverse_std.view(shape), None, None, None, None, None


def _statistics_dtype(input: torch.Tensor) -> torch.dtype:
    return torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype


def _per_channel(input: torch.Tensor) -> list[int]:
    return [1, -1] + [1] * (input.dim() - 2)


def _all_but_channels(input: torch.Tensor) -> list[int]:
    return [axis for axis in range(input.dim()) if axis != 1]
