"""Models and weights without what torch.compile, processes and averaging put around them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

# What wrappers add to the names of weights: torch.compile, FSDP and checkpointing at any depth; nn.DataParallel,
# DistributedDataParallel and AveragedModel around the whole.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_OUTER, _AVERAGED = "module.", "n_averaged"


def bare(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names that they have without wrappers, in whatever order these were put around the model."""
    names = {key: ".".join(part for part in key.split(".") if part not in _WRAPPERS) for key in state}
    if any(name.startswith(_OUTER) for name in names.values()):
        names.pop(_AVERAGED, None)
    while names and all(name.startswith(_OUTER) for name in names.values()):
        names = {key: name.removeprefix(_OUTER) for key, name in names.items()}
    return {name: state[key] for key, name in names.items()}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, nn.DataParallel, DistributedDataParallel and AveragedModel, in any order."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.DataParallel, DistributedDataParallel, AveragedModel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
