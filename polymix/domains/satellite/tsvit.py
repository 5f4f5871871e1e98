"""TSViT: a vision transformer for series of satellite images, with any mixer in place of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polymix.blocks import MixerBlock, matching_mlp_ratio
from polymix.errors import OptionError, ShapeError, check_choice, check_int
from polymix.limits import LAYERS
from polymix.mixers import MixerConfig, SoftmaxConfig, SoftmaxMixer, TokenMixer
from polymix.structured.dense import Dense

DAYS = 366  # rows of the embedding: no date, and the days of a year; the last one is also that of a leap year
EMBEDDINGS = ("random", "sines")


def year_sines(dim: int) -> Tensor:
    """Sines and cosines of the day of the year (366, dim), 1 to 16 periods a year in geometric steps; 0 for no date."""
    pairs = (dim + 1) // 2
    periods = 16 ** (torch.arange(pairs) / max(pairs - 1, 1))
    angles = torch.arange(DAYS - 1)[:, None] * (2 * math.pi / DAYS) * periods
    return torch.cat((torch.zeros(1, dim), torch.cat((angles.sin(), angles.cos()), 1)[:, :dim]))


class TSViT(nn.Module):
    """TSViT (Tarasiou et al. 2023) with any mixer: first along time, then over places, with K class tokens.

        Z = [class tokens; W x_t + E day_t]     for each patch of pixels, along time: temporal blocks, norm
        Y = class tokens of all patches + P     for each class, over patches: spatial blocks, norm
        logits = W_o norm(Y)                    patch × patch pixels of that class

    Maps images (B, T, bands, H, W) and days of the year (B, T), from 1 to 365, and 0 where there is no date, to logits
    (B, K, H, W). With attention, K = 19, 10 bands and images of 24 × 24 pixels it has the 1.657 M parameters of the
    paper, and with dim=64 (TSViT-S) 0.436 M. Queries, keys and values of attention have no bias, as published. H and W
    may be other multiples of `patch` than the ones that it was built for: the learned positions are then interpolated.

    Costs H W / patch² sequences of K + T tokens, and K sequences of H W / patch² tokens, per image: with attention the
    spatial part is quadratic in the pixels, with the mixers of polymix linear.

    Args:
        mixer: a config, or one for each block, the temporal ones first. Grids and class tokens are filled in.
        classes: K. bands: of an image. image_size: side of the images in pixels. patch: side of a patch.
        dim, temporal_depth, spatial_depth, heads, mlp_ratio: sizes. heads is for mixers that leave it open.
        match_parameters: narrow or widen the MLPs so that every block has as many parameters as with attention.
        days: how the learned embedding of the day starts: "random", as published, or "sines" of 1 to 16 periods a year,
            with which near days are alike from the start.
        mask_padding: dates that `present` marks as missing take no part. False: they are tokens, as published.
        legacy_layout: put the logits in the order of the authors' code before June 2026, which writes the pixels of a
            patch one after another into a row. The papers' figures and checkpoints are of that code.
        chunk: patches whose series are computed at once without gradients, which bounds the memory; 0: all.

    Raises:
        OptionError: an option is out of range, or a mixer cannot take the class tokens. ShapeError: an input does not
            fit.
    Source: Tarasiou et al. 2023 (TSViT), Section 3; PoM, Section 4.3 and Table 3.
    """

    def __init__(
        self, mixer: MixerConfig | Sequence[MixerConfig] | None = None, *, classes: int = 19, bands: int = 10,
        image_size: int = 24, patch: int = 2, dim: int = 128, temporal_depth: int = 4, spatial_depth: int = 4,
        heads: int = 4, mlp_ratio: float = 4.0, match_parameters: bool = False, days: str = "random",
        mask_padding: bool = True, legacy_layout: bool = False, chunk: int = 4096,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = {
            "classes": classes,
            "bands": bands,
            "image_size": image_size,
            "patch": patch,
            "dim": dim,
            "heads": heads,
        }
        for name, value in sizes.items():
            check_int(name, value, 1)
        for name, value in (("temporal_depth", temporal_depth), ("spatial_depth", spatial_depth)):
            check_int(name, value, 0, LAYERS)
        check_int("chunk", chunk, 0)
        for name, value in (("match_parameters", match_parameters), ("mask_padding", mask_padding),
                            ("legacy_layout", legacy_layout)):  # fmt: skip
            check_choice(name, value, (True, False))
        check_choice("days", days, EMBEDDINGS)
        if image_size % patch:
            got = f"{patch} with image_size={image_size}"
            raise OptionError("patch", got, "a divisor of the image's side", "Change one of them.")
        depth = temporal_depth + spatial_depth
        mixer = SoftmaxConfig() if mixer is None else mixer
        configs = [mixer] * depth if isinstance(mixer, MixerConfig) else list(mixer)
        if len(configs) != depth:
            raise OptionError(
                "mixer", f"{len(configs)} configs", f"one for each of {depth} blocks", "Pass one for all."
            )
        self.options = {  # the arguments that build the same model again
            "mixer": tuple(configs), "classes": classes, "bands": bands, "image_size": image_size, "patch": patch,
            "dim": dim, "temporal_depth": temporal_depth, "spatial_depth": spatial_depth, "heads": heads,
            "mlp_ratio": mlp_ratio, "match_parameters": match_parameters, "days": days, "mask_padding": mask_padding,
            "legacy_layout": legacy_layout, "chunk": chunk,
        }  # fmt: skip
        self.classes, self.bands, self.patch, self.chunk = classes, bands, patch, chunk
        self.mask_padding, self.legacy_layout = mask_padding, legacy_layout
        side = image_size // patch
        self.grid = (side, side)
        self.embed = nn.Linear(bands * patch**2, dim)
        self.day = nn.Linear(DAYS, dim)
        if days == "sines":
            with torch.no_grad():
                self.day.weight.copy_(0.5 * year_sines(dim).t())
                nn.init.zeros_(self.day.bias)
        self.class_tokens = nn.Parameter(torch.randn(1, classes, dim))
        self.position = nn.Parameter(torch.randn(1, side * side, dim))
        configs = [config.for_heads(heads) for config in configs]
        along = [config.for_grid((1,), classes) if config.placed else config for config in configs[:temporal_depth]]
        self.temporal = nn.ModuleList(_block(config, dim, mlp_ratio, match_parameters) for config in along)
        self.temporal_norm = nn.LayerNorm(dim)
        over = [config.for_grid(self.grid) for config in configs[temporal_depth:]]
        self.spatial = nn.ModuleList(_block(config, dim, mlp_ratio, match_parameters) for config in over)
        self.spatial_norm = nn.LayerNorm(dim)
        # Which blocks' mixers take a grid; conversion may later put others there, which take it too.
        built = [block.mixer for block in self.spatial]
        self.gridded = [isinstance(mixer, TokenMixer) and bool(mixer.capabilities.grids) for mixer in built]
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, patch**2))

    def forward(self, images: Tensor, days: Tensor, present: Tensor | None = None) -> Tensor:
        """Logits (B, K, H, W). present: (B, T), True for real dates; None: all are."""
        self._check(images, days, present)
        batch, _, _, height, width = images.shape
        p, grid = self.patch, (height // self.patch, width // self.patch)
        patches = images.unflatten(3, (grid[0], p)).unflatten(5, (grid[1], p))  # (B, T, C, h, p, w, p)
        patches = patches.permute(0, 3, 5, 1, 4, 6, 2).flatten(1, 2).flatten(3)  # (B, N, T, p p C)
        dates = self.day.weight.t()[days]  # the linear map of a one-hot vector
        dates = dates if self.day.bias is None else dates + self.day.bias
        count = patches.shape[1]
        step = count if self.training or torch.is_grad_enabled() or not self.chunk else max(1, self.chunk // batch)
        tokens = torch.cat([self.along_time(part, dates, present) for part in patches.split(step, 1)], 1)
        y = self.along_places(tokens.transpose(1, 2).flatten(0, 1), grid)  # (B K, N, D)
        logits = self.head(y).unflatten(0, (batch, self.classes))  # (B, K, N, p p)
        if self.legacy_layout:
            return logits.flatten(2).unflatten(2, (height, width))
        return logits.unflatten(3, (p, p)).unflatten(2, grid).transpose(3, 4).flatten(4, 5).flatten(2, 3)

    def along_time(self, patches: Tensor, dates: Tensor, present: Tensor | None = None) -> Tensor:
        """The temporal encoder: class tokens (B, n, K, D) of patches (B, n, T, p p C) and embedded dates (B, T, D)."""
        batch, count = patches.shape[:2]
        x = self.embed(patches) + dates[:, None]  # (B, n, T, D)
        first = self.class_tokens.expand(batch * count, -1, -1)
        x = torch.cat((first, x.flatten(0, 1)), 1)
        options: dict[str, Any] = {}
        # A graph must not depend on whether there is padding.
        if self.mask_padding and present is not None and (torch.compiler.is_compiling() or not bool(present.all())):
            real = torch.cat((present.new_ones(batch, self.classes), present), 1)
            options["mask"] = real.repeat_interleave(count, 0)
        for block in self.temporal:
            x = block(x, **options)
        return self.temporal_norm(x[:, : self.classes]).unflatten(0, (batch, count))

    def along_places(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """The spatial encoder: S sequences (S, N, D) of the patches of a grid, in rows, and their positions."""
        y = tokens + self._positions(grid)
        for block, gridded in zip(self.spatial, self.gridded, strict=True):
            y = block(y, **({"grid": grid} if gridded else {}))
        return self.spatial_norm(y)

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        """The positions (1, N, D), interpolated where the images have another size than at build."""
        if grid == self.grid:
            return self.position
        square = self.position.transpose(1, 2).unflatten(2, self.grid)
        resized = nn.functional.interpolate(square, grid, mode="bilinear", align_corners=False)
        return resized.flatten(2).transpose(1, 2)

    def _check(self, images: Tensor, days: Tensor, present: Tensor | None) -> None:
        p = self.patch
        if images.ndim != 5 or images.shape[2] != self.bands or images.shape[3] % p or images.shape[4] % p:
            allowed = f"(B, T, {self.bands}, H, W) with H and W multiples of {p}"
            raise ShapeError("images", tuple(images.shape), allowed, "Crop or pad them.")
        for name, value in (("days", days), ("present", present)):
            if value is not None and value.shape != images.shape[:2]:
                raise ShapeError(name, tuple(value.shape), f"(B, T) = {tuple(images.shape[:2])}", "")


def _block(config: MixerConfig, dim: int, mlp_ratio: float, match_parameters: bool) -> MixerBlock:
    """A pre-norm block with the norms' eps of the authors."""
    if match_parameters:
        pair = _mixer(config, dim, device="meta"), _mixer(SoftmaxConfig(), dim, device="meta")
        mlp_ratio = matching_mlp_ratio(*pair, dim, mlp_ratio)
    block = MixerBlock(dim, _mixer(config, dim), mlp_ratio=mlp_ratio)
    for norm in (block.norm1, block.norm2):
        assert isinstance(norm, nn.LayerNorm)
        norm.eps = 1e-5
    return block


def _mixer(config: MixerConfig, dim: int, **kw: Any) -> TokenMixer:
    """A mixer, with no bias in attention's queries, keys and values."""
    mixer: TokenMixer = config.build(dim, **kw)
    if isinstance(mixer, SoftmaxMixer) and isinstance(mixer.qkv.qkv, Dense):
        mixer.qkv.qkv.register_parameter("bias", None)
    return mixer
