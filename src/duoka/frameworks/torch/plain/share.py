"""What a worker contributes to a global batch in plain style: its samples, and the weight of its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from duoka.frameworks.torch.function.note import NO_DIGESTS, Digests


@dataclass(frozen=True)
class Share:
    """One worker's part of one global batch.

    >>> Share.of(2, 8, "batch 0").weight
    0.25
    """

    num_samples: int  # 0: it runs on samples of others, and the results are dropped
    title: str
    weight: float  # of this worker's gradient in the mean over the global batch
    statistics_weight: float  # of its running statistics
    total: int = 0  # samples of the global batch
    last_size: int = 0  # with the first batch: samples of the loader's last one, if it is smaller
    is_counted: bool = False  # the weight is not known before all workers have told how many samples they have
    is_evaluation: bool = False  # gradients are off, or all models are in eval mode
    digests: Digests = NO_DIGESTS

    @classmethod
    def of(
        cls,
        num_samples: int,
        total: int,
        title: str,
        digests: Digests = NO_DIGESTS,
        last_size: int = 0,
        *,
        is_evaluation: bool = False,
    ) -> Share:
        weight = num_samples / total
        return cls(num_samples, title, weight, weight, total, last_size, is_evaluation=is_evaluation, digests=digests)
