"""What every model that turns noise into images states of itself, whoever made it."""

from __future__ import annotations

from typing import Any

from torch import nn

from polymix.errors import OptionError

GENERATOR = "generator.json"  # of a folder that `polymix train generation` or ImagesPipeline wrote: how its model draws


class ImageGenerator(nn.Module):
    """A domain's own model (images, times, labels) -> prediction, by which it is told from those of libraries.

    Attributes:
        channels: of an image. classes: 0 for an unconditional model. options: with "image_size", (height, width).
    """

    channels: int
    classes: int
    options: dict[str, Any]

    @property
    def guidable(self) -> bool:
        """Whether the model has the class "none", with the number `classes`."""
        raise NotImplementedError


def shape_of(model: Any, size: tuple[int, int] | None = None) -> tuple[int, int, int]:
    """(C, H, W) of a generator's images, as the model states it or with another size.

    Raises OptionError where the model does not state it.
    """
    if isinstance(model, ImageGenerator):
        height, width = size or model.options["image_size"]
        return model.channels, height, width
    config: Any = getattr(model, "config", {})
    channels, side = config.get("in_channels"), config.get("sample_size")
    if channels is None or (side is None and size is None):
        got = f"None for {type(model).__name__}, which does not state it"
        raise OptionError("size", got, "(H, W) of the latents", "Pass size=(32, 32), say.")
    height, width = size or (int(side), int(side))
    return int(channels), height, width
