"""Which tokens matter to a mixer inside a trained model, for one real input, compared with attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import OptionError, ShapeError, UnknownNameError, check_int, nearest_first
from polymix.lens.probe import finite_float64, float64_copy
from polymix.mixers import SoftmaxMixer, TokenMixer


@dataclass(frozen=True, eq=False)
class Influence:
    """Maps over the tokens that one mixer of a model reads, for one input.

    Attributes:
        module: the mixer's name in the model. mixer: its kind.
        token: the chosen output token i. target: the chosen entry of the model's output.
        grid: of the tokens. image: the model's input.
        maps: of the grid's shape. "jacobian": ‖∂y_i/∂x_j‖ by input token j. "gradient": the input times the gradient
            of the target, summed over channels. "attention" (softmax only): token i's weights, averaged over heads.
        prefix: the same for the tokens before the grid.
        beside: the same for another model.
    """

    module: str
    mixer: str
    token: int
    target: int
    grid: tuple[int, ...]
    image: Tensor
    maps: dict[str, Tensor]
    prefix: dict[str, Tensor]
    beside: Influence | None = field(default=None)

    def __str__(self) -> str:
        lines = [f"{self.mixer} at {self.module or 'the top'}, token {self.token}, output {self.target}"]
        for name, values in self.maps.items():
            share = values.abs().flatten() / values.abs().sum().clamp_min(1e-300)
            half = int((share.sort(descending=True).values.cumsum(0) < 0.5).sum()) + 1
            lines.append(f"  {name}: half of it on {min(half, share.numel())} of {share.numel()} tokens")
        return "\n".join(lines + ([] if self.beside is None else [f"compared with {self.beside}"]))

    def plot(self, path: str | Path) -> Path:
        """Save a plot of the input and each map, with a second row for the model beside it."""
        from polymix.lens.plots import InfluenceRow, draw_influence

        rows = []
        for result in (self, self.beside):
            if result is None:
                continue
            titles = {
                "jacobian": f"‖∂y/∂x‖ of token {result.token}",
                "gradient": f"gradient × input, output {result.target}",
                "attention": f"attention of token {result.token}",
            }
            place = result.token - len(next(iter(result.prefix.values())))
            title = f"{result.mixer}, {result.module}"
            rows.append(InfluenceRow(title, result.image, result.maps, titles, place))
        return draw_influence(Path(path), rows)


def influence(
    model: nn.Module, x: Tensor, *, module: str | None = None, token: int | tuple[int, ...] | None = None,
    target: int | None = None, beside: nn.Module | None = None, **call: Any,
) -> Influence:  # fmt: skip
    """Map which tokens influence one token of a mixer, and the model's output, for one real input.

    Args:
        model: any model that contains a mixer. A copy in float64 is run; the model does not change.
        x: one preprocessed input of the model, (1, …), such as an image (1, channels, H, W).
        module: the mixer's name in model.named_modules(); None: the last mixer.
        token: an output token of the mixer, by index or by grid position (row, column); None: the middle of the grid.
        target: entry of the model's output; None: the largest.
        beside: another model to compare with, such as one with attention, for the same input, token and target.
        call: keyword arguments of the model.

    Raises:
        OptionError, ShapeError: x is not one finite input, an option does not fit, or an output is not finite.
    """
    if not isinstance(model, nn.Module):
        raise OptionError("model", type(model).__name__, "a module that contains a mixer", "")
    x = finite_float64("x", x)
    if x.ndim < 2 or x.shape[0] != 1:
        raise ShapeError("x", tuple(x.shape), "one input (1, …)", "Pass x[:1] of a batch, or x[None] of an image.")
    twin = float64_copy(model)
    name, mixer = _find(twin, module)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        answer, tokens, kwargs = _run(twin, mixer, x, call)
        target = int(answer.argmax()) if target is None else target
        check_int("target", target, 0, answer.numel() - 1)
        (slope,) = torch.autograd.grad(answer[target], tokens, allow_unused=True)
        grid = _grid(twin, mixer, kwargs, tokens.shape[1], image=x.ndim == 4)
        skip = tokens.shape[1] - math.prod(grid)
        place = _place(token, grid, skip)
        rows = _rows(lambda t: mixer(t, **kwargs), tokens, place)
    values = {"jacobian": rows, "gradient": (torch.zeros_like(tokens) if slope is None else slope * tokens)[0].sum(-1)}
    if isinstance(mixer, SoftmaxMixer):
        values["attention"] = _attention(mixer, tokens, place, kwargs)
    values = {key: value.detach() for key, value in values.items()}
    if not all(value.isfinite().all() for value in (answer, *values.values())):
        raise OptionError("model", "an output or slopes that are not finite", "finite ones for this input", "")
    other = None
    if beside is not None:
        there: int | tuple[int, ...] = place
        if place >= skip:  # by grid position, as the other model may have another prefix
            there = tuple(int(i) for i in torch.unravel_index(torch.tensor(place - skip), grid))
        other = influence(beside, x, token=there, target=target, **call)
    maps = {key: value[skip:].reshape(grid) for key, value in values.items()}
    return Influence(
        name, mixer.name, place, target, grid, x[0], maps, {key: value[:skip] for key, value in values.items()}, other
    )


def _find(model: nn.Module, name: str | None) -> tuple[str, TokenMixer]:
    mixers = {path: part for path, part in model.named_modules() if isinstance(part, TokenMixer)}
    if not mixers:
        raise OptionError("model", type(model).__name__, "a model that contains a mixer", "Convert or build one.")
    if name is None:
        return list(mixers.items())[-1]
    if name not in mixers:
        raise UnknownNameError("module", repr(name), ", ".join(nearest_first(name, mixers)), "Name one of its mixers.")
    return name, mixers[name]


def _run(model: nn.Module, mixer: TokenMixer, x: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The model's output, flattened; the tokens that the mixer read, as a leaf; and the mixer's keyword arguments."""
    seen: list[tuple[Tensor, dict[str, Any]]] = []

    def catch(part: nn.Module, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        inputs = arguments[0] if arguments else kwargs["x"]
        tokens = inputs.detach().requires_grad_()
        rest = {key: value for key, value in kwargs.items() if key != "x"}
        if len(arguments) > 1:
            rest["context"] = arguments[1]
        seen.append((tokens, rest))
        return (tokens,), rest

    handle = mixer.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        answer = model(x, **call)
    finally:
        handle.remove()
    if not seen:
        raise OptionError("module", mixer.name, "a mixer that the model calls", "Name another one.")
    answer = getattr(answer, "logits", answer)
    answer = answer[0] if isinstance(answer, (tuple, list)) else answer
    tokens, kwargs = seen[-1]
    if tokens.ndim == 4:
        raise ShapeError("module", tuple(tokens.shape), "a mixer called with tokens (1, N, D)", "Name another one.")
    return answer[0].flatten(), tokens, kwargs


def _grid(model: nn.Module, mixer: TokenMixer, kwargs: dict[str, Any], n: int, *, image: bool) -> tuple[int, ...]:
    """The grid of the last tokens: from the call, the mixer or the model; a square for an image; else a row."""
    rest = n - mixer.config.prefix
    for grid in (kwargs.get("grid"), mixer.config.built_grid, getattr(model, "grid", None)):
        if isinstance(grid, (tuple, list)) and grid and math.prod(grid) <= n:
            return tuple(grid)
    side = math.isqrt(rest)
    if image and side * side in (rest, rest - 1):  # one class token
        return (side, side)
    return (rest,)


def _place(token: Any, grid: tuple[int, ...], skip: int) -> int:
    if token is None:
        token = tuple(size // 2 for size in grid)
    if isinstance(token, (tuple, list)):
        fits = len(token) == len(grid) and all(type(i) is int for i in token)
        if not fits or not all(0 <= i < size for i, size in zip(token, grid, strict=True)):
            raise OptionError("token", token, f"a position on the grid {grid}, or an index", "")
        place = 0
        for i, size in zip(token, grid, strict=True):
            place = place * size + i
        return skip + place
    check_int("token", token, 0, skip + math.prod(grid) - 1)
    return int(token)


def _rows(mix: Callable[[Tensor], Tensor], tokens: Tensor, place: int) -> Tensor:
    """(N,) ‖∂y_place/∂x_j‖."""
    outputs = mix(tokens)[0, place]
    total = torch.zeros(tokens.shape[1], dtype=tokens.dtype)
    for output in outputs:
        (slope,) = torch.autograd.grad(output, tokens, retain_graph=True, allow_unused=True)
        if slope is not None:
            total += slope[0].square().sum(-1)
    return total.sqrt()


def _attention(mixer: SoftmaxMixer, tokens: Tensor, place: int, kwargs: dict[str, Any]) -> Tensor:
    """(N,) softmax weights of one query, averaged over heads."""
    q, k, _ = (part[0].transpose(0, 1) for part in mixer.qkv(tokens, tokens))  # (heads, N, d)
    logits = (q[:, place, None] * k).sum(-1) * q.shape[-1] ** -0.5
    causal = kwargs.get("causal")
    if causal:
        last = place if causal is True or causal == 1 else (place // causal + 1) * causal - 1
        logits = logits.masked_fill(torch.arange(logits.shape[1]) > last, -torch.inf)
    mask = kwargs.get("mask")
    if mask is not None:
        logits = logits.masked_fill(~(mask[0] if mask.ndim == 2 else mask[0, place]), -torch.inf)
    return logits.softmax(-1).mean(0)
