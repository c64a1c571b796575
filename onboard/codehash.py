"""The code of a stage as one hash: its module and every onboard module it imports."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# The machinery moves artifacts and words about; it never changes what a stage computes.
MACHINERY = frozenset(
    f"onboard.{name}"
    for name in ("", "pipeline", "store", "events", "errors", "recipe", "hardware")
)

# Families are data that reaches the other stages through this one's artifact: a new family's file
# must not make every model's calibration run again.
FAMILIES, READS_FAMILIES = "onboard.architectures", "onboard.adapt"


@cache
def code_digest(module: str) -> str:
    """Return the sha256 over `module` and its imports inside onboard, followed to the end.

    Only the syntax tree counts: comments, formatting and docstrings do not.
    """
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        is_data = name.startswith(FAMILIES) and module != READS_FAMILIES
        if name not in seen and name not in MACHINERY and not is_data:
            seen.add(name)
            todo += imports(name)
    total = hashlib.sha256()
    for name in sorted(seen):
        total.update(f"{name} {_tree_digest(name)}\n".encode())
    return total.hexdigest()


@cache
def imports(module: str) -> tuple[str, ...]:
    """Return the onboard modules that `module` imports, at the top or inside a function."""
    found: list[str] = []
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            found += [name for alias in node.names for name in _modules(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += _modules(node.module)
            found += [m for alias in node.names for m in _modules(f"{node.module}.{alias.name}")]
    return tuple(sorted(set(found)))


def _modules(name: str) -> list[str]:
    """Return `name` where it is a module of onboard; a package stands for all its files."""
    if not name.startswith("onboard."):
        return []
    path = PACKAGE.joinpath(*name.split(".")[1:])
    if path.with_suffix(".py").is_file():
        return [name]
    if (path / "__init__.py").is_file():
        return [name, *(f"{name}.{p.stem}" for p in path.glob("*.py") if p.stem != "__init__")]
    return []


def _path(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"no such module: {module}"
    assert spec.origin is not None
    return Path(spec.origin)


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_path(module).read_text())


@cache
def _tree_digest(module: str) -> str:
    tree = ast.parse(_path(module).read_text())
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
