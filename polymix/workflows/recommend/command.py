"""`polymix recommend`: shapes or a model's function in, a Recommendation and its JSON out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from polymix._io import call_function
from polymix.errors import OptionError
from polymix.workflows.compare.results import write_atomically
from polymix.workflows.recommend import Recommendation, parse_shape, recommend


def run(shapes: Sequence[str], model: str | None, out: Path | None, **options: Any) -> Recommendation:
    """`shapes` as in "4096x192:heads=3", or `model` as "file.py:function", which returns (model, input).

    options: those of `polymix.recommend`. The JSON of the answer is written to `out`, if there is one.
    """
    if bool(shapes) == bool(model):
        got = "both --shape and --model" if model else "neither --shape nor --model"
        raise OptionError("--shape", got, "one of the two", "Try --shape 4096x192:heads=3.")
    if model is None:
        answer = recommend([parse_shape(shape) for shape in shapes], **options)
    else:
        answer = recommend(**_loaded(model), **options)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, json.dumps(answer.to_dict(), indent=1, allow_nan=False) + "\n")
    return answer


def _loaded(name: str) -> dict[str, Any]:
    """What the function returned, a model or (model, input), as arguments of `recommend`."""
    built = call_function(name, {})
    parts = built if isinstance(built, tuple) else (built, None)
    if len(parts) != 2 or not isinstance(parts[0], nn.Module):
        got = f"{name}, which returns {type(built).__name__}"
        raise OptionError("--model", got, "a function that returns a model, or (model, input)", "")
    return {"model_or_shapes": parts[0], "input": parts[1]}
