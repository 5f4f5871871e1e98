"""Text and names as real files have them: both of Unicode's forms, names that are not UTF-8, a data set's own classes."""

import io
import json
import os
import sys
import unicodedata

import numpy
import pytest
import torch
from PIL import Image

from polymix.cli import main
from polymix.domains.faces.wider import read as read_faces
from polymix.domains.handwriting.data import HandwritingData, Pages, load
from polymix.domains.handwriting.lines import read_lines
from polymix.domains.handwriting.metrics import wrong_places
from polymix.domains.handwriting.recipe import HandwritingRecipe
from polymix.domains.segment.data import list_problems
from polymix.domains.segment.data import load as load_segment
from polymix.domains.segment.recipe import SegmentRecipe
from polymix.domains.text.data import find_source
from polymix.errors import DataError, OptionError, printable
from polymix.train.data.boxes import coco, voc
from polymix.train.data.class_names import distinct, own_names
from polymix.train.data.labelled import by_class, list_folder
from polymix.train.data.problems import Problems
from polymix.train.data.texts import composed, named_file, read_names, read_text
from tests.domains.box_files import coco_json, photo, write_voc

WORD = "Zoë à Orléans"
FORMS = [unicodedata.normalize(form, WORD) for form in ("NFC", "NFD")]
LATIN = os.fsdecode(b"Gr\xf6\xdfe")


def line(path, place=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(numpy.full((32, 60), 255 - place, numpy.uint8)).save(path)


# Unicode's forms


def htr_vt(folder):
    for place, form in enumerate(FORMS):
        line(folder / "lines" / f"{place}.png")
        (folder / "lines" / f"{place}.txt").write_text(form, "utf-8")
    (folder / "train.ln").write_text("0\n")
    (folder / "test.ln").write_text("1\n")


def lam(folder):
    for place, form in enumerate(FORMS):
        line(folder / "imgs" / f"{place}.png")
        row = {"img": f"{place}.png", "text": form, "nameset": ("train", "test")[place]}
        (folder / f"{row['nameset']}.json").write_text(json.dumps([row]))


def page(folder):
    for place, (form, split) in enumerate(zip(FORMS, ("Training", "Test"), strict=True)):
        line(folder / split / f"{place}.png")
        text = f'<TextLine id="1"><Coords points="0,0 9,0 9,9"/><TextEquiv><Unicode>{form}</Unicode></TextEquiv></TextLine>'
        (folder / split / f"{place}.xml").write_text(f"<PcGts><Page>{text}</Page></PcGts>", "utf-8")


def tsv(folder):
    for place in range(2):  # on disk the other form than in the table, as archives of a Mac unpack
        line(folder / f"{FORMS[1 - place]}{place}.png")
    rows = [f"{form}{place}.png\t{form}\t{('train', 'test')[place]}" for place, form in enumerate(FORMS)]
    (folder / "lines.tsv").write_text("\n".join(rows), "utf-8")


def plain(folder):
    for place, (form, split) in enumerate(zip(FORMS, ("train", "test"), strict=True)):
        line(folder / split / f"{FORMS[1 - place]}.png")
        (folder / split / f"{form}.txt").write_text(form, "utf-8")


@pytest.mark.parametrize("write", [htr_vt, lam, page, tsv, plain])
def test_every_layout_has_one_spelling_of_a_word(tmp_path, write):
    write(tmp_path)
    reading = read_lines(tmp_path)
    assert reading.problems.lines == []
    (train,), (test,) = reading.lines["train"], reading.lines["test"]
    assert train.text == test.text == FORMS[0] and train.image.is_file() and test.image.is_file()
    assert wrong_places(train.text, test.text) == (set(), 0)
    characters = load(HandwritingRecipe(data=str(tmp_path), width=64), tmp_path / "scratch").characters
    assert not any(map(unicodedata.combining, characters))


def test_language_data_is_composed_too(tmp_path):
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(FORMS), "utf-8")
    assert list(find_source(str(tmp_path), "text").documents()) == [FORMS[0]] * 2
    pyarrow = pytest.importorskip("pyarrow", reason="untested: parquet")
    parquet = pytest.importorskip("pyarrow.parquet", reason="untested: parquet")
    parquet.write_table(pyarrow.table({"text": FORMS}), tmp_path / "b.parquet")
    assert list(find_source(str(tmp_path / "b.parquet"), "text").documents()) == [FORMS[0]] * 2


