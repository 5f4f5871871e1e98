"""Detection: the made scenes, the head's targets and losses, and a run from data to predictions."""

import json

import pytest
import torch

from polymix.compat import cure_torchvision
from polymix.errors import DataError, OptionError
from polymix.mixers.spec import parse_mixer
from polymix.tasks import runner, scenes
from polymix.tasks.boxes.fitting import fit
from polymix.tasks.boxes.pictures import Mistakes
from polymix.tasks.boxes.precision import average_precision
from polymix.tasks.detect.data import load, made, read
from polymix.tasks.detect.losses import assign, dense_loss, focal, giou
from polymix.tasks.detect.metrics import choose
from polymix.tasks.detect.model import HEADS, DenseDetector, _model, check
from polymix.tasks.detect.recipe import DetectRecipe
from polymix.tasks.initial import load_weights
from polymix.tasks.saved import SavedRun
from tests.tasks.box_files import write_coco

cure_torchvision()


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
        assert len(set(scene["digits"].tolist())) == scenes.SEARCHED
        if scene["digits"][0] >= 7:  # more ink than the mask's threshold
            rows, columns = mask[0].any(1).nonzero(), mask[0].any(0).nonzero()
            assert len(rows) == len(columns) == 8 and rows[0] % 8 == columns[0] % 8 == 0
    with pytest.raises(OptionError, match="32"):
        next(scenes.make(1, question="same", size=16))


def test_scenes_are_no_larger_than_the_photographs_and_grow_to_larger_images(tmp_path):
    """Sizes of the paper preset used to ask for a part of a photograph that does not exist."""
    with pytest.raises(OptionError, match="from 52 to 128"):
        next(scenes.make(1, size=256, test=True))
    whole = next(scenes.make(1, size=scenes.LARGEST, test=True))
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
    model = _model(DetectRecipe(mixer="pom", plan="1:1", depth=4, dim=16), 1)
    assert [type(block.mixer).__name__ for block in model.blocks] == [
        "PomMixer",
        "SoftmaxMixer",
        "PomMixer",
        "SoftmaxMixer",
    ]
    with pytest.raises(OptionError, match="blocks"):
        check(DetectRecipe(plan="layers.9=pom"))


def test_no_digit_of_a_test_scene_is_in_training(monkeypatch):
    digits, labels = scenes._digits()
    marked = torch.arange(len(digits)).float()[:, None, None].expand_as(digits) / 2000
    used = []
    monkeypatch.setattr(scenes, "_digits", lambda: (marked, labels))
    monkeypatch.setattr(
        scenes, "interpolate", lambda x, **k: used.append(round(x.max().item() * 2000)) or x.new_ones(1, 1, *k["size"])
    )
    list(scenes.make(150))
    train, used[:] = set(used), []
    list(scenes.make(80, test=True))
    assert len(train) > 250 and len(set(used)) > 120 and not train & set(used)


def test_the_default_data_is_read_by_the_reader_of_coco(tmp_path):
    made(tmp_path, 5, question="which", count=3, tests=2)
    mistakes = Mistakes()
    train, test, classes = read(tmp_path, "coco", mistakes)
    assert not mistakes.lines and (len(train), len(test), classes) == (3, 2, scenes.RANKS)
    scene = next(iter(scenes.make(1, seed=5)))
    target = train[0].target(masks=True)
    assert torch.equal(target["masks"], scene["masks"]) and torch.equal(train[0].pixels(), scene["image"])
    assert target["labels"].tolist() == scene["labels"].tolist()
    assert target["boxes"][0].tolist() == [*scene["masks"][0].nonzero().amin(0).flip(0).tolist(),
                                           *(scene["masks"][0].nonzero().amax(0).flip(0) + 1).tolist()]  # fmt: skip


def test_losses_are_torchvisions():
    ops = pytest.importorskip("torchvision.ops", reason="untested: losses against torchvision")
    g = torch.Generator().manual_seed(0)
    corner = torch.rand(2, 9, 2, generator=g) * 10
    a, b = torch.cat((corner, corner + torch.rand(2, 9, 2, generator=g) * 9 + 0.1), -1)
    assert torch.allclose(giou(a, b), ops.generalized_box_iou(a, b).diag(), atol=1e-5)
    x, y = torch.randn(4, 5, generator=g), torch.rand(4, 5, generator=g).round()
    assert torch.allclose(focal(x, y), ops.sigmoid_focal_loss(x, y, reduction="sum"), atol=1e-5)


def test_tokens_answer_for_the_object_whose_centre_is_near():
    rows, columns = torch.meshgrid(torch.arange(4) + 0.5, torch.arange(4) + 0.5, indexing="ij")
    centres = torch.stack((columns, rows), -1).view(-1, 2) * 8
    boxes = torch.tensor([[0.0, 0, 32, 32], [1, 1, 7, 7], [25, 26, 27, 28]])
    found = assign(centres, boxes, 8).view(4, 4)
    assert found[1:3, 1:3].eq(0).all() and found[0, 0] == 1 and found[3, 3] == 2, "small ones have a token too"
    assert (found >= 0).sum() == 6 and assign(centres, boxes[:0], 8).eq(-1).all()


