"""Knowing when the outermost backward ends.

Autograd's own callback at the end of a backward fires at the end of inner ones too (re-entrant checkpointing), so
`torch.autograd.backward`, which every `loss.backward()` goes through, tells its listeners when it begins and ends.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Listener(Protocol):
    def enter_backward(self, roots: Sequence[torch.Tensor]) -> None: ...

    def leave_backward(self) -> None: ...

    def abandon_backward(self) -> None: ...


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def listen_to_backward(listener: Listener) -> None:
    """From now on this listener hears of every backward, as long as it lives."""
    if not hasattr(torch.autograd.backward, "_tells_duoka"):
        torch.autograd.backward = _tell(torch.autograd.backward)
    _listeners.add(listener)


def _tell(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def told(tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        for listener in _listeners:
            listener.enter_backward(roots)
        try:
            backward(roots, *args, **kwargs)
        except BaseException:
            for listener in _listeners:
                listener.abandon_backward()
            raise
        for listener in _listeners:
            listener.leave_backward()

    told._tells_duoka = True  # type: ignore[attr-defined]
    return told
