"""What runs, and tests of runs, leave in the temporary directory: nothing, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.limits import START_S
from tests.process.scripts import Run, make_temporary, start

SCRIPT = """
    import time
    import duoka

    strategy = duoka.Mirrored(devices=2)
    print("up", strategy.sum(1), flush=True)
    time.sleep(0 if strategy.worker else 0.5)
    print("down", strategy.sum(1), flush=True)
    """


def begin(directory: Path) -> Run:
    run = start(directory, SCRIPT)
    run.wait_for("up")
    return run


def list_ours() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith(f"duoka-test-{os.getpid()}-")}


def test_a_run_leaves_no_temporary_files_when_it_ends_and_when_workers_or_the_supervisor_are_killed(tmp_path):
    before = list_ours()
    assert begin(tmp_path / "calm").finish().code == 0
    for victim in (0, 1):
        run = begin(tmp_path / f"victim-{victim}")
        os.kill(run.workers()[victim], signal.SIGKILL)
        assert f"worker {victim} (cpu:0/v{victim}) was ended by SIGKILL" in run.finish().err  # it has looked, too
    run = begin(tmp_path / "supervisor")
    run.signal(signal.SIGKILL)
    run.wait_until_all_are_gone()
    assert run.process.returncode == -signal.SIGKILL
    run.check_files()
    run.end()
    assert list_ours() == before


def test_tests_that_are_killed_leave_what_the_next_ones_remove():
    source = "import os, signal; from tests.process.scripts import make_temporary; print(make_temporary(), flush=True)"
    words = [sys.executable, "-c", f"{source}; os.kill(os.getpid(), signal.SIGKILL)"]
    killed = subprocess.run(words, capture_output=True, text=True, timeout=START_S)
    left = Path(killed.stdout.strip())
    assert killed.returncode == -signal.SIGKILL and left.is_dir()
    mine = make_temporary()
    assert not left.exists() and mine.is_dir()
    mine.rmdir()
