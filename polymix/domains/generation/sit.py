"""SiT: a transformer that turns noise into images, with any mixer in place of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polymix.blocks import matching_mlp_ratio
from polymix.domains.generation.settings import SIZES
from polymix.errors import OptionError, ShapeError, check_choice, check_int, check_number
from polymix.limits import LAYERS, check_memory
from polymix.mixers import MixerConfig, SoftmaxConfig, TokenMixer
from polymix.models.generator import ImageGenerator
from polymix.models.vit import sine_positions
from polymix.structured.dense import Dense
from polymix.train.initial import start_as_xavier

SINES = 256  # of the time


class SiT(ImageGenerator):
    """SiT (Ma et al. 2024) with any mixer: a velocity for every pixel, given noisy images, times and classes.

        c = MLP(sines(t)) + E[class]
        X ← X + g₁ ∘ mixer(a₁ ∘ norm(X) + b₁),   X ← X + g₂ ∘ FF(a₂ ∘ norm(X) + b₂)

    where each block computes a − 1, b and g from SiLU(c) by a linear map that starts at zero (adaLN-Zero). Maps images
    or latents (B, channels, H, W), times (B,) in [0, 1] and classes (B,) to a tensor of the images' shape. t = 1 is
    data; `Diffusion` passes steps from 0 to 999 instead, 0 next to the data. SiT-XL/2 has 675 M parameters and SiT-L/2
    458 M. Other sizes of images than `image_size` work if the mixers take other grids: the positions are interpolated.
    Costs depth · (mixer(N) + 8 N D²) multiply-adds, N = H W / patch².

    Args:
        mixer: a config, or one for each block (a hybrid). None: attention.
        image_size: (H, W) or one number for both, in pixels or latents. patch: side of a patch; divides H and W.
        channels: of the images; 4 for the latents of Stable Diffusion's autoencoder.
        classes: number of classes; 0: an unconditional model.
        class_dropout: share of classes that training replaces by "none", which guidance needs. 0: there is no "none".
        dim, depth, heads, mlp_ratio: sizes. heads is for mixers that leave it open. See `SiT.of_size`.
        match_parameters: "mlp" narrows or widens the MLPs, "expand" the mixers, until a block has the parameters of
            attention's. None: sizes as given. The papers do not say how they match.
        position_scale: factor of the fixed 2-D sines. 1, as published, is a root mean square of 0.7.
        gate_start: value of the gates g at the start. 0, as published, starts every block as the identity.
        double_output: the last layer predicts twice the channels, as in the published checkpoints, whose weights
            `from_published` renames. The second half is for learned variances (`Diffusion`) and dropped otherwise.

    Raises:
        OptionError: an option is out of range, or a mixer cannot take the grid. ShapeError: an input does not fit.
    Source: Ma et al. 2024 (SiT), Section 3 and Table 8; Peebles and Xie 2023 (DiT), Section 3.2; PoM, Section 4.
    """

    def __init__(
        self, mixer: MixerConfig | Sequence[MixerConfig] | None = None, *, image_size: int | tuple[int, int] = 32,
        patch: int = 2, channels: int = 4, classes: int = 1000, class_dropout: float = 0.1, dim: int = 1152,
        depth: int = 28, heads: int = 16, mlp_ratio: float = 4.0, match_parameters: str | None = None,
        position_scale: float = 1.0, gate_start: float = 0.0, double_output: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = {"patch": patch, "channels": channels, "dim": dim, "heads": heads}
        for name, value in sizes.items():
            check_int(name, value, 1)
        check_int("depth", depth, 1, LAYERS)
        check_int("classes", classes, 0)
        check_number("class_dropout", class_dropout, 0.0, 1.0, "a share in [0, 1)", 0.1)
        check_number("mlp_ratio", mlp_ratio, 1 / dim, math.inf, f"a number of at least 1/dim = 1/{dim}", 4)
        check_number("position_scale", position_scale, 0.0, math.inf, "a number of at least 0", 1)
        check_number("gate_start", gate_start, -math.inf, math.inf, "a finite number", 0)
        check_choice("match_parameters", match_parameters, (None, "mlp", "expand"))
        check_choice("double_output", double_output, (True, False))
        size = tuple(image_size) if isinstance(image_size, (tuple, list)) else (image_size, image_size)
        if len(size) != 2 or any(type(side) is not int or side < 1 or side % patch for side in size):
            allowed = f"a multiple of patch={patch}, or two of them"
            raise OptionError("image_size", repr(image_size), allowed, "Change one of the two sizes.")
        mixer = SoftmaxConfig() if mixer is None else mixer
        configs = [mixer] * depth if isinstance(mixer, MixerConfig) else list(mixer)
        if len(configs) != depth or not all(isinstance(config, MixerConfig) for config in configs):
            got = f"{len(configs)} values"
            raise OptionError("mixer", got, f"a config, or one for each of {depth} blocks", "Pass one for all.")
        what = f"dim={dim:,} and depth={depth:,}"
        check_memory("dim, depth", what, 4 * depth * (2 * mlp_ratio + 6) * dim**2)
        self.options = {  # the arguments that build the same model again
            "mixer": tuple(configs), **sizes, "image_size": size, "classes": classes, "class_dropout": class_dropout,
            "depth": depth, "mlp_ratio": mlp_ratio, "match_parameters": match_parameters,
            "position_scale": position_scale, "gate_start": gate_start, "double_output": double_output,
        }  # fmt: skip
        self.patch, self.channels, self.classes, self.class_dropout = patch, channels, classes, class_dropout
        self.position_scale, self.double_output, self.gate_start = position_scale, double_output, gate_start
        self.grid = (size[0] // patch, size[1] // patch)
        self.embed = nn.Conv2d(channels, dim, patch, patch)
        self.time = nn.Sequential(nn.Linear(SINES, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.label = nn.Embedding(classes + self.guidable, dim) if classes else None
        self.register_buffer("position", position_scale * published_sines(self.grid, dim), persistent=False)
        attention = SoftmaxConfig().for_heads(heads)
        placed = [config.for_heads(heads).for_grid(self.grid) for config in configs]
        if match_parameters == "expand":
            placed = [_matching_width(config, attention, dim) for config in placed]
        ratios = [mlp_ratio] * depth
        if match_parameters == "mlp":
            whole = attention.build(dim, device="meta")
            ratios = [matching_mlp_ratio(c.build(dim, device="meta"), whole, dim, mlp_ratio) for c in placed]
        pairs = zip(placed, ratios, strict=True)
        self.blocks = nn.ModuleList(SiTBlock(dim, config, ratio) for config, ratio in pairs)
        self.norm = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim))
        self.head = nn.Linear(dim, patch**2 * channels * (1 + double_output))
        self._start()

    def _start(self) -> None:
        """Fresh weights, as published, of all but the linear layers of blocks."""
        nn.init.xavier_uniform_(self.embed.weight.flatten(1))
        assert self.embed.bias is not None
        nn.init.zeros_(self.embed.bias)
        first, second = self.time[0].weight, self.time[2].weight
        for weight in (first, second, *([] if self.label is None else [self.label.weight])):
            assert isinstance(weight, Tensor)
            nn.init.normal_(weight, std=0.02)
        _start_at_zero(self.modulation[1])
        _start_at_zero(self.head)
        for block in self.blocks:
            assert isinstance(block, SiTBlock)
            bias = _start_at_zero(block.modulation[1])
            with torch.no_grad():
                bias.view(6, -1)[2::3] = self.gate_start

    def start_as_published(self) -> None:
        """Fresh weights as published in all of the host and its attention; other mixers keep theirs."""
        start_as_xavier(self)
        self._start()

    @classmethod
    def of_size(cls, size: str, mixer: MixerConfig | Sequence[MixerConfig] | None = None, **options: Any) -> SiT:
        """SiT-S, B, L or XL; other options as for the class.

        Raises:
            OptionError: the size is none of these, or an option is out of range.
        """
        check_choice("size", size, SIZES)
        return cls(mixer, **{**SIZES[size], **options})

    @property
    def guidable(self) -> bool:
        """Whether the model has the class "none", with the number `classes`, which guidance needs."""
        return bool(self.classes) and self.class_dropout > 0

    def forward(
        self, images: Tensor, times: Tensor, labels: Tensor | None = None, *, all_channels: bool = False
    ) -> Tensor:
        """The prediction, of the images' shape; with all_channels and double_output, of twice the channels.

        labels: (B,); None: an unconditional model, or the class "none".
        """
        if all_channels and not self.double_output:
            cure = "Build the model with double_output=True."
            raise OptionError("all_channels", "True with double_output=False", "False", cure)
        labels = self._check(images, times, labels)
        height, width = (side // self.patch for side in images.shape[2:])
        x = self.embed(images).flatten(2).transpose(1, 2) + self._positions((height, width))  # (B, N, D)
        condition = self.time(time_sines(times).to(x.dtype))
        if self.label is not None and labels is not None:
            if self.training and self.class_dropout:
                dropped = torch.rand(len(labels), device=labels.device) < self.class_dropout
                labels = labels.masked_fill(dropped, self.classes)
            condition = condition + self.label(labels)
        for block in self.blocks:
            gridded = isinstance(block.mixer, TokenMixer) and bool(block.mixer.capabilities.grids)
            x = block(x, condition, **({"grid": (height, width)} if gridded else {}))
        shift, scale = self.modulation(condition).unsqueeze(1).chunk(2, -1)
        x = self.head(self.norm(x) * (1 + scale) + shift)
        x = x.view(len(x), height, width, self.patch, self.patch, -1).permute(0, 5, 1, 3, 2, 4)
        x = x.reshape(len(x), -1, height * self.patch, width * self.patch)
        return x if all_channels else x[:, : self.channels]

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        """The positions (N, D), at places between those of training where the images have another size."""
        position: Tensor = self.position  # type: ignore[assignment]
        if grid == self.grid:
            return position
        return self.position_scale * published_sines(grid, position.shape[1], self.grid).to(position)

    def _check(self, images: Tensor, times: Tensor, labels: Tensor | None) -> Tensor | None:
        if images.ndim != 4 or images.shape[1] != self.channels or any(side % self.patch for side in images.shape[2:]):
            allowed = f"(B, {self.channels}, H, W) with H and W divisible by {self.patch}"
            raise ShapeError("images", str(tuple(images.shape)), allowed, "Resize the images first.")
        batch = (len(images),)
        if times.shape != batch:
            raise ShapeError("times", str(tuple(times.shape)), str(batch), "Pass one time for each image.")
        if labels is None:
            if self.classes and not self.guidable:
                cure = "Pass classes, or train with class_dropout=0.1."
                raise OptionError("labels", "None", "classes, as the model has no class 'none'", cure)
            return torch.full(batch, self.classes, device=images.device) if self.classes else None
        if not self.classes:
            raise OptionError("labels", "classes", "None, as the model is unconditional", "Leave labels out.")
        if labels.shape != batch or labels.is_floating_point():
            got = f"{labels.dtype} of shape {tuple(labels.shape)}"
            raise ShapeError("labels", got, f"integers of shape {batch}", "Pass one class for each image.")
        last = self.classes - 1 + self.guidable
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) <= last:
            got = f"{int(labels.min())} to {int(labels.max())}"
            raise OptionError("labels", got, f"classes from 0 to {self.classes - 1}", "Choose a class of the model.")
        return labels


class SiTBlock(nn.Module):
    """A block of SiT (adaLN-Zero): mixer and MLP, each scaled, shifted and gated by the condition (B, D).

    Args:
        dim: number of channels D. config: of the mixer. mlp_ratio: width of the MLP, divided by dim.
    Source: Peebles and Xie 2023 (DiT), Section 3.2.
    """

    def __init__(self, dim: int, config: MixerConfig, mlp_ratio: float) -> None:
        super().__init__()
        hidden = int(dim * mlp_ratio)
        self.mixer: TokenMixer = config.build(dim)
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.mlp = nn.Sequential(Dense(dim, hidden), nn.GELU(approximate="tanh"), Dense(hidden, dim))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, condition: Tensor, **options: Any) -> Tensor:
        b1, a1, g1, b2, a2, g2 = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        x = x + g1 * self.mixer(self.norm1(x) * (1 + a1) + b1, **options)
        return x + g2 * self.mlp(self.norm2(x) * (1 + a2) + b2)


PUBLISHED_NAMES = (
    ("x_embedder.proj.", "embed."), ("t_embedder.mlp.", "time."), ("y_embedder.embedding_table.", "label."),
    ("final_layer.linear.", "head."), ("final_layer.adaLN_modulation.", "modulation."),
    (".adaLN_modulation.", ".modulation."), (".attn.qkv.", ".mixer.qkv.qkv."), (".attn.proj.", ".mixer.proj."),
    (".mlp.fc1.", ".mlp.0."), (".mlp.fc2.", ".mlp.2."),
)  # fmt: skip


def from_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model with attention of the authors' SiT or DiT code, under the names of `SiT`.

    Their table of positions is left out: `SiT` computes it.
    """
    renamed = {}
    for name, value in state.items():
        if name != "pos_embed":
            for theirs, ours in PUBLISHED_NAMES:
                name = name.replace(theirs, ours, 1)
            renamed[name] = value
    return renamed


