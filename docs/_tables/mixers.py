"""What the pages say about mixers, structures and operators, from their docstrings, configs and cost formulas."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

from polymix import structured
from polymix.errors import PolymixError
from polymix.mixers import MixerConfig, TokenMixer, config_class, create_mixer, list_mixers, mixer_class
from polymix.mixers.registry import ATTENTION, FLOOR
from polymix.ops.operator import registered
from polymix.structured import Site, StructuredMap, create_map, list_maps

from . import overview as domains
from .figures import table

TOKENS, DIM, GRID = 4096, 192, (64, 64)
LEGEND = "Default data, with the marks of [the table of all domains](../domains/index.md#results-on-the-default-data)."
REQUIRED: dict[str, dict[str, Any]] = {"padre": {"grid": GRID}, "hyena": {"length": TOKENS}}  # to take TOKENS tokens
CAPABILITIES = {
    "causal": "causal", "cross": "a separate context", "keys": "keys from another input",
    "padding": "mask: padding", "arbitrary": "mask: any",
    "block_causal": "mask: block-causal", "segments": "mask: packed segments",
    "values": "values from another input", "recurrent": "recurrent (prefill, step)",
    "isolates_future": "causal: NaN in later tokens reaches no earlier output",
    "isolates_segments": "segments: NaN in other segments stays there",
    "any_length": "one set of weights for any N",
}  # fmt: skip


# The papers, by the names that docstrings cite them by. All were looked up; see "Papers" on the home page.
PAPERS = {
    "PADRe": "https://arxiv.org/abs/2407.11306",
    "PoM": "https://arxiv.org/abs/2604.06129",
    "QT-ViT": "https://openreview.net/forum?id=V2e0A2XIPF",
    "Poly-NL": "https://doi.org/10.1109/TPAMI.2022.3231971",
    "Poly-SA": "https://doi.org/10.1109/TPAMI.2022.3231971",
}


# Text


def linked(source: str) -> str:
    """A source with links to the papers that it names, the first time each."""
    for name, address in PAPERS.items():
        source = re.sub(rf"(?<![\w\[/-]){name}(?![\w\]-])", f"[{name}]({address})", source, count=1)
    return source


def text(value: str) -> str:
    """A docstring's plain text as Markdown that looks the same. `code` stays code; newlines become spaces."""
    parts = re.split(r"(`[^`]*`)", " ".join(value.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_\[\]<>|])", r"\\\1", part) for part in parts)


def short(value: Any) -> str:
    """The repr of an option's default, with few digits."""
    return re.sub(r"\d+\.\d{6,}", lambda number: f"{float(number[0]):.4g}", repr(value))


def yes(value: bool) -> str:
    return "yes" if value else "–"


def giga(count: int) -> str:
    """A count in few digits."""
    if count < 1e6:
        return f"{count:,}"
    size, unit = (1e9, "G") if count >= 1e8 else (1e6, "M")
    return f"{count / size:.3g}\N{NO-BREAK SPACE}{unit}"


def body(paragraphs: Iterable[str]) -> str:
    """Paragraphs as Markdown. Indented ones hold formulas and become code blocks."""
    return "\n\n".join(
        f"```text\n{inspect.cleandoc(part)}\n```" if part.startswith("    ") else text(part) for part in paragraphs
    )


# Docstrings


def split_doc(kind: type) -> tuple[list[str], dict[str, str]]:
    """A docstring's paragraphs, and the facts at its end: Shapes, State, Source and, for a structure, Cost."""
    paragraphs = re.split(r"\n\s*\n", inspect.getdoc(kind) or "")
    if paragraphs[-1].startswith("Cost: ") and paragraphs[-1].endswith("in multiply-adds."):
        paragraphs.pop()  # added by `register`; the page takes it from the config
    first, *labelled = re.split(
        r"\b(Shapes|Cost|State|Source)((?:, [^:]*?)?(?: \([^)]*\))?): ", " ".join(paragraphs.pop().split())
    )
    facts: dict[str, str] = {}
    notes: list[str] = []
    for label, detail, fact in zip(labelled[::3], labelled[1::3], labelled[2::3], strict=True):
        fact, *rest = re.split(r"(?<=\.) (?=[A-Z])", fact.strip(), maxsplit=1)
        facts[label] = fact if not detail else f"{detail.strip(' ,()')}: {fact}"
        notes += rest
    if first.strip():
        paragraphs.append(first.strip())
    return paragraphs, facts | ({"Notes": " ".join(notes)} if notes else {})


