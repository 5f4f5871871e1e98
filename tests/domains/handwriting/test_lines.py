"""Lines of handwriting in every layout that users have, and the mistakes that they make."""

import json

import numpy as np
import pytest
from PIL import Image

from polymix.domains.handwriting.data import fitted, grey, load
from polymix.domains.handwriting.lines import Line, pages_of, read_lines
from polymix.domains.handwriting.recipe import HandwritingRecipe
from polymix.domains.handwriting.task import HandwritingTask
from polymix.errors import DataError, OptionError
from polymix.train.run import check_data


def picture(path, size=(40, 20), value=255, mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)
    return path


def texts(reading, split="train"):
    return [line.text for line in reading.lines[split]]


def check(folder, layout=None):
    return check_data(HandwritingRecipe(data=folder, layout=layout))


def first_problem(folder, layout=None):
    return read_lines(folder, layout).problems.settle()


@pytest.fixture
def htr_vt(tmp_path):
    for split, names in {"train": ("a-0", "a-1"), "val": ("b-0",), "test": ("c-0",)}.items():
        (tmp_path / f"{split}.ln").write_text("".join(f"{name}.png\n" for name in names))
        for name in names:
            picture(tmp_path / "lines" / f"{name}.png")
            (tmp_path / "lines" / f"{name}.txt").write_bytes("\ufeffgrüße\r\n".encode())
    return tmp_path


def test_lists_of_htr_vt_with_a_byte_order_mark_and_windows_line_ends(htr_vt):
    reading = read_lines(htr_vt)
    assert texts(reading) == ["grüße"] * 2 and texts(reading, "val") == texts(reading, "test") == ["grüße"]
    assert [len(page) for page in pages_of(reading.lines["train"], 16)] == [2]


@pytest.fixture
def iam(tmp_path):
    rows = [
        "#--- a comment",
        "a01-000u-00 ok 154 19 408 746 1661 89 A|MOVE|to|stop",
        "a01-000u-01 err 156 19 395 932 1850 105 Mr.|Gaitskell",
        "a01-003-00 ok 156 16 408 1106 1986 105 nominating",
    ]
    (tmp_path / "ascii").mkdir()
    (tmp_path / "ascii" / "lines.txt").write_text("\n".join(rows))
    for name in ("a01-000u/a01-000u-00", "a01-000u/a01-000u-01", "a01-003/a01-003-00"):
        picture(tmp_path / "lines" / "a01" / f"{name}.png")
    (tmp_path / "train.uttlist").write_text("a01-000u\n")
    (tmp_path / "test.uttlist").write_text("a01-003\n")
    return tmp_path


def test_iam_by_forms_without_and_with_lines_marked_err(iam):
    assert texts(read_lines(iam)) == ["A MOVE to stop"] and texts(read_lines(iam), "test") == ["nominating"]
    assert texts(read_lines(iam, "iam", err=True)) == ["A MOVE to stop", "Mr. Gaitskell"]


def test_lam_by_namesets(tmp_path):
    for number in range(3):
        picture(tmp_path / "lines" / f"page_{number}.jpg")
    rows = [{"decade_id": 1, "img": f"page_{n}.jpg", "nameset": s, "text": f"riga {n}", "width": 40, "height": 20}
            for n, s in enumerate(("train", "train", "test"))]  # fmt: skip
    (tmp_path / "train.json").write_text(json.dumps(rows[:2]))
    (tmp_path / "test.json").write_text(json.dumps(rows[2:]))
    reading = read_lines(tmp_path)
    assert texts(reading) == ["riga 0", "riga 1"] and texts(reading, "test") == ["riga 2"]
    assert reading.lines["train"][0].page == "page"
    (tmp_path / "train.json").write_text(json.dumps(rows[1::-1]))
    (page,) = pages_of(read_lines(tmp_path).lines["train"], 16)
    assert [line.text for line in page] == ["riga 0", "riga 1"], "in the page's order, although the list has another"


