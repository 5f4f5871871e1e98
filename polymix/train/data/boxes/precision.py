"""Average precision of boxes and masks, as COCO measures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from polymix.extras import needs

NAMES = {
    "map": "AP", "map_50": "AP50", "map_75": "AP75", "map_small": "AP_small", "map_medium": "AP_medium",
    "map_large": "AP_large", "mar_100": "AR100",
}  # fmt: skip


def average_precision(
    predictions: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Tensor]], masks: bool = False
) -> dict[str, Any]:
    """COCO's figures: AP (mean over IoU 0.50 to 0.95), AP50, AP75, by area, and AR100; with `masks` those of masks too.

    Args:
        predictions: each with boxes (k, 4), scores (k), labels (k), and with `masks` masks (k, H, W).
        targets: as `AnnotatedPicture.target` has them, in the same pixels.
    Returns:
        numbers from 0 to 1, and None where there is no object of that size or class; masks have the prefix "mask_".
        Also "classes", AP by the place of each class that occurs.
    """
    with needs("detection", "COCO's average precision is computed with it."):
        import pycocotools  # noqa: F401  of which torchmetrics says nothing until it measures
        from torchmetrics.detection import MeanAveragePrecision

        measure = MeanAveragePrecision(
            iou_type=("bbox", "segm") if masks else "bbox", class_metrics=True, backend="pycocotools"
        )
    measure.warn_on_many_detections = False
    keys = ("boxes", "labels", *(("masks",) if masks else ()))
    measure.update(
        [{key: row[key].cpu() for key in (*keys, "scores")} for row in predictions],
        [
            {**{key: row[key].cpu() for key in (*keys, "area")}, "iscrowd": row["iscrowd"].cpu().int()}
            for row in targets
        ],
    )
    result = measure.compute()
    figures: dict[str, Any] = {}
    for prefix, label in (("bbox_", ""), ("segm_", "mask_")) if masks else (("", ""),):
        figures |= {label + name: _known(result[prefix + key].item()) for key, name in NAMES.items()}
    places, values = result["classes"].view(-1), result["bbox_map_per_class" if masks else "map_per_class"].view(-1)
    figures["classes"] = dict(zip(places.int().tolist(), map(_known, values.tolist()), strict=True))
    return figures


def _known(value: float) -> float | None:
    """A figure; None for -1, which says that there was nothing to find."""
    return None if value < 0 else value