def published_sines(grid: tuple[int, int], dim: int, within: tuple[int, int] | None = None) -> Tensor:
    """`sine_positions` with the channels as in the authors' code: sines and cosines of the column, then of the row."""
    sines = sine_positions(grid, dim, 10_000.0, within)
    places = torch.arange(dim // 4 * 4).view(4, -1)
    return torch.cat((sines[:, places[[1, 3, 0, 2]].flatten()], sines[:, places.numel() :]), 1)


def _start_at_zero(layer: nn.Module) -> Tensor:
    """Zero a linear layer; returns its bias."""
    assert isinstance(layer, nn.Linear)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer.bias


def time_sines(times: Tensor) -> Tensor:
    """Cosines and sines (B, 256) of the times, at 128 frequencies from 1 down to 1/10,000 in geometric steps."""
    half = SINES // 2
    frequency = 10_000.0 ** -(torch.arange(half, device=times.device) / half)
    angle = times.float()[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), 1)


def _matching_width(config: MixerConfig, attention: MixerConfig, dim: int) -> MixerConfig:
    """The config whose width gives the mixer the parameters of attention, to half a channel."""
    if type(config) is type(attention):
        return config
    name = config.width_option
    if name is None:
        cure = "Use match_parameters='mlp'."
        raise OptionError("match_parameters", f"'expand' with {config.name}", "a mixer with a width", cure)

    def count(channels: int) -> int:
        built = config.changed(**{name: channels / dim}).build(dim, device="meta")
        return sum(p.numel() for p in built.parameters())

    whole = sum(p.numel() for p in attention.build(dim, device="meta").parameters())
    slope = (count(2 * dim) - count(dim)) / dim  # parameters are linear in the width
    channels = max(1, round(dim + (whole - count(dim)) / slope))
    return config.changed(**{name: channels / dim})
