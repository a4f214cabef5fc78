"""The run's state in PyTorch: what strategies, checkpoints and replacement workers ask of a training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from duoka.collectives.collective import Collective
from duoka.errors import CheckpointError, MismatchError
from duoka.frameworks.exchange.checks import Checks
from duoka.frameworks.torch.function.call import Calls
from duoka.frameworks.torch.function.loaders import Loaders
from duoka.frameworks.torch.function.rejoin import OUTSIDE, SECOND_LOOP, Rejoin
from duoka.frameworks.torch.function.train_state import TrainState, refuse_other_framework
from duoka.frameworks.torch.plain.exchange import PlainExchange
from duoka.frameworks.torch.plain.loop import PlainLoop
from duoka.frameworks.torch.prepared import Prepared
from duoka.frameworks.torch.style import FUNCTION, Styles
from duoka.strategies.borders import Borders
from duoka.strategies.registered_state import RegisteredState
from duoka.strategies.training_loop import Position, TrainingLoop


class Training:
    """Boundaries between steps, and the state there. The base of `TorchAdapter`, which makes the parts."""

    _collective: Collective
    _styles: Styles
    _calls: Calls
    _gradients: PlainExchange
    _loop: PlainLoop
    _parts: Prepared
    _loaders: Loaders
    _rejoin: Rejoin
    _training_loop: TrainingLoop
    checks: Checks
    registered: RegisteredState
    tell_once: Any
    _borders: Borders

    def _make_state(self) -> None:
        self._train_state = TrainState(
            self._parts, self._calls.trained, self._calls, self._loaders, self._training_loop
        )
        self._num_steps = 0  # batches of plain loops in which an optimizer has stepped
        self._is_all_inside = True  # of one loop over epochs or steps: what is trained

    @property
    def step(self) -> int:
        return self._calls.number if self._styles.is_function else self._num_steps

    @property
    def batch(self) -> int:
        """Exchanges: a number that no worker can be ahead of by more than one."""
        if self._styles.is_function:
            return self._calls.number
        return self._gradients.number if self._collective.num_replicas > 1 else self._num_steps

    @property
    def boundary(self) -> Position | None:
        """Where the script is in its loop, for telling two states of one step apart."""
        return self._training_loop.position

    @property
    def is_state_wanted(self) -> bool:
        return self._borders.is_state_wanted

    # What is saved and restored.

    @property
    def can_be_snapshotted(self) -> bool:
        """Whether its state is all that a restart of all workers needs."""
        return self._is_all_inside and self.is_only_strategy and self._styles.is_known

    @property
    def every_worker_keeps_its_state(self) -> bool:
        """In a plain loop the script may count what it sees of its own samples."""
        return self._styles.is_plain

    @property
    def is_only_strategy(self) -> bool:
        raise NotImplementedError

    def capture(self) -> dict[str, Any]:
        position = self._training_loop.position
        facts = {"framework": "torch", "style": self._styles.name, "step": self.step, "batch": self.batch}
        facts |= {"epoch": 0 if position is None else position.number, "agreed_step": self.checks.agreed_step}
        plain = self._gradients.capture() | {"steps": self._num_steps, "batches": self._loop.num_trained}
        return facts | self._train_state.capture(self.registered) | {"plain": plain}

    def restore(self, state: dict[str, Any]) -> None:
        refuse_other_framework(state)
        if "style" not in state:
            raise CheckpointError(
                "This checkpoint was written by Duoka 0.1, which trained by another contract.",
                do="begin a new run in another directory; strategy.load reads the weights that strategy.save wrote.",
            )
        self._train_state.check(state)
        self._training_loop.resume(state)

    def put(self, state: dict[str, Any], *, is_again: bool) -> None:
        self._choose_saved_style(state["style"])
        lines = [*self._train_state.check(state), *self.registered.check(state["registered"])]
        if lines and not is_again:
            self.tell_once(f"the run continues with the saved values: {'; '.join(lines)}")
        if self._styles.is_plain and not is_again and self._collective.num_replicas > 1:
            self._tell_of_registered(state)
        self._train_state.put(state, self.registered, is_again=is_again)
        self._gradients.restore(state["plain"])
        self._num_steps, self._loop.num_trained = state["plain"]["steps"], state["plain"]["batches"]
        if (rehearsal := self._collective.rehearsal) is not None:
            rehearsal.note_resumed()

    def _tell_of_registered(self, state: dict[str, Any]) -> None:
        """A plain loop may count its own samples. A checkpoint has the values of the worker that wrote it."""
        if self._borders.restart_step is not None:
            return  # a snapshot in memory has those of each worker
        if names := ", ".join(state["registered"]["values"]):
            self.tell_once(f"registered values continue on all workers as the main worker had them: {names}")

    def _choose_saved_style(self, name: str) -> None:
        if name == FUNCTION:
            self._styles.choose_function()
        else:
            self.choose_plain()

    def choose_plain(self) -> None:
        raise NotImplementedError

    @property
    def is_repeating(self) -> bool:
        return self._training_loop.is_pending

    def come_to_save(self) -> bool:
        raise CheckpointError(
            "save() of a checkpoint was called in a PyTorch script.",
            why="state is saved at step boundaries, in strategy.epochs and strategy.steps.",
            do="use every_steps= or every_s= of strategy.checkpoint. To write weights at any place, use"
            " strategy.save(path, model.state_dict()).",
        )

    # The loop over epochs or steps.

    def walk_epochs(self, num_epochs: int) -> Iterator[int]:
        self._resume_before_loop()
        self._rejoin.follow()
        return self._training_loop.epochs(num_epochs)

    def walk_steps(self, num_steps: int) -> Iterator[int]:
        self._resume_before_loop()
        self._rejoin.follow()
        return self._training_loop.steps(num_steps)

    def _resume_before_loop(self) -> None:
        rehearsal = self._collective.rehearsal
        if rehearsal is not None and (state := rehearsal.load_state()) is not None:
            self.restore(state)
        self._borders.resume(self)

    def at_start(self, *, is_second: bool) -> None:
        self._borders.at_start(self)
        if is_second:
            self._is_all_inside = False
            self._rejoin.refuse(SECOND_LOOP)
        if self._rejoin.is_arriving:
            self._training_loop.resume(self._rejoin.await_state())

    @property
    def is_arriving(self) -> bool:
        return self._rejoin.is_arriving

    @property
    def is_restarted(self) -> bool:
        return self._borders.restart_step is not None

    def arrive(self, epoch: int) -> dict[str, Any]:
        return self._rejoin.join(epoch)

    def begin_epoch(self) -> None:
        self._loaders.begin_epoch()
        self._train_state.begin_epoch()

    def at_boundary(self) -> None:
        """Nothing is saved before the style is known, nor while gradients of an accumulation wait on each worker."""
        self._loop.leave_generators()  # a step is over, also where the iterator of its batch is kept
        if not self._styles.is_plain:
            self._rejoin.allow()
        if not self._styles.is_known or self._gradients.has_kept:
            return
        if (rehearsal := self._collective.rehearsal) is not None and (position := self.boundary) is not None:
            number = self.step if self._styles.is_function else self._loop.num_trained
            rehearsal.at_training_boundary(number, position.describe(), self.capture)
        self._borders.at_border(self)

    def at_end(self) -> None:
        self._borders.at_end(self)

    def come_to_end(self) -> None:
        """The script has come to its end. A loop that it has left by `break` is finished."""
        loop = self._training_loop
        if self._styles.is_known and loop.has_begun and not loop.is_over and not loop.is_pending:
            loop.finish()
            self._borders.at_end(self)

    def check_inside(self) -> None:
        """A step is about to be computed: is it where a run can be resumed, and joined?"""
        if self._training_loop.is_inside:
            return
        if self._borders.is_state_wanted:
            self._training_loop.check_inside()
        self._is_all_inside = False
        if self._rejoin.is_possible:
            self._rejoin.refuse(OUTSIDE)

    def tell(self, text: str) -> None:
        self.tell_once(text)

    def refuse_scope(self) -> MismatchError:
        return MismatchError(
            "This strategy has prepared PyTorch models; its scope is for Keras models.",
            do="pass models, optimizers and loaders to strategy.prepare.",
        )
