"""Process groups of torch.distributed: who is connected to whom, in one generation.

They are Duoka's own: a script, or another library in it, may make its default group as if we were not there.
Workers find one another through a file without a name, and Gloo talks over the loopback interface only.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from duoka.collectives.meeting import REDUCED, Meeting
from duoka.errors import LaunchError
from duoka.topology.membership import Membership

_SHORTEST_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3


class Watch:
    """Wait for what torch.distributed does, with one ear at the meeting: a loss or the deadline ends it at once."""

    def __init__(
        self, meeting: Meeting, number: int, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.deadline_s = deadline_s
        self._meeting = meeting
        self._number = number
        self._clock = clock
        self._end = clock() + deadline_s

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Raises Regrouped after a loss, DeadlineExceeded."""
        nap_s = _SHORTEST_NAP_S
        while not is_done():
            if self._clock() >= self._end:
                raise self._meeting.deadline_error(self._number, REDUCED, self.deadline_s)
            # The libraries have no wait that both of them and a pipe could end.
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
            self._meeting.listen(self.deadline_s)

    def finish(self, works: Iterable[Any]) -> None:
        """Until all of these have come to their end; raises what they raise."""
        for work in works:
            self.wait_until(work.is_completed)
            work.wait()


class Group:
    """One generation's workers, connected. Every call returns at once, with a work that can be waited for."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        # Never destroyed: that waits for what is under way, a dead worker's part included, and hangs in forks.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        return self._backend.allreduce([tensor])

    def all_to_all(
        self, output: torch.Tensor, given: torch.Tensor, output_sizes: Sequence[int], given_sizes: Sequence[int]
    ) -> Any:
        return self._backend.alltoall_base(output, given, list(output_sizes), list(given_sizes))

    def all_gather(self, output: torch.Tensor, given: torch.Tensor) -> Any:
        return self._backend._allgather_base(output, given)

    def abort(self) -> None:
        """Stop what is under way, as far as the library can: NCCL's kernels would else run on."""
        try:
            self._backend.abort()
        except (AttributeError, RuntimeError):  # before PyTorch 2.6, or not to be had
            pass


class Groups:
    """The connection of the generation that is alive; made when it is first needed, by all of its workers."""

    def __init__(self, meeting: Meeting, backend: str, device: torch.device, name: str) -> None:
        _check_available(backend)
        self._meeting = meeting
        self._backend = backend
        self._device = device
        self._connected: tuple[Membership, Group] | None = None
        # Every worker has one, open for as long as it lives; the first one's is where they all meet.
        self._name = f"duoka-{name}"
        self._file = os.memfd_create(self._name, os.MFD_CLOEXEC)

    def current(self, watch: Watch) -> Group:
        membership = self._meeting.membership
        if self._connected is None or self._connected[0] != membership:
            self._connected = None
            self._connected = membership, self._connect(membership, watch)
        return self._connected[1]

    def abandon(self) -> None:
        """A call was left in its middle: what it still does, or fails to do, must not reach the next one."""
        if self._connected is not None:
            self._connected[1].abort()
            self._connected = None

    def _connect(self, membership: Membership, watch: Watch) -> Group:
        """In a thread: connecting waits for everybody, and one of them may die meanwhile."""
        made: list[Group] = []
        failures: list[Exception] = []
        # The library's own limit comes after ours, which can name the worker.
        timeout = timedelta(seconds=watch.deadline_s + 1)

        def connect() -> None:
            try:
                group = Group(self._make_backend(membership, timeout))
                group.all_reduce(torch.zeros(1, device=self._device)).wait()  # NCCL connects in its first call
                made.append(group)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=connect, name="duoka-connect", daemon=True)
        thread.start()
        watch.wait_until(lambda: not thread.is_alive())
        if failures:
            raise failures[0]
        return made[0]

    def _make_backend(self, membership: Membership, timeout: timedelta) -> Any:
        workers = membership.workers
        path = _find_file(self._meeting.process_of(workers[0]), self._name)
        store = torch.distributed.FileStore(path, len(workers))
        store.set_timeout(timeout)
        store = torch.distributed.PrefixStore(f"generation {membership.generation}", store)
        return _MAKERS[self._backend](store, workers.index(self._meeting.worker), len(workers), timeout)


def _find_file(process: int, name: str) -> str:
    """Where to open another process's file that has no name in any directory."""
    directory = f"/proc/{process}/fd"
    for entry in os.listdir(directory):
        path = f"{directory}/{entry}"
        try:
            if os.readlink(path) == f"/memfd:{name} (deleted)":
                return path
        except FileNotFoundError:  # closed since it was listed
            continue
    raise RuntimeError(f"process {process} has no file {name}")


def _make_gloo(store: Any, position: int, size: int, timeout: timedelta) -> Any:
    options = torch.distributed.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return torch.distributed.ProcessGroupGloo(store, position, size, options)


def _make_nccl(store: Any, position: int, size: int, timeout: timedelta) -> Any:
    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return torch.distributed.ProcessGroupNCCL(store, position, size, options)


_MAKERS = {"gloo": _make_gloo, "nccl": _make_nccl}


def _check_available(backend: str) -> None:
    if not torch.distributed.is_available() or not getattr(torch.distributed, f"is_{backend}_available")():
        raise LaunchError(
            f"This PyTorch ({torch.__version__}) has no {backend}.",
            why=f"the sums of these devices would travel by torch.distributed with {backend}.",
            do="install a PyTorch that was built with it, or set DUOKA_TRANSPORT=shm.",
        )
