"""Python blocks of README.md and docs/*.md, put together as scripts that a test can run.

How a page becomes scripts:

- Blocks of a page follow one another in one script, word for word.
- A block begins a new script if it creates a strategy (`duoka.Mirrored(`), imports from Duoka, or uses another
  framework than the script so far.
- A script that does not import Duoka gets a preamble: `docs_preambles/<framework>.py`, then `import duoka`, and a
  `strategy` if no block creates one. The preamble defines small objects with the usual names (`model`, `loader`, `x`,
  `y`, `create_model`, ...). Blocks may use them without defining them.
- A block whose first line is `# name.py` is a whole program. It runs alone, under that name. If the next block on the
  page is a ```text block, it is the program's output: the test compares it, with every number replaced by N.
- `duoka run --devices 2` starts every script.

An HTML comment on the line above a block changes this:

    <!-- not run: reason -->    leave the block out
    <!-- script: python -->     begin a new script, and start it with `python`, without `duoka run`
    <!-- script: keras -->      begin a new script, with the preamble of this framework
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PREAMBLES = Path(__file__).parent / "docs_preambles"
CHECKED_ELSEWHERE = {"from-the-articles.md"}  # by tests/mission
FRAMEWORKS = {  # in this order: the words of a later one may stand in blocks of an earlier one
    "tensorflow": r"\btf\.|tensorflow",
    "keras": r"\bkeras\b|\.fit\(|\.compile\(",
    "torch": r"\btorch\b|\bF\.|\bloader\b|\.backward\(",
}
BLOCK = re.compile(
    r"^(?:<!-- *(?P<mark>.*?) *-->\n)?```(?P<language>\w*)\n(?P<source>.*?)^```$", re.DOTALL | re.MULTILINE
)
BEGINS = re.compile(r"\bduoka\.Mirrored\(|^from duoka|^import duoka$", re.MULTILINE)


@dataclass
class Script:
    """A program made from blocks of one page."""

    page: str
    line: int  # of the first block
    framework: str = "numpy"
    name: str = "script.py"
    launcher: str = "duoka run"
    blocks: list[str] = field(default_factory=list)
    output: str | None = None

    @property
    def title(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def source(self) -> str:
        text = "\n\n".join(self.blocks)
        if re.search(r"^(import duoka$|from duoka)", text, re.MULTILINE):
            return text
        strategy = "" if "duoka.Mirrored(" in text else "strategy = duoka.Mirrored()\n"
        return f"{(PREAMBLES / f'{self.framework}.py').read_text()}\nimport duoka\n{strategy}\n{text}"


@dataclass(frozen=True)
class LeftOut:
    page: str
    line: int
    reason: str


def pages() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in found if page.name not in CHECKED_ELSEWHERE]


def read_page(page: str, text: str) -> tuple[list[Script], list[LeftOut]]:
    """Return the scripts of a page, and the blocks that it asks to leave out.

    >>> scripts, left_out = read_page("page.md", "```python\\nx = tf.ones(1)\\n```\\n```python\\nprint(x)\\n```\\n")
    >>> [(script.framework, script.blocks) for script in scripts], left_out
    ([('tensorflow', ['x = tf.ones(1)\\n', 'print(x)\\n'])], [])
    """
    scripts: list[Script] = []
    left_out: list[LeftOut] = []
    program: Script | None = None  # a whole program, in the block above
    for match in BLOCK.finditer(text):
        mark, language, source = match["mark"] or "", match["language"], match["source"]
        line = text.count("\n", 0, match.start("language")) + 1
        if program is not None and language == "text":
            program.output = source
        program = None
        if language != "python":
            continue
        if mark.startswith("not run:"):
            left_out.append(LeftOut(page, line, mark.removeprefix("not run:").strip()))
        elif name := re.match(r"# ([\w-]+\.py)\b", source):
            program = Script(page, line, framework_of(source) or "numpy", name[1], blocks=[source])
            scripts.append(program)
        else:
            add(scripts, Script(page, line), mark, source)
    return scripts, left_out


def add(scripts: list[Script], new: Script, mark: str, source: str) -> None:
    """Append a block to the last script, or begin a new one with it."""
    framework = framework_of(source)
    last = scripts[-1] if scripts and scripts[-1].name == new.name else None
    is_other = last is not None and framework not in (None, last.framework)
    if last is None or is_other or mark or BEGINS.search(source):
        asked = mark.removeprefix("script:").strip()
        new.framework = asked if asked in (*FRAMEWORKS, "numpy") else framework or "numpy"
        new.launcher = "python" if asked == "python" else new.launcher
        scripts.append(new)
        last = new
    last.blocks.append(source)


def framework_of(source: str) -> str | None:
    return next((name for name, words in FRAMEWORKS.items() if re.search(words, source)), None)


def all_scripts() -> list[Script]:
    return [script for page in pages() for script in read_page(_name(page), page.read_text())[0]]


def all_left_out() -> list[LeftOut]:
    return [block for page in pages() for block in read_page(_name(page), page.read_text())[1]]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_numbers(text: str) -> list[str]:
    """Return the lines of an output with numbers, hashes and run directories as N.

    >>> without_numbers("epoch 1: loss 0.25\\nlogs in runs/20261118-061802-7d202d\\n")
    ['epoch N: loss N', 'logs in runs/N']
    """
    text = re.sub(r"runs/[\w-]+", "runs/N", text)
    text = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{12,}\b", "N", text)
    text = re.sub(r"\d[\d,.]*(?:e[+-]?\d+)?(?<![,.])", "N", text)
    return [line.rstrip() for line in text.strip().splitlines()]
