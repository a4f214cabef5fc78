"""The run as a notebook sees it: nothing runs yet, and `launch` starts the workers for one function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from duoka.checkpoint.codec import Codec
from duoka.collectives.shm import SharedMemory
from duoka.devices.device import Device
from duoka.errors import LaunchError
from duoka.monitor.progress import Position, Progress
from duoka.runtime.launch import launch as launch_workers
from duoka.runtime.plan import Plan
from duoka.runtime.run import describe_ending, describe_plan, say
from duoka.runtime.worker import Attachment, attachment
from duoka.strategies.borders import Borders
from duoka.strategies.strategy import Adapter, Loop, Options
from duoka.worker_session import WorkerSession


class NotebookSession:
    """Several workers, and no script to start them with: everything but `launch` has to wait for it.

    In the workers that it starts, this same object is there, too; `join` makes each of them a session of its own.
    """

    def __init__(
        self, plan: Plan, reason: str, join: Callable[[Attachment], WorkerSession], *, log_placement: bool
    ) -> None:
        self._plan, self._reason, self._join, self._log_placement = plan, reason, join, log_placement
        self.num_replicas = plan.num_replicas
        self.seed = plan.seed
        self.num_workers = plan.num_workers
        self._inside: WorkerSession | None = None

    @property
    def _joined(self) -> WorkerSession:
        if self._inside is None:
            attached = attachment()
            if attached is None:
                raise LaunchError(
                    f"{self.num_workers} workers cannot be started from here by themselves.",
                    why=self._reason,
                    do="put the training into a function and call strategy.launch(function),"
                    " or into a script: `duoka run script.py`.",
                )
            self._inside = self._join(attached)
            if self._log_placement:
                self._inside.log_placement()
        return self._inside

    @property
    def collective(self) -> SharedMemory:
        return self._joined.collective

    @property
    def worker(self) -> int:
        return self._joined.worker

    @property
    def device(self) -> Device:
        return self._joined.device

    @property
    def native_device(self) -> Any:
        return self._joined.native_device

    def progress(
        self,
        iterable: Iterable[Any] | None,
        desc: str | None,
        total: int | None,
        is_main: Callable[[], bool],
        position: Position,
    ) -> Progress:
        return self._joined.progress(iterable, desc, total, is_main, position)

    @property
    def borders(self) -> Borders:
        return self._joined.borders

    @property
    def run(self) -> str:
        return self._joined.run

    @property
    def is_restarted(self) -> bool:
        return self._inside is not None and self._inside.is_restarted

    @property
    def is_newcomer(self) -> bool:
        return self._joined.is_newcomer

    def say(self, text: str) -> None:
        self._joined.say(text)

    def at_exit(self, function: Callable[[], None]) -> None:
        self._joined.at_exit(function)

    def at_end_of_script(self, function: Callable[[], None]) -> None:
        self._joined.at_end_of_script(function)

    def fingerprint(self) -> dict[str, str]:
        return self._joined.fingerprint()

    def list_codecs(self) -> list[Codec]:
        return self._joined.list_codecs()

    def listen_for_termination(self) -> Callable[[], bool]:
        return self._joined.listen_for_termination()

    def keep_checkpoints(self, directory: str, *, resumes: bool) -> None:
        self._joined.keep_checkpoints(directory, resumes=resumes)

    def say_that_it_ends(self) -> None:
        self._joined.say_that_it_ends()

    def say_whether_it_trains(self, is_training: bool) -> None:
        self._joined.say_whether_it_trains(is_training)

    def save_state(self, path: Any, state: Any) -> None:
        self._joined.save_state(path, state)

    def load_state(self, path: Any, device: Any) -> Any:
        return self._joined.load_state(path, device)

    def adapter(self, objects: Sequence[Any], options: Options) -> Adapter:
        return self._joined.adapter(objects, options)

    def adapter_to(self, framework_name: str, options: Options) -> Adapter:
        return self._joined.adapter_to(framework_name, options)

    def loop(self, strategy: Any, options: Options) -> Loop:
        return self._joined.loop(strategy, options)

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        for line in (*self._plan.notes, describe_plan(self._plan)):
            say(line)
        # A function may depend on what ran in the notebook before it, which a worker that comes back would not find so.
        launched = launch_workers(replace(self._plan, respawn=False), lambda: function(*args), say)
        if launched.outcome.exit_code or not launched.results:
            line, traceback = describe_ending(launched.outcome, self._plan)
            raise LaunchError(line or "No worker came back with a result.", why=traceback.strip())
        return launched.results[min(launched.results)]
