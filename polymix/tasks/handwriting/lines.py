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

from polymix.errors import DataError, OptionError, nearest_first

SPLITS = ("train", "val", "test")
IMAGES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp")
HELD_OUT = 0.1  # of a folder or a tsv without splits: of the pages, or else of the lines
BOX = 4  # numbers

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
        entry: what an error names, such as "lines.txt, line 7".
        box: (left, top, right, bottom) in pixels where the file is a whole page; None: all of it.
        outline: corners of the line on its page; what is outside becomes white.
        hidden: places in `text` whose ink is covered; known for made lines alone.
        place: on the page, where the file's name tells it, because lists may be shuffled.
    """

    image: Path
    text: str
    page: str = ""
    entry: str = ""
    box: tuple[int, int, int, int] | None = None
    outline: tuple[tuple[int, int], ...] = ()
    hidden: tuple[int, ...] = ()
    place: int = 0


@dataclass
class Reading:
    """The lines of each split, and what was wrong. `problems` is filled instead of raising where `strict` is False."""

    strict: bool = True
    lines: dict[str, list[Line]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    problems: list[str] = field(default_factory=list)

    def problem(self, entry: str, got: str, expected: str, cure: str) -> None:
        error = DataError("--data", f"{got} ({entry})", expected, cure)
        if self.strict:
            raise error
        self.problems.append(str(error))

    def add(self, split: str, line: Line) -> None:
        """Adds a line unless its image is missing, or its text is empty or more than a line."""
        if not line.image.is_file():
            cure = "Add the file, or remove the entry."
            self.problem(line.entry, f"no image {line.image.name}", "an image for each text", cure)
        elif not line.text.strip():
            self.problem(line.entry, "an empty text", "the text of the line", "Write the text, or remove the entry.")
        elif "\n" in line.text:
            got = f"a text of {line.text.count(chr(10)) + 1} lines"
            self.problem(line.entry, got, "one line", "Give every line its own image and text.")
        else:
            self.lines[split].append(line)


def read_lines(
    folder: str | Path, layout: str | None = None, *, strict: bool = True, err: bool = False, lists: str | None = None
) -> Reading:
    """The lines of a folder (or of a tsv file), by split.

    Args:
        folder: of the data set.
        layout: a name of `LAYOUTS`; None: told by the files.
        strict: raise at the first problem. False: collect all of them in `problems`.
        err: of IAM, take lines whose segmentation is marked "err" too.
        lists: of LAM, the folder below `folder` with the json lists; None: the only one.

    Raises:
        DataError: names the file and the entry.
        OptionError: an unknown layout, or `lists` for another layout than LAM's.
    """
    folder = Path(folder)
    if not folder.exists():
        raise DataError("--data", f"{folder}, which does not exist", "a folder or a tsv file", "Check the path.")
    if layout is None:
        layout = next((name for name, (is_it, _) in LAYOUTS.items() if is_it(folder)), None)
        if layout is None:
            expected = f"one of the layouts {', '.join(LAYOUTS)}"
            raise DataError("--data", f"{folder}, whose files fit none", expected, "See docs/tasks/handwriting.md.")
    if layout not in LAYOUTS:
        names = ", ".join(nearest_first(layout, LAYOUTS))
        raise OptionError("layout", repr(layout), f"one of {names}", "See docs/tasks/handwriting.md.")
    if lists is not None and layout != "lam":
        raise OptionError("lists", repr(lists), f"None: the layout is {layout}", "Only LAM has several lists.")
    reading = Reading(strict)
    if layout == "iam":
        _iam(folder, reading, err)
    elif layout == "lam":
        _lam(folder, reading, lists)
    else:
        LAYOUTS[layout][1](folder, reading)
    _check_splits(folder, reading)
    return reading


def text_of(path: Path, reading: Reading | None = None) -> str:
    """The text of a file in UTF-8, with or without a byte-order mark, with any line ends. Raises DataError."""
    try:
        return path.read_text("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        got = f"{path.name}, which is not UTF-8 (byte {error.start})"
        raise DataError("--data", got, "text in UTF-8", "Convert the file, for example by iconv.") from error
    except OSError as error:
        raise DataError("--data", f"{path}: {error.strerror}", "a readable file", "Check the path.") from error


def pages_of(lines: list[Line], most: int) -> list[tuple[Line, ...]]:
    """Lines of a page side by side, at most `most` together, in the page's order: LAM-Mul. Source: PoM, Sec. 4.2."""
    pages: dict[str, list[Line]] = {}
    for line in lines:
        pages.setdefault(line.page or line.entry, []).append(line)
    for page in pages.values():
        page.sort(key=lambda line: line.place)
    return [tuple(page[i : i + most]) for page in pages.values() for i in range(0, len(page), most)]


