"""What strategies stand on: a session, which knows the workers of the run. `session.py` provides it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from duoka.checkpoint.codec import Codec
from duoka.collectives.arrays import Array
from duoka.collectives.collective import Collective
from duoka.data.position import Epochs
from duoka.devices.device import Device
from duoka.strategies.borders import Borders


@dataclass(frozen=True)
class Request:
    """What the user asked for, before anything is decided."""

    devices: Any = None
    replicas: int | None = None
    seed: int = 0
    threads: int | None = None
    exact: bool | None = None
    sync_batchnorm: bool = False
    share_reading: bool | None = None
    soft_placement: bool = True
    log_placement: bool = False
    deadline_s: float = 60.0
    memory_fraction: float | None = None
    memory_limit_mb: int | None = None
    allow_growth: bool | None = None
    device_count: Mapping[str, int] | None = None
    respawn: bool = True
    check_every: int | None = 100
    snapshot: bool = True

    @property
    def options(self) -> Options:
        return Options(
            self.exact,
            self.sync_batchnorm,
            self.share_reading,
            log_placement=self.log_placement,
            check_every=self.check_every,
        )


@dataclass(frozen=True)
class Options:
    """What a framework's adapter has to know of the request, and what carries its tensors (see `Plan.transport`)."""

    exact: bool | None = None  # None: where it costs nothing
    sync_batchnorm: bool = False
    share_reading: bool | None = None
    transport: str = "shm"
    sees_only_its_card: bool = True  # a worker of a run does; a process alone sees all of them
    log_placement: bool = False
    check_every: int | None = 100  # steps between two checks that replicas are equal; 0 and None: never
    borders: Borders = field(default_factory=Borders)  # whom an adapter tells of the moments between steps


class Evaluation(Protocol):
    """The evaluation loops of a framework."""

    @property
    def replicas_of_last_loop(self) -> tuple[int, ...] | None:
        """Whose rows the last one went through, as long as no training has followed."""
        ...

    def refuse(self, call: str) -> None:
        """Raise when an evaluation loop is under way: the workers run through different numbers of batches there."""
        ...


class Tensors(Protocol):
    """A framework's tensors, for a strategy that knows arrays only."""

    def on_host(self, value: Any) -> Any:
        """A tensor in the memory of the CPU; anything else as it is."""
        ...

    def read(self, value: Any) -> tuple[str, Array] | None:
        """The name of a tensor's type, and its bits; None for anything else."""
        ...

    def make(self, kind: str, bits: Array, like: Any) -> Any:
        """The tensor that `read` saw, on the device of `like`."""
        ...


class Restorable(Protocol):
    """A training whose whole state can be taken, and put back: what borders between steps know of it."""

    @property
    def step(self) -> int:
        """Committed steps."""
        ...

    @property
    def batch(self) -> int:
        """Completed global batches: more than steps when gradients are accumulated."""
        ...

    def capture(self) -> dict[str, Any]:
        """The whole state of the run at a border between steps: tensors, which are not copied, and plain values."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Put a captured state back, outside of loops or at a border; its tensors belong to the run from then on.

        The script, which begins at its top, is led to the exact next batch: what it does up to there has happened.
        """
        ...

    @property
    def is_repeating(self) -> bool:
        """Whether the script is past a training, on its way to a restored state: what it does has happened."""
        ...

    def come_to_save(self) -> bool:
        """The script saves by itself, outside of loops: whether that is new. It is not while it is being led."""
        ...


class Adapter(Restorable, Protocol):
    """A framework, as far as a strategy needs it."""

    @property
    def is_known_when_prepared(self) -> bool:
        """Whether all that is trained is known as soon as it is prepared; otherwise when training begins."""
        ...

    @property
    def position(self) -> tuple[int, int] | None:
        """The number of the global batch under way, and its rows; None outside of a batch."""
        ...

    @property
    def num_samples(self) -> int | None:
        """Of this worker in the batch of a plain loop that is under way, 0 included; None anywhere else."""
        ...

    def refuse_number(self, call: str) -> None:
        """Raise where `strategy.sum`, `.mean` and `.gather` have no meaning."""
        ...

    def prepare(self, objects: Sequence[Any], *, is_sharded: bool = False) -> list[Any]: ...

    def scope(self, owner: Any) -> AbstractContextManager[None]:
        """What is made inside belongs to the run, without being prepared."""
        ...

    def weigh(self, loss: Any, count: Any) -> Any: ...

    @property
    def evaluation(self) -> Evaluation: ...

    @property
    def tensors(self) -> Tensors: ...

    def evaluate(self, function: Callable[[Any], Any], loader: Any) -> Any:
        """sum / count of what the function returns for the batches of a loader, over all replicas."""
        ...

    @property
    def epochs(self) -> Epochs:
        """The loops over `strategy.epochs`."""
        ...

    def come_to_end(self) -> None:
        """The script has."""
        ...


