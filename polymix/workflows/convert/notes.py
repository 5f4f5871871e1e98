"""What a reader of the report and of the card must know of a model beside its figures."""

from __future__ import annotations

from polymix.workflows.convert.data import Data
from polymix.workflows.convert.settings import Settings
from polymix.workflows.convert.sources import Source

FRESH = "No weights were given: this is the architecture alone, converted with fresh weights."


def notes(settings: Settings, source: Source, data: Data | None, code: str | None) -> list[str]:
    """code: what builds the host, where that is code of the user's."""
    found = [] if source.trained else [FRESH]
    if any(settings.epochs):
        imitate, tune = settings.epochs
        found.append(
            f"After the conversion it was trained for {_epochs(imitate)} in which each mixer imitated its attention, "
            f"and {_epochs(tune)} in which the whole learned from labels and from the model before."
        )
    elif source.trained:
        found.append("The mixers have not been trained since they replaced attention: distil the model before use.")
    found += [] if data is None else data.told()
    if source.unused:
        names = ", ".join(source.unused[:3]) + " …" * (len(source.unused) > 3)
        found.append(f"{len(source.unused)} saved weights have no place in the model and were left out: {names}.")
    if code is not None:
        found.append(f"The host is built by code of no library, {code}: read it, then load with trust=True.")
    return found


def _epochs(count: int) -> str:
    return f"{count} epoch{'s' * (count != 1)}"
