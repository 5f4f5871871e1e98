"""The types and defaults of options in words, for messages, --help and the docs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel


def expected(shape: Mapping[str, Any]) -> str:
    """A type and its range in words, from the JSON schema of an option: "an integer from 1 to 5, or None"."""
    if "anyOf" in shape:
        return ", or ".join(expected(one) for one in shape["anyOf"])
    if "enum" in shape or "const" in shape:
        return ", ".join(map(str, shape.get("enum", [shape.get("const")])))
    kind = shape.get("type")
    if kind in ("integer", "number"):
        noun = "an integer" if kind == "integer" else "a number"
        noun = f"a multiple of {shape['multipleOf']}" if "multipleOf" in shape else noun
        low, above = shape.get("minimum"), shape.get("exclusiveMinimum")
        high, below = shape.get("maximum"), shape.get("exclusiveMaximum")
        if low is not None and high is not None:
            return f"{noun} from {low:,} to {high:,}" if high < 2**53 else f"{noun} of at least {low:,}"
        words = (("of at least", low), ("above", above), ("of at most", high), ("below", below))
        ends = [f"{word} {end:,}" for word, end in words if end is not None]
        return f"{noun} {' and '.join(ends)}".strip()
    if kind == "array":
        parts = shape.get("prefixItems")
        if parts:
            return f"{len(parts)} values: {'; '.join(expected(part) for part in parts)}"
        return f"a list, each {expected(shape.get('items', {}))}"
    if "pattern" in shape:
        return str(shape.get("description", shape["pattern"]))
    names = {"string": "text", "boolean": "True or False", "null": "None", "object": "options by name"}
    return names.get(str(kind), "another value")


def shown(value: Any) -> str:
    """A default as one would type it."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value)) or "none"
    if value == {}:
        return "none"
    return str(value)


@cache  # of a class that does not change; pydantic makes it anew in every call
def shape_of(recipe: type[BaseModel], name: str) -> dict[str, Any]:
    """The JSON schema of an option."""
    shape: dict[str, Any] = recipe.model_json_schema()["properties"][name]
    return shape


def default_of(recipe: type[BaseModel], name: str) -> Any:
    """The value of an option that is not set."""
    return recipe.model_fields[name].get_default(call_default_factory=True)
