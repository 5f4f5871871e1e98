"""The style of all pictures, how they are saved, and how a page shows them: light or dark, wide or on a phone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, NullLocator

from polymix import pages
from polymix.files import write_whole

LIGHT = {name: light for name, (light, _) in pages.COLOURS.items()}
STYLE: dict[str, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.color": LIGHT["line"], "axes.axisbelow": True, "legend.frameon": False, "figure.dpi": 150,
    "savefig.bbox": "tight", "svg.fonttype": "path", "svg.hashsalt": "polymix",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), LIGHT["ink"]),
}  # fmt: skip
COLOURS = [LIGHT[name] for name in ("accent", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8", "c9")]
MARKERS = "osD^vP*X<>"
PHONE_WIDTH = 3.7  # inches: the width of a picture on a phone, 355 pixels


@dataclass(frozen=True)
class Picture:
    """One picture of a report.

    Args:
        name: of its PNG file, without the suffix.
        alt: what it shows, for those who cannot see it.
        draw: makes it; True asks for one that can be read on a phone, at most PHONE_WIDTH inches wide.
        caption: the line below it.
    """

    name: str
    alt: str
    draw: Callable[[bool], Figure]
    caption: str = ""


def style() -> AbstractContextManager[None]:
    """The style of polymix's pictures, for a `with` statement."""
    context: AbstractContextManager[None] = mpl.rc_context(STYLE)
    return context


def publish(pictures: Iterable[Picture], folder: Path) -> dict[str, str]:
    """Save each picture as a PNG file in `folder`; return by name its HTML, which follows the page's colours.

    A page holds each picture twice, wide and narrow, and shows the one that fits.
    """
    shown = {}
    with style():
        for picture in pictures:
            wide = picture.draw(False)
            save(wide, folder / f"{picture.name}.png")
            drawn = "".join(
                f'<div class="{kind}">{_inline(figure, f"{picture.name}-{kind}", picture.alt)}</div>'
                for kind, figure in (("wide", wide), ("narrow", picture.draw(True)))
            )
            caption = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
            shown[picture.name] = f"<figure>{drawn}{caption}</figure>"
    return shown


def _inline(figure: Figure, prefix: str, alt: str) -> str:
    """The picture as an SVG element whose colours are those of the page."""
    buffer = StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text.replace("xlink:href", "href"))  # HTML needs none
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    for name, light in LIGHT.items():
        text = text.replace(light, f"var(--{name})")
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(alt)}" ', 1)


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each name, always the same for the same names."""
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]} for i, name in enumerate(names)
    }


class _PlainTicks(Locator):
    """Ticks at 1, 2 and 5 of every decade: fewer over many decades, more in less than one."""

    def __call__(self) -> Any:
        assert self.axis is not None
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, low: float, high: float) -> Any:
        low = max(low, 1e-12)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(max(high, low))) + 1)
        for parts in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
            ticks = [part * 10.0**decade for decade in decades for part in parts]
            if sum(low <= tick <= high for tick in ticks) >= 3:
                return ticks
        middle = 10 ** ((math.log10(low) + math.log10(high)) / 2)
        digits = 2 - math.floor(math.log10(middle))
        return sorted({round(value, digits) for value in (low, middle, high)})


def plain_log(axis: Axis) -> None:
    """Ticks written as plain numbers on a logarithmic axis. Call it after set_xscale or set_yscale."""
    axis.set_major_locator(_PlainTicks())
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, place: tick(value))


def tick(value: float) -> str:
    """A tick of a logarithmic axis: "0.05", "20", "50,000"."""
    text = f"{value:,.3f}" if value >= 1 else f"{value:.12f}"
    return text.rstrip("0").rstrip(".")


def token_axis(axes: Axes, counts: Iterable[int], label: str = "tokens", narrow: bool = False) -> None:
    """A logarithmic x axis with a tick at every token count."""
    ticks = sorted(set(counts))
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks], fontsize=8, rotation=45 if narrow and len(ticks) > 4 else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def legend_columns(labels: Iterable[str]) -> int:
    """The columns of a legend in a narrow picture: one for long names, which would make the picture wider."""
    return 1 if max(map(len, labels), default=0) > 16 else 2


def legend_below(figure: Figure, axes: Axes) -> None:
    """The legend of `axes` under the whole figure, where a narrow picture has room for it."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=legend_columns(labels), fontsize=8)


def save(figure: Figure, path: Path) -> Path:
    """Write the picture whole or not at all."""
    write_whole(path, lambda part: figure.savefig(part, format=path.suffix[1:]))
    return path
