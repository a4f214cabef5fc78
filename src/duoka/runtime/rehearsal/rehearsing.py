"""A rehearsal: several runs of one script, and the comparison of each with the first."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from duoka.errors import DeadlineExceeded, RehearsalError, ScriptFailed
from duoka.runtime.crew import count_workers
from duoka.runtime.plan import Plan
from duoka.runtime.rehearsal.compare import TOLERANCE, Comparison, Key, compare, count_noise, find_noise
from duoka.runtime.rehearsal.record import Record, join_records
from duoka.runtime.rehearsal.recorder import BEFORE
from duoka.runtime.rehearsal.runs import Run, Runs
from duoka.runtime.rehearsal.settings import Death

KINDS = ("repeated", "killed", "resumed", "one-worker", "one-replica")
REPEATED, KILLED, RESUMED, ONE_WORKER, ONE_REPLICA = KINDS


@dataclass(frozen=True)
class Row:
    """One comparison. Exactly one of `comparison`, `failure` and `reason` is set."""

    kind: str
    title: str
    sides: tuple[str, str] = ("", "")  # names of the two runs
    comparison: Comparison | None = None
    failure: str = ""  # of the second run, with its last words
    reason: str = ""  # why there was nothing to compare
    is_batchnorm: bool = False  # the runs differ, and are equal when BatchNorm uses its running statistics

    @property
    def is_finding(self) -> bool:
        is_unequal = self.comparison is not None and not self.comparison.is_equal
        return bool(self.failure) or (is_unequal and not self.is_batchnorm)


@dataclass(frozen=True)
class Report:
    rows: tuple[Row, ...]
    num_steps: int  # trained by each run
    num_left_out: int  # printed lines, because they differ between two undisturbed runs
    left_out: tuple[str, ...]  # the statements that printed them

    @property
    def has_findings(self) -> bool:
        return any(row.is_finding for row in self.rows)


class Rehearsing:
    def __init__(self, plan: Plan, runs: Runs, num_steps: int, seed: int, tell: Callable[[str], None]) -> None:
        self._plan, self._runs, self._num_steps, self._seed, self._tell = plan, runs, num_steps, seed, tell
        self._noise: set[Key] = set()

    def carry_out(self, kinds: Collection[str] = KINDS) -> Report:
        """Run the script undisturbed, then in these ways. Raises what keeps it from being rehearsed at all."""
        first = self._run_first()
        rows: list[Row] = []
        if REPEATED in kinds:
            rows.append(self._repeat(first))
        is_random = any(row.is_finding for row in rows)
        if KILLED in kinds:
            rows.append(self._kill(first, is_random))
        if RESUMED in kinds:
            rows.append(self._stop_and_resume(first, is_random))
        if ONE_WORKER in kinds:
            rows.append(self._use_one_worker(first, is_random))
        if ONE_REPLICA in kinds:
            rows.append(self._use_one_replica(first, is_random))
        statements = tuple(sorted({where for where, _ in self._noise if where}))
        return Report(tuple(rows), first.main.num_steps, count_noise(first, self._noise), statements)

    # The runs.

    def _run_first(self) -> Record:
        run = self._run("undisturbed", self._workers)
        if run.finished.is_late:
            raise DeadlineExceeded(
                f"The script has not trained {self._num_steps} steps within {run.finished.seconds:.0f} s.",
                why=f"the run was killed then; it had last written:\n{run.finished.last_words}",
                do="pass a longer --timeout in seconds, or fewer --steps.",
            )
        if run.finished.exit_code or run.record is None:
            raise ScriptFailed(
                "The script fails without being disturbed, so there is nothing to compare.",
                why=f"on {self._workers}, {run.failure}:\n{run.finished.last_words}",
                do="correct the script until `duoka run` trains it, then rehearse it again.",
            )
        if run.record.main.num_steps == 0:
            raise RehearsalError(
                "The script has ended without training.",
                why="it made a strategy, but no step of a prepared model, of fit or of strategy.run followed.",
                do="rehearse a script, with arguments, that trains at least one step.",
            )
        return run.record

    def _repeat(self, first: Record) -> Row:
        run = self._run("undisturbed, repeated", self._workers)
        title, sides = "repeated", ("first run", "second run")
        if run.record is not None:
            self._noise = find_noise(first, run.record)
        return self._row(REPEATED, title, sides, first, run)

    def _kill(self, first: Record, is_random: bool) -> Row:
        if is_random:
            return Row(KILLED, "worker killed", reason=_RANDOM)
        if first.main.is_plain:
            return Row(KILLED, "worker killed", reason=_PLAIN)
        chance = random.Random(self._seed)
        worker = chance.randrange(1, self._plan.num_workers)
        phase = chance.choice([BEFORE, *first.phases])
        death = Death(worker, chance.randrange(first.main.num_steps), phase)
        run = self._run(f"worker {worker} killed", self._workers, death=death)
        title = f"worker {worker} killed"
        if run.record is not None:
            if run.record.killed is None:
                return Row(KILLED, title, failure=f"worker {worker} was to be killed in step {death.step}, and was not")
            _, step, phase = run.record.killed
            self._tell(f"worker {worker} was killed in step {step}, phase '{phase}'; --seed {self._seed} repeats this")
        return self._row(KILLED, title, ("undisturbed", title), first, run)

    def _stop_and_resume(self, first: Record, is_random: bool) -> Row:
        title = "stopped and resumed"
        if is_random:
            return Row(RESUMED, title, reason=_RANDOM)
        chance = random.Random(self._seed)
        stop = chance.randrange(1, first.main.num_steps) if first.main.num_steps > 1 else 1
        before = self._run("stopped", self._workers, stop=stop)
        if before.record is None:
            return Row(RESUMED, title, failure=_describe_failure(before))
        where = before.record.main.stopped
        if not where:
            return Row(RESUMED, title, reason="the script does not train in strategy.epochs or strategy.steps")
        after = self._run("resumed", self._workers, stop=stop, resumes=True)
        if after.record is None:
            return Row(RESUMED, title, failure=_describe_failure(after))
        sides = ("undisturbed", "resumed")
        joined = join_records(before.record, after.record)
        self._tell(f"the script was stopped {where}, and resumed; --seed {self._seed} repeats this")
        return Row(RESUMED, title, sides, compare(first, joined, self._noise))

    def _use_one_worker(self, first: Record, is_random: bool) -> Row:
        title = f"{self._plan.num_replicas} replicas on 1 worker"
        if is_random:
            return Row(ONE_WORKER, title, reason=_RANDOM)
        if first.main.is_plain:
            return Row(ONE_WORKER, title, reason="a plain loop needs one replica per worker")
        run = self._run(title, "1 worker", plan=replace(self._plan, devices=self._plan.devices[:1]))
        return self._row(ONE_WORKER, title, (self._workers, "1 worker"), first, run)

    def _use_one_replica(self, first: Record, is_random: bool) -> Row:
        several = f"{self._plan.num_replicas} replicas"
        title, sides = f"{several} and 1 replica", (several, "1 replica")
        if is_random:
            return Row(ONE_REPLICA, title, reason=_RANDOM)
        if not first.main.knows_layers:
            return Row(ONE_REPLICA, title, reason="Duoka switches dropout off in PyTorch only")
        left = first
        if first.main.has_dropout:
            of_several = self._run(f"{several}, dropout off", self._workers, dropout=False)
            if of_several.record is None:
                return Row(ONE_REPLICA, title, failure=_describe_failure(of_several))
            left = of_several.record
        run = self._run("1 replica, dropout off", "1 worker", plan=self._alone, dropout=False)
        row = self._row(ONE_REPLICA, title, sides, left, run, TOLERANCE)
        if row.comparison is None or row.comparison.is_equal or not first.main.has_batchnorm:
            return row
        return replace(row, is_batchnorm=self._is_batchnorm_the_reason(several))

    def _is_batchnorm_the_reason(self, several: str) -> bool:
        """Run both sides once more with BatchNorm held still: then they are equal, unless there is another reason."""
        left = self._run(f"{several}, BatchNorm held", self._workers, dropout=False, batchnorm=False)
        right = self._run("1 replica, BatchNorm held", "1 worker", plan=self._alone, dropout=False, batchnorm=False)
        if left.record is None or right.record is None:
            return False
        return compare(left.record, right.record, self._noise, TOLERANCE).is_equal

    def _run(
        self,
        title: str,
        workers: str,
        *,
        plan: Plan | None = None,
        death: Death | None = None,
        dropout: bool = True,
        batchnorm: bool = True,
        stop: int | None = None,
        resumes: bool = False,
    ) -> Run:
        name = "-".join(title.replace(",", "").lower().split())
        layers: dict[str, Any] = {"dropout": dropout, "batchnorm": batchnorm}
        run = self._runs.run(name, plan or self._plan, death=death, stop=stop, resumes=resumes, **layers)
        trained = "failed" if run.record is None else f"{run.record.main.num_steps} steps"
        self._tell(f"{title} ({workers}): {trained}, {run.finished.seconds:.1f} s")
        return run

    def _row(
        self, kind: str, title: str, sides: tuple[str, str], left: Record, run: Run, tolerance: float = 0.0
    ) -> Row:
        if run.record is None:
            return Row(kind, title, sides, failure=_describe_failure(run))
        return Row(kind, title, sides, compare(left, run.record, self._noise, tolerance))

    @property
    def _workers(self) -> str:
        return count_workers(self._plan.num_workers)

    @property
    def _alone(self) -> Plan:
        return replace(self._plan, devices=self._plan.devices[:1], num_replicas=1)


_RANDOM = "two undisturbed runs already differ"
_PLAIN = "a plain loop is resumed after a loss, on all workers: see the next row"


def _describe_failure(run: Run) -> str:
    return f"{run.failure}:\n{run.finished.last_words}"
