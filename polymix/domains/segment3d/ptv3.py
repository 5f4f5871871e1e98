"""PTv3: a point transformer along space-filling curves, with any mixer in place of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polymix.blocks import matching_mlp_ratio
from polymix.domains.segment3d.along import AlongCurve
from polymix.domains.segment3d.convolution import Neighbours, SubmanifoldConv3d
from polymix.domains.segment3d.curves import CLOUDS, serialize
from polymix.domains.segment3d.grid import DEPTH, cloud_of, pool
from polymix.domains.segment3d.recipe import ORDERS
from polymix.errors import OptionError, ShapeError, check_choice, check_int, check_number
from polymix.limits import LAYERS
from polymix.mixers import MixerConfig, SoftmaxConfig
from polymix.models.points import PointNorm

STEM = 5  # side of the first convolution
CPE = 3  # side of the convolutions of position encodings


class _Stage(NamedTuple):
    """Where the voxels of a stage are: what all its blocks share."""

    codes: Tensor  # (orders, V)
    grid: Tensor  # (V, 3)
    lengths: list[int]  # voxels of each cloud
    along: list[Tensor]  # for each order, the voxels in its order
    neighbours: Neighbours | None

    @staticmethod
    def of(codes: Tensor, grid: Tensor, cloud: Tensor, count: int, kernel: int | None) -> _Stage:
        lengths = torch.bincount(cloud, minlength=count).tolist()
        neighbours = None if kernel is None else Neighbours.of(grid, cloud, kernel)
        return _Stage(codes, grid, lengths, [code.argsort() for code in codes], neighbours)


class PointBlock(nn.Module):
    """x + CPE(x), then x + Mixer(LN x), then x + MLP(LN x), over packed points (V, D).

    CPE, the conditional position encoding, is a sparse convolution of 3³, a linear map and a LayerNorm. It mixes
    neighbours by itself: cpe=False leaves all mixing to the mixer. In training a branch of a point is dropped with
    probability drop_path.
    """

    def __init__(
        self, dim: int, mixer: MixerConfig, window: int | None, mlp_ratio: float, cpe: bool, drop_path: float
    ) -> None:
        super().__init__()
        self.cpe = SubmanifoldConv3d(dim, dim, CPE) if cpe else None
        self.cpe_head = nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim)) if cpe else None
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mixer = AlongCurve(dim, mixer, window)
        hidden = int(dim * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.drop_path = drop_path

    def forward(self, x: Tensor, stage: _Stage, order: int, beside: Tensor | None = None) -> Tensor:
        """(V, D) to (V, D). beside: what the position encoding reads in place of x."""
        if self.cpe is not None and self.cpe_head is not None:
            assert stage.neighbours is not None
            x = x + self.cpe_head(self.cpe(x if beside is None else beside, stage.neighbours))
        x = x + self._dropped(self.mixer(self.norm1(x), stage.along[order % len(stage.along)], stage.lengths))
        return x + self._dropped(self.mlp(self.norm2(x)))

    def _dropped(self, x: Tensor) -> Tensor:
        if not (self.training and self.drop_path):
            return x
        mask = torch.rand(len(x), 1, device=x.device) >= self.drop_path
        return x * mask.to(x.dtype) / (1 - self.drop_path)


class _Unpool(nn.Module):
    """Coarse features to the finer voxels, added to the encoder's features there; returns the sum, and the latter."""

    def __init__(self, coarse: int, skipped: int, dim: int) -> None:
        super().__init__()
        self.coarse = nn.Sequential(nn.Linear(coarse, dim), PointNorm(dim), nn.GELU())
        self.skipped = nn.Sequential(nn.Linear(skipped, dim), PointNorm(dim), nn.GELU())

    def forward(self, x: Tensor, skipped: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        skipped = self.skipped(skipped)
        return skipped + self.coarse(x).index_select(0, inverse), skipped


def _run(blocks: Any, x: Tensor, stage: _Stage, beside: Tensor | None = None) -> Tensor:
    for order, block in enumerate(blocks):
        x = block(x, stage, order, None if order else beside)
    return x


class PTv3(nn.Module):
    """Point Transformer v3 (Wu et al. 2024) with any mixer: a U-Net over voxels, mixed along space-filling curves.

    Maps features (V, inputs), voxels (V, 3) and the clouds' offsets (B + 1,) to logits (V, classes). The stem is a
    sparse convolution of 5³; each later stage pools voxels of 2³ by a linear map and their maximum, and the decoder
    goes back up and adds what the encoder had. Block i sorts along curve i mod 4. With attention, six inputs and 20
    classes it has the 46.2 M parameters of the paper; a tenth of them is attention, and the convolutions mix neighbours
    without any mixer.

    Costs 27 V D² for each convolution and a window of K points per mixer: with attention O(V K D), with the mixers of
    polymix O(V D²), for windows and for whole clouds.

    Args:
        mixer: a config, or one for each block, the encoder's first. heads is filled in where it is open.
        inputs, classes: channels of the features, and classes.
        depths, channels, heads: of the encoder's stages; decoder_depths, decoder_channels, decoder_heads: of the
            decoder's, one fewer, the finest first.
        window: points of a sequence, or one for each stage, the finest first; None: whole clouds.
        orders: the curves, of `ORDERS`. shuffle: put them in random order at the start and at every pooling, in
            training, as published. The authors' code does so in evaluation too; here two evaluations agree.
        mlp_ratio: hidden channels over channels. cpe: convolutional position encodings. drop_path: of the last block.
        match_parameters: narrow or widen the MLPs so that every block has the parameters of one with attention. PoM's
            paper keeps them close: it prints 47.9 M, and 46.8 M for the hybrid, where PoM as it is makes 48.5 M and
            47.3 M. No PoM whose expand is a multiple of 1/2 makes 47.9 M, whatever its degree, bias, groups and gates;
            expand=2.5 with mlp_ratio=3 does, as do 2 with 3.75, and 2.75 with one gate. None makes both: the hybrid
            has half of each stage's blocks, and so half of the difference to attention's 46.2 M, which is 47.0 M.
        legacy_unpooling: the first position encoding after an unpooling reads the encoder's features alone, without the
            coarser ones, as the authors' code does in its first version (v3m1), from which its checkpoints are.
        fit_curves: curves through a cube of as many bits as the largest coordinate of a batch has, as published, so
            that a cloud's output depends on the others of its batch. False: of 16 bits.
    Raises:
        OptionError: an option is out of range. ShapeError: an input does not fit.
    Source: PTv3, Section 4; PoM, Section 4.4.
    """

    def __init__(
        self, mixer: MixerConfig | Sequence[MixerConfig] | None = None, *, inputs: int = 6, classes: int = 20,
        depths: Sequence[int] = (2, 2, 2, 6, 2), channels: Sequence[int] = (32, 64, 128, 256, 512),
        heads: Sequence[int] = (2, 4, 8, 16, 32), decoder_depths: Sequence[int] = (2, 2, 2, 2),
        decoder_channels: Sequence[int] = (64, 64, 128, 256), decoder_heads: Sequence[int] = (4, 4, 8, 16),
        window: int | Sequence[int | None] | None = 1024, orders: Sequence[str] = ORDERS, shuffle: bool = True,
        mlp_ratio: float = 4.0, cpe: bool = True, drop_path: float = 0.3, legacy_unpooling: bool = False,
        fit_curves: bool = False, match_parameters: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        stages = len(depths)
        check_int("inputs", inputs, 1)
        check_int("classes", classes, 1)
        switches = {"shuffle": shuffle, "cpe": cpe, "legacy_unpooling": legacy_unpooling, "fit_curves": fit_curves,
                    "match_parameters": match_parameters}  # fmt: skip
        for name, switch in switches.items():
            check_choice(name, switch, (True, False))
        check_number("drop_path", drop_path, 0.0, 1.0, "a probability in [0, 1)", 0.3)
        windows = [window] * stages if window is None or isinstance(window, int) else list(window)
        for name, values, count, low in (
            ("depths", depths, stages, 0), ("channels", channels, stages, 1), ("heads", heads, stages, 1),
            ("decoder_depths", decoder_depths, stages - 1, 0), ("decoder_channels", decoder_channels, stages - 1, 1),
            ("decoder_heads", decoder_heads, stages - 1, 1), ("window", windows, stages, 1),
        ):  # fmt: skip
            if len(values) != count or not count:
                raise OptionError(name, repr(tuple(values)), f"{count} numbers for {stages} stages", "Pass as many.")
            for value in values:
                if value is not None or name != "window":
                    check_int(name, value, low, LAYERS if "depths" in name else None)
        for order in orders:
            check_choice("orders", order, ORDERS)
        if not orders:
            raise OptionError("orders", "()", f"some of {', '.join(ORDERS)}", "Pass at least one.")
        depth = sum(depths) + sum(decoder_depths)
        mixer = SoftmaxConfig() if mixer is None else mixer
        configs = [mixer] * depth if isinstance(mixer, MixerConfig) else list(mixer)
        if len(configs) != depth:
            raise OptionError(
                "mixer", f"{len(configs)} configs", f"one for each of {depth} blocks", "Pass one for all."
            )
        self.inputs, self.orders, self.shuffle, self.pools = inputs, tuple(orders), shuffle, stages - 1
        self.kernel = CPE if cpe else None
        self.legacy_unpooling, self.fit_curves = legacy_unpooling, fit_curves
        self.stem = SubmanifoldConv3d(inputs, channels[0], STEM, bias=False)
        self.stem_norm = nn.Sequential(PointNorm(channels[0]), nn.GELU())
        following = iter(configs)
        drops = iter([drop_path * place / max(sum(depths) - 1, 1) for place in range(sum(depths))])
        back = [drop_path * place / max(sum(decoder_depths) - 1, 1) for place in range(sum(decoder_depths))]

        def blocks(dim: int, count: int, head: int, window: int | None, drops: Sequence[float]) -> nn.ModuleList:
            ready = [next(following).for_heads(head) for _ in range(count)]
            ratios = [mlp_ratio] * count
            if match_parameters:
                with torch.device("meta"):
                    attention = AlongCurve(dim, SoftmaxConfig(heads=head), window)
                    mixers = [AlongCurve(dim, config, window) for config in ready]
                ratios = [matching_mlp_ratio(mixer, attention, dim, mlp_ratio) for mixer in mixers]
            rows = zip(ready, ratios, drops, strict=True)
            return nn.ModuleList(PointBlock(dim, config, window, ratio, cpe, drop) for config, ratio, drop in rows)

        self.encoder, self.down = nn.ModuleList(), nn.ModuleList()
        for place, dim in enumerate(channels):
            if place:
                self.down.append(nn.Linear(channels[place - 1], dim))
            mine = [next(drops) for _ in range(depths[place])]
            self.encoder.append(blocks(dim, depths[place], heads[place], windows[place], mine))
        self.down_norm = nn.ModuleList(nn.Sequential(PointNorm(dim), nn.GELU()) for dim in channels[1:])
        self.decoder, self.up = nn.ModuleList(), nn.ModuleList()
        coarse = channels[-1]
        for place in reversed(range(stages - 1)):  # the coarsest first
            dim, start = decoder_channels[place], sum(decoder_depths[:place])
            mine = back[start : start + decoder_depths[place]][::-1]
            self.up.append(_Unpool(coarse, channels[place], dim))
            self.decoder.append(blocks(dim, decoder_depths[place], decoder_heads[place], windows[place], mine))
            coarse = dim
        self.head = nn.Linear(coarse, classes)

    def forward(self, features: Tensor, grid: Tensor, offsets: Tensor) -> Tensor:
        """Logits (V, classes) of packed voxels. offsets: (B + 1,), where each cloud starts, and V at the end."""
        self._check(features, grid, offsets)
        count, cloud = len(offsets) - 1, cloud_of(offsets)
        depth = max(int(grid.max()).bit_length(), 1) if self.fit_curves else DEPTH
        codes = self._shuffled(torch.stack([serialize(grid, cloud, order, depth) for order in self.orders]))
        where = [_Stage.of(codes, grid, cloud, count, self.kernel)]
        x = self.stem_norm(self.stem(features, Neighbours.of(grid, cloud, STEM)))
        skipped: list[Tensor] = []
        inverses: list[Tensor] = []
        for place, blocks in enumerate(self.encoder):
            if place:
                skipped.append(x)
                codes, grid, inverse = pool(where[-1].codes, where[-1].grid, place <= depth)
                inverses.append(inverse)
                cloud = torch.empty(len(grid), dtype=torch.int64, device=grid.device).scatter_(0, inverse, cloud)
                where.append(_Stage.of(self._shuffled(codes), grid, cloud, count, self.kernel))
                x = self.down[place - 1](x)
                lowest = torch.full((len(grid), x.shape[1]), -torch.inf, dtype=x.dtype, device=x.device)
                x = lowest.scatter_reduce(0, inverse[:, None].expand_as(x), x, "amax")
                x = self.down_norm[place - 1](x)
            x = _run(blocks, x, where[-1])
        for up, blocks in zip(self.up, self.decoder, strict=True):
            where.pop()
            x, beside = up(x, skipped.pop(), inverses.pop())
            x = _run(blocks, x, where[-1], beside if self.legacy_unpooling else None)
        return self.head(x)

    def _shuffled(self, codes: Tensor) -> Tensor:
        return codes[torch.randperm(len(codes))] if self.shuffle and self.training else codes

    def _check(self, features: Tensor, grid: Tensor, offsets: Tensor) -> None:
        if features.ndim != 2 or features.shape[1] != self.inputs or not len(features):
            raise ShapeError("features", tuple(features.shape), f"(V, {self.inputs}) with V of at least 1", "")
        if grid.shape != (len(features), 3) or grid.is_floating_point():
            raise ShapeError("grid", f"{tuple(grid.shape)}, {grid.dtype}", f"({len(features)}, 3), whole numbers", "")
        sizes = offsets.diff() if offsets.ndim == 1 else offsets
        fits = offsets.ndim == 1 and 1 < len(offsets) <= CLOUDS and int(offsets[0]) == 0
        if not fits or int(offsets[-1]) != len(features) or bool((sizes < 1).any()):
            allowed = f"the start of each cloud, rising from 0, and {len(features)} at the end"
            raise ShapeError("offsets", offsets.tolist(), allowed, "Leave empty clouds out.")
