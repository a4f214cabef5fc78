"""How scripts on several workers tell what they have found: the main one all of it, each that it is the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any


def print_result(results: Any) -> None:
    line = json.dumps(results)
    print("RESULT " + line, flush=True)
    # Of the others a line is shown when it comes late, and cut when it is long: this one is short.
    print("SAME " + hashlib.sha256(line.encode()).hexdigest(), flush=True)


def read_result(out: str) -> Any:
    """What the main worker has found, if it is what all have."""
    (result,) = [line.removeprefix("RESULT ") for line in out.splitlines() if line.startswith("RESULT ")]
    digests = {line.partition("SAME ")[2] for line in out.splitlines() if "SAME " in line and "RESULT " not in line}
    assert digests == {hashlib.sha256(result.encode()).hexdigest()}, "all workers must end with the same result"
    return json.loads(result)


def read_result_of_all(logs: Iterable[str]) -> Any:
    """What those have found who came to their end, from their logs: the main one may be killed before it says it."""
    found = [line for log in logs for line in log.splitlines() if line.startswith("RESULT ")]
    assert len(set(found)) == 1, "all workers must end with the same result"
    return json.loads(found[0].removeprefix("RESULT "))
