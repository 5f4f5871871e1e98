"""Detection: the made scenes, the head's targets and losses, and a run from data to predictions."""

import json
from types import SimpleNamespace

import pytest
import torch

from polymix.cli import main
from polymix.domains.detect.dense import DenseDetector
from polymix.domains.detect.losses import assign, dense_losses
from polymix.domains.detect.metrics import choose
from polymix.domains.detect.recipe import DetectRecipe
from polymix.domains.detect.task import DetectTask
from polymix.errors import DataError, OptionError
from polymix.mixers.spec import parse_mixer
from polymix.train.data import scenes
from polymix.train.data.boxes.data import load, read, synthetic
from polymix.train.data.boxes.fitting import fit
from polymix.train.data.boxes.precision import average_precision
from polymix.train.data.pictures import read_picture
from polymix.train.data.problems import Problems
from polymix.train.initial import load_weights
from polymix.train.run import train
from polymix.train.saved import SavedRun
from tests.domains.box_files import write_coco


def test_scenes_are_the_same_for_a_seed_and_ask_what_they_say():
    first, again = (list(scenes.make(12, seed=3)) for _ in range(2))
    other = next(iter(scenes.make(1, seed=4)))
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0]["image"], other["image"])
    what = list(scenes.make(12, seed=3, question="what"))
    for scene, plain in zip(first, what, strict=True):
        order = scene["digits"].argsort()
        assert scene["labels"][order].tolist() == [0, 1, 2] and plain["labels"].tolist() == scene["digits"].tolist()
        assert scene["masks"].flatten(1).sum(1).min() > 10
    assert first[0]["image"].shape == (3, 64, 64) and scenes.classes_of("which") == ("smallest", "middle", "largest")


def test_the_digit_at_the_top_left_says_which_one_is_the_only_object(monkeypatch):
    digits, labels = scenes._digits()
    marked = (labels.float()[:, None, None] + 1).expand_as(digits) / 20  # a digit's ink tells its number
    monkeypatch.setattr(scenes, "_digits", lambda: (marked, labels))
    for scene in scenes.make(20, question="same", size=32, seed=1):
        sample, mask = scene["image"][:, :8, :8].float() / 255, scene["masks"]
        assert sample.mean().item() * 20 - 1 == pytest.approx(scene["digits"][0].item(), abs=0.1)
        assert mask.shape == (1, 32, 32) and scene["labels"].tolist() == [0] and not mask[0, :8, :8].any()
        assert len(set(scene["digits"].tolist())) == scenes.CHOICES
        if scene["digits"][0] >= 7:  # more ink than the mask's threshold
            rows, columns = mask[0].any(1).nonzero(), mask[0].any(0).nonzero()
            assert len(rows) == len(columns) == 8 and rows[0] % 8 == columns[0] % 8 == 0
    with pytest.raises(OptionError, match="32"):
        next(scenes.make(1, question="same", size=16))


