"""The weights that a run starts from: those of another run, or of a converted model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix._io import one_line
from polymix.convert.saving.files import read
from polymix.errors import ResultsError

WEIGHTS = "model.pt"
_COUNTER = ".num_batches_tracked"  # of batch norm: no weight, and absent where it is frozen


def check_weights(folder: Path) -> None:
    """Raise what `load_weights` raises of a folder without usable weights. A model.pt is mapped, not read."""
    _read(folder, mmap=True)


def _read(folder: Path, *, mmap: bool = False) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """The weights in a folder of `polymix train` or of `save_pretrained`, and the layers that `convert` replaced.

    Raises ResultsError where there are none. With mmap, the numbers of a model.pt stay on disk until they are used.
    """
    if not (folder / WEIGHTS).is_file():
        content, weights = read(folder)
        return weights, content.get("layers") or {}
    try:
        state: dict[str, Tensor] = torch.load(folder / WEIGHTS, map_location="cpu", weights_only=True, mmap=mmap)
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise TypeError("not tensors by name")
    except Exception as error:  # whatever torch.load raises on a damaged file
        got = f"{folder / WEIGHTS}, which cannot be read ({one_line(error)[:200]})"
        raise ResultsError("init", got, "the weights of a model", "Train or convert it again.") from error
    return state, {}


def _of_the_host(name: str, layers: Mapping[str, Any]) -> str:
    """The name of a converted model's weight in a host that was built with the mixer, and so has no adapter."""
    layer = next((layer for layer in layers if name.startswith(f"{layer}.mixer.")), None)
    return name if layer is None else layer + name[len(f"{layer}.mixer") :]


def load_weights(
    model: nn.Module, folder: str | Path, heads: Sequence[str] = (), say: Callable[[str], None] = lambda text: None
) -> None:
    """Fill a model with the weights in a folder.

    Args:
        heads: prefixes of weights that depend on the classes, or that are new. Where their shapes differ or the folder
            has none, they keep their fresh values, and `say` is told.
    Raises:
        ResultsError: the folder has no weights, or others than the model's.
    """
    ours, (read_state, layers) = model.state_dict(), _read(Path(folder))
    theirs = {name if name in ours else _of_the_host(name, layers): value for name, value in read_state.items()
              if name in ours or not name.endswith(_COUNTER)}  # fmt: skip
    fresh = [name for name in ours if name.startswith(tuple(heads)) and heads
             and (name not in theirs or theirs[name].shape != ours[name].shape)]  # fmt: skip
    for name in sorted({*ours, *theirs} - set(fresh)):
        if name in theirs and name.startswith(tuple(heads)) and heads and name not in ours:
            continue
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
            got = "no such weight" if name not in theirs else f"{name} of shape {tuple(theirs[name].shape)}"
            allowed = "no such weight" if name not in ours else f"{name} of shape {tuple(ours[name].shape)}"
            cure = "Use the mixer and the sizes with which those weights were trained."
            raise ResultsError("init", f"{folder}, with {got}", allowed, cure)
    model.load_state_dict({name: theirs[name] for name in ours if name not in fresh}, strict=False)
    if fresh:
        say(f"Fresh weights for {', '.join(fresh)}: the shapes in {folder} differ, or it has none")
