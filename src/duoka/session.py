"""The composition root: builds the parts in order and hands them to the strategies. Only wiring."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import duoka
from duoka.checkpoint.codec import Codec
from duoka.checkpoint.files import load_state, save_state
from duoka.collectives.arena import Arena
from duoka.collectives.board import Board
from duoka.collectives.chronicle import Chronicle
from duoka.collectives.joining import Joining
from duoka.collectives.mailbox import Mailbox
from duoka.collectives.meeting import Meeting
from duoka.collectives.shm import SharedMemory
from duoka.collectives.solo import solo
from duoka.devices.cpu import available_bytes
from duoka.devices.device import Device
from duoka.devices.memory_limit import limit_memory
from duoka.devices.settings import keep_first_gpus, limit_devices, read_settings
from duoka.devices.virtual import choose
from duoka.errors import LaunchError
from duoka.events import listen
from duoka.frameworks.handing import give, take
from duoka.frameworks.native_device import native_device
from duoka.frameworks.recognise import framework_of
from duoka.frameworks.saving import list_codecs
from duoka.frameworks.starting import start_imported_frameworks
from duoka.here import list_here, place_softly
from duoka.monitor.displays import open_display
from duoka.monitor.journal import FILE_NAME, Journal
from duoka.monitor.progress import Display, Position, Progress
from duoka.runtime.command import from_process, why_not_here
from duoka.runtime.configuration import configure_everything
from duoka.runtime.decisions import Standing
from duoka.runtime.environment import foreign_launcher, respawn_asked, threads_given, transport_asked
from duoka.runtime.fingerprint import take_fingerprint
from duoka.runtime.launch import launch as launch_workers
from duoka.runtime.plan import Plan, choose_transport, read_flag, read_seconds, read_whole_number, threads_per_worker
from duoka.runtime.run import become_supervisor, describe_ending, describe_plan, say
from duoka.runtime.seeds import seed_everything
from duoka.runtime.termination import Wish
from duoka.runtime.worker import Attachment, attachment
from duoka.strategies.borders import Borders
from duoka.strategies.mirrored import Mirrored as Mirrored
from duoka.strategies.strategy import Adapter, Loop, Options, Request, Restorable
from duoka.topology.membership import Membership
from duoka.topology.placement import Placement, place

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
        self._wish = Wish(None if attached is None else attached.link)

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
        return adapter

    def _complete(self, options: Options) -> Options:
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
            self.collective.on_deal = self._say_placement
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
    def is_newcomer(self) -> bool:
        return self.collective.joining is not None and self.collective.joining.is_newcomer

    def say(self, text: str) -> None:
        say(text)

    def at_exit(self, function: Callable[[], None]) -> None:
        atexit.register(function)

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

    def save_state(self, path: Any, state: Any) -> None:
        save_state(path, state, list_codecs())

    def load_state(self, path: Any, device: Any) -> Any:
        return load_state(path, list_codecs(), device)

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Already on the workers: simply run it."""
        return function(*args)


class NotebookSession:
    """Several workers, and no script to start them with: everything but `launch` has to wait for it."""

    def __init__(self, plan: Plan, reason: str, *, log_placement: bool) -> None:
        self._plan, self._reason, self._log_placement = plan, reason, log_placement
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
            self._inside = _join(attached)
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
    def is_newcomer(self) -> bool:
        return self._joined.is_newcomer

    def say(self, text: str) -> None:
        self._joined.say(text)

    def at_exit(self, function: Callable[[], None]) -> None:
        self._joined.at_exit(function)

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


_sessions: dict[int, WorkerSession] = {}  # by process: a forked child starts without one


def connect(request: Request) -> WorkerSession | NotebookSession:
    """Give a strategy its place in a run; in a script outside of one, become the run's supervisor."""
    for name in ("sync_batchnorm", "soft_placement", "log_placement", "respawn"):
        read_flag(getattr(request, name), name)
    for name in ("exact", "allow_growth", "share_reading"):
        read_flag(getattr(request, name), name, can_be_none=True)
    if request.check_every is not None:
        read_whole_number(request.check_every, "check_every", least=0)
    place_softly(request.soft_placement)
    session = _connect(request)
    if request.log_placement and isinstance(session, WorkerSession):
        session.log_placement()
    return session


