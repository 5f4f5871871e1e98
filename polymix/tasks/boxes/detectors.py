"""What torchvision's detectors share: a mixer inserted into their backbone, and how they learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polymix.compat import cure_torchvision
from polymix.convert.insert import insert
from polymix.errors import MissingExtraError
from polymix.mixers.spec import parse_mixer
from polymix.tasks import learner

NO_BLOCK = "none"  # the value of `mixer` for the host as it is
LAST_OF_RES4 = {"resnet18": "backbone.body.layer3.1", "resnet50": "backbone.body.layer3.5"}
INSERTED = tuple(f"{place}.inserted" for place in LAST_OF_RES4.values())  # fresh where --init names a host without it


def load_torchvision() -> None:
    """Make torchvision's detectors usable. Raises MissingExtraError without torchvision."""
    cure_torchvision()
    try:
        import torchvision.models.detection  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("torchvision", str(error), "pip install 'polymix[detection]'") from error


def check_mixer(mixer: str) -> None:
    """Raise OptionError or UnknownNameError unless `mixer` is "none" or a mixer."""
    if mixer != NO_BLOCK:
        parse_mixer(mixer)


def insert_mixer(model: nn.Module, backbone: str, mixer: str, size: int) -> None:
    """Insert a mixer before the last block of Res4, where Poly-NL has it (section 5.1.3); none for "none".

    size: sides of the pictures in pixels, from which mixers that need rows and columns take theirs.
    """
    if mixer != NO_BLOCK:
        example = ([torch.zeros(3, size, size)],)
        insert(model, LAST_OF_RES4[backbone], parse_mixer(mixer)[1], input=example)


def block_in_words(mixer: str) -> str:
    """Where the mixer is, for reports."""
    return "without a block" if mixer == NO_BLOCK else f"with {mixer} before the last block of Res4"


class DetectorLearner(learner.Learner):
    """The sum of the losses that a detector of torchvision returns."""

    unit = "images"

    def truths(self, targets: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Targets as the detector takes them, without crowds."""
        raise NotImplementedError(f"{type(self).__name__} has no truths(targets)")

    def loss(self, batch: Any) -> Tensor:
        """All losses, added."""
        images, targets = batch
        training = self.model.training
        self.model.train()
        losses: Mapping[str, Tensor] = self.model(list(images.float() / 255), self.truths(targets))
        self.model.train(training)
        return torch.stack([*losses.values()]).sum()

    def infer(self, batch: Any) -> Any:
        """What the detector finds."""
        return self.model(list(batch[0].float() / 255))
