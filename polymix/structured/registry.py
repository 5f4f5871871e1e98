"""Maps by name: "toeplitz", "monarch:blocks=8", "diagonal+low_rank:rank=4", "banded@circulant", "toeplitz^T"."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from polymix.errors import OptionError, UnknownNameError, nearest_first
from polymix.options import parse_value
from polymix.structured.base import Site, StructuredMap, Transposed, transposed_site
from polymix.structured.compose import Identity, Prefixed, Product, Sum
from polymix.structured.conv import DepthwiseConv
from polymix.structured.dense import BlockDiagonal, Dense
from polymix.structured.low_rank import LowRank, Mean, RankOne
from polymix.structured.monarch import Monarch
from polymix.structured.sparse import Banded, Diagonal, Sparse
from polymix.structured.toeplitz import Circulant, Toeplitz

_MAPS: dict[str, type[StructuredMap]] = {
    kind.kind: kind
    for kind in (
        Identity, Dense, Diagonal, BlockDiagonal, LowRank, RankOne, Banded, Sparse, DepthwiseConv, Circulant, Toeplitz,
        Monarch, Mean,
    )
}  # fmt: skip
_ALIASES = {"rank_1": "rank_one", "rank1": "rank_one", "mean_pooling": "mean", "pooling": "mean"}


def list_maps() -> tuple[str, ...]:
    """The names of all structures."""
    return tuple(_MAPS)


def parse(argument: str, text: Any) -> tuple[str, dict[str, Any], bool]:
    """Parse one factor, "name:option=value:…" and optionally ^T -> (name, options, transposed)."""
    if not isinstance(text, str) or not text.strip():
        raise OptionError(
            argument, repr(text), f"the name of a structure: {', '.join(_MAPS)}", 'Use "dense", for example.'
        )
    body, mark, rest = text.strip().partition("^")
    if mark and rest != "T":
        raise OptionError(argument, repr(text), "^T at the end for a transpose", 'Write "toeplitz^T", for example.')
    name, *words = body.split(":")
    name = name.strip().lower().replace("-", "_")
    name = _ALIASES.get(name, name)
    if name not in _MAPS:
        nearest = ", ".join(nearest_first(name, _MAPS))
        raise UnknownNameError(argument, repr(text), nearest, "The closest names come first.")
    known_options = [p.name for p in inspect.signature(_MAPS[name].__init__).parameters.values()
                     if p.kind is p.KEYWORD_ONLY]  # fmt: skip
    options = {}
    for word in words:
        option, sign, value = word.partition("=")
        if not sign or option not in known_options:
            allowed = ", ".join(f"{option}=…" for option in known_options) or "no options"
            raise OptionError(argument, repr(text), f"{name} with {allowed}", "Check the spelling.")
        if option in options:
            raise OptionError(argument, repr(text), f"{option} once", "Drop one of them.")
        options[option] = parse_value(value)
    return name, options, bool(mark)


def _factors(argument: str, text: Any) -> list[list[tuple[str, dict[str, Any], bool]]]:
    sums = text.split("+") if isinstance(text, str) else [text]
    return [[parse(argument, factor) for factor in (part.split("@") if isinstance(part, str) else [part])]
            for part in sums]  # fmt: skip


def check_spec(argument: str, text: Any) -> None:
    """Raise for unknown names and options in a specification. Sizes are checked when the map is built."""
    _factors(argument, text)


def kinds_of(text: str) -> set[str]:
    """The structures that a specification names."""
    return {name for part in _factors("specification", text) for name, _, _ in part}


def on_grid(text: str) -> bool:
    """Whether any part depends on distances, so that prefix tokens are left out."""
    return any(_MAPS[name].on_grid for name in kinds_of(text))


def needs_kernel(text: str) -> bool:
    """Whether it has a convolution without a kernel size, which takes the mixer's."""
    factors = [factor for part in _factors("specification", text) for factor in part]
    return any(name == "depthwise" and "kernel" not in options for name, options, _ in factors)


def crosses(text: str) -> bool:
    """Whether the map can change the length: in every term, the part that acts first can."""
    names = [part[-1][0] for part in _factors("specification", text)]
    return all(_MAPS[name].rectangular for name in names)


def _one(name: str, options: dict[str, Any], transposed: bool, site: Site, kw: dict[str, Any]) -> StructuredMap:
    if transposed:
        if site.causal:
            raise OptionError(name, "^T in a causal mixer", "maps that see only the past", "Leave ^T out.")
        return Transposed(_one(name, options, False, transposed_site(site), kw))
    if name == "dense":
        if site.side == "channel" and site.groups == 1:
            assert site.size is not None and site.out is not None
            return Dense(site.size, site.out, False, **kw)
        name, options = "block_diagonal", {"blocks": 1}
    return _MAPS[name](site, **options, **kw)


def create_map(spec: str, site: Site, *, bias: bool = False, **kw: Any) -> StructuredMap:
    """Build the map that `spec` names: + adds maps, @ multiplies them (the right one acts first), ^T transposes one.

    Raises UnknownNameError for an unknown name, and OptionError for an unknown option or a map unfit for `site`.
    """
    terms: list[StructuredMap] = []
    for part in _factors("structure", spec):
        *others, first = part
        maps = [_one(*factor, replace(site, size=site.out, cross=False), kw) for factor in others]
        maps.append(_one(*first, site, kw))
        terms.append(maps[0] if len(maps) == 1 else Product(site, maps))
    whole = terms[0] if len(terms) == 1 else Sum(site, terms)
    loud = sum(all(part.keeps_variance for part in term.modules() if isinstance(part, StructuredMap)) for term in terms)
    if loud > 1:
        whole.scale_(loud**-0.5)  # so that a sum of maps that keep variance keeps it too
    if bias:
        whole.add_bias(**kw)
    return whole


def token_map(spec: str, site: Site, *, prefix: int = 0, bias: bool = False, **kw: Any) -> StructuredMap | Prefixed:
    """A token map with `prefix` tokens: maps that depend on distances leave them out, others treat them alike."""
    if not prefix or not on_grid(spec):
        if prefix and site.size is not None and spec != "identity":
            site = replace(site, size=site.size + prefix, out=None if site.out is None else site.out + prefix)
        return create_map(spec, site, bias=bias, **kw)
    return Prefixed(create_map(spec, site, **kw), prefix, bias, **kw)


__all__ = [
    "check_spec",
    "create_map",
    "crosses",
    "kinds_of",
    "list_maps",
    "needs_kernel",
    "on_grid",
    "parse",
    "token_map",
]
