"""HeadsMixer: a mixer of queries, keys and values, with its own projections around `attend` or borrowed ones."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from polymix.errors import CapabilityError
from polymix.mixers.checks import MixerCall
from polymix.mixers.heads import Heads
from polymix.mixers.mixer import TokenMixer
from polymix.structured.cost import Op

H = TypeVar("H", bound=TokenMixer)


class HeadsMixer(TokenMixer):
    """Base of mixers of the form attend(X W_q, C W_k, C W_v) W_o, with a context C or X itself."""

    heads: int
    qkv: Heads
    proj: nn.Linear

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x, context, call.values))
        y, _ = self.attend(q, k, v, mask=call.mask, causal=bool(call.causal), cross=call.cross)
        return self.proj(y.transpose(1, 2).flatten(-2))

    def scan(self, x: Tensor, state: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x, x))
        y, state = self.attend(q, k, v, mask=mask, causal=True, state=state)
        return self.proj(y.transpose(1, 2).flatten(-2)), state


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
