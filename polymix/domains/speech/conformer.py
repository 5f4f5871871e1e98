"""The model: a Conformer with any mixer in attention's place, for whole clips or for a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import glu, normalize, pad, silu

from polymix.domains.speech.recipe import SpeechRecipe
from polymix.errors import OptionError, ShapeError
from polymix.mixers import MixerConfig
from polymix.models.vit import sines

TAPS = 3  # of the stem's convolutions
LONGEST = 10_000.0  # wavelength of the positions' slowest sine, in tokens / 2π


class StreamState(NamedTuple):
    """What a model keeps of a stream: tokens so far, the last frames of each convolution, the state of each mixer."""

    tokens: int
    stem: tuple[Tensor, ...]
    windows: tuple[Tensor, ...]
    mixers: tuple[Any, ...]


class Stem(nn.Module):
    """Frames (B, T, bands) -> tokens (B, ⌈T / subsample⌉, dim): convolutions of stride 2 with ReLU, a linear layer.

    What is padding (mask False) is zero before each of them, as what lies beyond a clip's ends is.
    """

    def __init__(self, recipe: SpeechRecipe) -> None:
        super().__init__()
        self.past = TAPS - 1 if recipe.causal else TAPS // 2
        stages = recipe.subsample.bit_length() - 1
        self.convolutions = nn.ModuleList(
            nn.Conv2d(recipe.stem if stage else 1, recipe.stem, TAPS, 2, (0, TAPS // 2)) for stage in range(stages)
        )
        self.project = nn.Linear(recipe.stem * -(-recipe.bands // recipe.subsample), recipe.dim)

    def forward(self, frames: Tensor, mask: Tensor | None) -> Tensor:
        x = frames[:, None]
        for convolution in self.convolutions:
            if mask is not None:
                x, mask = x * mask[:, None, :, None], mask[:, ::2]
            x = convolution(pad(x, (0, 0, self.past, TAPS - 1 - self.past))).relu()
        return self.project(x.transpose(1, 2).flatten(2))

    def step(self, frames: Tensor, windows: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`forward` of the next frames, a multiple of `subsample`, with the last ones that each convolution has had."""
        x, after = frames[:, None], []
        for convolution, window in zip(self.convolutions, windows, strict=True):
            x = torch.cat((window, x), 2)
            after.append(x[:, :, 1 - TAPS :])
            x = convolution(x).relu()
        return self.project(x.transpose(1, 2).flatten(2)), tuple(after)

    def start(self, frames: Tensor) -> tuple[Tensor, ...]:
        """The windows before the first of the frames (B, T, bands)."""
        windows, bands, convolutions = [], frames.shape[2], list[Any](self.convolutions)
        for convolution in convolutions:
            windows.append(frames.new_zeros(len(frames), convolution.in_channels, TAPS - 1, bands))
            bands = -(-bands // 2)
        return tuple(windows)


class Convolution(nn.Module):
    """x -> W₂ silu(norm(depthwise(glu(W₁ norm(x))))), over `kernel` tokens, or over as many up to a token if causal.

    The norm behind the depthwise convolution is over channels, where the paper has a batch norm: that one sees other
    clips and later tokens in training.
    """

    def __init__(self, recipe: SpeechRecipe) -> None:
        super().__init__()
        dim, self.kernel = recipe.dim, recipe.kernel
        self.past = self.kernel - 1 if recipe.causal else (self.kernel - 1) // 2
        self.norm, self.inner_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.enter, self.leave = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.depthwise = nn.Conv1d(dim, dim, self.kernel, groups=dim)
        self.drop = nn.Dropout(recipe.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        inner = glu(self.enter(self.norm(x)), -1)
        inner = inner if mask is None else inner * mask[..., None]
        return self._rest(pad(inner, (0, 0, self.past, self.kernel - 1 - self.past)))

    def step(self, x: Tensor, window: Tensor | None) -> tuple[Tensor, Tensor]:
        inner = glu(self.enter(self.norm(x)), -1)
        window = inner.new_zeros(len(x), self.kernel - 1, inner.shape[2]) if window is None else window
        inner = torch.cat((window, inner), 1)
        return self._rest(inner), inner[:, inner.shape[1] - self.kernel + 1 :]

    def _rest(self, inner: Tensor) -> Tensor:
        inner = self.depthwise(inner.transpose(1, 2)).transpose(1, 2)
        return self.drop(self.leave(silu(self.inner_norm(inner))))


class ConformerBlock(nn.Module):
    """x ← x + ½ FF(x);  x ← x + mixer(norm(x));  x ← x + conv(x);  x ← norm(x + ½ FF(x)).

    FF = norm, Linear, silu, Linear. Source: Gulati et al. 2020, Eq. 1.

    Raises OptionError: the mixer takes no padding, or has no causal form where the recipe needs one.
    """

    def __init__(self, recipe: SpeechRecipe, config: MixerConfig) -> None:
        super().__init__()
        config = config if recipe.heads is None else config.for_heads(recipe.heads)
        self.config, self.causal = config.for_order() if recipe.causal else config, recipe.causal
        dim, hidden = recipe.dim, int(recipe.mlp_ratio * recipe.dim)
        self.mixer = self.config.build(dim)
        for name in ("padding", "causal") if recipe.causal else ("padding",):
            if not self.mixer.capabilities.has(name):
                what = "a causal form" if name == "causal" else "padding masks"
                raise OptionError("mixer", config.name, f"a mixer with {what}", "For example, pom or softmax.")
        self.norm, self.last_norm, self.convolution = nn.LayerNorm(dim), nn.LayerNorm(dim), Convolution(recipe)
        self.first, self.second = (
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.SiLU(), nn.Dropout(recipe.dropout),
                          nn.Linear(hidden, dim), nn.Dropout(recipe.dropout))
            for _ in range(2)
        )  # fmt: skip

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + 0.5 * self.first(x)
        options: dict[str, Any] = {"mask": mask, **self.config.call_options((x.shape[1],))}
        if self.causal:
            options["causal"] = True
        x = x + self.mixer(self.norm(x), **options)
        x = x + self.convolution(x, mask)
        return self.last_norm(x + 0.5 * self.second(x))

    def step(self, x: Tensor, state: Any, window: Tensor | None) -> tuple[Tensor, Any, Tensor]:
        x = x + 0.5 * self.first(x)
        mixed, state = self.mixer.prefill(self.norm(x), state)
        x = x + mixed
        convolved, window = self.convolution.step(x, window)
        x = x + convolved
        return self.last_norm(x + 0.5 * self.second(x)), state, window


class Quantizer(nn.Module):
    """Normed features (B, T, bands) -> the code of each token (B, N): of the nearest entry of a random codebook.

        code = argmin_c ‖ c / ‖c‖ - A x / ‖A x‖ ‖        x: the frames of a token, one after another

    A is drawn as Xavier's weights, the entries from a normal distribution; neither learns. Source: Chiu et al. 2022.
    """

    projection: Tensor
    codebook: Tensor

    def __init__(self, recipe: SpeechRecipe) -> None:
        super().__init__()
        self.subsample = recipe.subsample
        weights = torch.empty(recipe.code_dim, recipe.subsample * recipe.bands)
        self.register_buffer("projection", nn.init.xavier_normal_(weights))
        self.register_buffer("codebook", normalize(torch.randn(recipe.codes, recipe.code_dim), dim=1))

    def forward(self, frames: Tensor) -> Tensor:
        stacked = pad(frames, (0, 0, 0, -frames.shape[1] % self.subsample)).unflatten(1, (-1, self.subsample))
        return (normalize(stacked.flatten(2) @ self.projection.T, dim=2) @ self.codebook.T).argmax(2)


class Conformer(nn.Module):
    """Features (B, T, bands) of clips -> logits (B, ⌈T / subsample⌉, outputs) for each token.

    The features are normed by mean and deviation of the training's, which the model keeps. What stands behind a clip's
    end changes nothing that is within it. With causal=True a token depends on no later frame than its first, and `step`
    transcribes a stream at constant cost.

    Args:
        recipe: sizes. mixers: a config for each block. outputs: characters and a blank, or codes.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, recipe: SpeechRecipe, mixers: Sequence[MixerConfig], outputs: int) -> None:
        super().__init__()
        self.subsample, self.bands, self.causal = recipe.subsample, recipe.bands, recipe.causal
        self.register_buffer("mean", torch.zeros(recipe.bands))
        self.register_buffer("deviation", torch.ones(recipe.bands))
        self.stem, self.place = Stem(recipe), nn.Linear(recipe.dim, recipe.dim)
        self.blocks = nn.ModuleList(ConformerBlock(recipe, config) for config in mixers)
        self.head = nn.Linear(recipe.dim, outputs)
        self.quantizer = Quantizer(recipe) if recipe.goal == "best_rq" else None

    @property
    def streams(self) -> bool:
        """Whether `step` works: the model is causal, and every mixer has a state of fixed size."""
        blocks: Any = self.blocks
        return self.causal and all(block.mixer.capabilities.recurrent for block in blocks)

    def forward(
        self, features: Tensor, frames: Tensor | None = None, hidden: Tensor | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """Logits. frames (B): of each clip; None: all. hidden (B, N): tokens whose frames are `noise` (B, T, bands)."""
        if features.ndim != 3 or features.shape[2] != self.bands:
            raise ShapeError("features", tuple(features.shape), f"(B, T, {self.bands})", "Pass log-mel features.")
        x, real = self.normed(features), None
        if hidden is not None and noise is not None:
            covered = hidden.repeat_interleave(self.subsample, 1)[:, : x.shape[1], None]
            x = torch.where(covered, noise.to(x), x)
        if frames is not None and int(frames.min()) < features.shape[1]:
            real = torch.arange(features.shape[1], device=features.device) < frames[:, None]
        x = self._placed(self.stem(x, real), 0)
        mask = None if real is None else real[:, :: self.subsample]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)

    def normed(self, features: Tensor) -> Tensor:
        """Features with mean 0 and deviation 1 in each band, over the training's clips."""
        return (features - self.mean) / self.deviation

    def _placed(self, tokens: Tensor, start: int) -> Tensor:
        places = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        return tokens + self.place(sines(places[:, None], tokens.shape[2], LONGEST).to(tokens))

    def step(self, features: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState]:
        """The logits of a stream's next frames (B, T, bands), T a multiple of `subsample`, and the state after them.

        The same as `forward` on all frames so far. The state has a fixed size, if the mixers' have.

        Raises:
            OptionError: the model is not causal. ShapeError: T does not fit. CapabilityError: a mixer has no state of
                fixed size, as attention.
        """
        if not self.causal:
            raise OptionError("causal", False, "True, for a model that listens to a stream", "Train such a model.")
        if features.ndim != 3 or features.shape[1] % self.subsample or not features.shape[1]:
            allowed = f"(B, T, {self.bands}) with T a multiple of {self.subsample}"
            raise ShapeError("features", tuple(features.shape), allowed, "Keep what is left for the next step.")
        count = len(self.blocks)
        start = StreamState(0, self.stem.start(features), (None,) * count, (None,) * count)  # type: ignore[arg-type]
        before = start if state is None else state
        x, stem = self.stem.step(self.normed(features), before.stem)
        x, mixers, windows = self._placed(x, before.tokens), [], []
        blocks: Any = self.blocks
        for block, mixed, window in zip(blocks, before.mixers, before.windows, strict=True):
            x, after, window = block.step(x, mixed, window)
            mixers.append(after)
            windows.append(window)
        return self.head(x), StreamState(before.tokens + features.shape[1] // self.subsample, stem, tuple(windows),
                                         tuple(mixers))  # fmt: skip
