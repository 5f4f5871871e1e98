"""HTR-VT as a recipe asks for it."""

from __future__ import annotations

from pathlib import Path

from polymix.blocks import matching_mlp_ratio
from polymix.mixers import MixerConfig
from polymix.mixers.spec import parse_mixer
from polymix.models.htr_vt import HtrVt
from polymix.tasks.handwriting.data import Lines
from polymix.tasks.handwriting.decode import decoder_of
from polymix.tasks.handwriting.recipe import HandwritingRecipe
from polymix.tasks.recipe import ATTENTION

HEADS = ("head.",)


def check(recipe: HandwritingRecipe) -> None:
    """Raise what `build` would raise about the recipe, or the language model, before any image is read."""
    sized(recipe, 2, "meta")
    decoder_of(recipe, "a")


def build(recipe: HandwritingRecipe, data: Lines) -> HtrVt:
    """The model with fresh weights."""
    return sized(recipe, len(data.characters) + 1)


def host_name(recipe: HandwritingRecipe) -> str:
    return "HTR-VT"


def usage(recipe: HandwritingRecipe, data: Lines, folder: Path) -> list[str]:
    """Python lines that load the model, for the report."""
    return [
        "from polymix.tasks.saved import SavedRun",
        "",
        f"run = SavedRun.of({str(folder)!r})",
        "model = run.load()  # (B, 1, height, W) -> logits of CTC",
        'print(run.predict(["line.png"], "read")[0]["text"])',
    ]


def next_commands(recipe: HandwritingRecipe, data: Lines, folder: Path) -> list[tuple[str, str]]:
    """What to run next, and why, for the report."""
    return [("Read images of lines:", f"polymix predict {folder} line.png --out read")]


def sized(recipe: HandwritingRecipe, classes: int, device: str | None = None) -> HtrVt:
    """The model for a number of logits."""
    layers = [f"blocks.{place}" for place in range(recipe.depth)]
    mixers = [_with_heads(mixer, recipe) for mixer in recipe.mixers_for(layers).values()]
    ratios: float | list[float] = recipe.mlp_ratio
    if recipe.match_parameters:
        ratios = [_matching_ratio(mixer, recipe) for mixer in mixers]
    return HtrVt(
        mixers, classes=classes, dim=recipe.dim, height=recipe.height, tokens=recipe.tokens, mlp_ratio=ratios,
        mask_ratio=recipe.mask_ratio, span=recipe.span, device=device,
    )  # fmt: skip


def _with_heads(mixer: MixerConfig, recipe: HandwritingRecipe) -> MixerConfig:
    return mixer if recipe.heads is None else mixer.for_heads(recipe.heads)


def _matching_ratio(mixer: MixerConfig, recipe: HandwritingRecipe) -> float:
    """The width of the MLP with which a block has the parameters of one with attention."""
    built, attention = (config.for_grid((recipe.tokens,)).build(recipe.dim, device="meta")
                        for config in (mixer, _with_heads(parse_mixer(ATTENTION)[1], recipe)))  # fmt: skip
    return matching_mlp_ratio(built, attention, recipe.dim, recipe.mlp_ratio)
