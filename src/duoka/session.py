"""The composition root: builds the parts in order and hands them to the strategies. Only wiring."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import duoka
from duoka.checkpoint.memory_snapshot import SnapshotFiles
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
from duoka.events import listen
from duoka.frameworks.handing import give, take
from duoka.frameworks.starting import start_imported_frameworks
from duoka.here import place_softly
from duoka.monitor.journal import FILE_NAME, Journal
from duoka.notebook_session import NotebookSession
from duoka.planning import (
    check_request,
    check_same_run,
    let_command_line_win,
    list_settings,
    make_plan,
    refuse_other_launchers,
)
from duoka.runtime.command import from_process, why_not_here
from duoka.runtime.configuration import configure_everything
from duoka.runtime.decisions import Standing
from duoka.runtime.plan import Plan
from duoka.runtime.run import become_supervisor, say
from duoka.runtime.worker import Attachment, attachment
from duoka.strategies.also import Also
from duoka.strategies.mirrored import Mirrored as Mirrored
from duoka.strategies.snapshots import Snapshots
from duoka.strategies.strategy import Request, Restorable
from duoka.strategies.training_loop import BETWEEN
from duoka.topology.membership import Membership
from duoka.worker_session import WorkerSession

_sessions: dict[int, WorkerSession] = {}  # by process: a forked child starts without one


def connect(request: Request) -> WorkerSession | NotebookSession:
    """Give a strategy its place in a run; in a script outside of one, become the run's supervisor."""
    check_request(request)
    place_softly(request.soft_placement)
    session = _connect(request)
    if request.log_placement and isinstance(session, WorkerSession):
        session.log_placement()
    return session


def _connect(request: Request) -> WorkerSession | NotebookSession:
    attached = attachment()
    if attached is not None:
        if attached.plan.rehearsal is not None:
            pass  # `duoka rehearse` has decided, from what this strategy asks for
        elif attached.plan.command_line:
            let_command_line_win(request, attached)
        else:
            check_same_run(request, attached.plan)
        session = _join(attached)
        joining = session.collective.joining
        if not request.respawn and "respawn" not in attached.plan.command_line and joining is not None:
            joining.refuse("the script says respawn=False")
        return session
    refuse_other_launchers(list_settings(request))
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
        return NotebookSession(plan, reason, _join, log_placement=request.log_placement)
    become_supervisor(plan, command)


def _list_monitors() -> list[str]:
    """The tools that watch this process through sys.monitoring, which Python has had since 3.12."""
    monitoring = getattr(sys, "monitoring", None)
    return [] if monitoring is None else [name for tool in range(6) if (name := monitoring.get_tool(tool))]


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
        watch = partial(meeting.watch_lock, plan.deadline_s)
        arena.watch_waits(watch)
        if plan.respawn and plan.num_workers > 1:
            chronicle, is_newcomer = Chronicle(identity.chronicle), identity.members is not None
            chronicle.watch = watch
            collective.joining = Joining(collective, chronicle, identity.parcel, is_newcomer=is_newcomer)
        attached.work = lambda: meeting.work
        attached.standing = lambda: Standing(meeting.completed, meeting.steps)
        session = _sessions[os.getpid()] = WorkerSession(plan, identity.worker, collective)
        if plan.takes_snapshots and identity.snapshots:
            _take_snapshots(attached, session)
        if collective.joining is not None:
            session.borders.add(first=partial(_let_join, collective.joining, session.borders.also))
        if attached.recorder is not None:
            attached.recorder.join(collective)
        if identity.run_directory:
            _keep_journal(Path(identity.run_directory), plan, collective)
        _apply_memory_limit(plan.devices[identity.worker])
    return _sessions[os.getpid()]


def _take_snapshots(attached: Attachment, session: WorkerSession) -> None:
    identity, plan = attached.identity, attached.plan
    files = SnapshotFiles(identity.snapshots, identity.worker, plan.num_workers, available_bytes)
    snapshots = Snapshots(
        session.collective,
        files,
        session.borders,
        session.list_codecs,
        say,
        is_newcomer=identity.members is not None,
        least_s=plan.snapshot_s or 0.0,
    )
    session.borders.add(border=snapshots.at_border, resume=snapshots.resume)


def _keep_journal(directory: Path, plan: Plan, collective: SharedMemory) -> None:
    """Every worker listens, and the main one writes."""

    def standing() -> dict[str, Any]:
        return {"generation": collective.meeting.membership.generation, "workers": list(collective.workers)}

    run = {"replicas": plan.num_replicas, "seed": plan.seed, "threads": plan.threads, "duoka": duoka.__version__}

    def is_main() -> bool:
        return collective.worker == collective.main

    listen(Journal(directory / FILE_NAME, run, standing, is_main, say).see)


def _let_join(joining: Joining, also: Also, training: Restorable) -> None:
    position = getattr(training, "boundary", None)
    joining.border(
        partial(give, training, also),
        partial(take, training, also),
        lambda: training.step,
        is_between_epochs=position is not None and position.place == BETWEEN,
    )


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