def _check_splits(folder: Path, reading: Reading) -> None:
    """No training lines, no lines to measure on, and a line in two splits are errors. Test lines serve as val lines."""
    lines = reading.lines
    if not lines["train"]:
        reading.problem(str(folder), "no training lines", "some", "Check the split's list.")
    if not (lines["val"] or lines["test"]):
        reading.problem(str(folder), "no lines to measure on", "a val or a test split", "Check the splits' lists.")
    seen: dict[tuple[Path, Any], tuple[str, str]] = {}
    for split in SPLITS:
        for line in lines[split]:
            other = seen.setdefault((line.image, line.box), (split, line.entry))
            if other[0] != split:
                got = f"{line.image.name} in {other[0]} and in {split}"
                reading.problem(line.entry, got, "splits without common lines", "Remove it from one of them.")
            elif other[1] != line.entry:
                reading.problem(line.entry, f"{line.image.name} twice", "each line once", "Remove one entry.")
    lines["val"] = lines["val"] or lines["test"]
    lines["test"] = lines["test"] or lines["val"]


def _last_number(stem: str) -> int:
    """The number at the end of a file's name; 0 if there is none."""
    found = re.search(r"\d+$", stem)
    return int(found.group()) if found else 0


def _image_beside(folder: Path, stem: str) -> Path:
    return next((p for p in (folder / f"{stem}{end}" for end in IMAGES) if p.is_file()), folder / f"{stem}.png")


def _is_htr_vt(folder: Path) -> bool:
    return (folder / "train.ln").is_file()


def _htr_vt(folder: Path, reading: Reading) -> None:
    """train.ln, val.ln, test.ln list file names; lines/ has the images and texts of equal stem."""
    for split in SPLITS:
        names = folder / f"{split}.ln"
        for number, name in enumerate(text_of(names).splitlines() if names.is_file() else (), 1):
            if not name.strip():
                continue
            stem = Path(name.strip()).stem
            entry, text = f"{names.name}, line {number}: {name.strip()}", folder / "lines" / f"{stem}.txt"
            if not text.is_file():
                reading.problem(entry, f"no text lines/{text.name}", "a text for each image", "Add the file.")
                continue
            image, page = _image_beside(text.parent, stem), stem.rpartition("-")[0]
            reading.add(split, Line(image, text_of(text).strip(), page, entry, place=_last_number(stem)))


def _iam_table(folder: Path) -> Path:
    return next(
        (p for p in (folder / "ascii" / "lines.txt", folder / "lines.txt") if p.is_file()), folder / "lines.txt"
    )


def _is_iam(folder: Path) -> bool:
    return _iam_table(folder).is_file() and (folder / "lines").is_dir()


def _iam(folder: Path, reading: Reading, err: bool) -> None:
    """ascii/lines.txt with one line each: id, ok or err, grey level, components, box, text with | between words."""
    table, wanted = _iam_table(folder), _iam_splits(folder, reading)
    for number, row in enumerate(text_of(table).splitlines(), 1):
        if not row.strip() or row.startswith("#"):
            continue
        words, entry = row.split(" ", 8), f"{table.name}, line {number}: {row.split(' ')[0]}"
        if len(words) < 9 or words[1] not in ("ok", "err"):
            expected = "id, ok or err, grey level, components, x, y, w, h, text"
            reading.problem(entry, f"{row[:40]!r}", expected, "Restore the line of the official file.")
            continue
        if words[1] == "err" and not err:
            continue
        name = words[0]
        form = name.rpartition("-")[0]
        split = wanted.get(name) or wanted.get(form)
        if split is not None:
            image = _image_beside(folder / "lines" / form.partition("-")[0] / form, name)
            reading.add(split, Line(image, words[8].replace("|", " ").strip(), form, entry))


