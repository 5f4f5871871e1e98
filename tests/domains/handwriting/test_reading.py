"""The model, CTC's decoders, error rates, and a whole run."""

import copy
import itertools
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from polymix.domains.handwriting.augment import augmented
from polymix.domains.handwriting.cutting import cut_lines, pieces
from polymix.domains.handwriting.data import HandwritingData, Pages
from polymix.domains.handwriting.htr_vt import HtrVt, sine_positions
from polymix.domains.handwriting.lines import Line
from polymix.domains.handwriting.metrics import apart, wrong_places
from polymix.domains.handwriting.recipe import HandwritingRecipe
from polymix.domains.handwriting.synthetic import cheque, write_line
from polymix.domains.handwriting.task import HandwritingTask, Sam
from polymix.errors import DataError, OptionError, ShapeError
from polymix.mixers import SoftmaxConfig
from polymix.mixers.spec import parse_mixer
from polymix.train.data.ctc import BeamSearch, greedy, read_arpa
from polymix.train.run import train
from polymix.train.saved import SavedRun

ARPA = """\\data\\
ngram 1=5
ngram 2=3

\\1-grams:
-1.0 <s> -0.3
-0.3 a -0.3
-2.0 b -0.3
-1.0 <space> -0.3
-1.0 </s>

\\2-grams:
-0.1 a a
-0.5 a </s>
-0.1 <s> a

\\end\\
"""


def mixers(name, depth):
    return [parse_mixer(name)[1]] * depth


def test_parameters_are_the_papers():
    """53.5 M with the fixed positions of 128 tokens, which the published code counts."""
    model = HtrVt(mixers("softmax:heads=6", 4), classes=80, device="meta")
    learned = sum(parameter.numel() for parameter in model.parameters())
    assert round((learned + sine_positions(128, 768).numel()) / 1e6, 1) == 53.5


@pytest.mark.parametrize("mixer", ["softmax", "pom", "qt", "padre", "poly_sa", "poly_nl", "linear_floor"])
@pytest.mark.parametrize("height", [32, 64])
def test_a_token_every_four_pixels(mixer, height):
    model = HtrVt(mixers(mixer, 2), classes=5, dim=12, height=height, tokens=16).eval()
    lines = torch.rand(2, 1, height, 64)
    assert model(lines).shape == (2, 16, 5)
    alone = model(lines[:1])
    torch.testing.assert_close(alone, model(lines)[:1], rtol=1e-4, atol=1e-5)  # the norm is over one line
    with pytest.raises(ShapeError, match="multiple of 4"):
        model(lines[..., :63])


def test_masked_spans_cover_at_most_their_share_and_only_in_training():
    model = HtrVt(mixers("pom", 1), classes=5, dim=12, tokens=64, mask_ratio=0.5, span=8)
    shares = [int(model._spans(64, torch.device("cpu")).sum()) for _ in range(50)]
    assert max(shares) <= 32 and min(shares) >= 8 and len(set(shares)) > 3
    lines = torch.rand(1, 1, 64, 256)
    assert torch.equal(model.eval()(lines), model(lines))


def test_the_papers_preset_is_the_published_host():
    """Six heads, where attention comes from the plan too; 12 would be the default at 768 channels."""
    model = HandwritingTask(HandwritingRecipe.paper().changed(mixer="pom", plan="1:1")).sized(80, "meta")
    assert sorted(config.heads for config in model.configs if isinstance(config, SoftmaxConfig)) == [6, 6]
    with pytest.raises(OptionError, match="heads"):
        HandwritingTask(HandwritingRecipe(mixer="softmax", heads=5)).sized(80, "meta")


def test_the_stem_computes_the_same_with_the_memory_layout_that_is_fast():
    model = HtrVt(mixers("pom", 1), classes=5, dim=64, height=32, tokens=8).eval()
    assert model.stem[0].weight.is_contiguous(memory_format=torch.channels_last)
    plain = copy.deepcopy(model.stem).to(memory_format=torch.contiguous_format)
    lines = torch.rand(2, 1, 32, 32)
    torch.testing.assert_close(model.stem(lines), plain(lines), rtol=1e-4, atol=1e-5)
    narrow = HtrVt(mixers("pom", 1), classes=5, dim=48, height=32, tokens=8)
    assert narrow.stem[3 + 1].body[0].weight.is_contiguous(), "oneDNN crashes in the backward pass"
    narrow(lines).sum().backward()


