"""`Mirrored`: every replica holds the same weights, and every step adds up all replicas' gradients."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import numpy as np

from duoka.collectives.arrays import Array, as_array
from duoka.collectives.packing import Packing
from duoka.errors import MismatchError
from duoka.strategies.loops import Loops, as_it_is
from duoka.strategies.over_replicas import OverReplicas
from duoka.strategies.saving import Saving
from duoka.strategies.strategy import Adapter, Connect, Request, Session
from duoka.strategies.turn import Turn

Compute = Callable[[int], Any]
_NOTHING, _ARRAY = "nothing", "array"  # kinds of gathered values, beside the types of tensors


class Mirrored(Loops, Saving):
    """Synchronous data parallelism over all devices, or over those given.

    In a script, the first strategy with more than one replica hands over to Duoka's supervisor, which starts
    the script again, once per device. Put it early: what ran before it runs twice.
    """

    connect: ClassVar[Connect]  # set by session.py

    def __init__(
        self,
        devices: Any = None,
        replicas: int | None = None,
        *,
        seed: int = 0,
        threads: int | None = None,
        exact: bool | None = None,
        sync_batchnorm: bool = False,
        share_reading: bool | None = None,
        soft_placement: bool = True,
        log_placement: bool = False,
        deadline_s: float = 60.0,
        memory_fraction: float | None = None,
        memory_limit_mb: int | None = None,
        allow_growth: bool | None = None,
        device_count: Mapping[str, int] | None = None,
        respawn: bool = True,
        check_every: int | None = 100,
        snapshot: bool = True,
    ) -> None:
        request = Request(
            devices=devices,
            replicas=replicas,
            seed=seed,
            threads=threads,
            exact=exact,
            sync_batchnorm=sync_batchnorm,
            share_reading=share_reading,
            soft_placement=soft_placement,
            log_placement=log_placement,
            deadline_s=deadline_s,
            memory_fraction=memory_fraction,
            memory_limit_mb=memory_limit_mb,
            allow_growth=allow_growth,
            device_count=device_count,
            respawn=respawn,
            check_every=check_every,
            snapshot=snapshot,
        )
        self._options = request.options
        self._session: Session = type(self).connect(request)
        self._step = 0
        self._attempt = 0
        self._adapter: Adapter | None = None
        self._unprepared: Adapter | None = None  # to a framework, before anything is prepared

    @property
    def replicas(self) -> int:
        """The number of replicas, R. Fixed for the run, whatever the number of workers."""
        return self._session.num_replicas

    @property
    def num_replicas_in_sync(self) -> int:
        if self._loop_of_strategy is not None:
            self._loop_of_strategy.note_division()
        return self.replicas

    @property
    def num_workers(self) -> int:
        return self._session.num_workers

    @property
    def worker(self) -> int:
        """The number of this process among the workers."""
        return self._session.worker

    @property
    def local_replicas(self) -> tuple[int, ...]:
        """The replicas that this worker runs now."""
        return self._session.collective.replicas

    @property
    def device(self) -> Any:
        """Where this worker computes: a `torch.device` once PyTorch is imported, a `duoka.Device` otherwise."""
        return self._session.native_device

    @property
    def is_main(self) -> bool:
        """True on one worker: the one that prints and saves. The role moves when that worker is lost.

        It does not move back to a worker that was started in the place of a lost one.
        """
        return self._session.collective.ask_main(is_between=self._position() is None)

    def _is_main(self) -> bool:
        return self.worker == self._session.collective.main

    @property
    def step(self) -> int:
        """How many steps have been committed."""
        if self._loop_of_strategy is not None and self._loop_of_strategy.step:
            return self._loop_of_strategy.step
        return self._step if self._adapter is None else self._adapter.step

    @as_it_is
    def weigh(self, loss: Any, count: Any = None) -> Any:
        """For losses that are not means over samples: say over how many things (tokens) this one is a mean.

        The counts of all replicas are added up, and the gradient is divided by that once. Without a count the loss
        is a sum, and the replicas' gradients are added up as they are.
        """
        if self._loop_of_strategy is not None and self._loop_of_strategy.is_running:
            return self._loop_of_strategy.weigh(loss, count)
        return loss if self._adapter is None else self._adapter.weigh(loss, count)

    def backward(self, function: Callable[..., Any], *args: Any, scaler: Any = None, check: bool = True) -> Any:
        """Add the gradient of the mean over the global batch to `p.grad`, and return that mean.

        The function computes the loss of one replica's samples; it may run several times, on any worker. Everything
        outside of it runs once per global batch on every worker.

            def loss_of(x, y):
                return F.cross_entropy(model(x), y)

            for batch in strategy.batches(loader):
                optimizer.zero_grad()
                loss = strategy.backward(loss_of, batch)
                optimizer.step()

        Tensors, arrays and lists among the arguments are the global batch, equal on all workers, and are cut by
        samples. The function returns a mean over samples, or terms of `strategy.weigh`; with metrics,
        `(loss, metrics)`, the call returns a pair as well. `scaler` is a GradScaler. `check=False` leaves out the
        checks of the first call.
        """
        returned = self._function_style().backward(function, args, scaler, check)
        if self._session.collective.rehearsal is not None:
            self._session.collective.rehearsal.note_returned(returned)
        return returned

    def batches(self, loader: Any) -> Any:
        """The global batches of a loader, each as a handle for `strategy.backward`: len(batch), .index, .epoch."""
        return self._function_style().batches(loader)

    def rows(self, tensor: Any) -> Any:
        """One row per sample: returned as a metric, it comes back whole and in batch order on every worker."""
        return self._function_style().rows(tensor)

    def no_sync(self) -> AbstractContextManager[None]:
        """In a plain loop: backwards inside exchange nothing. The next one outside exchanges what they have added up.

        >>> with strategy.no_sync() if (i + 1) % 4 else nullcontext():  # doctest: +SKIP
        ...     (loss_fn(model(x), y) / 4).backward()
        """
        no_sync: AbstractContextManager[None] = self._function_style().no_sync()
        return no_sync

    def _function_style(self) -> Any:
        if self._adapter is None or not hasattr(self._adapter, "backward"):
            raise MismatchError(
                "strategy.backward, .batches and .rows are for PyTorch models that were prepared.",
                do="call model, optimizer, loader = strategy.prepare(model, optimizer, loader) first.",
            )
        return self._adapter

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The epochs of a run, from where it stands: a resumed one does not go through its finished epochs again.

        >>> for epoch in strategy.epochs(10):  # doctest: +SKIP
        ...     train(loader)
        """
        if (walk := getattr(self._adapter, "walk_epochs", None)) is not None:
            epochs: Iterator[int] = walk(num_epochs)
            return epochs
        trains = self._loop_of_strategy or self._adapter
        return iter(range(num_epochs)) if trains is None else trains.epochs.walk(num_epochs)

    def steps(self, num_steps: int) -> Iterator[int]:
        """The steps of a run without epochs, from where it stands. A resumed run continues at its next step.

        >>> batches = iter(strategy.batches(loader))  # doctest: +SKIP
        >>> for step in strategy.steps(1000):  # doctest: +SKIP
        ...     train(next(batches))
        """
        steps: Iterator[int] = self._function_style().walk_steps(num_steps)
        return steps

    def register(self, **things: Any) -> Any:
        """Name what belongs to the state of the run: it is saved, restored, and handed to a replacement worker.

        Numbers, strings, tensors, arrays, and lists and dictionaries of them live on the object that is returned.
        Objects with `state_dict` and `load_state_dict`, and random generators, stay where they are. Call it before
        training.

        >>> state = strategy.register(n=0, best=0.0, ema=averaged_model)  # doctest: +SKIP
        >>> state.n += 1  # doctest: +SKIP
        """
        registered = getattr(self._adapter, "registered", None)
        if registered is not None:
            registered.register(things)
            return registered
        if self._adapter is None:
            self._refuse_early_register()
        self._register_objects(things)
        return None

    def _refuse_early_register(self) -> None:
        if "torch" in sys.modules and not {"keras", "tensorflow"} & set(sys.modules):
            raise MismatchError("strategy.register was called before strategy.prepare.", do="call it after.")

    @property
    def resumed(self) -> bool:
        """Whether this run continues from a checkpoint, or from a snapshot in memory after a loss of all workers."""
        has_checkpoint = self._checkpoints is not None and self._checkpoints.resumed_step is not None
        return has_checkpoint or self._session.is_restarted

    def prepare(self, *objects: Any, sharded: bool = False) -> Any:
        """Tie models, optimizers, loaders, schedulers and scalers to this run; they are returned in the same order.

        A model stays the same object. The batch size of a loader is the global one. With `sharded`, each worker's
        loader yields samples of its own, which it has chosen by `strategy.worker`: for streams, in plain style.
        """
        if self._adapter is None:
            self._adapter = self._unprepared or self._session.adapter(objects, self._options)
        if sharded and not hasattr(self._adapter, "backward"):
            raise MismatchError("sharded=True is for PyTorch loaders.", do="leave it out.")
        prepared = self._adapter.prepare(objects, is_sharded=True) if sharded else self._adapter.prepare(objects)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Keras models that are made or compiled inside train on all replicas: `fit` and the rest stay as they are.

        It may be opened many times, and models may be trained inside. With one replica nothing changes, but for
        `strategy.checkpoint`, which saves their training.
        """
        if self._adapter is None:
            self._adapter = self._unprepared or self._session.adapter_to("keras", self._options)
        with self._adapter.scope(self):
            yield

    def sum_over_replicas(self, compute: Compute) -> Any:
        """One step: the sum of `compute(replica)` over all replicas, in tree order, on every worker.

        `compute` gives an array or a list of arrays, and must depend on the replica's number and on what all
        workers share, nothing else: when a worker is lost, another computes its replicas again.

        >>> import duoka
        >>> strategy = duoka.Mirrored(devices=1, replicas=4)          # doctest: +SKIP
        >>> strategy.sum_over_replicas(lambda replica: replica * 1.0) # doctest: +SKIP
        array(6.)
        """
        self._refuse_in_evaluation("sum_over_replicas")
        collective = self._session.collective
        if collective.joining is not None:
            collective.joining.refuse("what a loop of sum_over_replicas keeps between its steps is not known to Duoka")
        self._attempt += 1  # also when it fails: a step that one worker leaves out must not pass for the next one

        def compute_one(replica: int) -> Any:
            collective.work_on(self._step, (replica,))
            return compute(replica)

        first = collective.replicas[0]
        given = compute_one(first)
        layout = Packing.of(_arrays(given))
        ready = {first: _arrays(given)}
        buffers = [collective.scratch(count, dtype) for dtype, count in layout.sizes.items()]
        exchange = collective.exchange(buffers, f"{self._attempt} over replicas of {layout.title}")

        def place(replica: int) -> bytes:
            arrays = ready.pop(replica) if replica in ready else _arrays(compute_one(replica))
            layout.pack(arrays, [exchange.slot(buffer, replica) for buffer in buffers], replica)
            return b""

        exchange.carry_out(place)
        results = layout.unpack([exchange.result(buffer) for buffer in buffers])
        collective.end_step()
        self._step += 1
        return results if isinstance(given, (list, tuple)) else results[0]

    def sum(self, value: Any) -> Any:
        """The sum over all replicas.

        One value stands for all replicas of this worker together; a list has one for each of `local_replicas`.
        """
        values = [as_array(v) for v in self._on_host(value)]
        if self._is_idle("sum"):
            values = [np.zeros_like(v) for v in values]
        return self._over_replicas.sum(values, is_list=isinstance(value, (list, tuple)))

    def mean(self, value: Any, count: Any = None) -> Any:
        """The mean over all replicas, weighted by `count` (rows, tokens). A count of zero leaves a value out.

        One value stands for all replicas of this worker together, with one count; without a count it weighs as many
        times as there are such replicas. In a plain loop of PyTorch it weighs as many times as the worker has samples
        in the batch. A list has one value, and one count, for each of `local_replicas`.
        """
        is_idle = self._is_idle("mean")
        if count is None and not isinstance(value, (list, tuple)):
            count = None if self._adapter is None else self._adapter.num_samples
        count = 0 if is_idle else count
        values = [_as_float(v) for v in self._on_host(value)]
        is_list = isinstance(value, (list, tuple))
        if not is_list and isinstance(count, (list, tuple)):
            raise MismatchError(
                f"strategy.mean was given one value and {len(count)} counts.",
                do="give one count with one value, or a list of values with a list of counts.",
            )
        counts = None if count is None else [float(c) for c in _as_list(count)]
        return self._over_replicas.mean(values, counts, is_list=is_list)

    @as_it_is
    def gather(self, value: Any, axis: int = 0) -> Any:
        """Every replica's value, in the order of replicas, on every worker. Sizes may differ.

        What `run` has returned comes as one tensor, put together along the axis. Anything else comes as a list:

        one value stands for all replicas of this worker together: it comes in the place of the first of them. After
        an evaluation loop the list, put together, is in the order of the dataset. A list has one value for each of
        `local_replicas`. None means nothing, and leaves no trace in the answer.
        """
        if self._loop_of_strategy is not None and (self.replicas == 1 or self._loop_of_strategy.owns(value)):
            return self._loop_of_strategy.gather(value, axis)
        value = None if self._is_idle("gather") else value
        values = list(value) if isinstance(value, (list, tuple)) else self._in_first_place(value)
        adapter = self._adapter_for(value for value in values if value is not None)
        given = self._over_replicas.gather([_carry(value, adapter) for value in values])
        return [_deliver(kind, array, adapter, values[0]) for kind, array in given if kind != _NOTHING]

    def evaluate(self, function: Callable[[Any], Any], loader: Any) -> Any:
        """What `function(batch)` counts, over the whole loader, on every worker: sum / count.

        The function returns a pair (sum, count), or a dictionary of such pairs by name; the answer is a number, or a
        dictionary of numbers, with tensors where sums are tensors of more than one number. The loader may be prepared
        or not: every replica takes its own block of it. Models are in eval mode, without gradients. The bits do not
        depend on the number of workers, and a worker that is lost is made up for.

            def count_correct(batch):
                images, labels = batch
                return (model(images).argmax(1) == labels).sum(), len(labels)

            accuracy = strategy.evaluate(count_correct, test_loader)
        """
        adapter = self._adapter_for([loader])
        if adapter is None:
            raise MismatchError(
                f"strategy.evaluate cannot split a {type(loader).__name__}.",
                do="give it a loader of the framework, prepared or not.",
            )
        return adapter.evaluate(function, loader)

    def barrier(self) -> None:
        """Wait until all workers are here."""
        self._refuse_in_evaluation("barrier")
        self._session.collective.barrier()

    def _is_idle(self, call: str) -> bool:
        """Whether this worker has no samples in the batch under way: what it computes does not count."""
        self._refuse_in_evaluation(call)
        if self._adapter is None:
            return False
        self._adapter.refuse_number(call)
        return self._adapter.num_samples == 0

    def _refuse_in_evaluation(self, call: str) -> None:
        adapter = self._adapter or self._unprepared
        if adapter is not None:
            adapter.evaluation.refuse(f"strategy.{call}")

    def _adapter_for(self, values: Iterable[Any]) -> Adapter | None:
        """The framework that these values belong to; None for numbers and arrays. Before `prepare` it holds nothing."""
        if self._adapter is not None:
            return self._adapter
        if self._unprepared is None:
            try:
                self._unprepared = self._session.adapter(list(values), self._options)
            except MismatchError:
                return None
        return self._unprepared

    @property
    def _over_replicas(self) -> OverReplicas:
        collective = self._session.collective
        can_go_back = self._checkpoints is not None and self._checkpoints.resumes and collective.joining is not None
        can_go_back |= bool(getattr(self._adapter, "is_plain", False))  # all workers restart from memory
        return OverReplicas(collective, self._tell, can_go_back=can_go_back)

    def _tell(self, text: str) -> None:
        if self._is_main():
            builtins.print(f"duoka: {text}", file=sys.stderr)

    def _on_host(self, value: Any) -> list[Any]:
        values = _as_list(value)
        adapter = self._adapter_for(values)
        return values if adapter is None else [adapter.tensors.on_host(v) for v in values]

    def _in_first_place(self, value: Any) -> list[Any]:
        """One value for all replicas of this worker: the others give an empty part of it, or nothing."""
        own = self._session.collective.own_replicas
        adapter = self._adapter or self._unprepared
        replicas = (None if adapter is None else adapter.evaluation.replicas_of_last_loop) or own
        has_rows = getattr(value, "ndim", 0) > 0
        if has_rows and replicas[-1] - replicas[0] >= len(replicas):
            raise MismatchError(
                f"One value stands for the replicas {', '.join(map(str, replicas))}, which do not follow one another.",
                why="this worker took over replicas of a lost one: its rows are not in order.",
                do="run it again after the next step, or give a list: one value for each of strategy.local_replicas.",
            )
        return [value, *[value[:0] if has_rows else None] * (len(own) - 1)]

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once, on the main worker."""
        if self.is_main:
            builtins.print(*args, **kwargs)

    def progress(self, iterable: Iterable[Any] | None = None, desc: str | None = None, total: int | None = None) -> Any:
        """Iterate as before, and show how far it is: in global batches, rows per second, and the loss if you give it.

        On a terminal it is a bar, elsewhere a line every few seconds; only the main worker shows it.

        >>> bar = strategy.progress(loader, desc="epoch 1")  # doctest: +SKIP
        >>> for x, y in bar:  # doctest: +SKIP
        ...     loss = train(x, y)
        ...     bar.loss = strategy.mean(loss)

        Any name will do in the place of `loss`. Loops that were written with tqdm keep its words: `total=`,
        `with ... as bar`, `bar.update(1)`, `bar.set_postfix(...)`, `bar.set_description(...)`.
        """
        return self._session.progress(iterable, desc, total, self._is_main, self._position)

    def _position(self) -> tuple[int, int] | None:
        return None if self._adapter is None else self._adapter.position

    @contextmanager
    def main_first(self, *, deadline_s: float = 1800.0) -> Iterator[None]:
        """The main worker runs this block while the others wait, then they run it: for "download once".

        >>> with strategy.main_first():  # doctest: +SKIP
        ...     dataset = download("data")  # the others find it there
        """
        self._refuse_in_evaluation("main_first")
        turn = Turn(self._session.collective, "strategy.main_first", deadline_s)
        if turn.is_mine():
            with turn.acting():
                yield
        else:
            yield

    def launch(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on all workers from a notebook; returns what the main worker's call returned.

        The function's result is made of numbers, strings, lists, dictionaries and arrays.
        """
        return self._session.launch(function, *args)


def _arrays(given: Any) -> list[Array]:
    return [as_array(part) for part in given] if isinstance(given, (list, tuple)) else [as_array(given)]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _carry(value: Any, adapter: Adapter | None) -> tuple[str, Array]:
    """What kind of thing a value is, and its bits."""
    if value is None:
        return _NOTHING, np.empty(0, np.uint8)
    tensor = None if adapter is None else adapter.tensors.read(value)
    return (_ARRAY, as_array(value)) if tensor is None else tensor


def _deliver(kind: str, array: Array, adapter: Adapter | None, like: Any) -> Any:
    return array if kind == _ARRAY or adapter is None else adapter.tensors.make(kind, array, like)


def _as_float(value: Any) -> Array:
    array = as_array(value)
    return array.astype(np.float64) if array.dtype.kind in "iub" else array
