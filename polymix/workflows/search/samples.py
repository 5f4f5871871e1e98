"""What the mixers learn from, what they are scored on, and the other samples that plans are compared on."""

from __future__ import annotations

import hashlib
import math
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from polymix.convert.tracing import tensors
from polymix.convert.trained import bytes_of
from polymix.errors import DataError

LEAST, HELD = 64, 64  # samples in all; to score on, and as many others to compare on


class Samples(NamedTuple):
    """Batches: `train` is a loader or a list, the others are lists, without labels."""

    train: Any
    scoring: list[Any]
    comparing: list[Any]

    def fingerprint(self) -> str:
        """Differs between data."""
        digest = hashlib.sha256()
        for part in tensors([self.scoring, self.comparing]):
            digest.update(bytes_of(part))
        return digest.hexdigest()[:16]


def parted(data: Any, seed: int, steps: int) -> Samples:
    """Data in three parts: 64 samples to score on, 64 to compare on, at most half in all, and `steps` batches to learn.

    Raises DataError: there are fewer than 64 samples, or too few batches in a list.
    """
    from polymix.train.distill.batches import first_of, inputs_of, plain
    from polymix.train.distill.guard import rows, set_apart, shortened

    first = first_of(data, "data")
    size = rows(first)
    indexed = isinstance(data, (list, tuple)) or (
        isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset)
    )
    if not indexed:
        data = list(islice(iter(data), steps + 2 * math.ceil(HELD / size)))
    whole = isinstance(data, DataLoader)
    count = len(data.dataset) if whole else sum(map(rows, data))
    if count < LEAST:
        got = f"{count:,} samples"
        raise DataError(
            "data", got, f"at least {LEAST}: some to learn from, to score on and to compare on", "Add some."
        )
    apart = set_apart(data, seed, 2 * HELD, 2, parts=2)
    if apart is None:
        got = f"{len(data)} batches of about {size:,} samples"
        raise DataError("data", got, "at least 4 batches, of which some are held back", "Make them smaller.")
    train, held = apart
    scoring, comparing = ([inputs_of(plain(batch)) for batch in part] for part in held)
    return Samples(shortened(train, steps), scoring, comparing)
