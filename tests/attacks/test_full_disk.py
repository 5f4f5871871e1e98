"""A disk that takes no more in the middle of the work: one line with the path and the reason, and no file cut short.

A limit on the size of files stands for the full disk: the system refuses the same writes, whatever library makes them.
"""

import ast
import errno
import json
import os
import resource
import sys
from pathlib import Path

import numpy
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

import polymix
from polymix.cli import main
from polymix.files import PART, write_files, write_whole
from polymix.pages.plots import save
from polymix.train.data.drawing import save_figure
from polymix.train.data.synthetic import cached
from polymix.train.registry import OWN_RECIPES
from polymix.train.report import Journal
from tests.attacks.command import TEXT, tree
from tests.attacks.test_lock import VERBS
from tests.helpers import slow_but
from tests.processes import said

REASON = os.strerror(errno.EFBIG)
BIG = torch.arange(100_000.0)


def _limited(size, function, *arguments):
    sys.dont_write_bytecode = True  # which CPython 3.11 leaves cut off on a full disk, and then cannot import
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    function(*arguments)


def limited(size, function, *arguments):
    """Call a function in a process whose files may have `size` bytes; its status, and what it wrote to standard error."""
    return said(_limited, size, function, *arguments)


def refused(place, function, *arguments):
    """For a process whose disk is full: a function fails, and its error names the place."""
    with pytest.raises(OSError) as info:
        function(*arguments)
    assert (info.value.errno, info.value.filename) == (errno.EFBIG, str(place)), info.value


def is_one_line(outcome, place):
    status, said = outcome
    return status == 2 and len(said.splitlines()) == 1 and REASON in said and str(place) in said


def _safetensors(path):
    from safetensors.torch import save_file

    save_file({"big": BIG}, path)


def _tokenizer(folder):
    from polymix.domains.text.tokenizer import train_tokenizer

    train_tokenizer([TEXT], 300, 32).save_pretrained(folder)


def _to_file(save, *arguments, **named):
    def write(path):
        with open(path, "wb") as file:
            save(*arguments, file) if arguments else save(file, **named)

    return write


WRITERS = {
    "torch.save": lambda path: torch.save(BIG, path), "torch.save to a file": _to_file(torch.save, BIG), "safetensors": _safetensors,
    "numpy.save": _to_file(numpy.save, arr=BIG.numpy()), "tofile": lambda path: BIG.numpy().tofile(path),
    "savez": _to_file(numpy.savez, x=BIG.numpy()),
    "PIL": lambda path: Image.effect_noise((200, 200), 90).save(path, "PNG"), "JSON": lambda path: path.write_text(json.dumps(BIG.tolist())),
    "a file": lambda path: path.write_bytes(bytes(100_000)),
}  # fmt: skip
FIGURES = {"pages": save, "drawing": lambda figure, path: save_figure(path, figure)}


def write(writer, path):
    write_whole(path, WRITERS[writer])


