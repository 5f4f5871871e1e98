"""Bad arguments of the command line: each is refused in one line, with status 2, and leaves nothing behind."""

import shutil

import pytest
import typer.main

from polymix.cli import _app
from polymix.cli.train import _domain_command
from tests.attacks.command import run, tree

TRAIN = ["train", "text", "--data", "text.txt", "--set", "context=16", "--set", "vocab=300", "--set", "steps=2"]
CONVERT = ["convert", "--model", "model.py:build"]
LM = ["generate", "lm", "--prompt", "a", "--stream"]
LONG = "a" * 300
BIG = "9" * 23

# The arguments, and words that the message must have.
ROWS = [
    # sizes that fit no machine: both numbers are in the message
    (["show", "padre", "dim=1000000"], "dim=1000000", "GiB"),
    (["show", "padre", "n=1000000000000"], "n", "2147483647"),
    (["show", "padre", "n=2000000000"], "tokens", "GiB"),
    (["show", "padre", "n=-1"], "n", "1"),
    (["show", "padre", "grid=100000x100000"], "grid", "(100000, 100000)"),
    (["show", "pom", "expand=1000000000"], "GiB", "pom"),
    (["lens", "padre", "grid=999999x999999"], "grid", "(999999, 999999)"),
    (["lens", "pom", "dim=1000000"], "GiB"),
    (["lens", "pom", "--order", "9"], "order", "1 to 4"),
    (["lens", "model.py:layer", "shape=100000x100000x8"], "GiB", "shape"),
    (["recommend", "--shape", "1000000000000x192"], "tokens", "2147483647"),
    (["recommend", "--shape", "2000000000x192"], "GiB"),
    (["recommend", "--shape", "64x1000000"], "dim", "GiB"),
    (["recommend", "--shape", "4096x192:grid=100000x100000"], "grid"),
    (["compare", "--data", "digits", "--image-size", "100000000"], "--image-size", "GiB"),
    (["compare", "--tokens", "100000000000000"], "--tokens", "2147483647"),
    (["compare", "--tokens", "2000000000"], "--tokens", "GiB"),
    (["bench", "--dims", "1000000"], "--dims", "GiB"),
    (["bench", "--tokens", "100000000000000"], "--tokens"),
    (["bench", "--batch", "1000000000"], "--batch", "GiB"),
    ([*CONVERT, "--tokens", "100000000000000"], "--tokens"),
    ([*CONVERT, "--image-size", "100000000"], "--image-size", "GiB"),
    (["convert", "--model", "timm/deit_tiny_patch16_224", "--image-size", "100000"], "--image-size", "GiB"),
    ([*TRAIN, "--set", "num_layers=1000000000"], "num_layers", "10000"),
    ([*TRAIN, "--set", "hidden_size=1000000", "--set", "num_heads=1"], "GiB"),
    ([*TRAIN, "--set", "num_layers=10000", "--set", "hidden_size=6144"], "GiB"),
    (["train", "classify", "--set", "dim=1000000"], "dim", "GiB"),
    (["train", "classify", "--set", "depth=1000000000"], "depth", "10000"),
    (["train", "classify", "--set", "image_size=100000000"], "--image-size", "GiB"),
    (["train", "recall", "--set", "hidden_size=1000000"], "GiB"),
    # numbers that are none
    ([*CONVERT, "--seed", BIG], "--seed", BIG),
    ([*LM, "--seed", BIG], "seed", BIG),
    (["lens", "pom", "--seed", BIG], "--seed", BIG),
    ([*TRAIN, "--set", f"seed={BIG}"], "seed", BIG),
    ([*TRAIN, "--set", "seed=-1"], "seed", "-1"),
    *[([*base, "--threads", threads], "--threads", threads) for threads in ("-1", "0", BIG, "1000000")
      for base in (["compare"], ["recommend", "--shape", "64x16"], CONVERT, TRAIN, LM, ["show", "padre"])],
    (["bench", "--threads", "-1"], "--threads", "whole numbers"),
    (["bench", "--threads", "0"], "--threads"),
    (["bench", "--threads", ""], "--threads"),
    *[([verb, option, value], option, value) for verb in ("compare", "bench") for option in ("--max-seconds", "--max-gib")
      for value in ("nan", "inf", "0", "-1")],
    *[(["bench", "--seconds", value], "--seconds") for value in ("nan", "inf", "0", "-1")],
    *[(["recommend", "--shape", "64x16", "--seconds", value], "seconds") for value in ("nan", "inf", "0", "-1")],
    *[([*CONVERT, "--seconds", value], "--seconds") for value in ("nan", "inf", "0", "-1")],
    *[([*CONVERT, "--lengths", value], "--lengths") for value in ("nan", "inf", "0", "-1", "", "x", "1,,2", "1e300")],
    *[([*TRAIN, "--set", f"{name}={value}"], name) for name in ("learning_rate", "warmup", "clip", "ema", "weight_decay")
      for value in ("nan", "inf", "-1", "x")],
    (["compare", "--epochs", "0"], "--epochs"),
    (["compare", "--seeds", "-3"], "--seeds"),
    (["bench", "--noise", "nan", "--compare", "a", "b"], "a"),
    # options that would have been ignored
    (["compare", "--mixers", ""], "--mixers"),
    (["compare", "--mixers", ",", "--quick"], "--mixers"),
    (["bench", "--mixers", ""], "--mixers"),
    (["bench", "--impls", "nope"], "--impls", "nope"),
    (["bench", "--impls", "triton", "--mixers", "pom,qt"], "--impls", "triton", "GPU"),
    (["bench", "--impls", ""], "--impls"),
    (["recommend", "--shape", "64x16", "--mixers", ""], "expected additive"),
    (["train", "text", "--set", "data=nope"], "nope", "does not exist"),
    ([*TRAIN, "--set", "data=nope"], "--set data=", "the option once"),
    ([*TRAIN, "--set", "column=x"], "column", "parquet"),
    ([*TRAIN, "--set", "betas=5"], "betas=0.9,0.95"),
    ([*TRAIN, "--set", "betas=1,2,3"], "betas"),
    ([*TRAIN, "--set", "mixers=nope"], "nope", "padre"),
    ([*TRAIN, "--set", "model=nope"], "nope"),
    ([*TRAIN, "--set", "context=999999"], "context"),
    ([*TRAIN, "--set", "packing=maybe"], "packing"),
    ([*TRAIN, "--set", "strategy=maybe"], "strategy"),
    ([*TRAIN, "--set", "device=gpu"], "device", "gpu"),
    ([*TRAIN, "--set", "stepz=3"], "stepz", "steps"),
    ([*TRAIN, "--set", "steps"], "option=value"),
    # recipes that are none
    (["train", "broken.py"], "broken.py", "SyntaxError"),
    (["train", "exits.py"], "exits.py", "SystemExit"),
    (["train", "other.py"], "other.py", "int"),
    (["train", "unknown.py"], "unknown.py", "stepz"),
    (["train", "model.py"], "model.py", "recipe"),
    (["train", "nope.py"], "nope.py"),
    (["train", LONG], "one of classify", "or a file"),
    (["train", "text", "--data", LONG], "does not exist"),
    (["train", "classify", "--data", "text.txt"], "--data", "folder"),
    (["train", "text", "--data", "lm"], "data", "text"),
    # models that are none
    (["convert", "--model", "model.py:text"], "--model", "str"),
    (["convert", "--model", "model.py:crash"], "KeyError"),
    (["convert", "--model", "model.py:leave"], "SystemExit"),
    (["convert", "--model", "model.py:nope"], "function"),
    (["convert", "--model", "broken.py:build"], "SyntaxError"),
    (["convert", "--model", "timm/nope"], "timm", "such as"),
    (["convert", "--model", "torchvision/nope"], "torchvision"),
    (["convert", "--model", LONG], "too long"),
    (["convert", "--model", "text.txt"], "--model"),
    (["convert", "--model", "."], "config.json"),
    ([*CONVERT, "--weights", "text.txt"], "--weights", "text.txt"),
    ([*CONVERT, "--weights", "nope"], "--weights", "nope"),
    ([*CONVERT, "--data", "nope"], "--data", "nope"),
    ([*CONVERT, "--plan", "nope"], "nope"),
    ([*CONVERT, "--plan", "a=b,a=b"], "--plan"),
    ([*CONVERT, "--distill-epochs", "2"], "--data"),
    ([*CONVERT, "--init", "maybe"], "--init"),
    ([*CONVERT, "--device", "gpu"], "--device"),
    (["recommend", "--model", "model.py:text"], "--model"),
    (["recommend", "--model", "model.py:leave"], "SystemExit"),
    (["recommend"], "--shape"),
    (["recommend", "--shape", "x"], "--shape"),
    (["lens", "model.py:crash"], "KeyError"),
    (["lens", "nope"], "nope"),
    (["lens", "pom", "--image", "cats"], "--image"),
    (["show", "nope"], "padre"),
    (["show", "padre", "grid=axb"], "grid"),
    (["generate", "nope", "--prompt", "a"], "does not exist"),
    (["generate", LONG, "--prompt", "a"], "does not exist"),
    (["generate", "lm", "--prompt", "a " * 40], "prompt", "32"),
    ([*LM, "--dtype", "int8"], "dtype"),
    ([*LM, "--temperature", "nan"], "temperature"),
    ([*LM, "--top-p", "nan"], "top_p"),
    ([*LM, "--top-p", "2"], "top_p"),
    ([*LM, "--max-new-tokens", "0"], "max_new_tokens"),
    ([*LM, "--beams", "0"], "beams"),
    # folders that are none
    *[([*base, "--out", out], "--out", words) for base in (["compare"], ["bench"], CONVERT, ["lens", "pom", "dim=2"])
      for out, words in (("text.txt", "a file"), ("text.txt/x", "a file"), (LONG, "long"), ("/dev/null", "a file"),
                         ("/proc/none/x", "written"))],
    *[([*TRAIN, "--out", out], "out", words)
      for out, words in (("text.txt", "a file"), ("text.txt/x", "a file"), (LONG, "long"), ("/dev/null", "a file"))],
    (["recommend", "--shape", "64x16", "--out", "text.txt/x"], "--out"),
    (["recommend", "--shape", "64x16", "--out", "lm"], "--out", "folder"),
    (["compare", "--data", "lm"], "--data"),
]  # fmt: skip


