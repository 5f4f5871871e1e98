"""Tokenizers of transformers, trained on the text or loaded."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from polymix.compat import cure_torchvision
from polymix.errors import DataError, OptionError, one_line
from polymix.extras import needs

cure_torchvision()  # before transformers, which imports it
with needs("text"):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

BORDER = "<|endoftext|>"  # separates the documents of a file, as is usual
BYTES = 256
_ENDS = (BORDER, "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
_CHUNK = 2**20  # characters that are encoded in one call


def train_tokenizer(documents: Iterable[str], vocab: int, context: int) -> Any:
    """Train a byte-level BPE of at most `vocab` tokens, the first of which ends a document."""
    if vocab <= BYTES:
        raise OptionError("vocab", vocab, f"at least {BYTES + 1}: the bytes and the end of text", "Pass vocab=4096.")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[BORDER], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(documents, trainer)
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), BORDER)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, model_max_length=context, clean_up_tokenization_spaces=False, **ends
    )


def load_tokenizer(path: str | Path) -> Any:
    """Load a tokenizer.json or a folder of transformers that has a token to end a text. Nothing is downloaded."""
    path = Path(path)
    if not path.exists():
        raise DataError("tokenizer", f"{path}, which does not exist", "a tokenizer.json, or a folder with one", "")
    try:
        if path.is_file():
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(path), clean_up_tokenization_spaces=False)
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the libraries raise on a damaged file
        got = f"{path}, which cannot be loaded ({one_line(error)[:300]})"
        raise DataError("tokenizer", got, "a tokenizer.json, or a folder of transformers", "Save it again.") from error
    if tokenizer.eos_token_id is None:
        known = tokenizer.get_vocab()
        end = next((token for token in _ENDS if token in known), None)
        if end is None:
            cure = "Set eos_token and save it as a folder of transformers."
            raise DataError("tokenizer", f"{path} without a token that ends a text", f"one of {_ENDS}", cure)
        tokenizer.eos_token = end
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def size(tokenizer: Any) -> int:
    """The vocabulary size: one more than the highest token."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def checksum(tokenizer: Any) -> int:
    """Differs between tokenizers that may encode a text differently."""
    whole = getattr(tokenizer, "backend_tokenizer", None)
    return zlib.crc32(
        json.dumps(sorted(tokenizer.get_vocab().items())).encode() if whole is None else whole.to_str().encode()
    )


def encode(tokenizer: Any, documents: Iterable[str]) -> Iterator[list[int]]:
    """The tokens of each document, followed by the end token."""
    for document in documents:
        ids: list[int] = []
        for piece in _pieces(document):
            ids += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        yield [*ids, tokenizer.eos_token_id]


def count_bytes(tokenizer: Any, runs: Sequence[Sequence[int]]) -> int:
    """Number of UTF-8 bytes of the text that runs of tokens stand for. The end token has none."""
    texts = tokenizer.batch_decode([list(run) for run in runs], skip_special_tokens=True)
    return sum(len(text.encode("utf-8", "replace")) for text in texts)


def _pieces(text: str) -> Iterator[str]:
    """The text, cut after line ends where it is too long for one call."""
    start = 0
    while len(text) - start > _CHUNK:
        cut = text.rfind("\n", start, start + _CHUNK) + 1 or start + _CHUNK
        yield text[start:cut]
        start = cut
    yield text[start:]
