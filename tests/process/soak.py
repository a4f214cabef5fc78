"""Random deaths for as long as you like: `make chaos MINUTES=10`. Prints the seed of every story that fails."""

from __future__ import annotations

import sys
import time

from tests.process.test_exactly_once import check, write_story


def main() -> None:
    end = time.monotonic() + 60 * float(sys.argv[1])
    seed = first = int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time()) % 10**6 * 1000
    failed: list[int] = []
    while time.monotonic() < end:
        try:
            check(write_story(seed))
        except AssertionError as error:
            failed.append(seed)
            print(f"seed {seed}: {error}", flush=True)
        seed += 1
    print(f"{seed - first} stories from seed {first}: {len(failed)} failed {failed or ''}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
