"""How runs end: Ctrl-C, kill -9, exit codes, crashes. Within 5 s, in one message, and with nobody left behind."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import termios

import pytest

from tests.limits import START_S
from tests.process.scripts import PYTHON, run, start, wait_until

WAITING = """
import os, signal, sys, time
import duoka
strategy = duoka.Mirrored(devices=2)
strategy.barrier()
print("ready", flush=True)
"""


def ends(source: str, *, others: str = "strategy.barrier()", deadline_s: float = 20) -> str:
    """A script of three workers in which this happens on worker 1 while the others wait for it in a call."""
    return f"""
import ctypes, os, signal, sys, threading, time
import duoka
import numpy
strategy = duoka.Mirrored(devices=3, deadline_s={deadline_s})
strategy.barrier()
if strategy.worker == 1:
    {source}
{others}
"""


# Failures of the script itself.


def test_an_exception_is_shown_once_and_last_with_the_users_frames_only(tmp_path):
    ended = run(tmp_path, ends("raise ValueError('多卡 ' * 3)"))
    assert ended.code == 1
    assert ended.said() == ["2 workers stopped because worker 1 (cpu:0/v1) failed:"]
    shown = ended.err[ended.err.index("Traceback") :].splitlines()
    assert shown[1].endswith('script.py", line 8, in <module>') and len(shown) == 4, shown
    assert shown[-1] == "ValueError: 多卡 多卡 多卡 "
    assert ended.err.count("Traceback") == 1
    assert ended.log(1).endswith("ValueError: 多卡 多卡 多卡 \n")


def test_an_exception_before_the_strategy_comes_from_python_itself_and_starts_nothing(tmp_path):
    ended = run(tmp_path, "import duoka\n1 / 0\nduoka.Mirrored(devices=2)")
    assert ended.code == 1
    assert ended.err.endswith("ZeroDivisionError: division by zero\n") and "duoka:" not in ended.err
    assert not (ended.directory / "runs").exists()


def test_an_exception_on_one_worker_before_it_joins_ends_the_run(tmp_path):
    source = """
        import duoka
        from duoka.runtime.worker import attachment
        me = attachment()
        if me is not None and me.worker == 1:
            raise OSError("no data on this worker")
        duoka.Mirrored(devices=2, deadline_s=20).barrier()
        """
    ended = run(tmp_path, source)
    assert ended.code == 1
    assert ended.said() == ["1 worker stopped because worker 1 (cpu:0/v1) failed:"]
    assert ended.err.endswith("OSError: no data on this worker\n")
    assert ended.err.count("Traceback") == 1


@pytest.mark.slow
def test_a_very_long_message_arrives_with_its_beginning_and_its_end(tmp_path):
    ended = run(tmp_path, ends("raise ValueError('first ' + '多卡' * 50_000 + ' last')"))
    assert ended.code == 1
    assert "ValueError: first 多卡" in ended.err and ended.err.endswith("多卡 last\n")
    assert " characters ...]" in ended.err
    assert ended.err.count("Traceback") == 1


@pytest.mark.slow
def test_a_failure_is_told_although_a_thread_keeps_its_worker_from_ending(tmp_path):
    ended = run(tmp_path, ends("threading.Thread(target=time.sleep, args=[600]).start(); raise KeyError('lost key')"))
    assert ended.code == 1
    assert ended.err.endswith("KeyError: 'lost key'\n")
    assert "did not end in time" not in ended.err  # there is an error to be read, and this is not it


@pytest.mark.slow
def test_a_failure_is_told_although_the_script_has_closed_all_descriptors(tmp_path):
    ended = run(tmp_path, ends("os.closerange(3, 256); raise KeyError('lost key')"))
    assert ended.code == 1
    assert "[w1] KeyError: 'lost key'" in ended.err


@pytest.mark.parametrize(
    ("source", "code", "line"),
    [
        ("sys.exit(3)", 3, "2 workers stopped because worker 1 (cpu:0/v1) exited with code 3."),
        ("os._exit(4)", 4, "2 workers stopped because worker 1 (cpu:0/v1) exited with code 4."),
        ("sys.exit('no data here')", 1, "2 workers stopped because worker 1 (cpu:0/v1) exited with code 1."),
    ],
)
def test_the_exit_code_of_a_run_is_that_of_the_failing_worker(tmp_path, source, code, line):
    ended = run(tmp_path, ends(source))
    assert (ended.code, ended.said()) == (code, [line])
    assert ("[w1] no data here\n" in ended.err) == ("no data" in source)
    assert "Traceback" not in ended.err


def test_a_worker_that_leaves_while_others_wait_is_named(tmp_path):
    ended = run(tmp_path, ends("sys.exit(0)"))
    assert ended.code == 1
    assert "WorkerLeft: worker 1 (cpu:0/v1) has finished its script" in ended.err
    assert ended.err.count("Traceback") == 1


@pytest.mark.parametrize(
    "source",
    [
        "strategy.sum(numpy.zeros(7))",
        "strategy.sum(numpy.zeros(1, 'f4'))",
        "strategy.mean(numpy.zeros(1))",
        "strategy.sum_over_replicas(lambda replica: numpy.zeros(10**6))",
    ],
    ids=["shape", "dtype", "call", "large"],
)
def test_unequal_calls_are_an_error_on_all_workers(tmp_path, source):
    others = """
