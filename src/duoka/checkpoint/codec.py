"""How arrays of one library go into a file and come out again. NumPy's are here; a framework brings its own."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import numpy as np

from duoka.checkpoint.storage import TYPE_NAMES, StoredTensor
from duoka.errors import CheckpointError


class Codec(Protocol):
    kind: str  # written into files
    reader: str  # what the safetensors library calls it

    def owns(self, value: Any) -> bool: ...

    def identity(self, value: Any) -> Hashable:
        """Equal for two values that are the same memory seen in the same way: they are stored once."""
        ...

    def store(self, value: Any, place: str) -> tuple[StoredTensor, str]:
        """The value for a file, and what else must be known to make it again. Refuses what it cannot store."""
        ...

    def restore(self, tensor: Any, form: str, device: Any) -> Any:
        """The value again, in memory of its own, from what the safetensors library gives for this kind."""
        ...


class NumpyCodec:
    """Arrays and NumPy's own numbers. They stay on the CPU, whatever the device."""

    kind, reader = "numpy", "numpy"

    def owns(self, value: Any) -> bool:
        return isinstance(value, (np.ndarray, np.generic))

    def identity(self, value: Any) -> Hashable:
        return id(value)

    def store(self, value: Any, place: str) -> tuple[StoredTensor, str]:
        array = np.asarray(value)
        form = "number" if isinstance(value, np.generic) else ""
        if array.dtype.kind == "c" and array.dtype.itemsize <= 16:
            array = np.stack([array.real, array.imag], axis=-1)
            form += " complex"
        name = TYPE_NAMES.get(array.dtype.name)
        if name is None:
            raise CheckpointError(
                f"{place} is an array of {array.dtype}, which cannot be saved.", do="convert it to numbers first."
            )
        little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        return StoredTensor(name, array.shape, array.nbytes, array.itemsize, lambda: little.reshape(-1)), form

    def restore(self, tensor: Any, form: str, device: Any) -> Any:
        array = np.array(tensor)
        if "complex" in form:
            array = array.view(np.result_type(array.dtype, np.complex64))[..., 0]
        return array[()] if "number" in form else array
