"""Segmentation: augmentation, the hosts, the optimizer of the paper, sliding windows, and a run to predictions."""

import json
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from PIL import Image
from torch import nn

from polymix import TokenMixer
from polymix.cli import main
from polymix.domains.segment.augment import distort, vary
from polymix.domains.segment.hosts import HEAD_PREFIXES, PatchSegmenter, build, segformer
from polymix.domains.segment.metrics import confusion_of, predict_picture
from polymix.domains.segment.recipe import SegmentRecipe
from polymix.domains.segment.task import SegmentTask, polynomial
from polymix.errors import DataError, OptionError
from polymix.train.data.label_maps import pixel_losses, windows
from polymix.train.rows import check_rows
from polymix.train.run import train
from polymix.train.saved import SavedRun
from polymix.train.task import Process

HOST = Process()


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("segment") / "out"
    train(SegmentRecipe.tiny(), out)
    return out


# Loss and augmentation


def test_the_loss_leaves_ignored_pixels_out():
    logits = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(3, (2, 4, 4), generator=torch.Generator().manual_seed(1))
    labels[0] = 255
    expected = nn.functional.cross_entropy(logits[1:], labels[1:])
    assert torch.allclose(pixel_losses(logits, labels, 255) / 16, expected)
    assert pixel_losses(logits, torch.full_like(labels, 255), 255) == 0


def sample(height=20, width=30):
    labels = torch.arange(height * width).reshape(height, width) % 7
    return (labels * 30).to(torch.uint8).expand(3, -1, -1), labels.to(torch.uint8)


def test_picture_and_labels_are_cropped_and_mirrored_alike():
    pixels, labels = sample()
    recipe = SegmentRecipe(crop=16, flip=True)
    random.seed(3)
    variants = [vary(pixels, labels, recipe) for _ in range(8)]
    for picture, truth in variants:
        assert picture.shape == (3, 16, 16) and torch.equal(picture[0], truth * 30)
    slopes = {int(truth[0, 1]) - int(truth[0, 0]) for _, truth in variants}
    assert slopes & {1, -6} and slopes & {-1, 6}, "both mirrored and not"


def test_small_pictures_are_padded_by_pixels_that_do_not_count():
    pixels, labels = sample(8, 12)
    picture, truth = vary(pixels, labels, SegmentRecipe(crop=16))
    assert torch.equal(truth[:8, :12], labels) and truth[8:].eq(255).all() and truth[:, 12:].eq(255).all()
    assert picture[:, 8:].eq(128).all()


def test_pictures_are_resized_by_the_scale_and_the_short_side():
    pixels, labels = sample(10, 40)
    shown = []
    for factor, side in ((0.5, None), (2.0, None), (1.0, 20), (0.5, 20)):
        recipe = SegmentRecipe(crop=128, scale=(factor, factor), short_side=side)
        shown.append(tuple((vary(pixels, labels, recipe)[1] != 255).nonzero().amax(0).add(1).tolist()))
    assert shown == [(5, 20), (20, 80), (20, 80), (10, 40)]


def test_no_class_fills_a_crop_where_others_are_to_be_had():
    labels = torch.zeros(64, 64, dtype=torch.uint8)
    labels[:, 32:] = 1
    random.seed(0)
    shares = [vary(labels.expand(3, -1, -1), labels, SegmentRecipe(crop=16, largest_share=0.75))[1].float().mean()
              for _ in range(30)]  # fmt: skip
    assert sum(0.25 <= share <= 0.75 for share in shares) > 24
    random.seed(0)
    free = [vary(labels.expand(3, -1, -1), labels, SegmentRecipe(crop=16))[1].float().mean() for _ in range(30)]
    assert sum(0.25 <= share <= 0.75 for share in free) < 15


def test_distortion_changes_colours_within_its_bounds():
    random.seed(0)
    pixels = torch.tensor([200, 100, 50], dtype=torch.uint8)[:, None, None].expand(3, 2, 2)
    samples = torch.stack([distort(pixels)[:, 0, 0].float() for _ in range(200)])
    assert 0.02 < (samples == pixels[:, 0, 0]).all(1).float().mean() < 0.15, "one in 16 keeps its colours"
    assert samples[:, 0].max() == 255 and samples[:, 0].min() < 100 and (samples.argmax(1) == 0).float().mean() > 0.9
    monkey = random.getstate()
    random.setstate(monkey)
    again = distort(pixels)
    random.setstate(monkey)
    assert torch.equal(distort(pixels), again)


# The optimizer of the paper


