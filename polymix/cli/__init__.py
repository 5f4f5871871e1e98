"""The command line: each verb is a file with its options, one call into the package, and an exit status."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from polymix import threads
from polymix.errors import MissingExtraError, PolymixError, reason_of
from polymix.extras import missing_package

try:
    import rich  # noqa: F401  # the verbs print with it
    import typer
except ImportError:  # main() says what to install
    typer = None  # type: ignore[assignment]

_OUT_OF_MEMORY = re.compile("(can't|not enough|out of) .*memory|Storage size calculation overflowed")
# In the order of the help. Each is the function `command` of the file with its name (doctor, build_kernels), which is
# imported late: it needs typer.
VERBS = ("compare", "bench", "recommend", "search", "convert", "train", "evaluate", "predict", "generate", "export",
         "list", "show", "lens", "doctor", "build-kernels")  # fmt: skip


def _version(show: bool) -> None:
    if show:
        from polymix import __version__

        print(f"polymix {__version__}")
        raise typer.Exit()


def _app() -> Any:
    from polymix.cli.shared import Command

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
        # The options of `train` are those of the domain, which reads what is left here.
        more = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
        settings = more if verb == "train" else {}
        app.command(verb, cls=Command, context_settings=settings)(
            import_module(f"polymix.cli.{verb.replace('-', '_')}").command
        )
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. A mistake of the user's is one line on stderr and exit status 2.

    So are a full or read-only disk, and memory that runs out. Ctrl-C ends with 130, a reader that has enough (such as
    head) with 141; neither prints a traceback.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    threads.prepare()
    for stream in (sys.stdout, sys.stderr):  # what an encoding lacks, or a file's name that is no text, is no traceback
        if isinstance(stream, io.TextIOWrapper):
            utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="backslashreplace" if utf8 else "replace")
    try:
        if typer is None:
            raise MissingExtraError("typer rich", "train", "The command line is made with them.")
        status = _app()(arguments or ["--help"], standalone_mode=False) or 0
        if sys.stdout is not None:  # it is None where the shell closed it
            sys.stdout.flush()  # here, where a full disk or a closed pipe is still reported
        sys.exit(status)
    except KeyboardInterrupt:
        _leave(130, "Interrupted.")
    except BrokenPipeError:
        _leave(141, None)
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        if isinstance(error, SystemExit):  # click ends so when its reader has enough
            _leave(141, None)
        message = _message(error)
        if message is None:  # a bug: show its traceback
            raise
        _leave(130 if message == "Interrupted." else 2, message)


def _message(error: BaseException) -> str | None:
    """What to tell the user about an error; None if it is a bug."""
    if isinstance(error, PolymixError):  # with the flag as one types it
        name = str(error.argument)
        flag = getattr(error, "flags", {}).get(name)
        return str(error) if flag is None else str(error).replace(f"`{name}`", f"`{flag}`", 1)
    if isinstance(error, ModuleNotFoundError) and (missing := missing_package(error)) is not None:
        return str(missing)
    if hasattr(error, "format_message"):  # a usage error
        return str(error.format_message())
    if typer is not None and isinstance(error, typer.Abort):  # which click makes of an EOFError too: nothing asks here
        return None if isinstance(error.__cause__ or error.__context__, EOFError) else "Interrupted."
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{reason_of(error).rstrip('.')}."
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error))):
        return "The machine ran out of memory. Use smaller sizes, fewer tokens or a smaller batch."
    if isinstance(error, RecursionError):
        return "A file is nested too deeply to be read."
    return None


def _leave(status: int, message: str | None) -> None:
    """Exit with one line on standard error. What standard output still holds is dropped if nobody can take it."""
    try:
        _ = sys.stdout is None or sys.stdout.flush()
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  it takes what is left when Python exits
    if message is not None:
        print(f"polymix: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)
