"""The target web without a browser: what is written, what is refused, and that files are run before they are kept."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import polymix
from polymix import errors
from polymix.cli import main
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.export import Graph, export_graphs
from polymix.export.web import runtime, site
from polymix.export.web.drawing import Drawing
from polymix.export.web.latency import TOKENS, curves
from polymix.train.data.images import load_digits
from tests.export.web_package import package_in

pytest.importorskip("onnxruntime", reason="untested: exports, for which onnxruntime is needed (the export extra)")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder with the names of npm's package, which nothing runs: there is no Node.js."""
    folder = package_in(tmp_path)
    monkeypatch.setattr(site, "node", lambda: None)
    return folder


@pytest.fixture
def quick(monkeypatch):
    """Nothing to time: these files take seconds to export."""
    monkeypatch.setattr(site, "curves", lambda models: [])


class Bytes(nn.Module):
    """Takes types that only some models take."""

    def forward(self, ids, keep):
        return torch.where(keep, ids, 0).float() * 0.5


def content(folder, name="manifest.json"):
    return json.loads((folder / name).read_text("utf-8"))


def test_the_folder_holds_all_that_its_page_loads(package, quick, tmp_path):
    out = tmp_path / "out"
    inputs = {"ids": torch.arange(6).reshape(2, 3), "keep": torch.tensor([[True, False, True]] * 2)}
    polymix.export.export(Bytes().eval(), inputs, out, targets=("web",), runtime=package)
    site = content(out, "web/site.json")
    (model,) = site["models"]
    for file in (model["file"], *model["inputs"].values(), *model["outputs"].values()):
        assert (out / "web" / file).is_file()
    arrays = {name: np.load(out / "web" / file) for name, file in model["inputs"].items()}
    assert arrays["ids"].tolist() == inputs["ids"].tolist() and arrays["keep"].dtype == bool
    assert model["drawing"] is None and site["curves"] == []
    page = (out / "web/index.html").read_text("utf-8")
    assert "Bytes" in page and "1.99.0" in page
    assert "http://" not in page and "https://" not in page and "default-src 'none'" in page
    assert {path.name for path in (out / "web/ort").iterdir()} == set(runtime.FILES)
    assert content(out)["web"] == {"runtime": "onnxruntime-web 1.99.0", "ran_in_node": False}
    assert {entry["target"] for entry in content(out)["files"]} == {"web"}


def test_checking_a_folder_runs_no_script_of_it(package, quick, tmp_path, monkeypatch):
    """A folder of somebody else is checked by ONNX Runtime alone."""
    polymix.export.export(
        nn.Linear(3, 2).eval(), torch.randn(2, 3), tmp_path / "out", targets=("web",), runtime=package
    )
    shutil.rmtree(tmp_path / "out/web/ort")
    monkeypatch.setattr(runtime.subprocess, "run", None)
    results = polymix.export.check(tmp_path / "out")
    assert len(results) == 3 and all(result.passed for result in results)


@pytest.mark.parametrize("failure", [None, "no kernel for Gelu"])
def test_other_numbers_in_webassembly_fail_the_export(failure, package, quick, tmp_path, monkeypatch):
    def run(folder, jobs, scratch):
        for job in jobs:
            for path in job["outputs"].values():
                np.save(path, np.load(path) + 1)
        return [failure] * len(jobs)

    monkeypatch.setattr(site, "node", lambda: "node")
    monkeypatch.setattr(site, "run_in_node", run)
    with pytest.raises(errors.ParityError, match=failure or "model.onnx in WebAssembly: other numbers"):
        polymix.export.export(nn.Linear(3, 2).eval(), torch.randn(2, 3), tmp_path / "out", ("web",), runtime=package)
    assert (tmp_path / "out-failed/web/index.html").is_file() and not (tmp_path / "out").exists()


