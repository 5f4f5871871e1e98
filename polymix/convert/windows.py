"""Windowed attention: the regions that a shift brings together in a window, and mixing each of them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.convert.adapter import Adapter
from polymix.convert.masks import visible
from polymix.convert.spec import AttentionSpec
from polymix.errors import CapabilityError, MaskError, OptionError
from polymix.mixers import TokenMixer
from polymix.mixers.checks import holds
from polymix.mixers.registry import missing_capability

Pair = tuple[int, int]
CONVERT_AGAIN = "Undo the conversion, change the model, and convert it again."
_MERGE = 'Pass windows="merge", so that the mixer sees the whole feature map, or use one of those mixers.'


class _Band(NamedTuple):
    """Some of the rows (or columns) of windows, and the rows inside each of them, that belong to one region."""

    windows: slice
    inside: slice


class Shifted(NamedTuple):
    """Windows of one size over a feature map that was shifted cyclically, up and to the left, by `shift`.

    The last row of windows then holds two parts that were no neighbours, and so does the last column: the window in the
    corner has four. Windows that are not shifted are one region each.
    """

    window: Pair
    shift: Pair

    def layout(self, grid: Pair) -> Pair:
        """Rows and columns of windows that cover the grid."""
        rows, columns = (-(-side // of) for side, of in zip(grid, self.window, strict=True))
        return rows, columns

    def regions(self, grid: Pair, device: torch.device) -> Tensor:
        """(windows, N): the region of each token in its window, from 0 to 3."""
        axes = []
        for count, size, by in zip(self.layout(grid), self.window, self.shift, strict=True):
            part = torch.zeros(count, size, dtype=torch.int64, device=device)
            part[-1, size - by :] = 1 if by else 0
            axes.append(part)
        ids = 2 * axes[0][:, None, :, None] + axes[1][None, :, None, :]
        return ids.flatten(0, 1).flatten(1)

    def _bands(self, axis: int, count: int) -> Iterator[_Band]:
        size, by = self.window[axis], self.shift[axis]
        if not by:
            yield _Band(slice(0, count), slice(0, size))
            return
        if count > 1:
            yield _Band(slice(0, count - 1), slice(0, size))
        yield _Band(slice(count - 1, count), slice(0, size - by))
        yield _Band(slice(count - 1, count), slice(size - by, size))

    def mix_regions(self, x: Tensor, grid: Pair, mix: Callable[[Tensor, Pair], Tensor]) -> Tensor:
        """Apply `mix(tokens, their grid)` to each region alone: x is (B · windows, N, D), and so is the result.

        Regions are rectangles. Equal ones are mixed in one call, so there are at most nine calls.
        """
        counts = self.layout(grid)
        x = x.unflatten(0, (-1, *counts)).unflatten(3, self.window)  # (B, rows, columns, h, w, D)
        mixed: Tensor | None = None
        for down in self._bands(0, counts[0]):
            for right in self._bands(1, counts[1]):
                place = (slice(None), down.windows, right.windows, down.inside, right.inside)
                part = x[place]
                y = mix(part.flatten(3, 4).flatten(0, 2), (part.shape[3], part.shape[4])).reshape(part.shape)
                if mixed is None:
                    mixed = y.new_empty(x.shape)
                mixed[place] = y
        assert mixed is not None
        return mixed.flatten(3, 4).flatten(0, 2)

    def mix_map(self, x: Tensor, grid: Pair, mix: Callable[[Tensor], Tensor], *, padded_first: bool) -> Tensor:
        """Put the windows x (B · windows, N, D) together, without shift and padding, for `mix`; split them again.

        mix: from (B, H · W, D) to the same. padded_first: the host pads the map before the shift, not after it.
        """
        (height, width), (h, w), (down, right) = grid, self.window, self.shift
        rows, columns = self.layout(grid)
        whole = (slice(None), slice(height), slice(width))
        y = x.unflatten(1, (h, w)).unflatten(0, (-1, rows, columns)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        y = y.roll((down, right), (1, 2))[whole] if padded_first else y[whole].roll((down, right), (1, 2))
        y = mix(y.flatten(1, 2)).unflatten(1, grid)
        sides = (0, 0, 0, columns * w - width, 0, rows * h - height)
        back = (-down, -right)
        y = F.pad(y, sides).roll(back, (1, 2)) if padded_first else F.pad(y.roll(back, (1, 2)), sides)
        return y.unflatten(2, (columns, w)).unflatten(1, (rows, h)).transpose(2, 3).reshape(x.shape)


def check_regions(mixer: TokenMixer) -> None:
    """Raise CapabilityError where a mixer can mix the regions of a window neither together nor one by one."""
    can = mixer.capabilities
    if not (can.has("segments") or can.has("arbitrary") or can.any_length):
        error = missing_capability(mixer.name, "segments", "mixer", "shifted windows")
        raise CapabilityError(error.argument, error.got, error.allowed, _MERGE)


@dataclass(frozen=True, kw_only=True)
class Windows(AttentionSpec):
    """An AttentionSpec with windows.

    window, shift: the block's window size and shift. feature_size: (H, W) of its feature map, where the host states it.
    merged: whether the mixer sees the whole feature map.
    """

    window: Pair
    shift: Pair
    feature_size: Pair | None
    merged: bool


class WindowsAdapter(Adapter):
    """Windows (B · windows, N, D), with a mask (windows, N, N) where they are shifted, -> (B · windows, N, D).

    With windows="keep", the mixer runs in each window as the block made it. Regions of a shifted window do not see each
    other: as segments, where the mixer takes them, or by mixing each region alone, on its own grid. With
    windows="merge", the windows are put together to the feature map, without shift and padding.
    """

    checks_masks = False
    padded_first = False  # whether the host pads the map before it shifts it
    shift_varies = False  # whether the host leaves the shift out for small maps; it then passes no mask

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        assert isinstance(attention, Windows)
        self.window, self.shift, self.merged = attention.window, attention.shift, attention.merged
        self.feature_size = attention.feature_size
        self.packed = mixer.capabilities.has("segments")
        self.alone = not self.packed and mixer.capabilities.any_length
        if self.merged:
            return
        if attention.grid != self.window:
            raise OptionError("grid", attention.grid, f"the window, {self.window}", "Leave grid out.")
        if any(self.shift):
            check_regions(mixer)

    @property
    def needs_current_grid(self) -> bool:
        return self.merged or self.alone

    def mix_windows(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Mix in the windows, or on the map that they are parts of."""
        if self.merged:
            grid, shifted = self._map(mask)
            return shifted.mix_map(x, grid, lambda y: self.mix(y, grid=grid), padded_first=self.padded_first)
        if mask is None:
            return self.mix(x, grid=self.window)
        seen = visible(mask, inverted=False)
        times = x.shape[0] // seen.shape[0]
        if self.alone:
            return self._mix_alone(x, mask, seen)
        if not self.packed:
            return self.mix(x, mask=seen.repeat(times, 1, 1), grid=self.window)
        ids = seen.int().argmax(-1)  # the first token that each sees
        _check_split(ids, seen)
        return self.mix(x, segments=ids.repeat(times, 1), grid=self.window)

    def _mix_alone(self, x: Tensor, mask: Tensor, seen: Tensor) -> Tensor:
        grid, shifted = self._map(mask)
        ids = shifted.regions(grid, x.device)
        if len(ids) != len(seen):
            raise OptionError("mask", f"one of {len(seen)} windows", f"{len(ids)}, for a map of {grid}", CONVERT_AGAIN)
        _check_split(ids, seen)
        return shifted.mix_regions(x, grid, lambda y, size: self.mix(y, grid=size))

    def _map(self, mask: Tensor | None) -> tuple[Pair, Shifted]:
        """The size of the feature map in this call, and its windows."""
        if (mask is not None) != any(self.shift) and not (self.shift_varies and mask is None):
            raise OptionError("shift_size", "another shift", f"{self.shift}, as at the conversion", CONVERT_AGAIN)
        size: Any = self.current_grid or self.feature_size
        if size is None:
            cure = "Convert the whole model, not one layer of it."
            raise OptionError("grid", "None: the host does not say how large its feature map is", "(H, W)", cure)
        return size, Shifted(self.window, (0, 0) if mask is None else self.shift)