def _iam_splits(folder: Path, reading: Reading) -> dict[str, str]:
    """The split of each line or form, by the lists beside the table."""
    wanted: dict[str, str] = {}
    for split, names in IAM_LISTS.items():
        places = (folder / sub / name for name in names for sub in ("", "ascii", "splits", "split"))
        for path in [p for p in places if p.is_file()][:1]:
            for name in text_of(path).split():
                if wanted.setdefault(name, split) != split:
                    got = f"{name} in {wanted[name]} and in {split}"
                    reading.problem(path.name, got, "splits without common lines", "Remove it from one of them.")
    if not wanted:
        expected = "lists of ids such as train.uttlist, validation.uttlist and test.uttlist"
        reading.problem(str(folder), "no list of a split", expected, "Put the official lists beside lines.txt.")
    return wanted


def _lam_tables(folder: Path) -> list[Path]:
    """The json lists whose names say train, val or test."""
    return sorted(p for p in folder.rglob("*.json") if any(word in p.stem.lower() for word in SPLITS))


def _lam_chosen(folder: Path, lists: str | None) -> list[Path]:
    """The lists of one split of the data. Raises DataError where there are several and none is chosen."""
    tables = _lam_tables(folder)
    places = sorted({p.parent.relative_to(folder).as_posix() for p in tables})
    if lists is None and len(places) > 1:
        got, allowed = f"{folder} with json lists in {len(places)} folders", f"one of {', '.join(places)}"
        raise DataError("--data", got, allowed, f"Choose with --set lists={places[0]}.")
    if lists is not None and Path(lists).as_posix() not in places:
        raise DataError("lists", repr(lists), f"one of {', '.join(places)}", "Name a folder with json lists.")
    return [p for p in tables if lists is None or p.parent == folder / lists]


def _is_lam(folder: Path) -> bool:
    return folder.is_dir() and bool(_lam_tables(folder))


def _lam(folder: Path, reading: Reading, lists: str | None = None) -> None:
    """One json list a split: {"img", "text", "nameset", "decade_id", …}; the images lie anywhere below the folder."""
    images = {p.name: p for p in folder.rglob("*") if p.suffix.lower() in IMAGES}
    for table in _lam_chosen(folder, lists):
        try:
            rows = json.loads(text_of(table))
        except json.JSONDecodeError as error:
            reading.problem(table.name, f"no json ({error})", "a json list of lines", "Restore the file.")
            continue
        if not isinstance(rows, list):
            reading.problem(table.name, f"a json {type(rows).__name__}", "a list of lines", "Restore the file.")
            continue
        for number, row in enumerate(rows):
            entry = f"{table.name}, entry {number}"
            if not isinstance(row, dict) or not isinstance(row.get("img"), str) or not isinstance(row.get("text"), str):
                reading.problem(entry, f"{str(row)[:60]}", 'a line with "img" and "text"', "Complete the entry.")
                continue
            split = next((s for s in SPLITS if str(row.get("nameset", table.stem)).lower().startswith(s)), None)
            if split is None:
                reading.problem(entry, f"nameset {row.get('nameset')!r}", "train, val or test", "Correct the entry.")
                continue
            name = Path(row["img"]).name
            page = re.sub(r"[_-]\d+$", "", Path(name).stem)  # page_line.jpg
            image, place = images.get(name, folder / row["img"]), _last_number(Path(name).stem)
            reading.add(split, Line(image, row["text"].strip(), page, f"{entry}: {name}", place=place))


def _page_files(folder: Path, split: str) -> list[Path]:
    inside = {"train": ("train",), "val": ("val",), "test": ("test",)}[split]
    return sorted(
        p for p in folder.rglob("*.xml")
        if any(part.lower().startswith(inside) for part in p.relative_to(folder).parts[:-1])
    )  # fmt: skip


def _is_page(folder: Path) -> bool:
    return next(folder.rglob("*.xml"), None) is not None


