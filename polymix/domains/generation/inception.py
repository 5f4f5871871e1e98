"""The Inception network of the FID, from a local file with its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polymix.convert.saving.files import read_tensors
from polymix.errors import DataError, reason_of
from polymix.train.data.vision import torchvision

ALLOWED = "the state dict of the FID's Inception network (pt_inception-2015-12-05, of pytorch-fid)"
SIDE, OUTPUTS = 299, 1008


class Inception(nn.Module):
    """Features (B, 2048) of pictures (B, 1 or 3, H, W) from -1 to 1, as the FID takes them.

    torchvision's Inception v3 with three differences, which the published weights need: 1,008 outputs; means at a
    border over the pixels that are there; and a maximum instead of the mean in the last block. Pictures are resized to
    299 × 299 linearly, without smoothing.

    Raises:
        DataError: the file has other weights. MissingExtraError: torchvision is missing.
    Source: Heusel et al. 2017; Szegedy et al. 2016.
    """

    def __init__(self, file: str | Path) -> None:
        super().__init__()
        published = torchvision("models.inception")
        if not Path(file).is_file():
            raise DataError("inception", f"{file}, which does not exist", ALLOWED, "Check the path.")
        self.network = published.Inception3(
            num_classes=OUTPUTS, aux_logits=False, transform_input=False, init_weights=False
        )
        blocks = {published.InceptionA: _first_blocks, published.InceptionC: _middle_blocks,
                  published.InceptionE: _last_blocks}  # fmt: skip
        for name, part in self.network.named_children():
            if type(part) in blocks:
                pool = _max if name == "Mixed_7c" else _mean
                part._forward = _Branches(part, blocks[type(part)], pool)
        try:
            self.network.load_state_dict(read_tensors(Path(file)))
        except Exception as error:  # whatever torch.load raises on a damaged file, or another network's names
            got = f"{file}, which holds no such weights ({reason_of(error)[:120]})"
            raise DataError("inception", got, ALLOWED, "Use the FID's own file.") from error
        self.network.fc = nn.Identity()
        self.requires_grad_(False).eval()

    def forward(self, pictures: Tensor) -> Tensor:
        pictures = pictures.float().clamp(-1, 1).expand(-1, 3, -1, -1)
        return self.network(functional.interpolate(pictures, (SIDE, SIDE), mode="bilinear", align_corners=False))


class _Branches:
    """The branches of a block with another pooling, in place of the block's own method."""

    def __init__(self, block: Any, branches: Any, pool: Any) -> None:
        self.block, self.branches, self.pool = block, branches, pool

    def __call__(self, x: Tensor) -> list[Tensor]:
        return [*self.branches(self.block, x), self.block.branch_pool(self.pool(x))]


def _mean(x: Tensor) -> Tensor:
    return functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


def _max(x: Tensor) -> Tensor:
    return functional.max_pool2d(x, 3, 1, 1)


def _first_blocks(block: Any, x: Tensor) -> list[Tensor]:
    wide = block.branch3x3dbl_3(block.branch3x3dbl_2(block.branch3x3dbl_1(x)))
    return [block.branch1x1(x), block.branch5x5_2(block.branch5x5_1(x)), wide]


def _middle_blocks(block: Any, x: Tensor) -> list[Tensor]:
    once = block.branch7x7_3(block.branch7x7_2(block.branch7x7_1(x)))
    twice = x
    for place in range(1, 6):
        twice = getattr(block, f"branch7x7dbl_{place}")(twice)
    return [block.branch1x1(x), once, twice]


def _last_blocks(block: Any, x: Tensor) -> list[Tensor]:
    once = block.branch3x3_1(x)
    twice = block.branch3x3dbl_2(block.branch3x3dbl_1(x))
    return [
        block.branch1x1(x), torch.cat((block.branch3x3_2a(once), block.branch3x3_2b(once)), 1),
        torch.cat((block.branch3x3dbl_3a(twice), block.branch3x3dbl_3b(twice)), 1),
    ]  # fmt: skip
