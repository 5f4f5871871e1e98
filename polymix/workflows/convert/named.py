"""Models of timm and torchvision by name, with fresh weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from polymix.convert.adapters.libraries import LIBRARIES, load_library
from polymix.errors import OptionError, PolymixError, nearest_first
from polymix.workflows.convert.weights import classes_of

SIZES = {"timm": "img_size", "torchvision": "image_size"}  # what each calls the size of images


def named(
    library: str, name: str, state: Mapping[str, Tensor], *, classes: int | None = None, size: int | None = None
) -> nn.Module:
    """The model, for images of `size` where it asks; its head of `classes`, or as large as that in `state`."""
    models: Any = load_library("timm" if library == "timm" else "torchvision.models")
    if not (models.is_model(name) if library == "timm" else name in models.list_models()):
        known = ", ".join(nearest_first(name, models.list_models())[:5])
        raise OptionError("--model", f"{library}/{name}", f"a model of {library}, such as {known}", "")
    model = _built(library, name, None if state else classes, size)
    saved = classes_of(model, state)
    return model if saved is None else _built(library, name, saved, size)


def _built(library: str, name: str, classes: int | None, size: int | None) -> nn.Module:
    options = {} if classes is None else {"num_classes": classes}
    sized = options if size is None else {**options, SIZES[library]: size}
    build, recipe = LIBRARIES[library].load_adapters().build_model, {"library": library, "name": name}
    try:
        try:
            model = build(recipe, sized)
        except TypeError:  # it takes images of any size
            model = build(recipe, options)
    except PolymixError:
        raise
    except Exception as error:  # whatever a library says of a tag or a size that does not exist
        got = f"{library}/{name}, which fails with {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise OptionError("--model", got, f"a model that {library} builds", "") from error
    assert isinstance(model, nn.Module)
    return model