def test_page_files_of_read_2016_cut_the_outline(tmp_path):
    for split in ("Training", "Test"):
        page = picture(tmp_path / split / "page" / "s1.jpg", size=(100, 60), value=0)
        page.rename(tmp_path / split / f"{split}.jpg")
        (tmp_path / split / "page" / f"{split}.xml").write_text(
            '<PcGts xmlns="http://schema.primaresearch.org/PAGE/gts/pagecontent/2013-07-15"><Page>'
            '<TextLine id="l1"><Coords points="10,10 50,10 50,30 10,30"/><TextEquiv><Unicode>den</Unicode></TextEquiv>'
            '</TextLine><TextLine id="l2"><Coords points="10,40 50,40 50,55"/></TextLine></Page></PcGts>'
        )
    (line,) = read_lines(tmp_path).lines["train"]
    assert line.text == "den" and line.box == (10, 10, 51, 31)
    assert grey(line).shape == (21, 41) and grey(line).max() < 20
    triangle = Line(line.image, "x", box=(10, 10, 51, 31), outline=((10, 10), (50, 10), (10, 30)))
    assert grey(triangle)[-1, -1] == 255, "outside of the outline is white"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_page_that_exif_turns_keeps_its_lines(tmp_path, orientation):
    """The outlines are in stored pixels, as imageWidth and imageHeight say; the ink is found in the page as shown."""
    stored = Image.new("L", (60, 40), 255)
    stored.paste(0, (10, 5, 30, 12))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "s1.png", exif=exif)
    outline = ((10, 5), (29, 5), (29, 11), (10, 11))
    size = (60, 40)
    line = Line(tmp_path / "s1.png", "x", box=(10, 5, 30, 12), outline=outline, size=size)
    if orientation <= 4:  # the size does not say which of the two it is, so the pixels are those that are shown
        line = Line(line.image, "x", box=(0, 0, 60, 40), size=size)
        assert grey(line).shape == (40, 60)
        return
    values = grey(line)
    assert values.shape == (20, 7) and values.max() < 40, "all of it is ink"
    with pytest.raises(DataError, match="as its PAGE file says"):
        grey(Line(line.image, "x", box=(0, 0, 5, 5), size=(61, 40)))


def test_a_folder_and_a_tsv_file(tmp_path):
    for number in range(12):
        picture(tmp_path / "folder" / f"{number:02}.png")
        (tmp_path / "folder" / f"{number:02}.txt").write_text(f"text {number}")
    reading = read_lines(tmp_path / "folder")
    assert len(reading.lines["train"]) == 10 and len(reading.lines["test"]) == 2
    rows = ["folder/00.png\tone\ttrain\tp1", "folder/01.png\ttwo\ttrain\tp1", "folder/02.png\tthree\ttest"]
    (tmp_path / "all.tsv").write_bytes("\ufeff".encode() + "\r\n".join(rows).encode())
    reading = read_lines(tmp_path / "all.tsv")
    assert texts(reading) == ["one", "two"] and texts(reading, "test") == ["three"]
    assert [len(page) for page in pages_of(reading.lines["train"], 2)] == [2]


def test_mistakes_name_the_file_and_the_entry(htr_vt, iam, tmp_path):
    (htr_vt / "train.ln").write_text("a-0.png\nnowhere.png\n")
    with pytest.raises(DataError, match=r"train\.ln, line 2.*nowhere\.txt"):
        first_problem(htr_vt, "htr-vt")
    (htr_vt / "train.ln").write_text("a-0.png\nc-0.png\na-0.png\n")
    (htr_vt / "lines" / "a-1.txt").write_text("")
    problems = check(htr_vt, "htr-vt")
    assert any("in train and in test" in text for text in problems) and any("twice" in text for text in problems)
    (htr_vt / "train.ln").write_text("a-1.png\n")
    with pytest.raises(DataError, match="an empty text"):
        first_problem(htr_vt, "htr-vt")
    (iam / "ascii" / "lines.txt").write_text("a01-000u-00 fine 154\n")
    with pytest.raises(DataError, match=r"ascii/lines\.txt, line 1"):
        first_problem(iam, "iam")
    (tmp_path / "odd.tsv").write_text("no tab here\n")
    with pytest.raises(DataError, match="without a tab"):
        first_problem(tmp_path / "odd.tsv")
    (tmp_path / "latin.tsv").write_bytes(b"a.png\tgr\xfc\xdfe\n")
    with pytest.raises(DataError, match="not UTF-8"):
        read_lines(tmp_path / "latin.tsv")
    with pytest.raises(OptionError, match="layout"):
        check(htr_vt, "iamm")
    with pytest.raises(DataError, match="does not exist"):
        read_lines(tmp_path / "missing")


