"""`polymix convert`: every kind of model, weights and data it takes, what it writes, and that nothing is run unasked."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors import torch as safetensors
from torch import nn

import polymix
from polymix.compat import cure_torchvision
from polymix.convert.adapters.libraries import local_files
from polymix.errors import OptionError
from polymix.models import VisionTransformer
from polymix.workflows.convert.images import Images
from polymix.workflows.convert.inputs import pixels, random_input
from polymix.workflows.convert.settings import Settings, parse_plan
from polymix.workflows.convert.sources import Source, load_model
from tests.domains.test_classify_images import picture

cure_torchvision()
yaml = pytest.importorskip("yaml", reason="untested: the model card's metadata, for which PyYAML is needed")
timm = pytest.importorskip("timm", reason="untested: models of timm, which is not installed")
transformers = pytest.importorskip("transformers", reason="untested: models of transformers, which is not installed")

TIMM = ("--model", "timm/test_vit.r160_in1k", "--image-size", "32", "--plan", "blocks.0.attn=padre:kernel_size=3")
WRITTEN = {"model.safetensors", "config.json", "report.html", "results.json", "README.md", "layers.png"}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
MINE = """
import torch
from torch import nn
import polymix
from polymix.models import VisionTransformer

def vit():
    torch.manual_seed(3)
    return VisionTransformer(polymix.SoftmaxConfig(heads=2), image_size=8, patch_size=2, dim=16, depth=2, classes=2,
                             channels=3, mlp_ratio=2)

