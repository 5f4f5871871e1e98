"""DSVT: voxels in sets of one size, cut from windows along x and y in turn, with any mixer in place of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polymix.blocks import matching_mlp_ratio
from polymix.errors import OptionError, ShapeError, check_choice, check_int
from polymix.limits import LAYERS
from polymix.mixers import MixerConfig, SoftmaxConfig
from polymix.models.points import PointNorm
from polymix.train.initial import host_linears

Side = tuple[int, int, int]  # along x, y and z
AXES = (1, 0)  # by which the sets of a block's two layers are sorted: y, then x


class Sets(NamedTuple):
    """Voxels cut into sets of K slots.

    voxels: int64 (S, K), the voxel in each slot. real: bool (S, K), False where a slot repeats the one before it.
    slot: int64 (V,), the place of each voxel among the S K slots.
    """

    voxels: Tensor
    real: Tensor
    slot: Tensor


def windows_of(places: Tensor, cloud: Tensor, window: Side, shift: Side) -> tuple[Tensor, Tensor]:
    """The window of each voxel (V,), numbered from 0 on, and its place in there (V, 3).

    Args:
        places: int64 (V, 3), x, y and z from 0 on. cloud: int64 (V,); clouds share no window.
        window: its sides in voxels. shift: added to the places first.
    """
    moved = places + torch.tensor(shift, device=places.device)
    sides = torch.tensor(window, device=places.device)
    which = moved.div(sides, rounding_mode="floor")
    most = which.max(0).values + 1 if len(which) else which.new_ones(3)
    key = ((cloud * most[0] + which[:, 0]) * most[1] + which[:, 1]) * most[2] + which[:, 2]
    return key.unique(return_inverse=True)[1], moved - which * sides


def cut_sets(windows: Tensor, inside: Tensor, window: Side, size: int, axis: int) -> Sets:
    """The voxels of every window in sets of one size, sorted along x or y.

    A window of n voxels has S = ⌈n / K⌉ sets. Slot k of set j holds the voxel floor((j K + k) n / (S K)) of the window
    in order, so that the sets are equally full, and each voxel is in one set; where n < S K some slots repeat the voxel
    before them. Costs O(V log V). Source: DSVT, equation 3.

    Args:
        windows, inside: of `windows_of`. window: its sides in voxels.
        size: K. axis: 0 sorts by x, then y, then z; 1 by y, then x, then z.
    """
    x, y, z = inside.unbind(1)
    first, second = (x, y) if axis == 0 else (y, x)
    longest = max(window)
    order = (((windows * longest + first) * longest + second) * longest + z).argsort()
    counts = windows.bincount()
    sets = (counts + size - 1) // size
    owner = torch.arange(len(counts), device=windows.device).repeat_interleave(sets)
    number = torch.arange(len(owner), device=windows.device) - (sets.cumsum(0) - sets)[owner]
    slots = number[:, None] * size + torch.arange(size, device=windows.device)
    chosen = (slots * counts[owner, None]).div((sets[owner] * size)[:, None], rounding_mode="floor")
    voxels = order[(counts.cumsum(0) - counts)[owner, None] + chosen]
    real = torch.ones_like(voxels, dtype=torch.bool)
    real[:, 1:] = voxels[:, 1:] != voxels[:, :-1]
    flat = real.flatten().nonzero()[:, 0]
    slot = torch.empty_like(order).scatter_(0, voxels.flatten()[flat], flat)
    return Sets(voxels, real, slot)


class SetMixer(nn.Module):
    """A mixer over each set: mixer(x + p, values=x), with repeated slots hidden as padding.

    Attention reads queries and keys with the positions p, and values without. A mixer that cannot read values from
    another input than keys gets x + p for both. One that knows places, such as padre, sees them along the set.

    Args:
        dim: channels. mixer: a config. size: slots of a set.
    Raises:
        OptionError: the mixer cannot hide tokens.
    """

    def __init__(self, dim: int, mixer: MixerConfig, size: int) -> None:
        super().__init__()
        self.mixer = (mixer.for_grid((size,)) if mixer.placed else mixer).build(dim)
        can = self.mixer.capabilities
        self.own_values, self.gridded = can.values, bool(can.grids)
        if not can.has("padding"):
            allowed = "a mixer that can hide padding"
            raise OptionError("mixer", f"{mixer.name}, which cannot", allowed, "For example, pom, padre or softmax.")

    def forward(self, x: Tensor, positions: Tensor, sets: Sets) -> Tensor:
        """Features (V, D) and their positions (V, D) to (V, D)."""
        chosen = sets.voxels.flatten()
        values = x.index_select(0, chosen).unflatten(0, sets.voxels.shape)
        keys = values + positions.index_select(0, chosen).unflatten(0, sets.voxels.shape)
        options: dict[str, Any] = {"grid": (sets.voxels.shape[1],)} if self.gridded else {}
        options |= {"values": values} if self.own_values else {}
        return self.mixer(keys, mask=sets.real, **options).flatten(0, 1).index_select(0, sets.slot)


class SetLayer(nn.Module):
    """s = LN(x + mixed sets), s = LN(s + MLP(s)), y = LN(x + s): one layer along one axis."""

    def __init__(self, dim: int, mixer: MixerConfig, size: int, hidden: int) -> None:
        super().__init__()
        self.mixer = SetMixer(dim, mixer, size)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.norm1, self.norm2, self.norm = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor, positions: Tensor, sets: Sets) -> Tensor:
        s = self.norm1(x + self.mixer(x, positions, sets))
        s = self.norm2(s + self.mlp(s))
        return self.norm(x + s)


class PositionEmbedding(nn.Sequential):
    """Learned positions (V, dim) of places in a window (V, axes): linear, batch norm, ReLU, linear."""

    def __init__(self, axes: int, dim: int) -> None:
        super().__init__(nn.Linear(axes, dim), PointNorm(dim, 1e-5, 0.1), nn.ReLU(), nn.Linear(dim, dim))


class AttentionPool(nn.Module):
    """Some voxels above each other to one: attention whose query is their maximum.

    Every place of the pooled cell takes part, empty ones as zeros, as published. Source: DSVT, Section 3.4.

    Args:
        dim, heads: of the attention. volume: P, the voxels of a cell.
    """

    def __init__(self, dim: int, heads: int, volume: int) -> None:
        super().__init__()
        self.attention = SoftmaxConfig(heads=heads).build(dim)
        self.places = nn.Parameter(0.01 * torch.randn(volume, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """(W, P, D) to (W, D)."""
        query = x.amax(1, keepdim=True)
        return self.norm(query + self.attention(query, x + self.places, values=x))[:, 0]


class DSVT(nn.Module):
    """Dynamic sparse voxel transformer (Wang et al. 2023) with any mixer: set by set, along y and x in turn.

    Maps features (V, D) of voxels, their places (V, 3) and clouds (V,) to those of the last stage, which has one voxel
    above each place of the ground. A block is two layers and a norm: LN(x + layer_x(layer_y(x))). Every second block
    has shifted windows. `DSVT.preset("nuscenes")` is the pillar version of nuScenes: with attention its eight layers
    and the norms after the blocks have the 1.06 M parameters that PADRe reports, and the learned positions 0.14 M more.

    Costs V / K sets of K slots a layer: with attention O(V K D), with the mixers of polymix O(V D²).

    Args:
        mixer: a config, or one for each layer, two a block. heads is filled in where it is open.
        dim, heads, hidden: channels, heads, and hidden channels of the MLPs.
        shape: the voxels along x, y and z. set_size: K, the slots of a set.
        blocks: of each stage. windows: of each stage, the sides of the blocks' windows and of the shifted ones.
        shift: of the shifted windows, along x and y.
        pools: between stages, how many voxels above each other become one.
        legacy_positions: a block's first layer takes positions from plain windows and its second from shifted ones,
            whichever windows its sets have, as the authors' code does. False: from the windows of its sets.
        match_parameters: narrow or widen the MLPs so that every layer has the parameters of one with attention.
    Raises:
        OptionError: an option is out of range, or the mixer cannot hide padding. ShapeError: an input does not fit.
    Source: DSVT, Section 3; PADRe, Section 4.2 and Table 4.
    """

    PRESETS: Mapping[str, Mapping[str, Any]] = {
        "nuscenes": {"dim": 128, "hidden": 256, "shape": (360, 360, 1), "set_size": 90, "blocks": (4,),
                     "windows": (((30, 30, 1), (30, 30, 1)),), "shift": (15, 15), "legacy_positions": True},
        "waymo": {"dim": 192, "hidden": 384, "shape": (468, 468, 32), "set_size": 48, "blocks": (1, 1, 1, 1),
                  "windows": tuple(((12, 12, high), (24, 24, high)) for high in (32, 8, 2, 1)), "shift": (6, 6),
                  "pools": (4, 4, 2), "legacy_positions": True},
        "waymo-pillars": {"dim": 192, "hidden": 384, "shape": (468, 468, 1), "set_size": 36, "blocks": (4,),
                          "windows": (((12, 12, 1), (24, 24, 1)),), "shift": (6, 6), "legacy_positions": True},
    }  # fmt: skip

    def __init__(
        self, mixer: MixerConfig | Sequence[MixerConfig] | None = None, *, dim: int = 128, heads: int = 8,
        hidden: int = 256, shape: Sequence[int] = (360, 360, 1), set_size: int = 90, blocks: Sequence[int] = (4,),
        windows: Sequence[Sequence[Sequence[int]]] = (((30, 30, 1), (30, 30, 1)),), shift: Sequence[int] = (15, 15),
        pools: Sequence[int] = (), legacy_positions: bool = False, match_parameters: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, value in (("dim", dim), ("heads", heads), ("hidden", hidden), ("set_size", set_size)):
            check_int(name, value, 1)
        check_choice("legacy_positions", legacy_positions, (True, False))
        check_choice("match_parameters", match_parameters, (True, False))
        stages = len(blocks)
        for name, values, count, low in (
            ("shape", shape, 3, 1), ("blocks", blocks, max(stages, 1), 1), ("shift", shift, 2, 0),
            ("pools", pools, max(stages - 1, 0), 1),
        ):  # fmt: skip
            if len(values) != count:
                raise OptionError(name, repr(tuple(values)), f"{count} numbers", "Pass as many.")
            for value in values:
                check_int(name, value, low, LAYERS if name == "blocks" else None)
        heights = [shape[2]]
        for pool in pools:
            heights.append(-(-heights[-1] // pool))
        if heights[-1] != 1:
            got = f"{tuple(pools)}, which leave {heights[-1]} voxels above each other"
            raise OptionError("pools", got, f"pools of {shape[2]} voxels to one", "Pool more, or lower shape[2].")
        pairs = [tuple(tuple(window) for window in pair) for pair in windows]
        sides = [side for pair in pairs for window in pair for side in window]
        if len(pairs) != stages or any(len(pair) != 2 or {len(part) for part in pair} != {3} for pair in pairs):
            got, allowed = repr(tuple(windows)), "for each stage two windows (x, y, z)"
            raise OptionError("windows", got, allowed, "For example, (((30, 30, 1), (30, 30, 1)),).")
        for side in sides:
            check_int("windows", side, 1)
        layers = 2 * sum(blocks)
        mixer = SoftmaxConfig() if mixer is None else mixer
        configs = [mixer] * layers if isinstance(mixer, MixerConfig) else list(mixer)
        if len(configs) != layers:
            got = f"{len(configs)} configs"
            raise OptionError("mixer", got, f"one for each of {layers} layers", "Pass one for all.")
        self.dim, self.shape, self.set_size, self.pooled = dim, tuple(shape), set_size, tuple(pools)
        self.windows, self.heights = pairs, heights
        self.shift: Side = (shift[0], shift[1], 0)
        self.legacy_positions = legacy_positions
        following = iter(configs)

        def layer(config: MixerConfig) -> SetLayer:
            wide = hidden
            if match_parameters:
                with torch.device("meta"):
                    theirs = SetMixer(dim, SoftmaxConfig(heads=heads), set_size)
                    wide = round(dim * matching_mlp_ratio(SetMixer(dim, config, set_size), theirs, dim, hidden / dim))
            return SetLayer(dim, config, set_size, wide)

        self.stages, self.positions, self.norms = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for count, high in zip(blocks, heights, strict=True):
            mine = [[next(following).for_heads(heads) for _ in AXES] for _ in range(count)]
            pairs_of_layers = [nn.ModuleList(layer(one) for one in pair) for pair in mine]
            self.stages.append(nn.ModuleList(pairs_of_layers))
            axes = 3 if high > 1 else 2
            self.positions.append(nn.ModuleList(
                nn.ModuleList(PositionEmbedding(axes, dim) for _ in AXES) for _ in range(count)))  # fmt: skip
            self.norms.append(nn.ModuleList(nn.LayerNorm(dim) for _ in range(count)))
        self.pools = nn.ModuleList(AttentionPool(dim, heads, pool) for pool in pools)

    @classmethod
    def preset(cls, name: str, mixer: MixerConfig | Sequence[MixerConfig] | None = None, **changes: Any) -> DSVT:
        """As published for "nuscenes", "waymo" or "waymo-pillars", with some options changed."""
        check_choice("name", name, cls.PRESETS)
        return cls(mixer, **{**cls.PRESETS[name], **changes})

    def start_as_published(self) -> None:
        """Draw all matrices but those of mixers other than attention by Xavier's rule, as the authors' code does."""
        for layer in host_linears(self):
            nn.init.xavier_uniform_(layer.weight)
        for pool in self.pools:
            nn.init.xavier_uniform_(pool.places)  # type: ignore[arg-type]

    def forward(self, x: Tensor, places: Tensor, cloud: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features (V, D), places (V, 3) and clouds (V,) to those of the last stage, all of whose z are 0."""
        self._check(x, places, cloud)
        number = 0
        stages: Any = self.stages
        for stage, blocks in enumerate(stages):
            arranged = [self._arranged(places, cloud, stage, shifted) for shifted in (False, True)]
            for block, layers in enumerate(blocks):
                y, shifted = x, number % 2
                for place, layer in enumerate(layers):
                    sets = arranged[shifted][0][place]
                    inside = arranged[place if self.legacy_positions else shifted][1]
                    y = layer(y, self.positions[stage][block][place](inside.to(x.dtype)), sets)  # type: ignore[index]
                x = self.norms[stage][block](x + y)  # type: ignore[index]
                number += 1
            if stage < len(self.pools):
                x, places, cloud = self._pool(x, places, cloud, stage)
        return x, places, cloud

    def _arranged(self, places: Tensor, cloud: Tensor, stage: int, shifted: bool) -> tuple[list[Sets], Tensor]:
        """The sets of both layers in plain or shifted windows, and the places in them, from their middle on."""
        window: Any = self.windows[stage][shifted]
        numbers, inside = windows_of(places, cloud, window, self.shift if shifted else (0, 0, 0))
        sets = [cut_sets(numbers, inside, window, self.set_size, axis) for axis in AXES]
        axes = 3 if self.heights[stage] > 1 else 2
        middle = torch.tensor(window[:axes], device=places.device) / 2
        return sets, inside[:, :axes] - middle

    def _pool(self, x: Tensor, places: Tensor, cloud: Tensor, stage: int) -> tuple[Tensor, Tensor, Tensor]:
        volume = self.pooled[stage]
        coarse = torch.cat((cloud[:, None], places[:, :2], places[:, 2:].div(volume, rounding_mode="floor")), 1)
        cells, inverse = coarse.unique(dim=0, return_inverse=True)
        slots = x.new_zeros(len(cells) * volume, x.shape[1])
        slots = slots.index_copy(0, inverse * volume + places[:, 2] % volume, x)
        return self.pools[stage](slots.unflatten(0, (-1, volume))), cells[:, 1:], cells[:, 0]

    def _check(self, x: Tensor, places: Tensor, cloud: Tensor) -> None:
        if x.ndim != 2 or x.shape[1] != self.dim or not len(x):
            raise ShapeError("x", tuple(x.shape), f"(V, {self.dim}) with V of at least 1", "")
        if places.shape != (len(x), 3) or places.is_floating_point():
            raise ShapeError("places", f"{tuple(places.shape)}, {places.dtype}", f"({len(x)}, 3), whole numbers", "")
        if cloud.shape != (len(x),) or cloud.is_floating_point():
            raise ShapeError("cloud", f"{tuple(cloud.shape)}, {cloud.dtype}", f"({len(x)},), whole numbers", "")
        shape = torch.tensor(self.shape, device=places.device)
        beyond = ((places < 0) | (places >= shape)).any(1)
        if beyond.any():
            got = f"a voxel at {places[beyond][0].tolist()}"
            raise ShapeError("places", got, f"0 to {tuple(side - 1 for side in self.shape)}", "Leave far points out.")
        key = ((cloud * self.shape[0] + places[:, 0]) * self.shape[1] + places[:, 1]) * self.shape[2] + places[:, 2]
        if len(key.unique()) < len(key):
            raise ShapeError("places", "a voxel twice in a cloud", "each voxel once", "Pool its points first.")