def _connect(request: Request) -> WorkerSession | NotebookSession:
    attached = attachment()
    if attached is not None:
        if attached.plan.command_line:
            _let_command_line_win(request, attached)
        else:
            _check_same_run(request, attached.plan)
        return _join(attached)
    refuse_other_launchers(_list_settings(request))
    plan = make_plan(request)
    if not plan.needs_supervisor:
        return _alone(plan)
    main_module = sys.modules["__main__"]
    reason = why_not_here(
        main_module=main_module,
        modules=set(sys.modules),
        is_main_thread=threading.current_thread() is threading.main_thread(),
        trace=sys.gettrace(),
        orig_argv=sys.orig_argv,
        monitors=_list_monitors(),
        is_multiprocessing_child=multiprocessing.parent_process() is not None,
    )
    command = from_process(sys.orig_argv, sys.argv, main_module, duoka.START_DIRECTORY)
    if not sys.platform.startswith("linux"):
        reason = "several workers need Linux for now (memfd and pidfd)."
    if command is None or reason is not None:
        reason = reason or "there is no script behind __main__."
        if plan.num_workers == 1:
            return _alone(plan)
        return NotebookSession(plan, reason, log_placement=request.log_placement)
    become_supervisor(plan, command)


def _list_settings(request: Request) -> list[str]:
    """What has to be set before user code runs, as the user wrote it."""
    names = ("memory_fraction", "memory_limit_mb", "allow_growth", "device_count")
    return [f"{name}={value!r}" for name in names if (value := getattr(request, name)) is not None]


def refuse_other_launchers(settings: Sequence[str] = ()) -> None:
    if launcher := foreign_launcher(os.environ):
        late = f" It is too late for {' and '.join(settings)}, too." if settings else ""
        raise LaunchError(
            f"{launcher} has already started several copies of this script.{late}",
            why="Duoka starts its own workers, and each copy would start all of them again.",
            do="start it as `python script.py` or `duoka run script.py`.",
        )


def _list_monitors() -> list[str]:
    """The tools that watch this process through sys.monitoring, which Python has had since 3.12."""
    monitoring = getattr(sys, "monitoring", None)
    return [] if monitoring is None else [name for tool in range(6) if (name := monitoring.get_tool(tool))]


def make_plan(request: Request, command_line: tuple[str, ...] = ()) -> Plan:
    """Decide on devices, replicas and threads. Everything that cannot work is an error here."""
    settings = read_settings(request.memory_fraction, request.memory_limit_mb, request.device_count)
    inventory = list_here()
    counted = keep_first_gpus(inventory, settings.num_gpus)
    choice = choose(request.devices, counted, request.soft_placement)
    given, num_devices = request.replicas, len(choice.devices)
    num_replicas = num_devices if given is None else read_whole_number(given, "replicas", least=0)
    place(num_replicas, range(num_devices))
    threads = request.threads
    threads = threads_given(os.environ) if threads is None else read_whole_number(threads, "threads", least=1)
    notes = (*counted.notes[len(inventory.notes) :], *choice.notes)
    allow_growth = request.allow_growth
    if allow_growth is not None and not any(each.kind == "gpu" for each in choice.devices):
        notes = (*notes, f"allow_growth={allow_growth} has no meaning on a CPU: its memory is taken as it is needed")
        allow_growth = None
    return Plan(
        devices=_without_holders(limit_devices(choice.devices, settings)),
        num_replicas=num_replicas,
        threads=threads_per_worker(num_replicas, inventory.of_kind("cpu")[0].cores or 1, threads),
        seed=read_whole_number(request.seed, "seed", least=0),
        deadline_s=read_seconds(request.deadline_s, "deadline_s"),
        notes=notes,
        transport=choose_transport(choice.devices, transport_asked(os.environ)),
        command_line=command_line,
        here=_without_holders(inventory.devices),
        allow_growth=allow_growth,
        respawn=request.respawn and respawn_asked(os.environ),
        logical_cpus=settings.num_cpus,
        hides_cards=len(counted.devices) < len(inventory.devices),
    )


