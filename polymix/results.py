"""results.json of a long run: its types, checked when it is read; rewritten after every step; and its progress.

The content of every kind of results.json is a type, a `TypedDict` or a dataclass, that is written once. `wrong_part`
checks content by it and `schema_of` makes the JSON Schema of it:

    class Row(TypedDict):
        mixer: str
        tokens: Count
        seconds: Annotated[float | None, "median of runs"]

    class Content(TypedDict):
        schema: Literal["polymix.example/1"]
        finished: bool
        rows: list[Row]

    read_results(path, Content, "polymix example")["rows"]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)  # fmt: skip

from polymix.errors import ResultsError
from polymix.files import check_folder, read_json, remove_unfinished, write_whole

RESULTS = "results.json"
R = TypeVar("R", bound="Results")


@dataclass(frozen=True)
class Between:
    """In `Annotated`: the bounds of a number, or of the length of a list. None: no bound."""

    low: float | None = None
    high: float | None = None


Count = Annotated[int, Between(1)]
Share = Annotated[float, Between(0, 1)]


class Machine(TypedDict):
    """Hardware, versions and threads of a measurement."""

    cpu: str
    cpu_capability: str
    cores: int | None
    gpu: str | None
    device: str
    threads: Count
    system: str
    python: str
    torch: str


# What types say


def wrong_part(value: Any, kind: Any, name: str = "") -> str | None:
    """The first part of JSON that is missing or is not what its type says, in words; None: all parts are right.

    Keys that the type does not have are let through: a later version may write more.

    Args:
        value: as `json.loads` returns it.
        kind: a TypedDict or a dataclass (whose fields are all required; a "_" behind a name that Python reserves is
            not part of the key), `list`, `tuple` (a list in JSON), `dict`, `Literal`, a union, `Annotated`, or a plain
            type. An int is also a float.
        name: of the value, for the words.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return wrong_part(value, args[0], name) or (_as(value, name) if _outside(value, args[1:]) else None)
    if origin in (Union, UnionType):
        wrong = [wrong_part(value, part, name) for part in args]
        records = [words for words, part in zip(wrong, args, strict=True) if _keys(part) and isinstance(value, dict)]
        return None if None in wrong else records[0] if records else _as(value, name)
    if not _is(value, kind):
        return _as(value, name)
    return next(filter(None, (wrong_part(*part) for part in _parts(value, kind, name))), None) or next(
        (f"a file without {_below(name, key)!r}" for key, (_, required) in (_keys(kind) or {}).items()
         if required and key not in value), None,
    )  # fmt: skip


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind, whatever its parts are."""
    origin = get_origin(kind) or kind
    if kind is Any:
        return True
    if origin is Literal:
        return any(type(value) is type(other) and value == other for other in get_args(kind))
    if _keys(kind) is not None or origin in (dict, Mapping):
        return isinstance(value, dict)
    if origin in (list, tuple, Sequence):
        return isinstance(value, list)
    if kind in (int, float):  # of a size with which one can compute
        kinds, limit = ((int,), 2**63) if kind is int else ((int, float), 1e300)
        return type(value) in kinds and abs(value) < limit
    return type(value) is (NoneType if kind is None else kind)


def _parts(value: Any, kind: Any, name: str) -> Iterator[tuple[Any, Any, str]]:
    """Each part of a value with its kind and name."""
    origin, args, keys = get_origin(kind), get_args(kind), _keys(kind)
    if keys is not None:
        yield from ((value[key], part, _below(name, key)) for key, (part, _) in keys.items() if key in value)
    elif origin in (dict, Mapping):
        yield from ((part, args[1], _below(name, key)) for key, part in value.items())
    elif origin in (list, tuple, Sequence):
        yield from ((part, args[0], f"{name}[{place}]") for place, part in enumerate(value))


@cache
def _keys(kind: Any) -> dict[str, tuple[Any, bool]] | None:
    """The type of each key of a record, and whether the key must be there; None for other kinds."""
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        return {name: (part, name not in kind.__optional_keys__) for name, part in hints.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return {field.name.rstrip("_"): (hints[field.name], True) for field in fields(kind)}
    return None


def _outside(value: Any, notes: Sequence[Any]) -> bool:
    """Whether a number, or the length of a list, is out of its bounds."""
    size = len(value) if isinstance(value, list) else value
    bounds = [note for note in notes if isinstance(note, Between)] if isinstance(size, (int, float)) else []
    return any(
        (its.low is not None and not size >= its.low) or (its.high is not None and not size <= its.high)
        for its in bounds
    )


def _as(value: Any, name: str) -> str:
    shown = type(value).__name__ if isinstance(value, (dict, list, str, NoneType)) else repr(value)
    return f"{name!r} as {shown}" if name else shown


def _below(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a type that `wrong_part` knows; of a record it allows no further keys.

    Strings in `Annotated` become descriptions.
    """
    origin, args, keys = get_origin(kind), get_args(kind), _keys(kind)
    if origin is Annotated:
        schema = schema_of(args[0])
        low, high = ("minItems", "maxItems") if schema.get("type") == "array" else ("minimum", "maximum")
        for note in args[1:]:
            added = {low: note.low, high: note.high} if isinstance(note, Between) else {"description": note}
            schema |= {key: value for key, value in added.items() if value is not None}
        return schema
    if keys is not None:
        return {
            "type": "object", "required": [key for key, (_, required) in keys.items() if required],
            "additionalProperties": False, "properties": {key: schema_of(part) for key, (part, _) in keys.items()},
        }  # fmt: skip
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, UnionType):
        parts = [schema_of(part) for part in args]
        plain = all(part.keys() == {"type"} for part in parts)
        return {"type": [part["type"] for part in parts]} if plain else {"anyOf": parts}
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": schema_of(args[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": schema_of(args[1])}
    names = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null", None: "null"}
    return {} if kind is Any else {"type": names[kind]}


