"""A mixer along a curve through packed clouds: in windows, or over whole clouds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import check_int
from polymix.mixers import MixerConfig, TokenMixer


class AlongCurve(nn.Module):
    """A mixer over the points of each cloud in the order of a curve.

    With a window of K points a cloud of n > K points is cut into ⌈n / K⌉ sequences of K; the last one is filled up with
    the points before it, whose outputs come from their own window. A smaller cloud is one sequence. Without a window
    each whole cloud is one sequence; nothing is padded to the largest cloud, so that a mixer of linear cost costs the
    same per point for any batch. Source: PTv3, Section 4.

    Args:
        dim: channels. mixer: a config; one that knows places, such as padre, sees their places along the curve.
        window: K; None: whole clouds.
    """

    def __init__(self, dim: int, mixer: MixerConfig, window: int | None = 1024) -> None:
        super().__init__()
        if window is not None:
            check_int("window", window, 1)
        self.window = window
        self.mixer: TokenMixer = (mixer.for_grid((window or 1,)) if mixer.placed else mixer).build(dim)
        self.gridded = bool(self.mixer.capabilities.grids)

    def forward(self, x: Tensor, order: Tensor, lengths: Sequence[int]) -> Tensor:
        """Features (V, D) of packed clouds to (V, D).

        Args:
            order: int64 (V,), the points of each cloud in the order of the curve, cloud after cloud.
            lengths: the points of each cloud.
        """
        windows, taken = self._sequences(lengths, x.device)
        sequence = x.index_select(0, order)
        short = [part for part in sequence.split(list(lengths)) if 0 < len(part) < self._longest(lengths)]
        outputs = (
            [self._mix(sequence.index_select(0, windows.flatten()).unflatten(0, windows.shape)).flatten(0, 1)]
            if len(windows)
            else []
        )
        outputs += [self._mix(part[None])[0] for part in short]
        back = torch.empty_like(order).scatter_(0, order, taken)
        return torch.cat(outputs).index_select(0, back) if outputs else x

    def _longest(self, lengths: Sequence[int]) -> int:
        """The points from which on a cloud is cut into windows."""
        return self.window or max(lengths, default=0) + 1

    def _sequences(self, lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Places of the windows (W, K), and where each point's output is among theirs and those of smaller clouds."""
        K = self._longest(lengths)
        size = sum(-(-n // K) * K for n in lengths if n >= K)  # the points of all windows; smaller clouds come after
        windows, taken = [], []
        start = done = 0
        for n in lengths:
            here = torch.arange(start, start + n, device=device)
            start += n
            if n < K:
                taken.append(torch.arange(size, size + n, device=device))
                size += n
                continue
            rest = n % K
            windows.append(here[: n - rest].unflatten(0, (-1, K)))
            taken.append(torch.arange(done, done + n - rest, device=device))
            done += n - rest
            if rest:
                windows.append(here[None, n - K :])
                taken.append(torch.arange(done + K - rest, done + K, device=device))
                done += K
        empty = torch.zeros(0, K, dtype=torch.int64, device=device)
        return torch.cat([*windows, empty]), torch.cat([*taken, empty.flatten()])

    def _mix(self, x: Tensor) -> Tensor:
        options: dict[str, Any] = {"grid": (x.shape[1],)} if self.gridded else {}
        return self.mixer(x, **options)
