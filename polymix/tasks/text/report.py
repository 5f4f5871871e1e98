"""report.md: what was trained, on what, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polymix.tasks.text.prepare import Prepared
from polymix.tasks.text.recipe import TextRecipe


def write_report(out: Path, recipe: TextRecipe, model: Any, prepared: Prepared, rows: list[dict[str, Any]]) -> None:
    """Beside the model; numbers are the last of metrics.jsonl."""
    evaluated = [row for row in rows if "val_loss" in row]
    speeds = sorted(row["tokens_per_second"] for row in rows if "tokens_per_second" in row)
    parameters = sum(p.numel() for p in model.parameters())
    lines = [
        f"# {model.config.model_type}, {parameters:,} parameters", "",
        f"{recipe.steps:,} steps of {recipe.batch_size} × {recipe.context} tokens, {recipe.precision}, "
        f"on {len(prepared.train):,} tokens of {prepared.vocab:,} kinds from {recipe.data or 'the Python library'}; "
        f"{len(prepared.val):,} held out.", "",
        "| step | loss on held-out text | perplexity | bits per byte |", "|---:|---:|---:|---:|",
        *(f"| {row['step']:,} | {row['val_loss']:.4f} | {row['perplexity']:.2f} | "
          f"{format(row['bits_per_byte'], '.4f') if 'bits_per_byte' in row else '–'} |" for row in evaluated), "",
        f"{speeds[len(speeds) // 2]:,} tokens a second in training (median)." if speeds else "", "",
    ]  # fmt: skip
    for text in evaluated[-1]["samples"] if evaluated else ():
        lines += ["```text", text.replace("```", "` ` `"), "```", ""]
    lines += [
        "```python", "import polymix.models.language  # makes the classes known to transformers",
        "from transformers import pipeline", "",
        f"print(pipeline('text-generation', {str(out)!r})('The ')[0]['generated_text'])", "```", "",
    ]  # fmt: skip
    (out / "report.md").write_text("\n".join(lines), "utf-8")
