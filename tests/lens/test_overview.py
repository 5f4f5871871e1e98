"""All of it at once: `overview`, the verb `polymix lens`, a module of the user's own in a file."""

import json

import pytest

import polymix
from polymix import lens
from polymix.cli import main
from polymix.errors import MissingExtraError
from tests.helpers import build
from tests.test_cli import run

OWN = """
import torch
from torch import nn


class Square(nn.Module):
    def __init__(self, width, power=2):
        super().__init__()
        self.linear, self.power = nn.Linear(width, width), power

    def forward(self, x):
        return self.linear(x) ** self.power


def broken(**options):
    raise RuntimeError("no\\nsuch luck")


def nothing():
    return 3
"""


def test_overview():
    view = lens.overview(build("poly_nl", 4), order=3)
    assert [what for what, _ in view.rows] == [
        "degree", "declared", "interactions", "receptive field", "equivariance", "contextual mapping",
    ]  # fmt: skip
    assert view.content["declared"]["agrees"]
    assert view.content["degree"]["degree"] == 3
    assert view.content["interactions"]["counts"]["tokens"] == {"reached": 4, "possible": 20}
    assert view.content["equivariance"]["permutation"]["holds"]
    assert json.loads(json.dumps(view.content, allow_nan=False)) == view.content


@pytest.mark.parametrize("name", ["padre", "poly_nl", "qt"])
def test_a_fresh_mixer_agrees_with_what_it_declares(name):
    """Biases start at zero, where the function is homogeneous; the mixer declares what holds for any."""
    view = lens.overview(polymix.create_mixer(name, 4, **({"grid": (3, 3)} if name == "padre" else {})), order=1)
    assert view.content["declared"]["agrees"] and "agrees" in dict(view.rows)["declared"]


def test_what_cannot_be_done_is_said_in_its_place():
    view = lens.overview(lambda x: x.mean(1), shape=(1, 200, 3), order=4)
    rows = dict(view.rows)
    assert "degree 1" in rows["degree"]
    assert "declared" not in rows
    assert rows["interactions"].startswith("not measured")
    assert rows["equivariance"].startswith("not measured")
    assert "not_done" in view.content["equivariance"]


def test_a_wrong_declaration_is_seen(monkeypatch):
    from polymix.mixers.mixer import Polynomial

    mixer = build("poly_nl", 4)
    monkeypatch.setattr(type(mixer), "polynomial", property(lambda self: Polynomial(2)))
    view = lens.overview(mixer)
    assert "does NOT agree" in dict(view.rows)["declared"]
    assert not view.content["declared"]["agrees"]


def test_the_verb(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    folder = tmp_path / "new" / "padre"
    status, out, err = run(capsys, "lens", "padre", "degree=3", "grid=4x4", "dim=4", "--out", str(folder))
    assert (status, err) == (0, "")
    for text in (
        "polynomial of degree 3, not homogeneous",
        "agrees",
        "order 2",
        "reached by",
        "permutation",
        "coincide",
    ):
        assert text in out
    content = json.loads((folder / "lens.json").read_text())
    assert (content["schema"], content["name"], content["options"]["degree"]) == ("polymix.lens/1", "padre", 3)
    assert (content["degree"]["degree"], content["receptive_field"]["grid"]) == (3, [4, 4])
    pictures = {
        f"{name}.png" for name in ("degree", "interactions", "receptive_field", "equivariance", "contextual_mapping")
    }
    assert {path.name for path in folder.iterdir()} == pictures | {"lens.json"}


def test_help_has_an_example(capsys):
    status, out, _ = run(capsys, "lens", "--help")
    assert status == 0
    assert "Example: polymix lens padre degree=3 grid=4x4" in " ".join(out.split())


def test_softmax_is_said_to_be_none(capsys):
    status, out, _ = run(capsys, "lens", "softmax", "dim=2", "--order", "1", "--seed", "3")
    assert status == 0
    assert "neither a polynomial nor a quotient of two" in out


def test_a_module_in_a_file(capsys, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    status, out, _ = run(capsys, "lens", f"{file}:Square", "width=3", "power=4", "shape=1x4x3")
    assert status == 0
    assert "polynomial of degree 4" in out
    assert "itself only" in out
    status, out, _ = run(capsys, "lens", "tests/lens/test_overview.py:vector", "shape=5")
    assert status == 0
    assert "polynomial of degree 1" in out


def vector():
    return lambda x: 2 * x


@pytest.mark.parametrize(("arguments", "named"), [
    (["padr"], "padre"), (["padre", "degre=3"], "degree"), (["padre", "--order", "5"], "order"), (["padre", "--image", "cats"], "digits"),
    (["{file}:Square", "width=3"], "shape"), (["{file}:Square", "width=3", "shape=1x4x5"], "module"), (["{file}:Square"], "width"),
    (["{file}:broken", "shape=3"], "such luck"), (["{file}:nothing", "shape=3"], "int"), (["{file}:missing", "shape=3"], "missing"),
    (["nowhere.py:f", "shape=3"], "nowhere.py"), (["{file}:Square", "width=3", "--image", "digits"], "--image"), (["{bad}:f"], "SyntaxError"),
])  # fmt: skip
def test_errors_are_one_line_and_status_2(capsys, tmp_path, arguments, named):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "bad.py").write_text("def f(:")
    words = [word.format(file=tmp_path / "own.py", bad=tmp_path / "bad.py") for word in arguments]
    status, out, err = run(capsys, "lens", *words, "--out", str(tmp_path / "out"))
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert named in err
    assert not (tmp_path / "out").exists()


@pytest.mark.draws
def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    result = lens.degree(lambda x: x, shape=(1, 3))
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"\.\[train\]"):
        result.plot(tmp_path / "a.png")


@pytest.mark.slow
@pytest.mark.draws
def test_digits(capsys, tmp_path, monkeypatch):
    """The whole way of --image, with one epoch of training."""
    import polymix.workflows.influence as module

    monkeypatch.setattr(module, "EPOCHS", 1)
    monkeypatch.setattr(module, "HOST", {"image_size": 8, "patch_size": 2, "dim": 16, "depth": 1})
    with pytest.raises(SystemExit) as stop:
        main(["lens", "poly_nl", "dim=2", "--image", "digits", "--out", str(tmp_path)])
    assert not stop.value.code
    assert "half of it on" in capsys.readouterr().out
    assert (tmp_path / "influence.png").stat().st_size > 20_000
