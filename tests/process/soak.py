"""Random deaths for as long as you like: `make chaos MINUTES=10`. Every story that fails is told with its replay.

python -m tests.process.soak 10              ten minutes, and at least 50 stories of a PyTorch training, 20 of workers
                                             that come back, and 2 of a PyTorch script in which they do
python -m tests.process.soak 10 --from 4000  seeds from 4000 on
python -m tests.process.soak --replay torch 4017
python -m tests.process.soak --kills 200     function-style runs until 200 workers were killed, in all phases
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LEAST = {"torch": 50, "joining": 20, "torch-join": 2}
LONG = ("fit-torch", "fit-jax", "fit-tensorflow", "loop-tensorflow")


def check(kind: str, seed: int) -> None:
    """Raises when the story of this seed does not end as it should."""
    if kind == "numpy":
        from tests.process import test_exactly_once as exactly_once

        exactly_once.check(exactly_once.write_story(seed))
    elif kind == "torch":
        from tests.process import torch_chaos

        torch_chaos.check(torch_chaos.write_story(seed))
    elif kind == "function":
        from tests.process import function_chaos

        with tempfile.TemporaryDirectory() as directory:
            function_chaos.check(seed, Path(directory))
    elif kind == "joining":
        from tests.process import test_joining as joining

        with tempfile.TemporaryDirectory() as directory:
            joining.check(joining.write_story(seed, stops=True), Path(directory) / "story", left=-1, joined=-1)
    elif kind == "torch-join":
        from tests.process import torch_join_chaos

        torch_join_chaos.check(torch_join_chaos.write_story(seed))
    else:
        from tests.process import test_nothing_lost_keras as keras_runs

        keras_runs.check(kind, 4, keras_runs.choose_strikes(kind, seed, 3, 4))


def kinds() -> Iterator[str]:
    """Mostly short stories; those that start scripts and import frameworks, which takes long, now and then.

    In "joining" and "torch-join" workers come back, as they do by default; the others go on without those they lose.
    """
    for number in itertools.count():
        for _ in range(25):
            yield "numpy"
            yield "torch"
            yield "joining"
        yield "torch-join"
        yield LONG[number % len(LONG)]


def replay(kind: str, seed: int) -> str:
    return f"{sys.executable} -m tests.process.soak --replay {kind} {seed}"


def soak(minutes: float, first: int) -> int:
    end = time.monotonic() + 60 * minutes
    told: Counter[str] = Counter()
    failed: list[str] = []
    for seed, kind in zip(itertools.count(first), kinds(), strict=False):
        is_due = time.monotonic() < end
        if not is_due and all(told[name] >= least for name, least in LEAST.items()):
            break
        if not is_due and told[kind] >= LEAST.get(kind, 0):
            continue
        told[kind] += 1
        try:
            check(kind, seed)
        except Exception:
            failed.append(replay(kind, seed))
            print(f"{failed[-1]}\n{traceback.format_exc()}", flush=True)
    stories = ", ".join(f"{number} {kind}" for kind, number in sorted(told.items()))
    print(f"stories told: {stories}; failed: {len(failed)}")
    print("\n".join(failed), end="\n" if failed else "")
    return len(failed)


def soak_functions(num_kills: int, first: int, most_runs: int = 40) -> int:
    """Kill workers of function-style runs. Returns how many runs have failed."""
    from tests.process import function_chaos

    hits: Counter[str] = Counter()
    num_joined, failed = 0, []
    for seed in range(first, first + most_runs):
        if sum(hits.values()) >= num_kills:
            break
        try:
            with tempfile.TemporaryDirectory() as directory:
                told = function_chaos.check(seed, Path(directory))
            hits += told.hits
            num_joined += told.num_joined
        except Exception:
            failed.append(replay("function", seed))
            print(f"{failed[-1]}\n{traceback.format_exc()}", flush=True)
    for phase in function_chaos.PHASES:
        print(f"{phase:>22}: {hits[phase]} kills")
    num_runs = seed - first + 1
    print(f"{sum(hits.values())} kills in {num_runs} runs, {num_joined} replacements joined; failed: {len(failed)}")
    return len(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", nargs="?", type=float, default=10)
    parser.add_argument("--from", dest="seed", type=int, default=int(time.time()) % 10**6 * 1000)
    parser.add_argument("--replay", nargs=2, metavar=("KIND", "SEED"))
    parser.add_argument("--kills", type=int, help="of workers of function-style runs, in place of minutes")
    given = parser.parse_args()
    if given.replay:
        check(given.replay[0], int(given.replay[1]))
        print("this story ends well")
        return
    print(f"seeds from {given.seed} on", flush=True)
    if given.kills:
        sys.exit(bool(soak_functions(given.kills, given.seed)))
    sys.exit(bool(soak(given.minutes, given.seed)))


if __name__ == "__main__":
    main()
