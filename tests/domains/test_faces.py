"""Faces: WIDER FACE's files, its average precision by another definition, the default data, and a run."""

import json

import pytest
import torch
from scipy.io import loadmat, savemat

from polymix.cli import main
from polymix.compat import cure_torchvision
from polymix.domains.faces import data, metrics, wider
from polymix.domains.faces import synthetic as scenes
from polymix.domains.faces.recipe import FacesRecipe
from polymix.domains.faces.retinanet import MAX_FACES, build_retinanet
from polymix.errors import DataError, OptionError, UnknownNameError
from polymix.train.data.boxes.detectors import MIN_SCORE
from polymix.train.data.problems import Problems
from polymix.train.run import check_recipe, train
from polymix.train.saved import SavedRun
from polymix.workflows.compare.settings import Settings
from tests.domains.box_files import photo

cure_torchvision()
pytest.importorskip("torchvision", reason="untested: RetinaNet, without torchvision")

LIST = """0--Parade/0_Parade_1.jpg
3
4 2 10 8 0 0 0 0 0 0 
1 1 0 5 2 0 0 0 0 0 
2 3 5 5 1 1 1 1 2 1
0--Parade/0_Parade_2.jpg
0
0 0 0 0 0 0 0 0 0 0
"""  # noqa: W291


def write_wider(folder, train=LIST, val=LIST, subsets=True):
    """WIDER FACE's layout: two pictures, of which one has a face, a face of no area and an invalid one."""
    (folder / "wider_face_split").mkdir()
    for split, text in (("train", train), ("val", val)):
        for number in (1, 2):
            photo(folder / f"WIDER_{split}" / "images" / "0--Parade" / f"0_Parade_{number}.jpg")
        (folder / "wider_face_split" / f"wider_face_{split}_bbx_gt.txt").write_text(text)
    for name, places in (("easy", []), ("medium", [1]), ("hard", [1, 3])) if subsets else ():
        write_subset(folder, name, [places, []])
    return folder


def write_subset(folder, name, places, stems=("0_Parade_1", "0_Parade_2")):
    rows = [torch.tensor(each, dtype=torch.int32).view(-1, 1).numpy() for each in places]
    content = {"event_list": wider._cell(["0--Parade"]), "file_list": wider._cell([wider._cell(stems)]),
               "gt_list": wider._cell([wider._cell(rows)])}  # fmt: skip
    savemat(folder / "wider_face_split" / f"wider_{name}_val.mat", content)


def test_lists_of_faces_and_subsets(tmp_path):
    problems = Problems()
    train, test, counted = data.read(write_wider(tmp_path), problems)
    assert not problems and data.check(tmp_path) == []
    assert [len(picture.objects) for picture in train] == [3, 0]
    target = test[0].target()
    assert target["boxes"].tolist() == [[4, 2, 14, 10], [1, 1, 1, 6], [2, 3, 7, 8]]
    assert target["iscrowd"].tolist() == [False, True, True], "no area and invalid: in their places, but no targets"
    assert test[0].objects[2].shape == {
        "blur": 1,
        "expression": 1,
        "illumination": 1,
        "invalid": 1,
        "occlusion": 2,
        "pose": 1,
    }
    assert counted == {"easy": (set(), set()), "medium": ({0}, set()), "hard": ({0, 2}, set())}


def test_the_lists_may_lie_beside_the_pictures_and_subsets_may_be_missing(tmp_path):
    write_wider(tmp_path, subsets=False)
    for file in (tmp_path / "wider_face_split").iterdir():
        file.rename(tmp_path / file.name)
    problems, said = Problems(), []
    assert data.read(tmp_path, problems)[2] == {"all": ({0}, set())} and not problems
    loaded = data.load(FacesRecipe(data=str(tmp_path)), tmp_path, said.append)
    assert "2 training faces are invalid or have no area" in said[0] and "AP_all" in said[1]
    assert loaded.summary() == {"name": str(tmp_path), "classes": ["face"], "train": 2, "test": 2}


