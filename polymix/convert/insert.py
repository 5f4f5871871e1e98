"""`polymix.insert`: add a mixer as a residual block to a model without attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from polymix.convert.adapter import Adapter, Host
from polymix.convert.convert import fitted
from polymix.convert.insertion_point import KEY, describe, resolve, tensor_at
from polymix.convert.plan import config_of
from polymix.convert.report import LayerReport, parameters, table
from polymix.convert.spec import AttentionSpec
from polymix.errors import MAX_FLOAT, OptionError, PolymixError, ShapeError, check_choice, check_number
from polymix.mixers import MixerConfig, PolyNlMixer, TokenMixer
from polymix.mixers.modules import check_module, copied


def insert(
    model: nn.Module, at: str, mixer: str | MixerConfig, *, where: str = "before", input: Any = None,
    copy: bool = False, residual: bool = True, scale: float = 0.0,
) -> InsertionReport:  # fmt: skip
    """Add x + s · mixer(x), or mixer(x) alone, before or after the module `at`.

    The factor s starts at `scale`: at 0 the model first computes what it did before. It is Poly-NL's β, or the block's
    parameter `scale`. The model's own weights keep their names, so its checkpoints still load; the block's weights are
    below `at`, under "inserted_before" or "inserted_after". The block runs as a hook of the module. It takes feature
    maps (B, C, H, W) or tokens (B, N, C), mixes all tokens, and knows no masks and no causal order.

    Args:
        model: the model.
        at: name of a module. For a Sequential: its first module, or its last with `where="after"`.
        mixer: the mixer's name or config, such as "poly_nl:reduction=4".
        where: "before", on the module's first input, or "after", on its first output.
        input: an input of the model, as for `convert`. Needed with "after", and for mixers that need the grid.
        copy: insert into a copy (`report.model`) and leave the model unchanged.
        residual: False inserts mixer(x) without s and x, as in a squeeze-and-excitation block (mixer "se"), whose gate
            multiplies x itself. The model then computes something else from the start.
        scale: where s starts. At 0 a model keeps what it knows, and the block's weights learn only when s has left 0.
            At 1 a block that is needed learns sooner, and one that is not needed disturbs.
    Raises:
        OptionError, ShapeError: the block cannot be inserted. The model is unchanged.
    """
    check_module(model)
    if not isinstance(at, str):
        raise OptionError("at", repr(at), "the name of a module", "model.named_modules() lists them.")
    check_choice("where", where, ("before", "after"))
    check_choice("copy", copy, (True, False))
    check_choice("residual", residual, (True, False))
    check_number("scale", scale, -MAX_FLOAT, MAX_FLOAT, "a finite number", 1)
    if not residual and scale:
        raise OptionError(
            "scale", f"{scale} with residual=False", "0", "There is no s without the residual connection."
        )
    config = config_of(mixer, "mixer")
    model = copied(model, "copy") if copy else model
    name = resolve(model, at, where)
    module = model.get_submodule(name)
    try:
        x = None if input is None else tensor_at(model, module, where, input)
        attention = describe(config, Host(model, name), module, where, x)
        weight = next(iter([*module.parameters(), *model.parameters()]), torch.empty(()))
        built = fitted(config, attention).build(attention.dim, device=weight.device, dtype=weight.dtype)
    except PolymixError as error:
        argument = f"mixer, {where} {name} ({type(module).__name__}): {error.argument}"
        raise type(error)(argument, error.got, error.allowed, error.cure) from error
    return InsertionReport(model, name, where, Inserted(built, attention, residual, scale).train(module.training), x)


class Inserted(Adapter):
    """x + s · mixer(x) on a feature map (B, C, H, W) or tokens (B, N, C); s is Poly-NL's β or the parameter `scale`.

    Without `residual`, mixer(x).
    """

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, residual: bool = True, scale: float = 0.0) -> None:
        super().__init__(mixer, attention, nn.Identity())
        self.residual = residual
        if not residual:
            self.scale = None
        elif isinstance(mixer, PolyNlMixer):
            self.scale = None
            nn.init.constant_(mixer.beta, scale)
        else:
            weight = next(mixer.parameters())
            self.scale = nn.Parameter(torch.full((), scale, device=weight.device, dtype=weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.is_nested:
            got = "a nested tensor" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            cure = "Build the encoder with enable_nested_tensor=False." if isinstance(x, Tensor) else ""
            if isinstance(x, Proxy):
                cure = "Let the tracer take mixers as they are: leaf_modules=[polymix.Adapter]."
            raise ShapeError("x", got, "a plain tensor", cure)
        y = self.mix_map(x) if x.ndim == 4 else self.mix(x)
        if not self.residual:
            return y.to(x.dtype)
        return x + (y if self.scale is None else self.scale * y).to(x.dtype)


class InsertionReport:
    """What `polymix.insert` did. Printing it shows a table.

    model: the model with the block. block: the block. layers: one LayerReport, for the block. parameters: of the whole
    model, before and after.
    """

    def __init__(self, model: nn.Module, name: str, where: str, block: Inserted, x: Tensor | None) -> None:
        self.model, self.block, self.undone = model, block, False
        self._module, self._key = model.get_submodule(name), KEY.format(where)
        before = parameters(model)
        self._hook = attach(self._module, where, block)
        self.parameters = before, parameters(model)
        mixer, tokens = block.mixer, None if x is None else _size(x)
        flops = None if tokens is None else (0, mixer.cost(tokens).flops)
        fresh = tuple(key for key, _ in mixer.named_parameters())
        self.layers = (
            LayerReport(
                f"{where} {name}", "–", mixer.name, mixer.config.to_dict(), tokens, (0, parameters(block)), flops,
                0.0, {}, fresh, {}, None,
            ),
        )  # fmt: skip

    def undo(self) -> nn.Module:
        """Remove the block and return the original model."""
        if self.undone:
            raise OptionError(
                "report", "an insertion that was undone already", "one that is in place", "Insert the mixer again."
            )
        self._hook.remove()
        delattr(self._module, self._key)
        self.undone = True
        return self.model

    def to_dict(self) -> dict[str, Any]:
        return {"layers": [vars(layer) for layer in self.layers], "parameters": list(self.parameters)}

    def __str__(self) -> str:
        return "\n".join(table(self.layers, self.parameters))


def attach(module: nn.Module, where: str, block: Inserted) -> torch.utils.hooks.RemovableHandle:
    """Make the block a child of the module, which runs before or after it."""
    module.add_module(KEY.format(where), block)
    if where == "before":
        return module.register_forward_pre_hook(_before, with_kwargs=True)
    return module.register_forward_hook(_after)


# These look the block up by name, so that a copy of the module finds its own block.


def _before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (module.inserted_before(args[0]), *args[1:]), kwargs
    first, x = next(iter(kwargs.items()))
    return args, {**kwargs, first: module.inserted_before(x)}


def _after(module: Any, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (module.inserted_after(output[0]), *output[1:])
    return module.inserted_after(output)


def _size(x: Tensor) -> int:
    return math.prod(x.shape[2:]) if x.ndim == 4 else x.shape[1]