def test_classes_are_composed_in_folders_json_and_xml(tmp_path):
    for split, form in zip(("train", "val"), FORMS, strict=True):
        for name in (form, "b"):
            for place in range(2):
                photo(tmp_path / "folders" / split / name / f"{place}.png")
    assert list_folder(tmp_path / "folders")[0] == (FORMS[0], "b")
    for form in FORMS:
        photo(tmp_path / "both" / form / "a.png")
    assert {name: len(files) for name, files in by_class(tmp_path / "both").items()} == {FORMS[0]: 2}
    categories = [{"id": 90, "name": FORMS[0]}, {"id": 3, "name": FORMS[1]}]
    for name in ("a.png", "b.png"):
        photo(tmp_path / name)
    (tmp_path / "x.json").write_text(json.dumps(coco_json(categories=categories)))
    assert coco.read(tmp_path / "x.json", tmp_path, Problems())[1] == (FORMS[0], f"{FORMS[0]} (2)")
    write_voc(tmp_path / "voc")
    for place, path in enumerate(sorted((tmp_path / "voc" / "Annotations").iterdir())):
        path.write_text(path.read_text().replace("cat", FORMS[place]), "utf-8")
    assert voc.read(tmp_path / "voc", Problems())[2] == (FORMS[0], "dog")


def test_files_are_found_in_either_form(tmp_path):
    composed_name, decomposed = (f"{form}/{form}.png" for form in FORMS)
    photo(tmp_path / decomposed)
    assert named_file(tmp_path, composed_name) == tmp_path / decomposed
    assert named_file(tmp_path, f"{FORMS[0]}/no.png") == tmp_path / FORMS[1] / "no.png"
    photo(tmp_path / composed_name)
    assert named_file(tmp_path, composed_name) == tmp_path / composed_name, "the very name comes first"
    assert composed(FORMS[1]) == FORMS[0]


@pytest.mark.parametrize(("content", "text"), [
    (b"\xef\xbb\xbfa\r\nb\rc\n", "a\nb\nc\n"), (FORMS[1].encode(), FORMS[0]), (b"", ""),
])  # fmt: skip
def test_text_has_one_kind_of_ends_and_no_mark(tmp_path, content, text):
    (tmp_path / "a.txt").write_bytes(content)
    assert read_text(tmp_path / "a.txt") == text
    (tmp_path / "a.txt").write_bytes(content + b"\xf6")
    with pytest.raises(DataError, match="not UTF-8 at byte"):
        read_text(tmp_path / "a.txt")
    assert read_names(tmp_path / "a.txt").endswith("\udcf6")


# Names that are not UTF-8


def test_names_that_are_not_utf8_are_printable():
    error = OptionError("data", LATIN, "a folder")
    assert "Gr\\xf6\\xdfe" in str(error) and error.got == LATIN
    problems = Problems()
    problems.add(LATIN, LATIN, "is wrong")
    assert problems.lines == ["Gr\\xf6\\xdfe: Gr\\xf6\\xdfe: is wrong"]
    assert printable("é \ud83d") == "é \\ud83d"


def test_lines_with_names_that_are_not_utf8_have_a_fingerprint(tmp_path):
    for place in range(2):
        line(tmp_path / f"{LATIN}{place}.png")
        (tmp_path / f"{LATIN}{place}.txt").write_text("a line")
    data = load(HandwritingRecipe(data=str(tmp_path), width=64), tmp_path / "scratch")
    other = HandwritingData("x", data.characters, Pages([], data.train.recipe), data.test)
    assert data.fingerprint() != other.fingerprint()


def test_a_list_names_files_that_are_not_utf8(tmp_path):
    photo(tmp_path / "WIDER_train/images/0" / f"{LATIN}.jpg")
    rows = f"0/{LATIN}.jpg\n1\n1 2 5 5 0 0 0 0 0 0\n"
    (tmp_path / "wider_face_train_bbx_gt.txt").write_bytes(os.fsencode(rows))
    problems = Problems()
    (picture,) = read_faces(tmp_path, "train", problems)
    assert picture.file.name == f"{LATIN}.jpg" and not problems


