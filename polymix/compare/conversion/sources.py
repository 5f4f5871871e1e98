"""Models as people name them: timm/NAME, a folder, file.py:function."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from polymix.compat import cure_torchvision
from polymix.convert import load_pretrained
from polymix.errors import MissingExtraError, OptionError, nearest_first
from polymix.lens.load import called

ALLOWED = "timm/NAME, torchvision/NAME, a folder that transformers or polymix saved, or file.py:function"


class Source(NamedTuple):
    """A model, what it may be called with (None: not known), and whether its weights are trained ones."""

    model: nn.Module
    input: Any
    trained: bool


def load_model(name: str, weights: Path | None = None, classes: int | None = None) -> Source:
    """The model that `name` names, with the state dict of `weights`. `classes`: of its head, where it can be chosen.

    Nothing is downloaded: a model by name alone has fresh weights.
    """
    source = _load(name, classes if weights is None else None)
    if weights is None:
        return source
    load_weights(source.model, weights)
    return source._replace(trained=True)


def _load(name: str, classes: int | None) -> Source:
    library, _, rest = name.partition("/")
    if ".py:" in name:
        built = called(name, {})
        parts = built if isinstance(built, tuple) else (built, None)
        if len(parts) != 2 or not isinstance(parts[0], nn.Module):
            got = f"{name}, which returns {type(built).__name__}"
            raise OptionError("--model", got, "a function that returns a model, or (model, input)", "")
        return Source(parts[0], parts[1], True)  # whoever built it knows
    if Path(name).is_dir():
        return _folder(Path(name))
    if library in _LIBRARIES and rest:
        return Source(_LIBRARIES[library](rest, {} if classes is None else {"num_classes": classes}), None, False)
    raise OptionError("--model", repr(name), ALLOWED, "Try timm/deit_tiny_patch16_224.")


def _timm(name: str, options: dict[str, Any]) -> nn.Module:
    cure_torchvision()
    try:
        import timm
    except ImportError as error:
        raise MissingExtraError("timm", "no such package", "pip install 'polymix[vision]'") from error
    if not timm.is_model(name):
        known = nearest_first(name, timm.list_models())[:5]
        raise OptionError("--model", f"timm/{name}", f"a model of timm, such as {', '.join(known)}", "")
    return timm.create_model(name, pretrained=False, **options)


def _torchvision(name: str, options: dict[str, Any]) -> nn.Module:
    cure_torchvision()
    try:
        models: Any = importlib.import_module("torchvision.models")
    except ImportError as error:
        raise MissingExtraError("torchvision", "no such package", "pip install torchvision") from error
    if name not in models.list_models():
        known = nearest_first(name, models.list_models())[:5]
        raise OptionError("--model", f"torchvision/{name}", f"a model of torchvision, such as {', '.join(known)}", "")
    return models.get_model(name, weights=None, **options)


_LIBRARIES: dict[str, Callable[[str, dict[str, Any]], nn.Module]] = {"timm": _timm, "torchvision": _torchvision}


def _folder(folder: Path) -> Source:
    """What polymix, or transformers, saved there."""
    config = folder / "config.json"
    try:
        content = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError("--model", f"{folder}, whose config.json cannot be read ({error})", ALLOWED, "") from error
    if content.get("library_name") == "polymix":
        return Source(load_pretrained(folder), None, True)
    cure_torchvision()
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", "no such package", "pip install 'polymix[text]'") from error
    kinds = [getattr(transformers, kind, None) for kind in content.get("architectures") or ()]
    if not kinds or kinds[0] is None:
        got = f"{folder}, whose config.json names no architecture of transformers"
        raise OptionError("--model", got, ALLOWED, "")
    return Source(kinds[0].from_pretrained(folder, local_files_only=True), None, True)


def load_weights(model: nn.Module, path: Path) -> None:
    """A state dict from a .safetensors file or one that torch.save wrote, every key of it and of the model."""
    if not path.is_file():
        raise OptionError("--weights", path, "an existing file", "Check the path.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes of them
        raise OptionError("--weights", f"{path}, which cannot be read ({error})", "a state dict", "") from error
    for key in ("state_dict", "model"):
        state = state[key] if isinstance(state, Mapping) and isinstance(state.get(key), Mapping) else state
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        got = " ".join(str(error).split())[:300]
        raise OptionError("--weights", got, f"the weights of {type(model).__name__}", "Check --model.") from error