@pytest.mark.parametrize("writer", slow_but([writer for writer in WRITERS if writer != "torch.save"], WRITERS))
def test_whatever_writes_the_error_is_of_the_disk(writer, tmp_path):
    assert limited(9000, refused, tmp_path / "file", write, writer, tmp_path / "file") == (0, "")
    assert not [*tmp_path.iterdir()]
    write(writer, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def draw(kind, path):
    figure = Figure(figsize=(9, 9))
    figure.subplots().imshow(numpy.random.default_rng(0).random((90, 90)))
    FIGURES[kind](figure, path)


@pytest.mark.parametrize("kind", FIGURES)
@pytest.mark.draws
def test_a_picture_that_does_not_fit_is_named(kind, tmp_path):
    draw(kind, tmp_path / "warm.png")
    assert limited(9000, refused, tmp_path / "new.png", draw, kind, tmp_path / "new.png") == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["warm.png"]


def write_tokenizer(folder):
    write_files(folder, _tokenizer)


def write_made(folder):
    cached(folder, "a", {}, lambda part: numpy.save(part / "x.npy", BIG))


def test_folders_of_files_and_made_data_too(tmp_path):
    made = cached(tmp_path / "other", "a", {}, lambda part: None).name
    for place, function, folder in (
        (tmp_path / "new", write_tokenizer, tmp_path / "new"), (tmp_path / made, write_made, tmp_path),
    ):  # fmt: skip
        assert limited(5000, refused, place, function, folder) == (0, "")
        assert not place.exists() or not [*place.iterdir()]


def test_a_mistake_of_the_writer_is_no_full_disk(tmp_path):
    for error in (KeyError("x"), OSError("no reason"), FileNotFoundError(errno.ENOENT, "No such file", "mine")):

        def fail(path, error=error):
            path.write_text("half")
            raise error

        with pytest.raises(type(error)) as info:
            write_whole(tmp_path / "file", fail)
        assert info.value is error and not [*tmp_path.iterdir()]


def test_a_row_of_the_journal_stands_whole_or_not_at_all(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl", 0, print, writes=True)
    assert not [*tmp_path.iterdir()], "no empty file"
    journal({"step": 1, "loss": 2.0})

    assert limited(5000, refused, journal.path, journal, {"step": 2, "samples": "x" * 9000}) == (0, "")
    assert journal.rows() == [{"step": 1, "loss": 2.0}] and (tmp_path / "metrics.jsonl").read_text().count("\n") == 1


def train(domain, out):
    options = ["steps=1", "control=False", *["data=text.txt"] * (domain == "text")]
    return ["train", domain, "--preset", "tiny", *(word for option in options for word in ("--set", option)), "--threads", "1",
            "--out", str(out)]  # fmt: skip


def check_command(arguments, out, sizes):
    """At each size: one line, and nothing half under its final name."""
    wrong = []
    for size in sizes:
        outcome = limited(size, main, [str(word) for word in arguments])
        if outcome[0] and not is_one_line(outcome, out):
            wrong.append((size, outcome))
        for name, content in tree(out.parent).items():
            if content is not None and (
                PART in name or len(content) >= size or (name.endswith("json") and not json.loads(content))
            ):
                wrong.append((size, name, len(content)))  # fmt: skip
    assert not wrong


# All domains write by the same functions: two that write more than the others in each run, two more in the slow suite.
EFFORT = {"satellite": (), "text": (), "generation": pytest.mark.slow, "segment3d": pytest.mark.slow}


@pytest.mark.slow
@pytest.mark.parametrize("domain", [
    pytest.param(name, marks=EFFORT.get(name, pytest.mark.exhaustive)) for name in OWN_RECIPES
])  # fmt: skip
def test_training_on_a_full_disk(domain, material, monkeypatch, tmp_path):
    monkeypatch.chdir(material)
    check_command(train(domain, tmp_path / "out"), tmp_path / "out", (5000, 40_000))


@pytest.mark.parametrize("verb", [
    pytest.param(name, marks=() if name == "convert" else pytest.mark.slow) for name in sorted({*VERBS} - {"train"})
])  # fmt: skip
def test_the_other_verbs_on_a_full_disk(verb, material, monkeypatch, tmp_path):
    monkeypatch.chdir(material)
    check_command([*VERBS[verb], "--out", tmp_path / "out"], tmp_path / "out", (5000,))


# What writes files. A call of these stands where the file has a hidden name: in what is given to write_whole,
# write_files or cached, or in a scratch folder.
CALLS = {
    "write_text",
    "write_bytes",
    "tofile",
    "savez",
    "savez_compressed",
    "save_file",
    "copyfile",
    "copy2",
    "copytree",
}
SAVES = {"torch", "numpy", "np", "onnx", "image", "program"}  # of which .save is a writer
HIDDEN = {
    "polymix/files.py": "the place that writes", "polymix/export": "in the hidden folder of an export",
    "polymix/domains/satellite/pastis.py": "of synthetic data", "polymix/domains/detect3d/synthetic.py": "of synthetic data",
    "polymix/domains/segment3d/synthetic.py": "of synthetic data", "polymix/domains/jigsaw/data.py": "of synthetic data",
    "polymix/domains/handwriting/synthetic.py": "of synthetic data", "polymix/measure/memory.py": "a switch of the kernel's",
    "polymix/domains/video/synthetic.py": "of synthetic data", "polymix/domains/depth/synthetic.py": "of synthetic data",
    "polymix/domains/speech/synthetic.py": "of synthetic data",
    "polymix/train/data/espeak.py": "a bank of synthetic data",
    "polymix/train/data/scans/lidar.py": "of synthetic data", "polymix/ops/native/compile.py": "renames what it has built",
}  # fmt: skip


def writers(tree_of):
    """(line, call) of what writes files outside of an argument or a function that `write_whole` and its like call."""
    inside, named = set(), set()
    for node in ast.walk(tree_of):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("write_whole", "write_files", "cached"):
            inside |= {id(part) for argument in node.args for part in ast.walk(argument)}
            named |= {argument.id for argument in node.args if isinstance(argument, ast.Name)}
    for node in ast.walk(tree_of):
        if isinstance(node, ast.FunctionDef) and node.name in named:
            inside |= {id(part) for part in ast.walk(node)}
    for node in ast.walk(tree_of):
        if not isinstance(node, ast.Call) or id(node) in inside:
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = getattr(getattr(node.func, "value", None), "id", "")
        modes = [
            part.value
            for part in node.args
            if isinstance(part, ast.Constant) and part.value in ("w", "a", "x", "wb", "ab")
        ]
        if name in CALLS or (name == "save" and owner in SAVES) or (name == "open" and modes):
            yield node.lineno, f"{owner}.{name}"


def test_nothing_in_the_package_writes_a_file_under_its_final_name():
    root = Path(polymix.__file__).parent
    calls = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root.parent).as_posix()
        text = path.read_text("utf-8")
        if not name.startswith(tuple(HIDDEN)) and any(word in text for word in (*CALLS, "save(", "open(")):
            calls += [(name, *call) for call in writers(ast.parse(text))]
    allowed = [("polymix/cli/__init__.py", ".open"), ("polymix/train/report.py", ".open")]  # /dev/null; the journal
    assert [(name, line, call) for name, line, call in calls if (name, f".{call.split('.')[-1]}") not in allowed] == []
