"""Saved models by `timm.create_model`: importing this module registers `polymix_converted` in timm.

import timm, polymix.convert.timm_models

model = timm.create_model("local-dir:vit-qt")  # or "hf-hub:you/vit-qt"
model = timm.create_model("polymix_converted", folder="vit-qt")
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from polymix.convert.adapters.libraries import load_library
from polymix.convert.saving import load_pretrained
from polymix.convert.saving.files import CONFIG, TIMM_ENTRY, WEIGHTS
from polymix.errors import OptionError

__all__ = ["polymix_converted"]


def polymix_converted(
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: Any = None,
    cache_dir: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    **options: Any,
) -> nn.Module:
    """A converted model of timm from the folder that `polymix.save_pretrained` wrote, in evaluation mode.

    It is built with its mixers and its saved weights, whatever `pretrained` says. timm calls this function; for
    "hf-hub:" it downloads the two files of the model.

    Args:
        pretrained, pretrained_cfg, pretrained_cfg_overlay, cache_dir: as timm passes them.
        folder: the folder; None: the one that `pretrained_cfg` names.
        options: none: a saved model is built as it was saved.
    Raises:
        OptionError: other options, or no folder. ResultsError: as `polymix.load_pretrained`.
    """
    if options or pretrained_cfg_overlay:
        got = ", ".join(f"{name}={value!r}" for name, value in options.items()) or "pretrained_cfg_overlay"
        cure = "Load it, then change it; another number of classes is chosen before a conversion."
        raise OptionError("options", got, "no options: the model is built as it was saved", cure)
    stated = pretrained_cfg if isinstance(pretrained_cfg, Mapping) else {}
    place = folder or stated.get("file")
    if place is None and stated.get("hf_hub_id"):
        download = load_library("huggingface_hub").snapshot_download
        place = download(stated["hf_hub_id"], cache_dir=cache_dir, allow_patterns=[WEIGHTS, CONFIG])
    if place is None:
        raise OptionError("folder", "None", "a folder with a saved model", "Pass folder=, or a name local-dir:FOLDER.")
    return load_pretrained(place)


assert polymix_converted.__name__ == TIMM_ENTRY
if not load_library("timm").is_model(TIMM_ENTRY):
    load_library("timm.models").register_model(polymix_converted)