def test_speed_counts_lines_not_pages(tmp_path):
    """Two lines side by side are two lines."""
    recipe = HandwritingRecipe.tiny().changed(lines=2)
    page = (Line(tmp_path / "a.png", "a"), Line(tmp_path / "b.png", "b"))
    for line in page:
        Image.new("L", (8, 8), 255).save(line.image)
    pages = Pages([page, page[:1]], recipe)
    batch = HandwritingData("x", "ab ", pages, pages).collate([pages[0], pages[1]])
    assert HandwritingTask(recipe).size(batch) == 3


@pytest.mark.parametrize("plan", [None, "1:1"])
def test_matched_parameters(plan):
    """With match_parameters every mixer has the size of attention, to half a hidden unit a block."""
    sizes = {}
    for mixer in ("softmax", "pom", "padre"):
        recipe = HandwritingRecipe(mixer=mixer, match_parameters=True, plan=plan)
        data = type("Data", (), {"characters": "abc"})
        sizes[mixer] = sum(p.numel() for p in HandwritingTask(recipe).build(data).parameters())
    assert all(abs(size - sizes["softmax"]) <= 4 * (recipe.dim + 1) for size in sizes.values())


def by_enumeration(logits, characters, extra=lambda text: 0.0):
    """The text of the highest total probability over all paths."""
    rows, totals = logits.log_softmax(-1), {}
    for path in itertools.product(range(rows.shape[1]), repeat=rows.shape[0]):
        labels = [c for c, before in zip(path, (0, *path), strict=False) if c not in (0, before)]
        text = "".join(characters[c - 1] for c in labels)
        chance = sum(rows[t, c].item() for t, c in enumerate(path))
        totals[text] = totals.get(text, 0.0) + math.exp(chance)
    return max(totals, key=lambda text: math.log(totals[text]) + extra(text))


@pytest.mark.parametrize("seed", range(3))
def test_beam_search_finds_the_best_text_with_and_without_a_language_model(seed, tmp_path):
    logits, characters = 1.5 * torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(seed)), "ab "
    (read,) = BeamSearch(characters, beam=500)(logits)
    assert read.text == by_enumeration(logits[0], characters)
    (tmp_path / "a.arpa").write_text(ARPA)
    model = read_arpa(tmp_path / "a.arpa")

    def chance(text):
        words = ["<space>" if c == " " else c for c in text]
        return 2.0 * sum(model.score((b,), w) for b, w in zip(["<s>", *words], [*words, "</s>"], strict=True))

    (read,) = BeamSearch(characters, beam=500, language_model=tmp_path / "a.arpa", weight=2.0)(logits)
    assert read.text == by_enumeration(logits[0], characters, chance)


def test_greedy_decoding_says_where(tmp_path):
    logits = torch.full((1, 6, 3), -5.0)
    for token, label in enumerate((0, 1, 1, 0, 1, 2)):
        logits[0, token, label] = 5.0
    (read,) = greedy(logits, "ab")
    assert read.text == "aab" and read.places == ((1, 2), (4, 4), (5, 5)) and min(read.certain) > 0.99
    (tmp_path / "odd.arpa").write_text("\\1-grams:\nno number here\n")
    with pytest.raises(DataError, match="line 2"):
        read_arpa(tmp_path / "odd.arpa")


def test_error_rates():
    assert apart('He said: "no".') == ["He", "said", ":", '"', "no", '"', "."]
    assert wrong_places("kitten", "sitting") == ({0, 4, 6}, 0)
    assert wrong_places("abxc", "abc") == (set(), 1)


def test_a_blot_covers_the_amount_and_nothing_else():
    generator = np.random.default_rng(0)
    text, (words, figures) = cheque(generator)
    assert text[words.start : words.stop].count(" ") == 1 and text[figures.start :].isdigit()
    line = write_line(text, generator, height=32, width=256, hide=figures)
    dark = (line.image < 120).mean(0) > 0.6
    assert dark.any() and not dark[:128].any(), "the figures stand at the end of the line"


def test_augmentation_keeps_values_in_range_and_shapes():
    images = torch.rand(3, 1, 32, 64)
    results = [augmented(images) for _ in range(12)]
    assert all(r.shape == images.shape and r.min() >= 0 and r.max() <= 1 for r in results)
    assert len({r.sum().item() for r in results}) > 6


