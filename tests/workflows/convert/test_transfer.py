"""`polymix convert` and `polymix.load_weights` with weights for other classes and sizes: what is new, and what is refused."""

import argparse
import json
from pathlib import Path

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.convert.weights import read_state, resample_positions
from polymix.errors import DataError, OptionError
from polymix.train.distill import fit_head
from polymix.workflows.convert.sources import load_model, refit

cure_torchvision()
Image = pytest.importorskip("PIL.Image", reason="untested: photos, for which Pillow is needed")
timm = pytest.importorskip("timm", reason="untested: models of timm, which is not installed")
transformers = pytest.importorskip("transformers", reason="untested: models of transformers, which is not installed")

NAME = "timm/test_vit.r160_in1k"
TIMM = ("--model", NAME, "--plan", "blocks.0.attn=pom", "--data", "photos", "--batch", "8")


def vit(**options):
    torch.manual_seed(5)
    return timm.create_model("test_vit", **{"img_size": 32, "num_classes": 1000, **options}).eval()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with photos of four classes and weights of 1,000."""
    monkeypatch.chdir(tmp_path)
    for place, name in enumerate(("ants", "bees", "cats", "dogs")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(6):
            shade = tuple(200 * (colour == place) + 5 * i for colour in range(3))
            Image.new("RGB", (20, 20), shade).save(tmp_path / "photos" / name / f"{i}.png")
    torch.save(vit().state_dict(), "w.pt")
    return tmp_path


def results(folder="out"):
    return json.loads(Path(folder, "results.json").read_text())


# From the command line


def test_weights_of_many_classes_become_a_model_of_the_datas(run, place):
    """The backbone is the file's, the head fits the photos, positions have the new grid; and all of this is said."""
    words = ("--weights", "w.pt", "--image-size", "48", "--distill-epochs", "1")
    status, out, err = run(*TIMM, *words)
    assert (status, err) == (0, ""), err
    card = Path("out/README.md").read_text()
    for said in (out, card, Path("out/report.html").read_text()):
        assert "The head for 4 classes is new (the weights have one for 1,000): head.weight, head.bias." in said
        assert "pos_embed was resized from 1 × " in said
        assert "logistic regression" in said
    figures = results()["conversion"]["accuracy"]
    assert figures["before"] > 0.5, "the head was fitted to the photos before it teaches"
    model = polymix.load_pretrained("out")
    assert model(torch.randn(2, 3, 48, 48)).shape == (2, 4)
    assert results()["data"]["classes"] == ["ants", "bees", "cats", "dogs"]


def test_classes_without_data(run, fails, place):
    status, out, _ = run("--model", NAME, "--plan", "pom", "--weights", "w.pt", "--classes", "7", "--image-size", "32")
    assert status == 0 and "its outputs mean nothing yet" in out
    same = load_model(NAME, "w.pt", classes=7, size=32).model
    assert torch.equal(same.norm.weight, vit().norm.weight) and same.head.out_features == 7
    fails(*TIMM, "--weights", "w.pt", "--classes", "5", "--out", "two", named="has 4 classes")
    fails("--model", NAME, "--classes", "1", "--out", "two", named="--classes")


@pytest.mark.slow
def test_untrained_weights_do_not_teach(run, fails, place):
    """Refused before any work; with --from-scratch the labels teach alone, and no accuracy of noise is published."""
    fails(*TIMM, "--distill-epochs", "1", named="--from-scratch")
    fails(*TIMM, "--imitate-epochs", "1", named="--from-scratch")
    fails(*TIMM, "--from-scratch", named="--from-scratch")
    fails(*TIMM, "--from-scratch", "--distill-epochs", "1", "--imitate-epochs", "1", named="--imitate-epochs")
    fails(*TIMM, "--weights", "w.pt", "--image-size", "32", "--from-scratch", "--distill-epochs", "1", named="trained")
    assert run(*TIMM, "--image-size", "32")[0] == 0
    assert results()["conversion"]["accuracy"] == {}, "noise was measured"
    assert "model-index" not in Path("out/README.md").read_text()
    words = ("--image-size", "32", "--distill-epochs", "1", "--from-scratch")
    status, _, err = run(*TIMM, *words, "--out", "scratch")
    assert (status, err) == (0, ""), err
    assert list(results("scratch")["conversion"]["accuracy"]) == ["trained"]
    assert "trained from scratch for 1 epoch, on the labels alone" in Path("scratch/README.md").read_text()


