"""Training data that nobody has to have: sequences that a language model draws itself, or random tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.context import longest, text_config
from polymix.convert.saving.files import read_tensors
from polymix.convert.tracing import mode, without_fast_path
from polymix.errors import CapabilityError, OptionError, ResultsError, check_choice, check_int, check_number, reason_of
from polymix.files import write_whole
from polymix.results import Progress
from polymix.train.data.sampling import number
from polymix.train.distill.batches import foretells, logits_of, reads_two
from polymix.train.resume import check_same_run
from polymix.train.task import IGNORED

SELF, RANDOM = KINDS = ("self", "random")
LONGEST, SPREAD, SAVES = 128, 8, 10  # tokens by default; longest over shortest by default; how often they are saved
_SIGNS = ("mask_token_id", "cls_token_id", "sep_token_id", "bos_token_id")


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Batches of token ids for `polymix.distill`, drawn by the original model or at random.

    A causal model draws one token after another, x_t ~ softmax(z(x_<t) / temperature), from its first sign on; what
    follows the sign for an end is another text. A masked language model begins with every place masked. In each round
    it draws the tokens of an equal share of the places, chosen by chance, x_i ~ softmax(z_i / temperature), all given
    what stands there already; with as many rounds as tokens, one at a time. Then a share of the tokens is masked, as in
    its training. All sequences of a batch are equally long.

    Args:
        kind: "self"; or "random": uniform tokens, a control.
        batches, batch_size: how many, and sequences of each.
        tokens: the shortest and the longest sequence, its signs included; uniform between. None: up to 128, or as many
            as the model takes, and from an eighth of that.
        rounds: of a masked language model; each costs one call of the model per batch.
        temperature: below 1 the samples are likelier and less varied.
        masked: share of the tokens of a sample that a masked language model does not see.
        tokenizer: the model's; of it only mask_token_id, cls_token_id, sep_token_id, bos_token_id and all_special_ids
            are read. Masked language models need one, where their config has no mask_token_id.
    Raises:
        OptionError: an option is out of range.
    """

    kind: str = SELF
    batches: int = 256
    batch_size: int = 16
    tokens: tuple[int, int] | None = None
    rounds: int = 16
    temperature: float = 1.0
    masked: float = 0.15
    tokenizer: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        for name in ("batches", "batch_size", "rounds"):
            check_int(name, getattr(self, name), 1)
        check_number("temperature", self.temperature, 1e-6, 1e6, "a number above 0", 1.0)
        check_number("masked", self.masked, 0.0, 0.99, "a share from 0 to 0.99", 0.15)
        if self.tokens is not None:
            if not isinstance(self.tokens, (tuple, list)) or len(self.tokens) != 2 or self.tokens[0] > self.tokens[1]:
                raise OptionError("tokens", self.tokens, "the shortest and the longest length", "Try (16, 128).")
            check_int("tokens", self.tokens[0], 1)
            check_int("tokens", self.tokens[1], 1)

    def draw(
        self, model: nn.Module, seed: int = 0, *, labels: bool = False, file: Path | None = None,
        say: Callable[[str], None] = lambda line: None, progress: Progress | None = None,
    ) -> list[dict[str, Tensor]]:  # fmt: skip
        """The batches, on the CPU: each depends on the seed and its place alone.

        Args:
            model: the original one, before its conversion; on any device.
            labels: also tokens that the model draws for what it has to predict (masked places, or next tokens), as
                "labels", on which no other model has a lower perplexity than this one, but by chance.
            file: where they are kept while they are drawn, and from where an interrupted call continues.
        Raises:
            CapabilityError: the model cannot draw tokens, or reads none. OptionError: longer than it takes, or the id
            of its mask is not known. ResultsError: the file is damaged, or holds other samples.
        """
        signs = Signs.of(model, self, self.kind == SELF or labels)
        lengths = _lengths(model, self, signs.least)
        settings = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "tokenizer"}
        settings |= {"tokens": lengths, "seed": seed, "labels": labels, "model": type(model).__name__, **asdict(signs)}
        drawn = [] if file is None else _read(file, settings)
        if len(drawn) < self.batches:
            what = "batches that the model draws itself" if self.kind == SELF else "batches of random tokens"
            say(f"Drawing {self.batches - len(drawn):,} {what}.")
        bar = None if progress is None else progress.start("drawing", self.batches)
        with torch.no_grad(), mode(model, False), without_fast_path():
            while len(drawn) < self.batches:
                draw = torch.Generator().manual_seed(number(seed, self.kind, len(drawn)))
                drawn.append(self._batch(model, signs, lengths, draw, labels))
                if bar is not None:
                    bar(len(drawn), "")
                if file is not None and (len(drawn) % -(-self.batches // SAVES) == 0 or len(drawn) == self.batches):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    content = {"settings": settings, "batches": list(drawn)}
                    write_whole(file, lambda part, content=content: torch.save(content, part))  # type: ignore[misc]
        return drawn

    def _batch(
        self, model: nn.Module, signs: Signs, lengths: tuple[int, int], draw: torch.Generator, labels: bool
    ) -> dict[str, Tensor]:
        length = int(torch.randint(lengths[0], lengths[1] + 1, (), generator=draw))
        ids = signs.random(self.batch_size, length, draw)
        inner = slice(int(signs.first is not None), length - int(signs.last is not None))
        if self.kind == SELF:
            fill = _in_rounds if signs.masks else _in_order
            ids = fill(model, ids, inner, signs, self, draw)
        hidden = torch.zeros_like(ids, dtype=torch.bool)
        hidden[:, inner] = torch.rand(ids[:, inner].shape, generator=draw) < self.masked
        batch = {"input_ids": ids if signs.mask is None else ids.masked_fill(hidden, signs.mask)}
        if labels:
            answers = _drawn(_logits(model, batch["input_ids"]), replace(signs, forbidden=()), 1.0, draw)
            batch["labels"] = (
                answers.masked_fill(~hidden, IGNORED) if signs.masks else torch.cat([ids[:, :1], answers[:, :-1]], 1)
            )
        return batch


@dataclass(frozen=True)
class Signs:
    """The tokens of a model. masks: whether it is a masked language model.

    mask, first, last: the ids of the mask, of the sign before a text and of that after it; None: there is none.
    forbidden: tokens that no text has.
    """

    masks: bool
    size: int
    mask: int | None
    first: int | None
    last: int | None
    forbidden: tuple[int, ...]

    @property
    def least(self) -> int:
        """The tokens of the shortest text."""
        return 1 + (self.first is not None) + (self.last is not None)

    @classmethod
    def of(cls, model: Any, options: Samples, predicts: bool) -> Signs:
        """predicts: the model has to predict tokens. Raises CapabilityError, OptionError."""
        name, config = type(model).__name__, text_config(model)
        masks, reads_on = "MaskedLM" in name, foretells(model, {})
        if config is None:
            cure = "Pass batches of your own; for a generator of images, those of noise_batches."
            raise CapabilityError("data", f"{options.kind!r} for {name}", "a model that reads token ids", cure)
        if reads_two(model):
            got = f"{options.kind!r} for {name}, which reads two texts"
            raise CapabilityError("data", got, "a model that reads one", "Pass batches of your own.")
        if predicts and not masks and not reads_on:
            got = f"{options.kind!r} for {name}, which has no head that predicts tokens"
            cure = (
                f"Load it with one, as BertForMaskedLM has it. In Python batches of your own, or {RANDOM!r}, work too."
            )
            raise CapabilityError("data", got, "a causal or a masked language model of transformers", cure)
        mask, first, last, begin = (_sign(options.tokenizer, config, sign) for sign in _SIGNS)
        if options.kind == SELF and masks and mask is None:
            got = f"{name}, whose mask is not known" if options.tokenizer is None else "one without a mask_token_id"
            cure = "Pass data=Samples(tokenizer=…)."
            raise OptionError("tokenizer", got, "the model's tokenizer, or an object with its mask_token_id", cure)
        if reads_on:
            return cls(False, config.vocab_size, None, begin, None, ())
        special = {*(getattr(options.tokenizer, "all_special_ids", None) or ()), mask, first, last}
        forbidden = tuple(sorted(id for id in special if id is not None and 0 <= id < config.vocab_size))
        return cls(masks, config.vocab_size, mask if masks else None, first, last, forbidden)

    def random(self, rows: int, length: int, draw: torch.Generator) -> Tensor:
        """Uniform tokens (rows, length) between the signs for beginning and end."""
        chances = torch.ones(self.size)
        chances[list(self.forbidden)] = 0
        ids = torch.multinomial(chances.expand(rows, -1), length, replacement=True, generator=draw)
        for place, sign in ((0, self.first), (-1, self.last)):
            if sign is not None:
                ids[:, place] = sign
        return ids


def _sign(tokenizer: Any, config: Any, name: str) -> int | None:
    """The id of a sign, as the tokenizer or the config states it; None where it is not among the tokens."""
    stated = getattr(tokenizer, name, None)
    stated = getattr(config, name, None) if stated is None else stated
    return stated if isinstance(stated, int) and 0 <= stated < config.vocab_size else None


def _lengths(model: nn.Module, options: Samples, least: int) -> tuple[int, int]:
    """The shortest and the longest sequence."""
    most = longest(model)
    if options.tokens is None:
        high = max(least, min(LONGEST, most or LONGEST))
        return max(least, high // SPREAD), high
    if options.tokens[0] < least or options.tokens[1] > (most or options.tokens[1]):
        allowed = f"lengths from {least} up" + ("" if most is None else f", at most {most}, which the model takes")
        raise OptionError("tokens", options.tokens, allowed, "Leave it out.")
    return options.tokens


def _in_rounds(
    model: nn.Module, ids: Tensor, inner: slice, signs: Signs, options: Samples, draw: torch.Generator
) -> Tensor:
    """Texts of a masked language model, of which each round draws the tokens of an equal share of the places."""
    assert signs.mask is not None
    texts = ids[:, inner]
    texts.fill_(signs.mask)
    order = torch.rand(texts.shape, generator=draw).argsort(1)
    for places in order.tensor_split(min(options.rounds, order.shape[1]), 1):
        logits = _logits(model, ids)[:, inner].gather(1, places.unsqueeze(-1).expand(-1, -1, signs.size))
        texts.scatter_(1, places, _drawn(logits, signs, options.temperature, draw))
    return ids


def _in_order(model: Any, ids: Tensor, inner: slice, signs: Signs, options: Samples, draw: torch.Generator) -> Tensor:
    """Texts of a causal model after their first token, one token after another."""
    device, cache = next(model.parameters()).device, None
    for place in range(1, ids.shape[1]):
        seen = ids[:, :place] if cache is None else ids[:, place - 1 : place]
        output = model(input_ids=seen.to(device), past_key_values=cache, use_cache=True)
        cache = getattr(output, "past_key_values", None)
        ids[:, place : place + 1] = _drawn(output.logits[:, -1:].float().cpu(), signs, options.temperature, draw)
    return ids


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    return logits_of(model, {"input_ids": ids.to(next(model.parameters()).device)}).float().cpu()


def _drawn(logits: Tensor, signs: Signs, temperature: float, draw: torch.Generator) -> Tensor:
    """A token for each row of logits (B, n, tokens)."""
    logits = logits[..., : signs.size].clone()
    logits[..., list(signs.forbidden)] = -torch.inf
    chances = (logits / temperature).softmax(-1).flatten(0, 1)
    return torch.multinomial(chances, 1, generator=draw).view(logits.shape[:2])


def _read(file: Path, settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The batches that an earlier call has kept in a file; none where there is no file."""
    if not file.exists():
        return []
    try:
        content = read_tensors(file)
        theirs, drawn = dict(content["settings"]), list(content["batches"])
    except (OSError, TypeError, KeyError, ValueError) as error:
        got = f"{file}, which cannot be read ({reason_of(error)[:200]})"
        raise ResultsError("resume", got, "samples of polymix.distill", "Delete it to draw them again.") from error
    check_same_run(file, theirs, settings, alike=True)
    return drawn
