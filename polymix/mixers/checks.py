"""Checks of the arguments of a call, done before any compute and shared by all mixers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.masked import MaskedTensor
from torch.nn.parameter import is_lazy

from polymix.errors import MAX_TOKENS, MaskError, PolymixError, ShapeError, StateError, check_int, shown
from polymix.mixers.registry import Capabilities, missing_capability
from polymix.mixers.states import StateSpec, counts_tokens
from polymix.ops.shared.masks import Segments
from polymix.ops.shared.tensors import autocast_dtype

MAX_CAUSAL_BLOCK = 2**31 - 1
_IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Placement(Protocol):
    """What the checks read from a config."""

    @property
    def built_grid(self) -> tuple[int, ...] | None: ...
    @property
    def prefix(self) -> int: ...
    @property
    def causal_by_build(self) -> bool: ...
    @property
    def sees_all(self) -> str: ...


class MixerCall(NamedTuple):
    """The checked arguments of a forward.

    causal: 0, 1 or a block length K. cross: there is a separate context. values: what the values are computed from, if
    that is not the context (or x, without one).
    """

    mask: Tensor | None = None
    causal: int = 0
    grid: tuple[int, ...] | None = None
    segments: Segments | None = None
    cross: bool = False
    values: Tensor | None = None


class Checked(Protocol):
    """What the checks read from a mixer."""

    capabilities: Capabilities
    contexts: int
    needs_context: bool
    dim: int

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> Placement: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def state_spec(self, batch: int) -> StateSpec: ...
    def _checked_call(self, x: Tensor, *, mask: Tensor | None, causal: bool | int) -> MixerCall: ...


def _shape(x: Any) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def check_dense(argument: str, tensor: Tensor, kind: type[PolymixError]) -> None:
    """Raise unless a tensor is dense and holds numbers. Nested, sparse and MKL-DNN tensors fail in shapes and products.

    So do parameters of lazy layers, MaskedTensor, and FakeTensor outside its mode, in which alone it can be computed.
    """
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        fake = isinstance(tensor, FakeTensor) and not torch._C._len_torch_dispatch_stack()
        if (fake and not torch.compiler.is_compiling()) or isinstance(tensor, MaskedTensor) or is_lazy(tensor):
            got = f"a {type(tensor).__name__}" + (" outside its mode" if fake else "")
            cure = "Run the lazy layer once." if is_lazy(tensor) else "Pass its values, and what is hidden as mask=."
            raise kind(argument, got, "a tensor with values", "Enter its mode." if fake else cure)
    if tensor.is_nested or tensor.layout is not torch.strided:
        got = "a nested tensor" if tensor.is_nested else f"a tensor with layout {tensor.layout}"
        cure = "Pad it, and pass the padding as mask=." if tensor.is_nested else "Convert it with .to_dense()."
        raise kind(argument, got, "a dense tensor", cure)


def _check_inference(mixer: Checked, argument: str, x: Tensor) -> None:
    """Raise if x is an inference tensor in a call that records gradients of the mixer."""
    if x.is_inference() and torch.is_grad_enabled() and any(p.requires_grad for p in mixer.parameters()):
        got = "a tensor made under torch.inference_mode(), in a call that records gradients"
        cure = "Use torch.no_grad() where it is made, or pass x.clone()."
        raise ShapeError(argument, got, "a tensor that autograd can save", cure)


def check_tokens(mixer: Checked, argument: str, x: Tensor, batch: int | None = None) -> None:
    """Raise ShapeError unless x is a dense floating-point tensor (B, N, D) of the mixer's width, device and dtype."""
    if isinstance(x, Tensor):
        check_dense(argument, x, ShapeError)
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != mixer.dim or x.shape[1] == 0:
        raise ShapeError(
            argument,
            _shape(x),
            f"a tensor (B, N, {mixer.dim}) with N ≥ 1",
            f"This {mixer.name} was built with dim={mixer.dim}.",
        )
    if batch is not None and x.shape[0] != batch:
        raise ShapeError(argument, _shape(x), f"({batch}, M, {mixer.dim})", "Give x and context the same batch size.")
    weight = next(mixer.parameters())
    if x.device != weight.device:
        raise ShapeError(argument, f"a tensor on {x.device}", f"one on {weight.device}, where the mixer is",
                         "Move x or the mixer with .to(device).")  # fmt: skip
    if not torch.compiler.is_compiling():
        _check_inference(mixer, argument, x)
    if x.dtype != weight.dtype and (autocast_dtype(x.device) is None or not x.is_floating_point()):
        raise ShapeError(argument, f"dtype {x.dtype}", f"{weight.dtype}, as the mixer's weights",
                         "Convert x or the mixer with .to(dtype), or use autocast.")  # fmt: skip