@pytest.fixture
def place(material, monkeypatch):
    monkeypatch.chdir(material)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # as on a machine without a GPU
    before = tree(material)
    yield material
    assert tree(material) == before, "a refused command leaves no file and changes none"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[0])[-60:])
def test_bad_arguments_are_refused_in_one_line(place, row):
    arguments, *words = row
    outcome = run(arguments)
    assert outcome.refused, outcome
    for word in words:
        assert word in outcome.err, f"{word!r} is missing from: {outcome.err}"


VALUES = ("-1", "0", "nan", "inf", "-inf", "1e400", BIG, "1e9", "x", "", "1,", "2.5", ",", "=", ":", "nope/at/all",
          "/dev/null", LONG, "padre:degree=", "padre:", "日本", "1000000000000")  # fmt: skip
BASE = {
    "compare": [], "bench": [], "recommend": ["--shape", "16x8"], "convert": CONVERT[1:], "train": TRAIN[1:],
    "generate": LM[1:], "show": ["padre"], "lens": ["padre", "grid=2x2", "dim=2"],
}  # fmt: skip


def generated():
    """Every option and argument of every verb with every value."""
    commands = typer.main.get_command(_app()).commands
    of_text = typer.Typer()
    of_text.command()(_domain_command("text"))
    parameters = {verb: command.params for verb, command in commands.items() if verb in BASE}
    parameters["train"] = [*parameters["train"], *typer.main.get_command(of_text).params]
    for verb in BASE:
        for parameter in parameters[verb]:
            options = [option for option in parameter.opts if option.startswith("--")]
            if parameter.name in ("help", "show_help") or getattr(parameter, "is_flag", False):
                continue
            for value in VALUES:
                if options:
                    yield [verb, *BASE[verb], options[0], *[value] * parameter.nargs]
                elif parameter.name in ("name", "domain", "folder"):
                    yield [verb, value, *BASE[verb][1:]]
                else:
                    yield [verb, *BASE[verb], value]


GENERATED = list(generated())


def check_all(rows, material, monkeypatch, tmp_path):
    """Each row is refused in one line, or accepted; refusals leave nothing behind. The rows for which that fails."""
    wrong = []
    for row in rows:
        folder = tmp_path / "place"
        if not folder.exists():
            shutil.copytree(material, folder)
            monkeypatch.chdir(folder)
            before = tree(folder)
        try:
            outcome = run(row)
            fine = outcome.status in (0, "reached") or (outcome.refused and tree(folder) == before)
        except Exception as error:
            outcome, fine = repr(error), False
        if not fine:
            wrong.append((" ".join(row)[-100:], outcome))
        if tree(folder) != before:
            monkeypatch.chdir(tmp_path)
            shutil.rmtree(folder)
    return wrong


@pytest.mark.slow
def test_some_values_of_every_verb(material, monkeypatch, tmp_path):
    assert len(GENERATED) > 3000
    assert not check_all(GENERATED[::29], material, monkeypatch, tmp_path)


@pytest.mark.exhaustive
def test_every_option_with_every_value(material, monkeypatch, tmp_path):
    assert not check_all(GENERATED, material, monkeypatch, tmp_path)
