"""The end of the interpreter, as iterators meet it that a script has left behind."""

from __future__ import annotations

import sys


class Ending:
    """For classes with code that also runs when nothing is left to do it with.

    By then the names in modules may be None, those of modules (`sys`) and of functions alike. Those in classes are not,
    and what is asked here is no function of Python's, which would need a module.
    """

    _is_ending = staticmethod(sys.is_finalizing)
