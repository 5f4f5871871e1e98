"""What the site takes from the code: a hook of MkDocs, named in mkdocs.yml.

`pages` writes a page for every mixer; `TABLES` makes what a hand-written page asks for by <!-- generated: NAME -->.
docs/figures.py does the same with results.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import tomllib

sys.path.insert(0, str(Path(__file__).parent))  # a hook is no package

from tables import table

from polymix import structured
from polymix.errors import PolymixError
from polymix.lens.overview import in_words
from polymix.mixers import MixerConfig, TokenMixer, config_class, create_mixer, list_mixers, mixer_class
from polymix.structured import Site, StructuredMap, create_map, list_maps

DOCS = Path(__file__).parent
TOKENS, DIM, GRID = 4096, 192, (64, 64)
ALWAYS: dict[str, dict[str, Any]] = {"padre": {"grid": GRID}, "hyena": {"length": TOKENS}}  # said beside the figures
PAPERS = {
    "PD": "PADRe (Letourneau et al.)", "PM": "PoM (Picard et al.)", "QT": "QT-ViT",
    "PL": "Poly-NL and Poly-SA (Babiloni et al.)",
}  # fmt: skip
CAPABILITIES = {
    "causal": "causal", "cross": "a separate context", "padding": "mask: padding", "arbitrary": "mask: any",
    "block_causal": "mask: block-causal", "segments": "mask: packed segments",
    "recurrent": "recurrent (prefill, step)", "any_length": "one set of weights for any N", "export": "torch.export",
}  # fmt: skip


def text(value: str) -> str:
    """Plain text of a docstring as Markdown that shows the same, its `code` kept; newlines become spaces."""
    parts = re.split(r"(`[^`]*`)", " ".join(value.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_\[\]<>|])", r"\\\1", part) for part in parts)


def short(value: Any) -> str:
    return re.sub(r"\d+\.\d{6,}", lambda found: f"{float(found[0]):.4g}", repr(value))


def yes(value: bool) -> str:
    return "yes" if value else "–"


def split_doc(kind: type) -> tuple[list[str], dict[str, str]]:
    """A docstring's paragraphs, and the facts that it ends with: Shapes, Cost, State, Source, and what else."""
    *paragraphs, last = re.split(r"\n\s*\n", inspect.getdoc(kind) or "")
    first, *found = re.split(r"\b(Shapes|Cost|State|Source)((?:, [^:]*?)?(?: \([^)]*\))?): ", " ".join(last.split()))
    facts: dict[str, str] = {}
    notes: list[str] = []
    for label, more, said in zip(found[::3], found[1::3], found[2::3], strict=True):
        said, *rest = re.split(r"(?<=\.) (?=[A-Z])", said.strip(), maxsplit=1)
        facts[label] = said if not more else f"{more.strip(' ,()')}: {said}"
        notes += rest
    if first.strip():
        paragraphs.append(first.strip())
    return paragraphs, facts | ({"Besides": " ".join(notes)} if notes else {})


def body(paragraphs: Iterable[str]) -> str:
    """Paragraphs as they are, the indented ones, which hold formulas, as blocks."""
    return "\n\n".join(
        f"```text\n{inspect.cleandoc(part)}\n```" if part.startswith("    ") else text(part) for part in paragraphs
    )


def meanings(config: type[MixerConfig]) -> dict[str, str]:
    """What a config's docstring says of each option, "name, name: what it is.", and the base's of the rest."""
    names = "|".join(f.name for f in fields(config))
    found: dict[str, str] = {}
    for kind in (MixerConfig, config):
        said = re.sub(r"\bArgs: ", "", " ".join((inspect.getdoc(kind) or "").split()))
        parts = re.split(rf"(?:^|(?<=\. ))((?:{names})(?:, (?:{names}))*): ", said)
        for option, meaning in zip(parts[1::2], parts[2::2], strict=True):
            shared = option.split(", ")
            prefix = f"({', '.join(f'`{name}`' for name in shared)}) " if len(shared) > 1 else ""
            found |= dict.fromkeys(shared, prefix + text(meaning))
    return found


@cache
def built(name: str) -> tuple[TokenMixer, str]:
    """A mixer with its default options, and a grid where it cannot do without, that takes TOKENS; how to build it."""
    for options in (ALWAYS.get(name, {}), {"grid": GRID}):
        try:
            mixer = create_mixer(name, DIM, **options).eval()
            mixer.cost(TOKENS)
        except PolymixError:
            continue
        said = "".join(f", {key}={value!r}" for key, value in options.items())
        return mixer, f'create_mixer("{name}", {DIM}{said})'
    raise RuntimeError(f"{name} needs more than a grid to take {TOKENS} tokens: say what in ALWAYS")


def wraps(name: str) -> str:
    """The layers of other libraries that a mixer's file builds on."""
    source = Path(inspect.getfile(mixer_class(name))).read_text()
    found = [f"timm's {layer}" for layer in sorted(set(re.findall(r'timm_layer\("(\w+)"\)', source)))]
    found += [f"{library}' {layer}" for library, layer in re.findall(r"from (\w+)\.\S+ import (\w+) as Layer", source)]
    return " and ".join(found)


def group(name: str) -> str:
    if name in ("softmax", "linear_floor"):
        return "Yardsticks"
    return "Related mechanisms" if ".related." in mixer_class(name).__module__ else "Polynomial mixers"