try:
    strategy.sum(numpy.zeros(1)) if strategy.worker != 1 else %s
except duoka.DuokaError as error:
    print("raised on", strategy.worker, flush=True)
    time.sleep(0.3)  # so that all can say it before the first ends the run
    raise
"""
    ended = run(tmp_path, ends("pass", others=others % source))
    assert [f"raised on {worker}" in ended.log(worker) for worker in range(3)] == [True] * 3
    assert ended.code == 1
    assert "MismatchError: The workers did not call the same thing" in ended.err
    assert "worker 1 (cpu:0/v1): " in ended.err and "worker 2 (cpu:0/v2): exchange sum of float64[1]" in ended.err
    assert ended.err.count("Traceback") == 1


def test_a_stopped_worker_is_named_when_the_deadline_has_passed_and_killed_after_another_one(tmp_path):
    ended = run(tmp_path, ends("os.kill(os.getpid(), signal.SIGSTOP)", deadline_s=1))
    assert ended.code == 0
    warning, loss, *_ = ended.said()
    assert warning.startswith("worker 1 (cpu:0/v1) has not arrived at step 0 for 1") and "is stopped" in warning
    assert "was stopped (SIGSTOP) for 1" in loss and loss.endswith("2 workers go on (generation 1).")


def test_shared_memory_that_cannot_be_had_is_an_error_at_the_start(tmp_path):
    source = """
        import duoka
        import numpy
        strategy = duoka.Mirrored(devices=2)
        strategy.sum_over_replicas(lambda replica: numpy.broadcast_to(numpy.float32(1), 2**40))
        """
    ended = run(tmp_path, source)
    assert ended.code == 69
    assert "OutOfMemory: 8,388,608 MB of shared memory" in ended.err
    assert ended.err.count("Traceback") == 1


# Deaths.


def test_a_sum_goes_on_without_what_a_killed_worker_would_have_given_and_says_so(tmp_path):
    ended = run(tmp_path, ends("os.kill(os.getpid(), signal.SIGKILL)", others="strategy.sum(1.0)"))
    assert ended.code == 0
    first, second = ended.said()
    assert first == "worker 1 (cpu:0/v1) was ended by SIGKILL; 2 workers go on (generation 1)."
    assert second.startswith("strategy.sum goes without replica 1: lost with a worker")


def test_a_worker_killed_in_a_step_changes_no_result(tmp_path):
    source = """
        import os, signal, sys
        import duoka
        strategy = duoka.Mirrored(devices=3)
        weights = 0.0
        for step in range(6):
            if step == 3 and str(strategy.worker) in sys.argv[1:]:
                os.kill(os.getpid(), signal.SIGKILL)
            weights = weights / 3 + float(strategy.sum_over_replicas(lambda replica: weights + replica / 7))
        strategy.print(weights)
        """
    calm = run(tmp_path / "calm", source)
    struck = run(tmp_path / "struck", source, "0")
    assert (calm.code, calm.said()) == (0, [])
    assert struck.code == 0
    assert struck.said() == [
        "worker 0 (cpu:0/v0) was ended by SIGKILL; 2 workers go on (generation 1).",
        "worker 0 (cpu:0/v0) is not started again: what a loop of sum_over_replicas keeps between its steps"
        " is not known to Duoka.",
    ]
    assert struck.out == calm.out != ""


def test_a_crash_in_native_code_on_all_workers_ends_with_its_signal(tmp_path):
    ended = run(tmp_path, "import duoka, ctypes\nduoka.Mirrored(devices=2).barrier()\nctypes.string_at(0)")
    assert ended.code == 139
    assert "Fatal Python error: Segmentation fault" in ended.err
    assert 'script.py", line 3 in <module>' in ended.err
    assert ended.err.splitlines()[-1].endswith("was ended by SIGSEGV; no worker is left.")


@pytest.mark.slow
def test_a_worker_that_crashes_after_the_others_have_finished_is_mentioned(tmp_path):
    source = """
        import ctypes, time
        import duoka
        strategy = duoka.Mirrored(devices=2)
        strategy.barrier()
        if strategy.worker == 1:
            time.sleep(0.5)
            ctypes.string_at(0)
        """
    ended = run(tmp_path, source)
    assert ended.code == 0
    assert ended.said() == ["worker 1 (cpu:0/v1) was ended by SIGSEGV; the others have finished."]


def test_a_script_without_streams_ends_as_it_would_alone(tmp_path):
    source = """
        import sys
        print("before", flush=True)
        sys.stdout = None
        import duoka
        strategy = duoka.Mirrored(devices=2)
        sys.stderr.close()
        strategy.barrier()
        """
    ended = run(tmp_path, source)
    assert ended.code == 0, ended.err
    assert ended.log(1) == "before\n"


# Signals to the run.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_everybody_cleanly(tmp_path, number, code):
    source = (
        WAITING
        + """