def test_a_text_that_is_too_long_for_ctc_and_a_broken_image(htr_vt):
    (htr_vt / "lines" / "a-1.txt").write_text("aa" * 20)
    recipe = HandwritingRecipe(data=str(htr_vt), width=128)
    with pytest.raises(DataError, match=r"train\.ln, line 2.*40 characters needs 79 tokens"):
        load(recipe, htr_vt / "data")
    (htr_vt / "lines" / "a-1.txt").write_text("fine")
    (htr_vt / "lines" / "a-1.png").write_bytes(b"no image")
    (problem,) = check(htr_vt, "htr-vt")
    assert "a-1.png" in problem and "line 2" in problem


def test_images_keep_their_ratio_and_16_bits_are_not_clipped(tmp_path):
    recipe = HandwritingRecipe()
    assert fitted(grey(Line(picture(tmp_path / "narrow.png", (40, 20)), "x")), recipe).shape == (32, 64)
    assert fitted(grey(Line(picture(tmp_path / "wide.png", (900, 20)), "x")), recipe).shape == (32, 256)
    deep = Image.new("I;16", (8, 8), 60_000)
    deep.putpixel((0, 0), 10_000)
    deep.save(tmp_path / "deep.png")
    values = grey(Line(tmp_path / "deep.png", "x"))
    assert values[0, 0] == 39 and values[1, 1] == 233, "the share of 65,535, as a viewer shows it"


def test_lines_are_scaled_as_the_recipe_says():
    """Bicubic as Pillow has it, which HTR-VT's lines are from, or bilinear."""
    pixels = (np.arange(20 * 30).reshape(20, 30) * 37 % 256).astype(np.uint8)
    for name, kind in (("bicubic", Image.Resampling.BICUBIC), ("bilinear", Image.Resampling.BILINEAR)):
        ours = fitted(pixels, HandwritingRecipe(height=64, interpolation=name))
        theirs = np.asarray(Image.fromarray(pixels).resize((96, 64), kind))
        assert np.abs(ours.astype(int) - theirs).max() <= 1, name
    assert (fitted(pixels, HandwritingRecipe.paper()) != fitted(pixels, HandwritingRecipe(height=64))).any()


def test_lam_has_several_lists_of_which_one_is_chosen(tmp_path):
    """The basic lists, and those of each decade, hold the same lines in other splits."""
    rows = [{"img": f"{n}_1.jpg", "nameset": s, "text": f"riga {n}"} for n, s in enumerate(("train", "test"))]
    for row in rows:
        picture(tmp_path / "img" / row["img"])
    for name, order in (("split/basic", rows), ("split/decade_1", rows[::-1])):
        (tmp_path / name).mkdir(parents=True)
        for split, row in zip(("train", "test"), order, strict=True):
            (tmp_path / name / f"{split}.json").write_text(json.dumps([{**row, "nameset": split}]))
    with pytest.raises(DataError, match=r"one of split/basic, split/decade_1.*--set lists=split/basic"):
        read_lines(tmp_path)
    assert texts(read_lines(tmp_path, lists="split/basic")) == ["riga 0"]
    assert texts(read_lines(tmp_path, lists="split/decade_1")) == ["riga 1"]
    assert len(load(HandwritingRecipe(data=str(tmp_path), lists="split/basic"), tmp_path / "data").train) == 1
    with pytest.raises(DataError, match=r"`lists`.*one of split/basic"):
        read_lines(tmp_path, lists="split/advanced")
    (problem,) = check(tmp_path)
    assert "--set lists" in problem
    (tmp_path / "one.tsv").write_text("img/0_1.jpg\tone\n")
    with pytest.raises(OptionError, match="lists"):
        read_lines(tmp_path / "one.tsv", lists="split/basic")


def test_check_lists_what_does_not_fit_the_recipe(htr_vt):
    """The same texts that training refuses, and lines that lose more than half of their width."""
    (htr_vt / "lines" / "a-0.txt").write_text("two\nlines\n")
    (htr_vt / "lines" / "b-0.txt").write_text("long" * 20)
    (htr_vt / "train.ln").write_text("a-0.png\na-1.png\nb-0.png\n")
    (htr_vt / "val.ln").write_text("")
    picture(htr_vt / "lines" / "a-1.png", (700, 20))
    recipe = HandwritingRecipe(data=str(htr_vt))
    problems = check_data(recipe)
    assert len(problems) == 3
    for what, problem in zip(
        ("a text of 2 lines", "squeezed to 23% of its width; width=1120", "80 characters"), problems, strict=True
    ):
        assert what in problem
    assert all(f"train.ln, line {number}" in problem for number, problem in enumerate(problems, 1))
    assert check_data(HandwritingRecipe(data=str(htr_vt), width=1120)) == problems[:1]