def meanings(config: type[MixerConfig]) -> dict[str, str]:
    """The meaning of each option, from "name: meaning" or "name, name: meaning" under Args of its config or a base."""
    texts: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        if not issubclass(kind, MixerConfig):
            continue
        _, _, entries = inspect.cleandoc(vars(kind).get("__doc__") or "").partition("\nArgs:\n")
        for entry in re.split(r"\n    (?=\S)", "\n" + entries)[1:]:
            names, _, meaning = " ".join(entry.split()).partition(": ")
            shared = names.split(", ")
            prefix = f"({', '.join(f'`{name}`' for name in shared)}) " if len(shared) > 1 else ""
            texts |= dict.fromkeys(shared, prefix + text(meaning))
    return texts


# Mixers


@cache
def built(name: str) -> tuple[TokenMixer, str]:
    """A mixer that takes TOKENS tokens, with its default options where they allow it, and the call that builds it."""
    for options in (REQUIRED.get(name, {}), {"grid": GRID}):
        try:
            mixer = create_mixer(name, DIM, **options).eval()
            mixer.cost(TOKENS)
        except PolymixError:
            continue
        arguments = "".join(f", {key}={value!r}" for key, value in options.items())
        return mixer, f'create_mixer("{name}", {DIM}{arguments})'
    raise RuntimeError(f"{name} cannot be built for {TOKENS} tokens: add the options that it needs to REQUIRED")


def wraps(name: str) -> str:
    """The layers of another library that a mixer wraps."""
    if config_class(name).layer_of is None:
        return ""
    source = Path(inspect.getfile(mixer_class(name))).read_text()
    layers = sorted({*re.findall(r'timm_layer\("(\w+)"\)', source), *re.findall(r" import (\w+) as Layer", source)})
    library = config_class(name).layer_of
    owner = f"{library}'" if library.endswith("s") else f"{library}'s"
    return " and ".join(f"{owner} {layer}" for layer in layers)


def group(name: str) -> str:
    if name in (ATTENTION, FLOOR):
        return "Yardsticks"
    return "Related mechanisms" if ".related." in mixer_class(name).__module__ else "Polynomial mixers"


def groups() -> dict[str, list[str]]:
    """The mixers by group, the polynomial ones first."""
    order = dict.fromkeys(map(group, ("padre", *list_mixers())))
    return {title: [name for name in list_mixers() if group(name) == title] for title in order}


def facts_of(name: str) -> str:
    doc, config = split_doc(mixer_class(name))[1], config_class(name)
    cost, attention = built(name)[0].cost(TOKENS), built(ATTENTION)[0].cost(TOKENS)
    at_size = (
        f"{cost.parameters:,} parameters and {giga(cost.multiply_adds)} multiply-adds; softmax attention has "
        f"{attention.parameters:,} and {giga(attention.multiply_adds)}."
    )
    facts = {
        "A token sees": f"{config.sees}.",
        "Shapes": doc.get("Shapes", "(B, N, D) -> (B, N, D)."),
        "Cost in multiply-adds": f"{config.cost_formula}.",
        f"At {TOKENS:,} tokens of {DIM} channels": at_size,
        "State": doc.get("State", ""),
        "Notes": doc.get("Notes", ""),
        "Library": f"wraps {wraps(name)}." if wraps(name) else "none; written from its formula.",
    }
    lines = [f"- **{label}**: {text(fact)}" for label, fact in facts.items() if fact]
    return "\n".join([*lines, f"- **Source**: {linked(text(doc['Source']))}"])


def mixer_head(name: str) -> str:
    """The first paragraph of a mixer's page: what it is."""
    return text(split_doc(mixer_class(name))[0][0])


