"""Prompts in, texts out, by transformers' own generate."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polymix.compat import cure_torchvision
from polymix.errors import DataError, OptionError, ShapeError
from polymix.workflows.generate.settings import Settings

cure_torchvision()  # before transformers, which imports it
from transformers import TextStreamer  # noqa: E402

NEW = 100


class Clock:
    """Times tokens, as a stopping criterion that never stops: `first` and `rest` in seconds, over `starts` calls."""

    def __init__(self) -> None:
        self.starts, self.first, self.rest, self.steps, self.at, self.fresh = 0, 0.0, 0.0, 0, 0.0, False

    def start(self) -> None:
        self.starts, self.at, self.fresh = self.starts + 1, time.perf_counter(), True

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        passed, self.at = time.perf_counter() - self.at, time.perf_counter()
        if self.fresh:
            self.first += passed
        else:
            self.rest, self.steps = self.rest + passed, self.steps + 1
        self.fresh = False
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def __str__(self) -> str:
        rest = f", then {1e3 * self.rest / self.steps:.2f} ms a token" if self.steps else ""
        return f"first token after {1e3 * self.first / max(self.starts, 1):.0f} ms{rest}"


def generate(
    model: Any, tokenizer: Any, prompts: Sequence[str], settings: Settings | None = None, clock: Clock | None = None
) -> list[str]:
    """Each prompt with its continuation, `settings.num` times.

    Raises OptionError, ShapeError, DataError, before the model runs: an empty prompt that no token stands for, more
    tokens than the model has positions, a tokenizer with more tokens than the model.
    """
    settings, clock = settings or Settings(), clock or Clock()
    rows = [_tokens(model, tokenizer, prompt) for prompt in prompts]
    longest = max(map(len, rows))
    new = _room(model, longest, settings.max_new_tokens)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, ends[0])
    padding = next((k for k in known if k is not None and k < _vocabulary(model)), 0)  # hidden by the mask
    ids = torch.tensor([[padding] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    config, drawn = copy.deepcopy(model.generation_config), settings.heat > 0
    config.update(
        max_new_tokens=new, max_length=None, do_sample=drawn, num_beams=settings.beams, pad_token_id=padding,
        num_return_sequences=settings.num, temperature=settings.heat if drawn else None,
        top_k=(settings.top_k or 0) if drawn else None, top_p=(settings.top_p or 1.0) if drawn else None,
    )  # fmt: skip
    streamer: Any = TextStreamer(tokenizer, skip_special_tokens=True) if settings.stream else None
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        clock.start()
        try:
            out = model.generate(
                ids, attention_mask=mask, generation_config=config, streamer=streamer, stopping_criteria=[clock]
            )
        except KeyboardInterrupt:
            if streamer is not None:
                streamer.end()  # what had come of the last word
            raise
    said = []
    for place, row in enumerate(out.tolist()):
        prompt, more = rows[place // settings.num], row[longest:]
        stop = next((i for i, token in enumerate(more) if token in ends), len(more))
        said.append(tokenizer.decode(prompt + more[:stop], skip_special_tokens=True))
    return said


def _tokens(model: Any, tokenizer: Any, prompt: str) -> list[int]:
    ids = list(tokenizer(prompt, verbose=False)["input_ids"])
    if not ids:
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if start is None:
            got = "an empty one, for a tokenizer without a token that begins or ends a text"
            raise OptionError("prompt", got, "at least a word", "Pass some text.")
        ids = [start]
    there = _vocabulary(model)
    if max(ids) >= there:
        got = f"one that makes token {max(ids)} of {prompt[:40]!r}"
        raise DataError("tokenizer", got, f"tokens below the model's {there}", "Put the model's own into its folder.")
    return ids


def _vocabulary(model: Any) -> int:
    return model.get_input_embeddings().num_embeddings


def _room(model: Any, longest: int, new: int | None) -> int:
    """New tokens for which there are positions."""
    there = positions(model)
    if there is None:
        return new or NEW
    if longest + (new or 1) > there:
        got = f"{longest} tokens" + (f" and max_new_tokens={new}" if new else "")
        cure = "Shorten it, or ask for less." if longest < there else "Shorten it."
        raise ShapeError("prompt", got, f"together at most {there}, as the model has learned positions", cure)
    return new or min(NEW, there - longest)


def positions(model: Any) -> int | None:
    """How many a model has learned vectors for; None: it takes any length."""
    limit = getattr(model.config, "max_position_embeddings", None)
    words = model.get_input_embeddings()
    learned = (part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding) and part is not words)
    return limit if limit and any(limit <= count <= limit + 2 for count in learned) else None  # OPT has two more