try:
    strategy.barrier()
    if strategy.worker == 0:
        print("both are here", flush=True)
        time.sleep(600)
    strategy.barrier()
finally:
    print("cleaned up", strategy.worker, flush=True)
"""
    )
    going = start(tmp_path, source)
    going.wait_for("both are here")
    going.signal(number)
    ended = going.finish()
    assert ended.code == code
    assert "cleaned up 0" in ended.out and "cleaned up 1" in ended.log(1)
    (line,) = ended.said()
    assert line.startswith(f"{number.name}: 2 workers asked to end")
    assert "Traceback" not in ended.err and "KeyboardInterrupt" not in ended.err + ended.out


@pytest.mark.parametrize("delay_s", [0.05, 0.15, 0.25, 0.4])
def test_ctrl_c_while_workers_start_shows_no_traceback_of_theirs(tmp_path, delay_s):
    going = start(tmp_path, WAITING + "time.sleep(600)")
    going.wait_for("; logs in ")
    try:
        going.process.wait(delay_s)
    except subprocess.TimeoutExpired:
        pass
    going.signal(signal.SIGINT)
    ended = going.finish()
    assert ended.code == 130
    assert "Traceback" not in ended.err and "KeyboardInterrupt" not in ended.err


@pytest.mark.slow
def test_ctrl_c_does_not_wait_until_sixty_four_workers_have_started(tmp_path):
    going = start(tmp_path, "import duoka\nduoka.Mirrored(devices=64).barrier()\nimport time\ntime.sleep(600)")
    going.wait_for("; logs in ")
    wait_until(lambda: len(going.workers()) >= 4, START_S, going)
    going.signal(signal.SIGINT)
    ended = going.finish()
    assert ended.code == 130
    (line,) = [line for line in ended.said() if line.startswith("SIGINT")]
    assert int(line.split()[1]) < 64, "all had started before the signal came"
    assert "Traceback" not in ended.err


def test_ctrl_c_typed_at_a_terminal_ends_the_run_and_the_screen_stays_tidy(tmp_path):
    """The terminal signals its foreground group: the supervisor. A line of ours never ends up in one of the script."""
    source = (
        WAITING
        + """
