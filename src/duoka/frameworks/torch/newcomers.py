"""A worker in the place of a lost one comes through the script: past what is finished, to where the others train.

Members of a run leave a mark when they begin an epoch of `strategy.epochs`, and when they have ended a pass over a
loader. A newcomer that comes to a pass with such a mark leaves it out; at the first one without it joins the others.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from duoka.collectives.joining import Joining
from duoka.data.generators import as_plain, from_plain
from duoka.data.position import Epochs
from duoka.frameworks.handing import take
from duoka.frameworks.marks import describe_also, take_also
from duoka.frameworks.torch.generators import capture_generators, restore_generators
from duoka.frameworks.torch.loop import Loop
from duoka.strategies.also import Also

if TYPE_CHECKING:
    from duoka.frameworks.torch.adapter import TorchAdapter
    from duoka.frameworks.torch.loader import PreparedLoader


class Newcomers:
    def __init__(self, joining: Joining | None, adapter: TorchAdapter) -> None:
        self._joining = joining
        self._adapter = adapter
        self._has_joined = False

    @property
    def _loop(self) -> Loop:
        return self._adapter.loop

    @property
    def _epochs(self) -> Epochs:
        return self._adapter.epochs

    @property
    def _also(self) -> Also:
        return self._adapter.options.borders.also

    @property
    def _is_led(self) -> bool:
        """This worker has joined, and is on its way to the batch at which it did: the others have left marks before."""
        return self._has_joined and self._loop.is_replaying

    # Passes over loaders.

    def begin_pass(self, loader: PreparedLoader) -> None:
        """A member lets it be known that its state can be had; a newcomer leaves this pass out, or joins in it."""
        joining = self._joining
        if joining is None or self._loop.body is not None:
            return
        if self._adapter.gradients.ordinal:
            joining.refuse("it trains with more than one strategy, and the state of one is not that of all")
        elif loader.is_stream:
            joining.refuse("a stream (an IterableDataset) would have to be read from its beginning")
        elif not joining.is_newcomer:
            joining.allow()
        else:
            facts = joining.pass_by(self._name(loader), partial(take, self._adapter, self._also))
            self._has_joined = facts is None
            if facts is not None:
                loader.passes.resume(facts["passes"])
                self._count(facts)

    def end_pass(self, loader: PreparedLoader) -> None:
        joining = self._joining
        if joining is None or joining.is_newcomer or self._loop.body is not None or self._is_led:
            return
        joining.end_step()  # of a batch that was left in its middle
        facts = {"passes": loader.passes.capture()} | self._counts(with_also=loader.passes.has_led)
        joining.mark(self._name(loader), facts)

    def _name(self, loader: PreparedLoader) -> str:
        return f"the end of a pass over loader {self._adapter.number_of(loader)}"

    # Loops over epochs.

    def begin_epochs(self) -> None:
        """A newcomer goes on with the epoch in which the others are."""
        joining = self._joining
        if joining is None or not joining.is_newcomer:
            return
        facts = joining.jump_to_last(self._name_of_epochs(self._epochs.num_calls + 1))
        if facts is not None and facts.get("is_over"):
            self._epochs.resume({"call": self._epochs.num_calls + 2, "epoch": 0})
            if "loaders" in facts:
                self._adapter.resume_loaders(facts)
                for loader in self._adapter.loaders:
                    loader.passes.begin_resumed_epoch()
            restore_generators(from_plain(facts["generators"]))
            self._count(facts)
        elif facts is not None:
            self._epochs.resume({"call": self._epochs.num_calls + 1, "epoch": facts["epoch"]})
            self._adapter.resume_loaders(facts)
            self._adapter.begin_epoch_of_others(facts["generators"])
            self._count(facts)

    def begin_epoch(self, is_resumed: bool) -> None:
        joining, name = self._joining, self._name_of_epochs(self._epochs.num_calls)
        if self._is_led:
            return
        if joining is not None and not joining.is_newcomer:
            facts = {"epoch": self._epochs.epoch, "generators": self._adapter.describe_generators()}
            joining.mark(name, facts | self._adapter.describe_loaders() | self._counts())
        elif joining is not None and not is_resumed:
            facts = joining.take_mark(name)
            self._adapter.begin_epoch_of_others(facts["generators"])
            self._count(facts)

    def come_by_finished(self, *, is_last: bool) -> None:
        """A run that is resumed leaves out a loop, and so do those who come to it.

        How many passes were over at its end is known of the last one; others are followed by it.
        """
        joining = self._joining
        if joining is not None and not joining.is_newcomer and not self._is_led:
            facts = {"is_over": True, "generators": as_plain(capture_generators())} | self._counts()
            facts |= self._adapter.describe_loaders() if is_last else {}
            joining.mark(self._name_of_epochs(self._epochs.num_calls), facts)

    @staticmethod
    def _name_of_epochs(call: int) -> str:
        return f"an epoch of loop {call}"

    def _counts(self, *, with_also: bool = True) -> dict[str, Any]:
        """Passes that only follow may end later than those whose bodies have changed the user's objects."""
        counts = {"step": self._loop.step, "batch": self._loop.batch}
        also = describe_also(self._adapter.trail.last) if with_also else {}
        return counts | {"evaluations": self._adapter.evaluation.capture()} | also

    def _count(self, facts: dict[str, Any]) -> None:
        """What `strategy.step` and the user's objects show between loops, and by which numbers calls are known."""
        self._loop.step, self._loop.batch = facts["step"], facts["batch"]
        self._adapter.evaluation.restore(facts["evaluations"])
        take_also(self._also, facts)
