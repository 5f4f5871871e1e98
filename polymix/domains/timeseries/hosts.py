"""The models: patches or whole variables as tokens, for forecasts and classes, and DLinear, which has no tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, pad

from polymix.blocks import MixerBlock
from polymix.domains.timeseries.recipe import TimeseriesRecipe
from polymix.mixers import MixerConfig
from polymix.train.data.series.scores import LEVELS
from polymix.train.data.series.times import COVARIATES
from polymix.train.data.series.windows import level_and_width

TREND = 25  # steps of DLinear's moving average (Zeng et al. 2022)


class Forecaster(nn.Module):
    """past (B, V, C), observed (B, V, C), calendar (B, C + H, 6) -> forecasts (B, V, H, quantiles) in past's unit.

    The instance norm takes level and width of what was observed off the past and puts them back on the forecast; what
    was not observed is 0 and is told apart by an input of its own. A subclass maps the normed past by `mix`.
    """

    def __init__(self, recipe: TimeseriesRecipe) -> None:
        super().__init__()
        self.context, self.horizon = recipe.context, recipe.horizon
        self.outputs = len(LEVELS) if recipe.criterion == "quantiles" else 1

    def forward(self, past: Tensor, observed: Tensor, calendar: Tensor) -> Tensor:
        level, width = level_and_width(past, observed)
        normed = torch.where(observed, (past - level) / width, torch.zeros_like(past))
        return self.mix(normed, observed.to(past.dtype), calendar) * width[..., None] + level[..., None]

    def mix(self, past: Tensor, observed: Tensor, calendar: Tensor) -> Tensor:
        raise NotImplementedError


class Transformer(Forecaster):
    """The blocks that both hosts share."""

    def __init__(self, recipe: TimeseriesRecipe, mixers: Sequence[MixerConfig], tokens: int) -> None:
        super().__init__(recipe)
        configs = [config.for_grid((tokens,), 0) for config in mixers]
        self.place = nn.Parameter(waves(tokens, recipe.dim))
        self.blocks = nn.ModuleList(
            MixerBlock(recipe.dim, config, mlp_ratio=recipe.mlp_ratio, dropout=recipe.dropout) for config in configs
        )
        self.calls = [config.call_options((tokens,)) for config in configs]
        self.norm = nn.LayerNorm(recipe.dim)

    def through(self, tokens: Tensor) -> Tensor:
        """Tokens (B, N, D) through the blocks, which know their places."""
        tokens = tokens + self.place
        for block, call in zip(self.blocks, self.calls, strict=True):
            tokens = block(tokens, **call)
        return self.norm(tokens)


def waves(tokens: int, dim: int) -> Tensor:
    """Positions (tokens, dim) to start from: sines and cosines of all frequencies up to half a turn a token."""
    turns = torch.arange(tokens)[:, None] * torch.linspace(0.5 / dim, 0.5, math.ceil(dim / 2)) * 2 * math.pi
    return torch.cat((turns.sin(), turns.cos()), 1)[:, :dim]


class PatchForecaster(Transformer):
    """Each variable alone; patches of it are tokens. Source: PatchTST (Nie et al. 2023), without overlaps.

    Its head is a linear layer on all tokens of the past (head="flat"), which mixes them by itself. With head="query"
    the patches of the future are tokens too, empty but for the calendar, and a linear layer reads each: what they know
    of the past comes through the mixers alone.
    """

    def __init__(self, recipe: TimeseriesRecipe, mixers: Sequence[MixerConfig]) -> None:
        patch, dim, past = recipe.patch, recipe.dim, recipe.context // recipe.patch
        future = math.ceil(recipe.horizon / patch) if recipe.head == "query" else 0
        super().__init__(recipe, mixers, past + future)
        self.patch, self.past, self.future = patch, past, future
        self.embed = nn.Linear(patch * (2 + COVARIATES), dim)
        self.query = nn.Parameter(torch.zeros(dim))
        steps = patch if future else recipe.horizon
        self.head = nn.Linear(dim if future else past * dim, steps * self.outputs)

    def mix(self, past: Tensor, observed: Tensor, calendar: Tensor) -> Tensor:
        batch, variables, _ = past.shape
        steps = (self.past + self.future) * self.patch
        dates = pad(calendar, (0, 0, 0, max(0, steps - calendar.shape[1])))[:, :steps]
        dates = dates.unflatten(1, (-1, self.patch)).flatten(2).repeat_interleave(variables, 0)
        seen = [pad(part, (0, self.future * self.patch)).unflatten(-1, (-1, self.patch)).flatten(0, 1)
                for part in (past, observed)]  # fmt: skip
        tokens = self.embed(torch.cat((*seen, dates), -1))
        if not self.future:
            output = self.head(self.through(tokens).flatten(1))
        else:
            asked = pad(self.query.expand(self.future, -1), (0, 0, self.past, 0))
            output = self.head(self.through(tokens + asked)[:, self.past :]).flatten(1)[
                :, : self.horizon * self.outputs
            ]
        return output.unflatten(-1, (self.horizon, self.outputs)).unflatten(0, (batch, variables))


class InvertedForecaster(Transformer):
    """Whole variables as tokens, so that mixers mix between variables. Source: iTransformer (Liu et al. 2024).

    The calendar of the first step of the future is added to each token.
    """

    def __init__(self, recipe: TimeseriesRecipe, mixers: Sequence[MixerConfig], variables: int) -> None:
        super().__init__(recipe, mixers, variables)
        self.embed = nn.Linear(2 * recipe.context, recipe.dim)
        self.dates = nn.Linear(COVARIATES, recipe.dim)
        self.head = nn.Linear(recipe.dim, recipe.horizon * self.outputs)

    def mix(self, past: Tensor, observed: Tensor, calendar: Tensor) -> Tensor:
        tokens = self.embed(torch.cat((past, observed), -1)) + self.dates(calendar[:, None, self.context])
        return self.head(self.through(tokens)).unflatten(-1, (self.horizon, self.outputs))


class Classifier(Transformer):
    """values (B, V, C), observed (B, V, C) -> logits (B, classes): patches of all variables, or variables, are tokens.

    The head is a linear layer on the mean of the tokens of which something was observed: what depends on several
    tokens comes through the mixers alone.
    """

    def __init__(
        self, recipe: TimeseriesRecipe, mixers: Sequence[MixerConfig], variables: int, length: int, classes: int
    ) -> None:
        self.patch = recipe.patch if recipe.host == "patch" else 0
        super().__init__(recipe, mixers, length // self.patch if self.patch else variables)
        self.embed = nn.Linear(2 * (variables * self.patch if self.patch else length), recipe.dim)
        self.head = nn.Linear(recipe.dim, classes)

    def forward(self, past: Tensor, observed: Tensor, calendar: Tensor | None = None) -> Tensor:
        parts = [past, observed.to(past.dtype)]
        if self.patch:
            parts = [part.unflatten(-1, (-1, self.patch)).transpose(1, 2).flatten(2) for part in parts]
        seen = parts[1].amax(-1, keepdim=True)
        tokens = self.through(self.embed(torch.cat(parts, -1)))
        return self.head((tokens * seen).sum(1) / seen.sum(1).clamp_min(1))


class DLinear(Forecaster):
    """A linear layer on the trend, a moving average, and one on the rest; a control. Source: Zeng et al. 2022."""

    def __init__(self, recipe: TimeseriesRecipe) -> None:
        super().__init__(recipe)
        size = recipe.horizon * self.outputs
        self.trend, self.rest = (nn.Linear(recipe.context, size) for _ in range(2))

    def mix(self, past: Tensor, observed: Tensor, calendar: Tensor) -> Tensor:
        half = TREND // 2
        trend = avg_pool1d(pad(past, (half, half), mode="replicate"), TREND, 1)
        return (self.trend(trend) + self.rest(past - trend)).unflatten(-1, (self.horizon, self.outputs))