class Loop(Protocol):
    """TensorFlow loops of the user's own; see `Loops` for what its methods do."""

    @property
    def step(self) -> int:
        """Committed steps."""
        ...

    @property
    def epochs(self) -> Epochs:
        """The loops over `strategy.epochs`."""
        ...

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any: ...

    def reduce(self, op: Any, value: Any, axis: int | None) -> Any: ...

    def note_division(self) -> None:
        """The number of replicas was asked for: inside a step, something may be divided by it."""
        ...

    def owns(self, value: Any) -> bool:
        """Whether `run` has returned this."""
        ...

    def gather(self, value: Any, axis: int) -> Any: ...

    def local_results(self, value: Any) -> tuple[Any, ...]: ...

    def distribute_dataset(self, dataset: Any) -> Any: ...

    def distribute_datasets_from_function(self, function: Callable[[Any], Any]) -> Any: ...

    def average_loss(self, per_example_loss: Any, sample_weight: Any, global_batch_size: Any) -> Any: ...

    @property
    def is_running(self) -> bool:
        """Whether this is the inside of a step."""
        ...

    def weigh(self, loss: Any, count: Any) -> Any: ...


class Session(Protocol):
    """The run as one worker sees it."""

    @property
    def collective(self) -> Collective: ...

    @property
    def worker(self) -> int: ...

    @property
    def num_replicas(self) -> int: ...

    @property
    def num_workers(self) -> int: ...

    @property
    def device(self) -> Device: ...

    @property
    def native_device(self) -> Any:
        """The device as the framework in use writes it."""
        ...

    def progress(
        self,
        iterable: Iterable[Any] | None,
        desc: str | None,
        total: int | None,
        is_main: Callable[[], bool],
        position: Callable[[], tuple[int, int] | None],
    ) -> Any: ...

    @property
    def seed(self) -> int: ...

    @property
    def borders(self) -> Borders: ...

    @property
    def run(self) -> str:
        """The name of this run, the same on all of its workers, also on those that are started later."""
        ...

    @property
    def is_restarted(self) -> bool:
        """Whether all workers were lost, and this start continues from a snapshot in memory."""
        ...

    @property
    def is_newcomer(self) -> bool:
        """Whether this worker was started in the place of a lost one, and has not joined the others yet."""
        ...

    def say(self, text: str) -> None:
        """One line to the user."""
        ...

    def at_exit(self, function: Callable[[], None]) -> None:
        """Call it when this process ends, however its script has ended."""
        ...

    def at_end_of_script(self, function: Callable[[], None]) -> None:
        """Call it when the script has come to its end by itself; an error from there is one of the script."""
        ...

    def fingerprint(self) -> dict[str, str]:
        """What equal bits depend on beside the run itself: processor, versions, threads, flags."""
        ...

    def list_codecs(self) -> list[Codec]: ...

    def listen_for_termination(self) -> Callable[[], bool]:
        """From now on SIGTERM is a wish to end at a border; the answer tells whether it has come."""
        ...

    def keep_checkpoints(self, directory: str, *, resumes: bool) -> None:
        """They are in this directory; a run that has to start anew `resumes` from there, if it does."""
        ...

    def say_that_it_ends(self) -> None:
        """That border has come."""
        ...

    def say_whether_it_trains(self, is_training: bool) -> None:
        """A loop has ended, and its end is given to be saved; or another one goes on."""
        ...

    def save_state(self, path: Any, state: Any) -> None: ...

    def load_state(self, path: Any, device: Any) -> Any: ...

    def adapter(self, objects: Sequence[Any], options: Options) -> Adapter:
        """An adapter to the framework that these objects belong to; each strategy has its own."""
        ...

    def adapter_to(self, framework_name: str, options: Options) -> Adapter:
        """The same, by the framework's name."""
        ...

    def loop(self, strategy: Any, options: Options) -> Loop:
        """For a TensorFlow loop; each strategy has its own."""
        ...

    def launch(self, function: Callable[..., Any], *args: Any) -> Any: ...


Connect = Callable[[Request], Session]