def test_sam_takes_the_gradient_at_the_worst_place():
    """On ½ a w² the gradient at w + ρ is a (w + ρ): one step of AdamW's first moment shows it."""
    w = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = Sam([{"params": [w]}], radius=0.5, lr=0.1, weight_decay=0.0)

    def closure():
        optimizer.zero_grad()
        loss = 1.5 * (w**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.state[w]["exp_avg"].item() == pytest.approx(0.1 * 3.0 * 2.5)
    assert w.item() == pytest.approx(1.9)


@pytest.mark.slow
def test_a_run_with_sam_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    recipe = HandwritingRecipe.tiny().changed(
        synthetic_train=8, synthetic_test=2, batch_size=4, steps=2, sam=0.05, control=False, dim=8, width=128,
        mask_ratio=0.3, augment=True, checkpoint_every=1, log_every=1,
    )  # fmt: skip
    train(recipe, tmp_path / "whole", data_folder=tmp_path / "data")
    own, calls = HandwritingTask.loss, []

    def loss(self, model, batch):
        calls.append(batch)
        if len(calls) == 3 and not (tmp_path / "stopped").exists():  # of the second step
            (tmp_path / "stopped").touch()
            raise KeyboardInterrupt
        return own(self, model, batch)

    monkeypatch.setattr(HandwritingTask, "loss", loss)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "parts", data_folder=tmp_path / "data")
    calls.clear()
    train(recipe, tmp_path / "parts", data_folder=tmp_path / "data", resume=True)
    one, two = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("whole", "parts"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_bad_options():
    for wrong in (
        {"width": 255}, {"dim": 90}, {"height": 48}, {"sam": 0.05, "precision": "float16"}, {"language_model": "x"},
        {"mlp_ratio": 0.001},
    ):  # fmt: skip
        with pytest.raises(OptionError, match=next(iter(wrong))):
            HandwritingRecipe(**wrong)
    with pytest.raises(OptionError, match="a multiple of 4"):
        HandwritingRecipe(width=255)


@pytest.mark.slow
def test_sharpness_aware_steps_see_the_whole_batch_in_parts_too(tmp_path):
    """With accumulate both gradients of a step are means over all parts; batch norm sees parts, so they differ a bit."""
    losses = []
    for accumulate in (1, 2):
        recipe = HandwritingRecipe.tiny().changed(
            synthetic_train=4, synthetic_test=2, batch_size=4, steps=2, sam=0.05, control=False, dim=8, width=128,
            accumulate=accumulate, log_every=1,
        )  # fmt: skip
        train(recipe, tmp_path / str(accumulate), data_folder=tmp_path / "data")
        rows = [json.loads(row) for row in (tmp_path / str(accumulate) / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=0.05) and losses[0][1] != losses[0][0]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("cheques")
    recipe = HandwritingRecipe.tiny().changed(
        synthetic_train=12, synthetic_test=4, batch_size=4, steps=2, sam=0.05, augment=True, control=False, dim=12,
        evaluate_every=2, width=128, mask_ratio=0.2,
    )  # fmt: skip
    train(recipe, out)
    return out


def test_a_run_leaves_rows_and_pictures(run):
    (row,) = json.loads((run / "results.json").read_text())["rows"]
    assert row["task"] == "handwriting" and row["host"] == "HTR-VT" and row["mixer"] == "pom"
    assert set(row["metrics"]) == {"cer", "wer", "cer_blotted"} and set(row["directions"].values()) == {"down"}
    assert row["paper"] is None, "the paper has no cheques"
    assert (run / "lines.png").is_file()


def test_an_image_is_read_in_pieces_with_places(run, tmp_path):
    from PIL import Image

    written = write_line("Dale forty seven", np.random.default_rng(0), height=64, width=1200)
    Image.fromarray(written.image).save(tmp_path / "wide.png")
    (row,) = SavedRun.of(run).predict([tmp_path / "wide.png"], tmp_path / "read")
    assert (tmp_path / "read" / row["picture"]).is_file()
    assert row["text"].replace(" ", "") == "".join(c["character"] for c in row["characters"]).replace(" ", "")
    assert all(0 <= c["from"] < c["to"] <= 1200 for c in row["characters"])
    assert row["lines"] == [{"text": row["text"], "top": 0, "bottom": 64}]


@pytest.mark.parametrize(("count", "height"), [(1, 32), (2, 32), (3, 64), (5, 48)])
def test_the_lines_of_a_page_are_found_and_one_line_stays_one(count, height):
    """Blots join neither lines nor the rows between them, and no high letter or tail becomes a line of its own."""
    generator = np.random.default_rng(count)
    for _ in range(6):
        written = []
        for place in range(count):
            text, (_, figures) = cheque(generator)
            hide = figures if place % 2 else ()
            written.append(write_line(text, generator, height=height, width=8 * height, hide=hide).image)
        page = np.vstack(written)
        ways = cut_lines(page, (0.25, 0.4))
        assert len(ways) == (1 if count == 1 else 3)
        for way in ways:
            assert np.allclose([cut.bottom / height for cut in way], np.arange(count) + 1, atol=0.35)
            assert np.allclose([cut.top / height for cut in way], np.arange(count), atol=0.35)
        assert len({len(cut.pixels) for cut in ways[-1]}) == 1, "letters of all lines get the same size"
    for blank in (np.full((64, 300), 250, np.uint8), np.zeros((1, 1), np.uint8)):
        ((only,),) = cut_lines(blank)
        assert np.array_equal(only.pixels, blank)


def test_a_wide_line_is_cut_in_its_widest_gaps():
    line = np.full((8, 100), 255, np.uint8)
    line[2:6, 0:28] = line[2:6, 30:55] = line[2:6, 62:100] = 0  # of the gaps, 5 columns lie in the first piece
    parts = pieces(line, 60)
    assert [part.shape[1] for part in parts] == [57, 43] and len(pieces(line, 80)) == 1
    assert np.array_equal(np.hstack(pieces(np.zeros((4, 50), np.uint8), 9)), np.zeros((4, 50), np.uint8))


@pytest.mark.draws
def test_an_image_of_several_lines_gives_the_text_of_each(run, tmp_path, capsys):
    from polymix.cli import main

    generator = np.random.default_rng(0)
    page = np.vstack([write_line(text, generator, height=32, width=256).image for text in ("Dale forty", "Hall ten")])
    Image.fromarray(page).save(tmp_path / "page.png")
    with pytest.raises(SystemExit) as stop:
        main(["predict", str(run), str(tmp_path / "page.png"), "--out", str(tmp_path), "--json", "--threads", "1"])
    (row,) = json.loads(capsys.readouterr().out)
    assert not stop.value.code and [line["text"] for line in row["lines"]] == row["text"].split("\n")
    assert len(row["lines"]) == 2 and row["lines"][0]["bottom"] <= row["lines"][1]["top"]
    assert all(0 <= c["line"] < 2 and 0 <= c["from"] < c["to"] <= 256 for c in row["characters"])
    assert np.array_equal(np.asarray(Image.open(tmp_path / "page.png")), page), "the picture lies beside the image"


def test_a_language_model_is_read_before_training(tmp_path):
    (tmp_path / "words.arpa").write_text("\\1-grams:\n-1.0 </s>\n-1.0 forty\n-1.0 seven\n-1.0 a\n")
    for name, named in (("none.arpa", "none.arpa"), ("words.arpa", "of words such as 'forty'")):
        recipe = HandwritingRecipe.tiny().changed(beam=4, language_model=tmp_path / name)
        with pytest.raises(DataError, match=named):
            train(recipe, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_trained_model_decodes_by_a_beam_and_a_language_model(run, tmp_path, capsys):
    from polymix.cli import main

    (tmp_path / "a.arpa").write_text(ARPA)
    written = write_line("Dale", np.random.default_rng(0), height=32, width=128)
    Image.fromarray(written.image).save(tmp_path / "line.png")
    decoding = ["--set", "beam=20", "--set", f"language_model={tmp_path / 'a.arpa'}"]
    outputs = {}
    for name, arguments in {
        "evaluate": ["evaluate", str(run), "--json", *decoding],
        "predict": ["predict", str(run), str(tmp_path / "line.png"), "--json", "--out", str(tmp_path / "o"), *decoding],
        "wrong": ["predict", str(run), str(tmp_path / "line.png"), "--set", "dim=8"],
        "missing": ["evaluate", str(run), "--set", "language_model=none.arpa", "--set", "beam=20"],
    }.items():
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--threads", "1"])
        outputs[name] = (stop.value.code or 0, *capsys.readouterr())
    assert [code for code, _, _ in outputs.values()] == [0, 0, 2, 2]
    assert json.loads(outputs["evaluate"][1])["metrics"]["cer"] >= 0
    text = json.loads(outputs["predict"][1])[0]["text"]
    model = SavedRun.of(run).load()
    pixels = torch.from_numpy(written.image.astype(np.float32))[None, None] / 255
    characters = SavedRun.of(run).summary["characters"]
    with torch.no_grad():
        assert text == BeamSearch(characters, beam=20, language_model=tmp_path / "a.arpa")(model(pixels))[0].text
    assert "beam, language_model" in outputs["wrong"][2] and "none.arpa" in outputs["missing"][2]
