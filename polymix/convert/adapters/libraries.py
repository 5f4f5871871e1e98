"""The libraries whose models polymix converts, one line each, and how a library is imported when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from polymix.compat import cure_torchvision
from polymix.errors import MissingExtraError


class Library(NamedTuple):
    """A library of models.

    adapters: the module of `polymix.convert.adapters` that serves it. It registers its adapters and has two functions,
        `read_recipes(model)` and `build_model(recipe, kwargs)` (see `polymix.convert.model_recipes`).
    models: how the paths of its model classes begin.
    install: what to install with pip.
    by_config: whether a model's config says everything about it.
    """

    adapters: str
    models: str
    install: str
    by_config: bool = False

    def load_adapters(self) -> ModuleType:
        """Import the adapters of this library, which does not import the library."""
        return importlib.import_module(f"polymix.convert.adapters.{self.adapters}")


LIBRARIES = {
    "torch": Library("torch_nn", "torch.nn.", "torch"),
    "timm": Library("timm", "timm.models.", "'polymix[vision]'"),
    "transformers": Library("transformers", "transformers.models.", "'polymix[text]'", by_config=True),
    "torchvision": Library("torchvision", "torchvision.models.", "torchvision"),
    "diffusers": Library("diffusers", "diffusers.models.", "diffusers", by_config=True),
    "polymix": Library("polymix_models", "polymix.", "polymix"),
}


def library_of(kind: type) -> str | None:
    """The name of the library that a class of models belongs to; None where it is in none of them."""
    return next((name for name, lib in LIBRARIES.items() if kind.__module__.startswith(lib.models)), None)


def load_library(name: str) -> Any:
    """Import a library, or a module of it. Raises MissingExtraError where it is not installed."""
    try:
        cure_torchvision()
        return importlib.import_module(name)
    except ImportError as error:
        top = name.partition(".")[0]
        install = LIBRARIES[top].install if top in LIBRARIES else top
        cure = f"pip install {install}"
        raise MissingExtraError(top, str(error), f"{top}, which the model comes from", cure) from error


@contextmanager
def local_files() -> Iterator[None]:
    """Read and write models of transformers without progress bars and without the network.

    A config may name a pretrained backbone, which transformers would download; any request raises instead.
    """
    logging: Any = load_library("transformers").utils.logging
    hub: Any = load_library("huggingface_hub.constants")
    shown, offline = logging.is_progress_bar_enabled(), hub.HF_HUB_OFFLINE
    logging.disable_progress_bar()
    hub.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = offline
        if shown:
            logging.enable_progress_bar()