@pytest.mark.parametrize(("words", "named"), [
    (("--lengths", "nan"), "--lengths"), (("--lengths", "inf"), "--lengths"), (("--lengths", "1e9"), "--lengths"),
    (("--seconds", "nan"), "--seconds"), (("--seconds", "inf"), "--seconds"), (("--precision", "int4"), "--precision"),
    (("--precision", "bf16-mixed"), "--distill-epochs"), (("--lora", "4"), "--distill-epochs"),
    (("--push-to-hub", "no name"), "--push-to-hub"), (("--license", "Mine!"), "--license"), (("--base-model", "a/b/c"), "--base-model"),
    (("--data", "photos", "--distill-epochs", "1", "--precision", "16-mixed"), "CPU"), (("--classes", "9"), "--classes"),
    (("--data", "photos", "--distill-epochs", "1", "--lora", "999"), "--lora"),
])  # fmt: skip
def test_a_refusal_leaves_nothing(fails, place, words, named):
    (place / "mine.py").write_text(
        "import timm\ndef vit():\n    return timm.create_model('test_vit', img_size=32, num_classes=4)\n"
    )
    fails("--model", "mine.py:vit", "--plan", "pom", *words, named=named)


def refuse(*_, **__):
    raise OptionError("input", "something odd", "something else", "Change it.")


@pytest.mark.slow
def test_a_late_refusal_leaves_nothing_either_unless_training_would_be_lost(run, fails, place, monkeypatch):
    """Also in a folder with a hidden file, which is the user's."""
    (place / "out" / ".git").mkdir(parents=True)
    (place / "out" / ".git" / "HEAD").write_text("mine")
    trained = (*TIMM, "--weights", "w.pt", "--image-size", "32")
    monkeypatch.setattr("polymix.workflows.convert.run.assess", refuse)
    fails(*trained, named="something odd")
    fails(*trained, "--out", "new", named="something odd")
    assert run(*trained, "--distill-epochs", "1")[0] == 2
    assert Path("out/checkpoints/fine-tuning/last.ckpt").exists(), "hours of training are not thrown away"


# Folders


def hf(classes=10):
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, num_labels=classes, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def test_a_folder_gets_a_new_head_and_other_positions(place, no_progress_bars):
    model = hf()
    model.save_pretrained("hf")
    timm.models.save_for_hf(vit(num_classes=10), "hub")
    names = ["ants", "bees", "cats", "dogs"]
    for folder in ("hf", "hub"):
        source = load_model(folder)
        assert refit(source, 10, None) is source, "what fits already is left alone"
        other = refit(source, 4, 64, names)
        assert other.loaded.classes == (10, 4) and len(other.loaded.resized) == 1
        with torch.no_grad():
            logits = other.model(torch.randn(1, 3, 64, 64))
        assert getattr(logits, "logits", logits).shape == (1, 4)
    assert refit(load_model("hf"), 4, None, names).model.config.id2label == dict(enumerate(names))
    with pytest.raises(OptionError, match="multiple of the patch size"):
        refit(load_model("hf"), None, 65)


# From Python


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema", "model", "state_dict", ""])
def test_checkpoints_of_timm_and_deit(place, key):
    """Averaged weights come first; the options that are stored beside them are no obstacle, and are not run."""
    model, state = vit(num_classes=4), vit(num_classes=4).state_dict()
    state["norm.weight"] = torch.full_like(state["norm.weight"], 3.0)
    content = {"epoch": 3, "args": argparse.Namespace(lr=0.1), key: state} if key else state
    if key.endswith("_ema"):
        content["state_dict"] = model.state_dict()
    torch.save(content, "c.pth")
    done = polymix.load_weights(model, "c.pth")
    assert torch.equal(model.norm.weight, state["norm.weight"])
    assert done.key == key and (key.endswith("_ema") == ("Read the weights under" in str(done)))


