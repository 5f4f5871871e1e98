"""`predict` and `generate` under a real torchrun: what one process gives, and one line for each mistake."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from polymix.domains.text.recipe import TextRecipe
from polymix.train.registry import recipe_class
from polymix.train.run import train
from polymix.train.saved import SavedRun
from tests.helpers import slow_but

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="untested: two processes, for torch.distributed"),
]
ROOT = Path(__file__).parents[2]
PROMPT = "the first of many words"
HERE, SHARED = ["--prompt", PROMPT, "--max-new-tokens", "4", "--temperature", "0"], "--sequence-parallel"


def polymix(folder, processes, *words):
    """The exit status and what was said."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] * (processes > 1)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, *torchrun, "-m", "polymix", *words], cwd=folder, env=env, text=True,
                         stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    return ran.returncode, ran.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of pictures, "padre" and "xca", of texts, "pom" and "softmax", and two without weights."""
    root = tmp_path_factory.mktemp("runs")
    random = np.random.default_rng(0)
    for name in ("a/0", "a/1", "a/2", "b/0", "b/1", "b/2"):
        (root / "pictures" / name).parent.mkdir(exist_ok=True, parents=True)
        pixels = random.integers(0, 255, (20, 20), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "pictures" / f"{name}.png")
    for mixer in ("padre", "xca"):
        recipe = recipe_class("classify").tiny().changed(control=False, mixer=mixer, data=str(root / "pictures"))
        train(recipe, root / mixer, data_folder=root / "prepared")
    for mixer in ("pom", "softmax"):
        recipe = TextRecipe.tiny().changed(mixer=mixer, data=str(ROOT / "docs" / "speed.md"))
        train(recipe, root / mixer, data_folder=root / "texts")
    for name, made in (("no-pictures", "padre"), ("no-texts", "pom")):
        (root / name).mkdir()
        for file in (root / made).iterdir():
            if file.is_file() and file.suffix not in (".safetensors", ".pt", ".bin"):
                (root / name / file.name).write_bytes(file.read_bytes())
    (root / "a.png").write_bytes((root / "pictures" / "a" / "0.png").read_bytes())
    (root / "broken.png").write_bytes(b"\xff\xfe")
    return root


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_of_torchrun_predict_what_one_predicts(runs, processes):
    expected = SavedRun.of(runs / "padre").predict([runs / "a.png"], runs / "one")
    out = f"seen-{processes}"
    status, said = polymix(runs, processes, "predict", "padre", "a.png", SHARED, str(processes), "--out", out)
    assert status == 0 and said.count("a.png:") == 1, f"more than one process spoke, or none:\n{said}"
    (mine,) = json.loads((runs / out / "predictions.json").read_text())["results"]
    for name, value in expected[0].items():
        assert name == "file" or mine[name] == (pytest.approx(value, abs=1e-4) if isinstance(value, float) else value)


@pytest.mark.parametrize("prompt", [PROMPT, "a"])  # of the second there are fewer tokens than processes
def test_processes_of_torchrun_write_what_one_writes(runs, prompt):
    words = ["generate", "pom", *HERE[:1], prompt, *HERE[2:]]
    _, one = polymix(runs, 1, *words)
    status, said = polymix(runs, 3, *words, SHARED, "3")
    text = [line for line in one.splitlines() if line.startswith(prompt)]
    assert status == 0 and [line for line in said.splitlines() if line.startswith(prompt)] == text, said


WRONG = {
    "more than there are": (2, ["generate", "pom", *HERE, SHARED, "3"], "got 3 with 2 processes"),
    "fewer than there are": (2, ["predict", "padre", "a.png"], "got 1 with 2 processes"),
    "in one process": (1, ["predict", "padre", "a.png", SHARED, "2"], "got 2 with 1 process."),
    "none": (2, ["predict", "padre", "a.png", SHARED, "0"], "got 0 with 2 processes"),
    "none in one process": (1, ["generate", "pom", *HERE, SHARED, "0"], "got 0 with 1 process."),
    "negative": (2, ["generate", "pom", *HERE, SHARED, "-1"], "got -1 with 2 processes"),
    "text": (2, ["generate", "pom", *HERE, SHARED, "two"], "a valid integer"),
    "texts from pictures": (2, ["generate", "padre", *HERE, SHARED, "2"], "no config.json"),
    "pictures of texts": (2, ["predict", "pom", "a.png", SHARED, "2"], "the task text"),
    "no such run": (2, ["predict", "nowhere", "a.png", SHARED, "2"], "which does not exist"),
    "no such file": (2, ["predict", "padre", "b.png", SHARED, "2"], "which does not exist"),
    "a broken file": (2, ["predict", "padre", "broken.png", SHARED, "2"], "broken.png"),
    "pictures without weights": (2, ["predict", "no-pictures", "a.png", SHARED, "2"], "weights"),
    "texts without weights": (2, ["generate", "no-texts", *HERE, SHARED, "2"], "safetensors"),
    "pictures of a mixer that cannot": (2, ["predict", "xca", "a.png", SHARED, "2"], "this xca cannot do"),
    "texts of a mixer that cannot": (2, ["generate", "softmax", *HERE, SHARED, "2"], "softmax on several processes"),
    "no lines": (2, ["generate", "pom", "--lines", SHARED, "2"], "a prompt in each line"),
}  # fmt: skip
KINDS = ("more than there are", "in one process", "text", "pictures of texts", "no such run", "a broken file",
         "texts without weights", "texts of a mixer that cannot", "no lines")  # fmt: skip


@pytest.mark.parametrize("case", slow_but((), WRONG, kinds=KINDS))
def test_a_mistake_is_one_line_on_each_process_that_gets_to_it(runs, case):
    processes, words, expected = WRONG[case]
    status, said = polymix(runs, processes, *words)
    lines = re.findall(r"^(?:\[rank\d\]:)? ?(polymix: .*)$", said, re.MULTILINE)
    assert status != 0 and len(set(lines)) == 1 and len(lines) <= processes, said
    assert expected in lines[0], lines[0]
    assert "polymix/cli/__init__.py" not in said, f"a traceback:\n{said}"
