"""HTR-VT: a convolutional stem and a transformer with any mixer, which read a line of handwriting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polymix.blocks import MixerBlock
from polymix.devices import check_place
from polymix.domains.handwriting.recipe import STRIDE
from polymix.errors import OptionError, ShapeError, check_choice, check_int, check_number
from polymix.limits import LAYERS
from polymix.mixers import MixerConfig

HEIGHTS = (32, 64)  # pixels of a line, which the stem reduces to 1
POSITIONS = ("line", "grid")
GRID_ROWS = 16  # of the grid for which the published code takes a line: its height over a patch of 4


class HtrVt(nn.Module):
    """A line of handwriting (B, 1, height, W) to the logits of CTC (B, W / 4, classes); class 0 is CTC's blank.

        X = stem(norm(image)) + positions,   X ← X + mixer(norm(X)),   X ← X + FF(norm(X)),   Y = norm(head(norm(X)))

    The first and the last norm have no weights and cover the whole image and all logits of a line. The stem is a
    ResNet-18 of three stages; a token sees about 63 pixels. In training, spans of tokens are replaced by a learned
    one. The positions are fixed sines of the token's place, so that lines of any length fit. With softmax, dim=768
    and 80 classes the model has the 53.5 M parameters of the paper; positions="grid" are those of its code.

    Cost in N = W / 4 tokens: that of the mixers and 8 N D² for the feed-forward network in each block.

    Args:
        mixers: the config of each block's mixer, as many as there are blocks.
        classes: number of logits, with the blank.
        dim: number of channels D, a multiple of 4.
        height: of the lines, 64 as published, or 32, where the first convolution keeps the height.
        tokens: usual number of tokens N, for mixers with a weight for each place; the others take any.
        mlp_ratio: width of the hidden layers, divided by dim; one number, or one for each block.
        mask_ratio: share of the tokens that the masked spans would cover if they did not overlap; 0: none.
        span: length of a masked span, in tokens.
        positions: "line": the place in the line; "grid": as in the published code, which takes token i for row
            i // (tokens / 16) and column i % (tokens / 16) of a grid.

    Raises:
        OptionError: an option is out of range, or a mixer is not a config.

    Source: Li et al. 2024, HTR-VT; PoM, Sec. 4.2 and Table 2 (HTR-VPoM: every mixer is PoM; hybrid: every second).
    """

    def __init__(
        self,
        mixers: Sequence[MixerConfig],
        *,
        classes: int,
        dim: int = 768,
        height: int = 64,
        tokens: int = 128,
        mlp_ratio: float | Sequence[float] = 4.0,
        mask_ratio: float = 0.4,
        span: int = 8,
        positions: str = "line",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("classes", classes, 2)
        if type(dim) is not int or dim < 4 or dim % 4:
            raise OptionError("dim", repr(dim), "a multiple of 4", "For example, pass dim=768.")
        check_int("span", span, 1)
        check_int("tokens", tokens, 1)
        check_choice("height", height, HEIGHTS)
        check_choice("positions", positions, POSITIONS)
        check_number("mask_ratio", mask_ratio, 0.0, 1.0, "a share below 1", 0.4)
        check_int("mixers", len(mixers), 1, LAYERS)
        check_place(device, dtype)
        for mixer in mixers:
            if not isinstance(mixer, MixerConfig):
                raise OptionError("mixers", repr(mixer), "configs", "Pass for example [PomConfig()] * 4.")
        kw: dict[str, Any] = {"device": device, "dtype": dtype}
        self.options = {  # the arguments that build the same model again
            "mixers": tuple(mixers), "classes": classes, "dim": dim, "height": height, "tokens": tokens,
            "mlp_ratio": mlp_ratio, "mask_ratio": mask_ratio, "span": span, "positions": positions,
        }  # fmt: skip
        self.height, self.tokens = height, tokens
        self.columns = max(1, tokens // GRID_ROWS) if positions == "grid" else None
        self.stem = _stem(dim, height, kw)
        if dim % 64 == 0:  # a third faster on CPU; with channels that do not fill its vectors, oneDNN crashes
            self.stem.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.masked = nn.Parameter(torch.zeros(1, 1, dim, **kw), requires_grad=mask_ratio > 0)
        ratios = [mlp_ratio] * len(mixers) if isinstance(mlp_ratio, (int, float)) else list(mlp_ratio)
        placed = [mixer.for_grid((tokens,)) for mixer in mixers]
        self.blocks = nn.ModuleList(
            MixerBlock(dim, mixer, mlp_ratio=ratio, **kw) for mixer, ratio in zip(placed, ratios, strict=True)
        )
        self.configs = placed
        self.norm = nn.LayerNorm(dim, eps=1e-6, **kw)
        self.head = nn.Linear(dim, classes, **kw)
        self.mask_ratio, self.span = mask_ratio, span
        nn.init.normal_(self.masked, std=0.02)

    def forward(self, lines: Tensor) -> Tensor:
        """Logits (B, W / 4, classes) of lines (B, 1, height, W), dark on white, values 0 to 1. Raises ShapeError."""
        size = lines.shape[1:3] if isinstance(lines, Tensor) and lines.ndim == 4 else ()
        if tuple(size) != (1, self.height) or lines.shape[3] % STRIDE or not lines.shape[3]:
            got = str(tuple(lines.shape)) if isinstance(lines, Tensor) else type(lines).__name__
            expected = f"(B, 1, {self.height}, W), W a multiple of {STRIDE}"
            raise ShapeError("lines", got, expected, "Resize the lines, and pad them with white.")
        return self.read(self.embed(lines))

    def embed(self, lines: Tensor) -> Tensor:
        """The stem: tokens (B, N, D) of lines (B, 1, height, 4 N)."""
        return self.stem(F.layer_norm(lines, lines.shape[1:])).flatten(2).transpose(1, 2)

    def read(self, x: Tensor) -> Tensor:
        """The transformer: logits (B, N, classes) of the stem's tokens (B, N, D)."""
        if self.training and self.mask_ratio:
            x = torch.where(self._spans(x.shape[1], x.device)[:, None], self.masked.to(x.dtype), x)
        x = x + sine_positions(x.shape[1], x.shape[2], self.columns).to(x)
        for block, config in zip(self.blocks, self.configs, strict=True):
            x = block(x, **config.call_options((x.shape[1],)))
        logits = self.head(self.norm(x))
        return F.layer_norm(logits, logits.shape[1:])

    def _spans(self, tokens: int, device: torch.device) -> Tensor:
        """(N,): the tokens that random spans cover, the same for the whole batch.

        As published, spans may overlap, and none reaches the last token.
        """
        count = int(self.mask_ratio * tokens) // self.span
        starts = torch.randint(max(tokens - self.span, 1), (count, 1), device=device)
        covered = torch.zeros(tokens, dtype=torch.bool, device=device)
        covered[(starts + torch.arange(self.span, device=device)).clamp_max(tokens - 1).flatten()] = True
        return covered


