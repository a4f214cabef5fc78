"""`duoka devices` answers at once, in text or JSON, and loads no framework for it."""

import json
import os
import subprocess
import sys

from duoka.devices.device import Device
from tests.limits import START_S

COMMAND = [sys.executable, "-m", "duoka", "devices"]


def ask(*arguments, **options):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=START_S, **options)


def test_the_table_ends_in_one_plain_sentence():
    done = ask()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["name", "device"]
    assert any(line.startswith("cpu:0 ") for line in lines)
    assert "CPU core" in lines[-1] and ": `Mirrored(" in lines[-1]
    assert done.stderr == ""


def test_json_is_one_strict_object_whose_devices_can_be_read_back():
    done = ask("--json")
    answer = json.loads(done.stdout, parse_constant=lambda word: 1 / 0)
    assert set(answer) == {"devices", "notes", "summary"}
    devices = [Device.from_json(values) for values in answer["devices"]]
    assert devices[-1].name == "cpu:0" == answer["devices"][-1]["name"]
    assert devices[-1].cores == len(os.sched_getaffinity(0))


def test_cores_taken_away_from_the_process_are_not_counted():
    one_core = {min(os.sched_getaffinity(0))}
    done = ask(preexec_fn=lambda: os.sched_setaffinity(0, one_core))
    assert ", 1 CPU core: " in done.stdout


def test_no_framework_nor_anything_slow_is_imported():
    program = (
        "import runpy, sys; sys.argv = ['duoka', 'devices']\n"
        "try: runpy.run_module('duoka', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: assert not end.code\n"
        "slow = {'torch', 'tensorflow', 'jax', 'keras', 'rich'} & set(sys.modules)\n"
        "print(sorted(slow), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=START_S)
    assert done.stderr == "[]\n"
