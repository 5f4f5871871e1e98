"""HeadsMixer: a mixer of queries, keys and values, with its own projections around `attend` or borrowed ones."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import CapabilityError
from polymix.mixers.checks import MixerCall
from polymix.mixers.heads import Heads, head_count
from polymix.mixers.mixer import TokenMixer
from polymix.mixers.registry import missing_capability
from polymix.mixers.states import Place, Summary
from polymix.ops.shared.tensors import share
from polymix.structured.base import init_
from polymix.structured.cost import Op
from polymix.structured.dense import Dense, affine

H = TypeVar("H", bound=TokenMixer)


class HeadsMixer(TokenMixer):
    """Base of mixers of the form attend(X W_q, C W_k, C W_v) W_o, with a context C or X itself."""

    heads: int
    qkv: Heads
    proj: nn.Linear

    def add_projections(self, std: float, heads: int | None = None, **kw: Any) -> None:
        """Add `qkv` with `heads` heads, or the number that the config says, and `proj` with weights of std / √D.

        std: what W_o has to make of the output of `attend` at init, over its standard deviation.
        """
        self.heads = head_count(self.config.heads if heads is None else heads, self.dim)
        self.qkv = Heads(self.dim, self.heads, self.config.bias, **kw)
        self.proj = Dense(self.dim, self.dim, self.config.bias, **kw)
        init_(self.proj.weight, self.dim, std)

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x, context, call.values))
        y, _ = self.attend(q, k, v, mask=call.mask, causal=bool(call.causal), cross=call.cross)
        return self.output(x, y)

    def scan(self, x: Tensor, state: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x, x))
        y, state = self.attend(q, k, v, mask=mask, causal=True, state=state)
        return self.output(x, y), state

    def output(self, x: Tensor, y: Tensor) -> Tensor:
        """The mixer's output for tokens x and what they got from `attend`, y (B, heads, N, e)."""
        return self.proj(y.transpose(1, 2).flatten(-2))

    def summary(self, x: Tensor, mask: Tensor | None = None, place: Place | None = None, start: Any = None) -> Summary:
        width = self.qkv.qkv.out_features // 3
        both = F.linear(x, *share(affine(self.qkv.qkv), width, 3 * width)).chunk(2, dim=-1)
        k, v = (part.unflatten(-1, (self.qkv.heads, -1)).transpose(1, 2) for part in both)
        return Summary(self.pool(k, v, mask))

    def read_state(self, x: Tensor, state: Any, mask: Tensor | None = None, place: Place | None = None) -> Tensor:
        q = F.linear(x, *share(affine(self.qkv.qkv), 0, self.qkv.qkv.out_features // 3))
        y = self.ask(q.unflatten(-1, (self.qkv.heads, -1)).transpose(1, 2), state)
        return self.output(x, y.to(x.dtype))

    def pool(self, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        """The state of keys and values (B, heads, N, ·) that `ask` reads."""
        raise missing_capability(self.name, "sequence", self.name, "states of the parts of a sequence")

    def ask(self, q: Tensor, state: Any) -> Tensor:
        """What `attend` gives to queries (B, heads, N, d) that see all tokens of `state`."""
        raise missing_capability(self.name, "sequence", self.name, "outputs from a state of all tokens")

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        return self.qkv.named_matrices(self.proj)


class Elsewhere(nn.Module):
    """In the place of a projection that a mixer borrows: its sizes, for costs, and no weights."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def op(self, n: int) -> Op:
        return Op("linear", (n, self.in_features, self.out_features, 1))


def borrowing(mixer: H, dim: int) -> H:
    """The mixer without projections, for a layer of `dim` channels that projects for it; `attend` alone works."""
    for name in mixer.projections:
        delattr(mixer, name)
    mixer.qkv, mixer.proj = Elsewhere(dim, 3 * mixer.dim), Elsewhere(mixer.dim, dim)
    mixer.register_forward_pre_hook(_refuse)
    return mixer


def _refuse(mixer: nn.Module, args: Any) -> NoReturn:
    got = "a call of a mixer whose projections belong to the layer around it"
    raise CapabilityError("mixer", got, "a call of `attend`", "Call the layer.")