def test_wide_lines_are_told_before_training(htr_vt):
    picture(htr_vt / "lines" / "a-1.png", (200, 20))
    lines = []
    load(HandwritingRecipe(data=str(htr_vt)), htr_vt / "data", lines.append)
    (line,) = lines
    assert line.startswith("1 of 3 lines are wider than width=256.") and "a-1.png" in line and "80%" in line
    assert "width=320 would hold it." in line
    (htr_vt / "lines" / "a-1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"a-1\.png \(.*train\.ln, line 2.*which cannot be read"):
        load(HandwritingRecipe(data=str(htr_vt)), htr_vt / "data")


def test_an_unknown_character_names_the_file_and_the_entry(htr_vt):
    """A model that was trained on other texts meets a character without a class."""
    recipe = HandwritingRecipe(data=str(htr_vt))
    with pytest.raises(DataError, match=r"'ß' in 'grüße' \(.*test\.ln, line 1: c-0\.png\)"):
        HandwritingTask(recipe).for_evaluation({"name": "x", "characters": " egrü"}, False, None)


def test_the_lines_to_choose_by_are_those_of_val(htr_vt, tmp_path):
    recipe = HandwritingRecipe(data=str(htr_vt), keep="best")
    task = HandwritingTask(recipe)
    data = task.load(htr_vt / "data")
    assert [page[0].image.stem for page in task.validation(data).test.pages] == ["b-0"]
    assert [page[0].image.stem for page in data.test.pages] == ["c-0"]
    (htr_vt / "val.ln").unlink()
    with pytest.raises(DataError, match=r"both val and test.*keep=last"):
        task.validation(task.load(htr_vt / "data"))
    cheques = HandwritingTask(HandwritingRecipe.tiny().changed(synthetic_train=3, synthetic_test=2))
    data = cheques.load(tmp_path / "cheques")
    chosen = cheques.validation(data)
    assert len(chosen.test) == 2 and chosen.test.pages != data.test.pages


def test_texts_that_are_no_text_are_listed_with_the_rest(htr_vt):
    (htr_vt / "lines" / "a-0.txt").write_bytes(b"gr\xfc\xdfe")
    (htr_vt / "lines" / "b-0.txt").write_text("")
    problems = check(htr_vt)
    assert "train.ln, line 1" in problems[0] and "not UTF-8" in problems[0] and "empty" in problems[1]


def test_ink_on_transparent_paper_is_read_as_on_white(tmp_path):
    ink = Image.new("RGBA", (40, 32), (0, 0, 0, 0))
    ink.putpixel((3, 4), (0, 0, 0, 255))
    ink.save(tmp_path / "clear.png")
    values = grey(Line(tmp_path / "clear.png", "x"))
    assert values[4, 3] == 0 and values[0, 0] == 255


def test_cheques_depend_on_the_seed(tmp_path):
    """Another seed has other lines, in the same folder too, and the first seed's are found again."""
    recipe = HandwritingRecipe.tiny().changed(synthetic_train=3, synthetic_test=2)
    texts = [[page[0].text for page in load(recipe.changed(seed=seed), tmp_path).train.pages] for seed in (0, 1, 0)]
    assert texts[0] == texts[2] != texts[1]


def test_figures_of_the_paper_stand_beside_its_experiment_alone(tmp_path):
    for split in ("train", "test"):
        (tmp_path / "split" / "basic").mkdir(parents=True, exist_ok=True)
        (tmp_path / "split" / "basic" / f"{split}.json").write_text("[]")
    recipe = HandwritingRecipe.paper().changed(data=tmp_path, mixer="pom")
    figures = {"cer": 0.032, "wer": 0.09, "source": "PoM, Table 2: LAM, basic"}
    assert HandwritingTask(recipe).published() == figures
    assert HandwritingTask(recipe.changed(lines=16, plan="1:1")).published()["cer"] == 0.033
    for other in ({"mixer": "pom:degree=1"}, {"dim": 384}, {"beam": 5}, {"lines": 4}, {"plan": "1:3"}, {"data": None}):
        assert HandwritingTask(recipe.changed(**other)).published() is None, other
    (tmp_path / "split" / "basic").rename(tmp_path / "split" / "decade_1")
    assert HandwritingTask(recipe).published() is None
