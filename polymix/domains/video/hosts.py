"""The model: frames of patches through any mixer, all at once or frame after frame with a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polymix.blocks import MixerBlock
from polymix.domains.video.recipe import VideoRecipe
from polymix.errors import OptionError, ShapeError
from polymix.mixers import MixerConfig
from polymix.models.vit import sine_positions, sines


class StreamState(NamedTuple):
    """What a model keeps of the frames so far: how many they were, and the state of each block's mixer."""

    frames: int
    mixers: tuple[Any, ...]


class VideoTransformer(nn.Module):
    """Clips (B, T, C, S, S) -> what each frame's tokens say: logits (B, T, classes), or the frame after it.

        Z = W patch + P + W_t sines(t)      for every patch of every frame; blocks; norm
        logits_t = W_o mean of frame t's tokens         frame_{t+1} = frame_t + W_o tokens of frame t

    Without causal order every frame's tokens see the whole clip, and only the last frame's output is returned, (B, 1,
    …). With causal="frame" the tokens of a frame see their frame and those before it: the mixers are called with
    causal=K, the tokens of a frame, and `step` reads frame after frame at constant cost. Time is not bounded by T then,
    as its sines go through a layer that learns.

    Args:
        recipe: sizes. mixers: a config for each block. channels: C. classes: outputs of a clip; None: the next frame.
    Raises:
        OptionError: with causal="frame", a mixer has no block-causal mask.
    """

    def __init__(
        self, recipe: VideoRecipe, mixers: Sequence[MixerConfig], channels: int, classes: int | None
    ) -> None:  # fmt: skip
        super().__init__()
        dim, side = recipe.dim, recipe.image_size // recipe.patch
        self.shape, self.patch = (channels, recipe.image_size, recipe.image_size), recipe.patch
        self.side, self.causal, self.classes = side, recipe.causal is not None, classes
        grid = (recipe.frames, side, side)
        configs = [config if self.causal else config.for_grid(grid, 0) for config in mixers]
        self.embed = nn.Linear(channels * recipe.patch**2, dim)
        self.place = nn.Parameter(sine_positions((side, side), dim))
        self.time = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(
            MixerBlock(dim, config, mlp_ratio=recipe.mlp_ratio, dropout=recipe.dropout) for config in configs
        )
        self.calls = [self._call(block, config, grid) for block, config in zip(self.blocks, configs, strict=True)]
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, channels * recipe.patch**2 if classes is None else classes)

    def _call(self, block: Any, config: MixerConfig, grid: tuple[int, ...]) -> dict[str, Any]:
        """The options of a block's call: the grid, or in causal order the tokens of a frame."""
        if not self.causal:
            return config.call_options(grid)
        if not block.mixer.capabilities.has("block_causal"):
            got = f"{config.name} with causal=frame"
            raise OptionError("mixer", got, "a mixer with a block-causal mask", "For example, pom or softmax.")
        return {"causal": self.side**2 if self.side > 1 else True}

    def forward(self, clips: Tensor) -> Tensor:
        if clips.ndim != 5 or tuple(clips.shape[2:]) != self.shape:
            raise ShapeError("clips", tuple(clips.shape), f"(B, T, {', '.join(map(str, self.shape))})", "Resize them.")
        frames = clips if self.causal else clips[:, -1:]
        tokens = self._tokens(clips, torch.arange(clips.shape[1], device=clips.device)).flatten(1, 2)
        for block, call in zip(self.blocks, self.calls, strict=True):
            tokens = block(tokens, **call)
        return self._output(tokens[:, -frames.shape[1] * self.side**2 :].unflatten(1, (frames.shape[1], -1)), frames)

    def step(self, frames: Tensor, state: StreamState | None = None) -> tuple[Tensor, StreamState]:
        """The next frame (B, C, S, S) of each stream: its output, without T, and the state after it.

        The same as `forward` on all frames so far, at a cost that does not grow with them.

        Raises:
            OptionError: the model is not causal. CapabilityError: a mixer has no state of fixed size, as attention.
        """
        if not self.causal:
            raise OptionError(
                "causal", None, "'frame', for a model that reads frame after frame", "Train such a model."
            )
        state = StreamState(0, (None,) * len(self.blocks)) if state is None else state
        time = torch.tensor([state.frames], device=frames.device)
        tokens, states = self._tokens(frames[:, None], time)[:, 0], []
        blocks: Any = self.blocks
        for block, call, before in zip(blocks, self.calls, state.mixers, strict=True):
            tokens, after = block.step(tokens, before, **call)
            states.append(after)
        return self._output(tokens[:, None], frames[:, None])[:, 0], StreamState(state.frames + 1, tuple(states))

    def _tokens(self, clips: Tensor, time: Tensor) -> Tensor:
        """Clips (B, T, C, S, S) at times (T) -> tokens (B, T, K, D)."""
        patches = clips.unflatten(-1, (self.side, -1)).unflatten(-3, (self.side, -1))  # (B, T, C, side, p, side, p)
        patches = patches.permute(0, 1, 3, 5, 2, 4, 6).flatten(-3).flatten(2, 3)
        moments = self.time(sines(time[:, None], self.embed.out_features).to(self.place))
        return self.embed(patches) + self.place + moments[:, None]

    def _output(self, tokens: Tensor, frames: Tensor) -> Tensor:
        """What tokens (B, T, K, D) of frames (B, T, C, S, S) say."""
        tokens = self.norm(tokens)
        if self.classes is not None:
            return self.head(tokens.mean(2))
        patches = self.head(tokens).unflatten(-1, (-1, self.patch, self.patch)).unflatten(2, (self.side, self.side))
        return frames + patches.permute(0, 1, 4, 2, 5, 3, 6).flatten(-2).flatten(-3, -2)
