"""Files and folders: written whole or not at all, checked before they are used, and Python files of the user's."""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from polymix.errors import OptionError, PolymixError, one_line, printable, reason_of

LOCK = ".polymix.lock"  # in a folder that a run writes
PART = ".part"  # ends the name of what is not whole yet
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_PROBE = 1 << 20  # bytes
_held: dict[tuple[Path, int], int] = {}  # by lock and thread, the open file


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
    Raises:
        OSError: of `path`, whatever the function raises where the disk is full.
    """
    with writing(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
        os.close(handle)
    part = Path(name)
    try:
        with writing(path, part):
            if isinstance(content, str):
                part.write_text(printable(content), encoding="utf-8")
            elif isinstance(content, bytes):
                part.write_bytes(content)
            else:
                content(part)
            _finish(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_files(folder: Path, write: Callable[[Path], Any]) -> None:
    """Write files into a folder, which is made if it is missing, each as `write_whole` does.

    write: called with a hidden folder, from which the files then move, also those of folders in it.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=folder, prefix=".", suffix=PART))
    try:
        with writing(folder, part):
            write(part)
            for file in sorted(part.rglob("*")):
                place = folder / file.relative_to(part)
                place.mkdir(exist_ok=True) if file.is_dir() else _finish(file, place)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _finish(part: Path, path: Path) -> None:
    """Give a whole file its name, once the disk has it."""
    with open(part, "rb+") as file:
        os.fsync(file.fileno())
    os.chmod(part, 0o644)
    os.replace(part, path)


@contextmanager
def writing(place: Path, part: Path | None = None) -> Iterator[None]:
    """Raise an OSError of `place`, with the system's reason, where the block fails because the disk takes no more.

    Libraries have errors of their own for that: torch a RuntimeError about a position in the file, numpy an OSError
    without a reason, safetensors and tokenizers types of their own. Other errors pass as they are.

    part: the hidden file or folder that the block writes; None: `place`.
    """
    try:
        yield
    except PolymixError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            hidden = error.filename is None or PART in str(error.filename)
            number = error.errno if hidden else None
        else:
            number = disk_error(error) or _probe(part or place)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(place)) from error


def disk_error(error: BaseException | None) -> int | None:
    """The number of a full disk's error among an error's causes, or in words such as Rust's "(os error 28)"."""
    while error is not None:
        words = re.search(r"\(os error (\d+)\)", str(error))
        number = error.errno if isinstance(error, OSError) else int(words[1]) if words else None
        if number in _DISK:
            return number
        error = error.__cause__ or error.__context__
    return None


def _probe(part: Path) -> int | None:
    """The number of the error with which the disk refuses more of a hidden file or folder; None: it takes more."""
    try:
        with tempfile.TemporaryFile(dir=part) if part.is_dir() else open(part, "ab") as file:
            file.write(bytes(_PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno
    return None


def check_room(folder: Path) -> None:
    """Raise an OSError of a folder whose disk takes no more, for a library that does not say that its files are cut."""
    number = _probe(folder)
    if number is not None:
        raise OSError(number, os.strerror(number), str(folder))


def remove_unfinished(folder: Path) -> None:
    """Delete what was begun below a folder when its process was killed. Nobody may be writing there."""
    for part in [*folder.rglob(f".*{PART}")]:
        shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)


@contextmanager
def output_folder(folder: str | os.PathLike[str], argument: str = "--out", *, renamed: bool = False) -> Iterator[Path]:
    """A folder that no other process of polymix writes meanwhile. It is made, and removed again if it stays empty.

    The lock is the system's own on a hidden file, so that it ends with the process, however that ends; a process that
    is forked has no part in it. A thread may lock again what it has locked. Of the processes of torchrun the first one
    locks. Where a file system has no locks, nothing is refused.

    Args:
        renamed: the folder gets its name at the end, and is not made; the hidden file lies beside it.
    Raises:
        OptionError: as `check_folder`, or another process writes there.
    """
    path = check_folder(folder, argument)
    inside = path.absolute().parent if renamed else path.absolute()
    lock = inside / (f".{path.absolute().name}.lock" if renamed else LOCK)
    key = lock, threading.get_ident()
    if os.environ.get("RANK", "0") != "0" or key in _held:
        yield path
        return
    missing = [place for place in (inside, *inside.parents) if not place.exists()]
    handle = _locked(lock)
    try:
        if handle is not None:
            _held[key] = handle
        else:
            got = f"{folder}, where another process of polymix is writing"
            raise OptionError(argument, got, "a folder for each run", "Wait for its end, or choose another folder.")
        yield path
    finally:
        if handle is not None and _held.pop(key, None) == handle:
            with suppress(OSError):  # Windows removes no open file
                lock.unlink()
            os.close(handle)
        with suppress(OSError):
            for place in missing:
                place.rmdir()


def _locked(file: Path) -> int | None:
    """An open file that is locked for this process; None where another process has it."""
    while True:
        with writing(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # its last holder has just removed the folder
            continue
        try:
            _lock(handle)
        except (BlockingIOError, PermissionError):
            os.close(handle)
            return None
        except OSError:  # no locks on this file system
            pass
        if file.exists() and os.path.samestat(os.fstat(handle), os.stat(file)):
            return handle
        os.close(handle)  # its last holder has just removed the file


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _forget_locks() -> None:
    """In a process that was forked: its copies of the files would keep the lock after the end of the first process."""
    while _held:
        os.close(_held.popitem()[1])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


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


def regular(path: Path) -> Path:
    """The path of a file whose content lies on a disk, to be opened.

    Raises OSError where there is none: a folder, or a pipe or a device, which may wait for ever or never end.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal digits; it is read in pieces."""
    import hashlib  # late: a command that only prints needs none

    digest = hashlib.sha256()
    with open(regular(path), "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def read_text(path: Path, encoding: str = "utf-8", errors: str | None = None) -> str:
    """The text of a regular file. Raises OSError, or UnicodeDecodeError."""
    return regular(path).read_text(encoding, errors)


def is_file(path: Path) -> bool:
    """Whether there is such a file. Unlike `Path.is_file`, False also for names that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_there(path: Path) -> bool:
    """Whether there is such a file or folder. Unlike `Path.exists`, False also for names that none can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def read_json(
    path: Path, kind: type[PolymixError], argument: str, allowed: str, cure: str = "", *, finite: bool = False
) -> Any:
    """Read a JSON file, in which no object may have a name twice, of which programs see another one each.

    finite: refuse NaN and infinite numbers, which JSON does not have, and which polymix never writes.
    Raises `kind` about `argument` if it is missing, unreadable, damaged or nested too deeply.
    """
    try:
        own: Any = {"parse_constant": _finite, "parse_float": _finite} if finite else {}
        return json.loads(read_text(path, "utf-8-sig"), object_pairs_hook=once, **own)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else reason_of(error)
        raise kind(argument, f"{path}, a file that cannot be read ({reason})", allowed, cure) from error


def once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict of pairs. ValueError for a name that comes twice, of which JSON and YAML would drop the first."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} twice")
    return content


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word} is no number of JSON")
    return value


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
