"""polymix doctor."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show what polymix finds on this machine, and what would make it faster.

    Example: polymix doctor
    """
    from polymix.workflows import doctor

    findings = doctor.examine()
    if as_json:
        print(json.dumps(doctor.as_json(findings), indent=2))
        return
    console = Console(highlight=False, markup=False)
    for finding in findings:
        console.print(f"{finding.topic}: {finding.state}", soft_wrap=True)
        if finding.advice:
            console.print(f"  -> {finding.advice}", soft_wrap=True)
