"""From text to tokens on disk, once a run."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymix.errors import DataError, OptionError
from polymix.tasks.text.data import Source, find_source, held_out
from polymix.tasks.text.recipe import TextRecipe
from polymix.tasks.text.shards import Tokens, shards_of, tail, width, write
from polymix.tasks.text.tokenizer import encode, load_tokenizer, size, train_tokenizer

VOCAB = 4096


@dataclass(frozen=True)
class Prepared:
    """Tokens to train on and held-out ones; `end` stands between documents, None: it is not known."""

    train: Tokens
    val: Tokens
    vocab: int
    end: int | None
    tokenizer: Any  # None: of shards for which none was given

    def mark(self) -> list[int]:
        """Differs between texts, at any place of the disk."""
        return [self.vocab, *_mark(self.train), *_mark(self.val)]


def prepare(recipe: TextRecipe, folder: Path, say: Callable[[str], None] = lambda text: None) -> Prepared:
    """Tokens as `recipe` asks for, kept in `folder` and found there again.

    Raises DataError, OptionError: text that is missing, empty, damaged, or too short; options that contradict.
    """
    source = find_source(recipe.data, recipe.column)
    tokenizer = None if recipe.tokenizer is None else load_tokenizer(recipe.tokenizer)
    if source.kind == "shards":
        found = _shards(recipe, source, tokenizer)
    else:
        found = _text(recipe, source, tokenizer, folder, say)
    if recipe.packing == "segments" and found.end is None:
        cure = "Set end_of_text, or a tokenizer, or packing=stream."
        raise OptionError("packing", "segments of shards whose borders are unknown", "stream", cure)
    if len(found.train) <= recipe.context:
        got = f"{recipe.context} for {len(found.train)} tokens of text to train on"
        raise DataError("context", got, f"at most {max(len(found.train) - 1, 1)}", "Shorten it, or bring more text.")
    if len(found.val) < 2:
        raise DataError("held_out", f"{recipe.held_out}, which leaves {len(found.val)} tokens", "2 at least", "")
    return found


def _shards(recipe: TextRecipe, source: Source, tokenizer: Any) -> Prepared:
    if recipe.vocab is None and tokenizer is None:
        raise OptionError("vocab", None, "how many tokens the .bin shards have", "GPT-2's have 50257.")
    vocab = recipe.vocab or size(tokenizer)
    if tokenizer is not None and vocab < size(tokenizer):
        raise OptionError("vocab", vocab, f"at least the {size(tokenizer)} of the tokenizer", "Leave it out.")
    end = recipe.end_of_text if tokenizer is None or recipe.end_of_text is not None else tokenizer.eos_token_id
    if end is not None and end >= vocab:
        raise OptionError("end_of_text", end, f"a token below vocab={vocab}", "GPT-2's is 50256.")
    train, val = shards_of(source.files, recipe.held_out)
    for tokens in {part.files: part for part in (train, val)}.values():
        tokens.check(vocab)
    return Prepared(train, val, vocab, end, tokenizer)


def _text(recipe: TextRecipe, source: Source, given: Any, folder: Path, say: Callable[[str], None]) -> Prepared:
    if recipe.end_of_text is not None:
        cure = "A tokenizer has its own."
        raise OptionError("end_of_text", recipe.end_of_text, "nothing but for .bin shards", cure)
    if given is not None and recipe.vocab not in (None, size(given)):
        cure = "Leave one of the two out."
        raise OptionError("vocab", recipe.vocab, f"{size(given)}, which the tokenizer in {recipe.tokenizer} has", cure)
    known = None if given is None else zlib.crc32(json.dumps(sorted(given.get_vocab().items())).encode())
    key = json.loads(json.dumps([source.mark(), recipe.held_out, recipe.vocab, known]))
    note = folder / "cache.json"
    if not note.is_file() or json.loads(note.read_text("utf-8")) != key:
        _fill(folder, recipe, source, given, say)
        part = note.with_name(".cache.json.part")
        part.write_text(json.dumps(key), "utf-8")
        part.replace(note)
    tokenizer = load_tokenizer(folder / "tokenizer")
    vocab = size(tokenizer)
    files = [path for name in ("train.bin", "val.bin") if (path := folder / name).stat().st_size]
    tokens = [Tokens([path], width(vocab)) for path in files]
    for part_ in tokens:
        part_.check(vocab)
    train, val = tokens if len(tokens) == 2 else tail(tokens[0], recipe.held_out)
    return Prepared(train, val, vocab, tokenizer.eos_token_id, tokenizer)


def _fill(folder: Path, recipe: TextRecipe, source: Source, given: Any, say: Callable[[str], None]) -> None:
    """Writes tokenizer/, train.bin and val.bin."""

    def side(held: bool) -> Iterator[str]:
        return (text for text in source.documents() if held_out(text, recipe.held_out) is held)

    if next(source.documents(), None) is None:
        where = recipe.data or "Python's library, which has no source files here"
        raise DataError("data", f"{where} without any text", "text", "Name a file with some.")
    say("Reading the text")
    if given is None:
        one_sided = next(side(False), None) is None
        given = train_tokenizer(source.documents() if one_sided else side(False), recipe.vocab or VOCAB, recipe.context)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    given.save_pretrained(folder / "tokenizer")
    counts = [write(folder / f"{name}.bin", encode(given, side(held)), width(size(given)))
              for name, held in (("train", False), ("val", True))]  # fmt: skip
    say(f"{sum(counts):,} tokens of {size(given):,} kinds")


def _mark(tokens: Tokens) -> list[int]:
    """Length and a checksum of stretches all over."""
    places = [len(tokens) * i // 64 for i in range(64)]
    crc = 0
    for place in places:
        crc = zlib.crc32(repr(tokens[place : place + 256].tolist()).encode(), crc)
    return [len(tokens), crc]
