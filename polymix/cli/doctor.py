"""polymix doctor."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import AsJson, print_json
from polymix.errors import OptionError


def command(
    as_json: AsJson = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Mend a torchvision that is built for another PyTorch, for all programs.")
    ] = False,
) -> None:
    """Show what polymix finds on this machine, what is installed, and what would make it faster.

    Example: polymix doctor
    """
    if fix:
        if as_json:
            raise OptionError("--json", "--fix too", "one of the two", "Call doctor --json afterwards.")
        from polymix.compat import mend_torchvision

        print(mend_torchvision())
        return
    from polymix.workflows import doctor

    findings = doctor.examine()
    if as_json:
        print_json(doctor.as_json(findings))
        return
    console = Console(highlight=False, markup=False)
    for finding in findings:
        console.print(f"{finding.topic}: {finding.state}", soft_wrap=True)
        if finding.advice:
            console.print(f"  -> {finding.advice}", soft_wrap=True)
