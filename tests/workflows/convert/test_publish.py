"""What leaves the machine: model cards whose code runs, uploads, timm's loader, and what must be installed for them."""

import importlib
import importlib.metadata as installed
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import OptionError
from polymix.workflows.convert import hub

cure_torchvision()
Image = pytest.importorskip("PIL.Image", reason="untested: photos, for which Pillow is needed")
timm = pytest.importorskip("timm", reason="untested: models of timm, which is not installed")
transformers = pytest.importorskip("transformers", reason="untested: models of transformers, which is not installed")
hub_library = pytest.importorskip("huggingface_hub", reason="untested: uploads, for which huggingface_hub is needed")

TIMM = ("--model", "timm/test_vit.r160_in1k", "--image-size", "32", "--plan", "blocks.0.attn=pom")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with photos of two classes, a photo, and weights for the two."""
    monkeypatch.chdir(tmp_path)
    for at, name in enumerate(("cats", "dogs")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(5):
            Image.new("RGB", (40, 50), (200 * at, 10 * i, 90)).save(tmp_path / "photos" / name / f"{i}.png")
    Image.new("RGB", (60, 50), (200, 20, 90)).save("photo.jpg")
    torch.manual_seed(1)
    torch.save(timm.create_model("test_vit", img_size=32, num_classes=2).state_dict(), "w.pt")
    return tmp_path


def card(folder):
    """The card as huggingface_hub reads it: metadata and text."""
    whole = hub_library.ModelCard(Path(folder, "README.md").read_text())
    return whole.data, whole.text


def run_code(folder, capsys):
    """Run the card's Python block; return what it defines and prints."""
    (code,) = re.findall(r"```python\n(.*?)```", card(folder)[1], re.DOTALL)
    names = {}
    exec(compile(code.replace("FOLDER", folder), "card", "exec"), names)
    return names, capsys.readouterr().out.strip()


# The card


def test_the_card_says_what_the_model_is_and_its_code_runs(run, place, capsys):
    """Licence, origin, classes, install line, result with its interval; and the photo goes in as the data did."""
    words = ("--weights", "w.pt", "--data", "photos", "--license", "mit", "--base-model", "timm/test_vit.r160_in1k")
    status, _, err = run(*TIMM, *words)
    assert (status, err) == (0, ""), err
    data, text = card("out")
    assert (data.license, data.base_model, data.library_name) == ("mit", "timm/test_vit.r160_in1k", "polymix")
    (result,) = data.eval_results
    assert result.metric_type == "accuracy" and result.task_type == "image-classification"
    assert 'pip install -c constraints.txt ".[vision]" pillow' in text and "Classes: cats, dogs." in text
    assert re.search(r"\| converted \| [\d.]+ % \(95 % interval [\d.]+ to [\d.]+ %\) \|", text)
    assert "Measured on 2 held-out images." in text
    names, said = run_code("out", capsys)
    assert said in ("cats", "dogs")
    from polymix.workflows.convert.images import Images
    from polymix.workflows.convert.sources import load_model

    Path("one/cats").mkdir(parents=True), Path("one/dogs").mkdir()
    for at in ("one/cats/0.png", "one/cats/1.png", "one/dogs/0.png", "one/dogs/1.png"):
        Image.open("photo.jpg").save(at)
    images = Images("one", load_model("out"), None)
    torch.testing.assert_close(names["images"][0], images.inputs(images.data.train.images)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["untrained", "digits", "vit", "bert", "gpt2", "mine"])
def test_the_cards_code_runs_for_every_kind_of_model(run, place, capsys, kind, no_progress_bars):
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    words = {
        "untrained": TIMM, "digits": (*TIMM, "--data", "digits"), "vit": ("--model", "vit", "--plan", "qt"),
        "bert": ("--model", "bert", "--plan", "qt", "--tokens", "8"),
        "gpt2": ("--model", "gpt2", "--plan", "qt", "--tokens", "8"), "mine": ("--model", "mine.py:vit", "--plan", "qt"),
    }[kind]  # fmt: skip
    if kind == "vit":
        labels = {"id2label": {0: "a cat", 1: "a dog"}, "label2id": {"a cat": 0, "a dog": 1}}
        config = transformers.ViTConfig(image_size=16, patch_size=8, **labels, **small)
        transformers.ViTForImageClassification(config).save_pretrained("vit")
        Path("vit/preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
        Path("vit/README.md").write_text("---\nlicense: apache-2.0\nbase_model: someone/vit\n---\n# A ViT\n")
    elif kind == "bert":
        config = transformers.BertConfig(vocab_size=20, max_position_embeddings=24, **small)
        transformers.BertForMaskedLM(config).save_pretrained("bert")
    elif kind == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20, n_positions=24, bos_token_id=0, eos_token_id=1)  # fmt: skip
        transformers.GPT2LMHeadModel(config).save_pretrained("gpt2")
    elif kind == "mine":
        Path("mine.py").write_text(
            "import polymix\nfrom polymix.models import VisionTransformer\ndef vit():\n"
            "    return VisionTransformer(polymix.SoftmaxConfig(heads=2), image_size=8, patch_size=2, dim=16, depth=1)\n"
        )
    status, _, err = run(*words)
    assert (status, err) == (0, ""), err
    data, text = card("out")
    assert data.license == ("apache-2.0" if kind == "vit" else "unknown")
    assert data.base_model == ("someone/vit" if kind == "vit" else None)
    assert "pip install" in text
    names, said = run_code("out", capsys)
    if kind == "vit":
        assert said in ("a cat", "a dog")
    elif kind == "digits":
        assert said in map(str, range(10)) and names["images"].shape == (1, 3, 32, 32)
    else:
        assert said or names["output"] is not None


# Uploads


