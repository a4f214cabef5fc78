"""Modules of mechanisms that were replaced: they must not come back under their old names."""

from pathlib import Path

import pytest

import duoka

PACKAGE = Path(duoka.__file__).parent

# PyTorch's old plain style: a loop body that ran once per replica, and the replay of a script that begins again.
GONE = [
    f"frameworks/torch/{name}"
    for name in (
        "accumulation",
        "backward",
        "blocks",
        "capture",
        "contributions",
        "course",
        "cycles",
        "dataset",
        "evaluation",
        "finished",
        "gradients",
        "loader",
        "loop",
        "newcomers",
        "note",
        "optimizer",
        "order",
        "outside",
        "recollections",
        "rounds",
        "source",
        "totals",
    )
]


@pytest.mark.parametrize("name", GONE)
def test_a_module_that_was_replaced_stays_gone(name):
    assert not (PACKAGE / f"{name}.py").exists()
    imported = name.replace("/", ".")
    assert not [path for path in PACKAGE.rglob("*.py") if f"duoka.{imported} import" in path.read_text()]
