"""The prose that every Python has: its reference topics, and the docstrings of its own modules."""

from __future__ import annotations

import ast
import inspect
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "ensurepip", "__pycache__"}


def prose(root: Path | None = None) -> Iterator[str]:
    """A document for each topic and for each module that has docstrings, always in the same order, each text once.

    Read from the source files, of which none is imported.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(place.parts):
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, OSError):  # as some files of the library are, on purpose
                continue
            topics = place.as_posix() == "pydoc_data/topics.py"
            texts = dict.fromkeys(_topics(tree) if topics else _docstrings(tree))
            new = [text for text in texts if text and text not in seen]
            seen.update(new)
            if topics:
                yield from new
            elif new:
                yield "\n\n".join(new)


def _topics(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield from (inspect.cleandoc(v.value) for v in node.values if _is_text(v))  # type: ignore[attr-defined]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield (ast.get_docstring(node) or "").strip()
        for child in node.body:
            yield from _docstrings(child)