def groups() -> dict[str, list[str]]:
    """The mixers by group, the polynomial ones first."""
    order = dict.fromkeys(map(group, ("padre", *list_mixers())))
    return {title: [name for name in list_mixers() if group(name) == title] for title in order}


def facts_of(name: str) -> str:
    facts, cost, attention = split_doc(mixer_class(name))[1], built(name)[0].cost(TOKENS), built("softmax")[0]
    there = attention.cost(TOKENS)
    facts["Here"] = (
        f"{cost.parameters:,} parameters and {giga(cost.multiply_adds)} multiply-adds for {TOKENS:,} tokens of {DIM} "
        f"channels; softmax attention has {there.parameters:,} and {giga(there.multiply_adds)}."
    )
    source = facts.pop("Source", "").rstrip(".")
    papers = " and ".join(title for key, title in PAPERS.items() if f"{key}-" in source)
    facts["Source"] = f"{source}; {papers}." if papers else "named above."
    facts["Library"] = f"wraps {wraps(name)}." if wraps(name) else "none, written from its formula."
    return "\n".join(f"- **{label}**: {text(value)}" for label, value in facts.items())


def giga(count: int) -> str:
    size, unit = (1e9, "G") if count >= 1e8 else (1e6, "M")
    return f"{count / size:.3g}\N{NO-BREAK SPACE}{unit}" if count else "0"


def mixer_page(name: str, when: str) -> str:
    kind, config = mixer_class(name), config_class(name)
    first, *rest = split_doc(kind)[0]
    mixer, how = built(name)
    some, this = kind.capabilities, mixer.capabilities
    can: list[tuple[str, ...]] = [
        (label, yes(some.has(key)), yes(this.has(key))) for key, label in CAPABILITIES.items()
    ]
    can.append(("grid of tokens", *(", ".join(f"{n}-D" for n in c.grids) or "–" for c in (some, this))))
    can.append(("feature maps (B, D, H, W)", yes(kind.feature_maps), yes(kind.feature_maps)))
    said = meanings(config)
    options = [(f"`{f.name}`", f"`{short(f.default)}`", said[f.name]) for f in fields(config)]
    parts = [
        f"# {name}", text(first), "## When to use it", when.strip(), "## Formula" if rest else "", body(rest),
        "## Shapes, cost, source", facts_of(name),
        "## As a function", f"`{how}`: {in_words(mixer.polynomial)}.",
        "## What it can do", "In some form, and built as above:", table(("", "some form", "this one"), can),
        "## Options", f"Of `{config.__name__}`, or as keywords of `create_mixer`:",
        table(("option", "default", "meaning"), options),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part) + "\n"


def overview() -> str:
    """Every mixer in a row, a table a group."""
    parts = []
    for title, names in groups().items():
        rows = []
        for name in names:
            mixer, cost, can = mixer_class(name), built(name)[0].cost(TOKENS), mixer_class(name).capabilities
            able = [word for word in ("causal", "recurrent", "cross") if can.has(word)]
            able += ["any mask"] if can.has("arbitrary") else ["padding"] if can.has("padding") else []
            formula = split_doc(mixer)[1]["Cost"].replace(" multiply-adds", "", 1).rstrip(".")
            rows.append((
                f"[{name}]({name}.md)", text(formula), giga(cost.multiply_adds),
                f"{cost.parameters:,}", in_words(built(name)[0].polynomial),
                ", ".join((*able, *(f"{n}-D" for n in can.grids))) or "–",
            ))  # fmt: skip
        head = ("mixer", "multiply-adds", f"at {TOKENS:,}", "parameters", "by default", "can")
        parts += [f"## {title}", table(head, rows)]
    return "\n\n".join(parts)


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
        told = [f"{p.name}={p.default}".lower() for p in inspect.signature(kind.__init__).parameters.values()
                if p.kind is p.KEYWORD_ONLY]  # fmt: skip
        paragraphs, facts = split_doc(kind)
        rest = [f"**{label}**: {text(said)}" if label != "Besides" else text(said) for label, said in facts.items()]
        parts.append("\n\n".join((f"### {name}", f"`{':'.join((name, *told))}`", body(paragraphs), *rest)))
    return "\n\n".join(parts)


TABLES: dict[str, Callable[[], str]] = {
    "mixers": overview,
    "structures": structures,
    "each-structure": each_structure,
}


def pages() -> dict[str, str]:
    """The page of every mixer, by its place on the site."""
    when = tomllib.loads((DOCS / "when.toml").read_text())
    return {f"mixers/{name}.md": mixer_page(name, when[name]) for name in list_mixers()}


# What MkDocs calls.


def on_config(config: Any) -> None:
    for section in config["nav"]:
        if "Mixers" in section:
            section["Mixers"] += [{title: [{name: f"mixers/{name}.md"} for name in names]}
                                  for title, names in groups().items()]  # fmt: skip


def on_files(files: Any, config: Any) -> None:
    from mkdocs.structure.files import File

    for place, content in pages().items():
        files.append(File.generated(config, place, content=content))


def on_page_markdown(markdown: str, **_: Any) -> str:
    return re.sub(r"<!-- generated: ([\w-]+) -->", lambda found: TABLES.get(found[1], lambda: found[0])(), markdown)