def _check_split(ids: Tensor, seen: Tensor) -> None:
    """Raise MaskError unless tokens see each other exactly where their ids agree."""
    if not holds(((ids[:, :, None] == ids[:, None]) == seen).all(), "takes masks of whole regions alone"):
        got = "a mask that does not split the window into regions"
        raise MaskError("mask", got, "a mask by regions that see only themselves", "")


@dataclass(frozen=True, kw_only=True)
class MapSpec(AttentionSpec):
    """An AttentionSpec of attention on maps (B, H, W, D). window: None where the map is no window."""

    window: Pair | None
    merged: bool


def in_map(attention: AttentionSpec, host: Any, window: int) -> MapSpec:
    """The spec of attention that gets a whole feature map, or with a `window` windows of one, without shift."""
    values, merged = dict(vars(attention)), bool(window) and host.windows == "merge"
    if not window:
        return MapSpec(**{**values, "any_length": True}, window=None, merged=False)
    size = (window, window)
    if not merged:
        return MapSpec(**{**values, "grid": size, "any_length": False}, window=size, merged=False)
    return MapSpec(**{**values, "any_length": True, "span": window**2}, window=size, merged=True)


class MapAdapter(Adapter):
    """Maps (B, H, W, D) -> (B, H, W, D). With windows="merge", windows are put together to the map they come from."""

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        assert isinstance(attention, MapSpec)
        self.window, self.merged = attention.window, attention.merged

    @classmethod
    def grid_of(cls, module: nn.Module, args: Any, output: Any) -> tuple[int, ...]:
        return tuple(output.shape[1:3])

    @property
    def needs_current_grid(self) -> bool:
        return self.merged or (self.window is None and bool(self.mixer.capabilities.grids))

    def mix_map(self, x: Tensor) -> Tensor:
        """Mix the tokens of each map, or of the map that windows make up."""
        size: Any = tuple(x.shape[1:3])
        tokens = x.flatten(1, 2)
        if not self.merged:
            return self.mix(tokens, grid=size).unflatten(1, size)
        grid: Any = self.current_grid or self.grid
        if grid is None:
            cure = "Convert the whole model, not one layer of it."
            raise OptionError("grid", "None: the host does not say how large its feature map is", "(H, W)", cure)
        windows = Shifted(size, (0, 0))
        return windows.mix_map(tokens, grid, lambda y: self.mix(y, grid=grid), padded_first=False).unflatten(1, size)