@pytest.mark.parametrize("size", [32, 128])
def test_the_bar_at_the_left_says_the_class_of_the_digits_at_the_right(size):
    scenes_of_both = [
        *scenes.make(30, question="bar", size=size),
        *scenes.make(30, question="bar", size=size, test=True),
    ]
    for scene in scenes_of_both:
        bar = scene["image"][:, :, : size // 8].float() / 255
        green = bool((bar == torch.tensor([0.0, 1.0, 0.0])[:, None, None]).all())
        magenta = bool((bar == torch.tensor([1.0, 0.0, 1.0])[:, None, None]).all())
        assert green != magenta and scene["labels"].tolist() == [int(magenta)] * 3
        assert scene["masks"].any((1, 2)).all() and not scene["masks"][..., : 3 * size // 4].any()
    assert scenes.classes_of("bar") == ("green", "magenta")
    with pytest.raises(OptionError, match="size"):
        next(scenes.make(1, question="bar", size=32, sides=(9, 9)))
    assert 15 < sum(int(scene["labels"][0]) for scene in scenes_of_both) < 45, "one class is as frequent as the other"


def test_scenes_are_no_larger_than_the_photographs_and_grow_to_larger_images(tmp_path):
    """Sizes of the paper preset used to ask for a part of a photograph that does not exist."""
    with pytest.raises(OptionError, match="from 52 to 128"):
        next(scenes.make(1, size=256, test=True))
    whole = next(scenes.make(1, size=scenes.MAX_SIDE, test=True))
    assert whole["image"].shape == (3, 128, 128) and whole["masks"].any((1, 2)).all()
    recipe = DetectRecipe(image_size=256, question="what", scenes=1, test_scenes=1)
    data = load(recipe, tmp_path, print)
    for part in (data.train, data.test):
        image, target = part[0]
        assert image.shape == (3, 256, 256) and image[:, -8:, -8:].any(), "grown, not padded"
        assert target["boxes"].max() <= 256 and (target["boxes"][:, 2:] - target["boxes"][:, :2]).min() > 16


def test_only_the_mixers_join_tokens_of_the_default_detector():
    def logits(stem, mixer, images):
        torch.manual_seed(0)
        options = {"image_size": 32, "classes": 1, "dim": 16, "stem": stem}
        with torch.no_grad():
            return DenseDetector([parse_mixer(mixer)[1]], **options)(images)[0][0, :, 0]

    assert DetectRecipe().stem_of_host == "patches" and DetectRecipe(question="what").stem_of_host == "convolutions"
    assert DetectRecipe(data="photos").stem_of_host == "convolutions"
    images = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    other = images.clone()
    other[..., :8, :8] = -other[..., :8, :8]
    moved = {(stem, mixer): (logits(stem, mixer, images) - logits(stem, mixer, other)).abs() > 1e-7
             for stem in ("patches", "convolutions") for mixer in ("linear_floor", "softmax")}  # fmt: skip
    assert moved["patches", "linear_floor"].nonzero().tolist() == [[0]], "no other token sees those pixels"
    assert moved["patches", "softmax"].sum() > 8 and moved["convolutions", "linear_floor"].sum() > 8


def test_a_plan_puts_the_mixer_where_it_says():
    model = DetectTask(DetectRecipe(mixer="pom", plan="1:1", depth=4, dim=16)).build(SimpleNamespace(classes=range(1)))
    assert [type(block.mixer).__name__ for block in model.blocks] == [
        "PomMixer",
        "SoftmaxMixer",
        "PomMixer",
        "SoftmaxMixer",
    ]
    with pytest.raises(OptionError, match="blocks"):
        DetectTask(DetectRecipe(plan="layers.9=pom")).check()


def test_no_digit_of_a_test_scene_is_in_training(monkeypatch):
    digits, labels = scenes._digits()
    marked = torch.arange(len(digits)).float()[:, None, None].expand_as(digits) / 2000
    used = []
    monkeypatch.setattr(scenes, "_digits", lambda: (marked, labels))
    monkeypatch.setattr(
        scenes, "interpolate", lambda x, **k: used.append(round(x.max().item() * 2000)) or x.new_ones(1, 1, *k["size"])
    )
    list(scenes.make(150))
    training, used[:] = set(used), []
    list(scenes.make(80, test=True))
    assert len(training) > 250 and len(set(used)) > 120 and not training & set(used)


def test_the_default_data_is_read_by_the_reader_of_coco(tmp_path):
    synthetic(tmp_path, 5, question="which", count=3, tests=2)
    problems = Problems()
    train_pictures, test, classes = read(tmp_path, "coco", problems)
    assert not problems and (len(train_pictures), len(test), classes) == (3, 2, scenes.RANKS)
    scene = next(iter(scenes.make(1, seed=5)))
    target = train_pictures[0].target(masks=True)
    assert torch.equal(target["masks"], scene["masks"]) and torch.equal(train_pictures[0].pixels(), scene["image"])
    assert target["labels"].tolist() == scene["labels"].tolist()
    assert target["boxes"][0].tolist() == [*scene["masks"][0].nonzero().amin(0).flip(0).tolist(),
                                           *(scene["masks"][0].nonzero().amax(0).flip(0) + 1).tolist()]  # fmt: skip


def test_tokens_answer_for_the_object_whose_centre_is_near():
    rows, columns = torch.meshgrid(torch.arange(4) + 0.5, torch.arange(4) + 0.5, indexing="ij")
    centres = torch.stack((columns, rows), -1).view(-1, 2) * 8
    boxes = torch.tensor([[0.0, 0, 32, 32], [1, 1, 7, 7], [25, 26, 27, 28]])
    assigned = assign(centres, boxes, 8).view(4, 4)
    assert assigned[1:3, 1:3].eq(0).all() and assigned[0, 0] == 1 and assigned[3, 3] == 2, "small ones have a token too"
    assert (assigned >= 0).sum() == 6 and assign(centres, boxes[:0], 8).eq(-1).all()


def test_the_loss_falls_to_the_truth_and_leaves_crowds_out():
    rows, columns = torch.meshgrid(torch.arange(4) + 0.5, torch.arange(4) + 0.5, indexing="ij")
    centres = torch.stack((columns, rows), -1).view(-1, 2) * 8
    boxes = torch.tensor([[2.0, 3, 14, 15], [16, 16, 32, 32]])
    target = {"boxes": boxes, "labels": torch.tensor([1, 0]), "iscrowd": torch.tensor([False, True])}
    logits, found = torch.full((1, 16, 2), -12.0), boxes[:1].expand(1, 16, 4)
    which = assign(centres, boxes[:1], 8)
    logits[0, which == 0, 1] = 12.0
    best = dense_losses(logits, found, centres, 8, [target])
    assert best < 1e-3
    logits[0, 15] = 12.0  # inside the crowd
    assert torch.equal(dense_losses(logits, found, centres, 8, [target]), best)
    logits[0, 3] = 12.0
    assert dense_losses(logits, found, centres, 8, [target]) > 1
    none = {"boxes": boxes[:0], "labels": torch.zeros(0).long(), "iscrowd": torch.zeros(0).bool()}
    assert dense_losses(logits, found, centres, 8, [none]).isfinite()


def test_choose_drops_the_weaker_of_two_boxes_of_a_class():
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 30, 30]])
    logits = torch.tensor([[3.0, -9], [2, 1], [-9, 0]])
    chosen = choose(logits, boxes)
    strong = chosen["scores"] > 0.1
    assert chosen["labels"][strong].tolist() == [0, 1, 1]
    assert chosen["boxes"][strong].tolist() == [[0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 30, 30]]


