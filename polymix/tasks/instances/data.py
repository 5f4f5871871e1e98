"""The data of instance segmentation: that of `polymix.tasks.boxes.data`, whose objects need masks, and nuclei."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from polymix.tasks.boxes import data as boxes
from polymix.tasks.boxes.data import DetectionData, from_summary, made
from polymix.tasks.boxes.pictures import Mistakes
from polymix.tasks.instances import nuclei
from polymix.tasks.instances.recipe import InstancesRecipe

__all__ = ["LAYOUTS", "DetectionData", "check", "for_evaluation", "from_summary", "load", "made"]

LAYOUTS = ("coco", "voc", "nuclei")


def _has_nuclei(data: str | Path | None, layout: str | None) -> bool:
    return data is not None and (layout == "nuclei" or (layout is None and nuclei.is_nuclei(Path(data))))


def load(recipe: InstancesRecipe, folder: Path, say: Callable[[str], None]) -> DetectionData:
    """As `boxes.data.load`; or crops of the nuclei, which are written in COCO's layout in `folder`."""
    if not _has_nuclei(recipe.data, recipe.layout):
        return boxes.load(recipe, folder, say)
    nuclei.write(Path(str(recipe.data)), folder, recipe.image_size)
    found = boxes.load(replace(recipe, data=str(folder), layout="coco"), folder, say)
    return replace(found, name=f"the nuclei of {Path(str(recipe.data)).name}")


def check(
    source: str | Path, layout: str | None = None, images: str | Path | None = None, masks: bool = True
) -> list[str]:
    """As `boxes.data.check`; or whether the nuclei can be read."""
    if not _has_nuclei(source, layout):
        return boxes.check(source, layout, images, masks)
    mistakes = Mistakes()
    with mistakes.noting():
        nuclei.read(Path(source))
    return mistakes.lines


def for_evaluation(
    recipe: InstancesRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> DetectionData:
    """As `boxes.data.for_evaluation`; of the nuclei, the crops of the right quarter."""
    if not _has_nuclei(recipe.data, recipe.layout):
        return boxes.for_evaluation(recipe, summary, whole, limit, say)
    with TemporaryDirectory() as scratch:
        nuclei.write(Path(str(recipe.data)), Path(scratch), recipe.image_size)
        written = replace(recipe, data=scratch, layout="coco")
        found = boxes.for_evaluation(written, summary, whole, limit, say)
        return replace(found, test=found.test.keep_all())
