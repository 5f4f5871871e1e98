"""The command line: what it prints, how it fails, and the main command from end to end."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.resources import files

import jsonschema
import pytest

import polymix
from polymix.cli import main
from tests.tasks.test_images import picture

TINY = [
    "--epochs",
    "2",
    "--seeds",
    "1",
    "--tokens",
    "16,64",
    "--threads",
    "1",
    "--mixers",
    "padre:degree=3,pom:degree=3:expand=1,linear_floor",
]


def run(capsys, *arguments):
    """Exit status, standard output and standard error."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


def valid(folder):
    content = json.loads((folder / "results.json").read_text())
    schema = json.loads(files("polymix").joinpath("workflows/compare/results.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(content, schema)
    return content


def test_list_shows_every_mixer(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    status, out, _ = run(capsys, "list")
    assert status == 0
    for name in polymix.list_mixers():
        assert name in out
    for word in ("recurrent", "block_causal", "4 N D²", "kernel_size", "1/2/3-D"):
        assert word in out


def test_show_prints_the_cost_and_the_paper_s(capsys):
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
    (["padre", "grid=4x4", "num_prefix_tokens=1"], ["17 tokens"]),
])  # fmt: skip
def test_show_others(capsys, words, texts):
    status, out, _ = run(capsys, "show", *words)
    assert status == 0
    assert all(text in out for text in texts), out


@pytest.mark.parametrize(("arguments", "named"), [
    (["show", "padr"], "padre"), (["show", "padre", "degree=99"], "degree"), (["show", "padre", "degre=3"], "degree"),
    (["show", "padre", "degree"], "option=value"), (["compare", "--mixers", "pomm"], "pom"), (["compare", "--tokens", "a"], "64,256"),
    (["compare", "--data", "/nowhere/at/all"], "--data"), (["compare", "--device", "cuda:99"], "--device"),
    (["compare", "--epoch", "3"], "--epochs"), (["compare", "--epochs", "three"], "--epochs"), (["comprae"], "comprae"),
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


def test_compare_on_the_digits(capsys, tmp_path):
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
    assert len(content["training"]) == 4
    assert {(row["scope"], row["tokens"]) for row in content["sweep"]} == {
        (s, n) for s in ("alone", "host") for n in (16, 64)
    }
    assert content["answer"]["headline"] in " ".join(out.split())
    assert "…" not in out, "every column must be whole in 80 characters"
    for name in ("report.html", "accuracy.png", "latency.png", "memory.png"):
        assert (out_dir / name).stat().st_size > 10_000
    before = (out_dir / "results.json").read_bytes()
    assert run(capsys, "compare", *TINY, "--out", str(out_dir))[0] == 2, "an earlier run is not overwritten"
    assert (out_dir / "results.json").read_bytes() == before


def test_compare_on_a_folder_with_a_broken_file(capsys, tmp_path):
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
    assert [line.split(":")[0].rsplit("/", 1)[1] for line in content["data"]["skipped"]] == ["broken.jpg"]
    assert "broken.jpg" in "".join(out.split())
    assert "broken.jpg" in (out_dir / "report.html").read_text()
    assert content["machine"]["threads"] == 1
    assert content["settings"]["dtype"] == "bfloat16"


def test_an_interrupted_comparison_resumes(tmp_path):
    """Ctrl-C in the middle: what had finished is kept, --resume computes the rest and nothing twice."""
    out_dir = tmp_path / "out"
    command = [sys.executable, "-m", "polymix.cli", "compare", "--epochs", "3", "--seeds", "1", "--tokens", "16",
               "--threads", "1", "--mixers", "pom,qt,poly_nl,linear_floor", "--out", str(out_dir)]  # fmt: skip
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline:
            done = out_dir / "results.json"
            if done.exists() and len(json.loads(done.read_text())["training"]) >= 2:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()  # nothing goes on after a test that failed
    assert process.returncode == 130, output
    assert "--resume" in output
    kept = valid(out_dir)
    assert 2 <= len(kept["training"]) < 5
    assert not kept["finished"]
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, env=environment, timeout=300)
    assert again.returncode == 0, again.stdout + again.stderr
    content = valid(out_dir)
    assert content["finished"]
    assert content["training"][: len(kept["training"])] == kept["training"], "finished runs are kept, not repeated"
    assert len(content["training"]) == 5
    assert (out_dir / "report.html").exists()


def test_without_the_extra_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("polymix.cli.typer", None)
    status, _, err = run(capsys, "list")
    assert status == 2
    assert "polymix[train]" in err
