"""Speech as a task: texts by CTC, or by BEST-RQ the codes of hidden tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix.domains.speech import data as reading
from polymix.domains.speech import metrics as measuring
from polymix.domains.speech.conformer import Conformer
from polymix.domains.speech.data import Batch, SpeechData
from polymix.domains.speech.recipe import SpeechRecipe
from polymix.errors import DataError
from polymix.extras import check_installed
from polymix.limits import check_memory
from polymix.train.data.ctc import ctc_losses, decoder_of
from polymix.train.data.transcribed import LAYOUTS
from polymix.train.task import Metric, Process, Say, Task, silent


class SpeechTask(Task[SpeechRecipe, SpeechData]):
    """A model of log-mel features (B, T, bands) -> logits of CTC, or of codes (B, ⌈T / subsample⌉, outputs)."""

    name = "speech"
    metrics = (Metric("wer", "lower"), Metric("cer", "lower"), Metric("val_loss", "lower"))
    layouts = tuple(LAYOUTS)
    unit = "clips"
    fresh = ("head.", "quantizer.")
    predicts: ClassVar[bool] = True

    def __init__(self, recipe: SpeechRecipe, say: Say = silent) -> None:
        super().__init__(recipe, say)
        if recipe.goal == "best_rq":  # this instance measures otherwise, and has no texts
            shares = (Metric(name, "higher", "%") for name in ("accuracy", "majority"))
            vars(self).update(metrics=(*shares, Metric("val_loss", "lower")), predicts=False)

    def check(self) -> None:
        recipe = self.recipe
        books = 4 * recipe.codes * (recipe.code_dim + 2 * recipe.dim)
        check_memory("codes", f"a codebook of {recipe.codes:,} and its head", books)
        with torch.device("meta"):
            self._build(2)
        check_installed("soundfile", *(("rapidfuzz",) if recipe.goal == "ctc" else ()), extra="speech")
        decoder_of(recipe, "a")

    def problems(self, source: str) -> list[str]:
        return reading.list_problems(self.recipe, source)

    def load(self, folder: Path) -> SpeechData:
        return reading.load(self.recipe, folder, self.say)

    def build(self, data: SpeechData) -> Conformer:
        model = self._build(len(data.characters) + 1)
        if len(data.train):
            model.mean, model.deviation = data.statistics()
        return model

    def _build(self, classes: int) -> Conformer:
        recipe = self.recipe
        mixers = recipe.mixers_for(recipe.block_names(), recipe.dim if recipe.match_parameters else None)
        return Conformer(recipe, list(mixers.values()), classes if recipe.goal == "ctc" else recipe.codes)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over the clips of their loss for each character, or for each hidden token."""
        logits = self.infer(model, batch)
        if self.recipe.goal == "ctc":
            tokens = -(-batch.frames // self.recipe.subsample)
            return ctc_losses(logits, tokens, batch.labels, batch.lengths).mean()
        return measuring.code_losses(logits, *measuring.codes_of(model, batch)).mean()

    def infer(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(*batch[:2], *batch[4:])
        return logits

    def validation(self, data: SpeechData) -> SpeechData:
        if data.valid is None:
            got = f"{data.name} without clips to choose by with keep='best'"
            raise DataError("data", got, "a part dev beside train and test", "Pass --set keep=last.")
        return replace(data, test=data.valid)

    def measure(self, model: nn.Module, data: SpeechData, process: Process) -> dict[str, float]:
        return measuring.measure(model, data, self.recipe, process)

    def details(self, model: nn.Module, data: SpeechData, process: Process) -> dict[str, Any]:
        return {"metrics": self.measure(model, data, process), "count": len(data.test), "unit": "clips"}

    def draw(self, model: nn.Module, data: SpeechData, folder: Path) -> list[Path]:
        return measuring.draw(model, data, self.recipe, folder)

    def describe(self, data: SpeechData) -> str:
        recipe = self.recipe
        what = "transcribes" if recipe.goal == "ctc" else "predicts the codes of hidden tokens"
        clips = f"{len(data.train):,} training and {len(data.test):,} test clips"
        return f"{recipe.mixer_name} {what}, on {data.name}: {clips}."

    def host_name(self, model: nn.Module) -> str:
        recipe = self.recipe
        order = ", causal" if recipe.causal else ""
        return f"Conformer of {recipe.depth} blocks and {recipe.dim} channels, kernel {recipe.kernel}{order}"

    def usage(self, data: SpeechData, folder: Path) -> list[str]:
        lines = ["from polymix.train.saved import SavedRun", "", f"run = SavedRun.of({str(folder)!r})"]
        lines.append("model = run.load()  # features (B, T, bands) -> logits (B, N, outputs)")
        if self.recipe.goal == "ctc":
            lines.append('print(run.predict(["clip.wav"], "heard")[0]["text"])')
        if self.recipe.causal:
            lines.append("logits, state = model.step(features, state)  # of a stream; state=None at its start")
        return lines

    def next_commands(self, data: SpeechData, folder: Path) -> list[tuple[str, str]]:
        if self.recipe.goal == "best_rq":
            return [("Learn to transcribe from here:", f"polymix train speech --init {folder} --data FOLDER")]
        return [("Transcribe audio:", f"polymix predict {folder} clip.wav --out heard")]

    def from_summary(self, summary: Mapping[str, Any]) -> SpeechData:
        return reading.from_summary(self.recipe, summary)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> SpeechData | None:
        """The test clips or all, with the alphabet of the trained model; of a run on synthetic data those of `load`."""
        if self.recipe.data is None:
            return None
        return reading.for_evaluation(self.recipe, summary, whole, limit, self.say)

    def predict(
        self, model: nn.Module, data: SpeechData, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        return measuring.predict(model, data, self.recipe, files, folder, process)
