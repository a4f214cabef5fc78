"""What `make demo` runs: one fit as a plain script, and by 4 replicas on 1, 2 and 4 workers.

python examples/demo.py
"""

import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent / "least_squares"
NUM_REPLICAS = 4


def run(words: list[str]) -> tuple[str, str, float]:
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, check=True)
    _, loss, _, digest = done.stdout.split()
    return loss, digest, time.perf_counter() - begin


def main() -> None:
    on_workers = ["-m", "duoka", "run", "--replicas", str(NUM_REPLICAS), "--devices"]
    rows = {"plain script, no Duoka": run([str(HERE / "before.py")])}
    for num_workers in (1, 2, 4):
        name = f"{NUM_REPLICAS} replicas on {num_workers} worker{'s' if num_workers > 1 else ''}"
        rows[name] = run([*on_workers, str(num_workers), str(HERE / "after.py")])
    print(f"\n{'':24} {'loss':>9} {'time':>7}   SHA-256 of the weights")
    for name, (loss, digest, seconds) in rows.items():
        print(f"{name:24} {loss:>9} {seconds:5.2f} s   {digest[:32]}...")
    digests = {digest for name, (_, digest, _) in rows.items() if "replicas" in name}
    losses = {loss for loss, _, _ in rows.values()}
    if len(digests) > 1:
        sys.exit("\nThe weights differ between numbers of workers: this is a bug in Duoka, please report it.")
    print("\nEqual bits on 1, 2 and 4 workers: yes.", end=" ")
    print(f"The loss of the plain script: {'the same' if len(losses) == 1 else 'another'}, to 6 digits.")


main()
