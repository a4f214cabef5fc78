"""`duoka devices`: what is here, who holds it, and what a strategy will make of it."""

from __future__ import annotations

import argparse
import json
import os

from duoka.devices.device import Device, Holder
from duoka.devices.probe import Inventory, list_devices, say_count, summary_sentence
from duoka.devices.table import align

NAME = "devices"
HELP = "list the devices of this machine and say what a strategy will use"

HEADINGS = ("name", "device", "memory free", "held by")
NUM_HOLDERS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    inventory = list_devices(os.environ)
    print(render_json(inventory) if arguments.json else render_text(inventory))
    return 0


def render_json(inventory: Inventory) -> str:
    answer = {
        "devices": [device.to_json() for device in inventory.devices],
        "notes": list(inventory.notes),
        "summary": summary_sentence(inventory),
    }
    return json.dumps(answer, allow_nan=False)


def render_text(inventory: Inventory) -> str:
    rows = [HEADINGS, *(_describe(device) for device in inventory.devices)]
    lines = align(rows)
    lines += ["", *(f"note: {note}" for note in inventory.notes)] if inventory.notes else []
    return "\n".join([*lines, "", summary_sentence(inventory)])


def _describe(device: Device) -> tuple[str, str, str, str]:
    title = device.title
    if device.cores is not None:
        title += f", {say_count(device.cores, 'core')}"
    if device.physical_index is not None:
        title += f" (physical GPU {device.physical_index})"
    holders = ", ".join(_describe_holder(holder) for holder in device.holders[:NUM_HOLDERS])
    return device.name, title, _describe_memory(device), holders


def _describe_memory(device: Device) -> str:
    if device.total_mb is None:
        return "unknown"
    free = "?" if device.free_mb is None else f"{device.free_mb / 1024:.1f}"
    return f"{free} of {device.total_mb / 1024:.1f} GB"


def _describe_holder(holder: Holder) -> str:
    size = "" if holder.mb is None else f" {holder.mb} MB"
    return f"{holder.name} ({holder.pid}){size}"
