"""Lines of handwriting on disk: HTR-VT's lists, IAM, LAM, READ 2016 (PAGE files), a folder with texts, a tsv file."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from polymix.errors import DataError, OptionError, one_line
from polymix.files import is_file, once, regular
from polymix.train.data.pictures import SUFFIXES
from polymix.train.data.problems import Problems
from polymix.train.data.texts import composed, named_file, read_names, read_text

SPLITS = ("train", "val", "test")
_ENDINGS = (".png", *sorted(SUFFIXES - {".png"}))  # where several files have the stem of a text, the first one counts
TEST_INTERVAL = 10  # of a folder or a tsv without splits, every tenth page, or else line, is for the test

# Files that list IAM's lines or forms by split, under the names that are in use.
IAM_LISTS = {
    "train": ("train.uttlist", "trainset.txt", "train.txt"),
    "val": ("validation.uttlist", "validationset1.txt", "valid.txt", "val.txt"),
    "test": ("test.uttlist", "testset.txt", "test.txt"),
}


@dataclass(frozen=True)
class Line:
    """One line: its image, its text, and where it comes from.

    Args:
        image: the file.
        text: what is written.
        page: lines of equal page are put side by side by `pages_of`; "" for none.
        entry: what an error names, such as "data/lines.txt, line 7".
        box: (left, top, right, bottom) in pixels where the file is a whole page; None: all of it.
        outline: corners of the line on its page; what is outside becomes white.
        hidden: places in `text` whose ink is covered; known for synthetic lines alone.
        place: on the page, where the file's name says it, because lists may be shuffled.
        size: width and height of the page in whose pixels box and outline are, where its file says them.
    """

    image: Path
    text: str
    page: str = ""
    entry: str = ""
    box: tuple[int, int, int, int] | None = None
    outline: tuple[tuple[int, int], ...] = ()
    hidden: tuple[int, ...] = ()
    place: int = 0
    size: tuple[int, int] | None = None


@dataclass
class Reading:
    """The lines of each split, and what is wrong with the data.

    Args:
        folder: of the data set, or a tsv file.
        err: of IAM, take lines whose segmentation is marked "err" too.
        lists: of LAM, the folder below `folder` with the json lists; None: the only one.
    """

    folder: Path
    err: bool = False
    lists: str | None = None
    problems: Problems = field(default_factory=Problems)
    lines: dict[str, list[Line]] = field(default_factory=lambda: {split: [] for split in SPLITS})

    def problem(self, entry: str, text: str) -> None:
        self.problems.add(entry, "", text)

    def add(self, split: str, line: Line) -> None:
        """Adds a line unless its image is missing, or its text is empty or more than a line."""
        if not is_file(line.image):
            self.problem(line.entry, f"no image {line.image.name}")
        elif not line.text.strip():
            self.problem(line.entry, "an empty text")
        elif "\n" in line.text:
            many = line.text.count("\n") + 1
            self.problem(line.entry, f"a text of {many} lines; every line needs its own image and text")
        else:
            self.lines[split].append(line)


def layout_of(folder: Path, layout: str | None = None) -> str:
    """The layout of a folder or tsv file by its files, where it is not named. Raises DataError: there is none."""
    if not folder.exists():
        raise DataError("data", f"{folder}, which does not exist", "a folder or a tsv file", "Check the path.")
    layout = layout or next((name for name, (is_it, _) in LAYOUTS.items() if is_it(folder)), None)
    if layout is None:
        allowed = f"one of the layouts {', '.join(LAYOUTS)}"
        raise DataError("data", f"{folder}, whose files fit none", allowed, "See docs/domains/handwriting.md.")
    return layout


def read_lines(
    folder: str | Path, layout: str | None = None, *, err: bool = False, lists: str | None = None
) -> Reading:
    """The lines of a folder (or of a tsv file) by split, and all problems of the lists and texts.

    Args:
        layout: a name of `LAYOUTS`; None: recognised by the files. err, lists: as `Reading` takes them.

    Raises:
        DataError: there are no files of a layout, a file is no text, or LAM's lists have to be chosen.
        OptionError: `lists` for another layout than LAM's.
    """
    reading = Reading(Path(folder), err, lists)
    layout = layout_of(reading.folder, layout)
    if lists is not None and layout != "lam":
        raise OptionError("lists", repr(lists), f"None: the layout is {layout}", "Only LAM has several lists.")
    LAYOUTS[layout][1](reading)
    _check_splits(reading)
    return reading


def pages_of(lines: list[Line], limit: int) -> list[tuple[Line, ...]]:
    """Lines of a page side by side, at most `limit` together, in the page's order: LAM-Mul. Source: PoM, Sec. 4.2."""
    pages: dict[str, list[Line]] = {}
    for line in lines:
        pages.setdefault(line.page or line.entry, []).append(line)
    for page in pages.values():
        page.sort(key=lambda line: line.place)
    return [tuple(page[i : i + limit]) for page in pages.values() for i in range(0, len(page), limit)]


