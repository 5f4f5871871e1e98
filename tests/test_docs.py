"""The docs are true: their code runs, what they take from the code is all there, and the site builds without a warning."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

import polymix
from polymix.convert import adapter
from polymix.mixers import config_class
from tests.browser import needs_browser, opened

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TRAINING = ("tutorial", "train", "distil", "search")  # pages whose blocks train models

yaml = pytest.importorskip("yaml", reason="untested: the docs, for which PyYAML is needed (the docs extra)")


def loaded(path):
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hook(name):
    return loaded(DOCS / "_hooks" / f"{name}.py")


@pytest.fixture(scope="module")
def tables():
    return loaded(DOCS / "tables.py")


@pytest.fixture(scope="module")
def mixers(tables):
    return tables.mixers


@pytest.mark.parametrize("page", [
    pytest.param(p, marks=[pytest.mark.slow] if p.stem in TRAINING else []) for p in PAGES if "```python" in p.read_text()
], ids=lambda page: page.stem)  # fmt: skip
@pytest.mark.draws
def test_python_blocks_run(page):
    blocks = hook("blocks")
    assert blocks.BLOCK.findall(page.read_text()), "a block that is not run: it must start at the margin"
    blocks.run(page.read_text(), str(page.relative_to(ROOT)))


def test_a_block_that_fails_stops_the_build_at_its_line():
    page = "# Title\n\n```python\nx = 1\nassert x == 2\n```\n"
    with pytest.raises(AssertionError) as error:
        hook("blocks").run(page, "page.md")
    last = error.traceback[-1]
    assert (str(last.path), last.lineno + 1) == ("page.md", 5)


def test_a_page_leaves_nothing_registered():
    """An adapter of one page is not there in the next, and a page that is edited runs again."""
    page = "```python\nimport polymix\npolymix.register_adapter('x.Y')(polymix.Adapter)\n```\n"
    for _ in range(2):
        hook("blocks").run(page, "page.md")
    assert "x.Y" not in adapter._ADAPTERS


TWO_BLOCKS = "```python\nx = 2\n```\nThen\n\n```python\nprint(x)\n```\n"


def test_what_a_block_prints_stands_under_it():
    blocks = hook("blocks")
    shown = blocks.with_outputs(TWO_BLOCKS, blocks.run(TWO_BLOCKS, "page.md"))
    assert re.search(r"print\(x\)\n```\n\n```[^\n]*prints[^\n]*\n2\n```", shown)
    assert shown.count("prints") == 1


def test_blocks_run_again_only_when_they_or_the_package_have_changed(tmp_path, monkeypatch):
    blocks, runs = hook("blocks"), []
    run = blocks.run
    monkeypatch.setattr(blocks, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(blocks, "run", lambda markdown, page: runs.append(page) or run(markdown, page))
    assert blocks.cached(TWO_BLOCKS, "page.md") == ["", "2"]
    assert blocks.cached(f"Other prose.\n\n{TWO_BLOCKS}", "page.md") == ["", "2"]
    assert len(runs) == 1, "prose is not code"
    assert blocks.cached(TWO_BLOCKS.replace("x = 2", "x = 3"), "page.md") == ["", "3"]
    assert len(runs) == 2, "an earlier block of the page has changed"
    monkeypatch.setattr(blocks, "environment", lambda: "another version")
    assert blocks.cached(TWO_BLOCKS, "page.md") == ["", "2"]
    assert len(runs) == 3


def test_the_cache_knows_the_package_and_is_not_in_git(tmp_path, monkeypatch):
    blocks = hook("blocks")
    assert blocks.environment() == hook("blocks").environment()
    assert ".cache/" in (ROOT / ".gitignore").read_text().splitlines()
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    (tmp_path / "polymix").mkdir()
    (tmp_path / "polymix" / "a.py").write_text("1")
    before = blocks.environment.__wrapped__()
    (tmp_path / "polymix" / "a.py").write_text("2")
    assert blocks.environment.__wrapped__() != before


def mixer_page(name):
    return (DOCS / "mixers" / f"{name}.md").read_text()


def test_when_to_use_every_mixer_and_nothing_else():
    pages = {page.stem for page in (DOCS / "mixers").glob("*.md")} - {"index"}
    assert pages == set(polymix.list_mixers())
    for name in pages:
        advice = mixer_page(name).partition("## When to use it\n")[2].partition("<!-- table")[0]
        assert 2 <= len(re.findall(r"[.!](?:\s|$)", advice)) <= 7, name


@pytest.mark.parametrize("name", polymix.list_mixers())
def test_every_option_has_a_default_and_a_meaning(mixers, name):
    said = mixers.meanings(config_class(name))
    assert set(said) == {f.name for f in fields(config_class(name))}
    assert all(len(meaning) > 1 for meaning in said.values()), said


@pytest.mark.parametrize("name", polymix.list_mixers())
def test_every_mixer_has_its_page(mixers, name):
    page = mixer_page(name)
    for part in (f"# {name}\n", f"<!-- table: mixer-{name} -->", f"<!-- table: mixer-{name}-facts -->", "## When to use it", "**A token sees**", "**Shapes**", "**Cost in multiply-adds**",
                 "**At 4,096 tokens of 192 channels**", "**Source**", "**Library**", "## As a function",
                 "## Capabilities", "## Options"):  # fmt: skip
        assert part in page, part
    assert mixers.text(config_class(name).cost_formula) in page
    assert not re.search(r"\b(?:PD|PM|QT|PL)-\d{3}", page), "a reference that a reader cannot follow"
    columns = 0
    for line in page.splitlines():  # a stray | would add a column
        bars = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) if line.startswith("|") else 0
        assert not (columns and bars) or bars == columns, line
        columns = bars


def test_papers_are_linked_where_they_are_cited(mixers):
    home = (DOCS / "index.md").read_text()
    for address in mixers.PAPERS.values():
        assert f"({address})" in home
    for name in polymix.list_mixers():
        source = next(line for line in mixer_page(name).splitlines() if "**Source**" in line)
        for paper, address in mixers.PAPERS.items():
            cited = re.search(rf"(?<![\w/-]){paper}(?![\w-])", source)
            assert not cited or f"[{paper}]({address})" in source, (name, paper)
    for name, paper in {
        "padre": "PADRe",
        "pom": "PoM",
        "qt": "QT-ViT",
        "poly_nl": "Poly-NL",
        "poly_sa": "Poly-SA",
    }.items():
        assert f"[{paper}](" in mixer_page(name)
    assert mixers.linked("PADRe, Eq. 1; PADRe-2") == f"[PADRe]({mixers.PAPERS['PADRe']}), Eq. 1; PADRe-2"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_has_a_reference_that_a_reader_cannot_follow(page):
    assert not re.search(r"\b(?:PD|PM|QT|PL)-\d{3}", page.read_text())


def test_what_people_search_for_has_a_page():
    pages = {page.relative_to(DOCS).as_posix(): page.read_text() for page in PAGES}
    for word, page in {"ONNX": "export/onnx.md", "TensorBoard": "train.md", "Weights & Biases": "train.md", "YAML": "train.md",
                       "Gradio": "tutorial.md", "notebook": "tutorial.md", "Mac": "faq.md"}.items():  # fmt: skip
        assert word in pages[page]


def test_the_tables_of_hexagon_say_where_attention_stops(tables):
    rows = json.loads((ROOT / "benchmarks/results/export/hexagon.json").read_text())["rows"]
    works = {(row["mixer"].split(":grid")[0], row["tokens"]): row["works"] for row in rows}
    assert {key for key, value in works.items() if not value} == {("softmax", 16384)}, (
        "as docs/research/hexagon.md says"
    )
    assert len(works) == 9 * 7, "nine mixers at seven numbers of tokens"
    lines = tables.PARTS["hexagon"]().splitlines()
    assert next(line for line in lines if "`softmax`" in line).count("compiling") == 1
    assert "`SM8650`" in tables.PARTS["chips"]()


def test_the_tables_of_quantised_mixers_and_libraries_say_what_the_docs_say(tables):
    rows = json.loads((ROOT / "benchmarks/results/export/mixers.json").read_text())["rows"]
    over = {(row["mixer"], row["target"], row["scheme"]) for row in rows if row["limited"] > row["limit"]}
    assert over == {("padre:degree=3:grid=16x16", "qnn", "a16w8")}
    coarse = {row["mixer"] for row in rows if row["scheme"] == "a16w8" and row.get("limited_emulated", 0) > 0.02}
    assert coarse == {"qt", "linear", "softmax"}, "as docs/export/qnn.md says"
    assert "| `qt` | 0.056 | 0.042, 2 tensors | 0.012 | 0.009, 1 tensor |" in tables.PARTS["quantised-mixers"]()
    assert "refused" not in tables.PARTS["onnx-libraries"]()
    assert len(tables.PARTS["emulated-mixers"]().splitlines()) == 2 + 8 + 2


def test_a_runtime_is_compared_with_pytorch_and_with_attention_in_itself(tables, monkeypatch):
    def row(mixer, **more):
        return {"runtime": "OpenVINO", "tokens": 256, "mixer": mixer, "version": "1", "error": 1e-6, **more}

    rows = [row("softmax", ms=8.0, pytorch_ms=4.0), row("pom", ms=2.0, pytorch_ms=1.0), row("qt", ms=None, pytorch_ms=None),
            {"runtime": "OpenVINO", "tokens": 256, "mixer": "padre", "reason": "no"}]  # fmt: skip
    machine = {"cpu": "a CPU", "threads": 1, "torch": "2"}
    monkeypatch.setattr(tables.exports, "load", lambda name: {"machine": machine, "dim": 64, "rows": rows})
    table = tables.PARTS["runtimes"]()
    assert "| 256 | `softmax` | 8 ms, 0.5 × PyTorch; error 1e-06 |" in table
    assert "| 256 | `pom` | 2 ms, 0.5 × PyTorch, 4 × attention; error 1e-06 |" in table
    assert "| `qt` | not timed; error 1e-06 |" in table and "| `padre` | refused |" in table


def test_the_table_of_onnx_has_every_mixer(tables):
    table = tables.PARTS["onnx"]()
    for name in polymix.list_mixers():
        assert f"| `{name}` |" in table
    rows = json.loads((ROOT / "benchmarks/results/onnx.json").read_text())["rows"]
    assert {row["mixer"] for row in rows} <= set(polymix.list_mixers())
    refused = {(row["mixer"], mode["mode"]) for row in rows for mode in row["modes"] if not mode["works"]}
    assert refused == {("knn", "mask")}, "as docs/export/onnx.md says"


def test_a_page_says_which_library_a_mixer_wraps(mixers):
    wrapped = {name for name in polymix.list_mixers() if mixers.wraps(name)}
    assert wrapped == {"gc", "mamba", "non_local", "relu_linear", "se", "xca"}
    assert wrapped == {name for name in polymix.list_mixers() if config_class(name).layer_of}
    assert mixers.wraps("mamba") == "transformers' MambaMixer"
    assert mixers.wraps("se") == "timm's EffectiveSEModule and timm's SEModule"


def test_overview_and_structures_leave_nothing_out(mixers):
    overview, costs = mixers.overview(), mixers.costs()
    for name in polymix.list_mixers():
        config = config_class(name)
        cells = (config.output, config.sees, config.cost_formula)
        assert f"| [{name}]({name}.md) | {' | '.join(map(mixers.text, cells))} |" in overview
        assert f"| [{name}]({name}.md) |" in costs
    structures = mixers.structures() + mixers.each_structure()
    for name in mixers.list_maps():
        assert f"[{name}](#{name})" in structures
        assert f"### {name}\n\n`{name}" in structures


def test_plain_text_shows_as_it_is(mixers):
    assert mixers.text("a | b * c <d> [e] `f | g` W_i") == r"a \| b \* c \<d\> \[e\] `f | g` W\_i"


def test_figures_are_those_of_the_results(tables):
    figures = tables.figures
    exact = figures.TABLES["table-1-exact"]()
    for error in re.findall(r"\| (\d\.\de[-+]\d\d) \|", exact):
        assert float(error) < 1e-10
    assert "| Poly-NL | 3 |" in exact
    assert figures.mean([]) == "–"
    assert figures.mean([2.0, 8.0]) == "4"
    assert figures.mean([200.0, 200.0]) == "200"
    assert figures.mean([1.0, None]) == figures.mean([1.0, float("inf")]) == "not finite"


@pytest.mark.slow
def test_the_tables_in_the_pages_are_those_of_the_code_and_the_results():
    run = subprocess.run([sys.executable, DOCS / "tables.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_part_stands_in_a_page_and_none_is_left_over(tables):
    assert {name for page in tables.pages() for name in tables.names(page.read_text())} == set(tables.PARTS)


def test_a_stale_part_is_noticed_and_written(tables, tmp_path, monkeypatch, capsys):
    page, part = tmp_path / "page.md", "before\n\n<!-- table: one -->\n{}\n<!-- /table -->\n\nafter\n"
    page.write_text(part.format("old"))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "pages", lambda: [page])
    monkeypatch.setattr(tables, "PARTS", {"one": lambda: "| new |"})
    monkeypatch.setattr("sys.argv", ["tables.py", "--check"])
    assert tables.main() == 1 and page.read_text() == part.format("old"), "a check writes nothing"
    assert "page.md is stale: run python docs/tables.py" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["tables.py"])
    assert tables.main() == 0 and page.read_text() == part.format("\n| new |\n")
    monkeypatch.setattr("sys.argv", ["tables.py", "--check"])
    assert tables.main() == 0


@pytest.mark.parametrize(("page", "message"), [
    ("<!-- table: one -->\nold\n", "1 parts begin and 0 end"),
    ("<!-- table: two -->\nold\n<!-- /table -->\n", "no function makes two"),
])  # fmt: skip
def test_a_part_without_an_end_or_a_function_is_an_error(tables, monkeypatch, page, message):
    monkeypatch.setattr(tables, "PARTS", {"one": lambda: "new"})
    with pytest.raises(ValueError, match=message):
        tables.written(page)


def test_the_table_of_the_readme_leaves_out_what_was_stopped(tables, monkeypatch):
    view = {"pass": "forward", "dtype": "float32", "threads": 2, "dim": 192, "batch": 1, "impl": "auto"}
    rows = [
        {**view, "mixer": "pom", "tokens": 256, "seconds": 1e-3, "attention_ratio": 2.0, "stopped": None},
        {**view, "mixer": "pom", "tokens": 4096, "seconds": 1e-2, "attention_ratio": 8.0, "stopped": None},
        {**view, "mixer": "qt", "tokens": 4096, "seconds": None, "attention_ratio": None, "stopped": "took 11 s"},
        {**view, "mixer": "qt", "tokens": 256, "seconds": 1.0, "pass": "training"},
    ]
    monkeypatch.setattr(tables.figures, "load", lambda name: {"machine": {"gpu": None, "cpu": "a CPU"}, "rows": rows})
    table = tables.PARTS["readme-bench"]()
    assert "| pom | 10 | 2.00 × | 8.00 × |" in table
    assert "| qt | – | – | – |" in table, "what stopped has no number"


def anchors(page):
    """The headings of a page as MkDocs and code hosts name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = (
        re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    )
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_lead_somewhere_without_a_site(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.is_file(), target
        if anchor:
            assert anchor in anchors(there), target


def test_the_options_in_the_commands_of_the_docs_exist():
    from polymix.train.registry import OWN_RECIPES, recipe_class

    commands, checked = re.compile(rf"polymix train ({'|'.join(OWN_RECIPES)})\b((?:[^\n`#|\\]|\\\n)*)"), 0
    own = {"set", "preset", "config", "out", "check", "threads", "resume", "help"}
    for page in [ROOT / "README.md", *PAGES]:
        for domain, rest in commands.findall(page.read_text()):
            recipe = recipe_class(domain)
            names = set(re.findall(r"--set (\w+)=", rest)) | set(re.findall(r"--([\w-]+)", rest)) - own
            for name in names:
                known = name.replace("-", "_") in recipe.model_fields or getattr(recipe, "others", None)
                assert known, f"{page.name}: polymix train {domain} has no option {name}"
                checked += 1
            preset = re.search(r"--preset (\w+)", rest)
            assert not preset or preset[1] in recipe.presets, (page.name, domain, rest)
    assert checked > 50


def test_every_verb_is_on_the_home_page():
    from polymix.cli import VERBS

    home = (DOCS / "index.md").read_text()
    for verb in VERBS:
        assert re.search(rf"\[`polymix {verb}`\]\([^)]+\.md[^)]*\)", home), f"polymix {verb}, with a link"


def test_nav_names_files_that_exist_and_every_page():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]

    def leaves(part):
        if isinstance(part, str):
            return [part]
        return [leaf for item in (part.values() if isinstance(part, dict) else part) for leaf in leaves(item)]

    assert set(leaves(nav)) == {page.relative_to(DOCS).as_posix() for page in PAGES}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"untested: the site; {package} is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing(site):
    for name in polymix.list_mixers():
        assert (site / "mixers" / name / "index.html").exists()
    for page in site.rglob("*.html"):
        html = page.read_text()
        assert not re.search(r'<(?:script|img|link)[^>]+(?:src|href)="?(?:https?:)?//', html), page
        assert not re.search(r"<em [^>]", html), f"{page}: a formula that Markdown takes for emphasis and attributes"


