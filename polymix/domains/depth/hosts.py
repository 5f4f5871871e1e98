"""The hosts: a small transformer over the patches of one or several views, and transformers' DPT and GLPN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from polymix.blocks import MixerBlock
from polymix.compat import cure_torchvision
from polymix.convert.adapters.libraries import load_library
from polymix.domains.depth.recipe import STAGES, DepthRecipe
from polymix.errors import ShapeError
from polymix.mixers import MixerConfig
from polymix.models.vit import sine_positions
from polymix.train.hosts import put_mixers

RAY = 9  # numbers of a ray: its origin, its direction, and their cross product
HEAD = 32  # channels of a head of attention in DPT
RANGE = 10  # of GLPN's largest depth over the typical one, where there is no `max_depth`
TINY = 1e-6  # below which GLPN's share of the largest depth is cut off


class Host(nn.Module):
    """Views (B, K, 3, H, W) from -1 to 1, and rays -> log depth (B, K, H, W), around c, that of the training data."""

    centre: Tensor

    def __init__(self, recipe: DepthRecipe, centre: float) -> None:
        super().__init__()
        self.shape = (recipe.cameras, 3, recipe.height, recipe.width)
        self.register_buffer("centre", torch.tensor(centre))

    def forward(self, views: Tensor, rays: Tensor | None = None) -> Tensor:
        """rays: (B, K, N, 6), the place and the direction of each token's, where the cameras are several."""
        if tuple(views.shape[1:]) != self.shape:
            raise ShapeError("views", tuple(views.shape), f"(B, {', '.join(map(str, self.shape))})", "Resize them.")
        return self.centre + self.relative(views, rays)

    relative: Callable[[Tensor, Tensor | None], Tensor]  # the log depth without c


class DepthTransformer(Host):
    """A mixer over the patches of all views.

        Z = W patch + P + W_r (o, d, o × d);  blocks;  log depth = c + W_o norm(Z)

    The ray of a token, from its camera's place o in the direction d of its middle, is in the axes of the scene's first
    camera, where distances are divided by the typical depth e^c. One view has no rays: they would be the same always.

    Args:
        recipe: sizes. mixers: a config for each block. centre: c, the mean log depth of the training data.
    """

    def __init__(self, recipe: DepthRecipe, mixers: Sequence[MixerConfig], centre: float) -> None:
        super().__init__(recipe, centre)
        self.patch, self.grid = recipe.patch_size, recipe.grid[-2:]
        grid = recipe.grid if recipe.cameras > 1 else self.grid
        configs = [config.for_grid(grid, 0) for config in mixers]
        self.embed = nn.Conv2d(3, recipe.dim, self.patch, self.patch)
        self.place = nn.Parameter(sine_positions((self.grid[0], self.grid[1]), recipe.dim))
        self.ray = nn.Linear(RAY, recipe.dim) if recipe.cameras > 1 else None
        self.blocks = nn.ModuleList(
            MixerBlock(recipe.dim, config, mlp_ratio=recipe.mlp_ratio, dropout=recipe.dropout) for config in configs
        )
        self.calls = [config.call_options(grid) for config in configs]
        self.norm = nn.LayerNorm(recipe.dim)
        self.head = nn.Linear(recipe.dim, self.patch**2)

    def relative(self, views: Tensor, rays: Tensor | None) -> Tensor:
        tokens = self.embed(views.flatten(0, 1)).flatten(2).transpose(1, 2).unflatten(0, views.shape[:2]) + self.place
        if self.ray is not None:
            if rays is None:
                raise ShapeError(
                    "rays", None, f"(B, {self.shape[0]}, {len(self.place)}, 6)", "Pass those of the poses."
                )
            origin, direction = rays[..., :3] * (-self.centre).exp(), rays[..., 3:]
            tokens = tokens + self.ray(torch.cat((origin, direction, torch.linalg.cross(origin, direction)), -1))
        tokens = tokens.flatten(1, 2)
        for block, call in zip(self.blocks, self.calls, strict=True):
            tokens = block(tokens, **call)
        patches = self.head(self.norm(tokens)).unflatten(-1, (self.patch, -1))
        return patches.unflatten(1, (self.shape[0], *self.grid)).transpose(3, 4).flatten(4, 5).flatten(2, 3)


class Published(Host):
    """DPT or GLPN of transformers, brought to the size of the views.

    GLPN (Kim et al. 2022) as published: log(m σ(x)), where m is `max_depth`, or 10 e^c without one. DPT (Ranftl et al.
    2021): c + x, without the last ReLU, at which no gradient would be left. Its published weights mean inverse depth.
    """

    def __init__(self, recipe: DepthRecipe, centre: float) -> None:
        bound = math.log(RANGE) + centre if recipe.max_depth is None else math.log(recipe.max_depth)
        super().__init__(recipe, centre if recipe.host == "dpt" else bound)
        cure_torchvision()
        library: Any = load_library("transformers")
        self.is_dpt = recipe.host == "dpt"
        if self.is_dpt:
            config = library.DPTConfig(
                hidden_size=recipe.dim, num_hidden_layers=recipe.depth, num_attention_heads=max(1, recipe.dim // HEAD),
                intermediate_size=max(1, round(recipe.mlp_ratio * recipe.dim)), hidden_dropout_prob=recipe.dropout,
                image_size=[recipe.height, recipe.width], patch_size=recipe.patch_size, fusion_hidden_size=recipe.dim,
                backbone_out_indices=[recipe.depth * (k + 1) // STAGES - 1 for k in range(STAGES)],
                neck_hidden_sizes=[recipe.dim] * STAGES,
            )  # fmt: skip
            self.model = library.DPTForDepthEstimation(config)
            self.model.head.head[-1] = nn.Identity()
            self.model.dpt.layernorm = self.model.neck.fusion_stage.layers[0].residual_layer1 = nn.Identity()  # unused
        else:
            config = library.GLPNConfig(
                depths=[recipe.depth] * STAGES, hidden_sizes=[recipe.dim * 2**k // 2 for k in range(STAGES)],
                num_attention_heads=[1, 2, 4, 8], mlp_ratios=[int(recipe.mlp_ratio)] * STAGES,
                decoder_hidden_size=recipe.dim, max_depth=1, hidden_dropout_prob=recipe.dropout,
            )  # fmt: skip
            self.model = library.GLPNForDepthEstimation(config)
        put_mixers(self, recipe, torch.zeros(1, *self.shape), recipe.match_parameters)

    def relative(self, views: Tensor, rays: Tensor | None) -> Tensor:
        depth = self.model(views[:, 0]).predicted_depth[:, None]
        return interpolate(depth if self.is_dpt else depth.clamp_min(TINY).log(), views.shape[-2:], mode="bilinear")


def build(recipe: DepthRecipe, centre: float) -> Host:
    """The host with fresh weights and the recipe's mixers."""
    if recipe.host != "small":
        return Published(recipe, centre)
    mixers = recipe.mixers_for(recipe.block_names(), recipe.dim if recipe.match_parameters else None)
    return DepthTransformer(recipe, list(mixers.values()), centre)
