"""For the processes that tests start: Keras and TensorFlow import scikit-learn and JAX wherever they find them, and go
on without them where they do not. That takes a third of the time in which a worker starts, and no test needs it.
"""

import importlib.abc
import importlib.machinery
import sys

UNUSED = {
    "sklearn": ("keras.src.wrappers.",),
    "jax": ("keras.src.callbacks.orbax_checkpoint", "tensorflow.lite."),
}


class Unused(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None) -> importlib.machinery.ModuleSpec | None:
        if fullname in UNUSED and _importer().startswith(UNUSED[fullname]):
            raise ModuleNotFoundError(f"{fullname} is not needed here", name=fullname)
        return None


def _importer() -> str:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


sys.meta_path.insert(0, Unused())
