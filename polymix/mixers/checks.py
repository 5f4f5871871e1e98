"""Checks of a call, done before any compute, the same for every mixer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from polymix.errors import MaskError, ShapeError, StateError
from polymix.mixers.registry import lacks
from polymix.ops.common import autocast_dtype
from polymix.ops.visibility import Segments

if TYPE_CHECKING:
    from polymix.mixers.base import TokenMixer


class Call(NamedTuple):
    """What a forward was asked, checked: causal is 0, 1 or a block length K."""

    mask: Tensor | None = None
    causal: int = 0
    grid: tuple[int, ...] | None = None
    segments: Segments | None = None
    cross: bool = False


def _shape(x: Any) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def check_tokens(mixer: TokenMixer, argument: str, x: Tensor, batch: int | None = None) -> None:
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != mixer.dim or x.shape[1] == 0:
        raise ShapeError(
            argument,
            _shape(x),
            f"a tensor (B, N, {mixer.dim}) with N ≥ 1",
            f"{mixer.name} was built with dim={mixer.dim}.",
        )
    if batch is not None and x.shape[0] != batch:
        raise ShapeError(argument, _shape(x), f"({batch}, M, {mixer.dim})", "x and context need the same batch size.")
    weight = next(mixer.parameters())
    if x.device != weight.device:
        raise ShapeError(argument, f"a tensor on {x.device}", f"one on {weight.device}", "Move one with .to(device).")
    if x.dtype != weight.dtype and autocast_dtype(x.device) is None:
        raise ShapeError(argument, f"dtype {x.dtype}", f"{weight.dtype}", "Move one with .to(dtype), or use autocast.")


def _check_mask(mixer: TokenMixer, mask: Tensor, batch: int, n: int, m: int) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError("mask", got, "a boolean tensor, True = takes part", "Compare a weight mask with > 0 first.")
    if tuple(mask.shape) not in ((batch, m), (batch, n, m)):
        raise MaskError(
            "mask", _shape(mask), f"({batch}, {m}) over the context tokens or ({batch}, {n}, {m}) a query",
            "Expand a mask that is the same for the whole batch.",
        )  # fmt: skip
    _need(mixer, "padding" if mask.ndim == 2 else "arbitrary", f"a mask of shape {_shape(mask)}")


def _check_segments(mixer: TokenMixer, segments: Segments, batch: int, n: int, m: int, cross: bool) -> None:
    _need(mixer, "segments", "segments (packed sequences)")
    pair = isinstance(segments, tuple) and len(segments) == 2
    if cross != pair:
        allowed = "a pair (query ids, context ids) with a context, one tensor without"
        raise MaskError(
            "segments", type(segments).__name__, allowed, "Ids of query and context that agree see each other."
        )
    parts = segments if isinstance(segments, tuple) else (segments,)
    for ids, length in zip(parts, (n, m), strict=False):
        integer = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dtype != torch.bool
        if not integer or tuple(ids.shape) != (batch, length):
            raise MaskError("segments", _shape(ids), f"integer ids ({batch}, {length})", "One id a token.")


def _need(mixer: TokenMixer, capability: str, wanted: str) -> None:
    if not mixer.capabilities.has(capability):
        raise lacks(mixer, capability, wanted)


def _causal(mixer: TokenMixer, causal: bool | int | None, cross: bool) -> int:
    if causal is None:
        return int(mixer.causal_by_build)
    if not isinstance(causal, (bool, int)) or causal < 0:
        raise MaskError("causal", repr(causal), "None, True, False or a block length of at least 1", "")
    if causal and cross:
        raise MaskError("causal", causal, "False with a separate context", "Order is defined within one sequence only.")
    if mixer.causal_by_build and int(causal) != 1:
        raise MaskError("causal", causal, f"True: this {mixer.name} was built causal", "Build it with causal=False.")
    if causal:
        _need(mixer, "causal", "causal=True")
        if causal > 1:
            _need(mixer, "block_causal", f"block-causal with blocks of {causal}")
    return int(causal)


def check_grid(mixer: TokenMixer, grid: tuple[int, ...] | None, tokens: int) -> tuple[int, ...] | None:
    """The grid of `tokens` tokens (prefix taken off): the one of the call, else the one built for."""
    built = getattr(mixer.config, "grid", None)
    if grid is None:
        grid = built
        if grid is None or not mixer.capabilities.grids:
            return None
        if len(grid) == 1:  # one axis leaves no doubt
            return (tokens,)
    else:
        _need(mixer, "grids", f"grid={grid}")
    grid = tuple(grid)
    if len(grid) not in mixer.capabilities.grids or not all(isinstance(size, (int, torch.SymInt)) for size in grid):
        axes = " or ".join(map(str, mixer.capabilities.grids))
        raise ShapeError("grid", grid, f"{axes} axes, for this {mixer.name}", "Build the mixer for the other grid.")
    if math.prod(grid) != tokens:
        raise ShapeError(
            "grid", f"{grid} = {math.prod(grid)} tokens for {tokens} grid tokens in x", f"a grid of {tokens} tokens",
            "Pass grid= of this input (prefix tokens do not count).",
        )  # fmt: skip
    return grid


def check_call(
    mixer: TokenMixer,
    x: Tensor,
    context: Tensor | None,
    mask: Tensor | None,
    causal: bool | int | None,
    grid: tuple[int, ...] | None,
    segments: Segments | None,
) -> Call:
    check_tokens(mixer, "x", x)
    if context is not None:
        _need(mixer, "cross", "a separate context")
        check_tokens(mixer, "context", context, batch=x.shape[0])
    batch, n = x.shape[:2]
    m = n if context is None else context.shape[1]
    order = _causal(mixer, causal, context is not None)
    if mask is not None:
        _check_mask(mixer, mask, batch, n, m)
    if segments is not None:
        _check_segments(mixer, segments, batch, n, m, context is not None)
    prefix = getattr(mixer.config, "num_prefix_tokens", 0)
    if prefix and n <= prefix:
        raise ShapeError("x", _shape(x), f"more than num_prefix_tokens={prefix} tokens", "The rest are the grid.")
    return Call(mask, order, check_grid(mixer, grid, n - prefix), segments, context is not None)


def check_state(mixer: TokenMixer, state: Any, x: Tensor) -> None:
    wanted = None if state is None else mixer.check_state(state, x)
    if wanted is not None:
        raise StateError("state", type(state).__name__, wanted, "Pass what prefill or step of this mixer returned.")
