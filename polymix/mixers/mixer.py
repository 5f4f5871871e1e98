"""TokenMixer: the base class of every mixer, and the contract that all of them keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from polymix import errors
from polymix.devices import check_dtype
from polymix.limits import bounded
from polymix.mixers.checks import MixerCall, check_call, check_dense, check_recurrent_call, check_size
from polymix.mixers.fold import Folded
from polymix.mixers.heads import Heads
from polymix.mixers.inheritance import AttentionMaps, Sources, add_sources, copy_map, first_rows
from polymix.mixers.registry import Capabilities, missing_capability
from polymix.mixers.states import Place, StateSpec, Summary
from polymix.ops.shared.masks import Segments, zero_broken_padding
from polymix.ops.shared.tensors import Linear
from polymix.structured.cost import Cost, Op, cost_of

# Standard deviation of softmax attention's output at init over about 200 unit-variance tokens (√(e/N), N = 14 × 14).
# Mixers whose output does not shrink with N are initialised to this scale, so that a host trains from the first step.
INIT_STD = 0.125
MAX_CHECKED_CALLS = 64  # that a mixer remembers
M = TypeVar("M", bound="TokenMixer")


@dataclass(frozen=True)
class Polynomial:
    """What a mixer is as a function of its input. `polymix.lens.degree` measures the same.

    Attributes:
        degree: total degree; None if it is not a polynomial.
        homogeneous: f(tX) = t^degree f(X).
        rational: (numerator degree, denominator degree) if it is a quotient of two polynomials.
    """

    degree: int | None = None
    homogeneous: bool = False
    rational: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.degree is not None:
            return f"polynomial of degree {self.degree}, {'' if self.homogeneous else 'not '}homogeneous"
        if self.rational is not None:
            return f"rational, degree {self.rational[0]} over degree {self.rational[1]}"
        return "neither a polynomial nor a quotient of two"


def is_shared(mixer: nn.Module) -> bool:
    """Whether several processes share the mixer's sequences: `polymix.parallelize` gave it other functions."""
    return "prefill" in vars(mixer)


