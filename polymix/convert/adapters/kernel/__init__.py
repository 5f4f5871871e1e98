"""Attention of any class that asks PyTorch's `scaled_dot_product_attention`: a mixer answers in its place.

The layer keeps its projections, norms, rotary angles, streams and output maps, and runs them itself. This serves the
attention of diffusers, timm and users for which nobody wrote an adapter. A recorded call proves the reading.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, refusal_of
from polymix.convert.adapters.kernel.question import (
    Answering,
    Question,
    asks_pytorch,
    folded,
    in_heads,
    in_shape,
    rows,
    without_padding,
)
from polymix.convert.adapters.kernel.reading import (
    KernelSpec,
    as_tokens,
    asked,
    grid_of,
    head_axis_of,
    in_training,
    leave_out,
    map_grid,
    output_of,
    places,
    products_of,
    turning,
    unread_parts,
    whole,
)
from polymix.convert.heads import Heads, attended, softmax
from polymix.convert.inherit import match
from polymix.convert.spec import AttentionSpec
from polymix.convert.tracing import EXACT, LayerCall, difference
from polymix.errors import CapabilityError, OptionError
from polymix.mixers import TokenMixer
from polymix.mixers.heads_mixer import borrowing

__all__ = ["KernelAdapter", "KernelSpec", "any_adapter"]

_UNREAD = "belongs to queries, keys and values, which this mixer does not read"
_TURNS = "rotary angles of queries and keys, which this mixer does not read"
_CURE = "Keep this layer."


class KernelAdapter(Adapter):
    """The layer itself, in which a mixer answers in the place of softmax attention.

    A mixer of queries, keys and values gets those of the layer. Any other reads the layer's tokens, those of several
    streams joined, and the layer's output maps follow; its maps to queries, keys and values are left out.
    """

    needs_call: ClassVar[bool] = True
    optional: ClassVar[bool] = True
    proves_softmax: ClassVar[bool] = True
    way: ClassVar[str] = "the layer keeps its own maps, and the mixer answers in the place of softmax attention"
    checks_masks: ClassVar[bool] = False
    masks_alone: ClassVar[bool] = True
    layer: Any

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        self.layer = whole(module)
        self.parameter_names = tuple(inspect.signature(type(module).forward).parameters)[1:]
        spec = attention if isinstance(attention, KernelSpec) else KernelSpec(dim=mixer.dim, heads=1)
        self.head_axis, self.biased, self.cross = spec.head_axis, spec.biased, spec.cross
        self.products, self.asks = list(spec.products), spec.asks
        self.tokens, self.context = list(spec.tokens), spec.context
        self.unread, self.turns = list(spec.unread), list(spec.turns)
        if mixer.config.attends:
            if spec.projected is not None and not mixer.config.fits_heads(spec.projected[0]):
                got = f"other heads for {mixer.name}"
                allowed = f"the {spec.projected[0]} of the layer, whose queries, keys and values the mixer gets"
                raise OptionError("heads", got, allowed, "Leave heads out.")
            borrowing(mixer, mixer.dim)
        elif spec.why_not:
            got = f"{mixer.name}, which reads tokens, in a layer that {spec.why_not}"
            raise CapabilityError(
                "mixer", got, "a mixer of queries, keys and values, such as qt", "Or keep this layer."
            )

    def __getattr__(self, name: str) -> Any:
        """Attributes of the layer that its host reads."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "layer" or name.startswith("__"):
                raise
            return getattr(self.layer, name)

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        """The grid of the model around the layer; a call shows the rest."""
        return KernelSpec(dim=1, heads=1, any_length=True, grid=host.grid(), prefix=host.prefix())

    @classmethod
    def copied_parts(cls, module: nn.Module, mixer: TokenMixer) -> dict[str, str]:
        return {"layer": ""}

    @classmethod
    @torch.no_grad()
    def proven(cls, spec: AttentionSpec, module: nn.Module, call: LayerCall) -> AttentionSpec:
        """The spec with what the layer asks in a call. Softmax by our reading must give the layer's own output."""
        layer = whole(module)
        products = products_of(layer, call)
        questions = asked(layer, call, products)[1]
        axis = head_axis_of(layer, questions[0].query)
        dropout, learned = in_training(layer, call, products)
        each = [in_heads(question, axis, learned or None) for question in questions]
        heads = each[0]
        if len({(part.q.shape, part.k.shape, part.v.shape, part.causal) for part in each}) > 1:
            got = f"a layer that asks for attention {len(each)} times in a call, in several shapes or orders"
            raise CapabilityError("attention", got, "attention of one shape and order", _CURE)

        def output(answer: Callable[[Question, Heads], Tensor]) -> Tensor:
            left = iter(each)

            def real(asked: Question) -> Tensor:
                heads = next(left)
                return in_shape(without_padding(answer(asked, heads), heads), asked, axis)

            return output_of(layer, call, real, products)

        theirs, ours = (
            output(lambda asked, heads: folded(asked.answer(), axis)),
            output(lambda asked, heads: softmax(heads)),
        )
        if difference(ours, theirs) > EXACT:
            got = f"a layer whose output differs by {difference(ours, theirs):.2g} where softmax of its logits answers"
            raise CapabilityError("attention", got, "softmax attention", _CURE)
        if len(each) == 1:
            tokens, context, why_not = places(layer, call, products, heads)
        else:
            tokens, context, why_not = (), "", f"asks for attention {len(each)} times in a call"
        grid, prefix = grid_of(spec, layer, call, questions[0])
        cross = bool(context) or heads.k.shape[2] != heads.q.shape[2]
        masks = {
            kind
            for part in each
            for kind, mask in (("padding", part.padding), ("arbitrary", part.pairs))
            if mask is not None
        }
        projected = (heads.q.shape[1], heads.q.shape[3], heads.v.shape[3])
        size = projected[0] * projected[2]
        maps = sum(part.weight.numel() for part in layer.modules() if isinstance(part, nn.Linear))
        share = maps // max(1, len(tokens))  # of two streams, each has maps of its own
        return KernelSpec(
            dim=size, heads=projected[0], projected=projected, causal=heads.causal, cross=cross, masks=frozenset(masks),
            grid=None if cross or heads.causal else grid, prefix=prefix if grid else 0, any_length=True,
            drops={} if dropout is None else {"dropout": dropout},
            cost=lambda count: 2 * count * (share + 2 * count * size * len(questions)), head_axis=axis,
            biased=any(part.position_bias is not None for part in each),
            talks=any(part.talking is not None for part in each),
            tokens=tokens, context=context, why_not=why_not, turns=turning(layer, call),
            unread=() if why_not else unread_parts(layer, call, products), products=products,
            asks=len(questions),
        )  # fmt: skip

    @property
    def discards(self) -> dict[str, str]:
        if self.mixer.config.attends:
            return {}
        lost = {f"{name}.{key}": _UNREAD for name in self.unread for key in ("weight", "bias")}
        return lost | dict.fromkeys(self.turns, _TURNS)

    def calibrate(self, call: LayerCall) -> float | None:
        """Match what the mixer answers to what PyTorch does; then drop what the mixer leaves without a use."""
        question = asked(self.layer, call, self.products)[1][0]
        factor = None
        if not self.mixer.config.attends:
            theirs = rows(question.answer(), self.head_axis)
            ours: list[Tensor] = []
            hook = self.mixer.register_forward_hook(lambda *event: ours.append(event[-1]))
            call.repeat(self)
            hook.remove()
            factor = match(self.mixer, self.mixer.output_map(), ours[0], theirs)
        self.settle()
        return factor

    def settle(self) -> None:
        leave_out(self.layer, () if self.mixer.config.attends else self.unread)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.answered(args, kwargs)

    def answered(self, args: tuple[Any, ...], kwargs: dict[str, Any], padding: Tensor | None = None) -> Any:
        """The layer's output. padding: (B, M), True for real keys, beside what the layer's own mask hides.

        Raises CapabilityError where the layer does not ask for attention as often as it did when it was read: by
        another kernel, say, that was chosen since.
        """
        questions: list[Question] = []
        arguments = {**dict(zip(self.parameter_names, args, strict=False)), **kwargs}

        def answer(question: Question) -> Tensor:
            questions.append(question)
            heads = in_heads(question, self.head_axis, self.biased)
            both = [part for part in (heads.padding, padding) if part is not None]
            heads = heads._replace(padding=both[0] & both[1] if len(both) == 2 else both[0] if both else None)
            if padding is not None and heads.pairs is not None:
                heads = heads._replace(pairs=heads.pairs & padding[:, None], padding=None)
            return in_shape(self.mixed(heads, arguments), question, self.head_axis)

        with Answering(answer, self.products):
            output = self.layer(*args, **kwargs)
        if len(questions) != self.asks:
            got = f"a layer that asks for attention {len(questions)} times in this call"
            cure = "Choose the kernel and processor that it was converted with, or convert it again."
            raise CapabilityError("attention", got, f"{self.asks}, as when it was converted", cure)
        return output

    def mixed(self, heads: Heads, arguments: dict[str, Any]) -> Tensor:
        """The answer (B, h, N, e) of the mixer. Softmax keeps what acts on the logits, which others drop."""
        on_logits = heads.position_bias is not None or heads.talking is not None
        if on_logits and self.mixer.config.keeps_bias:
            return softmax(heads)
        if self.mixer.config.attends:
            return attended(self.mixer, heads, cross=self.cross or heads.q.shape[2] != heads.k.shape[2])[0]
        parts = [as_tokens(arguments[name], self.mixer.dim) for name in self.tokens]
        x = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        context = as_tokens(arguments[self.context], self.mixer.dim) if self.context else None
        first = arguments[self.tokens[0]]
        grid = map_grid(first, self.mixer.dim) if first.ndim == 4 else None
        y = self.mix(x, context, mask=heads.mask, causal=heads.causal or None, grid=grid)
        return y.unflatten(-1, (heads.q.shape[1], -1)).transpose(1, 2)


def any_adapter(module: nn.Module) -> type[Adapter] | None:
    """The adapter of a layer that asks PyTorch for attention."""
    return KernelAdapter if asks_pytorch(module) and refusal_of(module) is None else None