def empty_parts(kind: Any) -> dict[str, Any]:
    """The required parts of a record that have a value before anything is known: None, an empty list or dict."""
    parts = {key: part for key, (part, required) in (_keys(kind) or {}).items() if required}
    makers: tuple[Callable[[], Any], ...] = (dict, list, NoneType)  # the last that fits is taken
    return {key: make() for key, part in parts.items() for make in makers if wrong_part(make(), part) is None}


def schema_name(kind: Any) -> str:
    """What a type's key "schema" holds: the program and the version of the format."""
    keys = _keys(kind)
    assert keys is not None
    return str(get_args(keys["schema"][0])[0])


def read_results(path: Path, kind: Any, command: str, cure: str = "") -> dict[str, Any]:
    """Read a results.json and check it by its type.

    Args:
        kind: the type of its content, whose key "schema" is a Literal.
        command: that writes such files, for the error.
    Raises:
        ResultsError: it is damaged, or another program wrote it. The error names the file and the part.
    """
    content = read_json(path, ResultsError, str(path), f"a {path.name} of {command}", cure, finite=True)
    if not isinstance(content, dict) or content.get("schema") != schema_name(kind):
        got = f"schema {content.get('schema')!r}" if isinstance(content, dict) else type(content).__name__
        raise ResultsError(str(path), got, repr(schema_name(kind)), "Another program or version wrote this file.")
    if wrong := wrong_part(content, kind):
        raise ResultsError(str(path), wrong, f"a {path.name} of {command}, unchanged", cure)
    return content


# The file

START_AGAIN = "Choose another folder with --out, or delete the file to start a new run."


class Results:
    """The results of one run: a results.json in the run's folder, rewritten after every step.

    A subclass sets `kind`, the type of the content, and the `command` that writes the file. Before the first step its
    lists and dicts are empty, and what may be None is.
    """

    kind: ClassVar[Any]  # with the keys schema, finished, settings, machine and others
    command: ClassVar[str]

    def __init__(self, folder: Path, content: dict[str, Any]) -> None:
        self.folder, self.content = folder, content

    @classmethod
    def open(cls: type[R], folder: Path, settings: Mapping[str, Any], machine: Mapping[str, Any], *, resume: bool) -> R:
        """Create a results file in `folder`, or with `resume` open the one of an interrupted run.

        Raises:
            ResultsError: the folder holds results and `resume` is off; or `resume` is on and the file is damaged, was
                written by another program, or has different settings or another machine.
        """
        check_folder(folder)
        path = folder / RESULTS
        if path.exists() and not resume:
            got = f"{folder}, which holds the results of an earlier run"
            cure = "Continue that run with --resume, or choose another folder with --out."
            raise ResultsError("--out", got, "a folder without results", cure)
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            head = {"schema": schema_name(cls.kind), "finished": False, "settings": dict(settings)}
            parts = {key: part for key, part in empty_parts(cls.kind).items() if key not in (*head, "machine")}
            results = cls(folder, {**head, "machine": dict(machine), **parts})
            results.save()
            return results
        content = cls.load(path, START_AGAIN)
        for part, now in (("settings", settings), ("machine", machine)):
            changed = sorted(key for key in {*content[part], *now} if content[part].get(key) != now.get(key))
            if changed:
                was = ", ".join(f"{key}={content[part].get(key)!r}" for key in changed)
                got = ", ".join(f"{key}={now.get(key)!r}" for key in changed)
                allowed = f"the {part} of the run in {folder}: {was}"
                cure = "Use the same settings and machine, or start a new run with --out."
                raise ResultsError("--resume", got, allowed, cure)
        remove_unfinished(folder)
        return cls(folder, content)

    @classmethod
    def load(cls, path: Path, cure: str = "Pass one that this command wrote.") -> dict[str, Any]:
        """Read a results file. Raises ResultsError if it is damaged or was written by another program."""
        return read_results(path, cls.kind, cls.command, cure)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON Schema of the file."""
        about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"{RESULTS} of {cls.command}"}
        return {**about, **schema_of(cls.kind)}

    def save(self) -> None:
        """Write the file."""
        write_whole(self.folder / RESULTS, json.dumps(self.content, indent=1, allow_nan=False) + "\n")

    def add(self, part: str, rows: list[dict[str, Any]]) -> None:
        """Append rows to a part and save."""
        self.content[part].extend(rows)
        self.save()

    def set(self, **parts: Any) -> None:
        """Replace whole parts and save."""
        self.content.update(parts)
        self.save()


class Progress(Protocol):
    """Where a long run reports its progress."""

    def start(self, what: str, total: int) -> Callable[..., None]:
        """Begin a part of `total` steps. Call the result with the number of steps that are done, and a note."""
        ...
