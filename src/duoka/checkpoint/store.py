"""A folder of checkpoints: each is there as a whole or not at all, and is verified before it is used.

    checkpoints/
      step-00001200/
        state.safetensors     the tensors, and the shape of the state
        facts.json            step, epoch, position, seed, ...
        manifest.json         size and SHA-256 of the two, written last

A checkpoint is written into a hidden folder beside the others, made durable, read back, and only then renamed. Older
ones are removed after that; damaged ones never are.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from duoka.checkpoint.claims import claim
from duoka.checkpoint.codec import Codec
from duoka.checkpoint.disk import Disk, make_folders, sync_folder
from duoka.checkpoint.locks import exclusive, shared
from duoka.checkpoint.manifest import FACTS, explain, open_verified, signature
from duoka.checkpoint.names import Place, list_left_overs, list_places, next_name, old_name, partial_name
from duoka.checkpoint.reading import Found, load_folder
from duoka.checkpoint.sealing import fill_folder, remove_folder
from duoka.checkpoint.setting_aside import move_aside
from duoka.checkpoint.snapshot import Snapshot, take
from duoka.errors import CheckpointDamaged, CheckpointError, CheckpointOfOtherVersion

_FEWEST_KEPT = 2


class Store:
    """Checkpoints in one folder. Every error is a CheckpointError; an error while saving leaves older ones as they are.

    `keep` is how many verified ones stay, at least two; None keeps all. `say` gets one line for each damaged one, and
    for what could not be cleaned up; it is called on the thread that saves or loads.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        say: Callable[[str], None] = lambda line: None,
        *,
        disk: Disk | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        if keep is not None and (type(keep) is not int or keep < _FEWEST_KEPT):
            raise CheckpointError(
                f"keep={keep!r} is not a number of checkpoints that can be kept.",
                why="if the only one were damaged, nothing would be left to go back to.",
                do=f"keep {_FEWEST_KEPT} or more, or all of them (None).",
            )
        self.directory, self.say = os.path.realpath(directory), say
        self._keep, self._deadline_s = keep, deadline_s
        self._disk = Disk() if disk is None else disk
        self._verified: dict[str, tuple[Any, ...]] = {}  # by name: the signature at the time
        self._told: set[str] = set()

    def open(self) -> None:
        """Make the directory, and see that a checkpoint can be written there: where that can never be, say so now."""
        with self._changing(f"Checkpoints cannot be kept in {self.directory}.", ""):
            make_folders(self._disk, self.directory)
            probe = self._path(partial_name("step-00000000"))  # a name that the next save would clean up
            try:
                self._disk.make_folder(probe)
                os.close(self._disk.create(os.path.join(probe, FACTS)))
            finally:
                if os.path.isdir(probe):
                    remove_folder(self._disk, probe)

    def claim(self, run: str) -> None:
        """Take the directory for this run until this process ends; another run in it is an error."""
        with self._changing(f"Checkpoints cannot be kept in {self.directory}.", ""):
            claim(self.directory, run)

    def save(self, step: int, facts: dict[str, Any], state: Any, codecs: Sequence[Codec]) -> str:
        """Write a state as the checkpoint of this step; returns its folder once it is on the disk."""
        return self.write(take(step, facts, state, codecs))

    def write(self, snapshot: Snapshot) -> str:
        """The same, of a snapshot that was taken before."""
        with self._changing(f"The checkpoint of step {snapshot.step} could not be saved in {self.directory}."):
            make_folders(self._disk, self.directory)
            with exclusive(self.directory, self._deadline_s) as is_ours:
                if is_ours:  # then what lies around is of processes that are gone
                    self._remove_left_overs()
                name = self._write_new(snapshot)
                self._prune(name, snapshot.facts.get("agreed_step"))
        return self._path(name)

    def newest(self, codecs: Sequence[Codec], device: Any = None) -> Found | None:
        """The newest checkpoint that is whole, or None if there are none at all.

        Damaged ones are named, skipped and left as they are. Nothing but damaged ones is a CheckpointDamaged.
        """
        wrong: list[CheckpointDamaged] = []
        with self._reading() as places:
            for place in reversed(places):
                try:
                    return load_folder(self._path(place.name), place.step, codecs, device)
                except FileNotFoundError:
                    continue  # removed just now, where there are no locks
                except CheckpointDamaged as error:
                    wrong.append(error)
                    self._tell(f"{explain(error)} This checkpoint is skipped, and left as it is.")
        if not wrong:
            return None
        why = "\n".join(map(explain, wrong))
        if all(isinstance(error, CheckpointOfOtherVersion) for error in wrong):
            raise CheckpointOfOtherVersion(
                f"The checkpoints in {self.directory} were written by another version of Duoka.",
                why=why,
                do="resume with that version; or move them away, and the run starts from its beginning.",
            )
        raise CheckpointDamaged(
            f"None of the checkpoints in {self.directory} can be used: {len(wrong)} of {len(wrong)} are damaged.",
            why=why,
            do="put a copy in their place; or move them away, and the run starts from its beginning.",
        )

    def load(self, name: str, codecs: Sequence[Codec], device: Any = None) -> Found:
        """The checkpoint of this name: how all workers take the one that one of them has found."""
        with self._reading() as places:
            for place in places:
                if place.name == name:
                    with suppress(FileNotFoundError):
                        return load_folder(self._path(name), place.step, codecs, device)
        raise CheckpointError(f"There is no checkpoint {name} in {self.directory}.")

    def names(self) -> list[str]:
        """Of all checkpoints, oldest first, verified or not."""
        return [place.name for place in list_places(self.directory)]

    def set_aside(self, above_step: int = -1) -> str | None:
        """Move checkpoints of later steps into a folder beside, and return it, or None if there are none.

        For a run that starts afresh, or goes back: what it saves would not be the newest.
        """
        with self._changing(f"The checkpoints in {self.directory} could not be set aside."):
            return move_aside(self._disk, self.directory, above_step, self._deadline_s)

    def _write_new(self, snapshot: Snapshot) -> str:
        name = next_name(self.directory, snapshot.step)
        partial = self._path(partial_name(name))
        try:
            fill_folder(self._disk, partial, snapshot)
            known = _read_back(partial, snapshot.step)
            self._disk.rename(partial, self._path(name))
        except BaseException:
            with suppress(OSError):
                remove_folder(self._disk, partial)
            raise
        sync_folder(self._disk, self.directory)
        self._verified[name] = known
        return name

    def _prune(self, written: str, agreed_step: int | None) -> None:
        """Remove all but the newest verified ones. The one just written counts as the newest, whatever its step.

        The newest one up to the step at which replicas were last found equal stays as well: should they turn out to
        differ, all that were saved later are suspect.
        """
        if self._keep is None:
            return
        newest_first = sorted(
            list_places(self.directory), key=lambda place: (place.name == written, place), reverse=True
        )
        verified = [place for place in newest_first if self._is_verified(place)]
        agreed = [place for place in verified if agreed_step is not None and place.step <= agreed_step]
        for place in verified[self._keep :]:
            if place in agreed[:1]:
                continue
            try:
                self._remove(place.name)
            except OSError as error:
                self._tell(f"{self._path(place.name)} could not be removed: {error.strerror or error}.")

    def _remove(self, name: str) -> None:
        # It gets another name first: killed in the middle, half a checkpoint would look like a damaged one.
        old = self._path(old_name(name))
        self._disk.rename(self._path(name), old)
        sync_folder(self._disk, self.directory)
        remove_folder(self._disk, old)
        self._verified.pop(name, None)

    def _is_verified(self, place: Place) -> bool:
        """It is read in full once, and again when its files have changed."""
        path = self._path(place.name)
        try:
            known = signature(path)
            if self._verified.get(place.name) != known:
                with open_verified(path, place.step):
                    self._verified[place.name] = known
            return True
        except CheckpointDamaged as error:
            self._tell(f"{explain(error)} This checkpoint is not counted, and left as it is.")
        except OSError as error:
            self._tell(f"{path} cannot be read: {error.strerror}. It is not counted, and left as it is.")
        return False

    def _remove_left_overs(self) -> None:
        for path in list_left_overs(self.directory):
            with suppress(OSError):  # for example because there is something else in it
                remove_folder(self._disk, path)

    @contextmanager
    def _reading(self) -> Iterator[list[Place]]:
        """The checkpoints that are there; nobody removes one meanwhile."""
        with ExitStack() as stack:
            with suppress(OSError):
                stack.enter_context(shared(self.directory, self._deadline_s))
            yield list_places(self.directory)

    @contextmanager
    def _changing(self, what: str, kept: str = "; older checkpoints are as they were") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = f"{error.strerror or error}{kept}."
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            do = f"{'make room there, or ' if is_full else ''}choose a directory that can be written."
            raise CheckpointError(what, why=why, do=do) from None

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _tell(self, line: str) -> None:
        """Once: what is damaged is met again at every save."""
        if line not in self._told:
            self._told.add(line)
            self.say(line)


def _read_back(folder: str, step: int) -> tuple[Any, ...]:
    """See that what was written is what is read, before older ones go. Gives the signature of what was read."""
    known = signature(folder)
    try:
        with open_verified(folder, step):
            return known
    except CheckpointDamaged as error:
        raise OSError(errno.EIO, f"what is read back is not what was written: {explain(error)}") from error