MISTAKES = {
    "no picture": (lambda text: text.replace("Parade_2", "Parade_9"), "line 6, 0--Parade/0_Parade_9.jpg: "),
    "count too large": (lambda text: text.replace("\n3\n", "\n4\n"), "says 4 faces, and 3 lines follow"),
    "count too small": (lambda text: text.replace("\n3\n", "\n2\n"), "line 5, 2 3 5 5 1 1 1 1 2 1: expected the name"),
    "no count": (lambda text: text.replace("\n3\n", "\nthree\n"), "line 1, 0--Parade/0_Parade_1.jpg: is followed by 'three'"),
    "letters": (lambda text: text.replace("4 2 10", "4 x 10"), "line 3, face 1 of 0--Parade/0_Parade_1.jpg: '4 x 10"),
    "five numbers": (lambda text: text.replace("8 0 0 0 0 0 0", "8 0"), "line 3, face 1 of 0--Parade/0_Parade_1.jpg: has 5"),
    "attribute": (lambda text: text.replace("8 0 0", "8 3 0"), "face 1 of 0--Parade/0_Parade_1.jpg: blur is 3, expected 0 to 2"),
    "negative": (lambda text: text.replace("10 8", "10 -8"), "a box of 10 × -8"),
    "outside": (lambda text: text.replace("4 2 10", "24 2 10"), "a box outside the picture: 24, 2, 10 × 8 in 24 × 16"),
    "twice": (lambda text: text.replace("Parade_2", "Parade_1"), "line 6, 0--Parade/0_Parade_1.jpg: the picture occurs twice"),
    "face after 0": (lambda text: text.replace("\n0 0 0", "\n7 0 0"), "line 8, 0--Parade/0_Parade_2.jpg: a face after a count of 0"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_with_its_line(tmp_path, change, words):
    write_wider(tmp_path, train=change(LIST))
    lines = data.check(tmp_path)
    assert any(words in line for line in lines), lines
    with pytest.raises(DataError, match="--check lists all"):
        data.load(FacesRecipe(data=str(tmp_path)), tmp_path, print)


def test_a_mistake_that_is_skipped_keeps_its_place(tmp_path):
    write_wider(tmp_path, val=LIST.replace("2 3 5 5 1", "2 y 5 5 1"))
    loaded = data.load(FacesRecipe(data=str(tmp_path), broken="skip"), tmp_path, print)
    assert [thing.crowd for thing in loaded.test.pictures.pictures[0].objects] == [False, True, True]
    assert loaded.counted["hard"][0] == {0, 2} and loaded.train.pictures.pictures[0].objects[0].crowd is False


def test_mistakes_in_subsets_and_folders(tmp_path):
    with pytest.raises(DataError, match="no folder"):
        data.read(tmp_path / "none", Problems())
    assert data.check(tmp_path) == [f"{tmp_path} without wider_face_{split}_bbx_gt.txt" for split in ("train", "val")]
    write_wider(tmp_path)
    write_subset(tmp_path, "easy", [[1, 4], []])
    write_subset(tmp_path, "medium", [[1]], stems=["0_Parade_1"])
    (tmp_path / "wider_face_split" / "wider_hard_val.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(200))
    first, second, third = data.check(tmp_path)
    assert first.endswith("wider_easy_val.mat: 0--Parade/0_Parade_1: counts face 4, and the picture has 3")
    assert second.endswith("wider_medium_val.mat: 0--Parade/0_Parade_2: is not in the file")
    assert "wider_hard_val.mat: cannot be read (" in third
    (tmp_path / "wider_face_split" / "wider_hard_val.mat").unlink()
    assert f"{tmp_path}: has no wider_hard_val.mat, but another of the three" in data.check(tmp_path)
    (tmp_path / "WIDER_val" / "images").rename(tmp_path / "pictures")
    assert data.check(tmp_path)[-1].endswith("without WIDER_val/images")
    empty = LIST.replace("\n3\n", "\n0\n").split("\n")
    for split in ("train", "val"):
        (tmp_path / f"WIDER_{split}" / "images").mkdir(parents=True, exist_ok=True)
        (tmp_path / "wider_face_split" / f"wider_face_{split}_bbx_gt.txt").write_text("\n".join(empty[5:]))
        photo(tmp_path / f"WIDER_{split}" / "images" / "0--Parade" / "0_Parade_2.jpg")
    for name in wider.SUBSETS:
        write_subset(tmp_path, name, [[]], stems=["0_Parade_2"])
    with pytest.raises(DataError, match="without a face in the training pictures"):
        data.load(FacesRecipe(data=str(tmp_path)), tmp_path, print)


def test_check_lists_all_mistakes_on_the_command_line(tmp_path, capsys):
    write_wider(tmp_path, train=LIST.replace("4 2 10", "4 x 10").replace("\n0 0 0", "\n7 0 0"))
    with pytest.raises(SystemExit, match="1"):
        main(["train", "faces", "--data", str(tmp_path), "--check"])
    printed = capsys.readouterr().out
    assert "face 1 of" in printed and "a face after a count of 0" in printed


def slow_ap(pictures):
    """WIDER FACE's evaluation as loops over thresholds, pictures, predictions and faces."""

    def overlap(a, b):
        sides = [min(a[i + 2], b[i + 2]) - max(a[i], b[i]) + 1 for i in (0, 1)]
        both = sides[0] * sides[1] if min(sides) > 0 else 0
        area = [(box[2] - box[0] + 1) * (box[3] - box[1] + 1) for box in (a, b)]
        return both / (area[0] + area[1] - both)

    every = [score for picture in pictures for score in picture.scores.double().tolist()]
    total = sum(int(picture.counted.sum()) for picture in pictures)
    points = []
    for step in range(1, 1001):
        threshold, proposals, hits = 1 - step / 1000, 0, 0
        for picture in pictures:
            faces, found = picture.faces.double().tolist(), set()
            rows = sorted(
                zip(picture.scores.double().tolist(), picture.boxes.double().tolist(), strict=True), key=lambda r: -r[0]
            )
            for score, box in rows if faces else []:
                if (score - min(every)) / (max(every) - min(every)) < threshold:
                    continue
                overlaps = [overlap(box, face) for face in faces]
                best = overlaps.index(max(overlaps))
                if max(overlaps) < 0.5:
                    proposals += 1
                elif picture.counted[best]:
                    proposals += 1
                    hits += best not in found
                    found.add(best)
        points.append((hits / total, hits / proposals if proposals else 0.0))
    area, before = 0.0, 0.0
    for place, (recall, _) in enumerate(points):
        area += (recall - before) * max(precision for _, precision in points[place:])
        before = recall
    return area


def test_average_precision_is_that_of_the_slow_definition():
    g = torch.Generator().manual_seed(0)
    pictures = []
    for number in range(5):
        corners = torch.randint(0, 40, (number, 2), generator=g).float()
        faces = torch.cat((corners, corners + torch.randint(4, 16, (number, 1), generator=g)), 1)
        near = faces.repeat(2, 1) + torch.randint(-2, 3, (2 * number, 4), generator=g)
        boxes = torch.cat((near, torch.tensor([[0.0, 0, 9, 9], [20, 20, 50, 50]])))
        scores = torch.randint(0, 300, (len(boxes),), generator=g).float() / 299  # with ties
        pictures.append(metrics.Answer(boxes, scores, faces, torch.rand(number, generator=g) < 0.6))
    precision = metrics.wider_ap(pictures)
    assert abs(precision - slow_ap(pictures)) < 1e-9 and 0.1 < precision < 0.9
    everything = [picture._replace(counted=torch.ones_like(picture.counted)) for picture in pictures]
    assert (
        abs(metrics.wider_ap(everything) - slow_ap(everything)) < 1e-9 != abs(metrics.wider_ap(everything) - precision)
    )


def test_what_counts_and_what_is_ignored():
    face, other, far = [10.0, 10, 29, 29], [50.0, 10, 69, 29], [80.0, 80, 90, 90]

    def ap(*rows, counted=(True, False)):
        boxes, scores = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
        return metrics.wider_ap([metrics.Answer(boxes, scores, torch.tensor([face, other]), torch.tensor(counted))])

    assert ap((face, 1.0), (far, 0.0)) == 1, "a false one below all right ones costs nothing"
    assert ap((other, 1.0), (face, 0.5), (far, 0.0)) == 1, "a face that does not count is ignored"
    assert ap((far, 1.0), (face, 0.5)) == 0.5
    assert ap((face, 1.0), (face, 0.9), (other, 0.0), counted=(True, True)) == pytest.approx(0.5 + 0.5 * 2 / 3), (
        "the second is false"
    )
    assert ap((face, 1.0), counted=(False, False)) == 0 == metrics.wider_ap([])
    half = [10.0, 10, 29, 19]  # with corners that belong to the box: 200 of 400 pixels
    assert ap((half, 1.0), (far, 0.0)) == 1
    nothing = metrics.Answer(
        torch.tensor([far]), torch.tensor([2.0]), torch.zeros(0, 4), torch.zeros(0, dtype=torch.bool)
    )
    one = metrics.Answer(torch.tensor([face]), torch.tensor([1.0]), torch.tensor([face]), torch.tensor([True]))
    assert metrics.wider_ap([nothing, one]) == 1, "a picture without faces does not count"


def test_training_and_test_scenes_have_faces_of_their_own(monkeypatch):
    shades = torch.linspace(0.3, 0.7, 100)[:, None, None].expand(100, 25, 25)
    used = {}
    for test in (False, True):
        taken = []
        monkeypatch.setattr(scenes, "crops", lambda: (shades, shades))
        monkeypatch.setattr(
            scenes,
            "interpolate",
            lambda crop, size, t=taken, **_: t.append(crop.max().item()) or torch.zeros(1, 3, *size),
        )
        rows = list(scenes.make(20, test=test, size=96, seed=3))
        used[test] = set(taken)
        assert not rows[9]["boxes"] and any(rows[k]["boxes"] for k in range(9))
        for row in rows:
            sides = [box[2] for box in row["boxes"]]
            assert row["subsets"]["hard"] == list(range(len(sides))) and all(12 <= side <= 32 for side in sides)
            assert row["subsets"]["easy"] == [i for i, side in enumerate(sides) if side >= 28]
    assert len(used[True]) > 10 and len(used[False]) > 20 and not used[True] & used[False]
    assert max(used[False]) < min(used[True])


def test_the_bar_says_which_faces_are_to_be_found(monkeypatch):
    """Those of its colour alone; they lie far from it, and others as far that are not to be found."""
    grey = torch.full((100, 25, 25), 0.5)
    monkeypatch.setattr(scenes, "crops", lambda: (grey, grey))
    monkeypatch.setattr(scenes, "background", lambda *_: torch.full((3, 96, 96), 0.5))
    greens, found, hidden = [], 0, 0
    for row in scenes.make(60, size=96, seed=1):
        image = row["image"].float()
        green = bool(image[1, 0, 0] > image[0, 0, 0])
        assert image[:, :, :12].flatten(1).unique(dim=1).shape[1] == 1, "the bar has one colour"
        greens.append(green)
        inside = torch.zeros(96, 96, dtype=torch.bool)
        for x, y, width, height in row["boxes"]:
            middle = image[:, y + height // 2, x + width // 2]
            assert x >= 64 and bool(middle[1] > middle[0]) == green
            inside[y : y + height, x : x + width] = True
            found += 1
        contrast = (image[1] - image[0]) * (-1 if green else 1)  # of the colour that is not asked for
        hidden += int(((contrast > 40) & ~inside)[:, 64:].any())
    assert 10 < sum(greens) < 50 and found > 40 and hidden > 30


def test_without_a_bar_every_face_is_to_be_found():
    rows = list(scenes.make(20, question="all", size=96, seed=1))
    assert [bool(row["boxes"]) for row in rows] == [place % 10 != 9 for place in range(20)]
    assert min(box[0] for row in rows for box in row["boxes"]) < 32
    with pytest.raises(OptionError, match="question"):
        list(scenes.make(1, question="which"))


@pytest.mark.draws
def test_a_run_is_measured_again_and_predicts(tmp_path):
    recipe = FacesRecipe.tiny().changed(control=False)
    latest = train(recipe, tmp_path / "run")
    (row,) = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    assert row["task"] == "faces" and list(row["metrics"]) == ["AP_hard", "AP_medium", "AP_easy"]
    assert row["metrics"]["AP_hard"] == latest["AP_hard"] and set(row["directions"].values()) == {"up"}
    assert (tmp_path / "run" / "samples.png").is_file()
    (source,) = (tmp_path / "run" / "data").glob("faces-*")
    assert data.check(source) == []
    saved = SavedRun.of(tmp_path / "run")
    assert saved.measure()["metrics"] == row["metrics"]
    whole = saved.measure(str(source), whole=True, limit=3)
    assert whole["faces"]["easy"] >= 1 and set(whole["metrics"]) == set(row["metrics"])
    file = next((source / "WIDER_val").rglob("*.png"))
    (found,) = saved.predict([file], tmp_path / "seen")
    assert (tmp_path / "seen" / found["picture"]).is_file()
    assert all(len(face["box"]) == 4 and face["score"] >= MIN_SCORE for face in found["objects"])


def test_the_block_is_before_the_last_block_of_res4():
    built = {}
    for mixer in ("none", "poly_nl:reduction=4", "padre"):
        recipe = FacesRecipe.tiny().changed(mixer=mixer)
        built[mixer] = [n for n, _ in build_retinanet(recipe).named_parameters() if "inserted" in n]
    assert not built["none"]
    assert {name.split(".inserted")[0] for name in built["poly_nl:reduction=4"] + built["padre"]} == {
        "backbone.body.layer3.1"
    }
    with pytest.raises(UnknownNameError):
        check_recipe(FacesRecipe(mixer="nothing"))
    with pytest.raises(OptionError, match="a multiple of 32"):
        FacesRecipe(image_size=100)
    with pytest.raises(OptionError, match="2,3 or 2,3,4"):
        FacesRecipe(layers=(3,))


# Of Poly-NL's Tables 1, 2a and 2b; TESA with the reduction whose size Table 1a prints.
BLOCKS = (
    "poly_nl:reduction=4", "poly_nl:reduction=4:order=2", "poly_nl:reduction=4:order=2+3",
    "non_local:rd_ratio=0.5:projection=false", "se", "gc", "efficient:reduction=8:heads=1",
    "tesa:reduction=4:bias=false", "latent_gnn:reduction=8:norm=batch", "prodpoly:decomposition=product",
)  # fmt: skip


@pytest.mark.parametrize("mixer", BLOCKS)
def test_every_block_of_the_papers_tables_learns_in_the_detector(mixer):
    recipe = FacesRecipe.tiny().changed(mixer=mixer)
    model, target = build_retinanet(recipe), {"boxes": torch.tensor([[4.0, 8, 40, 48]]), "labels": torch.tensor([0])}
    block = model.get_submodule("backbone.body.layer3.1.inserted_before")
    assert block.residual == (mixer != "se"), "the gate multiplies x itself"
    for part in block.modules():
        if isinstance(getattr(part, "scale", None), torch.nn.Parameter):
            torch.nn.init.ones_(part.scale)  # it starts at 0, and nothing behind it would have a gradient
    with torch.no_grad():
        for name, value in block.named_parameters():
            if name.endswith("beta"):
                value.fill_(1)
    pixels = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    sum(model(list(pixels), [target, target]).values()).backward()
    still = {name for name, value in block.named_parameters() if value.grad is None or not value.grad.abs().sum() > 0}
    assert still <= {"mixer.layer.conv_attn.bias"}, "only a shift of all of a softmax's scores may have no gradient"


def test_levels_and_anchors():
    with torch.device("meta"):
        large = build_retinanet(FacesRecipe().preset("wider").changed(mixer="none"))
    assert [sizes[0] for sizes in large.anchor_generator.sizes] == [16, 32, 64, 128, 256]
    small = build_retinanet(FacesRecipe.tiny().changed(mixer="none"))
    assert [sizes[0] for sizes in small.anchor_generator.sizes] == [12, 24, 48, 96]
    assert list(small.backbone(torch.zeros(1, 3, 64, 64))) == ["1", "2", "p6", "p7"]
    assert small.head.classification_head.num_classes == 1 and small.detections_per_img == MAX_FACES


def test_compare_takes_the_host_without_a_block():
    chosen = Settings("faces", mixers="none, poly_nl:reduction=4").check()
    assert chosen.labels == ["none", "softmax", "poly_nl:reduction=4", "linear_floor"]
    assert chosen.recipe_of("none", 1).mixer == "none" and chosen.recipe_of("none", 1).seed == 1
    assert Settings("faces", mixers="none").check().labels == ["none", "softmax", "linear_floor"]
    with pytest.raises(UnknownNameError):
        Settings("detect", mixers="none").check()


def test_synthetic_subsets_are_matlab_files(tmp_path):
    scenes.synthetic(tmp_path, 0, count=1, tests=2, size=64)
    content = loadmat(tmp_path / "wider_face_split" / "wider_hard_val.mat")
    assert content["event_list"][0, 0].item() == "0--Scenes" and content["gt_list"][0, 0].shape == (2, 1)
    assert content["gt_list"][0, 0][0, 0].min() == 1
