"""Reading a layer that asks PyTorch for attention from a recorded call: its heads, its streams, and what they leave."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from polymix.convert.adapters.kernel.question import Answering, Question, rows
from polymix.convert.find import head_count
from polymix.convert.heads import Heads
from polymix.convert.spec import AttentionSpec, grid_among
from polymix.convert.tracing import EXACT, LayerCall, arguments_of, difference, mode, tensors
from polymix.errors import CapabilityError, one_line

MAX_PRODUCTS = 64  # of matrices in a layer, in which those of queries and keys are looked for


@dataclass(frozen=True, kw_only=True)
class KernelSpec(AttentionSpec):
    """What a recorded call shows of a layer that asks PyTorch for attention.

    head_axis: of the heads in q; None where q has none. products: which of its matrix products begin its attention;
    none: it asks PyTorch. asks: how often in a call. tokens: the names of the arguments whose tokens q has, joined in
    this order; empty where they cannot be read. context: the argument whose tokens k has, where that is another.
    why_not: why a mixer that reads tokens cannot stand here. unread: its parts that such a mixer leaves without a use.
    turns: its arguments with rotary angles, which such a mixer does not apply.
    """

    head_axis: int | None = 1
    products: tuple[int, ...] = ()
    asks: int = 1
    tokens: tuple[str, ...] = ()
    context: str = ""
    why_not: str = ""
    unread: tuple[str, ...] = ()
    turns: tuple[str, ...] = ()


def whole(module: nn.Module) -> nn.Module:
    """A copy of a layer that asks PyTorch for attention also where the layer was told not to."""
    layer = copy.deepcopy(module)
    for part in layer.modules():
        if hasattr(part, "fused_attn"):
            setattr(part, "fused_attn", True)  # noqa: B010 (mypy takes it for a tensor)
    return layer


def products_of(layer: nn.Module, call: LayerCall) -> tuple[int, ...]:
    """The matrix products that begin a layer's softmax attention by definition; none where it asks PyTorch.

    Each product is tried: where softmax(Q Kᵀ + biases) V stands in its place, the output must be the layer's own.

    Raises CapabilityError where no product is.
    """
    theirs, questions = asked(layer, call)
    if questions:
        return ()
    reasons: list[str] = []
    places: list[int] = []
    with mode(layer, False), Answering(Question.answer) as counting, torch.no_grad():
        layer(*call.args, **call.kwargs)
    if counting.count > MAX_PRODUCTS:  # some attention might stay beside the mixer
        got = f"a layer with {counting.count} products of matrices"
        raise CapabilityError("attention", got, f"at most {MAX_PRODUCTS}", "Keep this layer.")
    for place in range(counting.count):
        try:
            ours, questions = asked(layer, call, (place,))
        except CapabilityError as error:
            reasons.append(error.got)
            continue
        except (RuntimeError, TypeError, ValueError, LookupError):  # a product of others than queries and keys
            continue
        if len(questions) == 1 and difference(ours, theirs) < EXACT:
            places.append(place)
    if places:
        return tuple(places)
    got = next(iter(reasons), "a layer in which no softmax attention can be recognised")
    raise CapabilityError("attention", got, "softmax attention over tokens", "Keep this layer.")


def head_axis_of(layer: nn.Module, q: Tensor) -> int | None:
    """The axis of the heads: the second of four, else the one as long as the layer has heads."""
    if q.ndim <= 4:
        return 1 if q.ndim == 4 else None
    heads = head_count(layer)
    places = [place for place, size in enumerate(q.shape[:-2]) if place and size == heads]
    if not places:
        got = f"queries {tuple(q.shape)}, in which no axis is that of {heads or 'a known number of'} heads"
        raise CapabilityError("attention", got, "queries (B, heads, N, d)", "Keep this layer.")
    return places[0]


def output_of(
    layer: nn.Module, call: LayerCall, answer: Callable[[Question], Tensor], products: Collection[int] = ()
) -> Tensor:
    """What a layer returns in a call, all its tensors as one vector."""
    with mode(layer, False), Answering(answer, products), torch.no_grad():
        output = layer(*call.args, **call.kwargs)
    return torch.cat([part.flatten().float() for part in tensors(output) if part.is_floating_point()])


def asked(layer: nn.Module, call: LayerCall, products: Collection[int] = ()) -> tuple[Tensor, list[Question]]:
    """What a layer returns in a call, as `output_of` does, and what it asks PyTorch meanwhile."""
    questions: list[Question] = []

    def answer(question: Question) -> Tensor:
        questions.append(question)
        return question.answer()

    return output_of(layer, call, answer, products), questions


def in_training(layer: nn.Module, call: LayerCall, products: Collection[int]) -> tuple[str | None, bool]:
    """What to say of a layer's dropout of attention weights, if it has any, and whether its mask is learned.

    A copy is called in training mode. A learned mask is a bias, also where it is zero so far.
    """
    questions: list[Question] = []

    def answer(question: Question) -> Tensor:
        questions.append(question)
        return question.answer()

    layer = copy.deepcopy(layer).requires_grad_(True)
    layer.train()  # by itself: that of LeViT returns nothing
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), Answering(answer, products):
        try:
            layer(*call.args, **call.kwargs)
        except Exception as error:  # whatever a layer raises in training alone, such as for a batch with one row
            if not questions:
                return f"was not found out: in training mode the layer fails with {one_line(error)[:200]}", False
    masks = [question.attn_mask for question in questions]
    learned = any(mask is not None and mask.requires_grad for mask in masks)
    drops = any(question.dropout_p > 0 for question in questions)
    return "applies to attention weights, which a mixer does not have" if drops else None, learned


def turning(layer: nn.Module, call: LayerCall) -> tuple[str, ...]:
    """The arguments that hold rotary angles, by their names."""
    arguments = arguments_of(layer, call.args, call.kwargs)
    words = ("rot", "rope", "freqs")
    return tuple(name for name, value in arguments.items() if value is not None and any(word in name for word in words))


def as_tokens(x: Tensor, dim: int) -> Tensor:
    """Tokens (B, N, D) of tokens, or of a map (B, D, H, W) or (B, H, W, D)."""
    if x.ndim == 4:
        return x.flatten(2).transpose(1, 2) if x.shape[1] == dim else x.flatten(1, 2)
    return x


def map_grid(x: Tensor, dim: int) -> tuple[int, ...]:
    """The grid of a map (B, D, H, W) or (B, H, W, D)."""
    return tuple(x.shape[2:] if x.shape[1] == dim else x.shape[1:3])


def places(
    layer: nn.Module, call: LayerCall, products: Collection[int], heads: Heads
) -> tuple[tuple[str, ...], str, str]:
    """The arguments whose tokens q and k have, by name; or why a mixer that reads tokens cannot stand here.

    Where a token changes, exactly its own row of v must: the row also shows the order of joined streams.
    """
    arguments = arguments_of(layer, call.args, call.kwargs)
    n, m, dim = heads.q.shape[2], heads.k.shape[2], heads.q.shape[1] * heads.v.shape[3]
    streams = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim in (3, 4) and "mask" not in name
        and len(value) == len(heads.q) and dim in (value.shape[-1], value.shape[1] if value.ndim == 4 else 0)
    }  # fmt: skip
    if not streams:
        return (), "", f"has no input of {dim} channels with the batch of its queries"
    first, *others = streams
    counts = {name: as_tokens(value, dim).shape[1] for name, value in streams.items()}
    names: list[tuple[str, ...]] = [(first,)]
    if counts[first] == n == m:
        if others and counts[others[0]] == m and _row(layer, call, products, others[0], dim) == 1:
            return _checked(layer, call, products, (first,), others[0], dim)
    else:
        names = [
            pair
            for other in others
            for pair in ((first, other), (other, first))
            if counts[first] + counts[other] == n == m
        ]
        context = next((other for other in others if counts[first] == n and counts[other] == m), "")
        if context:
            return _checked(layer, call, products, (first,), context, dim)
    for joined in names:
        tokens, _, why_not = _checked(layer, call, products, joined, "", dim)
        if not why_not:
            return tokens, "", ""
    return (), "", f"mixes {n} queries and {m} keys, which are not its tokens one by one"


def _checked(
    layer: nn.Module, call: LayerCall, products: Collection[int], joined: tuple[str, ...], context: str, dim: int
) -> tuple[tuple[str, ...], str, str]:
    """The same names if each argument's second token is read into the row where it is expected alone."""
    arguments = arguments_of(layer, call.args, call.kwargs)
    before = 0
    for name in (context,) if context else joined:
        if _row(layer, call, products, name, dim) != before + 1:
            return (), "", f"reads keys or values from more than one token of {name}, or in another order"
        before += as_tokens(arguments[name], dim).shape[1]
    return joined, context, ""


