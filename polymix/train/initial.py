"""The weights that a run starts from: fresh ones as a host is published, those of another run or a converted model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from polymix.convert.saving.files import WEIGHTS as SAFE_WEIGHTS
from polymix.convert.saving.files import read, read_tensors
from polymix.convert.weight_files import load_safetensors
from polymix.errors import ResultsError, reason_of
from polymix.files import regular
from polymix.mixers import TokenMixer

WEIGHTS = "model.pt"  # in a run's folder
NO_LAYERS: Mapping[str, Any] = MappingProxyType({})
_COUNTER = ".num_batches_tracked"  # of batch norm: no weight, and absent where it is frozen


class FoundWeights(NamedTuple):
    """The weights in a folder. layers: by name those that `convert` replaced."""

    state: dict[str, Tensor]
    layers: Mapping[str, Any] = NO_LAYERS


def host_linears(model: nn.Module) -> Iterator[nn.Linear]:
    """The linear layers of a host and of its attention, but not those of other mixers."""
    for layer in _host_layers(model):
        if isinstance(layer, nn.Linear):
            yield layer


def _host_layers(model: nn.Module) -> Iterator[nn.Module]:
    for layer in model.children():
        if not isinstance(layer, TokenMixer) or layer.config.is_attention:
            yield layer
            yield from _host_layers(layer)


def start_as_normal(model: nn.Module) -> None:
    """Weights of a deviation of 0.02 and biases of 0 in linear layers and convolutions of a host and its attention."""
    for layer in _host_layers(model):
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def start_as_xavier(model: nn.Module) -> None:
    """Xavier's uniform weights and biases of 0 in all of `host_linears`: U(-a, a), a² = 6 / (inputs + outputs)."""
    for layer in host_linears(model):
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def start_as_pytorch(model: nn.Module) -> None:
    """What PyTorch gives a linear layer, in all of `host_linears`: weights and biases U(-a, a), a² = 1 / inputs."""
    for layer in host_linears(model):
        nn.Linear.reset_parameters(layer)


def check_header(file: Path, argument: str) -> None:
    """Raise ResultsError for a file of weights that is damaged, without reading the numbers; one may be missing."""
    if not file.exists():
        return
    try:
        if file.suffix == ".safetensors":
            with load_safetensors().safe_open(regular(file), framework="pt"):
                return
        read_tensors(file, mmap=True)
    except Exception as error:  # whatever safetensors raises on a damaged file
        got = f"{file}, which cannot be read ({reason_of(error)[:200]})"
        raise ResultsError(argument, got, "the weights of a model", "Train it again.") from error


def read_weights(folder: Path, *, mmap: bool = False) -> FoundWeights:
    """The weights in a folder of `polymix train` or of `save_pretrained`.

    Raises ResultsError where there are none. With mmap, the numbers of a model.pt stay on disk until they are used.
    """
    if not (folder / WEIGHTS).exists():
        if not (folder / SAFE_WEIGHTS).exists():
            got, allowed = f"{folder}, without {WEIGHTS} and {SAFE_WEIGHTS}", "a folder of a trained or converted model"
            raise ResultsError("init", got, allowed, "Check the path.")
        content, weights = read(folder)
        return FoundWeights(weights, content.get("layers") or {})
    try:
        state: dict[str, Tensor] = read_tensors(folder / WEIGHTS, mmap=mmap)
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise TypeError("not tensors by name")
    except Exception as error:  # whatever torch.load raises on a damaged file
        raise unreadable(folder / WEIGHTS, error) from error
    return FoundWeights(state)


def unreadable(place: Path, error: Exception) -> ResultsError:
    """The error about a file or folder of `init` that cannot be read."""
    got = f"{place}, which cannot be read ({reason_of(error)[:200]})"
    return ResultsError("init", got, "the weights of a model", "Train or convert it again.")


def _of_the_host(name: str, layers: Mapping[str, Any]) -> str:
    """The name of a converted model's weight in a host that was built with the mixer, and so has no adapter."""
    layer = next((layer for layer in layers if name.startswith(f"{layer}.mixer.")), None)
    return name if layer is None else layer + name[len(f"{layer}.mixer") :]


def load_weights(
    model: nn.Module, folder: str | Path, heads: Sequence[str] = (), say: Callable[[str], None] = lambda text: None,
    found: FoundWeights | None = None,
) -> None:  # fmt: skip
    """Fill a model with the weights in a folder.

    Args:
        heads: prefixes of weights that depend on the classes, or that are new. Where their shapes differ or the folder
            has none, they keep their fresh values, and `say` is told.
        found: what `read_weights` returned of the folder; None: it is read now.
    Raises:
        ResultsError: the folder has no weights, or others than the model's.
    """
    ours, (read_state, layers) = model.state_dict(), read_weights(Path(folder)) if found is None else found
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
