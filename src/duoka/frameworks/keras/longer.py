"""A `fit` that was over when the run was saved, and is asked for another number of epochs now."""

from __future__ import annotations

from typing import Any

from duoka.errors import CheckpointError

Record = dict[str, Any]


def goes_on(record: Record, trainings: Record, number: int, num_epochs: int, name: str) -> bool:
    """Whether the `fit` of this number has more to train; `record` is what came of it, `trainings` where all was saved.

    It goes on only where that is exact: nothing was trained after it, and its end has not changed its model. Otherwise
    other epochs are refused: never is less trained than was asked for without a word. One that a callback has stopped
    is over, however many epochs it is asked for: a longer one would have been stopped there, too.
    """
    had, is_stopped = record["epochs"], record["is_stopped"]
    if num_epochs == had or (num_epochs > had and is_stopped):
        return False
    if num_epochs < had:
        raise _other_epochs(name, had, num_epochs, "the weights of an earlier epoch are not there any more.")
    is_last = (trainings["fits"], trainings["calls"]) == (number, record["calls"]) and not trainings["is_open"]
    if not is_last:
        raise _other_epochs(name, had, num_epochs, "training went on after it, from the weights that it ended with.")
    if trainings["end"] is None:
        why = (
            "its end has changed the model, and the weights before that were not saved: averages of an optimizer with"
            " use_ema take their place then, or restore_best_weights, or what a callback of yours does in on_train_end."
        )
        raise _other_epochs(name, had, num_epochs, why)
    return True


def _other_epochs(name: str, had: int, num_epochs: int, why: str) -> CheckpointError:
    then = f", and train on in another fit after it (initial_epoch={had})" if num_epochs > had else ""
    return CheckpointError(
        f"A fit of {name} was over after {had} epochs when this run was saved, and is asked for {num_epochs} now.",
        why=why,
        do=f"ask for {had} epochs there{then}; or begin a new run in another directory.",
    )
