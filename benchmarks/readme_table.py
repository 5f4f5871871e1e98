"""The README's table of costs, from the results of `polymix bench`: between <!-- bench --> and <!-- /bench -->.

    python benchmarks/readme_table.py benchmarks/results/bench/results.json [--check] [--readme README.md]

--check writes nothing and ends with status 1 where the table is not what the results say.
"""

import argparse
import re
from pathlib import Path

from polymix.bench.results import Results, write_atomically
from polymix.bench.table import markdown

BETWEEN = re.compile(r"(<!-- bench -->\n).*?(<!-- /bench -->)", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--readme", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--check", action="store_true")
    its = parser.parse_args()
    before = its.readme.read_text(encoding="utf-8")
    if len(BETWEEN.findall(before)) != 1:
        parser.error(f"{its.readme} must have <!-- bench --> and <!-- /bench --> once, each on a line of its own")
    table = markdown(Results.load(its.results))
    after = BETWEEN.sub(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", before)
    if after == before:
        return 0
    if its.check:
        print(f"{its.readme} is not what {its.results} says: run this without --check")
        return 1
    write_atomically(its.readme, after)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
