"""Report pages as their readers see them: in light and dark mode, on a phone, and on paper."""

import copy

import pytest

from polymix.pages import COLOURS
from polymix.workflows.bench.report import write_report as write_bench
from polymix.workflows.compare.report import confusion, next_commands, pictures, samples, slopes
from polymix.workflows.compare.report import write_report as write_compare
from polymix.workflows.compare.tables import headings
from polymix.workflows.compare.verdict import answer
from polymix.workflows.convert.page import origins
from polymix.workflows.convert.page import write as write_convert
from tests.browser import PAPER, needs_browser, opened
from tests.workflows.bench.content import content as bench_content
from tests.workflows.bench.content import row as bench_row
from tests.workflows.compare.content import make

PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
NAMES = {
    "softmax": [0.98, 0.97],
    "padre:degree=3:token=monarch:blocks=8": [0.98, 0.975],
    "pom": [0.95, 0.96],
    "linear_floor": [0.9, 0.9],
}


def comparison(**settings):
    counts = (16, 64, 256, 1024, 16384)
    speeds = [[0.5 * n**power / 16 for n in counts] for power in (1.6, 1.0, 1.1, 0.9)]
    content = make(NAMES, dict(zip(NAMES, speeds, strict=True)), tokens=counts, **settings)
    content["data"] |= {
        "majority": {"name": "b", "share": 0.95},
        "samples": [{"class": 1, "image": PIXEL}, {"class": 0, "image": PIXEL}],
    }
    content["answers"] = [
        {"mixer": row["mixer"], "seed": row["seed"], "samples": [1, 1 if row["mixer"] == "pom" else 0],
         "confusion": [[40, 3], [0, 57]]} for row in content["rows"]
    ]  # fmt: skip
    content["mixers"][1]["config"] = {"name": "padre"}
    content["answer"] = answer(content)
    return content


def conversion():
    def cost(ms):
        return {
            "before": {"ms": ms},
            "after": {"ms": ms / 2},
            "gain": 2.0,
            "memory_bytes": [2**21, 2**20],
            "flops": [10**8, 10**7],
        }

    names = [f"vision_model.encoder.layers.{i}.self_attn" for i in range(12)]
    layers = [{"name": name, "was": "SiglipAttention", "now": "padre", "error": 0.2 + i / 100, "parameters": [1000, 900], "flops": [5, 4],
               "inherited": {"A.weight": ["q.weight"]}, "fresh": ["B"], "dropped": {"k.bias": "no place"}, "scale": 1.0}
              for i, name in enumerate(names)]  # fmt: skip
    machine = {
        "cpu": "a cpu",
        "cpu_capability": "AVX512",
        "cores": 2,
        "gpu": None,
        "threads": 1,
        "torch": "2.13",
        "system": "Linux",
    }
    return {
        "headline": "The model is 2.00 × as fast on this input.", "finding": "", "training": False, "machine": machine, "model": cost(80.2),
        "conversion": {"layers": layers, "left_out": [], "accuracy": {"before": 0.953, "converted": 0.04651}, "metric": "accuracy",
                       "parameters": [12000, 10800]},
        "layers": {name: cost(1.5) for name in names}, "settings": {"model": "timm/vit", "plan": "padre"},
        "lengths": [{"factor": f, "tokens": [196 * f], "attention": 1e-3 * f, "mixers": 1e-3} for f in (1, 4, 16)],
    }  # fmt: skip


def pages(folder):
    rows = [bench_row(mixer, s, tokens=n, pass_=pass_) for mixer in ("softmax", "padre:degree=3:token=monarch:blocks=8")
            for n, s in ((256, 0.001), (4096, 0.02)) for pass_ in ("forward", "training")]  # fmt: skip
    for name in ("compare", "bench"):
        (folder / name).mkdir()
    return {
        "compare": write_compare(comparison(), folder / "compare"),
        "bench": write_bench(bench_content(*rows), folder / "bench"),
        "convert": write_convert(conversion(), folder / "convert", "A model with padre", {}),
    }


COLUMNS = {"compare": 13 + 2 * 3, "bench": 20, "convert": 9}


