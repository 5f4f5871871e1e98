"""Handwriting as a task: HTR-VT learns by CTC, and is measured by the error rates of characters and words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from polymix.blocks import matching_mlp_ratio
from polymix.domains.handwriting import data as reading
from polymix.domains.handwriting import metrics as measuring
from polymix.domains.handwriting.augment import augmented
from polymix.domains.handwriting.data import HandwritingData
from polymix.domains.handwriting.htr_vt import HtrVt
from polymix.domains.handwriting.lines import LAYOUTS, is_lam_basic
from polymix.domains.handwriting.predict import predict
from polymix.domains.handwriting.recipe import HandwritingRecipe
from polymix.errors import DataError
from polymix.mixers import MixerConfig
from polymix.mixers.spec import parse_mixer
from polymix.train.data.ctc import BLANK, decoder_of
from polymix.train.initial import start_as_xavier
from polymix.train.optimizers import decay_groups
from polymix.train.published import published
from polymix.train.recipe import ATTENTION
from polymix.train.task import Metric, Process, Task

# What makes the host the published one.
PAPER_HOST = ("positions", "height", "width", "dim", "depth", "heads", "mlp_ratio", "beam")


class HandwritingTask(Task[HandwritingRecipe, HandwritingData]):
    """A model (B, 1, height, W) -> logits of CTC (B, W / 4, classes)."""

    name = "handwriting"
    metrics = (Metric("cer", "lower"), Metric("wer", "lower"))
    layouts = tuple(LAYOUTS)
    unit = "lines"
    fresh = ("head.",)
    predicts: ClassVar[bool] = True

    def check(self) -> None:
        """Raises what `build` would raise about the recipe, or the language model, before any image is read."""
        self.sized(2, "meta")
        decoder_of(self.recipe, "a")

    def problems(self, source: str) -> list[str]:
        return reading.problems_of(self.recipe, source, self.say)

    def load(self, folder: Path) -> HandwritingData:
        return reading.load(self.recipe, folder, self.say)

    def build(self, data: HandwritingData) -> HtrVt:
        model = self.sized(len(data.characters) + 1)
        if self.recipe.host_init == "published":
            start_as_xavier(model)
        return model

    def sized(self, classes: int, device: str | None = None) -> HtrVt:
        """The model for a number of logits."""
        recipe = self.recipe
        mixers = [self._with_heads(mixer) for mixer in recipe.mixers_for(recipe.block_names()).values()]
        ratios: float | list[float] = recipe.mlp_ratio
        if recipe.match_parameters:
            ratios = [self._matching_ratio(mixer) for mixer in mixers]
        return HtrVt(
            mixers, classes=classes, dim=recipe.dim, height=recipe.height, tokens=recipe.tokens, mlp_ratio=ratios,
            mask_ratio=recipe.mask_ratio, span=recipe.span,
            positions=recipe.positions, device=device,
        )  # fmt: skip

    def _with_heads(self, mixer: MixerConfig) -> MixerConfig:
        return mixer if self.recipe.heads is None else mixer.for_heads(self.recipe.heads)

    def _matching_ratio(self, mixer: MixerConfig) -> float:
        """The width of the MLP with which a block has the parameters of one with attention."""
        recipe = self.recipe
        built, attention = (config.for_grid((recipe.tokens,)).build(recipe.dim, device="meta")
                            for config in (mixer, self._with_heads(parse_mixer(ATTENTION)[1])))  # fmt: skip
        return matching_mlp_ratio(built, attention, recipe.dim, recipe.mlp_ratio)

    def augmented(self, batch: Any) -> Any:
        return {**batch, "images": augmented(batch["images"])} if self.recipe.augment else batch

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean of the lines' CTC losses, each divided by its number of characters with loss_per="character"."""
        logits = model(batch["images"]).float().log_softmax(-1).transpose(0, 1)  # (N, B, classes)
        tokens, lengths = torch.full((logits.shape[1],), logits.shape[0]), batch["lengths"].cpu()
        reduction = "mean" if self.recipe.loss_per == "character" else "none"
        return F.ctc_loss(
            logits, batch["labels"], tokens, lengths, blank=BLANK, reduction=reduction, zero_infinity=True
        ).mean()

    def infer(self, model: nn.Module, batch: Any) -> Any:
        return model(batch["images"])

    def size(self, batch: Any) -> float:
        return float(batch["lines"])

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW, or with `sam` the same on the gradient at the worst place near the weights."""
        recipe = self.recipe
        if not recipe.sam:
            return super().optimizer(model)
        groups = decay_groups(model, recipe)
        return Sam(groups, radius=recipe.sam, lr=recipe.learning_rate, betas=recipe.betas)

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        recipe = self.recipe
        if recipe.schedule == "cosine":
            return super().schedule(optimizer)
        return LambdaLR(optimizer, published_rate(recipe.steps, recipe.warmup, recipe.final))

    def validation(self, data: HandwritingData) -> HandwritingData:
        return reading.validation(data)

    def measure(self, model: nn.Module, data: HandwritingData, process: Process) -> dict[str, float]:
        """Error rates of characters and words, and of the characters under a blot where there are some."""
        return measuring.measure(model, data, self.recipe, process)

    def samples(self, model: nn.Module, data: HandwritingData, process: Process) -> list[str]:
        """The first three test lines as the model reads them."""
        few = measuring.first_lines(data, measuring.SAMPLES)
        return [result.text for result, _, _ in measuring.read(model, few, self.recipe, process)]

    def draw(self, model: nn.Module, data: HandwritingData, folder: Path) -> list[Path]:
        return measuring.draw(model, data, self.recipe, folder)

    def describe(self, data: HandwritingData) -> str:
        sentence = f"{len(data.train):,} training lines and {len(data.test):,} test lines of {data.name}."
        if self.recipe.data is None:
            sentence += (
                " The amount of a cheque stands twice and is blotted once, so the blotted characters can be read only"
                " by a model whose tokens see each other: cer_blotted."
            )
        return sentence

    def host_name(self, model: nn.Module) -> str:
        return "HTR-VT"

    def published(self) -> dict[str, Any] | None:
        """PoM's Table 2, for LAM's basic split and the published host, by lines or with up to 16 side by side."""
        recipe, paper = self.recipe, HandwritingRecipe.paper()
        if recipe.data is None or any(getattr(recipe, name) != getattr(paper, name) for name in PAPER_HOST):
            return None
        try:
            if not is_lam_basic(Path(recipe.data), recipe.layout, recipe.lists):
                return None
        except DataError:  # the folder has gone
            return None
        split = "basic" if recipe.lines == 1 else f"basic, {recipe.lines} lines"
        return published(self.name, data="LAM", split=split, host="HTR-VT", mixer=recipe.mixer_name)

    def usage(self, data: HandwritingData, folder: Path) -> list[str]:
        return [
            "from polymix.train.saved import SavedRun",
            "",
            f"run = SavedRun.of({str(folder)!r})",
            "model = run.load()  # (B, 1, height, W) -> logits of CTC",
            'print(run.predict(["line.png"], "read")[0]["text"])',
        ]

    def next_commands(self, data: HandwritingData, folder: Path) -> list[tuple[str, str]]:
        return [("Read images of lines:", f"polymix predict {folder} line.png --out read")]

    def from_summary(self, summary: Mapping[str, Any]) -> HandwritingData | None:
        return reading.from_summary(self.recipe, summary)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> HandwritingData | None:
        """With the alphabet of the trained model."""
        return reading.for_evaluation(self.recipe, summary, whole, limit, self.say)

    def predict(
        self, model: nn.Module, data: HandwritingData, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        return predict(model, data, self.recipe, files, folder, process)


def published_rate(steps: int, warmup: float, final: float) -> Callable[[int], float]:
    """A step's rate as a share of the highest, in HTR-VT's code: a rise in `warmup` of the steps, then a cosine.

    The cosine is that of a training without the warm-up, but runs from the first step: at the end of the warm-up it
    has fallen a little, and it is over before the last steps.
    """
    rising = round(warmup * steps)

    def share(step: int) -> float:
        turn = step + 1  # the code counts from 1
        if turn < rising:
            return (turn + 1) / (rising + 1)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * turn / max(1, steps - rising)))

    return share


class Sam(torch.optim.AdamW):
    """AdamW on the gradient at the worst place near the weights: sharpness-aware minimisation.

        g' = ∇L(w + ρ g / ‖g‖),   g = ∇L(w)

    Every step takes a closure and calls it twice; without one it is a step of AdamW.

    Source: Foret et al. 2021, Eq. 2-3.
    """

    def __init__(self, groups: Any, *, radius: float, **options: Any) -> None:
        super().__init__(groups, **options)
        self.radius = radius

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:  # PyTorch makes the state of a checkpoint's optimizer by such a step, with gradients of 0
            super().step()
            return None
        with torch.enable_grad():
            closure()
        weights = [w for group in self.param_groups for w in group["params"] if w.grad is not None]
        with torch.no_grad():
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(w.grad) for w in weights]))
            moves = [w.grad * (self.radius / (norm + 1e-12)) for w in weights]
            torch._foreach_add_(weights, moves)
        with torch.enable_grad():
            result = closure()
        with torch.no_grad():
            torch._foreach_sub_(weights, moves)
        super().step()
        return result
