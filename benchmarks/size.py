"""Size of src/duoka by folder: files, lines, interceptions and duplicate class names. A signal without a bar.

    python benchmarks/size.py

- "code": lines without blank lines, comments and docstrings.
- "interceptions": places that change or look into something that is not Duoka's. It is a heuristic over the syntax tree
  and counts
  1. assignments to an attribute of a name that a framework import bound (`torch.foo.bar = ...`, `keras.X.y = ...`),
  2. `setattr` or `delattr` with such a name as its first argument, or with a name that is no string constant,
  3. assignments to `__class__`, `__code__`, `__dict__`, `__globals__` or to a dunder method of any object,
  4. uses of `sys.settrace`, `sys.setprofile`, `sys._getframe`, `gc.get_objects`, `gc.get_referrers`,
     `gc.get_referents`, `sys.meta_path` and `builtins.__import__`.
  It misses patches through a variable (`owner.method = mine`) unless `owner` was imported from a framework.
- "duplicate names": class names of this folder that another file of the package defines, too.
"""

from __future__ import annotations

import ast
import collections
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "duoka"
FRAMEWORKS = re.compile(r"^(torch|keras|tensorflow|jax|jaxlib|numpy|tensorboard|IPython|accelerate)(\.|$)")
INNER_ATTRIBUTE = re.compile(r"^__(class|code|dict|globals|defaults|closure|call|getattribute|setattr|init|new)__$")
LOOKED_INTO = re.compile(
    r"^(sys\.(settrace|setprofile|_getframe|meta_path)|gc\.(get_objects|get_referrers|get_referents)|builtins\.__import__)$"
)


@dataclass
class Size:
    files: int = 0
    lines: int = 0
    code: int = 0
    interceptions: int = 0
    duplicates: set[str] = field(default_factory=set)


def measure(package: Path = PACKAGE) -> dict[str, Size]:
    """Return the size of each folder that has files of its own, by its path in the package."""
    sizes: dict[str, Size] = collections.defaultdict(Size)
    places: dict[str, set[Path]] = collections.defaultdict(set)
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        size = sizes[_folder(path, package)]
        size.files += 1
        size.lines += text.count("\n")
        size.code += count_code_lines(text, tree)
        size.interceptions += len(find_interceptions(tree))
        for name in find_classes(tree):
            places[name].add(path)
    for name, paths in places.items():
        if len(paths) > 1:
            for path in paths:
                sizes[_folder(path, package)].duplicates.add(name)
    return dict(sizes)


def _folder(path: Path, package: Path) -> str:
    return path.parent.relative_to(package).as_posix()


def count_code_lines(text: str, tree: ast.AST) -> int:
    """Count the lines with code.

    >>> text = '"What it is."' + chr(10) + "x = 1  # why" + chr(10) + "# more"
    >>> count_code_lines(text, ast.parse(text))
    1
    """
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def find_classes(tree: ast.AST) -> set[str]:
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def find_interceptions(tree: ast.AST) -> list[int]:
    """Return the line of each interception.

    >>> find_interceptions(ast.parse("import torch; torch.nn.Module.forward = mine; self.forward = mine"))
    [1]
    """
    foreign = _foreign_names(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)):
            targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [node.target]
            found += [node.lineno for target in targets if _is_foreign_target(target, foreign)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            is_computed = len(node.args) > 1 and not isinstance(node.args[1], ast.Constant)
            if node.args and (_root(node.args[0]) in foreign or is_computed):
                found.append(node.lineno)
        elif isinstance(node, ast.Attribute) and LOOKED_INTO.match(_dotted(node)):
            found.append(node.lineno)
    return found


def _foreign_names(tree: ast.AST) -> set[str]:
    """The names that imports of a framework bind, anywhere in the file."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias for alias in node.names if FRAMEWORKS.match(alias.name)]
            names.update((alias.asname or alias.name).split(".")[0] for alias in found)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0 and FRAMEWORKS.match(node.module):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _is_foreign_target(target: ast.expr, foreign: set[str]) -> bool:
    return isinstance(target, ast.Attribute) and (
        _root(target) in foreign or INNER_ATTRIBUTE.match(target.attr) is not None
    )


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def main() -> None:
    sizes = measure()
    print("| folder | files | lines | code | interceptions | duplicate names |\n|---|---|---|---|---|---|")
    for folder, size in sorted(sizes.items()):
        print(_row(folder, size))
    total = Size(
        *(sum(getattr(s, name) for s in sizes.values()) for name in ("files", "lines", "code", "interceptions"))
    )
    total.duplicates = set().union(*(size.duplicates for size in sizes.values()))
    print(_row("**in all**", total))
    print("\nduplicate class names: " + ", ".join(sorted(total.duplicates)))
    if "DUOKA_BENCH_JSON" in os.environ:
        numbers = {name: vars(size) | {"duplicates": sorted(size.duplicates)} for name, size in sizes.items()}
        Path(os.environ["DUOKA_BENCH_JSON"]).write_text(json.dumps({"size": numbers}))


def _row(folder: str, size: Size) -> str:
    return (
        f"| {folder} | {size.files} | {size.lines:,} | {size.code:,} | {size.interceptions} | {len(size.duplicates)} |"
    )


if __name__ == "__main__":
    main()