def _check_device(argument: str, tensor: Tensor, device: torch.device, kind: type[PolymixError]) -> None:
    if tensor.device != device:
        raise kind(
            argument, f"a tensor on {tensor.device}", f"one on {device}, where x is", "Move it with .to(device)."
        )


def _check_mask(mixer: Checked, mask: Tensor, x: Tensor, m: int) -> None:
    if isinstance(mask, Tensor):
        check_dense("mask", mask, MaskError)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise MaskError("mask", got, "a boolean tensor, True = takes part", "Convert a mask of 0 and 1 with mask > 0.")
    batch, n = x.shape[:2]
    if tuple(mask.shape) not in ((batch, m), (batch, n, m)):
        raise MaskError(
            "mask", _shape(mask), f"({batch}, {m}) for the context tokens, or ({batch}, {n}, {m}) for each query",
            "Expand a mask that is shared by the whole batch.",
        )  # fmt: skip
    capability = "padding" if mask.ndim == 2 else "arbitrary"
    if not mixer.capabilities.has(capability):
        raise missing_capability(mixer.name, capability, "mask", f"a mask of shape {_shape(mask)}")
    _check_device("mask", mask, x.device, MaskError)


def _check_segments(mixer: Checked, segments: Segments, x: Tensor, m: int, cross: bool) -> None:
    if not mixer.capabilities.has("segments"):
        raise missing_capability(mixer.name, "segments", "segments", "segments (packed sequences)")
    pair = isinstance(segments, tuple) and len(segments) == 2
    if cross != pair or (isinstance(segments, tuple) and not pair):
        allowed = "a pair (query ids, context ids) with a context, one tensor without"
        got = f"a tuple of {len(segments)}" if isinstance(segments, tuple) else type(segments).__name__
        raise MaskError("segments", got, allowed, "Tokens with equal ids see each other.")
    parts = segments if isinstance(segments, tuple) else (segments,)
    for ids, length in zip(parts, (x.shape[1], m), strict=False):
        shape = (x.shape[0], length)
        if isinstance(ids, Tensor):
            check_dense("segments", ids, MaskError)
        if not isinstance(ids, Tensor) or ids.dtype not in _IDS or tuple(ids.shape) != shape:
            got = f"{_shape(ids)} of {ids.dtype}" if isinstance(ids, Tensor) else _shape(ids)
            raise MaskError("segments", got, f"integer ids {shape}", "Pass one id per token, for example as int64.")
        _check_device("segments", ids, x.device, MaskError)


def _causal(mixer: Checked, causal: bool | int | None, cross: bool) -> int:
    if causal is None:
        return int(mixer.config.causal_by_build)
    if not isinstance(causal, (bool, int)) or not 0 <= causal <= MAX_CAUSAL_BLOCK:
        allowed = f"None, True, False or a block length from 1 to {MAX_CAUSAL_BLOCK}"
        raise MaskError("causal", shown(causal), allowed, "Pass causal=True for plain causal mixing.")
    if causal and cross:
        raise MaskError(
            "causal", causal, "False with a separate context", "Leave it out: order is defined within one sequence."
        )
    if mixer.config.causal_by_build and int(causal) != 1:
        raise MaskError("causal", causal, f"True or None, as this {mixer.name} was built causal",
                        f"Build it with {mixer.config.sees_all}.")  # fmt: skip
    if causal and not mixer.capabilities.causal:
        raise missing_capability(mixer.name, "causal", "causal", "causal=True")
    if causal > 1 and not mixer.capabilities.has("block_causal"):
        raise missing_capability(mixer.name, "block_causal", "causal", f"block-causal with blocks of {causal}")
    return int(causal)


