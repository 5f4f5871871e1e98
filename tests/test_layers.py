"""Who may import whom: each layer only what stands to its left, and a host library only the file that is about it.

ops <- structured <- mixers <- { blocks, convert, models, lens, inference } <- { pages, timm, polynomials } <- { measure, parallel }
<- { train, export } <- workflows <- cli; a domain imports what is up to train, and nothing imports a domain.
"""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "polymix"
LAYERS = (
    {"ops"}, {"structured"}, {"mixers"}, {"blocks", "convert", "models", "lens", "inference"}, {"polymix"},
    {"pages", "timm", "polynomials"}, {"measure", "parallel"}, {"train", "export"}, {"domains"}, {"workflows"}, {"cli"},
)  # fmt: skip
# Core files that import a library inside a function alone: what they draw, or whose layer they wrap, is beside the point
# of the core, which works, and is imported, without it.
LAZY = {
    "convert/weight_files.py", "lens/plots.py", "mixers/cache.py", "mixers/related/mamba.py",
    "mixers/related/timm_layers.py",
}  # fmt: skip
# Models that are classes of a library themselves; whoever imports them has it.
OF_A_LIBRARY = {"models/language/"}
# Kernels: nothing imports them before one runs, so that they may import what they are written in.
TRITON = {
    "ops/padre/triton.py", "ops/pom/triton.py", "ops/pom/triton_powers.py", "ops/pooled/triton.py", "ops/qt/triton.py",
    "ops/qt/triton_causal.py", "ops/shared/triton_functions.py",
}  # fmt: skip
# "polymix" stands for the package's own __init__, the public face of what is to its left.
# To the left of ops, in this order.
FOR_ALL = {
    "numbers": -5, "threads": -5, "errors": -4, "torchvision_operators": -4, "options": -3, "extras": -3, "files": -3, "results": -2,
    "devices": -2, "compat": -2, "limits": -1,
}  # fmt: skip
SIBLINGS = {("models", "blocks")}  # hosts are made of blocks
# polymix.recommend, assess, distill, parallelize and polynomialize, by the package's __getattr__; test_cold_import sees
# that.
ON_DEMAND = {("polymix", name) for name in ("polynomials", "workflows", "train", "export", "parallel")}
# Which files, or all of which folder/, may import a library that the core does not depend on; none in the layers from
# ops to models.
LIBRARIES = {
    "timm": {"mixers/related/timm_layers.py"},
    "transformers": {
        "mixers/cache.py", "mixers/related/mamba.py", "models/language/", "workflows/generate/", "domains/text/",
        "workflows/convert/drawn.py",
    },
    "torchdiffeq": {"domains/generation/flow.py"},
    "diffusers": {"domains/generation/diffusion.py"},
    "onnxscript": {"export/graph.py"},
    "onnx": {"export/arithmetic.py", "export/int8.py", "export/equalise.py", "export/hexagon.py", "export/onnx_graphs.py"},
    "onnxruntime": {"export/manifest.py", "export/int8.py", "export/hexagon.py"},
    "onnxruntime_qnn": {"export/manifest.py"},
    "openvino": {"export/manifest.py"},
    "executorch": {"export/executorch.py", "export/manifest.py"},
    "safetensors": {"convert/weight_files.py"},
    "tokenizers": {"domains/text/tokenizer.py"},
    "pyarrow": {"domains/text/data.py", "train/data/series/tables.py"},
    "pandas": {"train/data/series/installed.py"},
    "av": {"domains/video/reading.py"},
    "soundfile": {"train/data/audio.py"},
    "espeakng_loader": {"train/data/espeak.py"},
    "pydantic": {"train/", "domains/"},
    "tomli": {"train/recipe_files.py"},
    "wandb": {"train/loggers.py"},
    "torchmetrics": {"train/data/boxes/precision.py"},
    "pycocotools": {"train/data/boxes/"},
    "sklearn": {"train/data/", "domains/jigsaw/data.py"},
    "skimage": {"domains/jigsaw/data.py", "domains/faces/synthetic.py"},
    "scipy": {"domains/jigsaw/metrics.py", "domains/faces/wider.py"},
    "matplotlib": {
        "pages/plots.py", "workflows/bench/report.py", "workflows/compare/report.py", "workflows/convert/plots.py",
        "workflows/search/plots.py", "lens/plots.py", "train/", "domains/",
    },
    "plotly": {"train/data/scans/page.py"},
    "yaml": {"train/recipe_files.py"},
    "jinja2": {"pages/__init__.py"},
    "rich": {"cli/"},
    "typer": {"cli/"},
    "PIL": {"train/", "domains/"},
    "pillow_heif": {"train/data/pictures.py"},
    "torchvision": {"compat.py"},
    "triton": TRITON,
    # arrays go to the runtimes
    "numpy": {"train/", "domains/", "export/", "workflows/export.py", "workflows/generate/exported.py"},
    "HersheyFonts": {"domains/handwriting/synthetic.py"},
    "flashlight": {"train/data/ctc.py"},
    "rapidfuzz": {"train/data/edits.py"},
}  # fmt: skip


