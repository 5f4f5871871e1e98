"""`polymix evaluate`: the numbers of the training for its own data, and the right ones for other data."""

import json

import jsonschema
import pytest
import torch
from PIL import Image

import polymix
from polymix.cli import main
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.task import ClassifyTask
from polymix.domains.recall.recipe import RecallRecipe
from polymix.domains.text.recipe import TextRecipe
from polymix.errors import DataError, OptionError, PolymixError, ResultsError
from polymix.models import VisionTransformer
from polymix.results import schema_of
from polymix.train.data.classified import scores, wilson
from polymix.train.run import train
from polymix.train.saved import SavedRun
from polymix.workflows.evaluate import Evaluation, Settings, evaluate
from tests.helpers import blank_pictures

TINY = {"steps": 4, "evaluate_every": 4, "dim": 8, "depth": 1, "image_size": 8, "batch_size": 32}
SHADES = {"black": 20, "grey": 120, "white": 230}


def photos(folder, classes=SHADES, count=10, mode="RGB", seed=0):
    """Noisy pictures, each class around a brightness of its own."""
    generator = torch.Generator().manual_seed(seed)
    for name, shade in classes.items():
        (folder / name).mkdir(parents=True)
        for place in range(count):
            noise = torch.randint(-15, 16, (12, 12, 3), generator=generator)
            pixels = (noise + shade).clamp(0, 255).to(torch.uint8)
            image = Image.frombytes("RGB", (12, 12), bytes(pixels.flatten().tolist()))
            image.convert(mode).save(folder / name / f"{place}.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on photos, and its data."""
    root = tmp_path_factory.mktemp("run")
    data = photos(root / "photos")
    recipe = ClassifyRecipe(**{**TINY, "steps": 40, "learning_rate": 1e-2}, data=str(data), seed=1)
    with blank_pictures():
        return root / "out", data, train(recipe, root / "out")


def test_the_training_s_own_data_gives_its_own_numbers(run):
    out, data, measured = run
    evaluation = evaluate(Settings(out))
    assert evaluation.metrics["accuracy"] == measured["accuracy"] and measured["accuracy"] > 0.6
    assert evaluation.metrics["loss"] == pytest.approx(measured["val_loss"], rel=1e-5)
    assert (evaluation.count, evaluation.task, evaluation.data) == (6, "classify", str(data))
    assert [row["name"] for row in evaluation.classes] == sorted(SHADES)


def test_all_of_the_data_and_a_part_of_it(run):
    out, data, _ = run
    whole = evaluate(Settings(out, str(data), split="all"))
    assert whole.count == 30 and [row["images"] for row in whole.classes] == [10, 10, 10]
    assert whole.metrics["majority"] == pytest.approx(1 / 3)
    part = evaluate(Settings(out, split="all", limit=12, batch=5))
    assert part.count == 12 and sum(row["images"] for row in part.classes) == 12
    assert part.to_dict() == evaluate(Settings(out, split="all", limit=12)).to_dict()
    jsonschema.validate(json.loads(json.dumps(part.to_dict())), schema_of(Evaluation))


def test_classes_keep_their_numbers_where_some_are_missing(run, tmp_path):
    """A folder with the classes grey and white only: white is the model's third class, not its second."""
    out, _, _ = run
    data = photos(tmp_path / "other", {name: SHADES[name] for name in ("grey", "white")}, seed=5)
    evaluation = evaluate(Settings(out, str(data), split="all"))
    assert [row["images"] for row in evaluation.classes] == [0, 10, 10] and evaluation.classes[0]["accuracy"] is None
    assert evaluation.classes[2]["accuracy"] > 0.8
    assert SavedRun.of(out).load()(torch.zeros(1, 3, 8, 8)).shape == (1, 3)


def test_other_images_are_normalised_as_the_training_s(run, tmp_path):
    """By their own mean, all-white pictures would look grey."""
    out, _, _ = run
    data = photos(tmp_path / "bright", {"black": 20, "white": 230}, seed=6)
    run_ = SavedRun.of(out)
    task = ClassifyTask(ClassifyRecipe(**TINY, data=str(data)))
    images = task.for_evaluation(run_.summary, whole=True, limit=None)
    assert images.mean.flatten().tolist() == pytest.approx(run_.summary["mean"])
    assert images.test.labels.unique().tolist() == [0, 2]


def test_grey_images_for_a_model_of_colours(run, tmp_path):
    evaluation = evaluate(Settings(run[0], str(photos(tmp_path / "grey", mode="L")), split="all"))
    assert evaluation.count == 30


@pytest.mark.parametrize(("settings", "match"), [
    ({"tokens": 8}, "no --tokens for a run"), ({"image_size": 8}, "no --image-size for a run"),
    ({"split": "test"}, "'held-out', 'all'"), ({"limit": 0}, "--limit"), ({"batch": -1}, "--batch"),
    ({"device": "gpu"}, "--device"), ({"data": "nowhere"}, "--data"),
])  # fmt: skip
def test_options_that_mean_nothing_are_errors(run, settings, match):
    with pytest.raises(PolymixError, match=match):
        evaluate(Settings(run[0], **settings))


def test_unknown_classes_and_other_values_are_errors(run, tmp_path):
    with pytest.raises(DataError, match="black, grey, white, got the class 'blue'"):
        evaluate(Settings(run[0], str(photos(tmp_path / "a", {"black": 20, "blue": 90}))))
    train(ClassifyRecipe(**TINY), tmp_path / "digits")
    with pytest.raises(DataError, match="images like those of the training"):
        evaluate(Settings(tmp_path / "digits", str(photos(tmp_path / "b", {"0": 20, "1": 90}))))
    assert evaluate(Settings(tmp_path / "digits")).count == 359


@pytest.mark.parametrize(("content", "error", "match"), [
    ({"finished": False, "rows": []}, ResultsError, "--resume"), ({"task": "nope"}, ResultsError, "of the domain nope"),
    ({"settings": {"steps": "many"}}, OptionError, "steps"), ({"settings": 5}, ResultsError, "results\\.json"),
])  # fmt: skip
def test_damaged_runs_are_errors(run, tmp_path, content, error, match):
    whole = json.loads((run[0] / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps({**whole, **content}))
    with pytest.raises(error, match=match):
        evaluate(Settings(tmp_path))


def test_damaged_weights_and_folders_that_hold_no_model(run, tmp_path):
    (tmp_path / "results.json").write_bytes((run[0] / "results.json").read_bytes())
    (tmp_path / "model.pt").write_bytes(b"no weights")
    with pytest.raises(ResultsError, match=r"model\.pt, which cannot be read"):
        evaluate(Settings(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"config\.json"):
        evaluate(Settings(tmp_path / "empty"))
    with pytest.raises(DataError, match="does not exist"):
        Settings(tmp_path / "nowhere")


def test_tasks_without_data_measure_themselves(tmp_path):
    recipe = RecallRecipe(steps=2, evaluate_every=2, sizes=(4,), tokens=64, answers=64, hidden_size=16, num_layers=1,
                          mixer="pom")  # fmt: skip
    measured = train(recipe, tmp_path)
    evaluation = evaluate(Settings(tmp_path))
    assert evaluation.metrics["accuracy"] == measured["accuracy"]
    with pytest.raises(OptionError, match="--split"):
        evaluate(Settings(tmp_path, split="all"))
    with pytest.raises(OptionError, match="data"):
        evaluate(Settings(tmp_path, data=str(tmp_path)))


def test_text_gives_the_numbers_of_the_training(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text(" ".join(f"word{i % 37} and {i % 11}." for i in range(1500)))
    options = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "mixers": ["pom"], "intermediate_size": 16}
    recipe = TextRecipe(data=str(book), options=options, vocab=300, context=16, steps=3, evaluate_every=3, batch_size=8,
                        prompts=(), evaluate_tokens=10**6)  # fmt: skip
    measured = train(recipe, tmp_path / "out")
    evaluation = evaluate(Settings(tmp_path / "out"))
    assert evaluation.metrics["loss"] == pytest.approx(measured["val_loss"], rel=1e-5)
    assert evaluation.metrics["bits_per_byte"] == pytest.approx(measured["bits_per_byte"], rel=1e-5)
    whole = evaluate(Settings(tmp_path / "out", data=str(book), split="all", limit=400, tokens=8))
    assert whole.unit == "tokens" and 300 < whole.count <= 400
    with pytest.raises(OptionError, match="no --image-size for a run of polymix train"):
        evaluate(Settings(tmp_path / "out", image_size=8))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    torch.manual_seed(0)
    host = VisionTransformer(polymix.SoftmaxConfig(), image_size=8, patch_size=4, dim=16, depth=1, classes=3)
    report = polymix.convert(host, "pom")
    classes = ["black", "grey", "white"]
    polymix.save_pretrained(report.model, folder / "named", metadata={"data": {"classes": classes[::-1]}})
    polymix.save_pretrained(report.model, folder / "plain")
    return folder, report.model.eval()


def test_converted_models(converted, tmp_path):
    """The numbers of a loop written here; the classes in the order that the folder of the model names."""
    from polymix.workflows.convert.images import Images
    from polymix.workflows.convert.sources import Source

    folder, model = converted
    data = photos(tmp_path / "photos")
    images = Images(str(data), Source(model), None)
    with torch.no_grad():
        logits = model(images.inputs(torch.cat((images.data.train.images, images.data.test.images))))
    labels = torch.cat((images.data.train.labels, images.data.test.labels))
    for name, order in (("plain", [0, 1, 2]), ("named", [2, 1, 0])):
        evaluation = evaluate(Settings(folder / name, str(data), split="all"))
        expected = torch.tensor(order)[labels]
        assert evaluation.metrics["accuracy"] == pytest.approx((logits.argmax(1) == expected).float().mean().item())
        assert evaluation.metrics["loss"] == pytest.approx(
            torch.nn.functional.cross_entropy(logits, expected).item(), rel=1e-4
        )
    assert evaluate(Settings(folder / "plain", str(data))).count == 6
    with pytest.raises(OptionError, match="--data"):
        evaluate(Settings(folder / "plain"))
    with pytest.raises(DataError, match="class 'blue'"):
        evaluate(Settings(folder / "named", str(photos(tmp_path / "two", {"black": 1, "blue": 90}))))
    with pytest.raises(OptionError, match="as many classes"):
        evaluate(Settings(folder / "plain", str(photos(tmp_path / "2", {"black": 1, "white": 90}))))
    with pytest.raises(OptionError, match="no --tokens"):
        evaluate(Settings(folder / "plain", str(data), tokens=4))


def test_the_command_prints_a_table_or_json(run, capsys):
    for words in ([], ["--json"]):
        with pytest.raises(SystemExit) as status:
            main(["evaluate", str(run[0]), "--threads", "1", *words])
        assert not status.value.code
        out = capsys.readouterr().out
        if words:
            content = json.loads(out)
            assert content["schema"] == "polymix.evaluate/1" and content["count"] == 6
        else:
            assert "95 % interval" in out and "grey" in out and "held-out" in out


def test_scores_by_hand():
    logits = torch.tensor([[2.0, 0, 0], [0, 2, 0], [0, 2, 0], [0, 0, 2]])
    measured = scores(logits, torch.tensor([0, 1, 0, 0]), ("a", "b", "c"))
    assert measured["metrics"]["accuracy"] == 0.5 and measured["metrics"]["majority"] == 0.75
    assert [row["accuracy"] for row in measured["classes"]] == [1 / 3, 1.0, None]
    assert "top_5" not in measured["metrics"]
    assert scores(torch.eye(8), torch.arange(8) % 7, list("abcdefgh"))["metrics"]["top_5"] < 1


def test_wilson_s_interval():
    assert wilson(0, 10)[0] == 0 and wilson(10, 10)[1] == 1
    low, high = wilson(81, 263)  # an example of Newcombe's, 1998
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


def test_a_file_in_place_of_the_model_s_folder_is_said_to_be_one(tmp_path):
    """It was said not to exist."""
    (tmp_path / "model.json").touch()
    with pytest.raises(DataError, match="which is no folder"):
        Settings(folder=tmp_path / "model.json")