def test_the_paper_preset_has_the_published_numbers():
    recipe = SegmentRecipe.paper()
    assert (recipe.learning_rate, recipe.head_rate, recipe.weight_decay) == (6e-5, 10.0, 0.01)
    assert (recipe.steps, recipe.batch_size, recipe.crop, tuple(recipe.scale)) == (160_000, 16, 512, (0.5, 2.0))
    assert recipe.flip and recipe.distort and recipe.schedule == "polynomial" and recipe.power == 1.0
    assert (recipe.betas, recipe.clip, recipe.final, recipe.decay) == ((0.9, 0.999), None, 0.0, "all_but_norms")
    assert recipe.host == "segformer" and round(recipe.warmup * recipe.steps) == 1500


def test_the_head_learns_faster_and_the_rate_falls_as_a_polynomial():
    recipe = SegmentRecipe.paper().changed(host="segformer", size="tiny", crop=32, steps=100, warmup=0.1, mixer="keep")
    task, model = SegmentTask(recipe), build(recipe, 3)
    optimizer = task.optimizer(model)
    schedule = task.schedule(optimizer)
    rates = {}
    for group in optimizer.param_groups:
        rates |= {id(parameter): (group["initial_lr"], group["weight_decay"]) for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        fast = name.startswith("decode_head.")
        decay = 0.0 if "norm" in name else 0.01  # as custom_keys in the authors' configuration
        assert rates[id(parameter)] == (pytest.approx(6e-4 if fast else 6e-5), decay), name
    for _ in range(50):
        optimizer.step()
        schedule.step()
    assert {round(group["lr"] / group["initial_lr"], 6) for group in optimizer.param_groups} == {0.5}
    assert polynomial(0, 100, 0.1, 0.0, 1.0) == pytest.approx(0.1) and polynomial(99, 100, 0.1, 0.0, 1.0) < 0.011
    assert polynomial(80, 100, 0.1, 0.0, 0.5) == pytest.approx(0.2**0.5)
    assert polynomial(100, 100, 0.1, 0.3, 2.0) == pytest.approx(0.3)


# Hosts


def test_only_mixers_join_squares_of_the_small_host():
    recipe = SegmentRecipe(mixer="linear_floor", crop=32, dim=16, depth=2)
    model = build(recipe, 4).eval()
    image = torch.zeros(1, 3, 32, 32)
    other = image.clone()
    other[:, :, 8:16, 8:16] = 1.0
    changed = (model(image) != model(other)).any(1)[0]
    assert changed[8:16, 8:16].any() and changed.sum() == changed[8:16, 8:16].sum()
    mixes = build(recipe.changed(mixer="softmax"), 4).eval()
    assert (mixes(image) != mixes(other)).any(1)[0, 24:, 24:].any()


@pytest.mark.parametrize(("host", "mixer", "plan"), [
    ("efficientvit", "pom", None), ("segformer", "padre", None), ("segformer", "linear_floor", "1:1"),
    ("efficientvit", "keep", None), ("patches", "padre", "1:1"),
])  # fmt: skip
def test_hosts_take_mixers_and_learn(host, mixer, plan):
    sizes = {"patches": {"dim": 16, "depth": 2}, "segformer": {"size": "tiny"}}.get(host, {})
    recipe = SegmentRecipe(host=host, mixer=mixer, plan=plan, crop=64, **sizes)
    model = build(recipe, 5).train()
    images, labels = torch.randn(2, 3, 64, 64), torch.randint(5, (2, 64, 64))
    assert model(images).shape == (2, 5, 64, 64)
    pixel_losses(model(images), labels, 255).backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    kinds = {type(module).__name__ for module in model.modules()}
    mixers = {module.name for module in model.modules() if isinstance(module, TokenMixer)}
    if mixer == "keep":
        assert not mixers and "LiteMLA" in kinds
    else:
        assert mixers == ({mixer, "softmax"} if host == "patches" and plan else {mixer}) and "LiteMLA" not in kinds
    if host == "segformer":
        assert ("SegformerAttention" in kinds) == (plan is not None)


def test_the_head_of_efficientvit_seg_has_its_sizes():
    recipe = SegmentRecipe(host="efficientvit", mixer="keep", crop=64)
    head = build(recipe, 19).head
    assert [part[0].in_channels for part in head.inputs] == [32, 64, 128]
    count = sum(parameter.numel() for parameter in head.parameters())
    inputs = (32 + 64 + 128) * 32 + 3 * 64
    block = 2 * 32 * 128 + 9 * 128 + 2 * (128 + 128 + 32)
    assert count == inputs + block + 32 * 128 + 256 + 128 * 19 + 19


def test_segformer_b0_has_its_published_parameters():
    model = build(SegmentRecipe(host="segformer", mixer="keep", crop=64), 150)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == 3.8


def test_a_converted_segformer_is_where_a_run_starts(tmp_path):
    import polymix
    from polymix.train.initial import load_weights

    theirs = segformer("tiny", 4).eval()
    polymix.convert(theirs, "pom", input=torch.zeros(1, 3, 64, 64))
    polymix.save_pretrained(theirs, tmp_path)
    recipe, image = SegmentRecipe(host="segformer", size="tiny", mixer="pom", crop=64), torch.randn(1, 3, 64, 64)
    model = build(recipe, 4).eval()
    load_weights(model, tmp_path, HEAD_PREFIXES)
    expected = nn.functional.interpolate(theirs(image).logits, (64, 64), mode="bilinear")
    assert torch.allclose(model(image), expected, atol=1e-6)
    said = []
    load_weights(build(recipe, 6), tmp_path, HEAD_PREFIXES, said.append)
    assert "decode_head.classifier.weight" in said[0]


@pytest.mark.parametrize(("options", "named"), [
    ({"mixer": "keep"}, "`mixer`"), ({"crop": 60}, "`crop`"), ({"host": "segformer", "crop": 40}, "`crop`"),
    ({"stride": 99}, "`stride`"), ({"scale": (2, 1)}, "`scale`"), ({"scale": 1.0}, "`scale`"), ({"dim": 30}, "`dim`"),
    ({"classes": 1}, "`classes`"), ({"host": "unet"}, "`host`"), ({"largest_share": 0}, "`largest_share`"),
    ({"host": "segformer", "mixer": "keep", "plan": "1:1"}, "`plan`"), ({"classes": 5}, "`classes`"), ({"crop": 24}, "`crop`"),
    ({"host": "efficientvit", "backbone": "nope", "crop": 64}, "`backbone`"),
    ({"host": "efficientvit", "backbone": "deit_tiny_patch16_224", "crop": 64}, "`backbone`"),
    ({"short_side": 0}, "`short_side`"),
])  # fmt: skip
def test_options_that_contradict_are_refused_before_any_work(options, named):
    with pytest.raises(OptionError, match=named):
        SegmentTask(SegmentRecipe(**options)).check()


# Sliding windows


class Colours(nn.Module):
    """The class of a pixel is its red value: what any correct tiling must give back."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, images):
        self.sizes.append(tuple(images.shape))
        red = ((images[:, 0] + 1) * 127.5).round().long()
        return 20.0 * nn.functional.one_hot(red, 256).permute(0, 3, 1, 2).float()


def test_windows_cover_a_picture_with_a_step():
    assert windows(10, 4, 3) == [0, 3, 6] and windows(11, 4, 3) == [0, 3, 6, 7] and windows(3, 4, 3) == [0]
    assert windows(128, 24) == [0, 24, 48, 72, 96, 104]


@pytest.mark.parametrize("size", [(37, 21), (16, 16), (5, 90), (3, 4), (64, 16)])
@pytest.mark.parametrize("stride", [None, 16, 5])
def test_sliding_windows_give_every_pixel_its_class_in_bounded_memory(size, stride):
    pixels = torch.randint(0, 250, (3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    model, recipe = Colours(), SegmentRecipe(crop=16, stride=stride, batch_size=3)
    assert torch.equal(predict_picture(model, pixels, recipe, HOST), pixels[0])
    assert all(shape[0] <= 3 and shape[2:] == (16, 16) for shape in model.sizes)


def test_overlapping_windows_add_their_probabilities():
    class Place(nn.Module):
        """Sure of class 1 in the left half of a window, slightly for class 0 in the right half."""

        def forward(self, images):
            logits = torch.zeros(len(images), 2, 8, 8)
            logits[:, 1, :, :4], logits[:, 0, :, 4:] = 9.0, 0.1
            return logits

    prediction = predict_picture(
        Place(), torch.zeros(3, 8, 16, dtype=torch.uint8), SegmentRecipe(crop=8, stride=4), HOST
    )
    assert prediction[0].tolist() == [1] * 12 + [0] * 4


def test_the_height_of_a_picture_does_not_change_what_is_kept():
    from polymix.measure.timing import peak_memory

    class One(nn.Module):
        def forward(self, images):
            return images.new_zeros(len(images), 50, 32, 32)

    recipe = SegmentRecipe(crop=32, batch_size=2)
    peaks = []
    for height in (64, 1024):
        pixels = torch.zeros(3, height, 64, dtype=torch.uint8)
        peaks.append(peak_memory(lambda p=pixels: predict_picture(One(), p, recipe, HOST), "cpu"))
    assert peaks[1] < peaks[0] + 5 * 1024 * 64 + 2**16, peaks  # padded pixels and classes, bytes of each


def test_a_picture_resized_by_the_short_side_gets_classes_of_its_own_size():
    pixels = torch.full((3, 20, 30), 7, dtype=torch.uint8)
    recipe = SegmentRecipe(crop=16, short_side=16)
    model = Colours()
    assert predict_picture(model, pixels, recipe, HOST).eq(7).all() and len(model.sizes) == 1


def test_the_metric_counts_whole_pictures_of_any_size():
    test = [(torch.full((3, h, w), k, dtype=torch.uint8), torch.full((h, w), k, dtype=torch.uint8))
            for h, w, k in ((16, 16, 1), (16, 16, 2), (40, 20, 1), (16, 16, 255))]  # fmt: skip
    few = SimpleNamespace(test=test, classes=tuple(map(str, range(256))))
    confusion = confusion_of(Colours(), few, SegmentRecipe(crop=16, batch_size=2), HOST)
    assert confusion.counts[1, 1] == 256 + 800 and confusion.counts[2, 2] == 256 and confusion.counts.sum() == 1312


# Runs


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments), "--threads", "1"])
    return stop.value.code or 0, *capsys.readouterr()


def test_a_run_leaves_rows_pictures_and_its_control(run_folder):
    content = json.loads((run_folder / "results.json").read_text())
    mixed, floor = check_rows(content, "results.json")
    assert (mixed["mixer"], floor["mixer"]) == ("pom", "linear_floor") and list(mixed["metrics"]) == [
        "miou",
        "accuracy",
    ]
    assert mixed["directions"] == {"miou": "up", "accuracy": "up"} and mixed["unit"] == "images"
    assert content["pictures"] == ["predictions.png"] and (run_folder / "predictions.png").stat().st_size > 5000


def test_the_model_predicts_and_is_measured(run_folder, tmp_path, capsys):
    picture = numpy.random.default_rng(0).integers(0, 255, (40, 70, 3), dtype=numpy.uint8)
    Image.fromarray(picture).save(tmp_path / "seen.jpg")
    code, _, _ = command(capsys, "predict", run_folder, tmp_path / "seen.jpg", "--out", tmp_path / "out")
    row = json.loads((tmp_path / "out" / "predictions.json").read_text())["results"][0]
    with Image.open(tmp_path / "out" / row["map"]) as labels, Image.open(tmp_path / "out" / row["picture"]) as shown:
        classes = numpy.asarray(labels)
        assert classes.shape == (40, 70) and shown.size == (70, 40) and classes.max() < 10
    assert {row["picture"], row["map"]}.isdisjoint({"seen.jpg", "seen.png"}), "a user's picture may have this name"
    assert code == 0 and sum(row["shares"].values()) == pytest.approx(1, abs=1e-3) and row["largest"] in row["shares"]
    code, text, _ = command(capsys, "evaluate", run_folder)
    assert code == 0 and "miou" in text and "4 pictures" in text
    results = json.loads((run_folder / "results.json").read_text())
    again = SavedRun.of(run_folder).measure()["metrics"]
    assert again["miou"] == pytest.approx(results["rows"][0]["metrics"]["miou"])


def test_more_classes_than_the_models_head_are_named_by_file(run_folder, tmp_path):
    for split in ("train", "val"):
        for what, values in (("images", numpy.zeros((8, 8, 3))), ("labels", numpy.arange(64).reshape(8, 8) % 11)):
            (tmp_path / split / what).mkdir(parents=True)
            Image.fromarray(values.astype(numpy.uint8)).save(tmp_path / split / what / "p.png")
    with pytest.raises(DataError, match=r"p.png: label 10 at row 1, column 2: .* of 10 classes"):
        SavedRun.of(run_folder).measure(str(tmp_path), layout="folders")


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    recipe = SegmentRecipe.tiny().changed(control=False, flip=True, distort=True, scale=(0.5, 2.0), checkpoint_every=2)
    train(recipe, tmp_path / "whole")

    class Stop(Exception):
        pass

    original, calls = SegmentTask.sums, []

    def sums(self, model, batch):
        calls.append(batch)
        if len(calls) == 4:
            raise Stop
        return original(self, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(SegmentTask, "sums", sums)
        with pytest.raises(Stop):
            train(recipe, tmp_path / "cut")
    texts = []
    train(recipe, tmp_path / "cut", resume=True, say=texts.append)
    first, second = (torch.load(tmp_path / name / "model.pt") for name in ("whole", "cut"))
    assert any("from 2" in text for text in texts) and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
def test_a_model_starts_from_another_with_other_classes(run_folder, tmp_path):
    said = []
    recipe = SegmentRecipe.tiny().changed(question="which", init=str(run_folder), control=False)
    train(recipe, tmp_path / "out", say=said.append)
    assert any("Fresh weights for head.classify" in text for text in said)
    assert isinstance(SavedRun.of(tmp_path / "out").load(), PatchSegmenter)
