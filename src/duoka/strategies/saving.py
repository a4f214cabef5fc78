"""States in files: one that the user asks for, and the checkpoints of a whole run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from duoka.checkpoint.store import Store
from duoka.errors import CheckpointError
from duoka.strategies.checkpoints import Checkpoints, missing
from duoka.strategies.rhythm import Rhythm
from duoka.strategies.strategy import Adapter, Options, Session
from duoka.strategies.turn import Turn


class Saving:
    """What a strategy offers for saving."""

    _session: Session
    _options: Options
    _adapter: Adapter | None
    _checkpoints: Checkpoints | None = None

    def checkpoint(
        self,
        directory: Any,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep: int | None = 3,
        resume: bool = True,
    ) -> Checkpoints:
        """Save the whole run every so many steps or seconds (ten minutes), and go on from what is there already.

        Call it once: in PyTorch after `prepare`, else anywhere before training. It looks for the newest verified
        checkpoint, and puts the run back to it, at once or when training begins: the next batch is the exact next one,
        and the bits are those of a run that never stopped, on any number of workers. Without one the run begins.
        `resume=False` begins a new run and moves older checkpoints aside. `strategy.register` names what you keep
        yourself. On SIGTERM the step is finished and saved.

        >>> strategy.checkpoint("checkpoints", every_steps=500)  # doctest: +SKIP
        >>> for epoch in strategy.epochs(10):  # doctest: +SKIP
        ...     train(loader)
        """
        if self._checkpoints is not None:
            raise CheckpointError("This run has a directory of checkpoints already.", do="call checkpoint once.")
        if (rehearsal := self._session.collective.rehearsal) is not None:
            directory = rehearsal.checkpoint_directory  # a run must not resume from the run before it
        rhythm = Rhythm(every_steps, every_s)
        store = Store(directory, keep, self._session.say)
        flags = {"exact": self._options.exact, "sync_batchnorm": self._options.sync_batchnorm}
        checkpoints = Checkpoints(self._session, store, rhythm, flags, self._is_main)
        checkpoints.find() if resume else checkpoints.set_aside()
        if self._adapter is not None and self._adapter.is_known_when_prepared:
            checkpoints.begin(self._adapter)
        self._session.borders.add(start=checkpoints.at_start, border=checkpoints.at_border, end=checkpoints.at_end)
        self._checkpoints = checkpoints
        return checkpoints

    def _register_objects(self, things: Mapping[str, Any]) -> None:
        """For Keras and TensorFlow: objects with `state_dict` and `load_state_dict`."""
        for name, thing in things.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise CheckpointError(
                    f"{name!r} cannot be registered.",
                    why=f"a {type(thing).__name__} has no state_dict and load_state_dict.",
                    do="put it into an object that has them.",
                )
        self._session.borders.also.objects.update(things)

    def _is_main(self) -> bool:
        raise NotImplementedError

    def _refuse_in_evaluation(self, call: str) -> None:
        raise NotImplementedError

    def save(self, path: Any, state: Any, *, deadline_s: float = 1800.0) -> bool:
        """Write a state (dictionaries and lists of tensors, numbers, strings) to one file, once, on the main worker.

        All workers call it and wait until the file is there, whole, in the place of the old one; when it cannot be
        written, all of them raise the same error. Nothing happens in a run that is resumed, before it has come to where
        it was. Returns whether it was saved. `load` reads it; so does every safetensors reader.
        """
        self._refuse_in_evaluation("save")
        is_done = self._is_saved_before(path)
        turn = Turn(self._session.collective, "strategy.save", deadline_s)
        if turn.is_mine():
            with turn.acting():
                if is_done:
                    self._tell_if_missing(path)
                else:
                    self._session.save_state(path, state)
        return not is_done or os.path.exists(path)

    def _is_saved_before(self, path: Any) -> bool:
        """Whether a script that is resumed comes by what it has saved before, with the weights of later."""
        if self._checkpoints is None:
            return self._session.is_restarted and self._adapter is not None and self._adapter.is_repeating
        return self._checkpoints.is_repeating or (self._checkpoints.is_ahead and os.path.exists(path))

    def _tell_if_missing(self, path: Any) -> None:
        if not os.path.exists(path):
            self._session.say(missing(path))
        elif self._checkpoints is not None and self._checkpoints.is_ahead:
            self._session.say(
                f"{path} is there, and is left as it is: the run was resumed, and what would be written before its"
                " first loop has the weights of the save; remove it to have it written"
            )

    def load(self, path: Any, *, device: Any = None) -> Any:
        """The state that `save` wrote, with its tensors on the CPU or on the device given. Every worker reads it."""
        return self._session.load_state(path, device)