@cache
def imported(path, changed, package):
    """As `imports`, of a file. changed: when, since a file is parsed once."""
    return tuple(imports(ast.parse(path.read_text("utf-8")), package))


def imports_of(path, package):
    return imported(path, path.stat().st_mtime_ns, package)


def imports(tree, package):
    """(line, module, name) of every import at any depth, relative ones made absolute; no name for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = ".".join(part for part in (*package[: len(package) - node.level + 1], module) if part)
            yield from ((node.lineno, module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value, None


def rank(unit):
    if unit in FOR_ALL:
        return FOR_ALL[unit]
    return next((place for place, layer in enumerate(LAYERS) if unit in layer), None)


def violations(root, libraries=LIBRARIES):
    """Every import below `root` (a package named polymix) that the rules forbid, as "file:line: reason"."""
    forbidden = []
    modules = {".".join(("polymix", *path.relative_to(root).with_suffix("").parts)) for path in root.rglob("*.py")}
    modules |= {name.removesuffix(".__init__") for name in modules}
    for path in sorted(root.rglob("*.py")):
        file, parts = path.relative_to(root).as_posix(), path.relative_to(root).with_suffix("").parts
        unit = "polymix" if parts == ("__init__",) else "cli" if parts == ("__main__",) else parts[0]
        if rank(unit) is None:
            forbidden.append(f"{file}:1: {unit} has no layer")
            continue
        for line, module, name in imports_of(path, ("polymix", *parts[:-1])):
            if f"{module}.{name}" in modules:  # from polymix import errors: a module, not a name of the package
                module, name = f"{module}.{name}", None
            reason = _reason(file, unit, module.split("."), name, libraries)
            if reason:
                forbidden.append(f"{file}:{line}: {reason}")
    return forbidden


def _reason(file, unit, module, name, libraries):
    top = module[0]
    if top == "tests":
        return "imports tests"
    if top in libraries:
        allowed = any(file == place or (place.endswith("/") and file.startswith(place)) for place in libraries[top])
        return None if allowed else f"{top} is not for this file"
    if top != "polymix":
        known = top == "torch" or top in sys.stdlib_module_names
        return None if known else f"{top} is neither torch, nor the standard library, nor in the table"
    target = module[1] if len(module) > 1 else "polymix"
    if target == "domains":
        domain = module[2] if len(module) > 2 else str(name)
        return None if file.startswith(f"domains/{domain}/") else f"{file} imports the domain {domain}"
    if target == "export" and unit == "domains":
        return "domains imports export, which is for what was trained"
    if target == unit:
        return None
    if any(part.startswith("_") and not part.startswith("__") for part in (*module[1:], name or "")):
        return f"{'.'.join(module)} {name or ''} is private to {target}"
    mine, theirs = rank(unit), rank(target)
    if theirs is None:
        return f"{target} has no layer"
    if theirs == mine and (unit, target) not in SIBLINGS:
        return f"{unit} imports its sibling {target}"
    return f"{unit} imports {target}, to its right" if theirs > mine and (unit, target) not in ON_DEMAND else None


def test_imports():
    assert not violations(ROOT)


def imported_eagerly(path):
    """The packages that a file imports outside its functions."""
    tree = ast.parse(path.read_text("utf-8"))
    inside = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lazily = {id(node) for function in inside for node in ast.walk(function)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {module.split(".")[0] for n in nodes if id(n) not in lazily for _, module, _ in imports(n, ("polymix",))}


def test_the_table_says_what_is_there_and_keeps_the_core_clean():
    for library, files in LIBRARIES.items():
        for file in files:
            unit = file.split("/")[0].removesuffix(".py")
            paths = [*(ROOT / file).rglob("*.py")] if file.endswith("/") else [ROOT / file]
            core = unit != "compat" and rank(unit) <= rank("polymix") and file not in TRITON | OF_A_LIBRARY
            assert not core or file in LAZY, f"{file} is core: it may not need {library}"
            eager = set().union(*map(imported_eagerly, paths)) if core else ()
            assert library not in eager, f"{file} needs {library} to be imported"
            used = {module.split(".")[0] for path in paths for _, module, _ in imports_of(path, ("polymix",))}
            assert library in used, f"{file} no longer imports {library}: take it off the table"


def test_nothing_imports_the_kernels():
    """Neither at the top of a file nor in a function: an operator loads the file that it names when it runs."""
    for path in ROOT.rglob("*.py"):
        package = ("polymix", *path.relative_to(ROOT).parts[:-1])
        if path.relative_to(ROOT).as_posix() not in TRITON:
            kernels = {"polymix." + file.removesuffix(".py").replace("/", ".") for file in TRITON}
            kernels_here = [module for _, module, name in imports_of(path, package)
                     if {module, f"{module}.{name}"} & kernels]  # fmt: skip
            assert not kernels_here, f"{path} imports {kernels_here}"


def import_graph(root, package):
    """Module -> modules of the same package that it imports, at any depth and under TYPE_CHECKING too."""
    paths = {".".join((package, *path.relative_to(root).with_suffix("").parts)): path for path in root.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph = {}
    for name, path in paths.items():
        parts = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
        imported_names = imports_of(path, tuple(parts))
        targets = {f"{module}.{item}" if f"{module}.{item}" in paths else module for _, module, item in imported_names}
        graph[name] = (targets & set(paths)) - {name}
    return graph


def cycles(graph):
    """The sets of modules that import each other, directly or not."""

    def reach(start):
        seen, queue = set(), [*graph[start]]
        while queue:
            name = queue.pop()
            if name not in seen:
                seen.add(name)
                queue += graph[name]
        return seen

    behind = {name: reach(name) for name in graph}
    return {frozenset({name, *(other for other in behind[name] if name in behind[other])})
            for name in graph if name in behind[name]}  # fmt: skip


# What the package's __getattr__ loads stands in it for type checkers; those that import the package read its version.
LOADED_LATER = {("polymix", name) for name in ("polymix.workflows.convert", "polymix.workflows.recommend", "polymix.workflows.search",
                                               "polymix.train.distill", "polymix.export", "polymix.lens")}  # fmt: skip
# TO BE REMOVED: a type alone.
LOADED_LATER |= {("polymix.domains.classify.published", "polymix.domains.classify.recipe")}


@pytest.mark.parametrize("package", ["polymix", "tests"])
def test_no_modules_import_each_other(package):
    """A cycle works until an import moves: then a name is missing in a module that is half loaded."""
    graph = import_graph(ROOT.parent / package, package)
    graph = {name: {other for other in found if (name, other) not in LOADED_LATER} for name, found in graph.items()}
    assert not cycles(graph)


def test_the_search_for_cycles_sees_every_kind(tmp_path):
    write(tmp_path, {"__init__.py": "", "a.py": "from p import b", "b.py": "def f():\n    from p.c import x",
                     "c/__init__.py": "from p import a", "c/x.py": "", "d.py": "import p.a"})  # fmt: skip
    assert not cycles(import_graph(tmp_path, "p")), "to import a module of a package is not to import the package"
    write(tmp_path, {"c/x.py": "if TYPE_CHECKING:\n    from ..a import y"})
    assert cycles(import_graph(tmp_path, "p")) == {frozenset({"p.a", "p.b", "p.c.x"})}


def test_only_tests_import_a_reference():
    """What everything is held to must not be what runs."""
    for name, found in import_graph(ROOT, "polymix").items():
        references = {other for other in found if other.endswith(".reference")}
        assert name.endswith(".reference") or not references, f"{name} imports {references}"


def sources(*folders, word):
    """The files in which a word stands, parsed."""
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            if word in (text := path.read_text("utf-8")):
                yield path.relative_to(ROOT).as_posix(), ast.parse(text)


def test_mixers_leave_the_choice_of_an_implementation_to_the_ops():
    graph = import_graph(ROOT, "polymix")
    for name, found in graph.items():
        if name.startswith(("polymix.mixers", "polymix.structured")):
            inner = {other for other in found if other.endswith((".blocked", ".native", ".triton", ".triton_causal"))}
            assert not inner, f"{name} imports {inner}"
    for file, tree in sources("mixers", "structured", word="impl"):
        for node in ast.walk(tree):
            if isinstance(node, (ast.If, ast.IfExp)):
                names = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node.test)}
                assert "impl" not in names, f"{file}:{node.lineno} decides by the implementation"


# Configs of other libraries, whose versions differ in what they have.
FOREIGN_CONFIGS = (
    "convert/adapters/",
    "convert/context.py",
    "convert/model_recipes",
    "workflows/convert/inputs.py",
    "workflows/generate/run.py",
)


def test_nobody_guesses_what_a_config_has():
    """A config declares what others must know of its mixer (polymix/mixers/config.py)."""
    for file, tree in sources(".", word="attr("):
        for node in ast.walk(tree):
            guess = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("hasattr", "getattr")
            if guess and not file.startswith(FOREIGN_CONFIGS):
                target, constant = ast.unparse(node.args[0]), isinstance(node.args[1], ast.Constant)
                assert not (constant and target.endswith("config")), f"{file}:{node.lineno} guesses at {target}"


def test_nobody_compares_the_names_of_mixers():
    """… but the registry, by its own constants; what depends on a mixer is declared by its config or its class."""
    import polymix

    names = set(polymix.list_mixers())
    for file, tree in sources(".", word=".name"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith(".name"):
                text = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                assert not names & {value for value in text if isinstance(value, str)}, f"{file}:{node.lineno}"


LEGAL = {
    "__init__.py": "from polymix.blocks import Block\nfrom polymix import errors",
    "__main__.py": "from polymix.cli import main",
    "errors.py": "import os",
    "compat.py": "import importlib\nimportlib.import_module('torchvision')",
    "ops/__init__.py": "",
    "ops/pom.py": "import torch.nn as nn\nfrom . import _kernel\nfrom .qt import f",
    "ops/_kernel.py": "from polymix import errors\nfrom ..errors import OptionError",
    "ops/qt.py": "from __future__ import annotations",
    "structured/a.py": "from polymix.ops.pom import g",
    "mixers/a.py": "import polymix.structured.a\nfrom ..ops import qt",
    "blocks.py": "from polymix.mixers.a import M",
    "models/a.py": "from polymix.blocks import Block",
    "convert/a.py": "from polymix.mixers import a",
    "measure/a.py": "from polymix import Block",
    "train/a.py": "from polymix import Block\nfrom polymix.models import a\nfrom polymix.measure import a",
    "train/registry.py": "from importlib.metadata import EntryPoint\nOWN = 'polymix.domains.segment.recipe:SegmentRecipe'",
    "domains/segment/__init__.py": "",
    "domains/segment/data.py": "import numpy\nfrom polymix.train.a import Task\nfrom polymix.domains.segment import task",
    "domains/segment/task.py": "from polymix.train import a",
    "export/a.py": "import numpy\nfrom polymix.measure import a",
    "workflows/a.py": "from polymix.train import a",
    "cli/__init__.py": "import typer\ndef main():\n    import polymix\n    from polymix.workflows.compare import a",
    "cli/show.py": "from rich.table import Table\nfrom polymix.cli.shared import Threads",
    "cli/shared.py": "import typer",
}
ILLEGAL = {  # file: (a line that breaks a rule, what the report must say)
    "ops/b.py": ("from polymix.mixers import a", "ops imports mixers, to its right"),
    "structured/b.py": ("import polymix.mixers.a", "structured imports mixers, to its right"),
    "mixers/b.py": ("def f():\n    from ..models import a", "mixers imports models, to its right"),
    "mixers/c.py": ("if TYPE_CHECKING:\n    from polymix import Block", "mixers imports polymix, to its right"),
    "blocks.py": ("from polymix.models import a", "blocks imports its sibling models"),
    "models/b.py": ("from polymix.convert import a", "models imports its sibling convert"),
    "convert/b.py": ("from polymix.blocks import Block", "convert imports its sibling blocks"),
    "train/b.py": ("from polymix import cli", "train imports cli, to its right"),
    "train/f.py": ("from polymix.export import a", "train imports its sibling export"),
    "train/g.py": ("def f():\n    from polymix.domains.segment import task", "imports the domain segment"),
    "measure/b.py": ("from polymix.train import a", "measure imports train, to its right"),
    "domains/segment/b.py": ("from polymix.workflows import a", "domains imports workflows, to its right"),
    "domains/segment/c.py": ("from polymix.export import a", "domains imports export"),
    "domains/faces/data.py": ("from polymix.domains.segment.data import read", "imports the domain segment"),
    "domains/faces/task.py": ("from polymix.domains import segment", "imports the domain segment"),
    "workflows/c.py": ("if TYPE_CHECKING:\n    from polymix.domains.segment import task", "imports the domain segment"),
    "workflows/b.py": ("from polymix.cli import main", "workflows imports cli, to its right"),
    "errors.py": ("from polymix.ops import pom", "errors imports ops, to its right"),
    "ops/c.py": ("def f():\n    import numpy as np", "numpy is not for this file"),
    "models/c.py": ("class A:\n    from timm.layers import Mlp", "timm is not for this file"),
    "ops/d.py": ("import importlib\nimportlib.import_module('triton.language')", "triton is not for this file"),
    "train/e.py": ("def f():\n    import typer", "typer is not for this file"),
    "train/c.py": ("import polars", "polars is neither"),
    "train/d.py": ("from tests.helpers import tokens", "imports tests"),
    "mixers/d.py": ("from polymix.ops import _kernel", "polymix.ops._kernel  is private to ops"),
    "mixers/e.py": ("from polymix.ops.pom import _over", "polymix.ops.pom _over is private to ops"),
    "mixers/f.py": ("from polymix.ops._kernel import run", "polymix.ops._kernel run is private to ops"),
    "others.py": ("import os", "others has no layer"),
    "mixers/g.py": ("import polymix.others", "others has no layer"),
}


def write(root, files):
    for file, text in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text, "utf-8")


def test_the_checker_lets_the_legal_through(tmp_path):
    write(tmp_path, LEGAL)
    assert not violations(tmp_path)


@pytest.mark.parametrize("file", list(ILLEGAL))
def test_the_checker_sees(tmp_path, file):
    text, reason = ILLEGAL[file]
    write(tmp_path, {**LEGAL, file: text})
    (report,) = violations(tmp_path)
    assert report.startswith(f"{file}:")
    assert reason in report