def _check_splits(reading: Reading) -> None:
    """No training lines, no lines to measure on, and a line in two splits are errors. Test lines serve as val lines."""
    lines = reading.lines
    if not lines["train"]:
        reading.problem(str(reading.folder), "no training lines")
    if not (lines["val"] or lines["test"]):
        reading.problem(str(reading.folder), "no lines to measure on, in val or in test")
    places: dict[tuple[Path, Any], tuple[str, str]] = {}
    for split in SPLITS:
        for line in lines[split]:
            other = places.setdefault((line.image, line.box), (split, line.entry))
            if other[0] != split:
                reading.problem(line.entry, f"{line.image.name} in {other[0]} and in {split}")
            elif other[1] != line.entry:
                reading.problem(line.entry, f"{line.image.name} twice in {split}")
    lines["val"] = lines["val"] or lines["test"]
    lines["test"] = lines["test"] or lines["val"]


def _last_number(stem: str) -> int:
    """The number at the end of a file's name; 0 if there is none."""
    digits = re.search(r"\d+$", stem)
    return int(digits.group()) if digits else 0


def _image_beside(folder: Path, stem: str) -> Path:
    images = (named_file(folder, f"{stem}{end}") for end in _ENDINGS)
    return next((path for path in images if is_file(path)), folder / f"{stem}.png")


def _is_htr_vt(folder: Path) -> bool:
    return (folder / "train.ln").is_file()


def _htr_vt(reading: Reading) -> None:
    """train.ln, val.ln, test.ln list file names; lines/ has the images and texts of equal stem."""
    for split in SPLITS:
        names = reading.folder / f"{split}.ln"
        for number, name in enumerate(read_names(names).splitlines() if names.is_file() else (), 1):
            if not name.strip():
                continue
            stem = Path(name.strip()).stem
            entry = f"{names}, line {number}: {name.strip()}"
            text = named_file(reading.folder / "lines", f"{stem}.txt")
            if not is_file(text):
                reading.problem(entry, f"no text lines/{text.name}")
                continue
            image, page = _image_beside(text.parent, stem), stem.rpartition("-")[0]
            with reading.problems.noting(entry):
                reading.add(split, Line(image, read_text(text).strip(), page, entry, place=_last_number(stem)))


def _iam_table(folder: Path) -> Path:
    return next((p for p in (folder / "ascii" / "lines.txt", folder / "lines.txt") if is_file(p)), folder / "lines.txt")


def _is_iam(folder: Path) -> bool:
    return _iam_table(folder).is_file() and (folder / "lines").is_dir()


def _iam(reading: Reading) -> None:
    """ascii/lines.txt with one line each: id, ok or err, grey level, components, box, text with | between words."""
    table, splits = _iam_table(reading.folder), _iam_splits(reading)
    for number, row in enumerate(read_text(table).splitlines(), 1):
        if not row.strip() or row.startswith("#"):
            continue
        words, entry = row.split(" ", 8), f"{table}, line {number}: {row.split(' ')[0]}"
        if len(words) < 9 or words[1] not in ("ok", "err"):
            form = "id, ok or err, grey level, components, x, y, w, h, text"
            reading.problem(entry, f"{row[:40]!r} instead of {form}")
            continue
        if words[1] == "err" and not reading.err:
            continue
        name = words[0]
        form = name.rpartition("-")[0]
        split = splits.get(name) or splits.get(form)
        if split is not None:
            image = _image_beside(reading.folder / "lines" / form.partition("-")[0] / form, name)
            reading.add(split, Line(image, words[8].replace("|", " ").strip(), form, entry))


