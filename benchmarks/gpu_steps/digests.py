"""What runs when an operator takes Triton: a digest of its launchers, kernels and constants, and of no other code.

Results of a card hold the digests of what ran there, so that the docs can say which operators have changed since.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from polymix.ops.operator import registered

OPS = Path(__file__).parents[2] / "polymix" / "ops"
Names = Mapping[str, tuple[str, ast.stmt]]  # of a module: the module that defines a name, and its definition


def _modules(root: Path) -> dict[str, Names]:
    """What the Triton modules below `root` define, and what they import from one another."""
    trees = {
        f"polymix.ops.{'.'.join(file.relative_to(root).with_suffix('').parts)}": ast.parse(file.read_text("utf-8"))
        for file in root.rglob("triton*.py")
    }
    modules: dict[str, dict[str, tuple[str, ast.stmt]]] = {}
    for module, tree in trees.items():
        names = modules[module] = {}
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef):
                names[statement.name] = (module, statement)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                names[statement.targets[0].id] = (module, statement)
            elif isinstance(statement, ast.ImportFrom) and statement.module in trees:
                names.update({alias.asname or alias.name: (statement.module, statement) for alias in statement.names})
    return modules


def _defined(modules: Mapping[str, Names], module: str, name: str) -> Iterator[tuple[str, ast.stmt]]:
    """The definitions of a name of a module, through imports, and of all that they use."""
    waiting, done = [(module, name)], set[tuple[str, str]]()
    while waiting:
        module, name = waiting.pop()
        if (module, name) in done or name not in modules[module]:
            continue
        done.add((module, name))
        home, statement = modules[module][name]
        if isinstance(statement, ast.ImportFrom):
            waiting += [(home, alias.name) for alias in statement.names if name in (alias.asname, alias.name)]
            continue
        yield f"{home}:{name}", statement
        waiting += [(home, part.id) for part in ast.walk(statement) if isinstance(part, ast.Name)]


def _text(statement: ast.stmt) -> str:
    """Code without comments and docstrings, which run nothing."""
    if isinstance(statement, ast.FunctionDef) and ast.get_docstring(statement) is not None:
        statement = ast.FunctionDef(**{**dict(ast.iter_fields(statement)), "body": statement.body[1:]})
    return ast.unparse(ast.fix_missing_locations(statement))


def digests(root: Path = OPS) -> dict[str, str]:
    """The digest of each operator, of its forward and its backward, in the folder `polymix/ops`."""
    modules, answer = _modules(root), {}
    for name, operator in registered().items():
        module, function = operator.kernels.get("triton", ":").split(":")
        if module not in modules:
            continue
        parts: dict[str, ast.stmt] = {}
        for start in (function, f"{function}_backward"):
            parts.update(_defined(modules, module, start))
        text = "\n".join(f"{where}\n{_text(parts[where])}" for where in sorted(parts))
        answer[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return answer
