"""Saving converted models and loading them: one file holds the weights and how the model is built."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert import model_recipes as recipes
from polymix.convert.model_recipes import decode, encode
from polymix.convert.saving.files import (
    FORMAT,
    TIMM_ENTRY,
    TRANSFORMERS_ENTRY,
    WEIGHTS,
    damaged,
    read,
    without_ties,
    write,
)
from polymix.convert.saving.rebuild import difference, differences, layers, rebuild, restore, shape
from polymix.convert.saving.unwrapping import unwrapped
from polymix.convert.weight_files import load_safetensors
from polymix.devices import check_device, float_type
from polymix.errors import OptionError, PolymixError, ResultsError, check_choice, one_line
from polymix.files import a_path, check_folder
from polymix.limits import bounded, check_counts
from polymix.mixers.modules import check_module


def save_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], *, host: Any = None, metadata: Mapping[str, Any] | None = None
) -> None:
    """Save a model, converted or not. `load_pretrained(folder)` returns it, bit for bit.

    `model.safetensors` holds the weights and, in its header, everything needed to build the model. It replaces an
    earlier file only once it is complete. `config.json` is a copy of the header for people to read.

    Args:
        model: a model of timm, transformers, torchvision, diffusers or polymix; of any other, with `host`. Inside
            torch.compile, nn.DataParallel and the like, it is the model in them.
        folder: where to write; created if it does not exist.
        host: how to build the model as it was before its conversion, where the model does not say:
            {"library": "timm", "name": "vit_tiny_patch16_224", "kwargs": {"depth": 6}};
            {"library": "torchvision", "class": "torchvision.models.VisionTransformer", "kwargs": {…}};
            {"call": "package.module:function", "kwargs": {…}}, or "file.py:function", for anything else.
        metadata: anything else to keep with the model, as JSON: accuracies, data, `report.to_dict()`.
    Raises:
        OptionError: building by the recipe gives another model. Nothing is written.
    """
    load_safetensors()
    check_module(model)
    folder = check_folder(folder, "folder")
    model = unwrapped(model)
    if metadata is not None and not isinstance(metadata, Mapping):
        raise OptionError("metadata", type(metadata).__name__, "a dict", "Pass metadata={...}.")
    content, buffers = _describe(model, folder, host)
    try:
        content["metadata"] = encode(json.loads(json.dumps(dict(metadata or {}))))
    except (TypeError, ValueError) as error:
        raise OptionError(
            "metadata", f"a value that JSON cannot hold ({error})", "numbers, strings, lists and dicts", ""
        ) from error
    if content["host"].get("library") == "timm":  # so that timm.create_model finds the folder's own entry
        content |= {"architecture": TIMM_ENTRY, "pretrained_cfg": _preprocessing(model)}
    if content["host"].get("library") == "transformers":  # so that its Auto classes find how to load the folder
        content["model_type"] = TRANSFORMERS_ENTRY
    tensors, content["tied"] = without_ties({**model.state_dict(keep_vars=True), **buffers})
    write(folder, content, tensors)


def load_pretrained(
    folder: str | os.PathLike[str], *, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None,
    trust: bool = False,
) -> nn.Module:  # fmt: skip
    """Load a model that `save_pretrained` saved. It is in evaluation mode.

    Args:
        folder: the folder.
        device: where to put the model; None: the CPU.
        dtype: type of the weights, such as torch.bfloat16 or "bfloat16"; None: each in the type it was saved in.
        trust: allow code from outside polymix and its known libraries to run. A host saved with {"call": …} needs it.
    Raises:
        OptionError: the folder does not exist, the device or type is none, `trust` is needed, or the model does not
            fit into memory.
        ResultsError: the files are damaged, foreign or newer than this polymix, or do not fit the model that the
            installed libraries build.
    """
    folder = a_path(folder, "folder")
    if device is not None and str(device) != "meta":
        check_device(str(device))
    dtype = float_type(dtype)
    check_choice("trust", trust, (True, False))
    content, tensors = read(folder)
    try:
        check_counts(content.get("host"), "folder", str(folder))
        with bounded("folder", str(folder), "Fetch or save it again."):
            model = rebuild(content, folder, trust)
        _fill(model, content, tensors, folder)
    except OptionError as error:
        if error.cure:
            raise
        raise OptionError(error.argument, error.got, error.allowed, _saved_with(content)) from error
    except PolymixError:
        raise
    except Exception as error:  # whatever a damaged config leads to
        raise damaged(folder, f"a config that builds no model ({one_line(error)[:300]})") from error
    placed = model if device is None and dtype is None else model.to(device=device, dtype=dtype)
    return placed.eval()


def _describe(model: nn.Module, folder: Path, host: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config, by the first recipe that builds this model, and the buffers that building does not restore."""
    possible = [recipes.normal(host, folder)] if host is not None else recipes.candidates(model, folder)
    first: PolymixError | None = None
    for recipe in possible:
        content = {"format": FORMAT, "library_name": "polymix", "host": recipe, "layers": layers(model)}
        try:
            attributes, buffers = differences(model, rebuild(content, folder, True))
        except PolymixError as error:
            first = first or error
            continue
        content["attributes"] = encode(attributes)
        content["buffers"], content["versions"] = list(buffers), _versions(recipe)
        return content, buffers
    got = f"None for {type(model).__module__}.{type(model).__name__}, which does not say how it is built"
    raise first or OptionError("host", got, recipes.FORMS, "Say how the model is built before its conversion.")


def _preprocessing(model: Any) -> dict[str, Any]:
    """What timm's config of a model says about its input and its classes."""
    stated = getattr(model, "pretrained_cfg", None) or {}
    names = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode", "num_classes", "label_names")
    return {name: stated[name] for name in names if recipes.is_plain(stated.get(name)) and stated.get(name) is not None}


def _versions(recipe: Mapping[str, Any]) -> dict[str, str]:
    names = ("polymix", "torch", recipe.get("library", "torch"))
    return {name: str(sys.modules[name].__version__) for name in names}


def _saved_with(content: Mapping[str, Any]) -> str:
    return f"It was saved with {', '.join(f'{name} {version}' for name, version in content['versions'].items())}."


def _fill(model: nn.Module, content: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    """Load the weights in their own types and tied as they were. Raises ResultsError unless they fit exactly."""
    restore(model, decode(content["attributes"]), {name: tensors.pop(name) for name in content["buffers"]})
    own = model.state_dict(keep_vars=True)
    mismatch = difference(
        {key: shape(tensors[content["tied"].get(key, key)]) for key in (*tensors, *content["tied"])},
        {key: shape(value) for key, value in own.items()},
    )
    if mismatch:
        raise ResultsError(
            str(folder / WEIGHTS), f"a host whose {mismatch}", "the host that was saved", _saved_with(content)
        )
    weights: dict[str, Tensor] = {
        key: nn.Parameter(value, own[key].requires_grad) if isinstance(own[key], nn.Parameter) else value
        for key, value in tensors.items()
    }
    own.update({key: weights[content["tied"].get(key, key)] for key in own})
    model.load_state_dict(own, assign=True)
