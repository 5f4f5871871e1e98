"""Writes the generated parts of README.md and of the pages: tables from the code and from benchmarks/results.

    python docs/tables.py          # write every part that is stale
    python docs/tables.py --check  # write nothing; name the pages with stale parts and end with status 1

A generated part stands in its page between <!-- table: NAME --> and <!-- /table -->, so that the page is whole wherever
it is read. PARTS has a function for every name.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

from _tables import (  # noqa: E402
    busy,
    context,
    distil,
    domains,
    exports,
    families,
    fashion,
    figures,
    gpu,
    language,
    mixers,
    options,
    overview,
    parallel,
    polynomials,
    pretrained,
    results,
    scaling,
    search,
    series,
    statements,
)

from polymix.files import write_whole  # noqa: E402

PART = re.compile(r"^<!-- table: (?P<name>[\w-]+) -->\n(?P<body>.*?)^<!-- /table -->$", re.DOTALL | re.MULTILINE)
PARTS: dict[str, Callable[[], str]] = {
    **mixers.TABLES, **figures.TABLES, **exports.TABLES, **domains.TABLES, **series.TABLES, **overview.TABLES,
    **options.TABLES, **results.TABLES, **context.TABLES, **distil.TABLES, **families.TABLES, **pretrained.TABLES,
    **fashion.TABLES, **search.TABLES, **gpu.TABLES, **language.TABLES, **scaling.TABLES, **parallel.TABLES,
    **busy.TABLES, **statements.TABLES, **polynomials.TABLES,
}  # fmt: skip


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def names(page: str) -> list[str]:
    """The parts of a page in their order. Raises ValueError where markers do not pair up."""
    pairs = [match["name"] for match in PART.finditer(page)]
    begun, ended = (len(re.findall(mark, page, re.MULTILINE)) for mark in (r"^<!-- table: ", r"^<!-- /table -->"))
    if not len(pairs) == begun == ended:
        raise ValueError(f"{begun} parts begin and {ended} end, of which {len(pairs)} are a pair")
    unknown = set(pairs) - set(PARTS)
    if unknown:
        raise ValueError(f"no function makes {', '.join(sorted(unknown))}")
    return pairs


def written(page: str) -> str:
    """A page with its parts as the code and the results have them now."""
    names(page)
    return PART.sub(lambda part: f"<!-- table: {part['name']} -->\n\n{PARTS[part['name']]()}\n\n<!-- /table -->", page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with status 1 where a part is stale")
    check = parser.parse_args().check
    stale = []
    for path in pages():
        before = path.read_text(encoding="utf-8")
        try:
            after = written(before)
        except ValueError as error:
            parser.error(f"{path.relative_to(ROOT)}: {error}")
        if after != before:
            stale.append(path.relative_to(ROOT))
            if not check:
                write_whole(path, after)
    for path in stale:
        print(f"{path} {'is stale: run python docs/tables.py' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