class TokenMixer(nn.Module, ABC):
    """Base class of all mixers: a module that maps tokens (B, N, D) to (B, N, D).

    Subclasses implement `mix`, `named_matrices` and `cost_ops`, and `scan` if they are recurrent. If a subclass names
    its projections `qkv` (a `Heads`) and `proj`, `inherit` copies them from attention without further code.
    """

    name: ClassVar[str]
    capabilities: Capabilities
    config: Any  # its MixerConfig
    contexts = 1  # number of context tensors that a call may pass
    needs_context = False  # True: every call must pass all contexts
    impls: ClassVar[tuple[str, ...]] = ("auto", "eager")  # values allowed for the option `impl`
    projections: ClassVar[tuple[str, ...]] = ("qkv", "proj")  # the parts around `attend`, which a layer may have itself
    feature_maps: ClassVar[bool] = False  # True: x may also be (B, D, H, W); the output has the same layout

    def __init__(self, config: Any, dim: int, **kw: Any) -> None:
        super().__init__()
        errors.check_int("dim", dim, 1, errors.MAX_TOKENS)
        self.config, self.dim = config, dim
        self.drop = nn.Dropout(config.dropout)
        self._folded: Folded | None = None
        self.checked_calls: dict[Any, MixerCall] = {}  # by shapes, dtypes and devices

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool | int | None = None,
        grid: tuple[int, ...] | None = None,
        segments: Segments | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Mix the tokens of x with each other, or with the tokens of `context`.

        Args:
            x: (B, N, D). If the class has `feature_maps`, also (B, D, H, W).
            context: (B, M, D), a separate sequence that x attends to. None: x itself. Mixers with `capabilities.keys`
                but without `cross` take keys for the places of x, M = N.
            mask: boolean; True = the token takes part. (B, M) hides context tokens (padding); (B, N, M) says for each
                query which context tokens it sees. Padded tokens with NaN, Inf or values of at least 1e4 count as
                zeros, so that they reach neither outputs of real tokens nor gradients; so do context tokens that no
                query sees. In a token that some queries see, NaN may reach the others: its weight of zero is a factor.
            causal: True: a token sees itself and earlier tokens. An int K > 1: it sees its own block of K tokens and
                all earlier blocks. None: as the mixer was built. NaN and Inf in later tokens reach no earlier
                outputs (gradients they may) if `capabilities.isolates_future`.
            grid: (N,), (H, W) or (T, H, W) of the tokens after the prefix. Needed if it differs from the grid that the
                mixer was built for.
            segments: (B, N) integer ids of packed sequences; tokens with different ids do not see each other. With a
                context: a pair, (B, N) for x and (B, M) for the context. NaN and Inf in other segments stay there if
                `capabilities.isolates_segments`.
            values: (B, M, D), what values are computed from, token by token, if not from the context. Queries come
                from x and keys from the context, as in attention with positions added to queries and keys only. The
                class's docstring says which map reads it. Needs `capabilities.values`.

        Returns:
            (B, N, D) in the dtype of x. Under autocast, in the dtype that autocast chooses. float16 ends at 65,504:
            where tokens are near 100, the products of tokens in pom, poly_sa and prodpoly overflow in it although the
            output would not. bfloat16 has 8 binary digits: exponentials of numbers near 1,000, as in performer and
            non_local, keep none. Use float32 there.

        Raises:
            ShapeError, MaskError, CapabilityError: before anything is computed.
        """
        if self.feature_maps and isinstance(x, Tensor):
            check_dense("x", x, errors.ShapeError)
        if self.feature_maps and isinstance(x, Tensor) and x.ndim == 4:
            map_grid = tuple(x.shape[2:]) if self.capabilities.grids else None
            tokens = x.flatten(2).transpose(1, 2)
            options: dict[str, Any] = {"mask": mask, "causal": causal, "segments": segments, "values": values}
            y = self.forward(tokens, context, grid=grid or map_grid, **options)
            return y.transpose(1, 2).unflatten(2, x.shape[2:])
        call = self._checked_call(x, context, mask=mask, causal=causal, grid=grid, segments=segments, values=values)
        if isinstance(mask, Tensor):
            real = mask if mask.ndim == 2 else mask.any(1)  # what no query sees is like padding
            if context is None:
                x = zero_broken_padding(x, real)
            elif isinstance(context, Tensor):  # has no outputs of its own
                context = context.masked_fill(~real.unsqueeze(-1), 0.0)
            if values is not None:
                call = call._replace(values=values.masked_fill(~real.unsqueeze(-1), 0.0))
        y = self.mix(x, x if context is None else context, call)
        return self.drop(y) if self.drop.training else y  # skip the module call when dropout is off

    def _checked_call(
        self, x: Tensor, context: Any = None, *, mask: Any = None, causal: bool | int | None = None,
        grid: tuple[int, ...] | None = None, segments: Segments | None = None, values: Any = None,
    ) -> MixerCall:  # fmt: skip
        """Check the arguments of a forward, and return them in normal form: `check_call`.

        For plain tensors the result depends on shapes, dtypes and devices alone. It is remembered, which makes
        repeated calls cheap.
        """
        plain = context is None and segments is None and values is None and type(x) is Tensor
        plain = plain and (mask is None or type(mask) is Tensor)
        # (1, 12) is not (True, 12), which is equal to it as a key.
        plain = plain and (grid is None or (type(grid) is tuple and all(type(size) is int for size in grid)))
        plain = plain and isinstance(causal, (int, NoneType)) and not torch.compiler.is_compiling()
        # Nested tensors have no shape; whether an inference tensor is refused depends on the parameters.
        unsure = plain and (x.is_nested or (x.is_inference() and torch.is_grad_enabled()))
        if not plain or unsure or (mask is not None and mask.is_nested):
            return check_call(self, x, context, mask, causal, grid, segments, values)
        weight = _first_parameter(self)
        key = (x.shape, x.dtype, x.device, x.layout, weight.dtype, weight.device, causal, type(causal), grid,
               None if mask is None else (mask.shape, mask.dtype, mask.device, mask.layout))  # fmt: skip
        call = self.checked_calls.get(key)
        if call is None:
            call = check_call(self, x, context, mask, causal, grid, segments)
            if x.dtype == weight.dtype:  # otherwise only autocast allowed it, and autocast may be off next time
                if len(self.checked_calls) >= MAX_CHECKED_CALLS:
                    self.checked_calls.clear()
                self.checked_calls[key] = call._replace(mask=None)
            return call
        return call if mask is None else call._replace(mask=mask)

    def prefill(
        self, x: Tensor, state: Any = None, *, mask: Tensor | None = None, causal: bool | int = True
    ) -> tuple[Tensor, Any]:
        """Mix a chunk of tokens causally, continuing from `state`; return the output and the new state.

        Any split of a sequence into calls of `prefill` and `step` gives the same outputs as one causal forward. The
        state has a fixed size. Padding may stand anywhere in the chunk and does not change the state.

        Args:
            x: (B, N, D), the next tokens.
            state: what the previous call returned. None: the start of a sequence.
            mask: (B, N), boolean; False = padding.
            causal: True, or a block length K as in `forward`. Chunks then hold whole blocks of K real tokens; only the
                last chunk of a sequence may end within a block.

        Raises:
            CapabilityError: the mixer has no recurrent form, or none for blocks. ShapeError, MaskError, StateError: an
                argument is wrong, or the state ends within a block.
        """
        call = check_recurrent_call(self, x, state, mask, causal)
        x = x if mask is None else zero_broken_padding(x, mask)
        if call.causal > 1:
            y, state = self.scan_blocks(x, state, call.mask, call.causal)
        else:
            y, state = self.scan(x, state, call.mask)
        return self.drop(y) if self.drop.training else y, state

    def step(self, x_t: Tensor, state: Any = None, *, causal: bool | int = True) -> tuple[Tensor, Any]:
        """Mix one token, (B, D) or (B, 1, D), continuing from `state`; return its output and the new state.

        With causal=K the step is a block, (B, K, D). The cost does not depend on the number of earlier tokens.
        """
        if isinstance(x_t, Tensor):
            check_dense("x_t", x_t, errors.ShapeError)
        blocks = isinstance(causal, int) and causal > 1
        single = isinstance(x_t, Tensor) and x_t.ndim == 2 and not blocks
        x = x_t[:, None] if single else x_t
        check_recurrent_call(self, x, state, None, causal, step=True)
        y, state = self.scan_blocks(x, state, None, causal) if blocks else self.scan(x, state, None)
        y = self.drop(y) if self.drop.training else y
        return y[:, 0] if single else y, state

    @property
    def polynomial(self) -> Polynomial:
        """What this mixer is as a function of its input. Default: neither polynomial nor rational."""
        return Polynomial()

    @abstractmethod
    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        """The forward, after the checks. Without a separate context, `context` is x itself."""

    def scan(self, x: Tensor, state: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
        """`prefill`, after the checks. Recurrent mixers override it."""
        raise missing_capability(self.name, "recurrent", self.name, "prefill and step")

    def scan_blocks(self, x: Tensor, state: Any, mask: Tensor | None, block: int) -> tuple[Tensor, Any]:
        """`prefill` with causal=block > 1, after the checks. Recurrent mixers that take blocks override it.

        A state with a field `count` of real tokens is refused before, where it ends within a block.
        """
        raise missing_capability(self.name, "block_causal", "causal", f"prefill in blocks of {block}")

    def summary(self, x: Tensor, mask: Tensor | None = None, place: Place | None = None, start: Any = None) -> Summary:
        """What tokens x (B, N, D) do to the state, without their outputs: a part of a sequence on several processes.

        Nothing is checked. mask: (B, N), True for real tokens. place: of the part; None: it begins the sequence.
        start: a state whose convolution windows the part continues from, for mixers with a `memory`.
        """
        raise missing_capability(self.name, "sequence", self.name, "states of the parts of a sequence")

    def read_state(self, x: Tensor, state: Any, mask: Tensor | None = None, place: Place | None = None) -> Tensor:
        """The outputs of tokens x that see all tokens of `state`, as without causal order; see `summary`."""
        raise missing_capability(self.name, "sequence", self.name, "outputs from a state of all tokens")

    @property
    def memory(self) -> int:
        """How many tokens in front of a part its `summary` depends on, through the windows of convolutions."""
        return 0

    def halo(self) -> tuple[int, int]:
        """How many tokens in front of and behind a token its output depends on; on a grid, how many rows."""
        raise missing_capability(self.name, "sequence", self.name, "parts of a sequence with their neighbours' edges")

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: Any = None,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """The mixer between its projections: what `mix` and `scan` do with Q, K and V, before the output map.

        Nothing is checked: `forward` and `prefill` do that, and the layers whose projections a mixer borrows.

        Args:
            q: (B, heads, N, d). The similarity of mixers with logits is that of q·k / √d.
            k: (B, heads, M, d).
            v: (B, heads, M, e).
            mask: (B, M), True for real tokens.
            causal: whether token n sees tokens up to n alone. Recurrent mixers then continue from `state`.
            cross: whether keys and values are those of other tokens than the queries.

        Returns:
            (B, heads, N, e), and the state after the last token; None where there is none.
        """
        raise missing_capability(self.name, "attends", self.name, "queries, keys and values projected elsewhere")

    def state_spec(self, batch: int) -> StateSpec:
        """The class, shapes and dtypes of the state for a batch. Recurrent mixers override it."""
        raise missing_capability(self.name, "recurrent", self.name, "prefill and step")

    # -- starting from attention's weights

    @torch.no_grad()
    def inherit(self, attention: AttentionMaps) -> Sources:
        """Copy what fits from the attention that this mixer replaces; return which parameter came from which.

        Default: `qkv` and `proj`, if the shapes agree. If the host scales its logits by something other than d^-½,
        W_q is multiplied by the ratio. Parameters that are not in the result keep their values.
        """
        sources: Sources = {}
        children = dict(self.named_children())
        qkv, proj = children.get("qkv"), children.get("proj")
        maps = [part for part in (attention.query, attention.key, attention.value) if part is not None]
        whole = isinstance(qkv, Heads) and qkv.qkv.out_features == 3 * self.dim
        if isinstance(qkv, Heads) and whole and [part.weight.shape[0] for part in maps] == [self.dim] * 3:
            usual = (attention.dim // attention.heads) ** -0.5
            gains = ((attention.scale or usual) / usual, 1.0, 1.0)
            for i, (part, gain) in enumerate(zip(maps, gains, strict=True)):
                rows = slice(i * self.dim, (i + 1) * self.dim)
                add_sources(
                    sources, "qkv.qkv", copy_map(part, qkv.qkv.weight[rows], first_rows(qkv.qkv.bias, rows), gain)
                )
        if (
            isinstance(proj, nn.Linear)
            and attention.out is not None
            and proj.weight.shape == attention.out.weight.shape
        ):
            add_sources(sources, "proj", copy_map(attention.out, proj.weight, proj.bias))
        return sources

    def output_map(self) -> nn.Linear | None:
        """The linear layer whose output is the mixer's output. Default: a child named `out` or `proj`, or None."""
        children = dict(self.named_children())
        last = children.get("out") or children.get("proj")
        return last if isinstance(last, nn.Linear) else None

    def scale_output_(self, factor: float) -> bool:
        """Scale the output by changing weights; for mixers without an `output_map`. False: not possible."""
        return False

    # -- folding

    def merge(self) -> dict[str, Linear]:
        """Products of consecutive linear maps, by name, such as "B_1 D_1". Default: none."""
        return {}

    def merged_layers(self) -> Iterable[nn.Module | None]:
        """The layers whose parameters `merge` reads. Default: the whole mixer."""
        return (self,)

    def fold(self: M) -> M:
        """Merge consecutive linear maps into one for calls without gradients; return the mixer. `unfold` undoes it.

        Parameters, the state dict and calls that record gradients do not change. If a weight changes, the next call
        merges again. Changes through `.data` are not noticed: call `fold` again after them. Mixers without
        consecutive linear maps stay as they are.
        """
        self._folded = Folded()
        with torch.no_grad():
            self.merged()
        return self

    def unfold(self: M) -> M:
        """Undo `fold`."""
        self._folded = None
        return self

    @property
    def folded(self) -> tuple[str, ...]:
        """Names of the merged maps, such as "B_1 D_1"; empty without `fold`."""
        return () if self._folded is None else self._folded.names

    def merged(self) -> dict[str, Linear]:
        """The merged maps by name; empty without `fold`, or in a call that records gradients."""
        folded = self._folded  # which another thread may take away
        if folded is None or (torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())):
            return {}
        return folded.maps(self.merge, self._merged_parameters())

    def _merged_parameters(self) -> Iterator[nn.Parameter]:
        for layer in self.merged_layers():
            if layer is None:
                continue
            if layer._modules:
                yield from layer.parameters()
            else:  # much faster than `parameters`, which walks through modules
                yield from (p for p in layer._parameters.values() if p is not None)

    # -- description

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters to exclude from weight decay."""
        return set()

    def matrices(
        self, n: int, *, grid: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """The matrices of the paper's equations, under the paper's letters, as dense detached copies.

        Channel maps act on row tokens from the right, X B. Token maps are (N, N), or (D, N, N) if they differ by
        channel. A missing bias is None.

        Args:
            n: number of tokens.
            grid: as in `forward`.
            dtype: of the copies. None: that of the parameters.
        """
        check_size(self, n, grid)
        check_dtype(dtype)
        with bounded("n", f"{self.name} with n={n:,}", "Use fewer tokens."):
            return _detach(self.named_matrices(n, grid), dtype)

    @abstractmethod
    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        """What `matrices` returns, attached to the graph; views of the parameters where possible."""

    @abstractmethod
    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        """The matrix products and convolutions of a forward of n tokens: `cost` counts them, benchmarks time them."""

    def cost(self, n: int, *, grid: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> Cost:
        """Parameters, multiply-adds and bytes of a forward of one sequence of n tokens, computed by formula.

        Args:
            n: number of tokens.
            grid: as in `forward`.
            dtype: of parameters and tokens, for the bytes.
        """
        check_size(self, n, grid)
        check_dtype(dtype)
        return cost_of(self, self.cost_ops(n, grid), dtype)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, " + ", ".join(
            f"{f.name}={value!r}" for f in fields(self.config) if (value := getattr(self.config, f.name)) != f.default
        )


def _first_parameter(module: Any) -> Tensor:
    """next(module.parameters()), in a fifth of the time.

    It is not remembered, because layers and parameters may be replaced between two calls.
    """
    modules = [module]
    while modules:
        module = modules.pop()
        for parameter in module._parameters.values():
            if parameter is not None:
                return parameter
        modules += [child for child in reversed(module._modules.values()) if child is not None]
    raise RuntimeError("a mixer has no parameter")


def _detach(value: Any, dtype: torch.dtype | None) -> Any:
    """Detached copies of all tensors in nested dicts and lists, in `dtype` if given."""
    if isinstance(value, dict):
        return {name: _detach(item, dtype) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_detach(item, dtype) for item in value]
    return value.detach().clone().to(dtype or value.dtype) if isinstance(value, Tensor) else value
