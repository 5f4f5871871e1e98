"""The texts that models are measured on, and batches of their tokens."""

from __future__ import annotations

import email
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Sampler

HELD_OUT_TEXTS = 50
WORDS = 45  # of a passage, about 60 tokens
MAIL_CHARACTERS = 2000


def brown_texts(folder: Path) -> tuple[list[Path], list[Path]]:
    """The 500 texts of the Brown corpus: for training, and 50 that training never sees."""
    files = sorted(path for path in folder.rglob("c*") if re.fullmatch(r"c[a-r]\d\d", path.name))
    random.Random(0).shuffle(files)
    return files[HELD_OUT_TEXTS:], files[:HELD_OUT_TEXTS]


def lines_of(text: Path) -> list[list[str]]:
    """The words of each sentence, without the parts of speech."""
    lines = (line.split() for line in text.read_text("utf8", errors="replace").splitlines())
    return [[word.rsplit("/", 1)[0] for word in line] for line in lines if line]


def plain(words: Sequence[str]) -> str:
    return re.sub(r" ([.,;:?!'])", r"\1", " ".join(words)).replace("`` ", '"')


def sentences(folder: Path) -> tuple[list[str], list[str]]:
    """Sentences of 6 to 50 words for training, and others from texts that training never sees."""
    parts = []
    for texts in brown_texts(folder):
        parts.append([plain(line) for text in texts for line in lines_of(text) if 6 <= len(line) <= 50])
        random.Random(0).shuffle(parts[-1])
    return parts[0], parts[1]


def passages(texts: Sequence[Path], each: int) -> Iterator[tuple[str, str, str]]:
    """Passages of 45 words, evenly spaced in each text: (passage, genre, text)."""
    for text in texts:
        words = [word for line in lines_of(text) for word in line]
        count = min(each, len(words) // WORDS)
        for turn in range(count):
            start = (len(words) - WORDS) * turn // max(count - 1, 1)
            yield plain(words[start : start + WORDS]), text.name[1], text.name


def mails(folder: Path) -> list[tuple[str, str]]:
    """The mails as (subject and text, "spam" or "ham"), in an order of chance; a text that comes twice is left out."""
    groups: dict[str, str] = {}
    for path in sorted(folder.rglob("data/*/*.json")):
        if path.name != "file_list.json":
            content = json.loads(path.read_text("utf8"))
            groups.setdefault(mail_text(content["text"]), content["group"])
    rows = [
        (text, group.split("-")[0] if group.startswith("spam") else "ham") for text, group in groups.items() if text
    ]
    random.Random(0).shuffle(rows)
    return rows


def mail_text(raw: str) -> str:
    """Subject and text of a mail, without its other headers, which name the list, and without HTML's tags."""
    mail = email.message_from_string(raw)
    part = next((each for each in mail.walk() if each.get_content_maintype() == "text"), mail)
    body = part.get_payload(decode=True) or b""
    text = body.decode("latin1") if isinstance(body, bytes) else ""
    text = re.sub(r"<[^>]*>|&\w+;", " ", text[: 4 * MAIL_CHARACTERS])
    subject = re.sub(r"\[[\w-]+\]", "", str(mail["subject"] or ""))  # [ILUG], the name of a list
    return " ".join(f"{subject} {text}".split())[:MAIL_CHARACTERS]


def padded(rows: Sequence[list[int]]) -> dict[str, Tensor]:
    length = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return {"input_ids": tokens, "attention_mask": (torch.arange(length) < lengths[:, None]).long()}


class SimilarLengths(Sampler[list[int]]):
    """Batches of rows of similar length, sorted within 32 batches, which saves most of the padding."""

    def __init__(self, lengths: Sequence[int], size: int) -> None:
        self.lengths, self.size, self.generator = lengths, size, torch.Generator()

    def __len__(self) -> int:
        return len(self.lengths) // self.size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.lengths), generator=self.generator).tolist()[: len(self) * self.size]
        for start in range(0, len(order), 32 * self.size):
            chunk = sorted(order[start : start + 32 * self.size], key=lambda row: self.lengths[row])
            parts = [chunk[at : at + self.size] for at in range(0, len(chunk), self.size)]
            yield from (parts[at] for at in torch.randperm(len(parts), generator=self.generator).tolist())
