"""Lines of text as samples of an encoder, such as BERT, in its own tokens."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from polymix.convert.adapters.libraries import load_library
from polymix.errors import DataError, OptionError, one_line
from polymix.workflows.convert.inputs import sequence_length
from polymix.workflows.convert.settings import Settings
from polymix.workflows.convert.sources import Source

BATCH = 16


class Lines:
    """The lines of a text file, or of the .txt and .md files in a folder, each a sample; longer ones are cut off."""

    def __init__(self, data: str, source: Source, settings: Settings) -> None:
        from polymix.train.data.texts import read_text

        path, self.tokens = Path(data), sequence_length(source.model, settings.tokens)
        files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix in (".txt", ".md"))
        if not files:
            raise DataError("--data", f"{data}, which holds no .txt or .md files", "text for this model", "")
        if source.folder is None:
            got = f"{settings.model}, which has no tokenizer for {data}"
            raise OptionError("--model", got, "a folder with the model and its tokenizer", "Save both to one.")
        try:
            auto: Any = load_library("transformers").AutoTokenizer
            self.tokenizer = auto.from_pretrained(source.folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever the library raises for a folder without one
            got = f"{source.folder}, without a tokenizer that can be loaded ({one_line(error)[:200]})"
            cure = "Save it there with tokenizer.save_pretrained(FOLDER)."
            raise OptionError("--model", got, "a folder with the model's tokenizer", cure) from error
        lines = (line.strip() for file in files for line in read_text(file, "--data").splitlines())
        self.lines = [line for line in lines if line]

    def loader(self, batch: int | None) -> DataLoader[Any]:
        return DataLoader(self.lines, batch or BATCH, shuffle=True, collate_fn=self._together)  # type: ignore[arg-type]

    def full(self, batch: int | None) -> dict[str, Any]:
        """A batch of texts that have as many tokens as is asked for, on which layers are timed."""
        text = " ".join(islice(cycle(self.lines), self.tokens))  # each line has a token or more
        return self._together([text] * (batch or BATCH))

    def _together(self, lines: list[str]) -> dict[str, Any]:
        cut = {"padding": True, "truncation": True, "max_length": self.tokens, "return_tensors": "pt"}
        return dict(self.tokenizer(lines, **cut))