def check_grid(mixer: Checked, grid: tuple[int, ...] | None, tokens: int) -> tuple[int, ...] | None:
    """The grid of a call with `tokens` tokens after the prefix: the argument, or the grid of the config.

    Raises:
        ShapeError: the grid has the wrong number of axes or of tokens. CapabilityError: the mixer has no grid.
    """
    built = mixer.config.built_grid
    if grid is None:
        grid = built
        if grid is None or not mixer.capabilities.grids:
            return None
        if len(grid) == 1:  # in 1-D any length works
            return (tokens,)
    elif not mixer.capabilities.grids:
        raise missing_capability(mixer.name, "grids", "grid", f"grid={shown(grid)}")
    sizes = isinstance(grid, (tuple, list)) and all(type(size) in (int, torch.SymInt) and size > 0 for size in grid)
    if not sizes or len(grid) not in mixer.capabilities.grids:
        axes = " or ".join(map(str, mixer.capabilities.grids))
        raise ShapeError(
            "grid", grid, f"{axes} axes, for this {mixer.name}", "Build the mixer for the other grid, or pass another."
        )
    grid = tuple(grid)
    if math.prod(grid) != tokens:
        raise ShapeError(
            "grid", f"{shown(grid)} = {shown(math.prod(grid))} tokens for {tokens} grid tokens in x",
            f"a grid of {tokens} tokens",
            "Pass grid= of this input; prefix tokens do not count.",
        )  # fmt: skip
    return grid


def _check_contexts(mixer: Checked, context: Any, x: Tensor) -> tuple[Tensor, ...]:
    """The context tensors of a call as a tuple; empty without a separate context."""
    if context is None:
        if mixer.needs_context:
            allowed = f"{mixer.contexts} tensor(s) (B, M, {mixer.dim}), as this {mixer.name} was built with a pattern"
            raise ShapeError("context", None, allowed, "Pass it as the second argument; several of them as a tuple.")
        return ()
    if not (mixer.capabilities.cross or mixer.capabilities.keys):
        raise missing_capability(mixer.name, "cross", "context", "a separate context")
    parts = tuple(context) if isinstance(context, (tuple, list)) else (context,)
    if len(parts) != mixer.contexts:
        raise ShapeError(
            "context", f"{len(parts)} contexts", f"{mixer.contexts}", "Pass one for each letter of the pattern after a."
        )
    for i, part in enumerate(parts):
        check_tokens(mixer, "context" if len(parts) == 1 else f"context[{i}]", part, batch=x.shape[0])
        if not mixer.capabilities.cross and part.shape[1] != x.shape[1]:
            cure = "A context of other tokens needs a mixer with the capability cross."
            raise ShapeError("context", _shape(part), f"{_shape(x)}, a key in each place of x", cure)
    return parts


def _check_values(mixer: Checked, values: Any, x: Tensor, m: int) -> None:
    if not mixer.capabilities.has("values"):
        raise missing_capability(mixer.name, "values", "values", "values from another input than the keys")
    check_tokens(mixer, "values", values, batch=x.shape[0])
    if values.shape[1] != m:
        allowed = f"({x.shape[0]}, {m}, {mixer.dim}), one value for each key"
        raise ShapeError("values", _shape(values), allowed, "Keys come from the context, or from x without one.")