def sine_positions(tokens: int, dim: int, columns: int | None = None) -> Tensor:
    """(N, dim): half the channels are sines and cosines of the token's column, half those of its row.

    columns: in a row of tokens; None: there is one row.
    """
    quarter, place = dim // 4, torch.arange(tokens)
    row, column = (torch.zeros_like(place), place) if columns is None else (place // columns, place % columns)
    angles = torch.stack((column, row), 1)[..., None] * 10_000.0 ** -(torch.arange(quarter) / quarter)
    return torch.cat((angles.sin(), angles.cos()), 2).flatten(1)


class _Basic(nn.Module):
    """Two 3 × 3 convolutions with batch norm and a residual: ResNet's basic block."""

    def __init__(self, before: int, after: int, stride: tuple[int, int], kw: dict[str, Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False, **kw), nn.BatchNorm2d(after, **kw), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False, **kw), nn.BatchNorm2d(after, **kw),
        )  # fmt: skip
        same = before == after and stride == (1, 1)
        self.skip = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(before, after, 1, stride, bias=False, **kw), nn.BatchNorm2d(after, **kw)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


def _stem(dim: int, height: int, kw: dict[str, Any]) -> nn.Sequential:
    """(B, 1, height, W) to (B, dim, 1, W / 4)."""
    first = (2, 1) if height == 64 else (1, 1)
    widths, strides = (dim // 4, dim // 2, dim), ((2, 1), (2, 2), (2, 2))
    layers: list[nn.Module] = [
        nn.Conv2d(1, dim // 4, 3, first, 1, bias=False, **kw), nn.BatchNorm2d(dim // 4, **kw), nn.ReLU(),
        nn.MaxPool2d(3, (2, 1), 1),
    ]  # fmt: skip
    before = dim // 4
    for width, stride in zip(widths, strides, strict=True):
        layers += [_Basic(before, width, stride, kw), _Basic(width, width, (1, 1), kw)]
        before = width
    return nn.Sequential(*layers, nn.MaxPool2d(3, (2, 1), 1))
