"""TokenMixer, the contract that every mixer keeps, its config and its capabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from polymix import errors
from polymix.mixers.checks import Call, check_call, check_length, check_padding, check_state
from polymix.mixers.registry import check_options, lacks, mixer_class
from polymix.ops.blocked.common import Linear
from polymix.ops.common import keep_memory
from polymix.ops.dispatch import choose
from polymix.ops.visibility import Segments
from polymix.structured.cost import Cost, Op, cost_of

# What softmax attention's output has at its init over ~200 unit-variance tokens (√(e/N), a ViT's 14 × 14): mixers
# whose output does not shrink with N scale their init to it, so that a host trains from the first step.
INIT_STD = 0.125
FEW = 512  # tokens in a batch below which "auto" takes no form in blocks: what it saves is less than its own calls
M = TypeVar("M", bound="TokenMixer")


@dataclass(frozen=True)
class Capabilities:
    """What a mixer can do: on the class with the right options, on an instance as it was built."""

    causal: bool = False  # a token may see its past alone
    cross: bool = False  # a separate context
    masks: frozenset[str] = frozenset()  # of "padding", "arbitrary", "block_causal", "segments"
    recurrent: bool = False  # prefill and step, with a state whose size does not depend on N
    any_length: bool = True  # one set of weights serves every N
    grids: tuple[int, ...] = ()  # how many axes its grid may have; () where positions play no part
    export: bool = True  # torch.export takes it

    def has(self, name: str) -> bool:
        """Whether a capability, or a kind of mask, is there."""
        return name in self.masks or bool(getattr(self, name, False))


@dataclass(frozen=True)
class Polynomial:
    """What a mixer is as a function of its input, all else fixed; `polymix.lens.degree` finds the same by numbers.

    degree: its total degree where it is a polynomial, else None. homogeneous: f(tX) = t^degree f(X).
    rational: (numerator degree, denominator degree) where it is a quotient of two polynomials and no polynomial.
    """

    degree: int | None = None
    homogeneous: bool = False
    rational: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """The options of a mixer, apart from the width that its host decides.

    Args:
        bias: whether its linear maps and convolutions have biases.
        dropout: probability with which an element of the output is zeroed in training.
        impl: "auto", the fastest implementation that can serve a call, or one of the mixer's `impls` by name, which
            runs or raises. No part of what the mixer computes.
    """

    name: ClassVar[str]
    bias: bool = True
    dropout: float = 0.0
    impl: str = "auto"

    def __post_init__(self) -> None:
        errors.check_choice("impl", self.impl, mixer_class(self.name).impls)
        errors.check_choice("bias", self.bias, (True, False))
        errors.check_number("dropout", self.dropout, 0.0, 1.0, "a probability in [0, 1)", 0.0)
        self.check()

    def check(self) -> None:
        """Raise OptionError where options are out of range or make each other meaningless."""

    def build(
        self, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **changes: Any
    ) -> TokenMixer:
        """A mixer of these options for `dim` channels; `changes` replace options first."""
        return mixer_class(self.name)(self.changed(**changes), dim, device=device, dtype=dtype)

    def changed(self, **changes: Any) -> MixerConfig:
        """A copy with some options replaced; an unknown option is an error that lists the known ones."""
        check_options(type(self), changes)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Name and options, as JSON can hold them."""
        return {"name": self.name, **asdict(self)}


