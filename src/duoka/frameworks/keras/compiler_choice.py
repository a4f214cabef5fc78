"""Whether the user has said jit_compile=False. Keras keeps only what "auto" comes to, which on CPUs is False, too."""

from __future__ import annotations

from typing import Any

_CHOICE = "_refuses_compiler"  # an attribute of the instance, never saved


def watch_choice(model: Any) -> None:
    """Ask each `compile` of this model from now on. What was said before is not known any more."""
    attributes, kind = model.__dict__, type(model)
    is_auto = is_loading = False

    def resolve_auto_jit_compile() -> bool:
        nonlocal is_auto
        is_auto = True
        return bool(kind._resolve_auto_jit_compile(model))

    def compile(*args: Any, **kwargs: Any) -> None:
        nonlocal is_auto
        model._jit_compile = model._jit_compile or False  # what is None is asked for when it is first set
        is_auto = False
        kind.compile(model, *args, **kwargs)
        attributes[_CHOICE] = not (is_auto or is_loading or model.jit_compile)

    def compile_from_config(config: Any) -> None:
        """A saved model tells False where "auto" was said."""
        nonlocal is_loading
        is_loading = True
        try:
            kind.compile_from_config(model, config)
        finally:
            is_loading = False

    attributes["_resolve_auto_jit_compile"] = resolve_auto_jit_compile
    attributes["compile"] = compile
    attributes["compile_from_config"] = compile_from_config


def refuses_compiler(model: Any) -> bool:
    return bool(model.__dict__.get(_CHOICE))
