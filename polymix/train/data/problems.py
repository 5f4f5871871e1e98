"""The one collector of what is wrong in a data set: `--check` lists it all, training stops at it or leaves it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from polymix.errors import DataError, MissingExtraError, PolymixError, printable, shortened


@dataclass
class Problems:
    """Sentences, each of which names the file and the entry in it that cannot be used.

    A reader adds what it finds and goes on with the rest. `--check` shows `lines`; training calls `settle`. Both run
    the same reader, so that neither knows of a problem that the other does not.
    """

    lines: list[str] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)  # what is no mistake, and of which files

    def __bool__(self) -> bool:
        return bool(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def add(self, file: Path | str, entry: str, text: str) -> None:
        """Note a problem. entry: the line, number or name in the file; "" where it is the file itself."""
        self.lines.append(shortened(printable(f"{file}: {entry}: {text}" if entry else f"{file}: {text}")))

    def note(self, file: Path | str, text: str) -> None:
        """Note how a file is understood where it could be meant otherwise."""
        self.notes.setdefault(text, []).append(str(file))

    def tell(self, say: Callable[[str], None]) -> None:
        """Say the notes, once for all files of which they are true."""
        for text, files in self.notes.items():
            more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
            say(printable(f"Note: {text}: {files[0]}{more}"))

    @contextmanager
    def noting(self, entry: str = "") -> Iterator[None]:
        """Note the error of polymix that the block raises, after the entry that led to it, and go on after the block.

        What is returned in the block is lost then: a caller sets it before.
        """
        try:
            yield
        except MissingExtraError:  # says nothing of the data
            raise
        except PolymixError as error:
            text = str(error.got) if isinstance(error, DataError) else str(error)
            self.lines.append(shortened(printable(f"{entry}: {text}" if entry else text)))

    def settle(
        self, broken: str = "refuse", say: Callable[[str], None] = lambda text: None, *, skippable: bool = False
    ) -> None:
        """Say the notes. With problems, raise DataError with the first one, or with "skip" say how many are left out.

        Args:
            broken: "refuse", or "skip" where the reader has left the entries out, and those that are left will do.
            skippable: whether the recipe has an option `broken`, of which the error then tells.
        """
        self.tell(say)
        if not self.lines:
            return
        if broken == "refuse":
            more = f" ({len(self.lines) - 1:,} more)" if len(self.lines) > 1 else ""
            cure = "Mend or remove it" + (", or pass --set broken=skip to leave out such entries" if skippable else "")
            raise DataError(
                "data", f"this: {self.lines[0]}{more}", "data without mistakes", f"{cure}. --check lists all."
            )
        say(f"Left out {len(self.lines):,} entries, the first: {self.lines[0]}")
