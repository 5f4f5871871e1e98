"""The command line: each verb is a file with its options, one call into the package, and an exit status."""

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

# In the order of the help. Each is the function `command` of the file with its name (doctor, build_kernels), which is
# imported late: it needs typer.
VERBS = ("compare", "bench", "recommend", "convert", "train", "generate", "list", "show", "lens",
         "doctor", "build-kernels")  # fmt: skip


def _version(wanted: bool) -> None:
    if wanted:
        from polymix import __version__

        print(f"polymix {__version__}")
        raise typer.Exit()


def _app() -> Any:
    app = typer.Typer(
        help="Polynomial token mixers in attention's place. Example: polymix compare --quick", no_args_is_help=True,
        pretty_exceptions_enable=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip

    @app.callback()
    def options(
        version: bool = typer.Option(False, "--version", help="Show the version.", callback=_version, is_eager=True),
    ) -> None:
        pass

    for verb in VERBS:
        app.command(verb)(import_module(f"polymix.cli.{verb.replace('-', '_')}").command)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. A mistake of the user's is one line on stderr and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if typer is None:
            cure = "Install them with pip install 'polymix[train]'."
            raise MissingExtraError("typer, rich", "neither", "the packages of the command line", cure)
        sys.exit(_app()(arguments or ["--help"], standalone_mode=False) or 0)
    except PolymixError as error:
        message = str(error)
    except Exception as error:
        if not hasattr(error, "format_message"):  # not a usage error but a bug: show its traceback
            raise
        message = error.format_message()
    print(f"polymix: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