def _row(layer: nn.Module, call: LayerCall, products: Collection[int], name: str, dim: int) -> int | None:
    """The one row of v that changes with the second token of an argument; None if it is not one row."""
    x = arguments_of(layer, call.args, call.kwargs)[name]
    changed = as_tokens(x, dim).clone()
    if changed.shape[1] < 2:
        return 1
    changed[:, 1] += x.std() * torch.randn(x.shape[-1] if x.ndim == 3 or x.shape[1] != dim else dim).to(x) + 1
    if x.ndim == 4:
        changed = changed.transpose(1, 2).reshape(x.shape) if x.shape[1] == dim else changed.reshape(x.shape)
    calls = (call, _with(layer, call, name, changed))
    values = [asked(layer, each, products)[1][0].value for each in calls]
    axis = head_axis_of(layer, values[0])
    moved = (rows(values[0], axis) - rows(values[1], axis)).abs().amax((0, 2))
    where = (moved > 1e-6 * (1 + moved.max())).nonzero().flatten().tolist()
    return where[0] if len(where) == 1 else None


def _with(layer: nn.Module, call: LayerCall, name: str, value: Tensor) -> LayerCall:
    """A call with another value for one argument, wherever that is the same tensor."""
    old = arguments_of(layer, call.args, call.kwargs)[name]
    args = tuple(value if part is old else part for part in call.args)
    return replace(call, args=args, kwargs={key: value if part is old else part for key, part in call.kwargs.items()})


