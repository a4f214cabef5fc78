"""On JAX nothing is assigned: what a step does to weights beside training them shows in its jaxpr."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from keras import Model

from duoka.frameworks.keras.recorder import NeedsWholeShares
from duoka.frameworks.replacing import shadowing

_trained = Primitive("duoka_trained")  # stands for the optimizer
_trained.multiple_results = True
_trained.def_abstract_eval(lambda *kinds: list(kinds))


def check(model: Any, state: Any, batch: Any) -> None:
    """Raise NeedsWholeShares for a step of the user's own that does not hand weights to the optimizer as they come, or
    uses what the optimizer gives, beyond handing it on."""
    if type(model).train_step is Model.train_step:
        return
    with shadowing(model.optimizer, {"stateless_apply": _apply}):
        closed, shape = jax.make_jaxpr(model.train_step, return_shape=True)(state, batch)
    calls = [equation for equation in closed.jaxpr.eqns if equation.primitive is _trained]
    if len(calls) > 1:
        raise NeedsWholeShares("it applies gradients more than once")
    trained = {id(variable) for call in calls for variable in call.outvars}
    logs, (weights, *_) = shape
    num_logs, num_weights = len(jax.tree.leaves(logs)), len(jax.tree.leaves(weights))
    num_other, num_slots = (len(jax.tree.leaves(part)) for part in shape[1][1:3])
    results = closed.jaxpr.outvars
    slots_at = num_logs + num_weights + num_other
    others = [*results[:num_logs], *results[num_logs + num_weights : slots_at], *results[slots_at + num_slots :]]
    used = [*(variable for equation in closed.jaxpr.eqns for variable in equation.invars), *others]
    if any(id(variable) in trained for variable in used):
        raise NeedsWholeShares("it uses weights after it has applied gradients")
    untouched = {id(variable) for variable in closed.jaxpr.invars}
    given = [variable for call in calls for variable in call.invars]
    if any(id(variable) not in untouched for variable in given):
        raise NeedsWholeShares("it changes weights before it applies gradients")
    if any(id(variable) not in untouched | trained for variable in results[num_logs : num_logs + num_weights]):
        raise NeedsWholeShares("it changes weights by itself")


def _apply(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> tuple[list[Any], list[Any]]:
    given = [*trainable_variables, *optimizer_variables]
    results = _trained.bind(*map(jax.numpy.asarray, given))
    return results[: len(trainable_variables)], results[len(trainable_variables) :]
