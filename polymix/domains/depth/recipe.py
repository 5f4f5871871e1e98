"""The options of a training that tells how far away every pixel is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from polymix.train.option_effects import Beside
from polymix.train.recipe import Count, EvaluateEvery, Final, LearningRate, Mixer, Positive, Recipe, Steps, wrong

PATCH = 8  # pixels a side of a token, where the recipe does not say
STAGES = 4  # of DPT and GLPN
COARSEST = 32  # pixels of a token of GLPN's last stage


class DepthRecipe(Recipe):
    """A model that tells how far away every pixel of a picture is; of several cameras' pictures, all at once.

    The data are a folder as NYU Depth v2, KITTI or ViSP has it, or of pictures and depth files of equal names; without
    one they are synthetic rooms.
    """

    task: ClassVar[str] = "polymix.domains.depth.task:DepthTask"
    only_beside: ClassVar[tuple[Beside, ...]] = (*Recipe.only_beside, ("data", (), ("depth_unit",)))
    takes_plan: ClassVar[bool] = True
    after_training: ClassVar[tuple[str, ...]] = ("align", "min_depth", "max_depth")
    reading: ClassVar[tuple[str, ...]] = ("depth_unit",)
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "evaluate_every": 4, "batch_size": 4, "height": 16, "width": 16, "patch": 8, "dim": 16,
                 "depth": 1, "synthetic_train": 8, "synthetic_test": 4},
    }  # fmt: skip

    steps: Steps = 800
    learning_rate: LearningRate = 2e-3
    final: Final = 0.0
    evaluate_every: EvaluateEvery = 200
    mixer: Mixer = "pom"
    match_parameters: bool = Field(False, description="size the mixer so that it has as many parameters as attention")
    host: Literal["small", "dpt", "glpn"] = Field("small", description="a small transformer, or DPT or GLPN")
    cameras: int = Field(1, ge=1, le=64, description="views of a scene, with poses, whose tokens are mixed; host=small")
    height: Count = Field(64, description="of the model's pictures in pixels, cut from the middle of larger ones")
    width: Count = Field(64, description="of the model's pictures in pixels")
    patch: Count | None = Field(None, description="side of a token in pixels; None: 8, or GLPN's own strides")
    dim: int = Field(64, ge=8, multiple_of=8, description="channels, a multiple of 8; of GLPN's second stage")
    depth: int = Field(3, ge=1, le=1000, description="blocks; of each of GLPN's four stages")
    mlp_ratio: Positive = Field(2.0, description="hidden units of the MLP per channel")
    dropout: float = Field(0.0, ge=0, lt=1, description="of the MLPs, and in DPT and GLPN of what their mixers give")
    scale_invariance: float = Field(
        0.5, ge=0, le=1, description="λ of the loss, mean d² − λ (mean d)²; 1: a factor on all depths costs nothing"
    )
    align: Literal["none", "median"] = Field("none", description="median: predictions are scaled to the truth's median")
    min_depth: Positive = Field(1e-3, description="true depths below it do not count, and predictions are not below it")
    max_depth: Positive | None = Field(None, description="the same above it: 10 for NYU, 80 for KITTI; None: no bound")
    depth_unit: Positive | None = Field(None, description="of depth files; None: the layout's, or 0.001 (integers), 1")
    synthetic_train: Count = Field(2000, description="training rooms of the default data")
    synthetic_test: Count = Field(200, description="its test rooms")

    @model_validator(mode="after")
    def _options_fit(self) -> DepthRecipe:
        if self.host != "small" and self.cameras > 1:
            raise wrong("cameras", self.cameras, f"1: {self.host} sees one picture", "Use host=small.")
        if self.max_depth is not None and self.max_depth <= self.min_depth:
            raise wrong("max_depth", self.max_depth, f"more than min_depth={self.min_depth:g}", "Raise it.")
        if self.host == "dpt" and (self.depth < STAGES or self.height != self.width):
            got = f"'dpt' with depth={self.depth} and {self.width} × {self.height} pixels"
            raise wrong("host", got, f"depth={STAGES} or more, for its {STAGES} maps, and squares", "Change them.")
        if self.host == "glpn" and (self.patch is not None or self.mlp_ratio % 1):
            got = f"'glpn' with patch={self.patch} and mlp_ratio={self.mlp_ratio:g}"
            raise wrong("host", got, "patch=None, as its strides are its own, and a whole mlp_ratio", "Change them.")
        side = COARSEST if self.host == "glpn" else self.patch_size
        for name in ("height", "width"):
            if getattr(self, name) % side:
                got = f"{getattr(self, name)} with host={self.host} and patches of {self.patch_size}"
                raise wrong(name, got, f"a multiple of {side}", f"For example, {side * 8}.")
        return self

    @property
    def patch_size(self) -> int:
        """Side of a token in pixels."""
        return self.patch or PATCH

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens along cameras, where they are several, rows and columns."""
        each = (self.height // self.patch_size, self.width // self.patch_size)
        return each if self.cameras == 1 else (self.cameras, *each)
