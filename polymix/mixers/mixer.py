"""TokenMixer: the contract that every mixer keeps."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from polymix import errors
from polymix.mixers.checks import MixerCall, check_call, check_length, check_padding, check_state
from polymix.mixers.fold import Folded
from polymix.mixers.heads import Heads
from polymix.mixers.inheritance import AttentionMaps, Sources, add_sources, copy_map, first_rows
from polymix.mixers.registry import Capabilities, lacks
from polymix.ops.shared.masks import Segments
from polymix.ops.shared.tensors import Linear
from polymix.structured.cost import Cost, Op, cost_of

# What softmax attention's output has at its init over ~200 unit-variance tokens (√(e/N), a ViT's 14 × 14): mixers
# whose output does not shrink with N scale their init to it, so that a host trains from the first step.
INIT_STD = 0.125
_RENAMED = {"letters": "named_matrices", "ops": "cost_ops"}
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


class TokenMixer(nn.Module, ABC):
    """(B, N, D) -> (B, N, D). Final classes implement `mix`, `named_matrices`, `cost_ops`, and `scan` if recurrent.

    A mixer whose projections to q, k, v and back are named `qkv` (a `Heads`) and `proj` inherits them from attention.
    """

    name: ClassVar[str]
    capabilities: Capabilities
    config: Any  # its MixerConfig
    contexts = 1  # how many separate contexts a call may pass
    needs_context = False  # True where a call must pass all of them
    impls: ClassVar[tuple[str, ...]] = ("auto", "eager")  # what there is to choose from
    feature_maps: ClassVar[bool] = False  # True where (B, D, H, W) is taken as well as (B, N, D), and returned alike

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for old, new in _RENAMED.items():
            if old in cls.__dict__:
                text = f"{cls.__name__}.{old} is now called {new}; rename it."
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                setattr(cls, new, cls.__dict__[old])

    def __init__(self, config: Any, dim: int, **kw: Any) -> None:
        super().__init__()
        errors.check_int("dim", dim, 1)
        self.config, self.dim = config, dim
        self.drop = nn.Dropout(config.dropout)
        self._folded: Folded | None = None
        self.checked_calls: dict[Any, MixerCall] = {}  # by shape, type and device: see `check_call`

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        causal: bool | int | None = None,
        grid: tuple[int, ...] | None = None,
        segments: Segments | None = None,
    ) -> Tensor:
        """Mix the tokens of x, or bring those of `context` to x.

        Args:
            x: (B, N, D); also (B, D, H, W) where the class has `feature_maps`.
            context: (B, M, D), a separate sequence that x asks; x itself when None.
            mask: boolean, True = takes part: (B, M) over the context tokens, or (B, N, M) for each query.
            causal: True: a token sees itself and its past; an int K > 1: its own block of K tokens and all earlier
                blocks; None: as the mixer was built (not causal, except for a padre with causal=True).
            grid: (N,), (H, W) or (T, H, W) of the tokens after the prefix, where it differs from the one built for.
            segments: (B, N) integer ids of packed sequences that must not see each other; with a context a pair.
        Returns:
            (B, N, D) in the type of x; under autocast in whatever it computes in.
        Raises:
            ShapeError, MaskError, CapabilityError: before any compute, naming the argument and what to do.
        """
        if self.feature_maps and isinstance(x, Tensor) and x.ndim == 4:
            place = tuple(x.shape[2:]) if self.capabilities.grids else None
            tokens = x.flatten(2).transpose(1, 2)
            y = self.forward(tokens, context, mask=mask, causal=causal, grid=grid or place, segments=segments)
            return y.transpose(1, 2).unflatten(2, x.shape[2:])
        call = check_call(self, x, context, mask, causal, grid, segments)
        y = self.mix(x, x if context is None else context, call)
        return self.drop(y) if self.drop.training else y  # calling it takes longer than seeing that it does nothing

    def prefill(self, x: Tensor, state: Any = None, *, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """Mix a chunk (B, N, D) causally after `state` (None: the start); returns its output and the new state.

        Any split of a sequence into prefills and steps gives what one causal forward gives. Padding (mask False) is
        as if it were not there, on either side. Cost as the causal forward of N tokens; the state does not grow.
        """
        self._need_recurrence()
        call = check_call(self, x, None, mask, True, None, None)
        check_padding(mask)
        check_state(self.check_state, state, x)
        y, state = self.scan(x, state, call.mask)
        return self.drop(y), state

    def step(self, x_t: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Mix one token (B, D) or (B, 1, D) after `state`; the cost does not depend on how many came before."""
        self._need_recurrence()
        if isinstance(x_t, Tensor) and x_t.ndim == 2:
            y, state = self.prefill(x_t[:, None], state)
            return y[:, 0], state
        if not isinstance(x_t, Tensor) or x_t.ndim != 3 or x_t.shape[1] != 1:
            got = tuple(x_t.shape) if isinstance(x_t, Tensor) else type(x_t).__name__
            raise errors.ShapeError(
                "x_t", got, f"(B, {self.dim}) or (B, 1, {self.dim})", "Use prefill for more tokens."
            )
        return self.prefill(x_t, state)

    def _need_recurrence(self) -> None:
        if not self.capabilities.recurrent:
            raise lacks(self.name, "recurrent", self.name, "prefill and step")

    @property
    def polynomial(self) -> Polynomial:
        """What this mixer declares to be as a function of its input; by default no polynomial and not rational."""
        return Polynomial()

    @abstractmethod
    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        """The forward after its checks; `context` is x itself without a separate one."""

    def scan(self, x: Tensor, state: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
        """One causal chunk after its checks."""
        raise lacks(self.name, "recurrent", self.name, "prefill and step")

    def check_state(self, state: Any, x: Tensor) -> str | None:
        """What a state must look like for x, where `state` does not; None where it fits."""
        return None

    # -- attention's weights

    @torch.no_grad()
    def inherit(self, attention: AttentionMaps) -> Sources:
        """Start from the maps of the attention that it replaces; returns which parameter came from which.

        By default `qkv` and `proj`, where their shapes agree: W_q times what the host's scale of the logits is above
        d^-½. What is not returned stays as it was.
        """
        found: Sources = {}
        children = dict(self.named_children())
        qkv, proj = children.get("qkv"), children.get("proj")
        maps = [part for part in (attention.query, attention.key, attention.value) if part is not None]
        if isinstance(qkv, Heads) and [part.weight.shape[0] for part in maps] == [self.dim] * 3:
            usual = (attention.dim // attention.heads) ** -0.5
            gains = ((attention.scale or usual) / usual, 1.0, 1.0)
            for i, (part, gain) in enumerate(zip(maps, gains, strict=True)):
                rows = slice(i * self.dim, (i + 1) * self.dim)
                sources = copy_map(part, qkv.qkv.weight[rows], first_rows(qkv.qkv.bias, rows), gain)
                add_sources(found, "qkv.qkv", sources)
        if (
            isinstance(proj, nn.Linear)
            and attention.out is not None
            and proj.weight.shape == attention.out.weight.shape
        ):
            add_sources(found, "proj", copy_map(attention.out, proj.weight, proj.bias))
        return found

    def output_map(self) -> nn.Linear | None:
        """The linear map that the output comes from, and nothing else: by default a child named `out` or `proj`."""
        children = dict(self.named_children())
        last = children.get("out") or children.get("proj")
        return last if isinstance(last, nn.Linear) else None

    def scale_output_(self, factor: float) -> bool:
        """Multiply the output by `factor` in the weights, where there is no `output_map`; False where none can."""
        return False

    # -- folding

    def merge(self) -> dict[str, Linear]:
        """Linear maps that follow each other with nothing between them, by name, as one; empty where none do."""
        return {}

    def fold(self: M) -> M:
        """Merge linear maps that follow each other into one, for calls without gradients; `unfold` takes it back.

        The parameters, the state dict and calls that record gradients are as before. When a weight has changed since,
        the next call merges anew (except for a change through `.data`, which leaves no trace: fold again after it). A
        mixer without such maps is left as it is. Returns the mixer.
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
        """What `fold` merged, such as "B_1 D_1"."""
        return () if self._folded is None else self._folded.names

    def merged(self) -> dict[str, Linear]:
        """What `fold` merged, where it may be used: nothing in a call that records gradients."""
        if self._folded is None or (torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())):
            return {}
        return self._folded.maps(self.merge, self.parameters())

    # -- what it says of itself

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer should not decay."""
        return set()

    def matrices(
        self, n: int, *, grid: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """The paper's matrices by the paper's letters for n tokens, dense and detached, in `dtype` if given.

        Right matrices act on row tokens, X B. A token map that differs by channel is (D, N, N), else (N, N). A bias
        is None where there is none.
        """
        check_length(self, n)
        return _detach(self.named_matrices(n, grid), dtype)

    @abstractmethod
    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        """What `matrices` returns, still attached: views of the parameters where that will do."""

    @abstractmethod
    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        """The dense products and convolutions of a plain forward of n tokens: what `cost` counts and the floor runs."""

    def cost(self, n: int, *, grid: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> Cost:
        """Parameters, multiply-adds and bytes of a plain forward of one sequence of n tokens, by formula."""
        check_length(self, n)
        return cost_of(self, self.cost_ops(n, grid), dtype)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, " + ", ".join(
            f"{f.name}={value!r}" for f in fields(self.config) if (value := getattr(self.config, f.name)) != f.default
        )


def _detach(value: Any, dtype: torch.dtype | None) -> Any:
    """Every tensor in dicts and lists detached, cloned and in `dtype` if given."""
    if isinstance(value, dict):
        return {name: _detach(item, dtype) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_detach(item, dtype) for item in value]
    return value.detach().clone().to(dtype or value.dtype) if isinstance(value, Tensor) else value