def _iam_splits(reading: Reading) -> dict[str, str]:
    """The split of each line or form, by the lists beside the table."""
    splits: dict[str, str] = {}
    for split, names in IAM_LISTS.items():
        places = (reading.folder / sub / name for name in names for sub in ("", "ascii", "splits", "split"))
        for path in [p for p in places if is_file(p)][:1]:
            for name in read_text(path).split():
                if splits.setdefault(name, split) != split:
                    reading.problem(str(path), f"{name} in {splits[name]} and in {split}")
    if not splits:
        usual = "train.uttlist, validation.uttlist and test.uttlist"
        reading.problem(str(reading.folder), f"no list of a split, such as {usual}, beside lines.txt")
    return splits


def _lam_tables(folder: Path) -> list[Path]:
    """The json lists whose names say train, val or test."""
    return sorted(p for p in folder.rglob("*.json") if any(word in p.stem.lower() for word in SPLITS))


def lam_lists(folder: Path, lists: str | None) -> list[Path]:
    """The json lists of one split of the data. Raises DataError where there are several and none is chosen."""
    tables = _lam_tables(folder)
    places = sorted({p.parent.relative_to(folder).as_posix() for p in tables})
    if lists is None and len(places) > 1:
        got, allowed = f"{folder} with json lists in {len(places)} folders", f"one of {', '.join(places)}"
        raise DataError("data", got, allowed, f"Choose with --set lists={places[0]}.")
    if lists is not None and Path(lists).as_posix() not in places:
        raise DataError("lists", repr(lists), f"one of {', '.join(places)}", "Name a folder with json lists.")
    return [p for p in tables if lists is None or p.parent == folder / lists]


def is_lam_basic(folder: Path, layout: str | None, lists: str | None) -> bool:
    """Whether the lines are LAM's in its basic split, by the names of its lists. Raises DataError: there are none."""
    return layout_of(folder, layout) == "lam" and all(p.parent.name == "basic" for p in lam_lists(folder, lists))


def _is_lam(folder: Path) -> bool:
    return folder.is_dir() and bool(_lam_tables(folder))


