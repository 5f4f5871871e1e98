"""Loading a file of weights into a model, also for another number of classes or another image size."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.convert.saving.files import read_tensors
from polymix.convert.saving.rebuild import shape
from polymix.convert.saving.unwrapping import bare, unwrapped
from polymix.convert.weight_files import load_safetensors
from polymix.errors import OptionError, reason_of

KEYS = ("state_dict_ema", "model_ema", "state_dict", "model")  # where checkpoints keep weights; averaged ones first
_COMPUTED_BUFFERS = ("relative_position_index", "relative_coords_table", "attn_mask")
_TABLE = "relative_position_bias_table"
_FILE = "a state dict, in a .safetensors file or written by torch.save"
_MAX_PREFIX_TOKENS = 8  # more class and register tokens than any model has


@dataclass(frozen=True)
class LoadedWeights:
    """What `load_weights` did.

    key: where in the file the weights were, such as "state_dict_ema"; "" for a plain state dict. new_head: parameters
    of the classifier that have another number of classes in the file, or are missing there; they keep the model's own
    values, which are untrained. classes: in the file (None: it has no head) and in the model, for a new head. resized:
    positions that were interpolated, with their shapes before and after.
    """

    key: str = ""
    new_head: tuple[str, ...] = ()
    classes: tuple[int | None, int] | None = None
    resized: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    def __str__(self) -> str:
        """Sentences about what differs from the file; empty where nothing does."""
        sentences = [f"Read the weights under {self.key!r}."] if self.key.endswith("_ema") else []
        if self.classes is not None:
            old, new = self.classes
            was = "the weights have none" if old is None else f"the weights have one for {old:,}"
            sentences.append(f"The head for {new:,} classes is new ({was}): {', '.join(self.new_head)}.")
        sentences += [f"{name} was resized from {_size(old)} to {_size(new)}." for name, old, new in self.resized]
        return " ".join(sentences)


def load_weights(model: nn.Module, file: str | os.PathLike[str], *, adapt: bool = False) -> LoadedWeights:
    """Load a file of weights into a model, in place.

    The file is a `.safetensors` file or one from `torch.save`: a state dict, or a checkpoint with one under
    `state_dict_ema`, `model_ema`, `state_dict` or `model`, in this order, as timm, DeiT and Lightning write them.
    Prefixes of nn.DataParallel, torch.compile and the like are removed, whatever their order. Weights in the form of an
    original repository are renamed by timm where it knows them. No code in the file is run.

    Args:
        model: the model.
        file: the file.
        adapt: also load weights for another number of classes or another image size: the classifier keeps the model's
            own values, and learned positions are interpolated (bicubic). For image models.
    Returns:
        What differs from the file.
    Raises:
        OptionError: the file cannot be read or has other weights than the model. The model is not changed.

    Example:
        model = timm.create_model("deit_tiny_patch16_224", num_classes=4, img_size=256)
        print(polymix.load_weights(model, "deit_tiny_patch16_224.pth", adapt=True))
    """
    if not isinstance(model, nn.Module):
        raise OptionError("model", type(model).__name__, "a torch.nn.Module", "")
    state, key = read_state(Path(file), "file")
    return fill(unwrapped(model), state, str(file), adapt=adapt, key=key, argument="file")


def read_state(path: Path, argument: str = "--weights") -> tuple[dict[str, Tensor], str]:
    """The state dict in a file, and the key that it was under ("" for none). No code in the file is run."""
    if not path.is_file():
        raise OptionError(argument, path, "an existing file", "Check the path.")
    try:
        if path.suffix == ".safetensors":
            state: Any = load_safetensors().torch.load_file(path)
        else:
            state = read_tensors(path)
    except Exception as error:  # whatever they raise for a damaged file
        got = f"{path}, which cannot be read ({reason_of(error).split('. ')[0]})"
        raise OptionError(argument, got, _FILE, "Fetch it again, or save model.state_dict().") from error
    path_of_keys: list[str] = []
    while isinstance(state, Mapping):
        key = next((name for name in KEYS if isinstance(state.get(name), Mapping)), None)
        if key is None:
            break
        state = state[key]
        path_of_keys.append(key)
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise OptionError(argument, f"{path}, which holds no state dict", _FILE, "Save model.state_dict().")
    return bare(state), next((key for key in path_of_keys if key.endswith("_ema")), "".join(path_of_keys[-1:]))


def head_of(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """The name and module of a classifier's last linear layer; None where there is none."""
    linear = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    return linear[-1] if linear else None


def saved_classes(model: nn.Module, state: Mapping[str, Tensor]) -> int | None:
    """The number of classes in a state dict, where it has the model's head with another number."""
    head = head_of(model)
    saved = None if head is None else state.get(f"{head[0]}.weight")
    if head is None or saved is None or saved.ndim != 2 or len(saved) == head[1].out_features:
        return None
    return len(saved)