class Host(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Conv2d(3, 16, 4, 4), nn.ModuleList(nn.MultiheadAttention(16, 2) for _ in range(2))
    def forward(self, images):
        x = self.embed(images).flatten(2).permute(2, 0, 1)
        for layer in self.layers:
            x = x + layer(x, x, x)[0]
        return x

def host():
    return Host(), torch.randn(2, 3, 8, 8)

def swin():
    import timm
    return timm.create_model("swin_tiny_patch4_window7_224", img_size=56, embed_dim=16, depths=(2,), num_heads=(2,), num_classes=2)

def efficientvit():
    from tests.convert.timm_hosts import efficientvit
    return efficientvit(), torch.randn(2, 3, 64, 64)

def number():
    return 3

def broken():
    raise RuntimeError("no such thing")
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working folder of a test, with mine.py and pictures in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    for name in ("cats", "dogs"):
        for i in range(8):
            picture(tmp_path / "photos" / name / f"{i}.png", value=i + 100 * (name == "dogs"))
    return tmp_path


def results(folder="out"):
    return json.loads(Path(folder, "results.json").read_text())


def card(folder="out"):
    """Metadata and text of the model card."""
    _, head, text = Path(folder, "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(head), text


def state(folder="out"):
    return polymix.load_pretrained(folder, trust=True).state_dict()


def same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def saved(model, folder):
    with local_files():  # and without a progress bar
        model.save_pretrained(folder)
    return model.eval()


def hf_vit(**labels):
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=2, **labels, **SMALL)
    return transformers.ViTForImageClassification(config)


# Models by name, and their weights


def test_a_name_without_weights_converts_the_architecture_and_says_so(run):
    status, out, err = run(*TIMM)
    assert (status, err) == (0, "")
    assert {path.name for path in Path("out").iterdir()} == WRITTEN
    metadata, text = card()
    page = Path("out/report.html").read_text()
    for said in (out, text, page):
        assert "No weights were given" in said
    assert metadata["library_name"] == "polymix" and "padre" in metadata["tags"]
    assert "1 × `padre`, 5 × `attention`." in text
    content = results()
    assert content["finished"] and content["schema"] == "polymix.convert/1"
    assert {layer["name"]: layer["now"] for layer in content["conversion"]["layers"]}["blocks.0.attn"] == "padre"
    assert [layer["now"] for layer in content["conversion"]["layers"]].count(None) == 5, "others are kept"
    assert polymix.load_pretrained("out")(torch.randn(1, 3, 32, 32)).shape == (1, 1000)


@pytest.mark.slow
def test_weights_from_a_file_with_a_head_of_their_own(run, place):
    model = timm.create_model("test_vit", img_size=32, num_classes=7)
    safetensors.save_file(model.state_dict(), "w.safetensors")
    torch.save(
        {"state_dict": {f"module.{key}": value for key, value in model.state_dict().items()}, "epoch": 3}, "w.pt"
    )
    for file in ("w.safetensors", "w.pt"):
        same(load_model(TIMM[1], file, size=32).model.state_dict(), model.state_dict())
    status, out, _ = run(*TIMM, "--weights", "w.safetensors")
    assert status == 0 and "No weights" not in out + card()[1] and "not been trained" in card()[1]
    weights = {key: value for key, value in model.state_dict().items() if not key.startswith("blocks.0.attn")}
    assert all(torch.equal(state()[key], value) for key, value in weights.items()), "a weight was dropped on the way"


@pytest.mark.parametrize(
    "name", ["cut.safetensors", "cut.pt", "foreign.pt", "shape.pt", "whole.pt", "list.pt", "gone.pt"]
)
def test_weights_that_are_damaged_or_of_another_model(fails, place, name):
    model = timm.create_model("test_vit", img_size=32)
    if name.startswith("cut"):
        save = safetensors.save_file if "safe" in name else torch.save
        save(model.state_dict(), name)
        Path(name).write_bytes(Path(name).read_bytes()[:2000])
    elif name != "gone.pt":
        wrong = {**model.state_dict(), "norm.weight": torch.zeros(3)}
        torch.save(
            {"foreign.pt": {"a": torch.zeros(2)}, "shape.pt": wrong, "whole.pt": model, "list.pt": [1]}[name], name
        )
    fails(*TIMM, "--weights", name, named="--weights")


@pytest.mark.parametrize(("model", "named"), [
    ("timm/tset_vit", "test_vit"), ("timm/test_vit.nope", "--model"), ("torchvision/vit_b_33", "vit_b_32"), ("timm/test_resnet", "no attention"),
    ("nowhere", "file.py:function"), ("mine.py", "file.py:function"), ("mine.py:number", "int"), ("mine.py:broken", "no such thing"),
    ("mine.py:nothing", "nothing"), ("gone.py:host", "gone.py"), ("photos", "config.json"),
])  # fmt: skip
def test_models_that_are_none(fails, model, named):
    fails("--model", model, named=named)


def test_a_model_of_torchvision(run, monkeypatch):
    """Its models by name are all large: a small one of its class stands among them."""
    models = pytest.importorskip("torchvision.models", reason="untested: torchvision, which is not installed")

    def vit_small(*, weights=None, image_size=32, **kw) -> models.VisionTransformer:
        return models.VisionTransformer(
            image_size=image_size, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, **kw
        )

    monkeypatch.setitem(models._api.BUILTIN_MODELS, "vit_small", vit_small)
    status, out, err = run("--model", "torchvision/vit_small", "--image-size", "16", "--plan", "qt")
    assert (status, err) == (0, "") and "No weights" in out
    assert polymix.load_pretrained("out")(torch.randn(1, 3, 16, 16)).shape == (1, 1000)
    assert load_model("torchvision/vit_small", classes=3).model.heads.head.out_features == 3


def test_a_model_by_name_fits_the_data(place):
    model = load_model(TIMM[1], classes=2, size=48).model
    assert model.head.out_features == 2 and pixels(model) == (48, 48)
    ours = load_model("timm/qt_vit_b0", classes=2).model  # a name that polymix.timm adds
    assert any(isinstance(part, polymix.mixers.TokenMixer) for part in ours.modules())
    anywhere = load_model("timm/test_resnet", size=48).model  # takes images of any size
    assert random_input(anywhere, size=48).shape == (1, 3, 48, 48) and random_input(anywhere).shape == (1, 3, 160, 160)


# Folders


def test_a_folder_of_transformers(run, place):
    """With the labels in the model's order, and its own processor's scale."""
    model = saved(hf_vit(id2label={0: "dogs", 1: "cats"}, label2id={"dogs": 0, "cats": 1}), "vit")
    Path("vit/preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4] * 3}))
    images = Images("photos", Source(model, folder=Path("vit")), None)
    data, labels = next(iter(images.loader(images.data.train, 12, shuffle=False)))
    first, label = images.data.train.images[:1], images.data.train.labels[:1]
    torch.testing.assert_close(data[0, 2], (first[0, 2] / 255 - 0.3) / 0.4)
    assert labels[0] == 1 - label, "cats come first in the alphabet, and second in the model"
    plan = "vit.layers.0.attention=pom,*.1.attention=keep"
    status, _, err = run("--model", "vit", "--plan", plan, "--data", "photos", "--batch", "4")
    assert (status, err) == (0, "")
    content = results()
    assert content["data"]["classes"] == ["dogs", "cats"] and content["data"]["std"] == pytest.approx([0.4] * 3)
    assert set(content["conversion"]["accuracy"]) == {"before", "converted"}
    assert card()[0]["model-index"][0]["results"][0]["metrics"][0]["type"] == "accuracy"
    assert Path("out/preprocessor_config.json").read_bytes() == Path("vit/preprocessor_config.json").read_bytes()
    again = load_model("out")
    assert Images("photos", again, None).mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "GPT2LMHeadModel"])
