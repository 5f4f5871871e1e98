"""polymix <verb>: thin; each verb hands over to the package at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from polymix.errors import MissingExtraError, PolymixError

try:
    import rich  # noqa: F401  # the verbs print with it
    import typer
except ImportError:  # main() says what to install
    typer = None  # type: ignore[assignment]

# In the help's order; each is the function `command` of the file of its name, which _app imports: it needs typer.
VERBS = ("compare", "bench", "recommend", "convert", "train", "generate", "list", "show", "lens",
         "doctor", "build-kernels")  # fmt: skip


def _app() -> Any:
    app = typer.Typer(
        help="Polynomial token mixers in attention's place. Example: polymix compare --quick", no_args_is_help=True,
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    )  # fmt: skip
    for verb in VERBS:
        app.command(verb)(import_module(f"polymix.cli.{verb.replace('-', '_')}").command)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script: what polymix, or the command line itself, finds wrong is one line and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if typer is None:
            cure = "The commands need them."
            raise MissingExtraError("typer, rich", "not installed", "pip install 'polymix[train]'", cure)
        sys.exit(_app()(arguments or ["--help"], standalone_mode=False) or 0)
    except PolymixError as error:
        message = str(error)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what is not a usage error is a bug, and shows where it is
            raise
        message = error.format_message()
    print(f"polymix: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
