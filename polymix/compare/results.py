"""results.json: what was measured, kept after every step so that nothing that had finished is ever lost."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polymix.errors import ResultsError

SCHEMA = "polymix.compare/1"
FILE = "results.json"


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
    """The results of one comparison in one folder."""

    def __init__(self, folder: Path, content: dict[str, Any]) -> None:
        self.folder, self.content = folder, content

    @classmethod
    def open(cls, folder: Path, settings: Mapping[str, Any], machine: Mapping[str, Any], *, resume: bool) -> Results:
        """A new results file, or with `resume` the one that an interrupted run left there.

        Raises:
            ResultsError: the folder holds results and `resume` is off; or it is on, and the file is damaged, foreign,
                or comes from other settings or another machine.
        """
        path = folder / FILE
        if path.exists() and not resume:
            cure = "--resume continues it; --out DIR puts a new comparison elsewhere."
            raise ResultsError(
                "--out", f"{folder}, which holds the results of an earlier run", "a folder without", cure
            )
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            fresh: dict[str, Any] = {
                "schema": SCHEMA, "finished": False, "settings": dict(settings), "machine": dict(machine), "data": None,
                "host": None, "mixers": [], "training": [], "sweep": [], "answer": None,
            }  # fmt: skip
            results = cls(folder, fresh)
            results.save()
            return results
        content = load(path)
        for part, now in (("settings", settings), ("machine", machine)):
            changed = [key for key in {*content[part], *now} if content[part].get(key) != now.get(key)]
            if changed:
                was = ", ".join(f"{key}={content[part].get(key)!r}" for key in sorted(changed))
                got = ", ".join(f"{key}={now.get(key)!r}" for key in sorted(changed))
                raise ResultsError(
                    "--resume", got, f"the {part} of the run in {folder}: {was}", "Or begin anew with --out."
                )
        return cls(folder, content)

    def save(self) -> None:
        write_atomically(self.folder / FILE, json.dumps(self.content, indent=1, allow_nan=False) + "\n")

    def add(self, part: str, rows: list[dict[str, Any]]) -> None:
        self.content[part].extend(rows)
        self.save()

    def set(self, **parts: Any) -> None:
        self.content.update(parts)
        self.save()


def load(path: Path) -> dict[str, Any]:
    """The content of a results file, once it is known to be one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(
            str(path), f"a file that cannot be read ({error})", "a results.json of polymix compare", ""
        ) from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        got = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise ResultsError(str(path), f"schema {got!r}", repr(SCHEMA), "It comes from another program or version.")
    return content
