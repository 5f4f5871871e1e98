"""Recipes as files: TOML, YAML or JSON with options by name. Such a file is read, never run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from polymix.errors import OptionError
from polymix.extras import needs
from polymix.files import once, regular

SUFFIXES = (".json", ".yaml", ".yml", ".toml")
MAX_BYTES = 1 << 20


def read_options(path: Path) -> dict[str, Any]:
    """The options in a TOML, YAML or JSON file. Raises OptionError: it cannot be read, or names one twice."""
    form = {".json": "JSON", ".toml": "TOML"}.get(path.suffix.lower(), "YAML")
    examples = {"JSON": '{"task": "text", "steps": 200}', "TOML": 'task = "text"', "YAML": "task: text"}
    allowed = f"{form} such as {examples[form]}"
    try:
        size = regular(path).stat().st_size
        if size > MAX_BYTES:
            got = f"{path}, of {size:,} bytes"
            raise OptionError("recipe", got, f"at most {MAX_BYTES:,} bytes", "Give a recipe, not its data.")
        content = {"JSON": _json, "TOML": parse_toml, "YAML": _yaml}[form](path.read_text("utf-8"))
        if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
            raise ValueError(f"{type(content).__name__} instead of options by name")
        json.dumps(content)  # YAML and TOML have dates too, and YAML sets and bytes
    except (OSError, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, OptionError):
            raise
        reason = "too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise OptionError("recipe", f"{path}, which cannot be read ({reason})", allowed) from error
    return content


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=once)


def parse_toml(text: str) -> Any:
    """The content of a TOML file."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        with needs("train", "Python 3.10 reads TOML with it."):
            import tomli as tomllib
    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    with needs("train", "YAML is read with it."):
        import yaml

    class Loader(yaml.SafeLoader):
        """Plain values, each name once, and no aliases, by which a short file becomes a huge one."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("aliases are not supported")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            return once([(self.construct_object(key, True), self.construct_object(value, True))
                          for key, value in node.value])  # fmt: skip

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
