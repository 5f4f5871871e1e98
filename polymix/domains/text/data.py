"""Text: where it comes from (files, folders, parquet, Python's own prose), and its tokens, kept on disk."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from polymix.domains.text.recipe import TextRecipe
from polymix.domains.text.tokenizer import BORDER, checksum, encode, load_tokenizer, size, train_tokenizer
from polymix.domains.text.tokens import Tokens, shards_of, tail, width, write
from polymix.errors import DataError, OptionError
from polymix.extras import needs
from polymix.train.data.synthetic import cached
from polymix.train.data.texts import composed, read_text
from polymix.train.task import Data

VOCAB = 4096
_TOKEN_FILES = ("train.bin", "val.bin")
_TEXT, _PARQUET, _SHARDS = (".txt", ".md"), (".parquet",), (".bin",)
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "ensurepip", "__pycache__"}


@dataclass(frozen=True)
class TextData(Data):
    """Training and held-out tokens. `end` is the token between documents; None: it is not known.

    measured: what `TextTask.details` measures, at most `limit` tokens of it; empty: `val`, as in training.
    """

    train: Tokens
    val: Tokens
    vocab: int
    end: int | None
    tokenizer: Any  # None: for shards without one
    measured: tuple[Tokens, ...] = ()
    limit: int | None = None
    decoded_by: int | None = None  # for shards with a tokenizer, its checksum: their tokens say nothing of it

    def fingerprint(self) -> list[int]:
        """Differs between texts and between tokenizers, and does not depend on where they are stored."""
        beside = [] if self.decoded_by is None else [self.decoded_by]
        return [self.vocab, *_checksum(self.train), *_checksum(self.val), *beside]


def load(recipe: TextRecipe, folder: Path, say: Callable[[str], None] = lambda text: None) -> TextData:
    """The tokens that a recipe asks for. They are kept in `folder` and reused from there.

    Raises DataError, OptionError: text that is missing, empty, damaged, or too short; options that contradict.
    """
    source = find_source(recipe.data, recipe.column)
    if source.kind != "parquet" and recipe.column != TextRecipe.model_fields["column"].default:
        got = f"{recipe.column!r} for {recipe.data or 'the default data'}, which has no columns"
        raise OptionError("column", got, "this option for parquet files alone", "Leave it out.")
    tokenizer = None if recipe.tokenizer is None else load_tokenizer(recipe.tokenizer)
    if source.kind == "shards":
        data = _shards(recipe, source, tokenizer)
    else:
        data = _text(recipe, source, tokenizer, folder, say)
    if recipe.packing != "stream" and data.end is None:
        cure = "Set end_of_text or tokenizer, or use packing=stream."
        raise OptionError("packing", f"{recipe.packing} for shards whose document borders are unknown", "stream", cure)
    if len(data.train) <= recipe.context:
        got = f"{recipe.context} with {len(data.train)} tokens of training text"
        raise DataError("context", got, f"at most {max(len(data.train) - 1, 1)}", "Lower it, or add text.")
    if len(data.val) < 2:
        raise DataError(
            "held_out",
            f"{recipe.held_out}, which holds out {len(data.val)} tokens",
            "a share that holds out 2 or more",
            "Raise it.",
        )
    return data


def _shards(recipe: TextRecipe, source: Source, tokenizer: Any) -> TextData:
    if recipe.vocab is None and tokenizer is None:
        raise OptionError("vocab", None, "the vocabulary size of the .bin shards", "GPT-2's is 50257.")
    vocab = recipe.vocab or size(tokenizer)
    if tokenizer is not None and vocab < size(tokenizer):
        raise OptionError("vocab", vocab, f"at least {size(tokenizer)}, as in the tokenizer", "Leave it out.")
    end = recipe.end_of_text if tokenizer is None or recipe.end_of_text is not None else tokenizer.eos_token_id
    if end is not None and end >= vocab:
        raise OptionError("end_of_text", end, f"a token below vocab={vocab}", "GPT-2's is 50256.")
    train, val = shards_of(source.files, recipe.held_out)
    for tokens in {part.files: part for part in (train, val)}.values():
        tokens.check(vocab)
    return TextData(train, val, vocab, end, tokenizer, decoded_by=None if tokenizer is None else checksum(tokenizer))


def _text(recipe: TextRecipe, source: Source, pretrained: Any, folder: Path, say: Callable[[str], None]) -> TextData:
    if recipe.end_of_text is not None:
        cure = "Leave it out: the tokenizer has its own."
        raise OptionError("end_of_text", recipe.end_of_text, "None, except with .bin shards", cure)
    if pretrained is not None and recipe.vocab not in (None, size(pretrained)):
        cure = "Leave one of the two out."
        raise OptionError("vocab", recipe.vocab, f"{size(pretrained)}, as in the tokenizer {recipe.tokenizer}", cure)
    known = None if pretrained is None else checksum(pretrained)
    key = {"source": source.key(), "held_out": recipe.held_out, "vocab": recipe.vocab, "tokenizer": known}
    folder = cached(folder, "tokens", key, lambda place: _fill(place, recipe, source, pretrained, say))
    tokenizer = load_tokenizer(folder / "tokenizer")
    vocab = size(tokenizer)
    files = [path for name in _TOKEN_FILES if (path := folder / name).stat().st_size]
    tokens = [Tokens([path], width(vocab)) for path in files]
    for part_ in tokens:
        part_.check(vocab)
    train, val = tokens if len(tokens) == 2 else tail(tokens[0], recipe.held_out)
    return TextData(train, val, vocab, tokenizer.eos_token_id, tokenizer)


def _fill(folder: Path, recipe: TextRecipe, source: Source, tokenizer: Any, say: Callable[[str], None]) -> None:
    """Write tokenizer/, train.bin and val.bin."""

    def side(held: bool) -> Iterator[str]:
        return (text for text in source.documents() if held_out(text, recipe.held_out) is held)

    if next(source.documents(), None) is None:
        where = recipe.data or "Python's library, whose source files are not installed here,"
        raise DataError("data", f"{where} without any text", "text", "Pass a file that has some.")
    say("Reading the text")
    if tokenizer is None:
        one_sided = next(side(False), None) is None
        tokenizer = train_tokenizer(
            source.documents() if one_sided else side(False), recipe.vocab or VOCAB, recipe.context
        )
    tokenizer.save_pretrained(folder / "tokenizer")
    counts = [write(folder / f"{name}.bin", encode(tokenizer, side(held)), width(size(tokenizer)))
              for name, held in (("train", False), ("val", True))]  # fmt: skip
    say(f"{sum(counts):,} tokens in a vocabulary of {size(tokenizer):,}")


def _checksum(tokens: Tokens) -> list[int]:
    """The number of tokens, and a checksum of stretches all over them."""
    places = [len(tokens) * i // 64 for i in range(64)]
    crc = 0
    for place in places:
        crc = zlib.crc32(repr(tokens[place : place + 256].tolist()).encode(), crc)
    return [len(tokens), crc]


@dataclass(frozen=True)
class Source:
    """Files of one kind ("text", "parquet" or "shards") in a fixed order, or "library", which has no files."""

    kind: str
    files: tuple[Path, ...] = ()
    column: str = "text"

    def documents(self) -> Iterator[str]:
        """The documents that are not empty, always in the same order. Raises DataError if a file is unreadable."""
        if self.kind == "library":
            yield from _library()
        for path in self.files:
            for text in _rows(path, self.column) if self.kind == "parquet" else _split(path):
                if text.strip():
                    yield text

    def key(self) -> list[Any]:
        """Differs between sources of different content: the names, sizes and times of the files."""
        if self.kind == "library":
            return [self.kind, sys.version]
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.files]
        return [self.kind, self.column, *map(list, stats)]


def find_source(data: str | None, column: str) -> Source:
    """The source at a path. Raises DataError: there is nothing, no file of a known kind, or an empty one."""
    if data is None:
        return Source("library")
    root = Path(data)
    kinds = {"shards": _SHARDS, "parquet": _PARQUET, "text": _TEXT}
    allowed = "a .txt, .md, .parquet or .bin file, or a folder of one of these kinds"
    if not root.exists():
        raise DataError(
            "data", f"{root}, which does not exist", allowed, "Leave it out to train on Python's own prose."
        )
    if root.is_file():
        kind = next((kind for kind, ends in kinds.items() if root.suffix.lower() in ends), "text")
        files = [root]
    else:
        below = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        by_kind = {kind: [p for p in below if p.suffix.lower() in ends] for kind, ends in kinds.items()}
        kind, files = next(((kind, paths) for kind, paths in by_kind.items() if paths), ("", []))
        others = [other for other, paths in by_kind.items() if paths and other != kind and other != "text"]
        if not kind:
            got = f"{root} with {len(below)} files, none of them text"
            raise DataError("data", got, "*.txt, *.md, *.parquet or *.bin below it", "Rename the files.")
        if others:
            raise DataError("data", f"{root} with {kind} and {others[0]}", "files of one kind", "Name one folder.")
    for path in files:
        if not path.stat().st_size:
            raise DataError("data", f"{path}, which is empty", "files with something in them", "Remove the file.")
    return Source(kind, tuple(files), column)


def held_out(document: str, share: float) -> bool:
    """Whether a document is held out. It depends on the text alone, so a repeated one is never on both sides."""
    digest = hashlib.sha256(document.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


@cache
def _library() -> tuple[str, ...]:
    return tuple(prose())


def _split(path: Path) -> Iterator[str]:
    yield from read_text(path).split(BORDER)


def _rows(path: Path, column: str) -> Iterator[str]:
    with needs("parquet", "Parquet is read with it."):
        import pyarrow
        import pyarrow.parquet
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if column not in names:
            raise DataError("column", repr(column), f"one of {', '.join(names)} in {path}", "Set column.")
        if not pyarrow.types.is_string(of := file.schema_arrow.field(column).type) and str(of) != "large_string":
            raise DataError("column", f"{column} of {of} in {path}", "a column of text", "Set column.")
        for batch in file.iter_batches(columns=[column], batch_size=1024):
            yield from (composed(text) for text in batch.column(0).to_pylist() if text)
    except (pyarrow.ArrowException, OSError) as error:
        got = f"{path}, which cannot be read ({type(error).__name__})"
        raise DataError("data", got, "parquet files", "Write the file again.") from error


def prose(root: Path | None = None) -> Iterator[str]:
    """Python's own prose: a document for each reference topic, and for each module that has docstrings.

    The order is always the same and each text comes once. The source files are read, not imported.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(place.parts):
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, OSError):  # some files of the library are broken on purpose
                continue
            topics = place.as_posix() == "pydoc_data/topics.py"
            texts = dict.fromkeys(_topics(tree) if topics else _docstrings(tree))
            new = [text for text in texts if text and text not in seen]
            seen.update(new)
            if topics:
                yield from new
            elif new:
                yield "\n\n".join(new)


def _topics(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield from (inspect.cleandoc(v.value) for v in node.values if _is_text(v))  # type: ignore[attr-defined]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield (ast.get_docstring(node) or "").strip()
        for child in node.body:
            yield from _docstrings(child)
