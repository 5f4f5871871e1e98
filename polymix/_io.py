"""Shared input and output: atomic file writes, folders, results.json, Python files, option values and device names."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from polymix.errors import OptionError, PolymixError, ResultsError

if TYPE_CHECKING:  # PyTorch is loaded by what computes, not by help
    import torch

RESULTS = "results.json"
DTYPES = ("float32", "bfloat16", "float16")
_WORDS: dict[str, Any] = {"none": None, "true": True, "false": False}
R = TypeVar("R", bound="Results")


def output_names(files: Sequence[Path]) -> list[str]:
    """A name for the output of each file: its own without the suffix, after the file's place where several share it.

    Where such a name is that of another file, all have their places before them.
    """
    times = Counter(path.stem for path in files)
    numbered = [f"{place:03d}-{path.stem}" for place, path in enumerate(files)]
    names = [path.stem if times[path.stem] == 1 else name for path, name in zip(files, numbered, strict=True)]
    return names if len(set(names)) == len(names) else numbered


def write_whole(path: Path, content: str | bytes | Callable[[Path], Any]) -> None:
    """Write a file atomically: first to a hidden file in the same folder, then rename it to `path`.

    Readers see either the old file or the complete new one, even if the disk fills up or the process is killed.

    Args:
        path: the file to write; its folder must exist.
        content: text, bytes, or a function that writes to the path it is given.
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


def remove_unfinished(folder: Path) -> None:
    """Delete what `write_whole` had begun below a folder when its process was killed. Nobody may be writing there."""
    for part in folder.rglob(".*.part"):
        part.unlink(missing_ok=True)


def a_path(value: Any, argument: str) -> Path:
    """The path that a string or path-like object names. Raises OptionError for anything else."""
    if not isinstance(value, (str, os.PathLike)) or not str(value) or "\0" in str(value):
        raise OptionError(argument, repr(value), "a path", f"For example, pass {argument}='my-folder'.")
    return Path(value)


def check_folder(folder: str | os.PathLike[str], argument: str = "--out") -> Path:
    """Return `folder` as a path, after checking that files can be written into it. Nothing is left behind.

    Raises:
        OptionError: it is a file or lies in one, its name is too long, or the disk is full or read-only.
    """
    cure = "Choose another folder, or make room."
    path = a_path(folder, argument)
    try:
        above = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place) and place.exists())
        if not above.is_dir():
            what = "which is a file" if above == path else f"in {above}, which is a file"
            raise OptionError(argument, f"{folder}, {what}", "a folder, which may exist already", cure)
        os.stat(path) if above == path else _stat_missing(path)
        with tempfile.TemporaryFile(dir=above) as file:
            file.write(bytes(4096))
            file.flush()
    except (OSError, ValueError, StopIteration, TypeError) as error:
        if isinstance(error, PolymixError):
            raise
        got = f"{str(folder)[:100]}, where nothing can be written ({reason_of(error)})"
        raise OptionError(argument, got, "a folder on a disk with room that can be written to", cure) from error
    return path


def _stat_missing(path: Path) -> None:
    """Raise OSError if a path can never exist, because a part of it is too long or is a file."""
    try:
        os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            raise


def is_file(path: Path) -> bool:
    """Whether there is such a file. Unlike `Path.is_file`, False also for names that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def reason_of(error: BaseException) -> str:
    """Why an operation failed: the system's words for an OSError ("No space left on device"), else `one_line`."""
    return error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)


def read_json(path: Path, kind: type[PolymixError], argument: str, allowed: str, cure: str = "") -> Any:
    """Read a JSON file. Raises `kind` about `argument` if it is missing, unreadable, damaged or nested too deeply."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else reason_of(error)
        raise kind(argument, f"{path}, a file that cannot be read ({reason})", allowed, cure) from error


class Results:
    """The results of one run: a results.json in the run's folder, rewritten after every step.

    A subclass sets `schema`, the `command` that writes the file, `parts`, the initial content besides the settings and
    the machine, and `rows`: for the parts that are lists, the types of each value in a row.
    """

    schema: ClassVar[str]
    command: ClassVar[str]
    parts: ClassVar[Mapping[str, Any]] = {}
    rows: ClassVar[Mapping[str, Mapping[str, tuple[type, ...]]]] = {}

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
                cure = "Use the same settings and machine, or start a new run with --out."
                raise ResultsError("--resume", got, allowed, cure)
        remove_unfinished(folder)
        return cls(folder, content)

    @classmethod
    def load(cls, path: Path) -> dict[str, Any]:
        """Read a results file. Raises ResultsError if it is damaged or was written by another program."""
        cure = "Choose another folder with --out, or delete the file to start a new run."
        content = read_json(path, ResultsError, str(path), f"a {RESULTS} of {cls.command}", cure)
        if not isinstance(content, dict) or content.get("schema") != cls.schema:
            got = f"schema {content.get('schema')!r}" if isinstance(content, dict) else type(content).__name__
            raise ResultsError(str(path), got, repr(cls.schema), "Another program or version wrote this file.")
        if wrong := cls._wrong_part(content):
            raise ResultsError(str(path), wrong, f"a {RESULTS} of {cls.command}, unchanged", cure)
        return content

    @classmethod
    def _wrong_part(cls, content: Mapping[str, Any]) -> str | None:
        """The first part that is missing or of another type, in words."""
        whole: dict[str, Any] = {"finished": False, "settings": {}, "machine": {}, **cls.parts}
        for part, like in whole.items():
            if part not in content:
                return f"a file without {part!r}"
            if like is not None and type(content[part]) is not type(like):
                return f"{part!r} as {type(content[part]).__name__}"
            keys = cls.rows.get(part, {})
            for row in content[part] if keys else ():
                lacking = [key for key in keys if key not in row] if isinstance(row, dict) else list(keys)
                if lacking:
                    return f"a row of {part!r} without {lacking[0]!r}"
                odd = [
                    key
                    for key, kinds in keys.items()
                    if type(row[key]) not in kinds and not (float in kinds and type(row[key]) is int)
                ]
                if odd:
                    return f"{odd[0]!r} as {type(row[odd[0]]).__name__} in {part!r}"
        return None

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


def load_python(path: Path, argument: str) -> ModuleType:
    """Run a user's Python file and return it as a module.

    Raises:
        OptionError: the file does not exist or raises. The error names `argument` and the file.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not is_file(path) or spec is None or spec.loader is None:
        raise OptionError(argument, repr(str(path)), "an existing Python file", "Check the path.")
    module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # no __pycache__ beside the user's file
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything, or exit
        got = f"{path}, which fails with {one_line(error)}"
        raise OptionError(argument, got, "a file that runs without errors", "") from error
    finally:
        sys.dont_write_bytecode = writes
    return module


