"""timm's Swin: attention in windows of the feature map; every second block shifts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, register_adapter
from polymix.convert.adapters.timm.vit import Grid, described
from polymix.convert.find import pair
from polymix.convert.masks import visible
from polymix.convert.spec import AttentionSpec, linear, thirds
from polymix.errors import CapabilityError, MaskError, OptionError
from polymix.mixers import TokenMixer
from polymix.mixers.checks import holds
from polymix.mixers.inheritance import Projection
from polymix.mixers.registry import lacks

_TABLE = "relative_position_bias_table"
_MERGE = 'Pass windows="merge", so that the mixer sees the whole feature map, or use one of those mixers.'
_AGAIN = "Undo the conversion, change the model, and convert it again."


@dataclass(frozen=True, kw_only=True)
class Windows(AttentionSpec):
    """An AttentionSpec with windows.

    window, shift: the block's window size and shift. merged: whether the mixer sees the whole feature map.
    """

    window: Grid
    shift: Grid
    merged: bool


@register_adapter("timm.models.swin_transformer.WindowAttention")
class WindowAdapter(Adapter):
    """Windows (B · windows, N, D), with a mask (windows, N, N) where they are shifted, -> (B · windows, N, D).

    With windows="keep", the mixer runs in each window as the block made it. With windows="merge", the windows are put
    together to the feature map, without shift and padding, for the mixer, and split again afterwards.
    """

    forward_attributes = ("num_heads", "scale", "window_area")
    checks_masks = False

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        assert isinstance(attention, Windows)
        self.window, self.shift, self.merged = attention.window, attention.shift, attention.merged
        self.packed = mixer.capabilities.has("segments")
        if not self.merged and attention.grid != self.window:
            raise OptionError("grid", attention.grid, f"the window, {self.window}", "Leave grid out.")
        if not self.merged and any(self.shift) and not self.packed and not mixer.capabilities.has("arbitrary"):
            error = lacks(mixer.name, "segments", "mixer", "shifted windows")
            raise CapabilityError(error.argument, error.got, error.allowed, _MERGE)

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        found = described(module, host, thirds(linear(module, "qkv")))
        block: Any = host.above()
        window, shift = tuple(module.window_size), tuple(getattr(block, "shift_size", (0, 0)))
        place: dict[str, Any] = {"window": window, "shift": shift, "prefix": 0, "merged": host.windows == "merge"}
        if host.windows == "keep":
            table = Projection(module.get_parameter(_TABLE), None, (_TABLE,))
            return Windows(**{**vars(found), **place, "grid": window, "any_length": False, "relative": table})
        if not hasattr(block, "input_resolution"):
            raise OptionError(
                "windows", "merge", "keep, where the attention is not in timm's block", "Convert the whole model."
            )
        grid, drops = (
            tuple(block.input_resolution),
            {**found.drops, _TABLE: "biases for offsets in a window; merged windows have none"},
        )
        place |= {"span": window[0] * window[1], "any_length": block.dynamic_mask}
        return Windows(**{**vars(found), **place, "grid": grid, "drops": drops})

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return getattr(host.above(), "norm1", None)

    @classmethod
    def grid_of(cls, module: nn.Module, args: Any, output: Any) -> Grid:
        return tuple(output.shape[1:3])

    @property
    def needs_current_grid(self) -> bool:
        return self.merged

    def set_window_size(self, window_size: Any) -> None:
        """timm calls this when the input size is set."""
        if pair(window_size) != self.window:
            raise OptionError("window_size", window_size, f"{self.window}, as at the conversion", _AGAIN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.merged:
            return self._merged(x, mask)
        if mask is None:
            return self.mix(x, grid=self.window)
        seen = visible(mask, inverted=False)
        times = x.shape[0] // seen.shape[0]
        if not self.packed:
            return self.mix(x, mask=seen.repeat(times, 1, 1), grid=self.window)
        ids = seen.int().argmax(-1)  # the first token that each sees
        if not holds(((ids[:, :, None] == ids[:, None]) == seen).all(), "takes masks of whole regions alone"):
            raise MaskError(
                "mask",
                "a mask that does not split the window into regions",
                "a mask by regions that see only themselves",
                "",
            )
        return self.mix(x, segments=ids.repeat(times, 1), grid=self.window)

    def _merged(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if (mask is not None) != any(self.shift):
            raise OptionError("shift_size", "another shift", f"{self.shift}, as at the conversion", _AGAIN)
        grid = self.current_grid or self.grid
        assert grid is not None
        (height, width), (h, w), (down, right) = grid, self.window, self.shift
        rows, columns = -(-height // h), -(-width // w)
        y = x.unflatten(1, (h, w)).unflatten(0, (-1, rows, columns)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        y = y[:, :height, :width].roll((down, right), (1, 2))
        y = self.mix(y.flatten(1, 2), grid=grid).unflatten(1, grid).roll((-down, -right), (1, 2))
        y = F.pad(y, (0, 0, 0, columns * w - width, 0, rows * h - height))
        return y.unflatten(2, (columns, w)).unflatten(1, (rows, h)).transpose(2, 3).reshape(x.shape)
