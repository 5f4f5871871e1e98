"""One mixer at one size, ready to be called: what is timed, what it is held to, and what it costs by formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from polymix.errors import CapabilityError
from polymix.measure.sweep import disagreement, near_square
from polymix.mixers import MixerConfig, TokenMixer
from polymix.workflows.bench.settings import Group


@dataclass(frozen=True)
class Cell:
    """A mixer built for one group: `tensors` is its output, and what else its pass must get right."""

    mixer: TokenMixer
    call: Callable[[], Any]
    tensors: Callable[[], list[Tensor]]
    clear: Callable[[], None]  # frees what a call leaves behind
    state_bytes: int | None = None


def prepare(config: MixerConfig, group: Group, device: str) -> Cell:
    """Build the mixer and an input for it.

    Raises:
        CapabilityError: the mixer has no such pass.
    """
    return _cell(*_build(config, group, device), group.pass_)


def wrong(config: MixerConfig, group: Group, device: str) -> str | None:
    """How far the mixer is from its own eager, unfolded code in float64 where it is too far; None where it is right."""
    mixer, x, options = _build(config, group, device)
    wide = mixer.config.changed(impl="eager").build(mixer.dim, device="cpu", dtype=torch.float64)
    wide.load_state_dict(mixer.state_dict())
    plain = "forward" if group.pass_ == "folded" else group.pass_
    expected = _cell(wide.train(mixer.training), x.to("cpu", torch.float64), options, plain).tensors()
    got = _cell(mixer, x, options, group.pass_).tensors()
    return next(filter(None, map(disagreement, got, expected)), None)


def _build(config: MixerConfig, group: Group, device: str) -> tuple[TokenMixer, Tensor, dict[str, Any]]:
    """The mixer, an input and the call's options. A step is causal: a mixer that is so by its weights is built so."""
    grid, dtype = near_square(group.tokens), getattr(torch, group.dtype)
    if group.pass_ == "step":
        config = config.for_order()
    mixer = config.for_grid(grid).build(group.dim, device=device, dtype=dtype).train(group.pass_ == "training")
    x = torch.randn(group.batch, group.tokens, group.dim, device=device, dtype=dtype)
    return mixer, x, config.call_options(grid)


def _cell(mixer: TokenMixer, x: Tensor, options: dict[str, Any], pass_: str) -> Cell:
    if pass_ == "training":
        return _training(mixer, x.requires_grad_(), options)
    if pass_ == "step":
        return _step(mixer, x)
    if pass_ == "folded":
        _fold(mixer)

    def call() -> Tensor:
        with torch.inference_mode():
            return mixer(x, **options)

    return Cell(mixer, call, lambda: [call()], lambda: None)


def _training(mixer: TokenMixer, x: Tensor, options: dict[str, Any]) -> Cell:
    def clear() -> None:
        mixer.zero_grad(set_to_none=True)
        x.grad = None

    def call() -> Tensor:
        clear()
        y: Tensor = mixer(x, **options)
        y.square().sum().backward()
        return y.detach()

    def tensors() -> list[Tensor]:
        y = call()
        weights = torch.cat([p.grad.flatten() for p in mixer.parameters() if p.grad is not None])
        return [y, cast(Tensor, x.grad), weights]  # together: the gradient of a key's bias alone is zero

    return Cell(mixer, call, tensors, clear)


def _step(mixer: TokenMixer, x: Tensor) -> Cell:
    with torch.inference_mode():
        before, state = mixer.prefill(x)

    def call() -> Tensor:
        with torch.inference_mode():
            return mixer.step(x[:, 0], state)[0]

    held = sum(t.numel() * t.element_size() for t in tree_leaves(state) if isinstance(t, Tensor))
    return Cell(mixer, call, lambda: [before, call()], lambda: None, held)


def _fold(mixer: TokenMixer) -> None:
    merged = mixer.fold().folded
    if not merged and mixer.name != "softmax":  # the yardstick is timed beside those that fold
        got = f"folded with {mixer.name}, in which no two linear maps follow each other"
        raise CapabilityError("--passes", got, "a mixer with something to fold", "Use forward.")
