"""What `import duoka` gives, and when."""

from __future__ import annotations

import subprocess
import sys

from tests.limits import START_S

CODE = """
import sys, duoka
for name in ("keras", "tensorflow", "torch"):
    assert f"duoka.{name}" not in sys.modules
    print(getattr(duoka, name).__name__)
"""


def test_borrowed_names_are_loaded_on_first_touch():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=START_S)
    assert done.stdout.split() == ["duoka.keras", "duoka.tensorflow", "duoka.torch"], done.stderr[-2000:]