@pytest.mark.slow
@needs_browser
@pytest.mark.draws
def test_in_a_browser(tmp_path):
    """Nothing overflows, no text is faint or too small, and paper shows every column of every table."""
    for name, path in pages(tmp_path).items():
        with opened(path, tmp_path / "profile") as page:
            views = {
                "light": page.see(1200), "dark": page.see(1200, dark=True), "phone": page.see(400),
                "dark phone": page.see(400, dark=True), "print": page.see(PAPER, media="print"),
                "print from a dark screen": page.see(PAPER, media="print", dark=True),
            }  # fmt: skip
            for view, found in views.items():
                assert not found["overflow"], f"{name}, {view}: beyond the edge"
                assert not found["faint"], f"{name}, {view}: a contrast below 4.5"
                assert not found["small"], f"{name}, {view}: chart labels below 9 pixels"
                assert len(found["columns"]) == COLUMNS[name], f"{name}, {view}: a column is missing"
                assert found["charts"] == {"compare": 3, "bench": 2, "convert": 2}[name], (
                    f"{name}, {view}: one chart each"
                )
            assert page.pdf().startswith(b"%PDF")


@pytest.mark.slow
@needs_browser
@pytest.mark.draws
def test_dark_mode_is_dark_and_paper_is_white(tmp_path):
    """Also the check that the browser test looks at what it says."""
    (tmp_path / "out").mkdir()
    path = write_compare(comparison(), tmp_path / "out")
    background = "getComputedStyle(document.body).backgroundColor"
    with opened(path, tmp_path / "profile") as page:
        seen = {}
        for view, width, options in (
            ("light", 1200, {}),
            ("dark", 1200, {"dark": True}),
            ("print", PAPER, {"media": "print", "dark": True}),
        ):
            page.see(width, **options)
            seen[view] = page.evaluate(background)
        assert seen == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 28)", "print": "rgb(255, 255, 255)"}
        page.evaluate(
            "document.body.insertAdjacentHTML('beforeend', '<p style=\"color:#999;width:3000px\">faint and wide</p>')"
        )
        phone = page.see(400)
        assert any("faint" in line for line in phone["faint"]) and phone["overflow"], "the inspection sees nothing"


@pytest.mark.slow
@pytest.mark.draws
def test_pictures_follow_the_page_s_colours(tmp_path):
    (tmp_path / "out").mkdir()
    html = write_compare(comparison(), tmp_path / "out").read_text()
    charts = "".join(part.split("</svg>")[0] for part in html.split("<svg ")[1:])
    assert not [light for light, _ in COLOURS.values() if light in charts], "a colour that dark mode does not change"
    assert "var(--ink)" in charts and "var(--attention)" in charts
    ids = [part.split('"')[0] for part in charts.split(' id="')[1:]]
    assert len(ids) == len(set(ids)), "two pictures on one page may not share an id"


def test_the_accuracy_axis_says_where_it_starts_and_a_front_of_one_point_is_not_drawn():
    content = comparison()
    axes = pictures(content)[0].draw(False).axes[0]
    assert "axis from" in axes.get_ylabel() and "not 0" in axes.get_ylabel()
    assert "Pareto front" in axes.get_legend_handles_labels()[1]
    alone = {**content, "rows": [row for row in content["rows"] if row["mixer"] == "softmax"]}
    assert "Pareto front" not in pictures(alone)[0].draw(False).axes[0].get_legend_handles_labels()[1]
    zero = copy.deepcopy(content)
    for row in zero["rows"]:
        row["metrics"]["accuracy"] = 0.0 if row["mixer"] == "linear_floor" else 1.0
    assert "not 0" not in pictures(zero)[0].draw(False).axes[0].get_ylabel()


def test_a_quick_look_shows_no_slopes():
    assert set(slopes(comparison(), "alone", "latency")) == set(NAMES)
    quick = comparison(quick=True)
    assert not slopes(quick, "alone", "latency")
    legend = pictures(quick)[1].draw(False).axes[0].get_legend_handles_labels()[1]
    assert not any("N^" in label for label in legend)
    assert "Too few lengths" in pictures(quick)[1].caption
    few = comparison()
    few["sweep"] = [row for row in few["sweep"] if row["tokens"] <= 256]
    assert not slopes(few, "alone", "latency"), "three points are no slope"