print("50% |=====     |", end="", flush=True)
strategy.barrier()
time.sleep(600)
"""
    )
    terminal, inside = pty.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(inside, termios.TIOCSCTTY, 0)

    going = start(tmp_path, source, stdin=inside, stdout=inside, stderr=inside, preexec_fn=take_terminal)
    os.close(inside)
    shown = b""
    while b"=     |" not in shown:
        shown += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    ended = going.finish()
    while b"asked to end" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    assert ended.code == 130
    lines = [line for line in shown.decode().splitlines() if line]
    assert "50% |=====     |" in lines or "50% |=====     |^C" in lines
    assert lines[-1] == "duoka: SIGINT: 2 workers asked to end; once more kills them at once."


@pytest.mark.slow
def test_workers_that_ignore_ctrl_c_are_killed_after_the_grace_period(tmp_path):
    source = (
        WAITING
        + """
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess = __import__("subprocess").Popen(["sleep", "600"])
strategy.barrier()  # both are
print("deaf", flush=True)
while True:
    try:
        time.sleep(600)
    except BaseException:
        pass
"""
    )
    going = start(tmp_path, source)
    going.wait_for("deaf")
    going.signal(signal.SIGINT)
    ended = going.finish()
    assert ended.code == 130
    assert "2 workers did not end in time and were killed: w0-1." in ended.said()


def test_ctrl_c_twice_ends_at_once_what_does_not_listen(tmp_path):
    going = start(
        tmp_path, WAITING + "signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(600)"
    )
    going.wait_for("deaf")
    going.signal(signal.SIGINT)
    going.wait_for("asked to end")
    going.signal(signal.SIGINT)
    ended = going.finish()
    assert ended.code == 130


@pytest.mark.slow
def test_a_run_under_nohup_survives_the_terminal(tmp_path):
    going = start(tmp_path, WAITING + "time.sleep(1)\nprint('finished')", program=["nohup", *PYTHON])
    going.wait_for("ready")
    going.signal(signal.SIGHUP)
    ended = going.finish()
    assert ended.code == 0 and "finished" in ended.out


@pytest.mark.slow
def test_a_screen_that_nobody_reads_does_not_keep_a_run_from_ending(tmp_path):
    source = (
        WAITING
        + """
while True:
    print("x" * 1000)
"""
    )
    going = start(tmp_path, source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert b"ready" in b"".join(going.process.stdout.readline() for _ in range(3))
    try:
        going.process.wait(1)  # the pipe fills
    except subprocess.TimeoutExpired:
        pass
    going.signal(signal.SIGTERM)
    ended = going.finish()
    going.process.stdout.close()
    assert ended.code == 143


def test_kill_9_of_the_supervisor_ends_workers_and_what_they_started(tmp_path):
    source = """
        import multiprocessing, os, subprocess, threading, time
        import duoka

        def fork():
            os.fork() or time.sleep(600)

        if __name__ == "__main__":
            strategy = duoka.Mirrored(devices=2)
            subprocess.Popen(["sleep", "600"])
            multiprocessing.get_context("fork").Process(target=time.sleep, args=[600]).start()
            multiprocessing.get_context("spawn").Process(target=time.sleep, args=[600]).start()
            passing = threading.Thread(target=fork)
            passing.start()
            passing.join()
            strategy.barrier()
            print("all started", flush=True)
            time.sleep(600)
        """
    going = start(tmp_path, source)
    going.wait_for("all started")
    assert len(going.alive()) >= 1 + 2 * 5, going.alive().keys()
    going.process.kill()
    going.wait_until_all_are_gone()
    going.check_files()


def test_kill_9_of_the_supervisor_and_of_its_guardian_ends_workers_and_their_forks(tmp_path):
    source = (
        WAITING
        + """
