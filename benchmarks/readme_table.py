"""The README's table of speed, from the results of `polymix bench`: between <!-- bench --> and <!-- /bench -->.

    python benchmarks/readme_table.py benchmarks/results/bench/results.json [--check] [--readme README.md]

--check writes nothing. It ends with status 1 where the table differs from the results.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polymix._io import write_whole

BETWEEN = re.compile(r"(<!-- bench -->\n).*?(<!-- /bench -->)", re.DOTALL)
SCHEMA = "polymix.bench/1"
SETTING = ("dtype", "threads", "dim", "batch")


def tables(content: dict[str, Any], tokens: int = 4096) -> str:
    """One table for each type, number of threads, width and batch: time at `tokens`, or at the most that were measured,
    and the speedup over attention at every number of tokens."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in content["rows"]:
        if row["pass"] == "forward":
            groups.setdefault(tuple(row[name] for name in SETTING), []).append(row)
    return "\n\n".join("\n".join(lines(rows, tokens, content["machine"])) for rows in groups.values())


def lines(rows: list[dict[str, Any]], tokens: int, machine: dict[str, Any]) -> Iterator[str]:
    counts = sorted({row["tokens"] for row in rows})
    at = tokens if tokens in counts else counts[-1]
    first = rows[0]
    threads = f"{first['threads']} thread{'s' * (first['threads'] != 1)}"
    where = machine["gpu"] or machine["cpu"]
    yield f"{where}, {threads}, {first['dtype']}, {first['dim']} channels, batch {first['batch']}:"
    yield ""
    yield f"| mixer | ms at {at:,} tokens | " + " | ".join(f"speedup at {count:,}" for count in counts) + " |"
    yield "|---" + "|---:" * (1 + len(counts)) + "|"
    by_mixer: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        name = row["mixer"] if row["impl"] == "auto" else f"{row['mixer']}, {row['impl']}"
        by_mixer.setdefault(name, {})[row["tokens"]] = row
    for name, by_count in by_mixer.items():
        milliseconds = [f"{1e3 * row['seconds']:.3g}" for row in (by_count.get(at),) if row and not row["stopped"]]
        ratios = [by_count.get(count, {}).get("attention_ratio") for count in counts]
        cells = ["–" if ratio is None else f"{ratio:.2f} ×" if ratio < 10 else f"{ratio:.3g} ×" for ratio in ratios]
        yield f"| {name} | " + " | ".join([*(milliseconds or ["–"]), *cells]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--readme", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    before = options.readme.read_text(encoding="utf-8")
    if len(BETWEEN.findall(before)) != 1:
        parser.error(f"{options.readme} must have <!-- bench --> and <!-- /bench --> once, each on a line of its own")
    content = json.loads(options.results.read_text(encoding="utf-8"))
    if content.get("schema") != SCHEMA:
        parser.error(
            f"{options.results} must be a results.json of polymix bench ({SCHEMA}), not {content.get('schema')}"
        )
    after = BETWEEN.sub(lambda markers: f"{markers[1]}\n{tables(content)}\n\n{markers[2]}", before)
    if after == before:
        return 0
    if options.check:
        print(f"{options.readme} is not what {options.results} says: run this without --check")
        return 1
    write_whole(options.readme, after)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