def test_samples_confusions_majority_and_the_next_command(tmp_path):
    content = comparison()
    assert samples(content) == [
        {"image": PIXEL, "truth": "b", "runs": 4, "wrong": []}, {"image": PIXEL, "truth": "a", "runs": 4, "wrong": ["pom: b"]},
    ]  # fmt: skip
    its = confusion(content, "pom")
    assert [[cell["count"] for cell in row] for row in its["cells"]] == [[80, 6], [0, 114]], "both seeds together"
    assert its["worst"] == ["a was taken for b (6 times)"]
    (tmp_path / "out").mkdir()
    html = write_compare(content, tmp_path / "out").read_text()
    for text in (
        "Sample images",
        "wrong: pom: b",
        "6 times",
        "largest class, b, would be right for 95.0 %",
        "polymix recommend --shape",
    ):
        assert text in html, text
    commands = [command for _, command in next_commands(comparison(quick=True), tmp_path / "my out")]
    assert "polymix compare --out 'my out-full'" in commands
    (convert,) = [command for command in commands if "convert" in command]
    assert convert.endswith("--plan padre:degree=3:token=monarch:blocks=8"), "the mixer of the verdict, as it was asked"
    old = make(NAMES, {name: [1, 2, 3, 4] for name in NAMES})  # results without samples
    old["answer"] = answer(old)
    assert "Sample images" not in write_compare(old, tmp_path / "out").read_text()


def test_next_commands_ask_for_the_same_comparison(tmp_path):
    """They dropped all options but --task and --data, and converted every block where half of them were compared."""
    content = comparison(quick=True, preset="tiny", patch_size=2, mixers="padre,pom", options=["plan=1:1", "steps=9"])
    content["host"]["recipe"]["plan"] = "1:1"
    first, *_ = commands = [command for _, command in next_commands(content, tmp_path / "out")]
    asked = "--preset tiny --mixers padre,pom --patch-size 2 --set plan=1:1 --set steps=9"
    assert first == f"polymix compare {asked} --out out-full"
    (convert,) = [command for command in commands if "convert" in command]
    assert convert.endswith("--plan 1:1 --mixer padre:degree=3:token=monarch:blocks=8")
    low = comparison(device="cuda:1", dtype="bfloat16", seeds=3, epochs=2.5)
    low["settings"]["tokens"] = [64, 256]
    low["answer"]["verdict"]["action"] = "open"
    (again,) = [command for why, command in next_commands(low, tmp_path / "out") if "idle" in why]
    asked = "--device cuda:1 --dtype bfloat16 --seeds 3 --epochs 2.5 --tokens 64,256"
    assert again == f"polymix compare {asked} --out out-again"
    html = write_compare(content, tmp_path).read_text()
    assert "the others keep attention" in html and "the others keep attention" in (tmp_path / "report.md").read_text()
    assert "the others keep attention" not in write_compare(comparison(), tmp_path).read_text()


def test_equal_layers_share_a_row(tmp_path):
    html = write_convert(conversion(), tmp_path / "out", "A model", {}).read_text()
    assert html.count("<tr>") == 1 + 2 + 2, "the headings, the model and twelve equal layers; two accuracies"
    assert "vision_model.encoder.layers.0–11.self_attn" in html and "0.2 – 0.31" in html
    assert "95.3 %" in html and "4.7 %" in html


def test_headings_count():
    names = headings(comparison())
    assert len(names) == len(set(names)) == 13


def test_the_origin_of_weights_is_said_once_for_all_layers_that_share_it():
    """It used to be a sentence a layer, with the factor of each."""
    layer = {"now": "qt", "inherited": {"qkv.weight": ["q.weight", "k.weight"], "proj.bias": []}, "fresh": ["scale"],
             "dropped": {"a": "no place in this mixer", "b": "no place in this mixer", "c": "a norm"}}  # fmt: skip
    layers = [layer | {"name": f"blocks.{place}", "scale": scale} for place, scale in enumerate((0.999, 1.01, None))]
    layers += [layer | {"name": "last", "scale": None, "fresh": []}, {"name": "kept", "now": None}]
    assert origins({"conversion": {"layers": layers}}) == [
        (["blocks.0", "blocks.1", "blocks.2"], [
            "qkv.weight ← q.weight · k.weight", "proj.bias ← zero", "new: scale",
            "dropped: a, b (no place in this mixer)", "dropped: c (a norm)", "output multiplied by 0.999 – 1.01"]),
        (["last"], ["qkv.weight ← q.weight · k.weight", "proj.bias ← zero",
                    "dropped: a, b (no place in this mixer)", "dropped: c (a norm)"]),
    ]  # fmt: skip
