"""Check an export: python -m polymix.export.check OUT. It needs numpy and the files' runtimes, not PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from polymix.errors import PolymixError
from polymix.export.manifest import check as run_files

USAGE = "usage: python -m polymix.export.check OUT"


def main(arguments: Sequence[str]) -> int:
    """Print a line for each file. Returns 0 if those that could be run gave the right numbers, else 2."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        results = run_files(arguments[0])
    except PolymixError as error:
        print(f"polymix: {error}", file=sys.stderr)
        return 2
    for result in results:
        print(result)
    ran = [result for result in results if result.error is not None]
    passed = sum(result.passed for result in ran)
    print(
        f"{passed} of {len(results)} checks passed"
        + (f", {len(results) - len(ran)} not run" * (len(ran) < len(results)))
    )
    return 0 if ran and passed == len(ran) else 2


class _Callable(type(sys)):  # type: ignore[misc]
    """`polymix.export.check(folder)` works also after this module, which has the function's name, was imported."""

    def __call__(self, folder: str) -> object:
        return run_files(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
sys.modules[__name__].__class__ = _Callable