def grid_of(
    spec: AttentionSpec, layer: nn.Module, call: LayerCall, question: Question
) -> tuple[tuple[int, ...] | None, int]:
    """The grid of the queries and the tokens before it: of a feature map, or of the model around where it fits."""
    x, count = tensors(tuple(arguments_of(layer, call.args, call.kwargs).values()))[0], question.query.shape[-2]
    if x.ndim == 4:
        grid = tuple(x.shape[2:]) if x.shape[2] * x.shape[3] == count else tuple(x.shape[1:3])
        return (grid, 0) if grid[0] * grid[1] == count else (None, 0)
    return grid_among(spec.grid, count)


def unread_parts(layer: nn.Module, call: LayerCall, products: Collection[int]) -> tuple[str, ...]:
    """The linear maps and norms of a layer that its output does not depend on, but through queries, keys and values."""
    layer = copy.deepcopy(layer)
    for weight in layer.parameters():
        weight.requires_grad_(True)
    named = dict(layer.named_parameters())
    grads: tuple[Tensor | None, ...] = (None,) * len(named)
    with mode(layer, False), torch.enable_grad(), Answering(lambda question: question.answer().detach(), products):
        outputs = [part.sum() for part in tensors(layer(*call.args, **call.kwargs)) if part.requires_grad]
        if outputs:
            grads = torch.autograd.grad(torch.stack(outputs).sum(), list(named.values()), allow_unused=True)
    dead = {name for name, grad in zip(named, grads, strict=True) if grad is None}
    parts = tuple(_dead_parts(layer, dead))
    try:
        leave_out(layer, parts)
        output_of(layer, call, Question.answer, products)
    except (AttributeError, RuntimeError, TypeError):  # the layer reads their weights itself
        return ()
    return parts


def leave_out(layer: nn.Module, names: Iterable[str]) -> None:
    """Take linear maps and norms whose outputs nobody reads out of a layer."""
    for name in names:
        above, _, key = name.rpartition(".")
        part = layer.get_submodule(name)
        unread = Unread(part.out_features) if isinstance(part, nn.Linear) else nn.Identity()
        setattr(layer.get_submodule(above), key, unread)


class Unread(nn.Module):
    """In the place of a linear map that nobody reads: zeros of its shape."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.out_features)


def _dead_parts(layer: nn.Module, dead: set[str]) -> Iterator[str]:
    """The linear maps and norms among the parts whose parameters are all dead."""
    for name, part in layer.named_modules():
        own = [f"{name}.{key}" for key, _ in part.named_parameters()]
        leaf = name and not any(part.children()) and (isinstance(part, nn.Linear) or "Norm" in type(part).__name__)
        if own and leaf and dead.issuperset(own):
            yield name
