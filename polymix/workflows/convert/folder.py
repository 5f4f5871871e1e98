"""The folder that `polymix convert` writes: nobody's but its own, so that nothing which is there is lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from polymix import _io
from polymix._io import RESULTS as FILE
from polymix.errors import OptionError, ResultsError


class Results(_io.Results):
    """results.json: what was asked, the plan, the data, and in the end what was found."""

    schema: ClassVar[str] = "polymix.convert/1"
    command: ClassVar[str] = "polymix convert"
    parts: ClassVar[Mapping[str, Any]] = {"plan": None}


def earlier(folder: Path, settings: Mapping[str, Any], *, resume: bool) -> dict[str, Any] | None:
    """What a run left there that is to be gone on with; None where there is nothing at all.

    Raises:
        OptionError, ResultsError: there are files that no run wrote, or a run's and `resume` is off, or those of a run
            with other settings.
    """
    if folder.exists() and not folder.is_dir():
        raise OptionError("--out", f"{folder}, which is a file", "a folder, there or not", "Choose another name.")
    held = sorted(path.name for path in folder.iterdir() if path.name[0] != ".") if folder.is_dir() else []
    if not held:
        return None
    if FILE not in held:
        got = f"{folder}, which holds {', '.join(held[:3])}{' …' * (len(held) > 3)}"
        cure = "Nothing is overwritten: choose another."
        raise ResultsError("--out", got, "a folder that is empty or not there", cure)
    machine = Results.load(folder / FILE)["machine"]  # any: the same model comes of another
    return Results.open(folder, settings, machine, resume=resume).content
