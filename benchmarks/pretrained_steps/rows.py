"""Rows of results in a file: each is saved when it is there, and one that is there is not made again."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from saving import save

from polymix.measure import manifest
from pretrained_steps.packages import Package


class Rows:
    """The rows of a file, and what holds for all of them.

    Args:
        given: the options, with out and threads. packages: whose hashes the file names. about: what else it says.
    """

    def __init__(self, given: argparse.Namespace, packages: Sequence[Package], about: Mapping[str, Any]) -> None:
        self.out, before = given.out, json.loads(given.out.read_text()) if given.out.exists() else {}
        self.rows: list[dict[str, Any]] = before.get("rows", [])
        self.content = {
            "machine": manifest(given.device, given.threads),
            "sha256": {package.file: package.sha256 for package in packages},
            **about,
        }  # fmt: skip

    def __contains__(self, key: Mapping[str, Any]) -> bool:
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(row, flush=True)
        save({**self.content, "rows": self.rows}, self.out)