def test_the_loss_falls_to_the_truth_and_leaves_crowds_out():
    rows, columns = torch.meshgrid(torch.arange(4) + 0.5, torch.arange(4) + 0.5, indexing="ij")
    centres = torch.stack((columns, rows), -1).view(-1, 2) * 8
    boxes = torch.tensor([[2.0, 3, 14, 15], [16, 16, 32, 32]])
    target = {"boxes": boxes, "labels": torch.tensor([1, 0]), "iscrowd": torch.tensor([False, True])}
    logits, found = torch.full((1, 16, 2), -12.0), boxes[:1].expand(1, 16, 4)
    which = assign(centres, boxes[:1], 8)
    logits[0, which == 0, 1] = 12.0
    best = dense_loss(logits, found, centres, 8, [target])
    assert best < 1e-3
    logits[0, 15] = 12.0  # inside the crowd
    assert torch.equal(dense_loss(logits, found, centres, 8, [target]), best)
    logits[0, 3] = 12.0
    assert dense_loss(logits, found, centres, 8, [target]) > 1
    none = {"boxes": boxes[:0], "labels": torch.zeros(0).long(), "iscrowd": torch.zeros(0).bool()}
    assert dense_loss(logits, found, centres, 8, [none]).isfinite()


def test_choose_drops_the_weaker_of_two_boxes_of_a_class():
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 30, 30]])
    logits = torch.tensor([[3.0, -9], [2, 1], [-9, 0]])
    found = choose(logits, boxes)
    strong = found["scores"] > 0.1
    assert found["labels"][strong].tolist() == [0, 1, 1]
    assert found["boxes"][strong].tolist() == [[0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 30, 30]]


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
    found = average_precision([exact], [{**truth, "masks": mask}], masks=True)
    assert found["AP"] == found["mask_AP"] == 1 and found["classes"] == {0: 1.0, 1: 1.0}
    assert found["AP_large"] is None is found["mask_AP_medium"], "no object of that size: not -1"
    shifted = {**exact, "boxes": truth["boxes"] + torch.tensor([3.0, 0, 3, 0])}  # IoU 7/13 and 17/23
    found = average_precision([shifted], [truth])
    assert found["AP50"] == 1 and found["AP75"] == 0 and found["AP"] == pytest.approx((0.1 + 0.5) / 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("detect") / "run"
    runner.train(DetectRecipe.tiny().changed(["mixer=pom", "control=False"]), out)
    return out


def test_a_run_measures_draws_and_predicts(run, tmp_path):
    row = json.loads((run / "results.json").read_text())["rows"][0]
    assert row["task"] == "detect" and row["mixer"] == "pom" and {"AP", "AP50", "AP75"} <= set(row["metrics"])
    assert row["directions"]["AP"] == "up" and (run / "samples.png").stat().st_size > 10_000
    saved = SavedRun.of(run)
    assert {"metrics", "classes"} <= set(saved.measure())
    picture = next((run / "data" / "val").glob("*.png"))
    from polymix.tasks.detect.data import from_summary
    from polymix.tasks.detect.metrics import predict
    from polymix.tasks.processes import Process

    found = predict(
        saved.load(), from_summary(saved.recipe, saved.summary), saved.recipe, [picture], tmp_path, Process()
    )
    assert (tmp_path / found[0]["picture"]).stat().st_size > 1000 and found[0]["file"] == str(picture)


def test_a_run_starts_from_a_detector_of_other_classes(tmp_path):
    before, after = (_model(DetectRecipe(dim=16, depth=1), classes) for classes in (5, 2))
    torch.save(before.state_dict(), tmp_path / "model.pt")
    said = []
    load_weights(after, tmp_path, HEADS, said.append)
    assert torch.equal(before.sides.weight, after.sides.weight) and "label.weight, label.bias" in said[0]


def test_pictures_with_other_classes_are_refused(run, tmp_path):
    write_coco(tmp_path / "data")
    with pytest.raises(DataError, match=r"class 'car' in .*the model's classes|model's classes.*class 'car'"):
        SavedRun.of(run).measure(str(tmp_path / "data"))


def test_options_that_contradict_each_other():
    for words, text in (
        (["annotations=a.json"], "without images"), (["images=a"], "without annotations"),
        (["data=a", "annotations=a", "images=b"], "one of the two"),
        (["image_size=60"], "multiple of 16"), (["question=who"], "which"), (["crops=true"], "short_sides"),
        (["short_sides=0"], "whole numbers"), (["flip=2"], "flip"), (["stem=vit"], "patches"),
        (["host=detr", "stem=patches"], "backbone"), (["mistakes=hide"], "refuse"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=text):
            DetectRecipe().changed(words)
    with pytest.raises(OptionError, match="without data"):
        runner.train(DetectRecipe(data="photos", question="what"), "never")
