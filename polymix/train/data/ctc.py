"""CTC: the tokens that a text needs, and from logits to text, greedily or by a prefix beam search.

The search takes an optional language model of characters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ctc_loss

from polymix.errors import DataError, OptionError, ShapeError, check_int, check_number
from polymix.extras import needs
from polymix.files import regular
from polymix.train.data.texts import read_text

BLANK = 0
Word = dict[str, Any]
MAX_CLASSES = 16  # of a token that the beam search tries
MAX_MODEL_BYTES = 1 << 30  # of a language model in ARPA format


@dataclass(frozen=True)
class ReadText:
    """A text and where each of its characters was read: (first, last) token, and the probability there."""

    text: str
    places: tuple[tuple[int, int], ...] = ()
    certain: tuple[float, ...] = ()


def tokens_needed(text: str) -> int:
    """The tokens without which CTC has no path: one for each character, and a blank between equal neighbours."""
    return sum(2 * len(list(run)) - 1 for _, run in groupby(text))


def encoded(text: str, characters: str, entry: str = "") -> list[int]:
    """The class of each character of a text: c is characters[c - 1].

    Raises DataError for a character that the model does not know, naming the entry.
    """
    unknown = [character for character in text if character not in characters]
    if unknown:
        got = f"the character {unknown[0]!r} in {text[:40]!r}" + (f" ({entry})" if entry else "")
        raise DataError("data", got, f"the model's: {characters!r}", "Train on texts that have it.")
    return [characters.index(character) + 1 for character in text]


def greedy(logits: Tensor, characters: str) -> list[ReadText]:
    """The best class of each token, repeats joined, blanks dropped.

    Args:
        logits: (B, N, classes); class 0 is the blank, class c the character c - 1.
        characters: the alphabet.
    """
    best = logits.softmax(-1).max(-1)
    return [_collapse(c.tolist(), p.tolist(), characters) for p, c in zip(best.values, best.indices, strict=True)]


def _collapse(classes: Sequence[int], certain: Sequence[float], characters: str) -> ReadText:
    text, places, chances, previous = "", [], [], BLANK
    for token, (label, chance) in enumerate(zip(classes, certain, strict=True)):
        if label not in (BLANK, previous):
            text += characters[label - 1]
            places.append((token, token))
            chances.append(chance)
        elif label != BLANK:
            places[-1] = (places[-1][0], token)
            chances[-1] = max(chances[-1], chance)
        previous = label
    return ReadText(text, tuple(places), tuple(chances))


def words_of(heard: ReadText, seconds: float) -> list[Word]:
    """Each word with the seconds of its first and last character, and the least probability of one of them.

    seconds: from one token to the next.
    """
    words: list[Word] = []
    place = 0
    for text in heard.text.split(" "):
        spots, chances = heard.places[place : place + len(text)], heard.certain[place : place + len(text)]
        place += len(text) + 1
        if text:
            start, end = (round(seconds * token, 3) for token in (spots[0][0], spots[-1][1] + 1))
            words.append({"word": text, "from": start, "to": end, "probability": min(chances)})
    return words


def ctc_losses(logits: Tensor, tokens: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
    """(B): the loss of each text, divided by its number of characters.

    Args:
        logits: (B, N, classes). tokens: (B), how many of N are real. labels: of all texts, one after another.
        lengths: (B), how many each text has.
    """
    rows = logits.float().log_softmax(-1).transpose(0, 1)
    losses = ctc_loss(rows, labels, tokens.cpu(), lengths.cpu(), BLANK, "none", zero_infinity=True)
    return losses / lengths.to(losses).clamp_min(1)


class BeamSearch:
    """Prefix beam search over CTC's classes, by flashlight-text.

        score(text) = log Σ P(paths that collapse to text) + weight · log P_lm(text)

    Cost in N: N · beam · min(classes, 16) steps: of each token the 16 likeliest classes are tried.

    Args:
        characters: the alphabet.
        beam: prefixes that are kept.
        language_model: a file in ARPA format over characters (KenLM's lmplz writes one), where a space is "<space>"
            or "|"; None: CTC alone.
        weight: of the language model.

    Raises:
        MissingExtraError: without flashlight-text.
        OptionError, DataError: an option out of range; a file that is no ARPA model.
    """

    def __init__(
        self, characters: str, *, beam: int = 50, language_model: str | Path | None = None, weight: float = 0.5
    ) -> None:
        with needs("handwriting", "Beams are searched with it."):
            from flashlight.lib.text import decoder
        check_int("beam", beam, 1, 10_000)
        check_number("weight", weight, 0.0, 100.0, "a number of at least 0", 0.5)
        if language_model is None and weight != 0.5:
            raise OptionError("weight", repr(weight), "a language model to weigh", "Pass language_model.")
        self.characters = characters
        options = decoder.LexiconFreeDecoderOptions(
            beam_size=beam, beam_size_token=min(len(characters) + 1, MAX_CLASSES), beam_threshold=50.0,
            lm_weight=0.0 if language_model is None else weight, sil_score=0.0, log_add=True,
            criterion_type=decoder.CriterionType.CTC,
        )  # fmt: skip
        self._model: Any = decoder.ZeroLM()
        if language_model is not None:
            self._model = _language_model(decoder, Path(language_model), characters)
        nowhere = len(characters) + 1  # no class counts as silence
        self._decoder = decoder.LexiconFreeDecoder(options, self._model, nowhere, BLANK, [])

    def __call__(self, logits: Tensor) -> list[ReadText]:
        """The best text of each row of (B, N, classes); `certain` is the best class's probability."""
        return [self._one(row) for row in logits.detach().float().cpu().log_softmax(-1)]

    def _one(self, log_probabilities: Tensor) -> ReadText:
        rows = log_probabilities.contiguous()
        if rows.shape[1] != len(self.characters) + 1:  # the library reads as many from an address
            allowed = f"(…, {len(self.characters) + 1}), a class for each character and the blank"
            raise ShapeError(
                "logits", str(tuple(rows.shape)), allowed, "Pass the outputs of the model for these characters."
            )
        results = self._decoder.decode(rows.data_ptr(), *rows.shape)
        # The first and the last class are the search's own start and end.
        path = results[0].tokens[1:-1] if results else [BLANK] * len(rows)
        chosen = rows.exp()[torch.arange(len(rows)), torch.tensor(path)]
        return _collapse(path, chosen.tolist(), self.characters)


def decoder_of(recipe: Any, characters: str) -> Callable[[Tensor], list[ReadText]]:
    """What turns logits into texts by a recipe's `beam` and `language_model`. Raises what `BeamSearch` raises."""
    if recipe.beam:
        return BeamSearch(characters, beam=recipe.beam, language_model=recipe.language_model)
    return partial(greedy, characters=characters)


@dataclass(frozen=True)
class _Arpa:
    """N-grams with back-off: the log10 probability and the back-off weight of each."""

    grams: dict[tuple[str, ...], tuple[float, float]]
    order: int

    def score(self, before: tuple[str, ...], word: str) -> float:
        """Natural log of P(word | before)."""
        penalty = 0.0
        while True:
            gram = self.grams.get((*before, word))
            if gram:
                return (gram[0] + penalty) * math.log(10)
            if not before:
                return (self.grams.get(("<unk>",), (-7.0, 0.0))[0] + penalty) * math.log(10)
            penalty += self.grams.get(before, (0.0, 0.0))[1]
            before = before[1:]


def read_arpa(path: Path) -> _Arpa:
    """An n-gram model in ARPA format. Raises DataError naming the line."""
    grams: dict[tuple[str, ...], tuple[float, float]] = {}
    order = 0
    expected, cure = "an ARPA file", "Write one, for example by KenLM's lmplz --arpa."
    try:
        if regular(path).stat().st_size > MAX_MODEL_BYTES:
            raise DataError("language_model", f"{path} of more than 1 GiB", expected, "Prune the model.")
    except OSError as error:
        raise DataError("language_model", f"{path}: {error}", expected, cure) from error
    for number, row in enumerate(read_text(path, "language_model").splitlines(), 1):
        if row.startswith("\\") and row.endswith("-grams:"):
            order = int(row[1 : row.index("-")])
        elif order and row.strip() and not row.startswith("\\"):
            try:
                chance, *words = row.split()
                back = float(words.pop()) if len(words) > order else 0.0
                if len(words) != order:
                    raise ValueError
                grams[tuple(words)] = (float(chance), back)
            except ValueError:
                raise DataError("language_model", f"{path}, line {number}: {row[:40]!r}", expected, cure) from None
    if not grams:
        raise DataError("language_model", f"{path} without n-grams", expected, cure)
    return _Arpa(grams, order)


def _language_model(decoder: Any, path: Path, characters: str) -> Any:
    """The model as flashlight-text wants it: states that compare equal where they see the same characters."""
    arpa = read_arpa(path)
    space = "|" if ("|",) in arpa.grams else "<space>"
    names = ["", *(space if c == " " else c for c in characters)]
    words = [gram[0] for gram in arpa.grams if len(gram) == 1 and not re.fullmatch("<.*>", gram[0])]
    longer = [word for word in words if len(word) > 1]
    if 2 * len(longer) > len(words):
        cure = "Write the texts with a space between all characters, and <space> for a space, for KenLM's lmplz."
        raise DataError("language_model", f"{path} of words such as {longer[0]!r}", "a model of characters", cure)

    scores: dict[tuple[tuple[str, ...], int], tuple[tuple[str, ...], float]] = {}  # as many beams end alike

    class Model(decoder.LM):
        def __init__(self) -> None:
            decoder.LM.__init__(self)
            self.states: dict[int, tuple[Any, tuple[str, ...]]] = {}

        def start(self, start_with_nothing: bool) -> Any:
            self.states.clear()
            return self._keep(decoder.LMState(), ("<s>",))

        def score(self, state: Any, label: int) -> tuple[Any, float]:
            before = self.states[id(state)][1]
            if (before, label) not in scores:
                seen = before[-(arpa.order - 1) :] if arpa.order > 1 else ()
                scores[before, label] = (
                    (*before, names[label])[-max(arpa.order - 1, 1) :],
                    arpa.score(seen, names[label]),
                )
            sees, score = scores[before, label]
            return self._keep(state.child(label), sees), score

        def finish(self, state: Any) -> tuple[Any, float]:
            before = self.states[id(state)][1]
            after = self._keep(state.child(len(names)), before)
            return after, arpa.score(before[-(arpa.order - 1) :] if arpa.order > 1 else (), "</s>")

        def _keep(self, state: Any, sees: tuple[str, ...]) -> Any:
            self.states[id(state)] = (state, sees)  # keeps the state alive, so that its id stays its own
            return state

    return Model()