def test_a_model_of_text(run, fails, kind):
    config = {"BertForMaskedLM": lambda: transformers.BertConfig(vocab_size=20, max_position_embeddings=24, **SMALL),
              "GPT2LMHeadModel": lambda: transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20, n_positions=24,
                                                                 bos_token_id=0, eos_token_id=1)}[kind]()  # fmt: skip
    model = saved(getattr(transformers, kind)(config), "text")
    assert random_input(model)["input_ids"].shape == (1, 24), "as many as it can take"
    ids = random_input(model, batch=3, tokens=9)["input_ids"]
    assert ids.shape == (3, 9) and ids.min() >= 0 and ids.max() < 20
    fails("--model", "text", "--data", "photos", named="polymix.distill")
    fails("--model", "text", "--tokens", "25", named="24")
    options = ["--keep-host"] if kind == "GPT2LMHeadModel" else []
    status, _, err = run("--model", "text", "--plan", "1:1", "--mixer", "qt", "--tokens", "9", *options)
    assert (status, err) == (0, "")
    content = results()["conversion"]
    assert [layer["now"] for layer in content["layers"]] == ["qt", None]
    assert content["left_out"] == [], "what is part of a layer that converts is not left out"
    assert polymix.load_pretrained("out")(ids).logits.shape == (3, 9, 20)


def test_a_folder_that_lacks_weights(run, fails, place):
    """None at all: the architecture, and that is said; some of them: an error."""
    saved(hf_vit(), "vit")
    fails("--model", "vit", "--image-size", "12", named="--image-size")
    weights = safetensors.load_file("vit/model.safetensors")
    last = sorted(weights)[-1]
    safetensors.save_file({**weights, last: torch.zeros(3)}, "vit/model.safetensors", metadata={"format": "pt"})
    fails("--model", "vit", named=last)
    del weights[last]
    safetensors.save_file({**weights, "more": torch.zeros(3)}, "vit/model.safetensors", metadata={"format": "pt"})
    fails("--model", "vit", named=last)
    Path("vit/model.safetensors").write_bytes(b"cut")
    fails("--model", "vit", named="vit")
    Path("vit/model.safetensors").unlink()
    assert "No weights" in run("--model", "vit", "--plan", "qt")[1]


def test_a_folder_of_timm(place):
    model = timm.create_model("test_vit", img_size=32, num_classes=3)
    timm.models.save_for_hf(model, "hub")
    source = load_model("hub")
    same(source.model.state_dict(), model.state_dict())
    assert source.trained


def test_a_folder_that_was_converted_before(run, fails):
    assert run("--model", "mine.py:vit", "--plan", "1:1", "--mixer", "qt")[0] == 0
    first = state()
    status, _, err = run("--model", "out", "--plan", "pom", "--out", "twice")
    assert (status, err) == (0, "")
    assert [layer["name"] for layer in results("twice")["conversion"]["layers"]] == ["blocks.1.mixer"]
    second = state("twice")
    assert all(torch.equal(second[key], first[key]) for key in first if key in second), "what was kept is the same"
    fails("--model", "twice", "--out", "thrice", named="no attention")
    fails("--model", "out", "--plan", "qt", named="--out")  # into itself


# Functions


def test_a_model_that_its_library_builds_needs_no_trust(run):
    status, out, err = run("--model", "mine.py:vit", "--plan", "qt")
    assert (status, err) == (0, "") and "trust" not in out + card()[1]
    assert isinstance(polymix.load_pretrained("out"), VisionTransformer)


def test_code_of_the_users_runs_with_trust_alone(run, fails):
    fails("--model", "mine.py:host", "--batch", "4", named="the function returns the input")
    status, out, err = run("--model", "mine.py:host", "--plan", "1:1", "--mixer", "qt")
    assert (status, err) == (0, "")
    content = results()["layers"]["layers.0"]
    assert content["shape"] == [4, 2, 16], "it is measured with the input that came with it"
    assert content["flops"][0] > 0, "the fast path of nn.MultiheadAttention counts none"
    assert "trust=True" in out.splitlines()[-1] and 'load_pretrained("FOLDER", trust=True)' in card()[1]
    assert "../mine.py:host" in card()[1], "what it is that runs"
    with pytest.raises(OptionError, match="trust"):
        polymix.load_pretrained("out")
    fails("--model", "out", "--out", "again", named="--trust")
    assert run("--model", "out", "--out", "again", "--trust", "--image-size", "8", "--plan", "qt")[0] == 0
    assert "../mine.py:host" in card("again")[1] and not results("again")["conversion"]["layers"][1:]


