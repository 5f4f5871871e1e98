"""Sequence parallelism as a style of torch's `parallelize_module`, and for all mixers of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from polymix.errors import CapabilityError, OptionError, check_choice
from polymix.mixers.mixer import TokenMixer, is_shared
from polymix.parallel.collectives import Processes
from polymix.parallel.draws import drop_apart
from polymix.parallel.layout import ORDERS
from polymix.parallel.mix import forward, prefill, refuse

M = TypeVar("M", bound=nn.Module)


class SequenceParallel(ParallelStyle):
    """A mixer whose sequence is split among the processes of a mesh: local tokens in, local tokens out.

    parallelize_module(model, mesh["cp"], {"blocks.*.attn": SequenceParallel()})

    Weights are whole on every process, and their gradients must be summed over the mesh, as data parallelism does.

    Args:
        order: "contiguous" or "head_tail", which process holds which tokens; `shard` splits a batch alike.
    """

    def __init__(self, *, order: str = "contiguous") -> None:
        check_choice("order", order, ORDERS)
        self.order = order

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, TokenMixer):
            raise OptionError("module", type(module).__name__, "a mixer of polymix", "Name the mixers in the plan.")
        refuse(module, None, 0, {})
        if module.capabilities.sequence == "channels" and device_mesh.size() > module.dim:
            raise CapabilityError("mesh", f"{device_mesh.size()} processes for {module.dim} channels",
                                  f"at most {module.dim}", "")  # fmt: skip
        processes = Processes(device_mesh.get_group())
        module.forward = partial(forward, module, processes, self.order)  # type: ignore[method-assign]
        module.prefill = partial(prefill, module, processes, self.order)  # type: ignore[method-assign]
        return module


def parallelize(model: M, mesh: DeviceMesh, *, order: str = "contiguous") -> M:
    """Split the sequence of every mixer of a model among the processes of a mesh; return the model.

    Softmax mixers gather keys and values. Dropout draws apart on each process. The rest of the model must treat each
    token alone: positions, losses and means over tokens are whose who calls it (`positions`, `mean_loss`, `gather`).

    Raises:
        CapabilityError: a mixer or another layer cannot be split; nothing is changed, nothing was communicated.
        OptionError: the model has no mixers, or the order is unknown.
    """
    style, mixers = SequenceParallel(order=order), check_split(model)
    inside = {id(part) for mixer in mixers for part in mixer.modules()}
    for mixer in mixers:
        style._apply(mixer, mesh)
    for part in model.modules():
        if isinstance(part, nn.Dropout) and id(part) not in inside:
            drop_apart(part, Processes(mesh.get_group()))
    return model


def check_split(model: nn.Module) -> list[TokenMixer]:
    """The mixers of a model. Raises what `parallelize` raises about it."""
    mixers = [part for part in model.modules() if isinstance(part, TokenMixer)]
    if not mixers:
        raise OptionError("model", "a model without mixers", "mixers of polymix", "Convert its attention first.")
    for mixer in mixers:
        refuse(mixer, None, 0, {})
    for name, part in model.named_modules():
        _refuse_layer(name, part)
    return mixers


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Within it, the model computes whole sequences here, as before `parallelize`: to decode on one process."""
    held = [(part, {name: vars(part).pop(name) for name in ("forward", "prefill")})
            for part in model.modules() if isinstance(part, TokenMixer) and is_shared(part)]  # fmt: skip
    try:
        yield
    finally:
        for part, functions in held:
            vars(part).update(functions)


def _refuse_layer(name: str, part: nn.Module) -> None:
    """Raise CapabilityError for a layer outside the mixers that mixes tokens, as far as it can be known."""
    inside = any(isinstance(other, TokenMixer) for other in part.modules())
    got = getattr(part, "unsplit", None)  # of polymix's own layers: why its sequence cannot be split
    if type(part).__name__.endswith("Attention") and not inside and next(part.children(), None) is not None:
        got = f"a {type(part).__name__}, which sees the tokens of its own process alone"
    if got:
        cure = "Convert it, to softmax for the same outputs, or run it on one process."
        raise CapabilityError(f"model.{name}", got, "layers that treat each token alone, and mixers", cure)