def test_the_runtime_is_found_as_node_finds_packages(package, tmp_path, monkeypatch):
    below = tmp_path / "a/b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert runtime.find_runtime() == package
    assert runtime.find_runtime(tmp_path) == runtime.find_runtime(package.parent) == runtime.find_runtime(package)
    (package / "dist/ort.wasm.bundle.min.mjs").unlink()
    with pytest.raises(errors.MissingExtraError, match=r"lacks .*ort\.wasm\.bundle.*1\.20 or newer"):
        runtime.find_runtime()
    with pytest.raises(errors.MissingExtraError, match="npm install onnxruntime-web"):
        runtime.find_runtime(tmp_path / "none")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mixer", "pom", "--dim", "8", "--tokens", "4", "--target", "web", "--runtime", "none"], "npm install onnxruntime-web"),
        (["--mixer", "pom", "--dim", "8", "--tokens", "4", "--runtime", "."], "without the target web"),
        (["--model", "a.py:build", "--model", "b.py:build", "--data", "x.npy", "--target", "int8"], "one file with 2 models"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(words, said, tmp_path, capsys):
    (data := tmp_path / "x.npy").touch()
    with pytest.raises(SystemExit) as end:
        main(["export", *(str(data) if word == "x.npy" else word for word in words), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().err.strip()
    data.unlink()
    assert end.value.code == 2 and said in printed and "\n" not in printed
    assert not list(tmp_path.iterdir())


def test_several_models_need_different_names(tmp_path, capsys):
    (tmp_path / "host.py").write_text("import torch\ndef a(): return torch.nn.Linear(3, 2), torch.zeros(2, 3)\n")
    name = f"{tmp_path / 'host.py'}:a"
    with pytest.raises(SystemExit) as end:
        main(["export", "--model", name, "--model", name, "--out", str(tmp_path / "out")])
    assert end.value.code == 2 and "two models named host.py-a" in capsys.readouterr().err
    same = Graph.of(nn.ReLU().eval(), torch.zeros(2, 3))
    with pytest.raises(errors.OptionError, match="model twice"):
        export_graphs([same, same], tmp_path / "out")


def test_types_that_a_page_cannot_hold_are_refused(package, quick, tmp_path):
    class Short(nn.Module):
        def forward(self, x):
            return x.to(torch.int16)

    with pytest.raises(errors.CapabilityError, match="int16"):
        polymix.export.export(Short().eval(), torch.ones(2, 3), tmp_path / "out", targets=("web",), runtime=package)
    assert not (tmp_path / "out").exists()


def test_a_drawing_is_made_like_the_training_images():
    digits = load_digits()
    images = digits.train.images
    drawing = Drawing.of(images, digits.classes, 16, 4.9, 5.1)
    assert (drawing.side, drawing.size, drawing.background, drawing.ink) == (8, 16, 0.0, 16.0)
    assert drawing.height == 8.0 and 5.5 < drawing.width < 7 and 3.9 < drawing.centre_x < 4.3
    assert drawing.coverage == pytest.approx(images.mean().item() / 16)
    inverse = Drawing.of(255 - images * 15, digits.classes, 16, 4.9, 5.1)
    assert (inverse.background, inverse.ink) == (255.0, 15.0), "black on white"
    assert inverse.coverage == pytest.approx(drawing.coverage) and inverse.width == drawing.width


def test_extents_count_pixels_with_ink():
    image = torch.zeros(1, 1, 8, 8)
    image[0, 0, 2:5, 1:7] = 9
    drawing = Drawing.of(image, "ab", 8, 0.0, 1.0)
    assert (drawing.height, drawing.width, drawing.centre_x, drawing.centre_y) == (3.0, 6.0, 4.0, 3.5)
    assert drawing.coverage == pytest.approx(18 / 64)


@pytest.mark.parametrize(
    "images",
    [
        torch.randint(1, 200, (50, 1, 8, 8), generator=torch.Generator().manual_seed(0)),
        torch.zeros(5, 3, 8, 8),
        torch.zeros(5, 1, 8, 8),
        torch.full((5, 1, 8, 8), 0.5).tril(),
    ],
    ids=["photos", "colours", "empty", "fractions"],
)
def test_other_images_get_no_canvas(images):
    assert Drawing.of(images, "ab", 8, 0.0, 1.0) is None


def test_mixers_are_timed_against_attention_of_their_width():
    host = nn.ModuleList([polymix.create_mixer("pom", 16), polymix.create_mixer("padre", 16, grid=(4, 4)),
                          polymix.create_mixer("padre", 16, grid=(2, 2)), polymix.create_mixer("pom", 16)])  # fmt: skip
    found = curves([host, polymix.create_mixer("padre", 16, grid=(4,), kernel_size=3)])
    assert [line.label for line in found] == ["softmax", "pom", "padre", "padre 2"]
    assert [line.attention for line in found] == [True, False, False, False]
    assert [tokens for tokens, _ in found[1].graphs()] == [0]
    square, flat = ([(tokens, graph) for tokens, graph in line.graphs()] for line in found[2:])
    assert [tokens for tokens, _ in square] == [tokens for tokens, _ in flat] == list(TOKENS)
    assert [graph.model.config.grid for _, graph in square] == [(16, 16), (24, 24), (32, 32), (48, 48), (64, 64)]
    assert flat[0][1].model.config.grid == (256,)
    assert curves([nn.Linear(3, 2)]) == []


def test_what_cannot_be_timed_is_said():
    video = polymix.create_mixer("padre", 16, grid=(2, 2, 2), kernel_size=3)
    assert [line.omitted for line in curves([video])] == ["", "its grid has three axes"]


@pytest.mark.slow
def test_curves_come_with_checked_files(package, tmp_path):
    mixer = polymix.create_mixer("pom", 8).eval()
    polymix.export.export(mixer, torch.randn(2, 8, 8), tmp_path / "out", targets=("web",), runtime=package)
    page = content(tmp_path / "out", "web/site.json")["curves"]
    assert [line["label"] for line in page] == ["softmax attention", "pom"]
    for line in page:
        path = f"web/{line['files']['0']}"
        entries = [entry for entry in content(tmp_path / "out")["files"] if entry["path"] == path]
        assert len(entries) == 2 and all(entry["free"] == ["tokens"] and entry["error"] < 1e-5 for entry in entries)


@pytest.mark.slow
def test_models_are_called_by_their_mixer_or_their_source(package, quick, tmp_path):
    """Titles tell models apart, and do not give away where the folders of the exporting machine lie."""
    about = [{"mixer": "softmax"}, {"mixer": "pom"}, {"mixer": "pom"}, {"source": "/home/me/models/lm"}]
    graphs = [
        Graph.of(nn.ReLU().eval(), torch.zeros(2, 3), f"model-{place}", **told) for place, told in enumerate(about)
    ]
    export_graphs(graphs, tmp_path / "out", ("web",), runtime=package)
    labels = [model["label"] for model in content(tmp_path / "out", "web/site.json")["models"]]
    assert labels == ["softmax attention", "pom (model-1)", "pom (model-2)", "lm"]
    title = "softmax attention, pom (model-1), pom (model-2) and lm"
    assert f"<title>{title}</title>" in (tmp_path / "out/web/index.html").read_text("utf-8")


@pytest.mark.slow
def test_the_canvas_gets_its_constants_from_the_run(package, quick, tmp_path, monkeypatch):
    from polymix.train.run import train

    monkeypatch.chdir(tmp_path)
    train(ClassifyRecipe.tiny().changed(steps=1), tmp_path / "run")
    train(ClassifyRecipe.tiny().changed(steps=1, stream=True), tmp_path / "streamed")
    with pytest.raises(SystemExit) as end:
        main(["export", "--model", "run", "--model", "streamed", "--target", "web", "--out", "out"])
    assert end.value.code == 0
    first, second = content(tmp_path / "out", "web/site.json")["models"]
    data = content(tmp_path / "run", "results.json")["data"]
    drawing = first["drawing"]
    assert [drawing["mean"]] == data["mean"] and [drawing["std"]] == data["std"]
    assert drawing["classes"] == data["classes"] and (drawing["side"], drawing["size"]) == (8, 16)
    assert second["drawing"] is None, "its images are decoded when used"
    assert "Draw a digit" in (tmp_path / "out/web/index.html").read_text("utf-8")


@pytest.mark.slow
def test_a_mixer_is_timed_as_far_as_it_goes(package, tmp_path):
    """A mixer whose number of tokens cannot stay free gets a file for each; one for at most 1,024 tokens has three."""
    mixer = polymix.create_mixer("hyena", 8).eval()
    polymix.export.export(mixer, torch.randn(2, 8, 8), tmp_path / "out", targets=("web",), runtime=package)
    _, line = content(tmp_path / "out", "web/site.json")["curves"]
    assert list(line["files"]) == ["256", "576", "1024"]
    assert line["note"] == "hyena is not measured from 2304 tokens on: it cannot be exported for them."
    named = {entry["path"] for entry in content(tmp_path / "out")["files"]}
    there = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out/web/models").iterdir()}
    assert named == there, "files of failed attempts are removed"
