"""From what the user asked for to what is run: devices, replicas, threads. Decided once, and held to by all workers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from duoka.devices.device import Device
from duoka.devices.settings import keep_first_gpus, limit_devices, read_settings
from duoka.devices.virtual import choose
from duoka.errors import LaunchError
from duoka.here import list_here
from duoka.runtime.environment import foreign_launcher, threads_given, transport_asked
from duoka.runtime.plan import Plan, choose_transport, read_flag, read_seconds, read_whole_number, threads_per_worker
from duoka.runtime.run import describe_plan
from duoka.runtime.seeds import seed_everything
from duoka.runtime.worker import Attachment
from duoka.strategies.snapshots import LEAST_S
from duoka.strategies.strategy import Request
from duoka.topology.placement import place


def check_request(request: Request) -> None:
    """What has to be yes or no is that, and so on; before anything is decided."""
    for name in ("sync_batchnorm", "soft_placement", "log_placement", "respawn", "snapshot"):
        read_flag(getattr(request, name), name)
    for name in ("exact", "allow_growth", "share_reading"):
        read_flag(getattr(request, name), name, can_be_none=True)
    if request.check_every is not None:
        read_whole_number(request.check_every, "check_every", least=0)


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
        respawn=request.respawn,
        snapshot_s=LEAST_S if request.snapshot else None,
        logical_cpus=settings.num_cpus,
        hides_cards=len(counted.devices) < len(inventory.devices),
    )


def _without_holders(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Who else uses a device is of no use to a worker, and a thousand of them must fit into one message."""
    return tuple(replace(device, holders=()) for device in devices)


def list_settings(request: Request) -> list[str]:
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


def check_same_run(request: Request, plan: Plan) -> None:
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


def let_command_line_win(request: Request, attached: Attachment) -> None:
    """What was not given there is the script's; what cannot be changed any more must be given there."""
    plan = attached.plan
    if not request.snapshot or (not request.respawn and "respawn" not in plan.command_line):
        attached.plan = replace(plan, snapshot_s=None)
    if settings := list_settings(request):
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