class Api:
    """Stands for huggingface_hub.HfApi, and writes down what it is asked."""

    calls = ()
    fails = False

    def __init__(self, token=None):
        self.token = token

    def create_repo(self, repo, **options):
        Api.calls.append(("create", repo, options))

    def upload_folder(self, **options):
        if Api.fails:
            raise ConnectionError("no route to host")
        Api.calls.append(("upload", options["repo_id"], sorted(p.name for p in Path(options["folder_path"]).iterdir())))


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(hub_library, "HfApi", Api)
    monkeypatch.setattr(hub_library, "get_token", lambda: "hf_mine")
    monkeypatch.setattr(Api, "calls", [])
    return Api


@pytest.mark.slow
def test_a_finished_folder_is_uploaded(run, place, api, monkeypatch):
    status, out, err = run(*TIMM, "--push-to-hub", "me/vit-pom")
    assert (status, err) == (0, "") and "Uploaded to https://huggingface.co/me/vit-pom." in out
    (created, uploaded) = api.calls
    assert created[:2] == ("create", "me/vit-pom") and created[2]["exist_ok"]
    assert uploaded[1] == "me/vit-pom" and {"README.md", "config.json", "model.safetensors"} <= set(uploaded[2])
    assert polymix.push_to_hub("out", "me/two", private=True) == "https://huggingface.co/me/two"
    assert api.calls[2][2]["private"]
    monkeypatch.setattr(Api, "fails", True)
    with pytest.raises(OptionError, match="try again with"):
        polymix.push_to_hub("out", "me/two")
    assert run(*TIMM, "--push-to-hub", "me/two", "--out", "kept")[0] == 2
    assert json.loads(Path("kept/results.json").read_text())["finished"], "what was computed is not lost"


def test_what_cannot_be_uploaded_is_said_before_the_work(fails, place, api, monkeypatch):
    for repo in ("vit", "a/b/c", "-a/b", "a b/c"):
        fails(*TIMM, "--push-to-hub", repo, named="user/name")
    with pytest.raises(OptionError, match="save_pretrained"):
        polymix.push_to_hub("photos", "me/vit")
    monkeypatch.setattr(hub_library, "get_token", lambda: None)
    fails(*TIMM, "--push-to-hub", "me/vit", named="logged in")
    assert hub.check_repo("me/vit", "repo", token="hf_other") and not api.calls


# timm


def test_timm_loads_a_converted_model(place):
    model = timm.create_model("test_vit", img_size=32, num_classes=3, pretrained=False).eval()
    report = polymix.convert(model, "pom")
    polymix.save_pretrained(report.model, "saved")
    importlib.import_module("polymix.convert.timm_models")
    images = torch.randn(2, 3, 32, 32)
    for loaded in (timm.create_model("local-dir:saved"), timm.create_model("polymix_converted", folder="saved")):
        assert torch.equal(loaded(images), report.model(images))
        assert timm.data.resolve_model_data_config(loaded)["mean"] == tuple(model.pretrained_cfg["mean"])
        polymix.save_pretrained(loaded, "again")
    for options in ({}, {"folder": "saved", "num_classes": 4}):
        with pytest.raises(OptionError, match=r"folder|no options"):
            timm.create_model("polymix_converted", **options)


# What must be installed

USE = """
import sys
from importlib.machinery import PathFinder
allowed = set()
class Hiding:  # as if the blocked packages were not there
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked - allowed else PathFinder.find_spec(name, path, target)
blocked = set(sys.argv[1].split(","))
sys.meta_path = [Hiding() if finder is PathFinder else finder for finder in sys.meta_path]
import torch, polymix
from polymix.models import VisionTransformer
model = VisionTransformer(polymix.SoftmaxConfig(), image_size=8, patch_size=2, dim=16, depth=1, classes=2)
polymix.save_pretrained(polymix.convert(model, "qt").model, "core")
assert polymix.load_pretrained("core")(torch.randn(1, 3, 8, 8)).shape == (1, 2)
allowed = set(sys.argv[2].split(","))
from polymix.cli import main
try:
    main(sys.argv[3:])
except SystemExit as stop:
    assert not stop.code, stop.code
assert polymix.load_pretrained("out")(torch.randn(1, 3, 32, 32)).shape == (1, 2)
"""


def packages(*extras):
    """The importable names of what polymix with these extras requires, directly or not."""
    tomllib = pytest.importorskip("tomllib", reason="untested: pyproject.toml is read with Python 3.11 or later")
    requirement = pytest.importorskip(
        "packaging.requirements", reason="untested: requirements are read by packaging"
    ).Requirement
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    queue = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    found = set()
    while queue:
        line = requirement(queue.pop())
        name = re.sub(r"[-_.]+", "-", line.name).lower()
        if name in found or (line.marker and not line.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        try:
            queue += installed.requires(name) or []
        except installed.PackageNotFoundError:
            continue
    tops = installed.packages_distributions().items()
    return {top for top, names in tops if {re.sub(r"[-_.]+", "-", name).lower() for name in names} & found}


@pytest.mark.slow
def test_saving_and_converting_need_what_the_readme_installs(place):
    """Core alone saves and loads; the README's command needs the extras that the README names, and no others."""
    (extras,) = re.findall(r'for timm, install `"\.\[(.*?)\]"`', (ROOT / "README.md").read_text())
    every = set(installed.packages_distributions())
    core, more = every - packages(), packages(*extras.split(","))
    assert "transformers" in core - more and "timm" in more and "safetensors" not in core
    words = f"convert {shlex.join(TIMM)} --weights w.pt --seconds 0.05 --lengths 1 --threads 1 --out out"
    arguments = [",".join(sorted(core)), ",".join(sorted(more)), *shlex.split(words)]
    done = subprocess.run([sys.executable, "-c", USE, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