@pytest.mark.slow
def test_the_command_prints_and_writes_such_names(tmp_path, monkeypatch):
    """In a terminal whose encoding takes nothing but UTF-8; the class and the file names are Latin-1."""
    for name in (LATIN, "b"):
        for place in range(3):
            photo(tmp_path / LATIN / name / f"{LATIN}{place}.png")
    for said, words in (("0 problems", ["--check"]), ("Report", ["--set=steps=1", "--set=control=False"])):
        screen = io.TextIOWrapper(io.BytesIO(), "utf-8", "strict")
        monkeypatch.setattr(sys, "stdout", screen)
        with pytest.raises(SystemExit) as stop:
            main(["train", "classify", "--data", str(tmp_path / LATIN), "--set=dim=16", "--set=depth=1",
                  "--set=batch_size=2", "--out", str(tmp_path / f"{LATIN}-run"), "--threads=1", *words])  # fmt: skip
        screen.flush()
        assert said in screen.buffer.getvalue().decode("utf-8") and not stop.value.code
    report = (tmp_path / f"{LATIN}-run" / "report.html").read_text("utf-8")
    content = json.loads((tmp_path / f"{LATIN}-run" / "results.json").read_text("utf-8"))
    assert "Gr\\xf6\\xdfe" in report and content["data"]["classes"] == ["Gr\\xf6\\xdfe", "b"]


# A data set's own names of classes


def voc_layout(folder, labels=None):
    """Two pictures in VOC's layout with three classes."""
    labels = numpy.arange(1024).reshape(32, 32) % 3 if labels is None else labels
    for split in ("train", "val"):
        photo(folder / "JPEGImages" / f"{split}.png", (32, 32))
        (folder / "SegmentationClass").mkdir(exist_ok=True)
        Image.fromarray(labels.astype(numpy.uint8)).save(folder / "SegmentationClass" / f"{split}.png")
        (folder / "ImageSets/Segmentation").mkdir(parents=True, exist_ok=True)
        (folder / "ImageSets/Segmentation" / f"{split}.txt").write_text(split)
    return folder


def classes_of(folder):
    return load_segment(SegmentRecipe(data=str(folder), crop=32), folder, print).classes


LABELMAP = "# label:color_rgb:parts:actions\nbackground:0,0,0::\ncrack:128,0,0::\nrust:0,128,0::\n"


@pytest.mark.parametrize(("file", "text"), [
    ("class_names.txt", "_background_\ncrack\nrust\n"), ("classes.txt", "background\ncrack\n\nrust"),
    ("labelmap.txt", LABELMAP), ("class_names.txt", "__ignore__\n_background_\r\ncrack\r\nrust\r\n"),
])  # fmt: skip
def test_own_classes_in_vocs_layout(tmp_path, file, text):
    voc_layout(tmp_path)
    assert classes_of(tmp_path)[1] == "aeroplane", "no file of names"
    (tmp_path / file).write_text(text)
    assert classes_of(tmp_path) == ("background", "crack", "rust") and list_problems(tmp_path) == []


def test_label_maps_in_the_colours_of_the_list(tmp_path):
    """As CVAT writes them."""
    numbers = numpy.arange(1024).reshape(32, 32) % 3
    colours = numpy.array([[0, 0, 0], [128, 0, 0], [0, 128, 0]])
    voc_layout(tmp_path, colours[numbers])
    assert any("colour picture (RGB)" in problem for problem in list_problems(tmp_path))
    (tmp_path / "labelmap.txt").write_text(LABELMAP)
    _, labels = load_segment(SegmentRecipe(data=str(tmp_path), crop=32), tmp_path, print).test[0]
    assert torch.equal(labels, torch.from_numpy(numbers).byte()) and list_problems(tmp_path) == []
    (tmp_path / "labelmap.txt").write_text(LABELMAP.replace("0,128,0", "1,2,3"))
    assert any("row 0, column 2: the colour [0, 128, 0]" in problem for problem in list_problems(tmp_path))


def test_more_labels_than_names_are_named(tmp_path):
    voc_layout(tmp_path)
    (tmp_path / "classes.txt").write_text("background\ncrack\n")
    assert any("label 2 at row 0" in problem for problem in list_problems(tmp_path))


def test_names_of_classes_are_told_apart(tmp_path):
    assert distinct(["a", "b", "a", "a"]) == ("a", "b", "a (2)", "a (3)")
    assert own_names(tmp_path) is None