def mixer_facts(name: str) -> str:
    """The rest of a mixer's page: formula, shapes, cost, source, capabilities and options."""
    kind, config = mixer_class(name), config_class(name)
    _, *rest = split_doc(kind)[0]
    mixer, call = built(name)
    some, this = kind.capabilities, mixer.capabilities
    can: list[tuple[str, ...]] = [
        (label, yes(some.has(key)), yes(this.has(key)))
        for key, label in CAPABILITIES.items()
        if key != "keys" or some.keys
    ]
    can.append(("grid of tokens", *(", ".join(f"{n}-D" for n in c.grids) or "–" for c in (some, this))))
    can.append(("feature maps (B, D, H, W)", yes(kind.feature_maps), yes(kind.feature_maps)))
    meaning = meanings(config)
    options = [(f"`{f.name}`", f"`{short(f.default)}`", meaning[f.name]) for f in fields(config)]
    runs = domains.of_mixer(name)
    parts = [
        "## Formula" if rest else "", body(rest),
        "## Shapes, cost, source", facts_of(name),
        "## As a function", f"`{call}`: {mixer.polynomial}.",
        "## Capabilities", table(("", "with suitable options", "as built above"), can),
        "## In the domains" if runs else "", LEGEND if runs else "", runs,
        "## Options", f"Options of `{config.__name__}`, and keywords of `create_mixer`:",
        table(("option", "default", "meaning"), options),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


def overview() -> str:
    """What each mixer computes, a table for each group."""
    parts = []
    for title, names in groups().items():
        rows = []
        for name in names:
            config = config_class(name)
            cells = (
                config.output,
                config.sees,
                config.cost_formula,
                *([config.layer_of or "–"] if named(names) else []),
            )
            year = [first_source(name)] if named(names) else []
            rows.append((f"[{name}]({name}.md)", *map(text, cells), *year))
        head = ("mixer", "output", "a token sees", "multiply-adds", *(["layer of", "source"] if named(names) else []))
        parts += [f"### {title}", table(head, rows)]
    return "\n\n".join(parts)


def first_source(name: str) -> str:
    """The first source of a mixer: its authors and the year."""
    source = split_doc(mixer_class(name))[1]["Source"]
    return linked(text((re.match(r".*?\b(?:19|20)\d\d\)?", source) or re.match(r"[^;]*", source))[0].rstrip(".")))


def named(names: Iterable[str]) -> bool:
    """Whether one of the mixers wraps another library's layer."""
    return any(config_class(name).layer_of for name in names)


def costs() -> str:
    """Each mixer's figures at one size, and what it can do with suitable options."""
    rows = []
    for name in (name for names in groups().values() for name in names):
        mixer, can = built(name)[0], mixer_class(name).capabilities
        cost, function = mixer.cost(TOKENS), str(mixer.polynomial)
        able = [word for word in ("causal", "recurrent", "cross") if can.has(word)]
        able += ["any mask"] if can.has("arbitrary") else ["padding"] if can.has("padding") else []
        rows.append((
            f"[{name}]({name}.md)", giga(cost.multiply_adds), f"{cost.parameters:,}", function,
            ", ".join((*able, *(f"{n}-D" for n in can.grids))) or "–",
        ))  # fmt: skip
    return table(("mixer", "multiply-adds", "parameters", "by default", "can"), rows)


# Structures


def maps() -> Iterable[tuple[str, type[StructuredMap]]]:
    kinds = {getattr(kind, "kind", ""): kind for kind in vars(structured).values() if isinstance(kind, type)}
    return [(name, kinds[name]) for name in list_maps()]


def structures() -> str:
    rows = []
    for name, kind in maps():
        token = create_map(name, Site("token", DIM, 1024, 1024), device="meta")
        channel = create_map(name, Site("channel", DIM, DIM, DIM), device="meta")
        causal = kind.causal_form or name == "dense"  # on the token side dense is one block
        memory = causal and create_map(name, Site("token", DIM, 1024, 1024, causal=True), device="meta").recurrent
        cost = token.cost(1024)
        rows.append((
            f"[{name}](#{name})", yes(causal), yes(memory), yes(kind.rectangular), yes(not token.fixed),
            yes(kind.on_grid), giga(cost.multiply_adds), f"{cost.parameters:,}", f"{channel.cost(1024).parameters:,}",
        ))  # fmt: skip
    head = ("structure", "causal", "recurrent", "two lengths", "any N", "by distance", "multiply-adds", "as A", "as B")
    return table(head, rows)


def each_structure() -> str:
    parts = []
    for name, kind in maps():
        options = [f"{p.name}={p.default}".lower() for p in inspect.signature(kind.__init__).parameters.values()
                   if p.kind is p.KEYWORD_ONLY]  # fmt: skip
        paragraphs, facts = split_doc(kind)
        rest = [text(fact) if label == "Notes" else f"**{label}**: {text(fact)}" for label, fact in facts.items()]
        parts.append("\n\n".join((f"### {name}", f"`{':'.join((name, *options))}`", body(paragraphs), *rest)))
    return "\n\n".join(parts)


# Operators


def operators() -> str:
    """The registered operators, and for which devices each has a kernel."""
    rows = [
        (f"`{name}`", yes("triton" in op.kernels), yes("native" in op.kernels)) for name, op in registered().items()
    ]
    return table(("operator", "Triton", "C"), sorted(rows))


TABLES: dict[str, Callable[[], str]] = {
    "mixers": overview,
    "mixers-costs": costs,
    "structures": structures,
    "each-structure": each_structure,
    "operators": operators,
    **{f"mixer-{name}": partial(mixer_head, name) for name in list_mixers()},
    **{f"mixer-{name}-facts": partial(mixer_facts, name) for name in list_mixers()},
}
