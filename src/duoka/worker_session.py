"""The run as a process sees it that runs replicas: its device, its collective, and what a strategy asks for."""

from __future__ import annotations

import atexit
import importlib
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakMethod

from duoka.checkpoint.codec import Codec
from duoka.checkpoint.files import load_state, save_state
from duoka.collectives.shm import SharedMemory
from duoka.frameworks.native_device import native_device
from duoka.frameworks.recognise import framework_of
from duoka.frameworks.saving import list_codecs
from duoka.monitor.displays import open_display
from duoka.monitor.progress import Display, Position, Progress
from duoka.runtime.fingerprint import take_fingerprint
from duoka.runtime.plan import Plan
from duoka.runtime.run import say
from duoka.runtime.termination import Wish
from duoka.runtime.worker import attachment
from duoka.strategies.borders import Borders
from duoka.strategies.strategy import Adapter, Loop, Options
from duoka.topology.placement import Placement

_TOKEN = secrets.token_hex(3)  # beside a process id, which may come again; forks of this process have the same


class WorkerSession:
    """This process runs replicas: as a worker of a supervised run, or alone."""

    def __init__(self, plan: Plan, worker: int, collective: SharedMemory) -> None:
        self._plan = plan
        self.worker = worker
        self.collective = collective
        self.num_replicas = plan.num_replicas
        self.seed = plan.seed
        self.device = plan.devices[worker]
        self._display: Display | None = None
        self._logs_placement = False
        self.borders = Borders()
        attached = attachment()
        self._wish = Wish(None if attached is None else attached.link, collective.meeting.is_end_wished)

    @property
    def num_workers(self) -> int:
        return len(self.collective.workers)

    def adapter(self, objects: Sequence[Any], options: Options) -> Adapter:
        return self.adapter_to(framework_of(objects), options)

    def adapter_to(self, framework_name: str, options: Options) -> Adapter:
        framework = importlib.import_module(f"duoka.frameworks.{framework_name}.adapter")
        adapter: Adapter = framework.make_adapter(
            self.collective, self._plan.seed, self.device, self._complete(options)
        )
        come_to_end = WeakMethod(adapter.come_to_end)  # a strategy that is dropped is not kept for it

        def tell() -> None:
            if (method := come_to_end()) is not None:
                method()

        self.at_end_of_script(tell)
        return adapter

    def _complete(self, options: Options) -> Options:
        is_any_card = any(device.kind != "cpu" for device in self._plan.devices)
        self.collective.dealing.are_bits_promised = bool(options.exact) or not is_any_card
        return replace(
            options,
            transport=self._plan.transport,
            sees_only_its_card=attachment() is not None,
            borders=self.borders,
        )

    def loop(self, strategy: Any, options: Options) -> Loop:
        loops = importlib.import_module("duoka.frameworks.tensorflow.loop")
        loop: Loop = loops.make_loop(self.collective, strategy, self.device, self._complete(options))
        return loop

    def log_placement(self) -> None:
        """Say which replica runs where: now, and whenever replicas are dealt anew."""
        if not self._logs_placement:
            self._logs_placement = True
            self.collective.dealing.on_deal = self._say_placement
            self._say_placement(self.collective.placement)

    def _say_placement(self, placement: Placement) -> None:
        if self.worker == self.collective.main:
            for replica in range(self.num_replicas):
                worker = placement.owner(replica)
                say(f"replica {replica} -> worker {worker} -> {self._plan.devices[worker].name}")

    @property
    def native_device(self) -> Any:
        return native_device(self.device, is_only_card=attachment() is not None)

    def progress(
        self,
        iterable: Iterable[Any] | None,
        desc: str | None,
        total: int | None,
        is_main: Callable[[], bool],
        position: Position,
    ) -> Progress:
        if self._display is None:
            attached = attachment()
            self._display = open_display(sys.stderr, None if attached is None else attached.identity.columns)
        return Progress(iterable, desc, total, is_main, position, self._display)

    @property
    def run(self) -> str:
        attached = attachment()
        if attached is not None and attached.identity.run_directory:
            return Path(attached.identity.run_directory).name
        # Those that a notebook starts are one run with it; a process alone is one run, whatever it trains.
        return f"process-{os.getpid() if attached is None else attached.identity.supervisor}-{_TOKEN}"

    @property
    def is_restarted(self) -> bool:
        return self.borders.restart_step is not None

    @property
    def is_newcomer(self) -> bool:
        return self.collective.joining is not None and self.collective.joining.is_newcomer

    def say(self, text: str) -> None:
        say(text)

    def at_exit(self, function: Callable[[], None]) -> None:
        atexit.register(function)

    def at_end_of_script(self, function: Callable[[], None]) -> None:
        attached = attachment()
        if attached is not None:
            attached.checks_at_end.append(function)
        else:
            atexit.register(_unless_it_failed, function)  # Python shows an error from there

    def fingerprint(self) -> dict[str, str]:
        return take_fingerprint(self.device, self._plan.threads)

    def list_codecs(self) -> list[Codec]:
        return list_codecs()

    def listen_for_termination(self) -> Callable[[], bool]:
        self._wish.listen()
        return self._wish.is_there

    def keep_checkpoints(self, directory: str, *, resumes: bool) -> None:
        attached = attachment()
        if attached is not None:
            attached.link.send({"kind": "keeps", "directory": directory, "resumes": resumes})

    def say_that_it_ends(self) -> None:
        self._wish.tell_end()

    def say_whether_it_trains(self, is_training: bool) -> None:
        self._wish.tell_whether_it_trains(is_training)

    def save_state(self, path: Any, state: Any) -> None:
        save_state(path, state, list_codecs())

    def load_state(self, path: Any, device: Any) -> Any:
        return load_state(path, list_codecs(), device)

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Already on the workers: simply run it."""
        return function(*args)


def _unless_it_failed(function: Callable[[], None]) -> None:
    """At the end of a process alone: Python keeps the error that has ended its script."""
    if not hasattr(sys, "last_value"):
        function()
