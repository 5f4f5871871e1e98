"""Recording the calls of modules while a model runs, and making such a call again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from polymix.convert.adapter import Adapter, Host, adapter_for
from polymix.convert.adapters.libraries import examples_of
from polymix.convert.find import CONTEXTS, image_size, known_input
from polymix.convert.masks import Seen, seen_through
from polymix.convert.spec import AttentionSpec
from polymix.errors import InputError, OptionError, PolymixError, one_line

Call = Callable[[], Any]
EXACT, ROUNDINGS = 1e-3, 4  # difference up to which two layers are the same: this, or so many roundings of their type


@contextmanager
def on_calls(modules: Mapping[str, nn.Module], note: Callable[..., Any]) -> Iterator[None]:
    """After every call of one of the modules, call `note(name, module, args, kwargs, output)`.

    PyTorch's fast path for transformer layers is off meanwhile: it computes attention without calling the module.
    """
    with ExitStack() as stack, without_fast_path():
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(partial(note, name), with_kwargs=True).remove)
        yield


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Turn off PyTorch's fast path for transformer layers, which computes attention without calling its module."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@dataclass(frozen=True)
class LayerCall:
    """One call of an attention layer.

    args, kwargs: copies of its arguments. output: of the part that a mixer replaces. grid: of the host's feature map in
    this call, where there is one. several: whether the layer returned more than its output, such as attention weights.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor
    grid: tuple[int, ...] | None
    several: bool = False

    def repeat(self, adapter: Adapter) -> Tensor:
        """The output of an adapter for the same call, or of its mixer where that replaces a part of the layer."""
        outputs: dict[str, Any] = {}

        def note(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            outputs[name] = output

        before, adapter.current_grid = adapter.current_grid, self.grid
        try:
            with on_calls({"": adapter.mixer if adapter.replaced_part else adapter}, note):
                adapter(*self.args, **self.kwargs)
        finally:
            adapter.current_grid = before
        y = tensors(outputs[""])[0]
        if adapter.replaced_part and adapter.channel_axis == 1:  # that part has its channels before its tokens
            y = y.transpose(1, 2).reshape(self.output.shape)
        return y


def record_layers(model: nn.Module, layers: Mapping[str, nn.Module], inputs: Any) -> dict[str, LayerCall]:
    """Run the model on `inputs` in evaluation mode, without gradients, and record the first call of each layer.

    inputs: a tensor, a tuple of arguments, or a dict of keyword arguments. Layers that are not called are missing.
    """
    calls: dict[str, LayerCall] = {}
    outputs: dict[str, Any] = {}
    grids: dict[str, tuple[int, ...]] = {}

    def note_grid(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        grids[name] = adapters[name].grid_of(module, args, output)

    def note_output(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outputs[name] = output

    def note_call(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if name not in calls:
            several = len(tensors(output)) > 1
            (output, *_), _ = copied_arguments(tuple(tensors(outputs[name])[:1]), {})
            calls[name] = LayerCall(*copied_arguments(args, kwargs), output, grids.get(name), several)

    adapters = {name: _adapter(module) for name, module in layers.items()}
    sources = {name: adapters[name].feature_map(module, Host(model, name)) for name, module in layers.items()}
    maps = {name: source for name, source in sources.items() if source is not None}
    parts = {name: module.get_submodule(adapters[name].replaced_part) for name, module in layers.items()}
    with ExitStack() as stack:
        stack.enter_context(mode(model, False))
        stack.enter_context(torch.no_grad())
        # layers last: one that is its own part notes its output before its call
        for modules, note in ((maps, note_grid), (parts, note_output), (dict(layers), note_call)):
            stack.enter_context(on_calls(modules, note))
        run(model, inputs)
    return calls


def _shapes(inputs: Any) -> str:
    shapes = ", ".join(f"{tuple(part.shape)} of {str(part.dtype).removeprefix('torch.')}" for part in tensors(inputs))
    return f"{type(inputs).__name__} with {shapes}" if not isinstance(inputs, Tensor) else f"a tensor {shapes}"


def expected_input(model: nn.Module) -> str:
    """What the model takes, in words, as far as it can be read from its first layer."""
    size, dtype = image_size(model), next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    kind = "" if dtype is None else f" of {str(dtype).removeprefix('torch.')}"
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            return f"token ids (B, N) below {part.num_embeddings}"
        if isinstance(part, nn.Conv2d):
            height, width = ("H", "W") if size is None else size
            return f"images (B, {part.in_channels}, {height}, {width}){kind}"
        if isinstance(part, (nn.MultiheadAttention, nn.LayerNorm)):
            width = part.embed_dim if isinstance(part, nn.MultiheadAttention) else part.normalized_shape[-1]
            return f"tokens (B, N, {width}){kind}"
        if isinstance(part, nn.Linear):
            return f"a tensor (…, {part.in_features}){kind}"
    return "an input that the model takes"


def record_on_an_example(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, LayerCall]:
    """`record_layers` on the first input that the model takes, of its library's or images of the size that it states.

    Raises OptionError where it takes none.
    """
    reason = ""
    for example in _examples(model):
        try:
            return record_layers(model, layers, example)
        except InputError as error:
            reason = f"; on a small example, {error.got}"
    got = f"None for {type(model).__name__}, whose layers are read from a call{reason}"
    raise OptionError("input", got, "an input of the model: a tensor, a tuple or a dict", "Pass input=.")


def _examples(model: nn.Module) -> Iterator[Any]:
    yield from examples_of(model)
    with suppress(OptionError):
        yield known_input(model, 2, torch.Generator().manual_seed(0))  # the caller's random numbers stay as they are


def _adapter(module: nn.Module) -> type[Adapter]:
    kind = adapter_for(module)
    assert kind is not None
    return kind


def with_call(spec: AttentionSpec, module: nn.Module, call: LayerCall) -> AttentionSpec:
    """The spec with what a call shows beyond it: causal order, a context, masks, the grid."""
    arguments = arguments_of(module, call.args, call.kwargs)
    x = _tokens(arguments)
    axis = _axis(module, x)
    context = next((arguments[name] for name in CONTEXTS if isinstance(arguments.get(name), Tensor)), x)
    cross = not same_tokens(context, x)
    value = arguments.get("value") if spec.own_values is None else None
    own = not same_tokens(value, context) if isinstance(value, Tensor) else spec.own_values
    kind = adapter_for(module)
    if kind is None or kind.checks_masks:
        seen = seen_through(module, arguments, x.shape[axis], context.shape[axis])
    else:
        seen = Seen(False, None)
    return replace(
        spec, causal=spec.causal or (seen.causal and not cross), cross=spec.cross or cross,
        masks=spec.masks | ({seen.kind} if seen.kind else set()), grid=spec.grid or call.grid, own_values=own,
    )  # fmt: skip


def difference(ours: Tensor, theirs: Tensor) -> float:
    """‖ours − theirs‖ / ‖theirs‖, in float64."""
    return ((ours - theirs).double().norm() / theirs.double().norm().clamp_min(1e-30)).item()


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two outputs are those of one layer, or of two readings of it; what is another layer differs by 0.1."""
    return difference(ours, theirs) < max(EXACT, ROUNDINGS * torch.finfo(theirs.dtype).eps)


def same_tokens(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, as x + positions does if it is computed twice."""
    return a is b or (a.shape == b.shape and torch.equal(a, b))


def token_count(module: nn.Module, call: LayerCall) -> int | None:
    """How many tokens a call mixes; None where the input is a feature map."""
    x = _tokens(arguments_of(module, call.args, call.kwargs))
    return x.shape[_axis(module, x)] if x.ndim < 4 else None


def arguments_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    return {**bound, **bound.get("kwargs", {})}


def _tokens(arguments: Mapping[str, Any]) -> Tensor:
    return next(t for t in arguments.values() if isinstance(t, Tensor) and t.is_floating_point())


def _axis(module: nn.Module, x: Tensor) -> int:
    return 0 if x.ndim == 2 else int(getattr(module, "batch_first", True))


def copied_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of a call's arguments, without a cache, which would grow with every repetition.

    A tensor that occurs several times is copied once.
    """
    copies: dict[int, Tensor] = {}
    args = tuple(None if _caches(value) else value for value in args)
    fresh = {key: None if key.startswith("past_key") or _caches(value) else value for key, value in kwargs.items()}
    with torch.inference_mode(False):  # else they could not take part in a training step
        return tree_map_only(Tensor, lambda t: copies.setdefault(id(t), t.detach().clone()), (args, fresh))


def _caches(value: Any) -> bool:
    """Whether an argument is a cache of transformers, under whatever name."""
    return hasattr(value, "get_seq_length")


def call_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> Call:
    """A function that calls `module` without gradients, or with `training` forward and backward; it keeps nothing."""
    if not training:

        def forward() -> Any:
            with torch.inference_mode():
                return module(*args, **kwargs)

        return forward
    inputs = [t for t in (*module.parameters(), *tensors((args, kwargs))) if t.requires_grad]
    cotangents = Cotangents()

    def both() -> list[Tensor]:
        outputs = [t for t in tensors(module(*args, **kwargs)) if t.requires_grad]
        grads = torch.autograd.grad(outputs, inputs, list(map(cotangents, outputs)), allow_unused=True)
        return [*outputs, *(g for g in grads if g is not None)]

    return both


class Cotangents:
    """The gradients by which outputs are differentiated in timings: fixed random numbers, drawn once for each shape.

    A sum, or a sum of squares, of outputs that end in a norm has the gradient zero, and a backward pass of zeros is no
    measure of one.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Tensor] = {}

    def __call__(self, output: Tensor) -> Tensor:
        key = (output.shape, output.dtype, output.device)
        if key not in self._known:
            drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
            self._known[key] = drawn.to(output.device, output.dtype)
        return self._known[key]


def run(model: nn.Module, inputs: Any) -> Any:
    """Call the model with a tensor, a tuple of arguments, or a dict of keyword arguments.

    Raises:
        InputError: the model fails on them.
    """
    try:
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
    except PolymixError:
        raise
    except Exception as error:  # whatever a model raises for inputs that it does not take
        got = f"{_shapes(inputs)}, on which {type(model).__name__} fails with {one_line(error)[:200]}"
        raise InputError("input", got, expected_input(model), "Pass what you call the model with.") from error


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in a nested structure, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put the module in training or evaluation mode; afterwards each part is in the mode it was in."""
    before = {part: part.training for part in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for part, was in before.items():
            part.training = was