class TokenMixer(nn.Module, ABC):
    """(B, N, D) -> (B, N, D). Final classes implement `mix`, `letters`, `ops`, and `scan` if recurrent."""

    name: ClassVar[str]
    capabilities: Capabilities
    config: MixerConfig
    causal_by_build = False  # True where causality is a property of the weights (padre), not of the call
    contexts = 1  # how many separate contexts a call may pass
    needs_context = False  # True where a call must pass all of them
    impls: ClassVar[tuple[str, ...]] = ("auto", "eager")  # what there is to choose from
    in_blocks: ClassVar[tuple[str, ...]] = ("native", "blocked")  # those of them that need many tokens to pay
    feature_maps: ClassVar[bool] = False  # True where (B, D, H, W) is taken as well as (B, N, D), and returned alike

    def __init__(self, config: Any, dim: int, **kw: Any) -> None:
        super().__init__()
        errors.check_int("dim", dim, 1)
        self.config, self.dim = config, dim
        self.drop = nn.Dropout(config.dropout)
        self._folded: _Folded | None = None

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
                blocks; None: as the mixer was built (not causal, but for a padre with causal=True).
            grid: (N,), (H, W) or (T, H, W) of the tokens after the prefix, where it differs from the one built for.
            segments: (B, N) integer ids of packed sequences that must not see each other; with a context a pair.
        Returns:
            (B, N, D) in the type of x; under autocast in whatever it computes in.
        Raises:
            ShapeError, MaskError, CapabilityError: before any compute, naming the argument and the cure.
        """
        if self.feature_maps and isinstance(x, Tensor) and x.ndim == 4:
            place = tuple(x.shape[2:]) if self.capabilities.grids else None
            tokens = x.flatten(2).transpose(1, 2)
            y = self.forward(tokens, context, mask=mask, causal=causal, grid=grid or place, segments=segments)
            return y.transpose(1, 2).unflatten(2, x.shape[2:])
        call = check_call(self, x, context, mask, causal, grid, segments)
        y = self.mix(x, x if context is None else context, call)
        return self.drop(y) if self.drop.training else y  # which takes longer than to see that it does nothing

    def prefill(self, x: Tensor, state: Any = None, *, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """Mix a chunk (B, N, D) causally after `state` (None: the start); returns its output and the new state.

        Any split of a sequence into prefills and steps gives what one causal forward gives. Padding (mask False) is
        as if it were not there, on either side. Cost as the causal forward of N tokens; the state does not grow.
        """
        self._need_recurrence()
        call = check_call(self, x, None, mask, True, None, None)
        check_padding(mask)
        check_state(self, state, x)
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
            raise lacks(self, "recurrent", self.name, "prefill and step")

    @property
    def polynomial(self) -> Polynomial:
        """What this mixer declares to be as a function of its input; by default no polynomial and not rational."""
        return Polynomial()

    @abstractmethod
    def mix(self, x: Tensor, context: Tensor, call: Call) -> Tensor:
        """The forward after its checks; `context` is x itself without a separate one."""

    def scan(self, x: Tensor, state: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
        """One causal chunk after its checks."""
        raise lacks(self, "recurrent", self.name, "prefill and step")

    def check_state(self, state: Any, x: Tensor) -> str | None:
        """What a state must look like for x, where `state` does not; None where it fits."""
        return None

    def choose(self, *inputs: Tensor, **against: str | None) -> str:
        """The implementation for a call: `against` has a reason, or None, for each kernel that there is."""
        traced = torch.compiler.is_compiling()
        if not traced:
            keep_memory()
        if self.config.impl == "auto" and "blocked" in against and not traced and inputs[0].shape[:2].numel() < FEW:
            few = f"fewer than {FEW} tokens are faster without blocks"
            against |= {kernel: why or few for kernel, why in against.items() if kernel in self.in_blocks}
        return choose(self.name, self.config.impl, (*inputs, *self.parameters()), against)

    def merge(self) -> dict[str, Linear]:
        """Linear maps that follow each other with nothing between them, by name, as one; empty where none do."""
        return {}

    def fold(self: M) -> M:
        """Merge linear maps that follow each other into one, for calls without gradients; `unfold` takes it back.

        The parameters, the state dict and calls that record gradients are as before. When a weight has changed since,
        the next call merges anew (but for a change through `.data`, which leaves no trace: fold again after it). A
        mixer without such maps is left as it is. Returns the mixer.
        """
        self._folded = _Folded((), {})
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
        return () if self._folded is None else tuple(self._folded.products)

    def merged(self) -> dict[str, Linear]:
        """What `fold` merged, where it may be used: nothing in a call that records gradients."""
        if self._folded is None or (torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())):
            return {}
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
            return self.merge()  # part of the graph
        stamp = tuple(_Stamp(p, p.data_ptr(), p.dtype, _version(p)) for p in self.parameters())
        if not _same(stamp, self._folded.stamps):
            with torch.inference_mode(False), torch.no_grad():  # what is merged may meet a graph later
                self._folded = _Folded(stamp, self.merge())
        return self._folded.products

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
        return _detach(self.letters(n, grid), dtype)

    @abstractmethod
    def letters(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        """What `matrices` returns, still attached: views of the parameters where that will do."""

    @abstractmethod
    def ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        """The dense products and convolutions of a plain forward of n tokens: what `cost` counts and the floor runs."""

    def cost(self, n: int, *, grid: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> Cost:
        """Parameters, multiply-adds and bytes of a plain forward of one sequence of n tokens, by formula."""
        check_length(self, n)
        return cost_of(self, self.ops(n, grid), dtype)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, " + ", ".join(
            f"{f.name}={value!r}" for f in fields(self.config) if (value := getattr(self.config, f.name)) != f.default
        )


class _Stamp(NamedTuple):
    """A parameter as it was."""

    parameter: Tensor
    address: int
    dtype: torch.dtype
    version: int


class _Folded(NamedTuple):
    """Merged weights, and what they were merged from."""

    stamps: tuple[_Stamp, ...]
    products: dict[str, Linear]


def _same(now: tuple[_Stamp, ...], then: tuple[_Stamp, ...]) -> bool:
    """Whether no parameter was replaced or written to; never sure of one that does not count what is written to it."""
    pairs = zip(now, then, strict=False)
    return len(now) == len(then) and all(
        a.parameter is b.parameter and a[1:] == b[1:] and a.version >= 0 for a, b in pairs
    )


def _version(parameter: Tensor) -> int:
    """How often it was written to in place; inference tensors do not count."""
    return -1 if parameter.is_inference() else parameter._version


def _detach(value: Any, dtype: torch.dtype | None) -> Any:
    """Every tensor in dicts and lists detached, cloned and in `dtype` if given."""
    if isinstance(value, dict):
        return {name: _detach(item, dtype) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_detach(item, dtype) for item in value]
    return value.detach().clone().to(dtype or value.dtype) if isinstance(value, Tensor) else value
