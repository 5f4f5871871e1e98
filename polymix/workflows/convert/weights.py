"""Files of weights, and how they are put into a model: every key of both, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.saving.files import load_safetensors
from polymix.convert.saving.rebuild import shape
from polymix.errors import OptionError

_WRAPPERS = ("module.", "_orig_mod.")  # of nn.DataParallel and its kin, of torch.compile
_ALLOWED = "a state dict in a .safetensors file, or one that torch.save wrote"


def read_state(path: Path) -> dict[str, Tensor]:
    """The state dict in a file, or under "state_dict" or "model" in it; no code of the file is run."""
    if not path.is_file():
        raise OptionError("--weights", path, "an existing file", "Check the path.")
    try:
        if path.suffix == ".safetensors":
            state: Any = load_safetensors().torch.load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        got = f"{path}, which holds other things than weights, or is no file of torch.save's"
        cure = "Nothing but tensors is read: save model.state_dict()."
        raise OptionError("--weights", got, _ALLOWED, cure) from error
    except Exception as error:  # whatever a damaged file makes of them
        got = f"{path}, which cannot be read ({' '.join(str(error).split('.')[0].split())})"
        raise OptionError("--weights", got, _ALLOWED, "Fetch it again, or save model.state_dict().") from error
    for key in ("state_dict", "model"):
        state = state[key] if isinstance(state, Mapping) and isinstance(state.get(key), Mapping) else state
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise OptionError("--weights", f"{path}, which holds no state dict", _ALLOWED, "Save model.state_dict().")
    for prefix in _WRAPPERS:
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return dict(state)


def classes_of(model: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """How many classes the head of a state dict has, where it is another head than the model's."""
    name, head = next(((n, p) for n, p in reversed([*model.named_modules()]) if isinstance(p, nn.Linear)), ("", None))
    saved = state.get(f"{name}.weight")
    other = head is not None and saved is not None and saved.ndim == 2 and len(saved) != head.out_features
    return len(saved) if other and saved is not None else None


def fill(model: nn.Module, state: Mapping[str, Tensor], path: str) -> None:
    """The state dict into the model, if it is this model's."""
    own = model.state_dict()
    missing, foreign = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    wrong = [key for key in own.keys() & state.keys() if shape(own[key]) != shape(state[key])]
    if missing or foreign or wrong:
        parts = [f"{len(missing)} missing, such as {missing[0]}"] if missing else []
        parts += [f"{len(foreign)} that it has not, such as {foreign[0]}"] if foreign else []
        parts += [f"{key} of shape {shape(state[key])} instead of {shape(own[key])}" for key in sorted(wrong)[:1]]
        got, allowed = f"{path}: {'; '.join(parts)}", f"the weights of this {type(model).__name__}"
        raise OptionError("--weights", got, allowed, "Check --model; the converted are folders, which it takes.")
    model.load_state_dict(state)