# What stands beyond the right edge, unless it lies in a box that scrolls by itself; and signatures that do not wrap.
BEYOND = """(() => {
  const width = document.documentElement.clientWidth, found = [];
  const boxed = e => { for (let p = e.parentElement; p; p = p.parentElement)
    if (["auto", "scroll", "hidden"].includes(getComputedStyle(p).overflowX)) return true; return false; };
  for (const e of document.querySelectorAll(".md-content *"))
    if (e.getBoundingClientRect().right > width + 1 && !boxed(e)) found.push(e.tagName + " " + e.textContent.slice(0, 40));
  for (const e of document.querySelectorAll(".doc-signature code"))
    if (e.scrollWidth > e.clientWidth + 1) found.push("signature " + e.textContent.slice(0, 40));
  if (document.documentElement.scrollWidth > width) found.push("the page");
  return JSON.stringify(found);
})()"""


@pytest.mark.slow
@needs_browser
def test_no_page_is_wider_than_a_phone(site, tmp_path):
    pages = sorted(site.rglob("index.html"))
    with opened(pages[0], tmp_path / "profile") as page:
        page.send("Emulation.setDeviceMetricsOverride", width=400, height=900, deviceScaleFactor=1, mobile=True)
        for path in pages:
            page.send("Page.navigate", url=path.resolve().as_uri())
            while page.evaluate("document.readyState + location.href") != "complete" + path.resolve().as_uri():
                time.sleep(0.02)
            assert page.evaluate(BEYOND) == "[]", path.relative_to(site)


def test_no_page_keeps_the_marks_of_a_merge():
    """A conflict that was committed shows both versions to every reader."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    marks = ("<" * 7 + " ", ">" * 7 + " ")
    marked = [page for page in pages if any(line.startswith(marks) for line in page.read_text("utf-8").splitlines())]
    assert len(pages) > 20 and not marked
