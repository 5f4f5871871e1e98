"""Lines of handwriting in every layout that users have, and the mistakes that they make."""

import json

import pytest
from PIL import Image

from polymix.errors import DataError, OptionError
from polymix.tasks.handwriting import HandwritingRecipe
from polymix.tasks.handwriting.data import check, fitted, for_evaluation, grey, load, validation
from polymix.tasks.handwriting.lines import Line, pages_of, read_lines
from polymix.tasks.runner import check_data


def picture(path, size=(40, 20), value=255, mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)
    return path


def texts(reading, split="train"):
    return [line.text for line in reading.lines[split]]


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
    with pytest.raises(DataError, match=r"nowhere\.txt.*train\.ln, line 2"):
        read_lines(htr_vt, "htr-vt")
    (htr_vt / "train.ln").write_text("a-0.png\nc-0.png\na-0.png\n")
    (htr_vt / "lines" / "a-1.txt").write_text("")
    problems = check(htr_vt, "htr-vt")
    assert any("in train and in test" in text for text in problems) and any("twice" in text for text in problems)
    (htr_vt / "train.ln").write_text("a-1.png\n")
    with pytest.raises(DataError, match="an empty text"):
        read_lines(htr_vt, "htr-vt")
    (iam / "ascii" / "lines.txt").write_text("a01-000u-00 fine 154\n")
    with pytest.raises(DataError, match=r"lines\.txt, line 1"):
        read_lines(iam, "iam")
    (tmp_path / "odd.tsv").write_text("no tab here\n")
    with pytest.raises(DataError, match="without a tab"):
        read_lines(tmp_path / "odd.tsv")
    (tmp_path / "latin.tsv").write_bytes(b"a.png\tgr\xfc\xdfe\n")
    with pytest.raises(DataError, match="not UTF-8"):
        read_lines(tmp_path / "latin.tsv")
    with pytest.raises(OptionError, match="layout"):
        read_lines(htr_vt, "iamm")
    with pytest.raises(DataError, match="does not exist"):
        read_lines(tmp_path / "missing")


def test_a_text_that_is_too_long_for_ctc_and_a_broken_image(htr_vt):
    (htr_vt / "lines" / "a-1.txt").write_text("aa" * 20)
    recipe = HandwritingRecipe(data=str(htr_vt), width=128)
    with pytest.raises(DataError, match=r"40 characters \(train\.ln, line 2.*needs 79 tokens"):
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
    assert values[0, 0] == 0 and values[1, 1] == 255


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
        ("a text of 2 lines (train.ln, line 1", "squeezed to 23% of its width (train.ln, line 2", "80 characters (train.ln, line 3"),
        problems,
        strict=True,
    ):  # fmt: skip
        assert what in problem
    assert check_data(HandwritingRecipe(data=str(htr_vt), width=1120)) == problems[:1]


def test_wide_lines_are_told_before_training(htr_vt):
    picture(htr_vt / "lines" / "a-1.png", (200, 20))
    told = []
    load(HandwritingRecipe(data=str(htr_vt)), htr_vt / "data", told.append)
    (line,) = told
    assert line.startswith("1 of 3 lines are wider than width=256.") and "a-1.png" in line and "80%" in line
    assert "Raise width to 320." in line
    (htr_vt / "lines" / "a-1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"a-1\.png, which cannot be read \(train\.ln, line 2"):
        load(HandwritingRecipe(data=str(htr_vt)), htr_vt / "data")


def test_an_unknown_character_names_the_file_and_the_entry(htr_vt):
    """A model that was trained on other texts meets a character without a class."""
    recipe = HandwritingRecipe(data=str(htr_vt))
    with pytest.raises(DataError, match=r"'ß' in 'grüße' \(test\.ln, line 1: c-0\.png\)"):
        for_evaluation(recipe, {"name": "x", "characters": " egrü"}, False, None, print)


def test_the_lines_to_choose_by_are_those_of_val(htr_vt, tmp_path):
    recipe = HandwritingRecipe(data=str(htr_vt), keep="best")
    data = load(recipe, htr_vt / "data")
    assert [page[0].image.stem for page in validation(recipe, data).test.pages] == ["b-0"]
    assert [page[0].image.stem for page in data.test.pages] == ["c-0"]
    (htr_vt / "val.ln").unlink()
    with pytest.raises(DataError, match=r"both val and test.*keep=last"):
        validation(recipe, load(recipe, htr_vt / "data"))
    cheques = HandwritingRecipe.tiny().with_options({"train_lines": 3, "test_lines": 2})
    made = load(cheques, tmp_path / "cheques")
    assert len(validation(cheques, made).test) == 2 and validation(cheques, made).test.pages != made.test.pages
