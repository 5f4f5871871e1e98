"""The examples run: every cell of the notebooks, the recipes, and the web page on a stand-in for Gradio."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from PIL import Image

import polymix
from polymix.domains.classify.classifier import Classifier
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.errors import DataError
from polymix.train.registry import named_recipe
from polymix.train.run import train
from tests.helpers import blank_pictures

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = {
    "steps": 30,
    "evaluate_every": 30,
    "dim": 8,
    "depth": 1,
    "image_size": 8,
    "batch_size": 16,
    "learning_rate": 1e-2,
}


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_runs(notebook, capsys):
    content, scope = json.loads(notebook.read_text("utf-8")), {"__name__": notebook.stem}
    assert content["nbformat"] == 4
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert cells
    for place, cell in enumerate(cells):
        assert not cell["outputs"] and cell["execution_count"] is None, "outputs are not kept in git"
        exec(compile("".join(cell["source"]), f"{notebook.name}, cell {place}", "exec"), scope)
    assert "multiply-adds" in capsys.readouterr().out


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_can_be_read(file):
    pytest.importorskip("yaml", reason="untested: YAML recipes, for which PyYAML is needed (the train extra)")
    assert isinstance(named_recipe(file), ClassifyRecipe)


def test_the_readme_names_every_example():
    text = (EXAMPLES / "README.md").read_text("utf-8")
    for path in EXAMPLES.iterdir():
        if path.name == "__pycache__":  # Python's own, once a test has imported an example
            continue
        assert path.name == "README.md" or f"({path.name})" in text, path.name


@pytest.fixture(scope="module", params=["RGB", "L"])
def run(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    generator = torch.Generator().manual_seed(0)
    for name, shade in (("dark", 40), ("light", 200)):
        (root / "photos" / name).mkdir(parents=True)
        for place in range(8):
            noise = torch.randint(-20, 21, (3 * 100,), generator=generator) + shade
            image = Image.frombytes("RGB", (10, 10), bytes(noise.tolist())).convert(request.param)
            image.save(root / "photos" / name / f"{place}.png")
    with blank_pictures():
        train(ClassifyRecipe(data=str(root / "photos"), **TINY), root / "out")
    return root


def test_pictures_are_classified_as_in_the_training(run):
    classifier = Classifier(run / "out")
    for name in ("dark", "light"):
        shares = classifier(run / "photos" / name / "0.png")
        assert next(iter(shares)) == name and sum(shares.values()) == pytest.approx(1)
    Image.new("RGB", (30, 12), (230, 220, 225)).save(run / "other.jpg")
    assert next(iter(classifier(run / "other.jpg"))) == "light"
    (run / "broken.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"broken\.png"):
        classifier(run / "broken.png")


def test_a_run_on_the_digits_classifies_no_files(tmp_path):
    train(ClassifyRecipe(**{**TINY, "steps": 1}), tmp_path)
    with pytest.raises(DataError, match="scikit-learn digits"):
        Classifier(tmp_path)


class Interface:
    def __init__(self, fn, inputs, outputs, title):
        self.fn, self.inputs, self.outputs, self.title = fn, inputs, outputs, title


def test_the_web_page(run, monkeypatch):
    stub = types.SimpleNamespace(Interface=Interface, Image=lambda **options: options, Label=lambda **options: options)
    monkeypatch.setitem(sys.modules, "gradio", stub)
    spec = importlib.util.spec_from_file_location("classify_app", EXAMPLES / "classify_app.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.build(run / "out")
    assert page.inputs["type"] == "filepath" and page.outputs["num_top_classes"] == 2 and "2 classes" in page.title
    assert next(iter(page.fn(str(run / "photos" / "dark" / "1.png")))) == "dark"


def captions():
    spec = importlib.util.spec_from_file_location("captions", EXAMPLES / "captions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_model_of_images_and_text_with_mixers_in_both_parts_learns_captions():
    """Of new pictures it writes what is in them, all three words; by chance one of 27 captions is right."""
    pytest.importorskip("transformers", reason="untested: LLaVA, for which transformers is needed (the extra text)")
    example = captions()
    torch.manual_seed(0)
    model = example.build()
    report = polymix.convert(model, "pom", init="fresh")
    assert len([layer for layer in report.layers if layer.now]) == 4, "two of pictures and two of text"
    example.train(model, 600, torch.Generator().manual_seed(0))
    assert example.right(model, *example.draw(100, torch.Generator().manual_seed(1))) > 0.9
