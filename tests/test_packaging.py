"""What pyproject.toml promises: extras, domains, versions and addresses say the same in every place."""

import re
from pathlib import Path

import polymix
from polymix.extras import EXTRAS, URL
from polymix.train.registry import GROUP, OWN_RECIPES

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(polymix.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def names(lines):
    """The packages of an extra, without those of other extras and of other Pythons."""
    lines = [line for line in lines if not line.startswith("polymix[") and "python_version < '3.11'" not in line]
    return {re.split(r"[\s>;\[]", line)[0] for line in lines}


def test_the_table_of_extras_is_that_of_the_project():
    """`polymix doctor` and the errors read the one, pip the other."""
    extras = {name: names(lines) for name, lines in PROJECT["optional-dependencies"].items()}
    assert set(extras) - {"dev", "docs"} == set(EXTRAS), "dev and docs are for those who change polymix"
    for name, extra in EXTRAS.items():
        assert set(extra.packages) == extras[name], name
        assert extra.purpose


def test_dev_has_every_extra_that_tests_use():
    (within,) = (line for line in PROJECT["optional-dependencies"]["dev"] if line.startswith("polymix["))
    missing = set(EXTRAS) - set(within[8:-1].split(","))
    assert missing == {"mobile", "series", "wandb"}, "large, or a service: their tests are skipped without them"


def test_plotly_comes_only_to_those_who_look_at_scans():
    assert [name for name, extra in EXTRAS.items() if "plotly" in extra.packages] == ["scans"]


def test_every_domain_is_an_entry_point():
    assert PROJECT["entry-points"][GROUP] == OWN_RECIPES
    for name in OWN_RECIPES:
        assert (ROOT / "polymix" / "domains" / name / "recipe.py").is_file()


def test_one_version_and_one_address():
    about = dict(re.findall(r"^([\w-]+): (\S+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE))
    assert (about["version"], about["repository-code"]) == (polymix.__version__, URL)
    assert about["license"] == PROJECT["license"]
    assert set(PROJECT["urls"].values()) == {URL, f"{URL}/issues", f"{URL}/blob/main/CHANGELOG.md"}


def test_ci_runs_every_python_that_is_promised():
    """And the oldest torch that the package asks for."""
    pythons = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)}
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    assert set(re.findall(r'python: "([\d.]+)", torch: newest', workflow)) == pythons
    oldest = min(pythons, key=lambda text: int(text.partition(".")[2]))
    assert PROJECT["requires-python"] == f">={oldest}"
    (torch,) = (line.partition(">=")[2] for line in PROJECT["dependencies"] if line.startswith("torch>="))
    assert f'python: "{oldest}", torch: "{torch}.' in workflow


def test_every_package_of_an_extra_is_among_the_tested_versions():
    """README installs with -c constraints.txt: what is not in it comes in whatever version there is."""
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    for name, extra in EXTRAS.items():
        if name not in ("mobile", "wandb"):
            assert {package.lower().replace("_", "-") for package in extra.packages} <= pinned, name
