"""What a reader of the report and of the card must know of a model beside its figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polymix.compare.conversion.data import Images
from polymix.compare.conversion.settings import Settings
from polymix.compare.conversion.sources import Source

FRESH = "No weights were given: this is the architecture alone, converted with fresh weights."


def notes(settings: Settings, source: Source, images: Images | None, code: str | None) -> list[str]:
    """code: what builds the host, where that is code of the user's."""
    found = [] if source.trained else [FRESH]
    if any(settings.epochs):
        imitate, tune = settings.epochs
        found.append(
            f"After the conversion it was trained for {_epochs(imitate)} in which each mixer imitated its attention, "
            f"and {_epochs(tune)} in which the whole learned from labels and from the model before."
        )
    elif source.trained:
        found.append("The mixers have not been trained since they replaced attention: distil the model before use.")
    if images is not None:
        data, scale = images.data, "divided by 255" if images.unit > 1 else "as they are"
        found.append(
            f"Data: {images.name}, {len(data.train[0]):,} images for training and {len(data.test[0]):,} for the "
            f"accuracy, of {data.image_size} × {data.image_size} pixels: values {scale}, less {_row(images.mean)}, "
            f"over {_row(images.std)}."
        )
        if data.skipped:
            found.append(f"{len(data.skipped)} unreadable images were left out, such as {data.skipped[0]}.")
    if source.unused:
        names = ", ".join(source.unused[:3]) + " …" * (len(source.unused) > 3)
        found.append(f"{len(source.unused)} saved weights have no place in the model and were left out: {names}.")
    if code is not None:
        found.append(f"The host is built by code of no library, {code}: read it, then load with trust=True.")
    return found


def metadata(images: Images | None, title: str, accuracy: Mapping[str, float]) -> dict[str, Any]:
    """Beside library and tags, in a hub's terms: the task, and the accuracy on the images that were held back."""
    last = next((accuracy[name] for name in ("distilled", "imitated", "converted") if name in accuracy), None)
    if images is None or last is None:
        return {}
    task = {"type": "image-classification"}
    held_back = f"{images.name}, {len(images.data.test[0]):,} images held back"
    data = {"type": images.name.replace(" ", "-"), "name": held_back}
    metric = {"type": "accuracy", "value": last}
    return {
        "pipeline_tag": task["type"],
        "model-index": [{"name": title, "results": [{"task": task, "dataset": data, "metrics": [metric]}]}],
    }


def _epochs(count: int) -> str:
    return f"{count} epoch{'s' * (count != 1)}"


def _row(values: Any) -> str:
    return " / ".join(f"{value:.4g}" for value in values.flatten().tolist())
