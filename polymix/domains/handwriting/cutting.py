"""Where the writing stands in an image: the lines below each other, and where a wide line can be cut."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

CONTRAST = 40  # grey values between paper and ink, below which nothing is written
PARTS = 48  # of the width; a row is as full as many of them have ink, so that a blot counts no more than letters do
BAND = 0.18  # fullness, as a share of the fullest row's, from which a row belongs to a band
MIN_BAND = 0.4  # height of a band, as a share of the highest's, below which it is an accent or a tail of its neighbour
LOW, FULL = 0.25, 0.5  # unless it is a line without high letters, which is lower but nearly as full as the fullest
MIN_ROWS = 6  # of a band
MAX_SQUEEZE = 1.25  # widths of the model up to which a line is squeezed, as in training, and not cut
MARGIN_LINES = 200  # training lines from which the margins are taken

Band = tuple[int, int]
Margins = tuple[float, float]


@dataclass(frozen=True)
class Cut:
    """A line that was cut out of an image: its first row, the row after its last, and its pixels with their margins."""

    top: int
    bottom: int
    pixels: np.ndarray


def cut_lines(pixels: np.ndarray, margins: Margins | None = None) -> list[list[Cut]]:
    """The lines in an image (H, W) from above, in one or more ways, of which the model chooses the best.

    An image of one line is taken as it is. Several lines are cut where there is least ink between two; or, with the
    margins that the training's lines have, at the height that follows from their low letters, or from their distance.
    What belongs to the line above or below becomes paper.

    Args:
        margins: what lies above and below the low letters, as shares of a line's height.
    """
    rows, ink = bands(pixels)
    if len(rows) < 2:
        return [[Cut(0, pixels.shape[0], pixels)]]
    cuts = [_emptiest(ink, above[1], below[0]) for above, below in pairwise(rows)]
    limits = list(pairwise([0, *cuts, pixels.shape[0]]))
    ways = [[Cut(top, bottom, pixels[top:bottom]) for top, bottom in limits]]
    if margins is not None:
        cores = [_core(ink, band) for band in rows]
        letters = float(np.median([after - first for first, after in cores])) / max(1 - sum(margins), 0.1)
        distance = float(np.median([below[1] - above[1] for above, below in pairwise(cores)]))
        ways += [[_cut(pixels, round(base + margins[1] * height) - height, height, limit)
                  for (_, base), limit in zip(cores, limits, strict=True)]
                 for height in (round(letters), round(distance))]  # fmt: skip
    return ways


def _cut(pixels: np.ndarray, top: int, height: int, limits: Band) -> Cut:
    """So many rows from `top`, of which those outside of the limits are paper."""
    first, after = max(top, limits[0]), min(top + height, limits[1])
    paper = int(np.percentile(pixels[first:after], 90))
    return Cut(
        first, after, np.pad(pixels[first:after], ((first - top, top + height - after), (0, 0)), constant_values=paper)
    )


def margins_of(lines: Iterable[np.ndarray]) -> Margins | None:
    """What lies above and below the low letters, as shares of the height: medians of some lines; None of no line."""
    margins = []
    for line in lines:
        rows, ink = bands(line)
        if len(rows) == 1:
            first, after = _core(ink, rows[0])
            margins.append((first / len(line), 1 - after / len(line)))
    if not margins:
        return None
    above, below = np.median(margins, axis=0)
    return round(float(above), 4), round(float(below), 4)


def _core(share: np.ndarray, band: Band) -> tuple[float, float]:
    """The rows of a band that are more than half as full as its fullest, those of the low letters; with fractions."""
    rows = np.concatenate(([0.0], share[band[0] : band[1]], [0.0]))
    half = rows.max() / 2
    first, last = (int(place) for place in np.flatnonzero(rows > half)[[0, -1]])
    begins = first - (rows[first] - half) / (rows[first] - rows[first - 1])
    ends = last + (rows[last] - half) / (rows[last] - rows[last + 1])
    return band[0] + begins - 0.5, band[0] + ends - 0.5


def bands(pixels: np.ndarray) -> tuple[list[Band], np.ndarray]:
    """The bands of rows with much ink, one a line, and how full every row is. Lines slanted into each other are one."""
    ink = _ink(pixels)
    if not ink.any():
        return [], np.zeros(len(pixels))
    parts = np.array_split(ink, min(PARTS, ink.shape[1]), axis=1)
    share = np.mean([part.any(1) for part in parts], 0)
    ends = np.flatnonzero(np.diff(np.concatenate(([0], share > BAND * share.max(), [0]))))
    runs = [(int(first), int(after)) for first, after in zip(ends[::2], ends[1::2], strict=True)]
    highest = max(after - first for first, after in runs)

    def is_line(first: int, after: int) -> bool:
        full = share[first:after].max() >= FULL * share.max()
        return after - first >= max(MIN_ROWS, (LOW if full else MIN_BAND) * highest)

    return [band for band in runs if is_line(*band)], share


def _ink(pixels: np.ndarray) -> np.ndarray:
    """Which pixels (H, W) are much darker than the paper around them; none without contrast."""
    depth = _paper(pixels) - pixels
    contrast = float(np.percentile(depth, 99.5))
    return depth > (max(CONTRAST / 2, contrast / 5) if contrast >= CONTRAST else 255)


def _paper(pixels: np.ndarray) -> np.ndarray:
    """The grey of the paper at each pixel, as light may fall unevenly: the lightest of each square, smoothed."""
    from PIL import Image

    side = max(16, pixels.shape[1] // 24)
    high, wide = (-(-length // side) for length in pixels.shape)
    padded = np.pad(pixels, ((0, high * side - pixels.shape[0]), (0, wide * side - pixels.shape[1])), mode="edge")
    lightest = Image.fromarray(padded.reshape(high, side, wide, side).max((1, 3)))
    smooth = np.asarray(lightest.resize((wide * side, high * side), Image.Resampling.BILINEAR))
    return smooth[: pixels.shape[0], : pixels.shape[1]].astype(np.float32)


def _emptiest(share: np.ndarray, first: int, after: int) -> int:
    """The middle of the rows with the least ink between two bands."""
    least = np.flatnonzero(share[first:after] == share[first:after].min())
    return first + int(least[len(least) // 2])


def pieces(pixels: np.ndarray, limit: int) -> list[np.ndarray]:
    """A wide line (H, W) in pieces of at most `limit` columns, cut where the widest gap in a piece's last half is."""
    if pixels.shape[1] <= MAX_SQUEEZE * limit:
        return [pixels]
    parts, left = [], 0
    while pixels.shape[1] - left > limit:
        cut = left + limit // 2 + _gap(pixels[:, left + limit // 2 : left + limit])
        parts.append(pixels[:, left:cut])
        left = cut
    return [*parts, pixels[:, left:]]


def _gap(pixels: np.ndarray) -> int:
    """The middle of the widest run of columns without ink, or else the lightest column; at least 1."""
    empty = ~_ink(pixels).any(0)
    ends = np.flatnonzero(np.diff(np.concatenate(([0], empty, [0]))))
    if not len(ends):
        return max(int(pixels.mean(0).argmax()), 1)
    widths = ends[1::2] - ends[::2]
    widest = int(widths.argmax())
    return max(int(ends[2 * widest] + widths[widest] // 2), 1)
