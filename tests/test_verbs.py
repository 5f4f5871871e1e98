"""Each verb without the optional packages that it does not need; what it imports before it is asked for anything."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import polymix
from polymix.cli import VERBS

ROOT = Path(polymix.__file__).parent
# Every package that an extra brings and that Python can import, by its module; rich, typer and with it pydantic are the
# command line itself.
OPTIONAL = (
    "HersheyFonts", "PIL", "accelerate", "diffusers", "executorch", "flashlight", "huggingface_hub", "jinja2",
    "lightning", "lm_eval", "matplotlib", "onnx", "onnxruntime", "onnxruntime_qnn", "onnxscript", "openvino", "pandas",
    "plotly", "pyarrow", "pycocotools", "pytorch_lightning", "rapidfuzz", "scipy", "skimage", "sklearn", "tensorboard",
    "timm", "tokenizers", "torchdiffeq", "torchmetrics", "torchvision", "transformers", "wandb", "yaml",
)  # fmt: skip
REPORT = ("jinja2", "matplotlib", "PIL")  # matplotlib needs Pillow
DIGITS = ("sklearn", "scipy")  # scikit-learn needs SciPy
LANGUAGE = ("transformers", "tokenizers", "huggingface_hub", "yaml")  # transformers needs the last two
ONNX = ("onnx", "onnxruntime", "onnxscript")
WITHOUT = """
import sys

class Without:
    '''A finder that does not find the packages of a list: as if they were not installed.'''

    def __init__(self, finder, missing):
        self.finder, self.missing = finder, missing

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.missing else self.finder.find_spec(name, path, target)

missing = sys.argv[1].split(",")
sys.meta_path[:] = [Without(finder, missing) for finder in sys.meta_path]
del sys.argv[1]
from polymix.cli import main
main()
"""
OWN = """
import torch
from torch import nn

def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(1, 9, 16)

def vit():
    from polymix import SoftmaxConfig
    from polymix.models import VisionTransformer

    return VisionTransformer(SoftmaxConfig(heads=2), image_size=8, patch_size=2, dim=8, depth=1, classes=10, channels=1)
"""
CONVERT = ("convert", "--model", "own.py:encoder", "--plan", "pom", "--seconds", "1", "--out")
EXPORT = ("export", "--mixer", "pom", "--dim", "8", "--tokens", "16", "--out")
TRAIN = ("train", "segment", "--preset", "tiny", "--steps", "1", "--control", "False", "--out")
COMPARE = (
    "compare",
    "--task",
    "segment",
    "--preset",
    "tiny",
    "--set",
    "steps=1",
    "--mixers",
    "pom",
    "--seeds",
    "1",
    "--out",
)
TEXT = ("train", "text", "--config", "text.json", "--out")
SMALL = {
    "data": "text.txt", "options": {"hidden_size": 16, "num_heads": 2, "num_layers": 2}, "vocab": 300, "context": 16, "steps": 1,
    "evaluate_tokens": 64, "control": False,
}  # fmt: skip
BENCH = ("bench", "--mixers", "pom", "--tokens", "16", "--dims", "8", "--out")
RUNS = [  # a command of each verb, and the optional packages that it cannot do without
    (("list",), ()),
    (("show", "padre", "dim=32", "n=64"), ()),
    (("lens", "pom"), ()),
    (("lens", "pom", "--out", "lens"), ("matplotlib", "PIL")),
    (("doctor",), ()),
    (("recommend", "--shape", "32x16:heads=2", "--mixers", "pom", "--seconds", "1"), ()),
    ((*BENCH, "bench"), REPORT),
    ((*CONVERT, "converted"), REPORT),
    (
        (
            "search",
            "--model",
            "own.py:vit",
            "--data",
            "digits",
            "--mixers",
            "pom,keep",
            "--budget",
            "1",
            "--steps",
            "1",
            "--seconds",
            "1",
            "--out",
            "found",
        ),
        (*REPORT, *DIGITS),
    ),
    ((*EXPORT, "exported"), ONNX),
    ((*EXPORT, "int8", "--target", "int8"), ONNX),
    ((*TRAIN, "new"), (*REPORT, *DIGITS)),
    ((*COMPARE, "compared"), (*REPORT, *DIGITS)),
    (("evaluate", "segment"), ("PIL", *DIGITS)),
    (("predict", "segment", "red.png", "--out", "predicted"), ("PIL", "matplotlib")),
    ((*TEXT, "new-text"), (*REPORT, *LANGUAGE)),
    (("generate", "text", "--prompt", "a", "--max-new-tokens", "2"), LANGUAGE),
]
# Without a case: it would replace the kernels of the running tests.
UNTESTED = {"build-kernels"}


def without(packages, folder, *arguments):
    """The command in a process of its own where these packages are not installed."""
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT, ",".join(packages), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a file of a model, a picture and a text."""
    folder = tmp_path_factory.mktemp("verbs")
    (folder / "own.py").write_text(OWN)
    (folder / "text.txt").write_text("".join(f"{number} and {number + 1}.\n" for number in range(2000)))
    (folder / "text.json").write_text(json.dumps(SMALL))
    Image.new("RGB", (64, 64), "red").save(folder / "red.png")
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """The folder with two runs, which some verbs take."""
    for words in ((*TRAIN, "segment"), (*TEXT, "text")):
        run = without(("none",), folder, *words)
        assert run.returncode == 0, run.stderr
    return folder


