"""A mixer, or any module, with an input: ready to be called, and to be checked against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from polymix.convert.tracing import Cotangents
from polymix.errors import CapabilityError
from polymix.measure.shapes import Shape
from polymix.mixers import MixerConfig, SoftmaxConfig, TokenMixer

Pass = Literal["forward", "folded", "training", "step"]
PASSES: tuple[Pass, ...] = get_args(Pass)
INFERENCE = "inference"  # a forward, folded where the mixer has anything to fold


@dataclass(frozen=True)
class Setting:
    """Where, in what type and in which pass a mixer is called, and with how many tokens of how many channels.

    Args:
        shape: the sizes; `grid` must be set.
        pass_: one of PASSES, or INFERENCE.
        threads: CPU threads; None leaves them as they are.
    """

    shape: Shape
    pass_: str = "forward"
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    threads: int | None = None


@dataclass(frozen=True)
class Case:
    """A module with an input, ready to be called."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    pass_: str
    call: Callable[[], Any]
    outputs: Callable[[], list[Tensor]]  # what must be right: the output and, in training, the gradients
    clear: Callable[[], None] = lambda: None  # frees what a call leaves behind
    state_bytes: int | None = None  # of a recurrent mixer, in the pass "step"

    @property
    def mixer(self) -> TokenMixer:
        return cast(TokenMixer, self.module)


def prepare(config: MixerConfig, setting: Setting) -> Case:
    """Build the mixer and an input for it.

    Raises:
        CapabilityError: the mixer has no such pass.
    """
    shape, pass_ = setting.shape, setting.pass_
    assert shape.grid is not None
    place: dict[str, Any] = {"device": setting.device, "dtype": setting.dtype}
    config = config.for_heads(shape.heads) if shape.heads else config
    if shape.causal or pass_ == "step":
        config = config.for_order()
    mixer = config.for_grid(shape.grid, shape.prefix).build(shape.dim, **place).train(pass_ == "training")
    sizes = (shape.tokens, shape.cross) if shape.cross else (shape.tokens,)
    args = tuple(torch.randn(shape.batch, n, shape.dim, **place) for n in sizes)
    kwargs = mixer.config.call_options(shape.grid)
    if shape.causal:
        kwargs["causal"] = True
    if shape.mask:
        context = shape.cross or shape.tokens
        size = (shape.batch, context) if shape.mask == "padding" else (shape.batch, shape.tokens, context)
        kwargs["mask"] = torch.ones(size, dtype=torch.bool, device=setting.device)
    if pass_ in ("folded", INFERENCE):
        _fold(mixer, required=pass_ == "folded")
    return case_of(mixer, args, kwargs, pass_)


def _fold(mixer: TokenMixer, *, required: bool) -> None:
    with torch.no_grad():  # a folded mixer serves calls without gradients alone
        folded = mixer.fold().folded
    if required and not folded and not isinstance(mixer.config, SoftmaxConfig):  # timed beside those that fold
        got = f"folded with {mixer.name}, which has no linear maps to merge"
        raise CapabilityError("--passes", got, "a mixer with something to fold", "Use forward.")


def case_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], pass_: str = "forward") -> Case:
    """A call of any module. Training is forward, and backward from a fixed random gradient of the output.

    The gradient of a sum of squares would not do: behind a norm it is zero but for roundings.
    """
    if pass_ == "training":
        return _training(module, args, kwargs)
    if pass_ == "step":
        return _step(cast(TokenMixer, module), args, kwargs)

    def call() -> Any:
        with torch.inference_mode():
            return module(*args, **kwargs)

    return Case(module, args, kwargs, pass_, call, lambda: [call()])


def _training(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Case:
    inputs, cotangents = [x.requires_grad_() for x in args], Cotangents()

    def clear() -> None:
        module.zero_grad(set_to_none=True)
        for x in inputs:
            x.grad = None

    def call() -> Tensor:
        clear()
        y: Tensor = module(*args, **kwargs)
        y.backward(cotangents(y))
        return y.detach()

    def outputs() -> list[Tensor]:
        y = call()
        slopes = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
        return [y, *(cast(Tensor, x.grad) for x in inputs), slopes]  # as one: the gradient of a key's bias is zero

    return Case(module, args, kwargs, "training", call, outputs, clear)


def _step(mixer: TokenMixer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Case:
    """One token after a prefill of the others."""
    (x,) = args
    with torch.inference_mode():
        before, state = mixer.prefill(x)

    def call() -> Tensor:
        with torch.inference_mode():
            return mixer.step(x[:, 0], state)[0]

    held = sum(t.numel() * t.element_size() for t in tree_leaves(state) if isinstance(t, Tensor))
    return Case(mixer, args, kwargs, "step", call, lambda: [before, call()], state_bytes=held)


def check(case: Case) -> str | None:
    """Why the case's numbers are wrong; None if they agree with float64.

    A mixer is compared with its own eager, unfolded code, any other module with itself.
    """

    def exact(x: Tensor) -> Tensor:
        return x.detach().to("cpu", torch.float64 if x.is_floating_point() else x.dtype)

    if isinstance(case.module, TokenMixer):
        config = case.module.config.changed(impl="eager")
        module: nn.Module = config.build(case.module.dim, device="cpu", dtype=torch.float64)
        module.load_state_dict(case.module.state_dict())
    else:
        module = copy.deepcopy(case.module).to("cpu", torch.float64)
    args, kwargs = tree_map_only(Tensor, exact, (case.args, dict(case.kwargs)))
    pass_ = case.pass_ if case.pass_ in ("training", "step") else "forward"
    return disagreement(case.outputs(), case_of(module.train(case.module.training), args, kwargs, pass_).outputs())


def disagreement(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Why `outputs` are no roundings of `expected`, which are in float64; None if they are."""
    for output, exact in zip(outputs, expected, strict=True):
        error = ((output.to("cpu", torch.float64) - exact).abs().max() / exact.abs().max().clamp_min(1e-30)).item()
        limit = 1e-4 if output.dtype == torch.float32 else 0.1
        if not error <= limit:  # NaN is wrong too
            return f"failed its check: off float64 by {error:.1e} of its largest output (limit {limit:.0e})"
    return None
