"""The domains that `polymix train` knows by name, and which of them are built."""

from __future__ import annotations

from pathlib import Path

from polymix.errors import OptionError

# Every domain of the papers by the name that the commands take. One is built once recipes/ has its file.
DOMAINS = (
    "text", "recall", "classify", "detect", "instances", "segment", "faces", "jigsaw", "handwriting", "fields",
    "points", "boxes3d", "images",
)  # fmt: skip


def built_domains() -> dict[str, Path]:
    """The recipes that come with polymix, by domain: in the package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    files = [*package.parent.glob("recipes/*.py"), *package.glob("recipes/*.py")]
    return {path.stem: path for path in sorted(files) if "\nrecipe = " in path.read_text("utf-8")}


def check_domain(name: str) -> str:
    """The name, or any other text, such as a path, as it is.

    Raises OptionError for a domain that is planned and not built yet.
    """
    built = built_domains()
    if name in DOMAINS and name not in built:
        allowed = f"one of {', '.join(built)}"
        raise OptionError("recipe", f"{name}, which is not built yet", allowed, "Choose one of these.")
    return name
