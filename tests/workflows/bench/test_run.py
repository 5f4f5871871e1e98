"""`polymix bench` from end to end, tiny: every cell is there, says what it claims, and nothing finished is lost."""

import json
from itertools import product

import jsonschema
import pytest
import torch

from polymix.cli import main
from polymix.errors import OptionError, ResultsError
from polymix.mixers.spec import parse_mixers
from polymix.workflows.bench import run
from polymix.workflows.bench.run import Settings, bench, with_impl

MIXERS = "softmax,padre-2,poly_nl"
TINY = {"tokens": (16, 36), "dims": (12,), "batch": (2,), "threads": (1,), "seconds": 0.005}
PASSES = ("forward", "training", "step")


class Silent:
    def start(self, what, total):
        return lambda done: None


@pytest.fixture(autouse=True, scope="module")
def small_ceilings():
    """Ceilings of nothing in particular, soon measured; the threads as they were."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polymix.measure.roofline._SIZES", (16, 32))
        patch.setattr("polymix.measure.roofline._COPY_BYTES", 1 << 12)
        yield
    torch.set_num_threads(threads)


def make(folder, mixers=MIXERS, resume=False, **options):
    return bench(Settings(mixers, **{**TINY, **options}), parse_mixers(mixers), folder, Silent(), resume=resume).content


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    make(folder, passes=PASSES)
    return folder


@pytest.fixture
def results(folder):
    content = json.loads((folder / "results.json").read_text())
    schema = run.Results.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(content, schema)
    return content


@pytest.mark.slow
def test_every_cell_once_in_order(results):
    cells = [(row["pass"], row["tokens"], row["mixer"]) for row in results["rows"]]
    assert cells == list(product(PASSES, (16, 36), MIXERS.split(",")))
    assert results["finished"]
    assert len(results["ceilings"]) == 1


@pytest.mark.slow
def test_figures_follow_from_what_was_measured(results):
    (roof,) = results["ceilings"]
    for row in results["rows"]:
        if row["stopped"]:
            continue
        assert row["low"] <= row["seconds"] <= row["high"]
        assert len(row["runs"]) >= 3, "all runs are kept"
        assert row["peak_bytes"] >= row["output_bytes"] > 0
        if row["pass"] == "step":
            continue
        times = 3 if row["pass"] == "training" else 1
        config = parse_mixers(row["mixer"])[row["mixer"]]
        config = config.changed(grid={16: (4, 4), 36: (6, 6)}[row["tokens"]]) if row["mixer"] == "padre-2" else config
        cost = config.build(12).cost(row["tokens"])
        assert row["output_bytes"] == 4 * 2 * row["tokens"] * 12
        assert row["flops"] == times * 2 * cost.flops, "two sequences, and three forwards in a training step"
        assert row["floor_ratio"] == pytest.approx(row["seconds"] / row["floor"] / times)
        assert row["flop_share"] == pytest.approx(row["flops"] / row["seconds"] / roof["flops_per_second"])
        assert row["byte_share"] == pytest.approx(row["bytes"] / row["seconds"] / roof["bytes_per_second"])
    attention = {(row["pass"], row["tokens"]): row["seconds"] for row in results["rows"] if row["mixer"] == "softmax"}
    for row in results["rows"]:
        if row["attention_ratio"] is not None:
            assert row["attention_ratio"] == pytest.approx(attention[row["pass"], row["tokens"]] / row["seconds"])


@pytest.mark.slow
def test_a_step_only_where_there_is_one(results):
    steps = {(row["mixer"], row["tokens"]): row for row in results["rows"] if row["pass"] == "step"}
    assert "prefill and step" in steps["poly_nl", 16]["stopped"]
    assert steps["padre-2", 16]["state_bytes"] == steps["padre-2", 36]["state_bytes"] > 0
    assert steps["padre-2", 16]["seconds"] > 0, "padre is built causal for it"


@pytest.mark.slow
def test_resume_measures_what_is_missing_and_nothing_twice(folder, results, tmp_path):
    finished = results["rows"][: 3 * len(MIXERS.split(","))]
    cut = {**results, "finished": False, "rows": finished}
    (tmp_path / "results.json").write_text(json.dumps(cut))
    content = make(tmp_path, passes=PASSES, resume=True)
    assert content["rows"][: len(finished)] == finished
    assert content["ceilings"] == results["ceilings"]
    assert [(row["pass"], row["tokens"], row["mixer"]) for row in content["rows"]] == [
        (row["pass"], row["tokens"], row["mixer"]) for row in results["rows"]
    ]
    with pytest.raises(ResultsError, match="--resume"):
        make(tmp_path, passes=("forward",), resume=True)
    with pytest.raises(ResultsError, match="earlier run"):
        make(tmp_path, passes=PASSES)


@pytest.mark.slow
@pytest.mark.draws
def test_ctrl_c_keeps_what_had_finished(capsys, tmp_path, monkeypatch):
    arguments = ["bench", "--mixers", "pom", "--tokens", "16,36", "--dims", "12", "--passes", "forward", "--threads", "1",
                 "--seconds", "0.005", "--out", str(tmp_path)]  # fmt: skip
    measure_group = run.measure_group

    def interrupted(settings, mixers, its, *rest):
        if its.tokens == 36:
            raise KeyboardInterrupt
        return measure_group(settings, mixers, its, *rest)

    monkeypatch.setattr(run, "measure_group", interrupted)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    monkeypatch.setattr(run, "measure_group", measure_group)
    assert stop.value.code == 130
    assert "--resume" in capsys.readouterr().out
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [(row["mixer"], row["tokens"]) for row in rows] == [("softmax", 16), ("pom", 16)]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--resume"])
    out = capsys.readouterr().out
    assert not stop.value.code, out
    assert all(text in out for text in ("floor", "FLOP/s", "softmax", "pom"))
    assert "…" not in out, "every column must be whole in 80 characters"
    assert json.loads((tmp_path / "results.json").read_text())["rows"][:2] == rows
    for name in ("report.html", "latency.png", "roofline.png"):
        assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.slow
def test_an_implementation_that_a_mixer_lacks_is_said_in_its_rows(tmp_path, monkeypatch):
    def only_pom(config, impl):
        return config if config.name == "pom" else with_impl(config, impl)

    monkeypatch.setattr(run, "with_impl", only_pom)
    rows = make(tmp_path, "softmax,pom", tokens=(16,), passes=("forward",), impls=("auto", "magic"))["rows"]
    said = {(row["mixer"], row["impl"]): row["stopped"] for row in rows}
    assert said["softmax", "auto"] is said["pom", "auto"] is said["pom", "magic"] is None
    assert "impl" in said["softmax", "magic"], "no silent fallback"


@pytest.mark.slow
def test_what_passes_a_budget_is_stopped_from_there_on(tmp_path):
    rows = make(tmp_path, "softmax,pom", passes=("forward",), max_seconds=1e-9)["rows"]
    assert all("budget 1e-09 s" in row["stopped"] and "16 tokens" in row["stopped"] for row in rows)
    assert all(row["seconds"] is row["peak_bytes"] is None for row in rows)


@pytest.mark.parametrize(("options", "named"), [
    ({"tokens": ()}, "--tokens"), ({"tokens": (16, 16)}, "--tokens"), ({"tokens": (0,)}, "--tokens"), ({"dims": (-1,)}, "--dims"),
    ({"dtypes": ("int8",)}, "--dtypes"), ({"passes": ("backward",)}, "--passes"), ({"threads": (0,)}, "--threads"),
    ({"impls": ("tritn",)}, "--impls"), ({"seconds": 0.0}, "--seconds"), ({"max_gib": float("nan")}, "--max-gib"),
    ({"device": "cuda:97"}, "--device"),
])  # fmt: skip
def test_slips_are_found_before_anything_is_written(tmp_path, options, named):
    with pytest.raises(OptionError, match=named):
        make(tmp_path / "out", **options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments", [["--tokens", "a"], ["--dims", "1.5"], ["--mixers", "pomm"], ["--compare", "a.json"]]
)
def test_slips_on_the_command_line_are_one_line_and_status_2(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["bench", *arguments])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert len(err.splitlines()) == 1
    assert arguments[0] in err or "pom" in err
    assert not any(tmp_path.iterdir())


def test_quick_is_short_and_says_so():
    quick = Settings(MIXERS).as_quick()
    assert (quick.quick, max(quick.tokens)) == (True, 1024)
    assert quick.seconds < Settings(MIXERS).seconds
    assert Settings(MIXERS, tokens=(9999, 4096)).as_quick().tokens == (4096,)
