"""metrics.jsonl: a row each time something was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Metrics:
    """Appends rows to a file, of which those beyond step `done`, of a run that was stopped, are taken away first."""

    def __init__(self, path: Path, done: int, say: Callable[[str], None], writes: bool) -> None:
        self.path, self.say, self.writes = path, say, writes
        if writes:
            kept = [row for row in self.rows() if row["step"] <= done]
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{path.name}.part")
            part.write_text("".join(json.dumps(row) + "\n" for row in kept), "utf-8")
            part.replace(path)

    def rows(self) -> list[dict[str, Any]]:
        """All of them; a last line that was cut off is none."""
        lines = self.path.read_text("utf-8").splitlines(keepends=True) if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def latest(self) -> dict[str, Any]:
        """The last value of every number."""
        return {key: value for row in self.rows() for key, value in row.items()}

    def __call__(self, row: dict[str, Any]) -> None:
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self.say("  ".join(f"{key} {_short(value)}" for key, value in row.items() if key != "samples"))


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
