"""Arrays as the collectives see them: NumPy at the surface, nothing copied where the memory can be shared."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duoka.errors import MismatchError

Array = NDArray[Any]
_NO_NUMBERS = ("string", "variant", "resource")  # of TensorFlow: asked for the memory of text, it ends the process


def as_array(value: Any) -> Array:
    """The same memory as a NumPy array: NumPy arrays, CPU tensors of PyTorch, TensorFlow and JAX, numbers.

    bfloat16 is the type of ml_dtypes, which TensorFlow and JAX bring along.
    """
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):  # a tensor that tracks gradients does not lend its memory
        value = value.detach()
    if hasattr(value, "read_value"):  # nor does a variable of TensorFlow
        value = value.value()  # half the time of read_value, which adds an operation
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        return _read_bfloat16(value)
    if getattr(getattr(value, "dtype", None), "name", "") in _NO_NUMBERS:
        raise MismatchError(
            f"A {type(value).__name__} of type {value.dtype.name} cannot be read as an array of numbers.",
            do="leave it out, or turn it into numbers first: tf.keras.layers.StringLookup, tf.strings.to_number.",
        )
    for convert in (np.from_dlpack, memoryview, np.asarray):
        # Each knows types that the others do not: DLPack no strings, buffers no bfloat16.
        try:
            return np.asarray(convert(value))
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
            # Not the error itself: it would keep its frames, and so the user's, with batches and iterators in them.
            reason = str(error)
    raise MismatchError(
        f"A {type(value).__name__} of type {getattr(value, 'dtype', 'unknown')} cannot be read as an array.",
        why=reason,
        do="move it to the CPU, or convert it first.",
    )


def _read_bfloat16(tensor: Any) -> Array:
    """PyTorch does not give its bfloat16 to NumPy, but the same bits as integers."""
    try:
        import ml_dtypes
    except ImportError:
        raise MismatchError(
            "A bfloat16 tensor cannot be read as an array.",
            why="NumPy has no such type without the package ml_dtypes.",
            do="pip install ml_dtypes, or pass tensor.float().",
        ) from None
    bits = tensor.view(sys.modules["torch"].int16)
    return np.from_dlpack(bits).view(ml_dtypes.bfloat16)


@functools.cache
def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which values of this type are added up.

    16-bit floats are added in float32 and rounded once, at the end; all others in their own type.

    >>> sum_dtype(np.dtype("float16"))
    dtype('float32')
    """
    if dtype.name in ("float16", "bfloat16"):
        return np.dtype(np.float32)
    if dtype.kind in "fiuc":
        return dtype
    raise MismatchError(
        f"Values of type {dtype} cannot be added up.",
        do="convert them first: numbers of 8 to 64 bits, float, complex or bfloat16; a bool to an integer.",
    )


def add(left: Array, right: Array, out: Array | None = None) -> Array:
    """left + right. Infinities and NaN are the user's: a GradScaler looks for them, so nothing is said."""
    with np.errstate(all="ignore"):
        if out is None:
            return np.add(left, right)
        if out.size == 1:
            out[:] = left + right  # over one of its terms, NumPy adds a single number the other way round: another NaN
            return out
        return np.add(left, right, out=out)


def weigh(value: Array, weight: float | None, out: Array) -> None:
    """out = value * weight, in out's type. A weight of zero leaves the value out: NaN times zero is NaN."""
    if weight is None:
        np.copyto(out, value.reshape(-1), casting="same_kind")
    elif weight == 0:
        out.fill(0)
    else:
        # The weight is rounded to out's type first, so that a 16-bit value is never weighed in 16 bits.
        np.multiply(value.reshape(-1), out.dtype.type(weight), out=out, dtype=out.dtype, casting="same_kind")


def check_alike(arrays: Sequence[Array]) -> Array:
    """The first of them, once it is known that all have its type and shape."""
    like = arrays[0]
    if any(a.shape != like.shape or a.dtype != like.dtype for a in arrays):
        raise MismatchError(f"Values of one call differ: {[(a.shape, str(a.dtype)) for a in arrays]}.")
    return like


def check_weights(weights: Sequence[float]) -> list[float | None]:
    given: list[float | None] = [float(weight) for weight in weights]
    if any(weight is None or not 0 <= weight < math.inf for weight in given):
        raise MismatchError(f"Weights must be finite and not negative: {given}.")
    return given


def check_out(out: Any, like: Array) -> Array:
    """The memory that the result goes to: the caller's, if it can really be written, or new."""
    if out is None:
        return np.empty(like.shape, like.dtype)
    target = as_array(out)
    is_shared = isinstance(out, np.ndarray) or hasattr(out, "__dlpack__")
    if not is_shared or not target.flags.writeable:
        raise MismatchError(
            f"A result cannot be written into a {type(out).__name__}.", do="give a NumPy array or tensor."
        )
    if target.shape != like.shape or target.dtype != like.dtype:
        raise MismatchError(
            f"out is {target.dtype}{list(target.shape)}, the values are {like.dtype}{list(like.shape)}.",
            do="give an out of the same type and shape, or none.",
        )
    return target


def deliver(result: Array, target: Array, divisor: float | None) -> None:
    """Write a sum, or with a divisor a mean, rounding sums of 16-bit values once."""
    if divisor is None:
        np.copyto(target, result, casting="unsafe")
    elif divisor == 0:
        raise MismatchError("The mean of nothing: all weights are zero.", do="leave out the call when nobody has rows.")
    else:
        np.divide(result, result.dtype.type(divisor), out=target, casting="unsafe")
