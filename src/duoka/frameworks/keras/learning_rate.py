"""The learning rate of an optimizer, where it is a number that callbacks may change."""

from __future__ import annotations

from typing import Any

import keras


def rate_of(optimizer: Any) -> Any:
    """The variable; None where a schedule makes the rate, or there is no optimizer.

    One that scales losses has a rate of its own that nobody uses: what counts is that of the optimizer inside.
    """
    found = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    return found if isinstance(found, keras.Variable) else None
