"""A results file: kept whole after every step, so that nothing that had finished is ever lost."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from polymix.errors import ResultsError

FILE = "results.json"
R = TypeVar("R", bound="Results")


def write_atomically(path: Path, text: str) -> None:
    """Write beside `path` and rename: whoever reads, or fills the disk, finds the old file or the new one, whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class Results:
    """The results of one run in one folder."""

    schema: ClassVar[str] = "polymix.bench/1"
    command: ClassVar[str] = "polymix bench"
    parts: ClassVar[Mapping[str, Any]] = {"ceilings": [], "rows": []}  # beside those that every run has

    def __init__(self, folder: Path, content: dict[str, Any]) -> None:
        self.folder, self.content = folder, content

    @classmethod
    def open(cls: type[R], folder: Path, settings: Mapping[str, Any], machine: Mapping[str, Any], *, resume: bool) -> R:
        """A new results file, or with `resume` the one that an interrupted run left there.

        Raises:
            ResultsError: the folder holds results and `resume` is off; or it is on, and the file is damaged, foreign,
                or comes from other settings or another machine.
        """
        path = folder / FILE
        if path.exists() and not resume:
            got = f"{folder}, which holds the results of an earlier run"
            cure = "--resume continues it; --out DIR puts a new run elsewhere."
            raise ResultsError("--out", got, "a folder without", cure)
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
                raise ResultsError("--resume", got, allowed, "Or begin anew with --out.")
        return cls(folder, content)

    @classmethod
    def load(cls, path: Path) -> dict[str, Any]:
        """The content of a results file, once it is known to be one."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            got = f"a file that cannot be read ({error})"
            raise ResultsError(str(path), got, f"a {FILE} of {cls.command}", "") from error
        if not isinstance(content, dict) or content.get("schema") != cls.schema:
            got = f"schema {content.get('schema')!r}" if isinstance(content, dict) else type(content).__name__
            raise ResultsError(str(path), got, repr(cls.schema), "It comes from another program or version.")
        return content

    def save(self) -> None:
        write_atomically(self.folder / FILE, json.dumps(self.content, indent=1, allow_nan=False) + "\n")

    def add(self, part: str, rows: list[dict[str, Any]]) -> None:
        self.content[part].extend(rows)
        self.save()

    def set(self, **parts: Any) -> None:
        self.content.update(parts)
        self.save()