if os.fork() == 0:
    print("forked", flush=True)
time.sleep(600)
"""
    )
    going = start(tmp_path, source)
    going.wait_for("ready")
    wait_until(lambda: len(going.alive()) == 6, 5, going)
    for pid in (guardian_of(going), going.process.pid):
        os.kill(pid, signal.SIGKILL)
    going.wait_until_all_are_gone()


def guardian_of(going) -> int:
    """The child of the supervisor that is no worker."""
    (guardian,) = set(going.children()) - set(going.workers().values())
    return guardian


@pytest.mark.slow
def test_kill_9_of_one_worker_ends_what_it_started(tmp_path):
    source = (
        WAITING
        + """
import subprocess
if strategy.worker == 1:
    subprocess.Popen(["sleep", "61"])
    if os.fork() == 0:
        time.sleep(62)
    print("all started", flush=True)
time.sleep(3)
"""
    )
    going = start(tmp_path, source)
    going.wait_for("all started")
    before = going.alive()
    os.kill(going.workers()[1], signal.SIGKILL)
    going.wait_for("was ended by SIGKILL")
    wait_until(lambda: len(before) - len(going.alive()) == 3, 2, going)
    assert going.finish().code == 0


@pytest.mark.torch
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_data_loaders_of_all_workers_end_with_the_run(tmp_path, number):
    source = """
        import time
        import duoka
        strategy = duoka.Mirrored(devices=2)
        import torch
        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return 1000
            def __getitem__(self, index):
                time.sleep(0.05)
                return torch.zeros(10)
        loader = torch.utils.data.DataLoader(Slow(), batch_size=2, num_workers=2)
        for number, batch in enumerate(loader):
            if number == 2:
                strategy.barrier()
                print("loading", flush=True)
        """
    going = start(tmp_path, source)
    going.wait_for("loading")
    workers = set(going.workers().values())
    loaders = [pid for pid in going.alive() if pid not in workers and pid != going.process.pid]
    assert len(workers) == 2 and len(loaders) >= 4
    going.signal(number)
    going.wait_until_all_are_gone()
    going.check_files(leaves=["pymp-"])  # of multiprocessing itself


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["nobody", "worker", "supervisor"])
def test_what_python_itself_would_remove_from_shared_memory_is_removed(tmp_path, victim):
    """A script that forgets to unlink: multiprocessing's tracker does it, if it is left the time."""
    source = (
        WAITING
        + """
from multiprocessing import shared_memory
kept = shared_memory.SharedMemory(create=True, size=2**20)
strategy.barrier()
print("made", kept.name, flush=True)
if sys.argv[1] == "worker" and strategy.worker == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(30 if sys.argv[1] == "supervisor" else 0.2)
"""
    )
    going = start(tmp_path, source, victim)
    going.wait_for("made", times=2)
    if victim == "supervisor":
        going.process.kill()
        going.wait_until_all_are_gone()
        going.check_files()
    else:
        assert going.finish().code == 0


@pytest.mark.slow
def test_a_killed_guardian_is_not_missed(tmp_path):
    going = start(tmp_path, WAITING + "time.sleep(1)")
    going.wait_for("ready")
    os.kill(guardian_of(going), signal.SIGKILL)
    ended = going.finish()
    assert (ended.code, ended.said()) == (0, [])