def test_every_verb_has_a_case():
    assert {words[0] for words, _ in RUNS} | UNTESTED == set(VERBS)


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "needed"), RUNS, ids=[" ".join(words[:2]) for words, _ in RUNS])
def test_a_verb_needs_no_more_than_it_uses(trained, arguments, needed):
    """`polymix export --mixer pom` used to need Lightning, because a workflow imported a domain."""
    run = without(sorted(set(OPTIONAL) - set(needed)), trained, *arguments)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("arguments", "needed"), [(BENCH, "jinja2"), (CONVERT, "matplotlib"), (TRAIN, "jinja2"), (("lens", "pom", "--out"), "matplotlib"), (EXPORT, "onnxscript")],
    ids=lambda value: value if isinstance(value, str) else value[0],
)  # fmt: skip
def test_what_a_verb_needs_is_named_before_it_works(folder, arguments, needed):
    """One line, the sentence with the command, and nothing written."""
    out = folder / "nothing"
    run = without((needed,), folder, *arguments, str(out))
    assert (run.returncode, run.stderr.count("\n")) == (2, 1), run.stderr
    assert run.stderr.startswith(f"polymix: {needed} is not installed.") and f"pip install {needed};" in run.stderr
    assert not out.exists() or not any(out.iterdir())


HELP = """
import io, json, sys
from contextlib import redirect_stdout
from polymix.cli import main
statuses = []
for words in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()) as text:
        try:
            main(words)
        except SystemExit as end:
            statuses.append([end.code, text.getvalue().strip() != ""])
print(json.dumps([statuses, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def test_help_needs_no_torch():
    """`polymix --help` and that of every verb; of `train`, also the options of a domain."""
    pages = [["--help"], *([verb, "--help"] for verb in VERBS), ["train", "segment", "--help"], ["--version"]]
    command = [sys.executable, "-c", HELP, json.dumps(pages)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    statuses, loaded = json.loads(run.stdout)
    assert statuses == [[0, True]] * len(pages)
    assert not {"torch", "numpy", *OPTIONAL} & set(loaded)


def imports_on_load(tree):
    """The modules that a file imports when it is imported itself: outside functions and TYPE_CHECKING."""
    queue = list(tree.body)
    while queue:
        node = queue.pop()
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            queue += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            queue += ast.iter_child_nodes(node)


def test_workflows_import_domains_in_the_function_that_needs_them():
    """And the engine, but for comparing, which is training."""
    for room in ("workflows", "cli", "export"):
        for path in (ROOT / room).rglob("*.py"):
            for module in imports_on_load(ast.parse(path.read_text("utf-8"))):
                assert not module.startswith("polymix.domains"), f"{path} imports {module}"
                training = module.startswith("polymix.train") and "compare" not in path.parts
                assert not training, f"{path} imports {module}"


def test_the_search_for_imports_sees_what_runs():
    code = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\nclass A:\n    import c\n    def f(self):\n        import d\n"
    code += "try:\n    from e import f\nexcept ImportError:\n    pass\n"
    assert sorted(imports_on_load(ast.parse(code))) == ["b", "c", "e.f"]