def call_function(name: str, options: Mapping[str, Any], argument: str = "NAME") -> Any:
    """Call `function(**options)` from a Python file and return the result; `name` is "file.py:function".

    Raises:
        OptionError: the file or the function does not exist, or either raises. The error names `argument`.
    """
    file, _, function = name.rpartition(":")
    if not function or not is_file(Path(file)):
        allowed = "an existing Python file and a function in it"
        raise OptionError(argument, repr(name), allowed, "Write it as file.py:function.")
    module = load_python(Path(file), argument)
    if not callable(getattr(module, function, None)):
        raise OptionError(argument, repr(name), "a function that the file has", "Check its name.")
    try:
        return getattr(module, function)(**options)
    except (Exception, SystemExit) as error:
        got = f"{name}, which fails with {one_line(error)}"
        raise OptionError(argument, got, "a function that runs without errors", "") from error


def one_line(error: BaseException) -> str:
    """Format an error's type and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def parse_value(text: str, annotation: str = "") -> Any:
    """Parse an option's value from the command line.

    "none", "true" and "false" become None, True and False; numbers become int or float; "64x64", "2,3" and "a/b"
    become tuples; anything else stays text. For a sequence of texts, commas separate the texts.

    Args:
        text: the value as typed.
        annotation: the option's type, such as "tuple[int, ...] | None". If it allows only text, `text` stays text.
            If it allows only a tuple, a single value becomes a tuple of one.
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
    """Parse options such as ["degree=3", "grid=64x64"] into {"degree": 3, "grid": (64, 64)}.

    Args:
        words: one "option=value" each.
        annotations: the type of each option; see `parse_value`.
    Raises:
        OptionError: a word is not of the form option=value, or an option appears twice.
    """
    options: dict[str, Any] = {}
    for word in words:
        option, sign, value = word.partition("=")
        if not sign or not option or not value:
            cure = "Write it without spaces around the =."
            raise OptionError(word, repr(word), "option=value, such as degree=3", cure)
        if option in options:
            raise OptionError(option, "the option twice", "the option once", "Remove one of them.")
        options[option] = parse_value(value, (annotations or {}).get(option, ""))
    return options


def float_type(dtype: torch.dtype | str | None, argument: str = "dtype") -> torch.dtype | None:
    """A floating-point type of PyTorch, from itself or its name, such as "bfloat16". Raises OptionError for others."""
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype.isidentifier() else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptionError(argument, repr(dtype), f"{', '.join(DTYPES)} or float64", f"Pass {argument}=torch.float32.")
    return found


def check_place(device: Any, dtype: Any) -> None:
    """Raise OptionError unless tensors can be made with these arguments: a device or None, a floating type or None."""
    import torch

    try:
        _ = None if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise OptionError("device", repr(device), "a device such as cpu or cuda:1", "Pass cpu.") from None
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError("dtype", repr(dtype), "a floating-point torch.dtype", "Pass for example torch.float32.")


def check_device(device: str, argument: str = "device", kinds: Sequence[str] = (), touch: bool = True) -> str:
    """Return the name of a device after checking that PyTorch can compute on it.

    Args:
        device: such as "cpu" or "cuda:1".
        argument: the option that the error names.
        kinds: the kinds of device that are accepted, such as ("cpu", "cuda"); empty accepts all.
        touch: False only counts the devices. CUDA is then not started, so that the process can still fork.
    Raises:
        OptionError: the device is unavailable, cannot compute (meta), or is of another kind.
    """
    import torch

    kind, _, index = str(device).partition(":")
    if (kinds and kind not in kinds) or not (index or "0").isdecimal():
        allowed = f"one of {', '.join(kinds)}" if kinds else "a device such as cpu or cuda:1"
        raise OptionError(argument, repr(device), allowed, f"For example, pass {kinds[0] if kinds else 'cpu'}.")
    if not touch:
        counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
        if int(index or 0) >= counts.get(kind, 1):
            allowed = f"one of the {counts[kind]} {kind} devices of this machine"
            raise OptionError(argument, repr(device), allowed, "For example, pass cpu.")
        return device
    try:
        torch.zeros(1, device=device).add_(1)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        reason = reason if len(reason) < 160 else ""
        allowed = "a device that PyTorch can use on this machine, such as cpu"
        raise OptionError(argument, repr(device), allowed, reason) from error
    if kind == "meta":
        raise OptionError(argument, repr(device), "a device that can compute", "Use cpu or cuda.")
    return device


class Progress(Protocol):
    """Where a long run reports its progress."""

    def start(self, what: str, total: int) -> Callable[..., None]:
        """Begin a part of `total` steps. Call the result with the number of steps that are done, and a note."""
        ...