def fill(
    model: nn.Module, state: Mapping[str, Tensor], source: str, *, adapt: bool = False, key: str = "",
    argument: str = "--weights",
) -> LoadedWeights:  # fmt: skip
    """Load a state dict into the model; see `load_weights`. source: where it comes from, for errors."""
    own = model.state_dict()
    state = {name: value for name, value in state.items() if name in own or not name.endswith(_COMPUTED_BUFFERS)}
    if own.keys() != state.keys():
        state = _renamed(model, state)
    missing, foreign = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    wrong = sorted(name for name in own.keys() & state.keys() if shape(own[name]) != shape(state[name]))
    fitted = {name: value for name, value in state.items() if name in own and name not in wrong}
    new_head: list[str] = []
    classes: tuple[int | None, int] | None = None
    resized: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    if adapt:
        new_head, classes = _head_weights(model, state, (*missing, *wrong))
        for name in wrong:
            value = None if name in new_head else resample_positions(name, state[name], tuple(own[name].shape))
            if value is not None:
                fitted[name] = value
                resized.append((name, tuple(state[name].shape), tuple(own[name].shape)))
        done = {*new_head, *(name for name, *_ in resized)}
        missing, wrong = ([name for name in names if name not in done] for names in (missing, wrong))
    lost = [name for name in (*missing, *wrong) if not name.endswith(_COMPUTED_BUFFERS)]
    if foreign or lost:
        parts = [f"{len(missing)} missing, such as {missing[0]}"] if missing else []
        parts += [f"{len(foreign)} unknown, such as {foreign[0]}"] if foreign else []
        parts += [f"{name} of shape {shape(state[name])} instead of {shape(own[name])}" for name in wrong[:1]]
        got, allowed = f"{source}: {'; '.join(parts)}", f"the weights of this {type(model).__name__}"
        cure = "Check --model. A converted model is a folder: pass that as --model."
        if argument != "--weights":
            cure = "Check the model." if adapt else "Check the model, or pass adapt=True for other classes or sizes."
        raise OptionError(argument, got, allowed, cure)
    model.load_state_dict({**own, **fitted})
    return LoadedWeights(key, tuple(new_head), classes, tuple(resized))


def _renamed(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of an original repository under the names that timm gives them, where the model's file knows how."""
    module = type(model).__module__
    rename = vars(sys.modules[module]).get("checkpoint_filter_fn") if module.startswith("timm.models.") else None
    if rename is None:
        return state
    try:
        with torch.no_grad():
            renamed = rename(dict(state), model)
    except Exception:  # it is made for the weights of one origin only, and fails in any way on others
        return state
    tensors = {name: value for name, value in renamed.items() if isinstance(value, Tensor)}
    # positions as they were: they are resized here for every library, and reported
    return {name: state.get(name, value) if _positions(name) else value for name, value in tensors.items()} or state


def _head_weights(
    model: nn.Module, state: Mapping[str, Tensor], names: Collection[str]
) -> tuple[list[str], tuple[int | None, int] | None]:
    """Those weights that belong to the classifier, and its classes in the file and in the model.

    They differ in the number of classes alone, or are not in the file.
    """
    head = head_of(model)
    if head is None:
        return [], None
    ours, saved = head[1].out_features, state.get(f"{head[0]}.weight")
    theirs = None if saved is None else len(saved)
    linear = [part for part in model.modules() if isinstance(part, nn.Linear) and part.out_features == ours]
    heads = {id(p) for part in linear for p in part.parameters(recurse=False)}
    head_names = []
    for name, own in model.named_parameters():
        if name in names and id(own) in heads:
            value = state.get(name)
            if value is None:
                head_names += [name] if saved is None else []
            elif value.ndim == own.ndim and len(value) == theirs and value.shape[1:] == own.shape[1:]:
                head_names.append(name)
    return head_names, (theirs, ours) if head_names else None


@torch.no_grad()
def resample_positions(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    """Learned positions, or a table of relative ones, of a square grid, interpolated to another square grid.

    Shapes (1, N, D) and (N, D). Rows that are not of the grid are kept: class tokens, which come first, and in a table
    of relative positions the rows that come last. None where these are no positions of a square grid.
    """
    table = name.endswith(_TABLE)
    if not _positions(name) or value.ndim not in (2, 3) or len(shape) != value.ndim:
        return None
    if value.shape[-1] != shape[-1] or (value.ndim == 3 and (len(value), shape[0]) != (1, 1)):
        return None
    old, new = value.shape[-2], shape[-2]
    squares = (
        (extra, math.isqrt(old - extra), math.isqrt(new - extra))
        for extra in range(min(_MAX_PREFIX_TOKENS, old - 1, new - 1) + 1)
    )
    extra, before, after = next(
        ((extra, a, b) for extra, a, b in squares if (a * a, b * b) == (old - extra, new - extra)), (0, 0, 0)
    )
    if not before:
        return None
    rows = value.reshape(old, -1)
    others, grid = (rows[old - extra :], rows[: old - extra]) if table else (rows[:extra], rows[extra:])
    picture = grid.float().t().reshape(1, -1, before, before)
    picture = F.interpolate(picture, size=(after, after), mode="bicubic", antialias=True, align_corners=False)
    grid = picture.flatten(2)[0].t().to(value.dtype)
    return torch.cat((grid, others) if table else (others, grid)).reshape(shape)


def _positions(name: str) -> bool:
    return "pos" in name.rpartition(".")[2] or "pos" in name.rpartition(".")[0].rpartition(".")[2]


def _size(sizes: Iterable[int]) -> str:
    return " × ".join(f"{size:,}" for size in sizes)