def _without_holders(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Who else uses a device is of no use to a worker, and a thousand of them must fit into one message."""
    return tuple(replace(device, holders=()) for device in devices)


def _check_same_run(request: Request, plan: Plan) -> None:
    """The script runs again in each worker; it must ask for the run that was started."""
    wanted = make_plan(request)
    names = ("devices", "num_replicas", "seed", "allow_growth", "logical_cpus")
    if different := [name for name in names if getattr(wanted, name) != getattr(plan, name)]:
        raise LaunchError(
            f"This run is {describe_plan(plan)}; the strategy asks for {describe_plan(wanted)}"
            f" (other: {', '.join(different)}).",
            why="the first strategy of a script decides, and every worker must ask for the same.",
            do="make one strategy and use it everywhere; do not let its arguments depend on the worker.",
        )


def _let_command_line_win(request: Request, attached: Attachment) -> None:
    """What was not given there is the script's; what cannot be changed any more must be given there."""
    plan = attached.plan
    if settings := _list_settings(request):
        raise LaunchError(
            f"It is too late for {' and '.join(settings)}.",
            why="`duoka run --devices` has started this run before the script could say so.",
            do="leave --devices out, and give the devices to the strategy in the script.",
        )
    for name, asked, used in (
        ("replicas", request.replicas, plan.num_replicas),
        ("threads", request.threads, plan.threads),
    ):
        if name not in plan.command_line and asked not in (None, used):
            raise LaunchError(
                f"The script asks for {name}={asked}, and this run was started with {used}.",
                why=f"`duoka run --devices` decides before the script runs, and {name} was not given there.",
                do=f"add --{name} {asked}, or leave --devices out.",
            )
    if "seed" not in plan.command_line and request.seed != plan.seed:
        attached.plan = replace(attached.plan, seed=read_whole_number(request.seed, "seed", least=0))
        seed_everything(attached.plan.seed)
    if "deadline" not in plan.command_line:
        attached.plan = replace(attached.plan, deadline_s=read_seconds(request.deadline_s, "deadline_s"))


def _join(attached: Attachment) -> WorkerSession:
    if os.getpid() not in _sessions:
        identity, plan = attached.identity, attached.plan
        members = tuple(range(plan.num_workers)) if identity.members is None else identity.members
        membership = Membership(identity.generation, members)
        board = Board.of_fd(identity.board, plan.num_workers)
        mailbox = Mailbox(identity.inbox, dict(enumerate(identity.outboxes)))

        def describe(worker: int) -> str:
            return f"worker {worker} ({plan.devices[worker].name})"

        meeting = Meeting(identity.worker, membership, mailbox, board, attached.link, describe=describe)
        arena = Arena(identity.arena, available_bytes=available_bytes)
        collective = SharedMemory(meeting, arena, plan.num_replicas, deadline_s=plan.deadline_s, describe=describe)
        if plan.respawn and plan.num_workers > 1:
            chronicle, is_newcomer = Chronicle(identity.chronicle), identity.members is not None
            collective.joining = Joining(collective, chronicle, identity.parcel, is_newcomer=is_newcomer)
        attached.work = lambda: meeting.work
        attached.standing = lambda: Standing(meeting.completed, meeting.steps)
        session = _sessions[os.getpid()] = WorkerSession(plan, identity.worker, collective)
        if collective.joining is not None:
            session.borders.add(first=partial(_let_join, collective.joining, session.borders.also))
        if identity.run_directory:
            _keep_journal(Path(identity.run_directory), plan, collective)
        _apply_memory_limit(plan.devices[identity.worker])
    return _sessions[os.getpid()]


def _keep_journal(directory: Path, plan: Plan, collective: SharedMemory) -> None:
    """Every worker listens, and the main one writes."""

    def standing() -> dict[str, Any]:
        return {"generation": collective.meeting.membership.generation, "workers": list(collective.workers)}

    run = {"replicas": plan.num_replicas, "seed": plan.seed, "threads": plan.threads, "duoka": duoka.__version__}

    def is_main() -> bool:
        return collective.worker == collective.main

    listen(Journal(directory / FILE_NAME, run, standing, is_main, say).see)


def _let_join(joining: Joining, also: Mapping[str, Any], training: Restorable) -> None:
    joining.border(partial(give, training, also), partial(take, training, also), lambda: training.step)


def _alone(plan: Plan) -> WorkerSession:
    for note in plan.notes:
        say(note)
    if plan.hides_cards:
        say("device_count cannot hide cards from this process, which runs already: name the device where it matters")
    configure_everything(plan, 0, is_only_card=False)
    _apply_memory_limit(plan.devices[0])
    collective = solo(plan.num_replicas, available_bytes=available_bytes, deadline_s=plan.deadline_s)
    return WorkerSession(plan, 0, collective)


def _apply_memory_limit(device: Device) -> None:
    """On a CPU the limit counts what is allocated from here on, after the frameworks have started."""
    if device.kind == "cpu" and device.memory_limit_mb is not None:
        start_imported_frameworks()
        limit_memory(device.memory_limit_mb)


Mirrored.connect = staticmethod(connect)
