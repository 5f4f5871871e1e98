"""polymix doctor."""

from __future__ import annotations

from rich.console import Console

from polymix.cli.shared import AsJson, print_json


def command(as_json: AsJson = False) -> None:
    """Show what polymix finds on this machine, and what would make it faster.

    Example: polymix doctor
    """
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
