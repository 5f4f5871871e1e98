"""How RetinaNet learns: focal loss of faces against background, and L1 of the boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from polymix.tasks.boxes.detectors import DetectorLearner


class Learner(DetectorLearner):
    def truths(self, targets: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Boxes and labels of the faces that count."""
        return [{name: t[name][~t["iscrowd"]] for name in ("boxes", "labels")} for t in targets]
