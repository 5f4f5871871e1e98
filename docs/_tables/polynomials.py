"""The table of benchmarks/polynomial_degrees.py."""

from __future__ import annotations

from collections.abc import Callable

from .figures import load, table, where

HOSTS = {"convolutions": "convolutions", "padre": "tokens, `padre`", "poly_nl": "tokens, `poly_nl`"}


def polynomial_degrees() -> str:
    """Each host's accuracy, and its polynomial's as fitted and as distilled, by the degree of its activations."""
    content = load("polynomial-degrees.json")
    rows = content["rows"]
    stages = ("before", "fitted", "distilled")
    lines = [
        (HOSTS[row["host"]], row["degree"], f"{row['error']:.2g}", *(f"{100 * row[stage]:.1f}%" for stage in stages))
        for row in rows
    ]
    train, test = content["settings"]["images"]
    distilling = content["settings"]["distilling"]
    setting = (
        f"{train:,} images of training and {test} of test, one seed; {content['settings']['epochs']} epochs for the "
        f"hosts, {distilling['epochs']} of distilling. In all {sum(row['seconds'] for row in rows):.0f} s of "
        f"processor time for the polynomials: {where(content['machine'])}. "
        "`python benchmarks/polynomial_degrees.py OUT.json`"
    )
    head = ("network", "degree", "error of the output", "accuracy before", "fitted", "distilled")
    return f"{table(head, lines)}\n\n{setting}"


TABLES: dict[str, Callable[[], str]] = {"polynomial-degrees": polynomial_degrees}