def test_fit_keeps_the_shape_and_moves_the_boxes():
    pixels = torch.randint(0, 255, (3, 20, 40), dtype=torch.uint8)
    target = {"boxes": torch.tensor([[10.0, 5, 30, 15]]), "area": torch.tensor([200.0]),
              "masks": torch.ones(1, 20, 40, dtype=torch.bool)}  # fmt: skip
    image, found = fit(pixels, target, 32)
    assert image.shape == (3, 32, 32) and image[:, 16:].eq(0).all()
    assert found["boxes"].tolist() == [[8, 4, 24, 12]] and found["area"].item() == pytest.approx(128)
    assert found["masks"].sum() == 16 * 32


def test_average_precision_of_perfect_and_of_shifted_boxes():
    pytest.importorskip("pycocotools", reason="untested: average precision")
    truth = {"boxes": torch.tensor([[0.0, 0, 10, 10], [20, 20, 40, 40]]), "labels": torch.tensor([0, 1]),
             "iscrowd": torch.tensor([False, False]), "area": torch.tensor([100.0, 400.0])}  # fmt: skip
    mask = torch.zeros(2, 50, 50, dtype=torch.bool)
    mask[0, :10, :10] = mask[1, 20:40, 20:40] = True
    exact = {**truth, "scores": torch.tensor([0.9, 0.8]), "masks": mask}
    precision = average_precision([exact], [{**truth, "masks": mask}], masks=True)
    assert precision["AP"] == precision["mask_AP"] == 1 and precision["classes"] == {0: 1.0, 1: 1.0}
    assert precision["AP_large"] is None is precision["mask_AP_medium"], "no object of that size: not -1"
    shifted = {**exact, "boxes": truth["boxes"] + torch.tensor([3.0, 0, 3, 0])}  # IoU 7/13 and 17/23
    precision = average_precision([shifted], [truth])
    assert precision["AP50"] == 1 and precision["AP75"] == 0 and precision["AP"] == pytest.approx((0.1 + 0.5) / 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("detect") / "run"
    train(DetectRecipe.tiny().changed(mixer="pom", control=False), out)
    return out


def test_a_run_measures_draws_and_predicts(run, tmp_path):
    row = json.loads((run / "results.json").read_text())["rows"][0]
    assert row["task"] == "detect" and row["mixer"] == "pom" and {"AP", "AP50", "AP75"} <= set(row["metrics"])
    assert row["directions"]["AP"] == "up" and (run / "samples.png").stat().st_size > 10_000
    saved = SavedRun.of(run)
    assert {"metrics", "classes"} <= set(saved.measure())
    picture = next((run / "data").glob("digits-*/val/*.png"))
    predictions = saved.predict([picture], tmp_path)
    assert (tmp_path / predictions[0]["picture"]).stat().st_size > 1000 and predictions[0]["file"] == str(picture)


def test_the_threshold_is_the_user_s(run, tmp_path, capsys):
    """An untrained detector's scores are low: the picture and the command say so, and the answers have the boxes."""
    picture = next((run / "data").glob("digits-*/val/*.png"))
    with pytest.raises(SystemExit, match="0"):
        main(["predict", str(run), str(picture), "--out", str(tmp_path / "usual")])
    said = " ".join(capsys.readouterr().out.split())
    assert "1 prediction:" in said and "no object reaches a score of 0.3; the best, 'the same', has 0.0" in said
    (usual,) = json.loads((tmp_path / "usual" / "predictions.json").read_text())["results"]
    best = max(thing["score"] for thing in usual["objects"])
    assert 0.01 <= min(thing["score"] for thing in usual["objects"]) <= best < 0.3
    (low,) = SavedRun.of(run).changed([f"threshold={best / 2}"]).predict([picture], tmp_path / "low")
    assert "with a score of at least" in low["answer"]
    drawn = [read_picture(tmp_path / part / row["picture"]) for part, row in (("usual", usual), ("low", low))]
    assert not torch.equal(*drawn), "the boxes of the low threshold are drawn"
    with pytest.raises(OptionError, match="from 0 to 1"):
        SavedRun.of(run).changed(["threshold=2"])
    with pytest.raises(OptionError, match=r"one of the options .*annotations"):  # which changes no measurement
        SavedRun.of(run).measure(options=["threshold=0.1"])


def test_a_run_on_a_json_is_measured_on_other_data(tmp_path):
    """Trained with annotations and images: the same, other ones, and a folder; the control stays off."""
    data = write_coco(tmp_path / "data")
    one = {split: (str(data / "annotations" / f"instances_{split}2017.json"), str(data / f"{split}2017"))
           for split in ("train", "val")}  # fmt: skip
    recipe = DetectRecipe.tiny().changed(mixer="pom", annotations=one["train"][0], images=one["train"][1])
    assert not recipe.wants_control and recipe.source == one["train"][0]
    train(recipe, tmp_path / "run")
    saved = SavedRun.of(tmp_path / "run")
    others = [f"{name}={path}" for name, path in zip(("annotations", "images"), one["val"], strict=True)]
    for numbers in (saved.measure(), saved.measure(str(data)), saved.measure(options=others)):
        assert {"AP", "AP50"} <= set(numbers["metrics"])
    with pytest.raises(OptionError, match="one of the two"):
        saved.measure(str(data), options=others)
    with pytest.raises(OptionError, match="annotations is a json"):
        recipe.changed(layout="voc")


def test_a_run_with_a_question_of_the_default_data_is_measured_on_others(tmp_path):
    classes = [{"id": place, "name": str(place)} for place in range(10)]
    rows = [{"id": 1, "image_id": picture, "category_id": 3, "bbox": [4, 2, 10, 8]} for picture in (7, 30)]
    data = write_coco(tmp_path / "data", categories=classes, annotations=rows)
    (data / "annotations" / "instances_val2017.json").write_text(
        (data / "annotations" / "instances_train2017.json").read_text()
    )
    train(DetectRecipe.tiny().changed(mixer="pom", control=False, question="what", steps=1), tmp_path / "run")
    assert "AP" in SavedRun.of(tmp_path / "run").measure(str(data))["metrics"]


def test_a_run_starts_from_a_detector_of_other_classes(tmp_path):
    before, after = (DetectTask(DetectRecipe(dim=16, depth=1)).build(SimpleNamespace(classes=range(k))) for k in (5, 2))
    torch.save(before.state_dict(), tmp_path / "model.pt")
    said = []
    load_weights(after, tmp_path, DetectTask.fresh, said.append)
    assert torch.equal(before.sides.weight, after.sides.weight) and "label.weight, label.bias" in said[0]


def test_pictures_with_other_classes_are_refused(run, tmp_path):
    write_coco(tmp_path / "data")
    with pytest.raises(DataError, match=r"class 'car' in .*the model's classes|model's classes.*class 'car'"):
        SavedRun.of(run).measure(str(tmp_path / "data"))


def test_options_that_contradict_each_other():
    for options, text in (
        ({"annotations": "a.json"}, "without images"), ({"images": "a"}, "without annotations"),
        ({"data": "a", "annotations": "a", "images": "b"}, "one of the two"),
        ({"image_size": "60"}, "multiple of 16"), ({"question": "who"}, "which"), ({"crops": "true"}, "short_sides"),
        ({"short_sides": "0"}, "an integer of at least 1"), ({"flip": "2"}, "flip"), ({"stem": "vit"}, "patches"),
        ({"host": "detr", "stem": "patches"}, "host=detr"), ({"broken": "hide"}, "refuse"), ({"dim": "60"}, "multiple"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=text):
            DetectRecipe().changed(**options)
    with pytest.raises(OptionError, match="without data"):
        train(DetectRecipe(data="photos", question="what"), "never")
