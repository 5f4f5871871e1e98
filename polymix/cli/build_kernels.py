"""polymix build-kernels."""

from __future__ import annotations

import sys

import typer
from rich.console import Console


def command() -> None:
    """Compile the C kernels for this machine into the installed package. It needs gcc and takes about 15 seconds.

    An installation does this by itself where it finds a compiler. Without the kernels polymix works, only slower.

    Example: polymix build-kernels
    """
    from polymix.ops.native import compile

    try:
        built = compile.build()
    except compile.CompileError as error:
        print(f"polymix: the kernels could not be built: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    for path in built:
        Console(highlight=False, markup=False).print(str(path), soft_wrap=True)
