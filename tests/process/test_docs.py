"""Every Python block of README.md and docs/*.md runs as printed. `docs_blocks.py` says how blocks become scripts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.limits import START_S
from tests.process.docs_blocks import Script, all_left_out, all_scripts, pages, read_page, without_numbers
from tests.process.scripts import DUOKA_RUN, PYTHON, Ended, Run

pytestmark = pytest.mark.timeout(2 * START_S)
SETTINGS = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1") | {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
}
LEAVES = ["torchinductor_"]  # PyTorch creates this temporary directory
SCRIPTS = all_scripts()
MOST_LEFT_OUT = 5


def of_framework(script: Script) -> pytest.ParameterSet:
    """Keras blocks run on PyTorch, which starts in half of the time."""
    mark = {"keras": "torch"}.get(script.framework, script.framework)
    return pytest.param(script, id=script.title, marks=[] if mark == "numpy" else getattr(pytest.mark, mark))


def run(directory: Path, script: Script) -> Ended:
    files = directory / "files"  # what the blocks save goes here
    files.mkdir()
    (files / script.name).write_text(script.source)
    is_plain = script.launcher == "python" or script.name != "script.py"
    words = [*PYTHON, script.name] if is_plain else [*DUOKA_RUN, "--devices", "2", script.name]
    environ = SETTINGS | ({"KERAS_BACKEND": "torch"} if script.framework == "keras" else {})
    return Run(directory, words, environ, cwd=files).finish(START_S, leaves=LEAVES)


@pytest.mark.parametrize("script", [of_framework(script) for script in SCRIPTS])
def test_the_python_blocks_of_a_page_run_as_printed(tmp_path, script):
    ended = run(tmp_path, script)
    assert ended.code == 0, f"{script.title} cannot run as printed:\n{ended.out}{ended.err}"
    if script.output is not None:
        compare(script.output, ended)


def compare(printed: str, ended: Ended) -> None:
    """The page shows what the program printed, and some of Duoka's lines on stderr."""
    lines = without_numbers(printed)
    from_duoka = [line for line in lines if line.startswith("duoka: ")]
    assert [line for line in lines if line not in from_duoka] == without_numbers(ended.out)
    assert [line for line in from_duoka if line not in without_numbers(ended.err)] == [], ended.err


@pytest.mark.torch
@pytest.mark.slow
def test_the_quick_start_prints_the_losses_of_the_script_without_duoka(tmp_path):
    (script,) = (script for script in SCRIPTS if script.name == "quickstart.py")
    source = re.sub(r"^(import duoka|strategy = .*|.*strategy\.prepare\(.*)\n", "", script.source, flags=re.MULTILINE)
    source = source.replace("strategy.batches(loader)", "loader").replace("strategy.print", "print")
    source = re.sub(r"loss = strategy\.backward.*", "loss = loss_of(*batch); loss.backward()", source)
    assert "duoka" not in source and "strategy" not in source
    (tmp_path / "plain.py").write_text(source)
    plain = Run(tmp_path / "plain", [*PYTHON, str(tmp_path / "plain.py")], SETTINGS).finish(START_S, leaves=LEAVES)
    printed = [line for line in (script.output or "").splitlines() if not line.startswith("duoka: ")]
    assert [pytest.approx(loss, abs=2e-4) for loss in losses_in(printed)] == losses_in(plain.out.splitlines())


