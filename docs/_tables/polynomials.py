"""The tables of benchmarks/polynomial_degrees.py and benchmarks/recipes.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polymix.numbers import percent

from .figures import load, table, where

HOSTS = {"convolutions": "convolutions", "padre": "tokens, `padre`", "poly_nl": "tokens, `poly_nl`"}
NAMES = {"digits": "scikit-learn's digits", "fashion": "Fashion-MNIST", "scenes": "digit scenes"}


def _form(row: dict[str, Any]) -> str:
    if row["degree"] is None:
        return "the network itself"
    return f"degree {row['degree']}" + (", " + row["form"] if row["form"] != "N" else "")


def degrees(source: str) -> str:
    """Each host's accuracy, and its polynomial's as fitted and distilled, by the degree of its activations."""
    content = load("polynomial-degrees.json")
    rows = [row for row in content["rows"] if row["data"] == source and row["part"] == "degrees"]
    lines = []
    for row in rows:
        error = f"{row['error']:.2g}" if "error" in row else "–"
        lines.append((HOSTS[row["host"]], _form(row), error, percent(row["fitted"]), percent(row["distilled"])))
    train, test = content["images"][source]
    seconds = sum(row.get("seconds", 0.0) for row in rows)
    setting = (
        f"{NAMES[source]}: {train:,} images of training and {test:,} of test, one seed; "
        f"{content['settings']['epochs'][source]} epochs for the hosts, {content['settings']['distilling']['epochs']} "
        f"of distilling, and as many more for the network itself. In all {seconds:.0f} s of processor time for the "
        f"polynomials: {where(content['machine'])}. "
        f"`python benchmarks/polynomial_degrees.py OUT.json --data {source}`"
    )
    head = ("network", "activations", "error of the output", "as fitted", "distilled")
    return f"{table(head, lines)}\n\n{setting}"


def integers() -> str:
    """The distilled networks on the first images of test, in float32 and in 8 bits."""
    lines = []
    for row in load("polynomial-degrees.json")["rows"]:
        if ours := row.get("integers"):
            ends = (
                [f"refused: {ours['refused']}"] * 2
                if "refused" in ours
                else map(percent, (ours["cpu"], ours["emulator"]))
            )
            error = f"{ours['error']:.2g}" if "error" in ours else "–"
            lines.append((HOSTS[row["host"]], _form(row), percent(ours["float"]), error, *ends))
    head = ("network", "activations", "float32", "error in 8 bits", "8 bits, CPU", "8 bits, emulator")
    return table(head, lines)


def forms() -> str:
    """Polynomials and quotients of degree 3 with coefficients that learn, and their poles."""
    rows = [row for row in load("polynomial-degrees.json")["rows"] if row["part"] == "forms"]
    lines = [
        (NAMES[row["data"]], HOSTS[row["host"]], row["form"], f"{row['error']:.2g}", percent(row["fitted"]),
         percent(row["distilled"]), " → ".join(map(str, row["poles"])) + f" of {row['activations']}")
        for row in rows
    ]  # fmt: skip
    head = ("images", "network", "form", "error of the output", "as fitted", "distilled",
            "activations with a pole in their range, as fitted → distilled")  # fmt: skip
    return table(head, lines)


def _part(name: str) -> tuple[list[dict[str, Any]], str]:
    content = load("recipes.json")
    part = content["parts"][name]
    return part["rows"], f"One seed; {part['seconds']:.0f} s of processor time: {where(content['machine'])}."


def triplets() -> str:
    rows, setting = _part("triplets")
    lines = [
        (f"`{row['from']}`" if row["from"] == "poly_nl" else row["from"], percent(row["before"]),
         f"{row['triplets']:,} of {row['reached']:,.0f}", "at random" if row["at_random"] else "the strongest",
         percent(row["pruned"]), percent(row["learned"]))
        for row in rows
    ]  # fmt: skip
    head = ("layer", "accuracy before", "triplets that stay", "which", "pruned", "learned on")
    return f"{table(head, lines)}\n\n{setting}"


def orders() -> str:
    rows, setting = _part("orders")
    lines = [
        (NAMES[row["data"]], row["order"] if row["order"] != "apart" else "2 and 3, each with its β",
         percent(row["accuracy"]), "; ".join(", ".join(f"{beta:.3f}" for beta in betas) for betas in row["betas"]))
        for row in rows
    ]  # fmt: skip
    return f"{table(('images', 'orders', 'accuracy', 'β after training, by seed'), lines)}\n\n{setting}"


def activations() -> str:
    rows, setting = _part("degree")
    cells = {(row["data"], row["activation"], row["degree"]): percent(row["accuracy"]) for row in rows}
    powers = sorted({row["degree"] for row in rows})
    pairs = dict.fromkeys((row["data"], row["activation"]) for row in rows)
    lines = [(NAMES[data], name, *(cells[data, name, power] for power in powers)) for data, name in pairs]
    head = ("images", "in the MLP", *(f"`padre` of degree {power}" for power in powers))
    return f"{table(head, lines)}\n\n{setting}"


TABLES: dict[str, Callable[[], str]] = {
    "polynomial-degrees": lambda: degrees("digits"), "polynomial-fashion": lambda: degrees("fashion"),
    "polynomial-scenes": lambda: degrees("scenes"),
    "polynomial-integers": integers, "polynomial-forms": forms, "recipe-triplets": triplets, "recipe-orders": orders,
    "recipe-activations": activations,
}  # fmt: skip