@pytest.mark.parametrize(("windows", "lengths"), [("keep", 1), ("merge", 0)])
def test_windows(run, windows, lengths):
    """A mixer in a window has that window's grid; one that sees the whole map has no length in common with attention."""
    plan = "layers.0.blocks.0.attn=padre:kernel_size=3"
    words = ("--model", "mine.py:swin", "--windows", windows, "--plan", plan)
    assert run(*words)[0] == 2, "its biases were lost without a word"
    status, _, err = run(*words, "--drop", "position_bias")
    assert (status, err) == (0, "")
    assert len(results()["lengths"]) == lengths


@pytest.mark.slow
def test_the_branches_of_efficientvit(run, fails):
    for flag, scales in (("--multi-scale", [5]), ("--no-multi-scale", [])):
        status, _, err = run("--model", "mine.py:efficientvit", flag, "--plan", "qt", "--out", flag[2:])
        assert (status, err) == (0, "")
        assert {tuple(layer["options"]["scales"]) for layer in results(flag[2:])["conversion"]["layers"]} == {
            tuple(scales)
        }
    fails("--model", "mine.py:swin", "--windows", "merge", "--no-multi-scale", "--plan", "qt", "--drop", "position_bias",
          named="--multi-scale")  # fmt: skip


# Plans


@pytest.mark.parametrize(("text", "plan"), [
    ("padre", "padre"), ("padre:degree=3", "padre:degree=3"), (" 1:1 ", "1:1"), ("all-but-last-2", "all-but-last-2"), ("recommend", "recommend"),
    ("blocks.*.attn=padre,blocks.11.attn=keep", {"blocks.*.attn": "padre", "blocks.11.attn": "keep"}),
    ("a=padre:token=monarch:blocks=8 , b.[0-3]=pom:expand=1", {"a": "padre:token=monarch:blocks=8", "b.[0-3]": "pom:expand=1"}),
    ("a=padre", {"a": "padre"}), ("padre:token=monarch:blocks=8", "padre:token=monarch:blocks=8"),
])  # fmt: skip
def test_plans_as_people_type_them(text, plan):
    assert parse_plan(text) == plan
    assert Settings(model="m", plan=text).check() == plan


@pytest.mark.parametrize(("words", "named"), [
    (("--plan", "padre,pom"), "layer=mixer"), (("--plan", "a=padre,a=pom"), "twice"), (("--plan", "a="), "layer=mixer"), (("--plan", "a=pomm"), "pom"),
    (("--plan", "pom:degre=3"), "degree"), (("--plan", "0:1"), "at least 1"), (("--plan", "blocks.9.mixer=pom"), "blocks.0.mixer"),
    (("--plan", "blocks.*.mixer=keep"), "--plan"), (("--plan", "padre", "--mixer", "pom"), "--mixer"),
    (("--distill-epochs", "1"), "--data"), (("--progressive", "2"), "--progressive"), (("--imitate-epochs", "1"), "--data"), (("--batch", "0"), "--batch"), (("--device", "cuda:99"), "--device"),
    (("--init", "random"), "--init"), (("--windows", "drop"), "--windows"), (("--lengths", "a"), "--lengths"), (("--lengths", "0"), "--lengths"),
    (("--seconds", "0"), "--seconds"), (("--tokens", "4"), "--tokens"), (("--image-size", "9"), "image"), (("--data", "gone"), "--data"),
    (("--distill-loss", "features"), "--distill-loss"), (("--distill-loss", "error"), "--distill-loss"),
    (("--distill-loss", "features", "--distill-epochs", "1", "--data", "photos", "--from-scratch"), "--distill-loss"),
    (("--distill-loss", "features", "--distill-epochs", "1", "--data", "noise"), "--distill-loss"),
    (("--data", "digits"), "10 classes"), (("--epochs", "3"), "epochs"),
])  # fmt: skip
def test_what_does_not_fit_is_said_before_anything_is_written(fails, words, named):
    fails("--model", "mine.py:vit", *words, named=named)


