"""The options of a training on speech."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from polymix.train.option_effects import Beside
from polymix.train.recipe import (
    BatchSize,
    Count,
    EvaluateEvery,
    Final,
    Fraction,
    LearningRate,
    Mixer,
    NotNegative,
    Place,
    Positive,
    Recipe,
    Share,
    Steps,
    wrong,
)


class SpeechRecipe(Recipe):
    """A Conformer with any mixer, which transcribes speech, or is pretrained on speech without texts.

    The data are a folder: LibriSpeech, Common Voice, or audio files with a txt of the same name beside each. Without
    any they are words of a synthesiser, whose spelling depends on the first word. With causal=True the model can listen
    to a stream. To transcribe with a pretrained model, pass its folder as init.
    """

    task: ClassVar[str] = "polymix.domains.speech.task:SpeechTask"
    takes_plan: ClassVar[bool] = True
    after_training: ClassVar[tuple[str, ...]] = ("beam", "language_model")
    reading: ClassVar[tuple[str, ...]] = ("plain_text",)
    only_beside: ClassVar[tuple[Beside, ...]] = (
        *Recipe.only_beside,
        ("goal", ("ctc",), ("plain_text", "beam", "language_model")),
        ("goal", ("best_rq",), ("codes", "code_dim", "mask_start", "mask_seconds", "noise")),
        ("beam", (), ("language_model",)),
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "evaluate_every": 4, "batch_size": 8, "bands": 8, "dim": 16, "depth": 1, "kernel": 3,
                 "stem": 4, "synthetic_train": 16, "synthetic_test": 8},
    }  # fmt: skip

    batch_size: BatchSize = 16
    steps: Steps = 800
    learning_rate: LearningRate = 2e-3
    final: Final = 0.0
    evaluate_every: EvaluateEvery = 200
    mixer: Mixer = "pom"
    goal: Literal["ctc", "best_rq"] = Field(
        "ctc", description="ctc: transcribe; best_rq: predict the codes of masked frames, without texts"
    )
    causal: bool = Field(
        False, description="a token hears only itself and what was before it, so that a stream can be transcribed"
    )
    rate: int = Field(16_000, ge=1000, le=192_000, description="samples a second, to which audio is resampled")
    bands: int = Field(40, ge=1, le=512, description="mel bands of a frame; there are 100 frames a second")
    subsample: Literal[2, 4] = Field(4, description="frames of a token")
    stem: Count = Field(16, description="channels of the convolutions that make tokens of frames")
    dim: Count = Field(64, description="channels")
    depth: int = Field(2, ge=1, le=10_000, description="blocks")
    kernel: int = Field(7, ge=1, le=10_000, description="tokens that the convolution of a block sees")
    heads: Count | None = Field(None, description="heads of mixers that leave them open; None: the mixer's own default")
    mlp_ratio: Positive = Field(2.0, description="hidden units of the two MLPs of a block per channel")
    dropout: Share = Field(0.0, description="of MLPs and convolutions")
    match_parameters: bool = Field(False, description="size the mixer so that it has as many parameters as attention")
    plain_text: bool = Field(
        True, description="transcribe to small letters, digits and apostrophes; False: to the texts as they are written"
    )
    beam: int = Field(0, ge=0, le=10_000, description="prefixes of a beam search; 0: greedy decoding")
    language_model: Place | None = Field(None, description="ARPA file over characters, for the beam search")
    codes: int = Field(256, ge=2, le=1_000_000, description="entries of BEST-RQ's codebook")
    code_dim: Count = Field(16, description="dimension of its entries")
    mask_start: Fraction = Field(0.02, description="chance that a masked span starts at a frame, in BEST-RQ")
    mask_seconds: Positive = Field(0.4, description="length of such a span")
    noise: NotNegative = Field(0.1, description="standard deviation of what stands in masked frames")
    synthetic_train: Count = Field(1200, description="training clips of the default data")
    synthetic_test: Count = Field(200, description="its test clips")

    @model_validator(mode="after")
    def _options_fit(self) -> SpeechRecipe:
        if self.bands > self.rate // 80:  # half the samples of a frame, so that every band has a frequency of its own
            got = f"{self.bands} with rate={self.rate}"
            raise wrong("bands", got, f"at most {self.rate // 80}", "Pass fewer bands.")
        return self