def check_call(
    mixer: Checked,
    x: Tensor,
    context: Any,
    mask: Any,
    causal: bool | int | None,
    grid: tuple[int, ...] | None,
    segments: Segments | None,
    values: Any = None,
) -> MixerCall:
    """Check the arguments of a forward, and return them in normal form. `TokenMixer` remembers the result."""
    check_tokens(mixer, "x", x)
    parts = _check_contexts(mixer, context, x)
    n = x.shape[1]
    m = parts[0].shape[1] if parts else n
    if values is not None:
        _check_values(mixer, values, x, m)
    order = _causal(mixer, causal, context is not None)
    if mask is not None:
        several = mixer.needs_context and isinstance(mask, (tuple, list))
        masks = mask if several else (mask,)
        read = (x, *parts) if several and len(masks) == len(parts) + 1 else parts or (x,)
        if len(masks) != len(read):
            allowed = (
                f"a tuple of {len(parts)} masks, one for each context, or of {len(parts) + 1} with one for x first"
            )
            got = f"{len(masks)} masks for {len(parts)} contexts"
            raise MaskError("mask", got, allowed, "Use None for an input without padding.")
        for part_mask, part in zip(masks, read, strict=True):
            if part_mask is not None:
                _check_mask(mixer, part_mask, x, part.shape[1])
    if segments is not None:
        _check_segments(mixer, segments, x, m, context is not None)
    prefix = mixer.config.prefix
    if prefix and n <= prefix:
        raise ShapeError("x", _shape(x), f"more than num_prefix_tokens={prefix} tokens",
                         "Pass the prefix tokens and the tokens of the grid.")  # fmt: skip
    return MixerCall(mask, order, check_grid(mixer, grid, n - prefix), segments, context is not None, values)


def check_recurrent_call(
    mixer: Checked, x: Tensor, state: Any, mask: Tensor | None, causal: bool | int, *, step: bool = False
) -> MixerCall:
    """Check the arguments of `prefill`, or of `step`, and return them in normal form."""
    if not mixer.capabilities.recurrent:
        raise missing_capability(mixer.name, "recurrent", mixer.name, "prefill and step")
    if not isinstance(causal, int) or not 1 <= causal <= MAX_CAUSAL_BLOCK:
        cure = "Leave it out, or call forward for tokens that see later ones."
        raise MaskError("causal", shown(causal), "True or a block length of at least 1", cure)
    if step and not (isinstance(x, Tensor) and x.ndim == 3 and x.shape[1] == causal):
        allowed, cure = f"one block, (B, {causal}, {mixer.dim})", "Use prefill for other lengths."
        if causal == 1:
            allowed, cure = f"one token, (B, {mixer.dim}) or (B, 1, {mixer.dim})", "Use prefill for more tokens."
        raise ShapeError("x_t", _shape(x), allowed, cure)
    if isinstance(mask, Tensor) and mask.ndim == 3:
        cure = "Pass padding only: prefill is causal by itself."
        raise MaskError("mask", _shape(mask), "(B, N), True = takes part", cure)
    call = mixer._checked_call(x, mask=mask, causal=causal)
    if state is not None:
        mixer.state_spec(x.shape[0]).check(state, x)
        block = call.causal
        counted = block > 1 and counts_tokens(state)
        if counted and not holds((state.count % block == 0).all(), f"continues blocks of {block} tokens"):
            within = state.count[state.count % block != 0][0].item()
            got = f"a state after {within} tokens, within a block of {block}"
            cure = "Cut sequences between blocks: a block's tokens see each other."
            raise StateError("state", got, f"a state after a multiple of {block} real tokens", cure)
    return call


def check_size(mixer: Checked, n: int, grid: Any) -> None:
    """Raise unless the mixer can take n tokens on this grid, if one is given."""
    check_length(mixer, n)
    if grid is not None:
        check_grid(mixer, grid, n - mixer.config.prefix)


def check_length(mixer: Checked, n: int) -> None:
    """Raise unless n is a number of tokens that leaves at least one after the prefix."""
    prefix = mixer.config.prefix
    if prefix and isinstance(n, int) and n <= prefix:
        raise ShapeError("n", n, f"more than num_prefix_tokens={prefix}", "Count the prefix and the grid.")
    check_int("n", n, 1, MAX_TOKENS)


def holds(condition: Tensor, restriction: str) -> bool:
    """The truth of a condition on tensor values.

    While compiling, values are not known. The answer is then True, and the compiled graph checks the condition when
    it runs: it fails with "this compiled layer {restriction}".
    """
    if torch.compiler.is_compiling():
        torch._assert_async(condition, f"polymix: this compiled layer {restriction}")
        return True
    return bool(condition)