@pytest.fixture
def times(monkeypatch):
    """What a call of each candidate is said to take beside attention's 10 ms."""
    from tests.workflows.recommend.helpers import contender, near

    said = {"attention": 0.01, "model": 0.1}

    def clock(calls, seconds, device):
        return {name: near(said.get(contender(name), 0.02)) for name in calls}

    monkeypatch.setattr("polymix.measure.candidates.interleaved_within", clock)
    monkeypatch.setattr("polymix.workflows.recommend.run.interleaved_within", clock)
    return said


def test_a_recommendation_is_followed_and_kept(run, fails, times, monkeypatch):
    fails("--model", "mine.py:vit", "--plan", "recommend", named="keeps attention everywhere")
    times["pom"] = 0.001
    with monkeypatch.context() as patch:
        patch.setattr("polymix.workflows.convert.run.assess", interrupt)
        assert run("--model", "mine.py:vit", "--plan", "recommend")[0] == 130
    times["qt"] = 0.0001
    status, out, err = run("--model", "mine.py:vit", "--plan", "recommend", "--resume")
    assert (status, err) == (0, "") and "Replace" not in out, "a resumed run has the plan that it began with"
    assert [layer["now"] for layer in results()["conversion"]["layers"]] == ["pom", "pom"]


# Data


def interrupt(*_, **__):
    signal.raise_signal(signal.SIGINT)


def test_features_are_aligned_without_labels(run, place):
    """One mixer after another too. The card claims no accuracy: an error of features is none."""
    words = ("--model", "mine.py:vit", "--plan", "pom", "--data", "photos", "--distill-epochs", "1", "--batch", "4")
    status, out, err = run(*words, "--distill-loss", "features", "--progressive", "1")
    assert (status, err) == (0, "") and "Relative error, distilled" in out
    conversion = results()["conversion"]
    assert conversion["metric"] == "relative_error" and conversion["accuracy"]["before"] == 0.0
    metadata, text = card("out")
    assert "model-index" not in metadata and "learned from the last features of the original model" in text


@pytest.mark.slow
def test_distilled_on_a_folder_interrupted_and_resumed(run, place, monkeypatch):
    """Ctrl-C in the second stage, then --resume: the bits of a run that nothing interrupted."""
    (place / "photos" / "dogs" / "broken.png").write_bytes(b"no image")
    words = (
        "--model",
        "mine.py:vit",
        "--plan",
        "pom:degree=2",
        "--data",
        "photos",
        "--distill-epochs",
        "1",
        "--batch",
        "4",
        "--progressive",
        "1",
    )
    status, out, err = run(*words, "--out", "whole")
    assert (status, err) == (0, "") and "1 unreadable" in out
    assert [*results("whole")["conversion"]["accuracy"]] == ["before", "converted", "imitated", "distilled"]
    metadata, text = card("whole")
    assert metadata["pipeline_tag"] == "image-classification" and "| distilled |" in text and "mean 0." in text
    assert "one by one, the last first, every 1 step" in text
    assert not Path("whole/checkpoints").exists(), "a folder to publish has no checkpoints in it"
    with monkeypatch.context() as patch:
        patch.setattr("polymix.train.distill.stages.FineTuning.after_step", interrupt)
        status, out, _ = run(*words)
    assert status == 130 and "--resume" in out
    assert not results()["finished"] and Path("out/checkpoints/imitation/last.ckpt").exists()
    assert run(*words)[0] == 2, "what is there is not overwritten"
    assert run(*words, "--resume", "--seed", "1")[0] == 2, "another run does not go on with it"
    status, _, err = run(*words, "--resume")
    assert (status, err) == (0, "")
    same(state(), state("whole"))
    before = {path.name: path.stat().st_mtime_ns for path in Path("out").iterdir()}
    status, out, _ = run(*words, "--resume")
    assert status == 0 and "is finished" in out
    assert before == {path.name: path.stat().st_mtime_ns for path in Path("out").iterdir()}


def test_digits_are_repeated_for_three_channels(place):
    digits = Images("digits", Source(load_model("mine.py:vit").model), None)
    inputs = digits.inputs(digits.data.train.images[:8])
    assert inputs.shape == (8, 3, 8, 8) and torch.equal(inputs[:, 0], inputs[:, 2])
    assert digits.unit == 1.0 and digits.order.tolist() == list(range(10))
    with pytest.raises(OptionError, match="1 channel"):
        Images("photos", Source(nn.Sequential(nn.Conv2d(1, 4, 2))), 8)
