"""timm's blocks that mix tokens without attention: MLP-Mixer, ResMLP and ConvNeXt. A mixer replaces what mixes them.

The token mixer there is an ordinary MLP, linear layer or convolution, so that the adapter stands for the whole block
and runs its other parts itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from polymix.convert.adapter import Host, register_adapter
from polymix.convert.adapters.timm.vit import HostGridAdapter, layout, stage_grid
from polymix.convert.spec import AttentionSpec
from polymix.errors import OptionError
from polymix.mixers import TokenMixer
from polymix.mixers.heads import head_count

Grid = tuple[int, ...]


class BlockAdapter(HostGridAdapter):
    """A block whose `replaced_part` is the mixer's place. It has copies of the block's other parts and parameters."""

    channel_axis = 1
    copied_tensors: ClassVar[tuple[str, ...]] = ()  # names of the block's own parameters, such as layer scales

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        for name in self.copied_tensors:
            value = getattr(module, name)
            setattr(self, name, None if value is None else nn.Parameter(value.detach().clone(), value.requires_grad))

    @classmethod
    def copied_parameters(cls, module: nn.Module, mixer: TokenMixer) -> dict[str, tuple[str, ...]]:
        own = {name: (name,) for name in cls.copied_tensors if getattr(module, name) is not None}
        return {**super().copied_parameters(module, mixer), **own}


def _spec(
    module: nn.Module, part: str, dim: int, grid: Grid | None, cost: Callable[[int], int], any_length: bool = False
) -> AttentionSpec:
    why = "the block's own token mixer, which the mixer replaces"
    drops = {f"{part}.{key}": why for key, _ in module.get_submodule(part).named_parameters()}
    return AttentionSpec(
        dim=dim, heads=head_count(None, dim), grid=grid, any_length=any_length, cost=cost, drops=drops
    )  # fmt: skip


@register_adapter("timm.models.mlp_mixer.MixerBlock")
class MixerBlockAdapter(BlockAdapter):
    """(x): tokens (B, N, D). The mixer replaces the MLP across tokens."""

    copied_modules = ("norm1", "drop_path", "norm2", "mlp_channels")
    replaced_part = "mlp_tokens"
    norm1: nn.Module
    norm2: nn.Module
    drop_path: nn.Module
    mlp_channels: nn.Module

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        maps, dim = module.mlp_tokens, module.mlp_channels.fc1.in_features
        size = maps.fc1.weight.numel() + maps.fc2.weight.numel()
        return _spec(module, "mlp_tokens", dim, layout(host).grid, lambda tokens: 2 * dim * size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.mix(self.norm1(x)))
        return x + self.drop_path(self.mlp_channels(self.norm2(x)))


@register_adapter("timm.models.mlp_mixer.ResBlock")
class ResBlockAdapter(BlockAdapter):
    """(x): tokens (B, N, D). The mixer replaces ResMLP's linear layer across tokens."""

    copied_modules = ("norm1", "drop_path", "norm2", "mlp_channels")
    copied_tensors = ("ls1", "ls2")
    replaced_part = "linear_tokens"
    norm1: nn.Module
    norm2: nn.Module
    drop_path: nn.Module
    mlp_channels: nn.Module
    ls1: nn.Parameter
    ls2: nn.Parameter

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        dim, size = len(module.ls1), module.linear_tokens.weight.numel()
        return _spec(module, "linear_tokens", dim, layout(host).grid, lambda tokens: 2 * dim * size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.ls1 * self.mix(self.norm1(x)))
        return x + self.drop_path(self.ls2 * self.mlp_channels(self.norm2(x)))


@register_adapter("timm.models.convnext.ConvNeXtBlock")
class ConvNeXtAdapter(BlockAdapter):
    """Feature maps (B, C, H, W) -> (B, C, H, W). The mixer replaces the depthwise convolution."""

    copied_modules = ("norm", "mlp", "drop_path")
    copied_tensors = ("gamma",)
    replaced_part = "conv_dw"
    norm: nn.Module
    mlp: nn.Module
    drop_path: nn.Module
    gamma: nn.Parameter | None

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: Any) -> None:
        super().__init__(mixer, attention, module)
        self.channels_first = bool(module.use_conv_mlp)

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        conv = module.conv_dw
        if conv.in_channels != conv.out_channels or not isinstance(module.shortcut, nn.Identity):
            got = "a block that changes the size or the channels of its map"
            raise OptionError("model", got, "a block with equal input and output", "Keep this layer.")
        taps = conv.weight.numel()
        return _spec(module, "conv_dw", conv.in_channels, stage_grid(host), lambda tokens: 2 * tokens * taps, True)

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return module

    @classmethod
    def grid_of(cls, module: nn.Module, args: Any, output: Any) -> Grid:
        return tuple(output.shape[2:])

    @property
    def needs_current_grid(self) -> bool:
        return False  # the map itself tells it

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix_map(x)
        if self.channels_first:
            y = self.mlp(self.norm(y))
        else:
            y = self.mlp(self.norm(y.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        if self.gamma is not None:
            y = y * self.gamma.view(-1, 1, 1)
        return x + self.drop_path(y)
