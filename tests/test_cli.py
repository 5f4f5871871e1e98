"""The command line: what it prints, how it fails, and the main command from end to end."""

import json
import signal
from functools import partial

import jsonschema
import pytest
import typer

import polymix
from polymix.cli import main
from polymix.measure import interleaved
from polymix.measure.harness import Budget
from polymix.train.run import train
from polymix.workflows.compare.run import Results
from tests.domains.test_classify_images import picture

TINY = ["--set", "steps=4", "--seeds", "1", "--tokens", "16,64", "--threads", "1",
        "--mixers", "padre:degree=3,pom:degree=3:expand=1,linear_floor"]  # fmt: skip


def run(capsys, *arguments):
    """Exit status, standard output and standard error."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


@pytest.fixture
def few(monkeypatch):
    """Few scenes, timed for a moment."""
    monkeypatch.setattr("polymix.domains.classify.scenes.TRAIN", 96)
    monkeypatch.setattr("polymix.domains.classify.scenes.TEST", 32)
    monkeypatch.setattr("polymix.workflows.compare.run.Budget", partial(Budget, timing_seconds=0.02))


@pytest.fixture
def moment(monkeypatch):
    """`polymix show` times for a moment."""
    monkeypatch.setattr("polymix.workflows.show.interleaved", lambda calls, seconds: interleaved(calls, seconds=0.01))


@pytest.fixture
def untimed(monkeypatch):
    """`polymix show` times calls that do nothing: for tests of what it counts and quotes."""
    monkeypatch.setattr(
        "polymix.workflows.show.interleaved",
        lambda calls, seconds: interleaved(dict.fromkeys(calls, lambda: None), seconds=0.001),
    )


def valid(folder):
    content = json.loads((folder / "results.json").read_text())
    schema = Results.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(content, schema)
    return content


def test_list_shows_every_mixer(capsys, monkeypatch, untimed):
    monkeypatch.setenv("COLUMNS", "160")
    status, out, _ = run(capsys, "list")
    assert status == 0
    for name in polymix.list_mixers():
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [name]]
        assert len(line) > 30 and "│" not in line, "one line a mixer, as grep takes it, with what it is"
    said = "".join(" ".join(run(capsys, "show", name)[1].split()) for name in ("padre", "softmax"))
    for word in ("recurrent", "block_causal", "4 N D²", "kernel_size=11", "1/2/3-D"):
        assert word in said, "what a mixer can do, its cost and its options"


def test_show_prints_the_cost_and_the_paper_s(capsys, moment):
    status, out, _ = run(capsys, "show", "padre", "degree=3", "dim=192", "grid=64x64")
    cost = polymix.create_mixer("padre", 192, degree=3, grid=(64, 64)).cost(4096)
    assert status == 0
    for text in (
        f"{cost.parameters:,}",
        f"{cost.flops / 1e9:.3f} G",
        f"{cost.bytes / 2**20:.1f} MiB",
        "2.28 G",
        "Table 6",
        "ms",
    ):
        assert text in out


@pytest.mark.parametrize(("words", "texts"), [
    (["softmax"], ["1.31 G", "misprint", "7.046 G"]), (["poly_nl", "dim=1024", "n=196", "reduction=4"], ["0.14 G", "0.7 M"]),
    (["pom", "dim=512", "n=1000"], ["515 tokens", "multiplications"]), (["qt", "form=full", "n=64"], ["floor"]),
    (["padre", "grid=4x4", "num_prefix_tokens=1"], ["17 tokens"]), (["castling", "n=4096"], ["1.22 G", "0.53 ms", "not counted"]),
    (["focused", "grid=64x64"], ["1.25 G"]), (["padre", "degree=4", "grid=64x64"], ["3.27 G", "4.22 ms"]),
    (["poly_nl", "dim=1024", "n=196", "preset=paper"], ["0.14 G"]),
    (["padre-4", "grid=64x64"], ["3.27 G", "4.22 ms"]), (["pom:degree=3", "dim=64", "n=32"], ["degree=3"]),
    (["poly_sa:positions=mean", "dim=64"], ["4,096 tokens"]), (["padre:token=monarch:blocks=4", "dim=16", "grid=4x4"], ["monarch"]),
    (["padre"], ["1.096 G", "1.10 G", "depthwise with that many taps", "d: the channels that an output"]),
])  # fmt: skip
def test_show_others(capsys, words, texts, untimed):
    status, out, _ = run(capsys, "show", *words)
    assert status == 0
    assert all(text in out for text in texts), out


def test_show_has_no_figure_for_other_options(capsys, untimed):
    status, out, _ = run(capsys, "show", "padre", "degree=3", "dim=192", "grid=64x64", "kernel_size=5")
    assert status == 0 and "Table 6" not in out


@pytest.mark.parametrize(("arguments", "named"), [
    (["show", "padr"], "padre"), (["show", "padre", "degree=99"], "degree"), (["show", "padre", "degre=3"], "degree"),
    (["show", "padre", "degree"], "option=value"), (["compare", "--mixers", "pomm"], "pom"), (["compare", "--tokens", "a"], "64,256"),
    (["compare", "--data", "/nowhere/at/all"], "--data"), (["compare", "--device", "cuda:99"], "--device"),
    (["compare", "--epoch", "3"], "--epochs"), (["compare", "--epochs", "three"], "--epochs"), (["comprae"], "comprae"),
    (["show", "padre-4", "degree=3"], "degree"), (["lens", "padre-4", "degree=3"], "degree"),
    (["show"], "name"), (["compare", "--dtype", "int4"], "float32"), (["compare", "--data", "digits", "--image-size", "9"], "--patch-size"),
])  # fmt: skip
def test_errors_are_one_line_and_status_2(capsys, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("polymix: ")
    assert named in err
    assert not any(tmp_path.iterdir()), "nothing is written before everything has been checked"


@pytest.mark.parametrize("verb", ["compare", "list", "show"])
def test_help_has_an_example(capsys, verb):
    status, out, _ = run(capsys, verb, "--help")
    assert status == 0
    assert f"Example: polymix {verb}" in " ".join(out.split())


@pytest.mark.slow
def test_compare_on_the_digits(capsys, tmp_path, few):
    out_dir = tmp_path / "out"
    status, out, err = run(capsys, "compare", *TINY, "--out", str(out_dir))
    assert (status, err) == (0, "")
    content = valid(out_dir)
    assert content["finished"]
    assert [row["label"] for row in content["mixers"]] == [
        "softmax",
        "padre-3",
        "pom:degree=3:expand=1",
        "linear_floor",
    ]
    assert len(content["rows"]) == 4
    assert {(row["scope"], row["tokens"]) for row in content["sweep"]} == {
        (s, n) for s in ("alone", "host") for n in (16, 64)
    }
    assert content["answer"]["headline"] in " ".join(out.split())
    assert "…" not in out, "every column must be whole in 80 characters"
    for name in ("report.html", "accuracy.png", "latency.png", "memory.png"):
        assert (out_dir / name).is_file()
    before = (out_dir / "results.json").read_bytes()
    assert run(capsys, "compare", *TINY, "--out", str(out_dir))[0] == 2, "an earlier run is not overwritten"
    assert (out_dir / "results.json").read_bytes() == before


@pytest.mark.slow
def test_compare_on_a_folder_with_a_broken_file(capsys, tmp_path, few):
    for name in ("cats", "dogs", "newts"):
        for i in range(12):
            picture(tmp_path / "photos" / name / f"{i}.png", size=(20 + i, 25), value=hash((name, i)) % 1000)
    (tmp_path / "photos" / "dogs" / "broken.jpg").write_bytes(b"\xff\xd8\xff but no image")
    out_dir = tmp_path / "out"
    status, out, _ = run(
        capsys, "compare", "--data", str(tmp_path / "photos"), "--image-size", "16", "--patch-size", "4", "--epochs", "1",
        "--seeds", "1", "--mixers", "padre:degree=2:heads=2,qt:form=full,pom:rotary=2d,poly_sa:head_mixing=depthwise",
        "--tokens", "16", "--dtype", "bfloat16", "--threads", "1", "--out", str(out_dir),
    )  # fmt: skip
    assert status == 0
    content = valid(out_dir)
    assert content["data"]["classes"] == ["cats", "dogs", "newts"]
    assert [line.split(",")[0].rsplit("/", 1)[1] for line in content["data"]["skipped"]] == ["broken.jpg"]
    assert "broken.jpg" in "".join(out.split())
    assert "broken.jpg" in (out_dir / "report.html").read_text()
    assert content["machine"]["threads"] == 1
    assert content["settings"]["dtype"] == "bfloat16"


@pytest.mark.slow
def test_an_interrupted_comparison_resumes(capsys, tmp_path, monkeypatch, few):
    """Ctrl-C in the middle: what had finished is kept, --resume computes the rest and nothing twice."""
    out_dir, trained = tmp_path / "out", []
    command = ["compare", "--set", "steps=4", "--seeds", "1", "--tokens", "16", "--threads", "1",
               "--mixers", "pom,qt,poly_nl,linear_floor", "--out", str(out_dir)]  # fmt: skip

    def interrupted(recipe, *arguments, **options):
        trained.append(recipe.mixer)
        if len(trained) == 3:
            signal.raise_signal(signal.SIGINT)
        return train(recipe, *arguments, **options)

    monkeypatch.setattr("polymix.workflows.compare.run.train", interrupted)
    status, output, err = run(capsys, *command)
    assert status == 130, output + err
    assert "--resume" in output + err
    before = valid(out_dir)
    assert len(before["rows"]) == 2
    assert not before["finished"]
    status, output, err = run(capsys, *command, "--resume")
    assert status == 0, output + err
    content = valid(out_dir)
    assert content["finished"]
    assert trained == ["softmax", "pom", "qt", "qt", "poly_nl", "linear_floor"], "finished runs are not repeated"
    assert content["rows"][:2] == before["rows"], "finished runs are kept"
    assert len(content["rows"]) == 5
    assert (out_dir / "report.html").exists()


def test_an_end_of_file_is_no_interruption(capsys, monkeypatch):
    """Such as a damaged .pyc: click turns it into what it makes of Ctrl-C, and nobody would look for the damage."""

    def ends():
        raise EOFError("marshal data too short")

    monkeypatch.setattr("polymix.mixers.registry.list_mixers", ends)
    with pytest.raises(typer.Abort):
        main(["list"])


def test_without_the_extra_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("polymix.cli.typer", None)
    status, _, err = run(capsys, "list")
    assert status == 2
    assert '".[train]"' in err