def _page(folder: Path, reading: Reading) -> None:
    """PAGE files, as READ 2016 has them: Training/, Validation/, Test/ with images and an xml file per page."""
    images = {p.stem: p for p in folder.rglob("*") if p.suffix.lower() in IMAGES}
    for split in SPLITS:
        for path in _page_files(folder, split):
            try:
                root = ElementTree.parse(path).getroot()
            except ElementTree.ParseError as error:
                reading.problem(path.name, f"no xml ({error})", "a PAGE file", "Restore the file.")
                continue
            for line in root.iterfind(".//{*}TextLine"):
                entry = f"{path.name}, line {line.get('id')}"
                points = line.find("{*}Coords")
                corners = _corners("" if points is None else points.get("points", ""))
                if len(corners) < 3:
                    reading.problem(entry, "no outline", "Coords of three points or more", "Remove the line.")
                    continue
                text = line.findtext("{*}TextEquiv/{*}Unicode") or ""
                if not text.strip():
                    continue  # READ 2016 outlines lines that nobody transcribed
                xs, ys = zip(*corners, strict=True)
                box = (max(min(xs), 0), max(min(ys), 0), max(xs) + 1, max(ys) + 1)
                image = images.get(path.stem, path.with_suffix(".jpg"))
                reading.add(split, Line(image, text.strip(), path.stem, entry, box, tuple(corners)))


def _corners(points: str) -> list[tuple[int, int]]:
    pairs = [pair.split(",") for pair in points.split()]
    try:
        return [(int(float(x)), int(float(y))) for x, y in pairs]
    except ValueError:
        return []


def _is_folder(folder: Path) -> bool:
    return folder.is_dir() and next(_texts(folder), None) is not None


def _texts(folder: Path) -> Iterator[Path]:
    return (p for p in sorted(folder.rglob("*.txt")) if _image_beside(p.parent, p.stem).is_file())


def _folder(folder: Path, reading: Reading) -> None:
    """An image and a text of equal stem; splits by folders train, val, test, or else every tenth page is held out."""
    loose: list[Line] = []
    for text in _texts(folder):
        name = text.relative_to(folder)
        line = Line(_image_beside(text.parent, text.stem), text_of(text).strip(), "", str(name))
        split = next((s for s in SPLITS if name.parts[0].lower().startswith(s) and len(name.parts) > 1), None)
        if split:
            reading.add(split, line)
        else:
            loose.append(line)
    _hold_out(loose, reading)


def _tsv(file: Path) -> Path | None:
    if file.is_file():
        return file if file.suffix in (".tsv", ".txt") else None
    return next(iter(sorted(file.glob("*.tsv"))), None)


def _read_tsv(folder: Path, reading: Reading) -> None:
    """file<TAB>text, and perhaps <TAB>train, val or test, and <TAB>page. Paths are relative to the tsv."""
    table = _tsv(folder)
    if table is None:
        raise DataError("--data", f"{folder} without a tsv file", "a file with image<TAB>text in each line", "Add it.")
    loose: list[Line] = []
    for number, row in enumerate(text_of(table).split("\n"), 1):
        if not row.strip():
            continue
        words, entry = row.split("\t"), f"{table.name}, line {number}"
        if len(words) < 2:
            reading.problem(entry, f"{row[:40]!r} without a tab", "image<TAB>text", "Separate the two by a tab.")
            continue
        split = words[2].strip() if len(words) > 2 else ""
        page = words[3].strip() if len(words) > 3 else ""
        line = Line(table.parent / words[0].strip(), words[1].strip(), page, entry)
        if not split:
            loose.append(line)
        elif split in SPLITS:
            reading.add(split, line)
        else:
            reading.problem(entry, f"the split {split!r}", "train, val or test", "Correct the third column.")
    _hold_out(loose, reading)


def _hold_out(lines: list[Line], reading: Reading) -> None:
    """Lines without a split: every tenth page (or line, without pages) is for measuring."""
    groups = list(Counter(line.page or line.entry for line in lines))
    held = set(groups[:: max(round(1 / HELD_OUT), 1)]) if len(groups) > 1 else set()
    for line in lines:
        reading.add("test" if (line.page or line.entry) in held else "train", line)


Reader = Callable[[Path, Reading], None]
LAYOUTS: dict[str, tuple[Callable[[Path], bool], Reader]] = {
    "htr-vt": (_is_htr_vt, _htr_vt),
    "iam": (_is_iam, lambda folder, reading: _iam(folder, reading, False)),
    "lam": (_is_lam, lambda folder, reading: _lam(folder, reading)),
    "read2016": (_is_page, _page),
    "tsv": (lambda folder: _tsv(folder) is not None, _read_tsv),
    "folder": (_is_folder, _folder),
}