def test_a_model_is_not_changed_by_weights_that_do_not_fit(place):
    model = vit(num_classes=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(OptionError, match="adapt=True"):
        polymix.load_weights(model, "w.pt")
    torch.save({**vit().state_dict(), "norm.weight": torch.zeros(3)}, "bad.pt")
    with pytest.raises(OptionError, match=r"norm\.weight"):
        polymix.load_weights(model, "bad.pt", adapt=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    done = polymix.load_weights(model, "w.pt", adapt=True)
    assert done.new_head == ("head.weight", "head.bias") and done.classes == (1000, 4)
    assert torch.equal(model.head.weight, before["head.weight"])
    without = {name: value for name, value in vit().state_dict().items() if not name.startswith("head.")}
    torch.save(without, "headless.pt")
    assert polymix.load_weights(model, "headless.pt", adapt=True).classes == (None, 4)


def test_swin_with_another_window(place):
    """Tables of relative positions are resized, and indices that the model computes are its own."""
    build = {"embed_dim": 16, "depths": (2,), "num_heads": (2,), "num_classes": 3}
    large = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, window_size=7, **build)
    small = timm.create_model("swin_tiny_patch4_window7_224", img_size=32, window_size=4, **build)
    state = {**large.state_dict(), "layers.0.blocks.1.attn.relative_position_index": torch.zeros(49, 49).long()}
    torch.save(state, "swin.pt")
    done = polymix.load_weights(small, "swin.pt", adapt=True)
    assert {name.rpartition(".")[2] for name, *_ in done.resized} == {"relative_position_bias_table"}
    assert small.eval()(torch.randn(1, 3, 32, 32)).isfinite().all()


def test_positions_are_timms_own(place):
    """Against timm's function, for a class token and none; a constant stays, a table keeps its last rows."""
    value = torch.randn(1, 1 + 16, 8)
    expected = timm.layers.resample_abs_pos_embed(value, new_size=(6, 6), num_prefix_tokens=1)
    torch.testing.assert_close(resample_positions("pos_embed", value, (1, 37, 8)), expected)
    even = resample_positions("pos_embed", torch.ones(1, 16, 2), (1, 9, 2))
    torch.testing.assert_close(even, torch.ones(1, 9, 2))
    table = torch.cat((torch.zeros(49, 2), torch.full((3, 2), 5.0)))
    other = resample_positions("a.relative_position_bias_table", table, (84, 2))
    assert torch.equal(other[81:], table[49:]) and not other[:81].any()
    for name, old, new in (("pos_embed", (1, 17, 8), (1, 40, 8)), ("pos_embed", (1, 17, 8), (1, 37, 9)), ("norm", (1, 17, 8), (1, 37, 8))):  # fmt: skip
        assert resample_positions(name, torch.zeros(old), new) is None


def test_a_head_is_fitted_to_labels(place):
    """Separable features are separated; nothing but the head changes; what is no label is refused."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.Linear(8, 3))
    inputs, labels = torch.randn(60, 3, 2, 2), torch.arange(60) % 3
    inputs[:, 0, 0] += 6 * torch.nn.functional.one_hot(labels, 3)[:, :2]
    body = model[1].weight.clone()
    loss = fit_head(model, [(inputs[:30], labels[:30]), (inputs[30:], labels[30:])])
    assert (model(inputs).argmax(1) == labels).float().mean() > 0.95 and loss < 0.2
    assert torch.equal(model[1].weight, body)
    with pytest.raises(DataError, match="labels from 0 to 2"):
        fit_head(model, [(inputs, labels + 1)])
    with pytest.raises(OptionError, match="linear"):
        fit_head(model, [(inputs, labels)], layers=["0"])


def test_only_weights_are_read(place):
    class Evil:
        def __reduce__(self):
            return open, ("owned", "w")

    torch.save({"model": vit().state_dict(), "args": Evil()}, "evil.pt")
    with pytest.raises(OptionError, match="more than tensors"):
        read_state(Path("evil.pt"))
    assert not Path("owned").exists()
