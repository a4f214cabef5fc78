"""A folder imports only from folders above it in the table of layers. This test reads the imports."""

import ast
from pathlib import Path

import duoka

PACKAGE = Path(duoka.__file__).parent

# In the order they build on one another. `session` wires everything below the commands together.
LAYERS = [
    "errors",
    "events",
    "devices",
    "topology",
    "collectives",
    "data",
    "checkpoint",
    "strategies",
    "frameworks",
    "runtime",
    "monitor",
    "here",
    "planning",
    "worker_session",
    "notebook_session",
    "session",
    "cli",
    "horovod",
    "torch",
    "keras",
    "tensorflow",
]
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax"}


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full, not relative"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def modules() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "__main__.py" and p != PACKAGE / "__init__.py"]


def test_every_module_belongs_to_a_layer():
    assert {layer_of(p) for p in modules()} <= set(LAYERS)


def test_imports_point_only_to_layers_above():
    for path in modules():
        here = LAYERS.index(layer_of(path))
        for name in imported_modules(path):
            parts = name.split(".")
            if parts[0] == "duoka" and len(parts) > 1 and parts[1] in LAYERS:
                assert LAYERS.index(parts[1]) <= here, f"{path.name} ({LAYERS[here]}) imports {name}"


def test_a_framework_is_imported_only_by_its_own_folder():
    for path in modules():
        for name in imported_modules(path):
            root = name.split(".")[0]
            if root in FRAMEWORKS and not (root == "torch" and path in BY_TORCH):
                parts = path.relative_to(PACKAGE).parts
                assert parts[0] == "frameworks" and root in {parts[1], *ALSO.get(parts[1], ())}, f"{path}: {name}"


# The transport that is a framework's own: part of the collectives, loaded only where its framework is loaded anyway.
BY_TORCH = {PACKAGE / "collectives" / f"torch_{name}.py" for name in ("distributed", "group", "sums")}
BY_TORCH |= {PACKAGE / "torch.py"}  # borrowed names; nothing imports them


def test_the_transport_of_a_framework_is_imported_only_where_that_framework_is():
    assert all(path.exists() for path in BY_TORCH)
    names = {f"duoka.collectives.{path.stem}" for path in BY_TORCH} | {"duoka.torch"}
    for path in modules():
        if path not in BY_TORCH and path.parent != PACKAGE / "frameworks" / "torch":
            imported = {".".join(name.split(".")[:3]) for name in imported_modules(path)}
            assert not imported & names, path


ALSO = {"keras": ("torch", "tensorflow", "jax"), "tensorflow": ("keras",)}
