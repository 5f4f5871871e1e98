"""Sequence parallelism as a style of torch's `parallelize_module`, and for all mixers of a model."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from polymix.errors import CapabilityError, OptionError, check_choice
from polymix.mixers.mixer import TokenMixer
from polymix.parallel.collectives import Processes
from polymix.parallel.layout import ORDERS
from polymix.parallel.mix import forward, refuse

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
        return module


def parallelize(model: M, mesh: DeviceMesh, *, order: str = "contiguous") -> M:
    """Split the sequence of every mixer of a model among the processes of a mesh; return the model.

    Raises:
        CapabilityError: a mixer cannot be split; nothing is changed, nothing was communicated.
        OptionError: the model has no mixers.
    """
    mixers: dict[str, Any] = {name: part for name, part in model.named_modules() if isinstance(part, TokenMixer)}
    if not mixers:
        raise OptionError("model", "a model without mixers", "mixers of polymix", "Convert its attention first.")
    for mixer in mixers.values():
        refuse(mixer, None, 0, {})
    for mixer in mixers.values():
        SequenceParallel(order=order)._apply(mixer, mesh)
    return model
