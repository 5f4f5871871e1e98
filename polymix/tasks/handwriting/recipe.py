"""The options of a training on handwriting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.models.htr_vt import HEIGHTS, STRIDE
from polymix.tasks.recipe import TaskRecipe


@dataclass(frozen=True)
class HandwritingRecipe(TaskRecipe):
    """HTR-VT reads lines of handwriting, trained with CTC. `TaskRecipe` has the options that all tasks share.

    The paper's hybrid, in which every second layer keeps attention, is plan="1:1".

    Args:
        data: a folder or a tsv file; None: made cheques, whose amount stands twice and is blotted once.
        mixer: of every block, as on the command line: "pom", "padre:degree=3".
        height, width: of a line in pixels. Lines keep their ratio and are padded with white; wider ones are squeezed.
        lines: lines of a page that are put side by side, at most; 1: every line alone.
        dim, depth, mlp_ratio: channels, blocks, and hidden units of the MLP per channel.
        heads: of mixers that leave it open, such as attention; None: one for every 64 channels.
        match_parameters: narrow or widen the MLPs so that the model has as many parameters as with attention.
        mask_ratio, span: share of the tokens that training masks, in spans of so many tokens.
        augment: warp, thicken or thin, and fade half of the batches each.
        sam: radius of sharpness-aware minimisation, which takes two passes a step; 0: plain AdamW.
        beam: prefixes of a beam search; 0: greedy decoding.
        language_model: an ARPA file over characters, for the beam search; None: no language model.
        train_lines, test_lines: how many cheques are made.
        err: take the lines of IAM whose segmentation is marked "err", too.
        lists: of LAM, the folder below --data whose json lists are the splits, such as "split/basic" or a decade's;
            None: the only one.
    """

    batch_size: int = 16
    steps: int = 1800
    learning_rate: float = 2e-3
    evaluate_every: int = 200
    checkpoint_every: int = 200
    mixer: str = "pom"
    height: int = 32
    width: int = 256
    lines: int = 1
    dim: int = 64
    depth: int = 4
    heads: int | None = None
    mlp_ratio: float = 4.0
    match_parameters: bool = False
    mask_ratio: float = 0.0
    span: int = 8
    augment: bool = False
    sam: float = 0.0
    beam: int = 0
    language_model: str | None = None
    train_lines: int = 4000
    test_lines: int = 400
    err: bool = False
    lists: str | None = None

    takes_plan: ClassVar[bool] = True
    after_training: ClassVar[tuple[str, ...]] = ("beam", "language_model")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"dim": 32, "depth": 2, "steps": 4, "batch_size": 8, "train_lines": 32, "test_lines": 8},
        "paper": {
            "height": 64, "width": 512, "dim": 768, "depth": 4, "heads": 6, "mlp_ratio": 4.0, "mask_ratio": 0.4,
            "span": 8, "augment": True, "sam": 0.05, "learning_rate": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.5,
            "warmup": 0.01, "final": 1e-4, "steps": 100_000, "batch_size": 128, "ema": 0.9999,
            "keep": "best", "evaluate_every": 1000, "checkpoint_every": 1000, "log_every": 100,
        },
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dim", "depth", "lines", "span", "train_lines", "test_lines"):
            check_int(name, getattr(self, name), 1)
        if self.heads is not None:
            check_int("heads", self.heads, 1)
        check_int("beam", self.beam, 0, 10_000)
        check_choice("height", self.height, HEIGHTS)
        if type(self.width) is not int or self.width < STRIDE or self.width % STRIDE:
            raise OptionError("width", repr(self.width), f"a multiple of {STRIDE}", "For example, pass width=512.")
        if self.dim % 4:
            raise OptionError("dim", repr(self.dim), "a multiple of 4", "For example, pass dim=96.")
        for name in ("match_parameters", "augment", "err"):
            check_choice(name, getattr(self, name), (True, False))
        check_number("mlp_ratio", self.mlp_ratio, 1 / self.dim, math.inf, "a number that leaves a hidden unit", 4)
        check_number("mask_ratio", self.mask_ratio, 0.0, 1.0, "a share below 1", 0.4)
        check_number("sam", self.sam, 0.0, math.inf, "a radius of at least 0", 0.05)
        if self.sam and self.accumulate > 1:
            got = f"{self.sam} with accumulate={self.accumulate}"
            raise OptionError("sam", got, "accumulate=1, as both passes see the same batch", "Lower the batch size.")
        if self.language_model is not None and not self.beam:
            got = f"{self.language_model} without a beam search"
            raise OptionError("language_model", got, "a beam of at least 1", "Pass beam=50, say.")

    def check_options(self) -> dict[str, Any]:
        return {"recipe": self}

    @property
    def tokens(self) -> int:
        """Tokens of a line, or of a page's lines side by side."""
        return self.lines * self.width // STRIDE
