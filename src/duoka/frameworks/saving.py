"""How a state is saved: NumPy's arrays always, a framework's tensors once a script has imported it."""

from __future__ import annotations

import importlib
import sys

from duoka.checkpoint.codec import Codec, NumpyCodec

_FRAMEWORKS = ("torch",)


def list_codecs() -> list[Codec]:
    modules = [f"duoka.frameworks.{name}.saving" for name in _FRAMEWORKS if sys.modules.get(name) is not None]
    return [NumpyCodec(), *(importlib.import_module(module).make_codec() for module in modules)]