def _lam(reading: Reading) -> None:
    """One json list a split: {"img", "text", "nameset", "decade_id", …}; the images lie anywhere below the folder."""
    images = {composed(p.name): p for p in reading.folder.rglob("*") if p.suffix.lower() in SUFFIXES}
    for table in lam_lists(reading.folder, reading.lists):
        try:
            rows = json.loads(read_text(table), object_pairs_hook=once)
        except (ValueError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            reading.problem(str(table), f"no json ({one_line(error)})")
            continue
        if not isinstance(rows, list):
            reading.problem(str(table), f"a json {type(rows).__name__} instead of a list of lines")
            continue
        for number, row in enumerate(rows):
            entry = f"{table}, entry {number}"
            if not isinstance(row, dict) or not isinstance(row.get("img"), str) or not isinstance(row.get("text"), str):
                reading.problem(entry, f'{str(row)[:60]} instead of a line with "img" and "text"')
                continue
            split = next((s for s in SPLITS if str(row.get("nameset", table.stem)).lower().startswith(s)), None)
            if split is None:
                reading.problem(entry, f"nameset {row.get('nameset')!r} instead of train, val or test")
                continue
            name = composed(Path(row["img"]).name)
            page = re.sub(r"[_-]\d+$", "", Path(name).stem)  # page_line.jpg
            image, place = images.get(name, reading.folder / row["img"]), _last_number(Path(name).stem)
            reading.add(split, Line(image, composed(row["text"]).strip(), page, f"{entry}: {name}", place=place))


def _page_files(folder: Path, split: str) -> list[Path]:
    return sorted(
        p for p in folder.rglob("*.xml")
        if any(part.lower().startswith(split) for part in p.relative_to(folder).parts[:-1])
    )  # fmt: skip


def _is_page(folder: Path) -> bool:
    return next(folder.rglob("*.xml"), None) is not None


def _page(reading: Reading) -> None:
    """PAGE files, as READ 2016 has them: Training/, Validation/, Test/ with images and an xml file per page."""
    images = {composed(p.stem): p for p in reading.folder.rglob("*") if p.suffix.lower() in SUFFIXES}
    for split in SPLITS:
        for path in _page_files(reading.folder, split):
            try:
                root = ElementTree.fromstring(regular(path).read_bytes())
            except (OSError, ElementTree.ParseError, ValueError, LookupError) as error:
                reading.problem(str(path), f"no xml ({error})")
                continue
            size = _page_size(root)
            for line in root.iterfind(".//{*}TextLine"):
                entry = f"{path}, line {line.get('id')}"
                points = line.find("{*}Coords")
                corners = _corners("" if points is None else points.get("points", ""))
                if len(corners) < 3:
                    reading.problem(entry, "no outline: Coords of three points or more")
                    continue
                text = composed(line.findtext("{*}TextEquiv/{*}Unicode") or "")
                if not text.strip():
                    continue  # READ 2016 outlines lines that nobody transcribed
                xs, ys = zip(*corners, strict=True)
                box = (max(min(xs), 0), max(min(ys), 0), max(xs) + 1, max(ys) + 1)
                image = images.get(composed(path.stem), path.with_suffix(".jpg"))
                reading.add(split, Line(image, text.strip(), path.stem, entry, box, tuple(corners), size=size))


def _page_size(root: ElementTree.Element) -> tuple[int, int] | None:
    """Width and height of a page's image as its PAGE file says them."""
    page = root.find(".//{*}Page")
    sides = [] if page is None else [page.get(name, "") for name in ("imageWidth", "imageHeight")]
    return (int(sides[0]), int(sides[1])) if sides and all(side.isdecimal() for side in sides) else None


def _corners(points: str) -> list[tuple[int, int]]:
    pairs = [pair.split(",") for pair in points.split()]
    try:
        return [(int(float(x)), int(float(y))) for x, y in pairs]
    except ValueError:
        return []


def _is_folder(folder: Path) -> bool:
    return folder.is_dir() and next(_texts(folder), None) is not None


def _texts(folder: Path) -> Iterator[Path]:
    return (p for p in sorted(folder.rglob("*.txt")) if is_file(_image_beside(p.parent, p.stem)))


def _folder(reading: Reading) -> None:
    """An image and a text of equal stem; splits by folders train, val, test, or else every tenth page is held out."""
    loose: list[Line] = []
    for text in _texts(reading.folder):
        name = text.relative_to(reading.folder)
        split = next((s for s in SPLITS if name.parts[0].lower().startswith(s) and len(name.parts) > 1), None)
        with reading.problems.noting():
            line = Line(_image_beside(text.parent, text.stem), read_text(text).strip(), "", str(text))
            if split:
                reading.add(split, line)
            else:
                loose.append(line)
    _hold_out(loose, reading)


def _tsv(file: Path) -> Path | None:
    if is_file(file):
        return file if file.suffix in (".tsv", ".txt") else None
    return next(iter(sorted(file.glob("*.tsv"))), None)


def _read_tsv(reading: Reading) -> None:
    """file<TAB>text, and perhaps <TAB>train, val or test, and <TAB>page. Paths are relative to the tsv."""
    table = _tsv(reading.folder)
    if table is None:
        got = f"{reading.folder} without a tsv file"
        raise DataError("data", got, "a file with image<TAB>text in each line", "Add it.")
    loose: list[Line] = []
    for number, row in enumerate(read_text(table).split("\n"), 1):
        if not row.strip():
            continue
        words, entry = row.split("\t"), f"{table}, line {number}"
        if len(words) < 2:
            reading.problem(entry, f"{row[:40]!r} without a tab between image and text")
            continue
        split = words[2].strip() if len(words) > 2 else ""
        page = words[3].strip() if len(words) > 3 else ""
        line = Line(named_file(table.parent, words[0].strip()), words[1].strip(), page, entry)
        if not split:
            loose.append(line)
        elif split in SPLITS:
            reading.add(split, line)
        else:
            reading.problem(entry, f"the split {split!r} instead of train, val or test")
    _hold_out(loose, reading)


def _hold_out(lines: list[Line], reading: Reading) -> None:
    """Lines without a split: every tenth page (or line, without pages) is for measuring."""
    groups = list(Counter(line.page or line.entry for line in lines))
    test = set(groups[::TEST_INTERVAL]) if len(groups) > 1 else set()
    for line in lines:
        reading.add("test" if (line.page or line.entry) in test else "train", line)


Reader = Callable[[Reading], None]
LAYOUTS: dict[str, tuple[Callable[[Path], bool], Reader]] = {
    "htr-vt": (_is_htr_vt, _htr_vt),
    "iam": (_is_iam, _iam),
    "lam": (_is_lam, _lam),
    "read2016": (_is_page, _page),
    "tsv": (lambda folder: _tsv(folder) is not None, _read_tsv),
    "folder": (_is_folder, _folder),
}
