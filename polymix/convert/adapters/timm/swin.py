"""timm's Swin: attention in windows of the feature map; every second block shifts them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import Host, register_adapter
from polymix.convert.adapters.timm.vit import Grid, described
from polymix.convert.find import pair
from polymix.convert.heads import MERGED, biased_by
from polymix.convert.spec import AttentionSpec, linear, thirds
from polymix.convert.windows import CONVERT_AGAIN, Windows, WindowsAdapter
from polymix.errors import OptionError
from polymix.mixers.inheritance import Projection

_TABLE = "relative_position_bias_table"


@register_adapter("timm.models.swin_transformer.WindowAttention")
class WindowAdapter(WindowsAdapter):
    """(windows, mask), as the block calls its attention."""

    forward_attributes = ("num_heads", "scale", "window_area")

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        attention = described(module, host, thirds(linear(module, "qkv")))
        block: Any = host.above()
        window, shift = tuple(module.window_size), tuple(getattr(block, "shift_size", (0, 0)))
        merged, size = host.windows == "merge", getattr(block, "input_resolution", None)
        place: dict[str, Any] = {"window": window, "shift": shift, "prefix": 0, "merged": merged, "feature_size": size}
        if host.windows == "keep":
            table = Projection(module.get_parameter(_TABLE), None, (_TABLE,))
            return Windows(**{**vars(attention), **place, "grid": window, "any_length": False, "relative": table})
        if not hasattr(block, "input_resolution"):
            raise OptionError(
                "windows", "merge", "keep, where the attention is not in timm's block", "Convert the whole model."
            )
        grid, drops = tuple(block.input_resolution), {**attention.drops, **biased_by([_TABLE], MERGED)}
        place |= {"span": window[0] * window[1], "any_length": block.dynamic_mask}
        return Windows(**{**vars(attention), **place, "grid": grid, "drops": drops})

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return getattr(host.above(), "norm1", None)

    @classmethod
    def grid_of(cls, module: nn.Module, args: Any, output: Any) -> Grid:
        return tuple(output.shape[1:3])

    def set_window_size(self, window_size: Any) -> None:
        """timm calls this when the input size is set."""
        if pair(window_size) != self.window:
            raise OptionError("window_size", window_size, f"{self.window}, as at the conversion", CONVERT_AGAIN)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.mix_windows(x, mask)
