"""Optional packages: one sentence where one is missing, which works when it is copied."""

import ast
import pickle
import shlex
import sys
from pathlib import Path

import pytest

import polymix
from polymix.errors import MissingExtraError, install_extra
from polymix.extras import PACKAGES, check_installed, is_installed, needs

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(polymix.__file__).parent
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
CLONE = "; in a clone of polymix, with the rest of its extra: "


class Missing:
    """A finder for which a package is not installed."""

    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def brought(extra):
    """The packages that an extra installs, with those of the extras that it names, in small letters."""
    names = set()
    for line in EXTRAS[extra]:
        name = line.partition(";")[0].partition(">=")[0].strip()
        if name.startswith("polymix["):
            names |= set().union(*(brought(other) for other in name[8:-1].split(",")))
        else:
            names.add(name.lower())
    return names


def sites():
    """(file, line, modules, extra) of every place that says what is missing: with needs(...), check_installed(...)."""
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)) if "needs(" in source or "check_installed(" in source else ():
            if isinstance(node, ast.With):
                call = next((item.context_expr for item in node.items if named(item.context_expr) == "needs"), None)
                if call is not None:
                    yield path, node.lineno, list(imported(node)), text(call, 0, "extra")
            elif named(node) == "check_installed":
                modules = [part.value for part in node.args if isinstance(part, ast.Constant)]
                yield path, node.lineno, modules, text(node, None, "extra")


def named(node):
    return getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""


def imported(node):
    for each in ast.walk(node):
        if isinstance(each, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in each.names)
        elif isinstance(each, ast.ImportFrom):
            yield each.module.partition(".")[0]


def text(call, place, keyword):
    """An argument that is a constant; None for one that is computed, "" where there is none."""
    values = [each.value for each in call.keywords if each.arg == keyword]
    values += [call.args[place]] if place is not None and len(call.args) > place else []
    return (values[0].value if isinstance(values[0], ast.Constant) else None) if values else ""


SITES = [(f"{path.relative_to(ROOT)}:{line}", modules, extra) for path, line, modules, extra in sites()]


@pytest.mark.parametrize(("place", "modules", "extra"), SITES, ids=[site[0] for site in SITES])
def test_what_a_place_needs_is_in_its_extra(place, modules, extra, monkeypatch):
    """The extra that the sentence names brings the package, and the sentence is whole for each package."""
    needed = [name for name in modules if name not in ("torch", *sys.stdlib_module_names)]
    for module in needed:
        if extra is not None:
            packages = set().union(*(brought(name) for name in extra.split(","))) if extra else set()
            assert not extra or PACKAGES.get(module, module).lower().replace("_", "-") in packages, place
            with monkeypatch.context() as patch:
                patch.setattr(sys, "meta_path", [Missing(module), *sys.meta_path])
                for name in [name for name in sys.modules if name.partition(".")[0] == module]:
                    patch.delitem(sys.modules, name)
                with pytest.raises(MissingExtraError) as caught, needs(extra):
                    __import__(module)
            package = PACKAGES.get(module, module)
            whole = f'{CLONE}pip install -c constraints.txt ".[{extra}]"' if extra else ""
            assert str(caught.value) == f"{package} is not installed. Install it with: pip install {package}{whole}"


def test_the_search_finds_the_places():
    files = {place.partition(":")[0] for place, _, _ in SITES}
    assert {"lens/plots.py", "export/manifest.py", "train/recipe.py", "train/recipe_files.py"} <= files
    assert len(SITES) > 25


def test_nobody_words_it_alone():
    """An import that may fail is in `needs`, an installation is named by MissingExtraError and `install_extra`."""
    own = {
        "errors.py", "extras.py", "cli/__init__.py",  # the sentence, the question, and what asks before typer is there
        "limits.py",  # does without NumPy
        "train/data/pictures.py",  # makes it a mistake of the file
        "train/registry.py",  # makes it a mistake of the recipe, whose task names no module
    }  # fmt: skip
    for path in ROOT.rglob("*.py"):
        file, source = path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
        if file not in own and ("ImportError" in source or "ModuleNotFound" in source):
            caught = [ast.unparse(node.type) for node in ast.walk(ast.parse(source))
                      if isinstance(node, ast.ExceptHandler) and node.type is not None]  # fmt: skip
            assert not [kind for kind in caught if "ImportError" in kind or "ModuleNotFound" in kind], file
        assert "polymix[" not in source.replace('f"polymix[', ""), f"{file}: the index has no polymix to install"


def test_the_sentence():
    error = MissingExtraError("matplotlib", "train")
    assert str(error) == (
        "matplotlib is not installed. Install it with: pip install matplotlib"
        '; in a clone of polymix, with the rest of its extra: pip install -c constraints.txt ".[train]"'
    )
    parts = (error.argument, error.got, error.allowed)
    assert parts == ("matplotlib", "is not installed", "what can be imported") and error.cure in str(error)
    assert isinstance(error, ImportError)
    several = str(MissingExtraError("onnx onnxscript", "export,qnn", "The file is written with them."))
    assert several.startswith(
        "onnx, onnxscript are not installed. The file is written with them. Install them with: pip install onnx onnxscript;"
    )
    assert several.endswith('".[export,qnn]"')


def test_a_shell_takes_the_commands_as_they_stand():
    command = str(MissingExtraError("timm", "vision")).partition("Install it with: ")[2]
    lexer = shlex.shlex(command, posix=True, punctuation_chars=";")
    lexer.whitespace_split = True
    assert list(lexer)[:4] == ["pip", "install", "timm", ";"], "neither a comma nor a full stop goes to pip"
    assert shlex.split(install_extra("vision")) == ["pip", "install", "-c", "constraints.txt", ".[vision]"]


def test_what_is_installed_and_broken_is_not_called_missing():
    with (
        pytest.raises(MissingExtraError, match=r"^json fails to import: ImportError: cannot import name 'nothing'"),
        needs("train"),
    ):
        from json import nothing  # noqa: F401
    with (
        pytest.raises(
            MissingExtraError, match=r"^text fails to import: ImportError: Using X requires Y\. .*\.\[text\]"
        ),
        needs("text"),
    ):
        raise ImportError("Using X requires Y.")


def test_a_part_that_a_library_lacks_is_named(monkeypatch):
    """scikit-learn without SciPy, for example: SciPy is what to install."""
    monkeypatch.setattr(sys, "meta_path", [Missing("scipy"), *sys.meta_path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=r"pip install scipy;"), needs("train"):
        import scipy.stats  # noqa: F401


def test_check_installed_names_all_that_is_missing(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [Missing("skimage"), Missing("PIL"), *sys.meta_path])
    monkeypatch.setitem(sys.modules, "onnx", None)
    for name in ("skimage", "PIL"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        assert not is_installed(name)
    with pytest.raises(MissingExtraError, match="pip install scikit-image pillow onnx"):
        check_installed("skimage", "json", "PIL", "onnx")
    check_installed("json", "torch")


def test_it_pickles():
    error = MissingExtraError("onnxruntime-web", "", "Why.", state="is not here", install="npm install onnxruntime-web")
    other = pickle.loads(pickle.dumps(error))
    assert str(other) == str(error) == "onnxruntime-web is not here. Why. Install it with: npm install onnxruntime-web"
    assert vars(other) == vars(error)
