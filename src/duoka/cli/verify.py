"""`duoka verify RUN_A RUN_B`: whether two runs had the same weights, and if not, from which step on."""

from __future__ import annotations

import argparse
from pathlib import Path

from duoka.errors import JournalError
from duoka.monitor.journal import Story, read_journal

EPILOG = """RUN is the directory of a run (runs/20260101-120000-abcdef), or its journal.jsonl.
Exit code: 0 equal at all steps that both have checked, 1 different, 2 they cannot be compared.
"""

EQUAL, DIFFERENT = 0, 1
# What must be the same for equal bits; the number of workers need not be.
_SETTINGS = ("replicas", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_a", metavar="RUN_A", type=Path, help="the directory of a run")
    parser.add_argument("run_b", metavar="RUN_B", type=Path, help="the directory of another")


def run(arguments: argparse.Namespace) -> int:
    code, text = compare(read_journal(arguments.run_a), read_journal(arguments.run_b))
    print(text)
    return code


def compare(a: Story, b: Story) -> tuple[int, str]:
    """The exit code, and what there is to say. Raises JournalError for what cannot be compared."""
    common = _common_steps(a, b)
    notes = [*_notes_on(a), *_notes_on(b), *_note_on_threads(a, b)]
    parted = next((step for step in common if a.checks[step]["digest"] != b.checks[step]["digest"]), None)
    if parted is None:
        lines = [f"equal: {_count(len(common))} checked in both, from {common[0]} to {common[-1]}"]
        return EQUAL, "\n".join([*lines, *notes])
    before = [step for step in common if step < parted]
    last = f"equal until step {before[-1]}" if before else "not equal at any step before"
    lines = [f"different: they part at step {parted} ({last}; {_count(len(common))} checked in both)"]
    lines += [f"  {story.path}: {_describe(story, parted)}" for story in (a, b)]
    return DIFFERENT, "\n".join([*lines, *notes])


def _common_steps(a: Story, b: Story) -> list[int]:
    for name in _SETTINGS:
        one, other = a.run.get(name), b.run.get(name)
        if one != other:
            raise JournalError(
                f"These runs cannot be compared: {name} is {one} in one and {other} in the other.",
                why="their bits are not meant to be equal.",
                do=f"compare runs with the same {' and '.join(_SETTINGS)}.",
            )
    common = sorted(set(a.checks) & set(b.checks))
    if not common:
        raise JournalError(
            "These runs cannot be compared: no step was checked in both.",
            why=f"{_range_of(a)} in one, {_range_of(b)} in the other.",
            do="run both with the same check_every.",
        )
    return common


def _describe(story: Story, step: int) -> str:
    check = story.checks[step]
    return f"{check['digest']} (generation {check.get('generation')}, workers {check.get('workers')})"


def _notes_on(story: Story) -> list[str]:
    """Events that explain a difference."""
    notes = []
    for event in story.others:
        if event.get("kind") == "drifted":
            drifted = ", ".join(map(str, event.get("drifted", [])))
            notes.append(f"  {story.path}: worker {drifted} drifted, and was removed before step {event.get('step')}")
        elif event.get("kind") == "parted":
            notes.append(f"  {story.path}: its workers were not equal before step {event.get('step')}")
    return notes


def _note_on_threads(a: Story, b: Story) -> list[str]:
    if a.run.get("threads") == b.run.get("threads"):
        return []
    return [f"  threads per worker: {a.run.get('threads')} and {b.run.get('threads')}, which changes bits"]


def _range_of(story: Story) -> str:
    steps = sorted(story.checks)
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none"


def _count(num_steps: int) -> str:
    return f"{num_steps} step{'s' if num_steps != 1 else ''}"