KILL = """
        if strategy.worker == 1 and epoch == 1 and batch.index == 30:
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.torch
@pytest.mark.slow
def test_the_quick_start_loses_a_worker_without_a_replacement_and_prints_the_same_losses(tmp_path):
    """What the table of promises says of function style outside of strategy.epochs, also of checkpoints."""
    (script,) = (script for script in SCRIPTS if script.name == "quickstart.py")
    calm = run_changed(tmp_path / "calm", script.source)
    struck = run_changed(tmp_path / "struck", re.sub(r"( +optimizer\.step\(\))\n", rf"\1{KILL}", script.source))
    assert "worker 1 (cpu:0/v1) was ended by SIGKILL" in struck.err
    assert "is not started again" in struck.err
    assert (struck.code, struck.out) == (0, calm.out)
    saving = script.source.replace("\n\n\ndef loss_of", '\nstrategy.checkpoint("saved")\n\n\ndef loss_of')
    refused = run_changed(tmp_path / "refused", saving)
    assert refused.code != 0 and "This script trains outside of strategy.epochs and strategy.steps" in refused.err


def run_changed(directory: Path, source: str) -> Ended:
    directory.mkdir()
    (directory / "quickstart.py").write_text(source)
    return Run(directory, [*PYTHON, "quickstart.py"], SETTINGS, cwd=directory).finish(START_S, leaves=LEAVES)


def losses_in(lines: list[str]) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in lines]


def test_few_blocks_are_left_out_and_each_says_why(capsys):
    left_out = all_left_out()
    with capsys.disabled():
        for block in left_out:
            print(f"\n{block.page}:{block.line} is not run: {block.reason}", end="")
    assert len(left_out) <= MOST_LEFT_OUT
    assert all(block.reason for block in left_out)


def test_every_python_block_of_every_page_is_in_a_script_or_left_out():
    num_blocks = sum(page.read_text().count("\n```python\n") for page in pages())
    assert sum(len(script.blocks) for script in SCRIPTS) + len(all_left_out()) == num_blocks > 25


# How blocks become scripts.


def page(*blocks: str) -> str:
    return "\n\n".join(blocks)


def python(source: str) -> str:
    return f"```python\n{source}\n```"


def test_a_block_that_creates_a_strategy_begins_a_new_script():
    scripts, _ = read_page("a", page(python("strategy = duoka.Mirrored()"), python("pass"), python("duoka.Mirrored()")))
    assert [len(script.blocks) for script in scripts] == [2, 1]
    assert scripts[0].source.count("duoka.Mirrored()") == 1


def test_a_block_of_another_framework_begins_a_new_script_with_its_own_preamble():
    scripts, _ = read_page("a", page(python("for x, y in loader: pass"), python("model.fit(x, y)")))
    assert [script.framework for script in scripts] == ["torch", "keras"]
    assert "import keras" in scripts[1].source and "strategy = duoka.Mirrored()" in scripts[1].source


def test_a_script_that_imports_duoka_gets_no_preamble():
    (script,), _ = read_page("a", page(python("import torch\nimport duoka"), python("loader = 1")))
    assert script.source == "import torch\nimport duoka\n\n\nloader = 1\n"


def test_a_block_with_a_name_is_a_program_and_the_text_below_is_its_output():
    text = page(python("# train.py\nimport duoka"), "It prints:", "```text\nloss 1\n```", python("pass"))
    program, other = read_page("a", text)[0]
    assert (program.name, program.output, other.name) == ("train.py", "loss 1\n", "script.py")


def test_a_comment_leaves_a_block_out_or_begins_a_script():
    text = page(
        "<!-- not run: two hosts -->\n" + python("pass"), python("a"), "<!-- script: python -->\n" + python("b")
    )
    scripts, (left_out,) = read_page("a", text)
    assert (left_out.reason, left_out.line) == ("two hosts", 2)
    assert [(script.blocks, script.launcher) for script in scripts] == [(["a\n"], "duoka run"), (["b\n"], "python")]


@pytest.mark.parametrize("printed", ["loss 2.5\n", "loss 1e-05 \n", "loss 1,234\n"])
def test_an_output_may_differ_from_the_page_in_numbers(printed, tmp_path):
    compare("duoka: 2 workers\nloss 0.25\n", Ended(0, printed, "duoka: 3 workers\n", tmp_path))


@pytest.mark.parametrize(("out", "err"), [("loss 1\nmore\n", "duoka: 2 workers\n"), ("loss 1\n", "duoka: stopped\n")])
def test_an_output_may_not_differ_from_the_page_in_words(out, err, tmp_path):
    with pytest.raises(AssertionError):
        compare("duoka: 2 workers\nloss 0.25\n", Ended(0, out, err, tmp_path))
