"""How Mask R-CNN learns: the losses of the proposals, the boxes, the classes and the masks, added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polymix.tasks.boxes.detectors import DetectorLearner


class Learner(DetectorLearner):
    def truths(self, targets: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Targets with labels from 1 and masks of bytes, without crowds."""
        return [
            {"boxes": t["boxes"][~t["iscrowd"]], "labels": t["labels"][~t["iscrowd"]] + 1,
             "masks": t["masks"][~t["iscrowd"]].to(torch.uint8)} for t in targets
        ]  # fmt: skip
