"""The jigsaw task: puzzles, metrics, readers, and a run on small photographs."""

import json

import pytest
import torch
from PIL import Image

from polymix.domains.jigsaw import data, metrics
from polymix.domains.jigsaw.recipe import JigsawRecipe
from polymix.domains.jigsaw.task import JigsawTask
from polymix.errors import DataError, OptionError
from polymix.train.run import train
from polymix.train.saved import SavedRun


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    for number in range(6):
        pixels = torch.randint(256, (40, 60, 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
        Image.frombytes("RGB", (60, 40), bytes(pixels.flatten().tolist())).save(folder / f"{number}.png")
    return folder


def test_pieces_and_places_give_the_picture_again():
    picture = torch.rand(3, 12, 12)
    pieces, places = data.shuffled(picture, 3)
    assert torch.equal(data.cut(picture, 3)[4], picture[:, 4:8, 4:8])
    assert torch.equal(pieces, data.cut(picture, 3)[places])
    assert torch.equal(metrics.put(pieces, places), picture)
    assert not torch.equal(metrics.put(pieces, None), picture)


def test_scores_of_right_shifted_and_swapped_answers():
    places = torch.tensor([[2, 0, 3, 1]])  # 2 × 2
    assert metrics.scores(places, places) == {"in_place": 1, "solved": 1, "neighbours": 1}
    swapped = torch.tensor([[0, 2, 1, 3]])  # both rows are whole, the lower one on top
    assert metrics.scores(swapped, places) == {"in_place": 0, "solved": 0, "neighbours": 0.5}
    both = metrics.scores(torch.cat((places, swapped)), torch.cat((places, places)))
    assert both == {"in_place": 0.5, "solved": 0.5, "neighbours": 0.75}


def test_each_place_is_taken_once():
    logits = torch.zeros(1, 4, 4)
    logits[0, :, 0] = torch.tensor([1.0, 3.0, 2.0, 0.0])  # all prefer place 0
    answer = metrics.assign(logits)
    assert sorted(answer[0].tolist()) == [0, 1, 2, 3] and answer[0, 1] == 0


@pytest.mark.parametrize(("mixer", "alike"), [
    ("softmax", True), ("pom", True), ("qt", True), ("poly_nl", True), ("linear_floor", True), ("padre", False),
    ("poly_sa", False),
])  # fmt: skip
def test_who_knows_where_a_piece_lies(mixer, alike):
    torch.manual_seed(0)
    model = JigsawTask(JigsawRecipe(mixer=mixer, pieces=4, dim=16, depth=2, piece_size=4)).build(None).double().eval()
    for parameter in model.parameters():  # gates that start at 0 would hide the mixer
        parameter.data += 0.1 * torch.randn_like(parameter)
    pieces, order = torch.rand(2, 16, 3, 4, 4, dtype=torch.float64), torch.randperm(16)
    with torch.no_grad():
        difference = (model(pieces)[:, order] - model(pieces[:, order])).abs().max()
    assert (difference < 1e-10) == alike


def test_a_plan_keeps_attention_in_the_other_blocks():
    model = JigsawTask(JigsawRecipe(mixer="pom", plan="1:1", dim=16, depth=2)).build(None)
    assert [block.mixer.name for block in model.blocks] == ["pom", "softmax"]


@pytest.mark.draws
def test_a_run_measures_draws_and_predicts(photographs, tmp_path):
    recipe = JigsawRecipe(data=str(photographs)).preset("tiny")
    last = train(recipe, tmp_path / "run")
    (row,) = json.loads((tmp_path / "run" / "results.json").read_text())["rows"]
    assert row["task"] == "jigsaw" and row["directions"]["in_place"] == "up"
    assert row["metrics"]["in_place"] == last["in_place"] and (tmp_path / "run" / "puzzles.png").is_file()
    saved = SavedRun.of(tmp_path / "run")
    assert saved.measure(str(photographs))["metrics"]["in_place"] == row["metrics"]["in_place"]
    few = data.for_evaluation(recipe, False, 3, print).test[0]
    assert torch.equal(few, data.load(recipe, tmp_path, print).test[0][:3])
    whole = data.for_evaluation(recipe, True, 6, print).test[0]
    assert len(whole) == 6 and not torch.equal(whole[:3], few), "photographs of the training are among them"
    (row,) = SavedRun.of(tmp_path / "run").predict([photographs / "0.png"], tmp_path / "seen")
    assert sorted(row["places"]) == [0, 1, 2, 3]
    assert row["picture"] != "0.png", "in the folder of the photograph it would take its place"
    with Image.open(tmp_path / "seen" / row["picture"]) as picture:
        assert picture.size == (2 * metrics.PREDICTED_SIDE + 8, metrics.PREDICTED_SIDE)
    with pytest.raises(DataError, match=r"results\.json"):
        SavedRun.of(tmp_path / "run").predict([tmp_path / "run" / "results.json"], tmp_path / "seen")


def test_test_photographs_are_others_and_test_puzzles_the_same(photographs):
    first, second = (data.load(JigsawRecipe(data=str(photographs), seed=seed).preset("tiny"), photographs)
                     for seed in (0, 1))  # fmt: skip
    assert not set(first.names[0]) & set(first.names[1]) and len(first.names[0] + first.names[1]) == 6
    assert torch.equal(first.test[0], second.test[0]) and torch.equal(first.test[1], second.test[1])


def test_broken_photographs_are_named(photographs, tmp_path):
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "good.png").write_bytes((photographs / "0.png").read_bytes())
    (tmp_path / "train" / "broken.jpg").write_bytes(b"no picture")
    assert [problem for problem in data.list_problems(tmp_path) if "broken.jpg" in problem] == data.list_problems(
        tmp_path
    )
    texts = []
    puzzles = data.load(JigsawRecipe(data=str(tmp_path)).preset("tiny"), tmp_path, texts.append)
    assert len(puzzles.skipped) == len(texts) == 1 and "broken.jpg" in texts[0]
    (tmp_path / "val" / "good.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"good\.png"):
        data.load(JigsawRecipe(data=str(tmp_path)).preset("tiny"), tmp_path)


def test_folders_without_photographs(tmp_path):
    with pytest.raises(DataError, match="0 photographs"):
        data.list_photographs(tmp_path)
    with pytest.raises(DataError, match="folder of photographs"):
        data.list_photographs(tmp_path / "none")
    assert data.list_problems(tmp_path / "none")


def test_the_default_photographs_are_in_the_layout_of_users(tmp_path):
    pytest.importorskip("skimage", reason="untested: the default photographs, without scikit-image")
    data.write_bundled(tmp_path)
    train_files, test_files = data.list_photographs(tmp_path)
    assert [len(data.BUNDLED[part]) for part in ("train", "val")] == [len(train_files), len(test_files)]
    assert data.list_problems(tmp_path) == []


@pytest.mark.parametrize("options", [{"pieces": 1}, {"piece_size": 0}, {"dim": 0}, {"mlp_ratio": 0}])
def test_options_out_of_range(options):
    with pytest.raises(OptionError):
        JigsawRecipe(**options)
