"""calls.md and docs/from-the-articles.md are true: the tests they name exist and run what the pages show."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent
CALLS = HERE / "calls.md"
PAGE = TESTS.parent / "docs" / "from-the-articles.md"
pytestmark = pytest.mark.timeout(60)


@dataclass(frozen=True)
class Section:
    title: str
    sources: str
    tests: frozenset[str]
    rows: tuple[tuple[str, str, str, str], ...]


def rows_of(text: str) -> list[list[str]]:
    """The cells of the rows of all tables, without their headings."""
    lines = [
        line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| call ", "| their "))
    ]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def functions_of(source: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)\(", source, re.MULTILINE))


def sections() -> list[Section]:
    found = []
    for text in re.split(r"^## ", CALLS.read_text(), flags=re.MULTILINE)[1:]:
        title, before = text.partition("\n")[0], text.partition("| call ")[0]
        names = re.findall(r"`([\w/]+\.py)`", before)
        if title == "Not to be cut":
            names += [str(path.relative_to(HERE)) for path in HERE.rglob("*article_*.py")]
        sources = [(HERE / name).read_text() for name in names]
        tests = frozenset().union(*map(functions_of, sources))
        found.append(Section(title, "\n".join(sources), tests, tuple(map(tuple, rows_of(text)))))
    return found


def parts_of(call: str) -> list[str]:
    """What has to stand in the sources, as patterns: the identifier, keyword arguments, and quoted names.

    >>> parts_of('duoka.device("/gpu:3", soft_placement=False)')
    ['(?<!\\\\w)device(?!\\\\w)', '(?<!\\\\w)soft_placement=False', '"/gpu:3"']
    """
    name, _, arguments = call.partition("(")
    patterns = []
    if "=" in name or " " in name or not re.fullmatch(r"[\w.]+", name):
        arguments = arguments or name
    else:
        patterns.append(rf"(?<!\w){re.escape(name.rpartition('.')[2])}(?!\w)")
    patterns += [rf"(?<!\w){re.escape(each)}" for each in re.findall(r"\w+=(?:None|True|False|[\d.]+)?", arguments)]
    patterns += [re.escape(each) for each in re.findall(r'"[^"]+"', arguments)]
    if not patterns:
        patterns = [r"\W+".join(map(re.escape, call.split()))]
    return patterns


def test_the_page_of_calls_has_the_five_articles_and_the_list_that_is_not_to_be_cut():
    titles = [section.title.partition(":")[0] for section in sections()]
    assert titles == [*(f"Article {number}" for number in range(5)), "Not to be cut"]
    for section in sections():
        assert len(section.rows) >= 10, section.title
        assert all(len(row) == 4 and row[3] for row in section.rows), section.title


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.title.partition(":")[0])
def test_each_call_stands_in_the_sources_of_its_article_and_its_test_exists(section):
    for call, line, test, _ in section.rows:
        assert line.isdigit(), call
        (name,) = re.findall(r"^`(test_\w+)`$", test)
        assert name in section.tests, f"{section.title}: {name}"
        (code,) = re.findall(r"^`(.+)`$", call)
        for pattern in parts_of(code):
            assert re.search(pattern, section.sources), f"{section.title}: {pattern} of {code} is nowhere"


def test_a_call_that_no_source_has_would_be_noticed():
    sources = sections()[1].sources
    assert all(re.search(pattern, sources) for pattern in parts_of("tf.train.exponential_decay(staircase=True)"))
    for missing in (
        "tf.train.exponential_deacy()",
        "tf.train.exponential_decay(starcase=True)",
        'tf.device("/gpu:77")',
        "duoka verify",
        "exponential_dec",
    ):
        assert not all(re.search(pattern, sources) for pattern in parts_of(missing)), missing


def test_every_test_of_an_article_is_named_by_a_call():
    named = set(re.findall(r"`(test_\w+)`", CALLS.read_text()))
    for path in HERE.glob("test_article_*.py"):
        assert functions_of(path.read_text()) <= named, path.name


# docs/from-the-articles.md


def test_each_line_of_duoka_in_the_documentation_stands_in_a_test():
    assert len(re.findall(r"^## \d\. ", PAGE.read_text(), re.MULTILINE)) == 5
    rows = rows_of(PAGE.read_text())
    assert len(rows) >= 40
    sources = "".join(path.read_text() for path in HERE.rglob("*.py"))
    for cells in rows:
        assert len(cells) == 3, cells
        for code in re.findall(r"`([^`]+)`", cells[2]):
            assert code in sources or (TESTS.parent / code).exists(), f"{code} is nowhere in the tests"


def test_the_blocks_of_the_documentation_are_word_for_word_in_the_scripts():
    sources = [without_empty_lines(path.read_text()) for path in (HERE / "scripts").glob("*.py")]
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    for block in blocks:
        inside = textwrap.indent(without_empty_lines(block), "    ")
        assert any(inside in source for source in sources), block


def without_empty_lines(text: str) -> str:
    """Also without remarks to linters. Functions in functions have fewer empty lines around them."""
    return "".join(line for line in re.sub(r"  # noqa: \w+", "", text).splitlines(keepends=True) if line.strip())
