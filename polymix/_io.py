"""What every part of polymix reads and writes the same way: whole files, results.json, names, values, devices."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from polymix.errors import OptionError, ResultsError

RESULTS = "results.json"
DTYPES = ("float32", "bfloat16", "float16")
_WORDS: dict[str, Any] = {"none": None, "true": True, "false": False}
R = TypeVar("R", bound="Results")


def write_whole(path: Path, content: str | bytes | Callable[[Path], Any]) -> None:
    """Write a file whole or not at all: beside `path` under a hidden name, then rename once it is on the disk.

    `content` is text, bytes, or a function that writes to the path it is given. A reader, or a full disk, finds the
    old file or the new one.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        if isinstance(content, str):
            part.write_text(content, encoding="utf-8")
        elif isinstance(content, bytes):
            part.write_bytes(content)
        else:
            content(part)
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class Results:
    """The results of one run in one folder: results.json, written whole after every step.

    A subclass names its `schema`, the `command` that writes it and its `parts` besides settings and machine.
    """

    schema: ClassVar[str]
    command: ClassVar[str]
    parts: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, folder: Path, content: dict[str, Any]) -> None:
        self.folder, self.content = folder, content

    @classmethod
    def open(cls: type[R], folder: Path, settings: Mapping[str, Any], machine: Mapping[str, Any], *, resume: bool) -> R:
        """A new results file, or with `resume` the one that an interrupted run left.

        Raises:
            ResultsError: the folder holds results and `resume` is off; or it is on and the file is damaged, foreign, or
                comes from other settings or another machine.
        """
        path = folder / RESULTS
        if path.exists() and not resume:
            got = f"{folder}, which holds the results of an earlier run"
            cure = "Continue that run with --resume, or choose another folder with --out."
            raise ResultsError("--out", got, "a folder without results", cure)
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            fresh = {"schema": cls.schema, "finished": False, "settings": dict(settings), "machine": dict(machine)}
            results = cls(folder, {**fresh, **copy.deepcopy(dict(cls.parts))})
            results.save()
            return results
        content = cls.load(path)
        for part, now in (("settings", settings), ("machine", machine)):
            changed = sorted(key for key in {*content[part], *now} if content[part].get(key) != now.get(key))
            if changed:
                was = ", ".join(f"{key}={content[part].get(key)!r}" for key in changed)
                got = ", ".join(f"{key}={now.get(key)!r}" for key in changed)
                allowed = f"the {part} of the run in {folder}: {was}"
                raise ResultsError("--resume", got, allowed, "Or start a new run with --out.")
        return cls(folder, content)

    @classmethod
    def load(cls, path: Path) -> dict[str, Any]:
        """The content of a results file. Raises ResultsError where it is damaged or written by something else."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            got = f"a file that cannot be read ({error})"
            raise ResultsError(str(path), got, f"a {RESULTS} of {cls.command}", "") from error
        if not isinstance(content, dict) or content.get("schema") != cls.schema:
            got = f"schema {content.get('schema')!r}" if isinstance(content, dict) else type(content).__name__
            raise ResultsError(str(path), got, repr(cls.schema), "It comes from another program or version.")
        return content

    def save(self) -> None:
        write_whole(self.folder / RESULTS, json.dumps(self.content, indent=1, allow_nan=False) + "\n")

    def add(self, part: str, rows: list[dict[str, Any]]) -> None:
        self.content[part].extend(rows)
        self.save()

    def set(self, **parts: Any) -> None:
        self.content.update(parts)
        self.save()


def load_python(path: Path, argument: str) -> ModuleType:
    """A Python file of the user's, run as a module.

    Raises OptionError, naming `argument` and the file, for whatever goes wrong in it.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise OptionError(argument, repr(str(path)), "an existing Python file", "Check the path.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # any error of the user's own code is one line here
        raise OptionError(argument, f"{path}, which fails with {one_line(error)}", "a file that runs", "") from error
    return module


def call_function(name: str, options: Mapping[str, Any], argument: str = "NAME") -> Any:
    """What `function(**options)` of a Python file returns, for a `name` such as "mine.py:vit".

    Raises OptionError, naming `argument`, for whatever goes wrong on the way.
    """
    file, _, function = name.rpartition(":")
    if not function or not Path(file).is_file():
        raise OptionError(argument, repr(name), "an existing file.py and a function in it", "Write file.py:function.")
    module = load_python(Path(file), argument)
    try:
        return getattr(module, function)(**options)
    except Exception as error:
        got = f"{name}, which fails with {one_line(error)}"
        raise OptionError(argument, got, "a function that can be called", "") from error


def one_line(error: BaseException) -> str:
    """An error's type and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def parse_value(text: str, annotation: str = "") -> Any:
    """A value as people type it, as the option's `annotation` (such as "tuple[int, ...] | None") wants it.

    none, true and false (but where only text is wanted), whole numbers and floats, 64x64 or 2,3 or a/b for a tuple,
    else the text. A single value is a tuple of one where nothing but a tuple is wanted.
    """
    if annotation in ("Sequence[str]", "tuple[str, ...]", "list[str]"):
        return tuple(text.split(","))
    kinds = {kind.strip() for kind in re.sub(r"\[[^\]]*\]", "", annotation).split("|")} - {"", "None"}
    if kinds == {"str"}:
        return None if text.lower() == "none" and "None" in annotation else text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if re.fullmatch(r"\d+(x\d+)+", text):
        return tuple(map(int, text.split("x")))
    for separator in (",", "/"):
        if separator in text:
            return tuple(_number(part) for part in text.split(separator))
    return (_number(text),) if kinds and kinds <= {"tuple", "list", "Sequence"} else _number(text)


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_options(words: Sequence[str], annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    """["degree=3", "grid=64x64"] -> {"degree": 3, "grid": (64, 64)}, each as its annotation wants it."""
    options: dict[str, Any] = {}
    for word in words:
        option, sign, value = word.partition("=")
        if not sign or not option or not value:
            raise OptionError(word, "no option", "option=value, such as degree=3", "Write = without spaces.")
        if option in options:
            raise OptionError(option, "the option twice", "the option once", "Drop one of them.")
        options[option] = parse_value(value, (annotations or {}).get(option, ""))
    return options


def check_device(device: str, argument: str = "device", kinds: Sequence[str] = (), touch: bool = True) -> str:
    """The device's name, if PyTorch can compute on it here, and it is of one of `kinds` where they are given.

    Without `touch` devices are only counted: CUDA is not started, so that processes may still be forked.
    """
    kind, _, index = str(device).partition(":")
    if (kinds and kind not in kinds) or not (index or "0").isdecimal():
        allowed = f"a device of kind {', '.join(kinds)}" if kinds else "a device such as cpu or cuda:1"
        raise OptionError(argument, repr(device), allowed, f"Pass {kinds[0] if kinds else 'cpu'}, say.")
    if not touch:
        counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
        if int(index or 0) >= counts.get(kind, 1):
            raise OptionError(
                argument, repr(device), f"one of the {counts[kind]} {kind} devices here", "Pass cpu, say."
            )
        return device
    try:
        torch.zeros(1, device=device).add_(1)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        reason = reason if len(reason) < 160 else ""
        raise OptionError(argument, repr(device), "a device that PyTorch can use here, such as cpu", reason) from error
    if kind == "meta":
        raise OptionError(argument, repr(device), "a device that computes", "Use cpu or cuda.")
    return device


class Progress(Protocol):
    """Where a long run reports its progress."""

    def start(self, what: str, total: int) -> Callable[[int], None]:
        """Begin a part of `total` steps. Call the result with the number of steps that are done."""
        ...
