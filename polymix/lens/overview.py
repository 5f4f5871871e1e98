"""All measurements of the lens for one module: as text, as JSON and as plots."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polymix.errors import PolymixError, check_int
from polymix.lens.contextual_mapping import contextual_mapping
from polymix.lens.degree import DegreeResult, degree
from polymix.lens.equivariance import equivariance
from polymix.lens.interactions import interactions
from polymix.lens.probe import float64_copy
from polymix.lens.receptive_field import receptive_field
from polymix.mixers import TokenMixer
from polymix.mixers.mixer import Polynomial

SCHEMA = "polymix.lens/1"


@dataclass
class Overview:
    """The measurements of one module.

    Attributes:
        rows: (name, finding) to print. content: for lens.json. results: by name; each has a `plot` method.
    """

    rows: list[tuple[str, str]] = field(default_factory=list)
    content: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)

    def draw(self, folder: Path) -> list[Path]:
        """Save a plot of each result as NAME.png."""
        return [result.plot(folder / f"{name}.png") for name, result in self.results.items()]


def overview(
    module: Callable[..., Any], *, order: int = 2, shape: tuple[int, ...] | None = None, seed: int = 0, **call: Any
) -> Overview:
    """Measure degree, interactions, receptive field, equivariance and contextual mapping.

    The degree is compared with what a mixer declares. A measurement that fails, for example because the input is too
    large, is replaced by its error message.

    Args:
        module: a mixer, any module, or a function of one tensor.
        order: number of entries that interact, 1 to 4.
        shape: the shape of a random input. Mixers of this package do not need it.
        seed: of inputs and directions.
        call: keyword arguments for every call of the module.
    """
    check_int("order", order, 1, 4)
    view = Overview(content={"schema": SCHEMA, "seed": seed})
    kw: dict[str, Any] = {"shape": shape, "seed": seed, **call}
    measured = degree(module, **kw)
    view.rows.append(("degree", measured.explain()))
    facts = {"degree": measured.degree, "homogeneous": measured.homogeneous, "rational": measured.rational}
    view.content["degree"] = {**facts, **asdict(measured.evidence)}
    view.results["degree"] = measured
    says = declared(module)
    if says is not None:
        agrees, when = _agree(says, measured), ""
        if not agrees and isinstance(module, nn.Module) and measured.homogeneous:
            agrees = _agree(says, degree(_with_biases(module, seed), **kw))
            when = " where biases are not zero, as these are" if agrees else ""
        view.rows.append(("declared", f"{says}: {'agrees' if agrees else 'does NOT agree'}{when}"))
        view.content["declared"] = {**asdict(says), "agrees": agrees}
    steps: dict[str, Callable[[], Any]] = {
        "interactions": lambda: interactions(module, order, **kw),
        "receptive_field": lambda: receptive_field(module, **kw),
        "equivariance": lambda: equivariance(module, **kw),
        "contextual_mapping": lambda: contextual_mapping(module, **kw),
    }
    for name, step in steps.items():
        try:
            result = step()
        except PolymixError as error:
            view.rows.append((name.replace("_", " "), f"not measured: {error}"))
            view.content[name] = {"not_done": str(error)}
            continue
        view.rows.append((name.replace("_", " "), str(result)))
        view.content[name] = _numbers(name, result)
        view.results[name] = result
    view.content = _plain(view.content)
    return view


def _agree(says: Polynomial, measured: DegreeResult) -> bool:
    same = (says.degree, says.rational) == (measured.degree, measured.rational)
    return same and (says.degree is None or says.homogeneous == measured.homogeneous)


@torch.no_grad()
def _with_biases(module: nn.Module, seed: int) -> nn.Module:
    """A copy whose biases are random where they are zero, as at the start: they make a polynomial inhomogeneous."""
    module, random = copy.deepcopy(module), torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if "bias" in name.rpartition(".")[2] and not parameter.any():
            parameter.copy_(torch.randn(parameter.shape, generator=random))
    return module


def declared(module: Any) -> Polynomial | None:
    """What a mixer declares to be as a function of its input; None for any other module."""
    twin = float64_copy(module) if isinstance(module, nn.Module) else None
    return twin.polynomial if isinstance(twin, TokenMixer) else None


def _numbers(name: str, result: Any) -> dict[str, Any]:
    if name == "interactions":
        counts = {kind: {"reached": c.reached, "possible": c.possible} for kind, c in result.counts.items()}
        return {"order": result.order, "inputs": result.inputs, "output": result.output, "counts": counts}
    if name == "receptive_field":
        return {"reach": result.reach.int().tolist(), "magnitude": result.magnitude.tolist(), "grid": result.grid,
                "prefix": result.prefix, "causal": result.causal, "span": result.span}  # fmt: skip
    if name == "equivariance":
        kinds = {kind: getattr(result, kind) for kind in ("permutation", "circular", "interior")}
        return {kind: {**asdict(verdict), "holds": verdict.holds} for kind, verdict in kinds.items()}
    names = ("within", "across", "twins", "alike", "tolerance", "inputs", "pairs", "smallest", "holds")
    collision = None if result.collision is None else result.collision.tolist()
    return {**{kind: getattr(result, kind) for kind in names}, "collision": collision}


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: without infinities and tuples, with strings as keys."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
