"""A small data set in each layout that a domain reads, and ways to damage its files."""

import copy
import json
import os
import pickle
import re

import numpy
import torch
from PIL import Image

from polymix.train.registry import named_recipe
from polymix.train.run import check_recipe
from tests.domains.box_files import photo, write_coco, write_voc
from tests.domains.idx_files import write_idx
from tests.domains.texts import folder as text_files
from tests.domains.texts import shard

HUGE = 10**400
# In place of any value of a JSON file.
ODD = {"null": None, "true": True, "negative": -1, "huge": HUGE, "NaN": float("nan"), "text": "x", "NUL": "\0", "dict": {},
       "list": [], "nested": [[1], "x"]}  # fmt: skip
RAW = {"empty": b"", "zeros": bytes(64), "binary": b"\xff\xfe\x00\x81", "deep": b"[" * 10_000, "digits": b"9" * 5000,
       "list": b"[]", "a dict": b"{}", "twice": b'{"a": 1, "a": 2}'}  # fmt: skip


def _header(text):
    """A .npy file of version 1 with some header, and 64 bytes of numbers."""
    body = text.encode("latin1").ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body + bytes(64)


def _shape(shape, kind="<f4"):
    return _header(f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}")


HEADERS = {
    "negative": _shape("(-1, 10, 24, 24)"), "huge": _shape(f"({10**12}, 10, 24, 24)"), "overflow": _shape(f"({2**63}, 4)"),
    "beyond": _shape(f"({10**30},)"), "more than there is": _shape("(99, 10, 8, 8)"), "no axis": _shape("()"),
    "none": _shape("(0, 10, 8, 8)"), "objects": _shape("(4,)", "|O"), "text": _shape("(4,)", "<U4"),
    "dates": _shape("(4,)", "<M8[s]"), "complex": _shape("(4,)", "<c8"), "fields": _header(
        "{'descr': [('x', '<f4')], 'fortran_order': False, 'shape': (4,)}"),
    "other order": _shape("(2, 3)", ">f4"), "no dict": _header("[1, 2]"), "code": _header("__import__('os').abort()"),
    "version 9": b"\x93NUMPY\x09\x00" + bytes(100), "cut": b"\x93NUMPY\x01\x00\x76", "half a bracket": _header("{'descr': ("),
    "a zip": b"PK\x05\x06" + bytes(18), "bool sizes": _shape("(True, 2)"),
}  # fmt: skip


def _synthetic(domain, **options):
    """The default data of a domain, which lie on the disk as its usual layout has them."""

    def write(folder):
        task = check_recipe(named_recipe(domain).preset("tiny").changed(**options))
        task.load(folder)
        return next(path for path in folder.iterdir() if path.is_dir())

    return write


def _by_class(folder):
    for name in ("a", "b"):
        for place in range(4):
            photo(folder / name / f"{place}.png", (8, 8))
    return folder


def _voc_labels(folder):
    for name in ("x", "y"):
        photo(folder / "JPEGImages" / f"{name}.jpg", (16, 16))
        (folder / "SegmentationClass").mkdir(exist_ok=True)
        Image.fromarray(numpy.arange(256, dtype=numpy.uint8).reshape(16, 16) % 3).save(
            folder / "SegmentationClass" / f"{name}.png"
        )
    (folder / "ImageSets" / "Segmentation").mkdir(parents=True)
    for split in ("train", "val"):
        (folder / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("x\ny\n")
    return folder


def _pointcept(folder):
    for part in ("train", "val"):
        scene = folder / part / "scene0"
        scene.mkdir(parents=True)
        generator = numpy.random.default_rng(0)
        numpy.save(scene / "coord.npy", generator.uniform(0, 4, (64, 3)).astype(numpy.float32))
        numpy.save(scene / "color.npy", generator.integers(0, 255, (64, 3), dtype=numpy.uint8))
        numpy.save(scene / "segment20.npy", generator.integers(0, 3, (64, 1), dtype=numpy.int16))
    return folder


def _pastis24(folder):
    for split in ("train", "val", "test"):
        content = {"img": numpy.zeros((3, 10, 24, 24), numpy.int16), "labels": numpy.zeros((24, 24), numpy.uint8),
                   "doy": numpy.arange(1, 4)}  # fmt: skip
        (folder / f"{split}.pickle").write_bytes(pickle.dumps(content))
        (folder / f"{split}.csv").write_text(f"{split}.pickle\n")
    return folder


def _lam(folder):
    for number in range(3):
        photo(folder / "lines" / f"page_{number}.jpg", (40, 20), "L")
    rows = [{"img": f"page_{n}.jpg", "nameset": split, "text": f"riga {n}"}
            for n, split in enumerate(("train", "train", "test"))]  # fmt: skip
    (folder / "train.json").write_text(json.dumps(rows[:2]))
    (folder / "test.json").write_text(json.dumps(rows[2:]))
    return folder


def _page(folder):
    for split in ("Training", "Test"):
        photo(folder / split / "page" / f"{split}.jpg", (100, 60), "L")
        (folder / split / "page" / f"{split}.xml").write_text(
            '<PcGts xmlns="http://schema.primaresearch.org/PAGE/gts/pagecontent/2013-07-15"><Page><TextLine id="l1">'
            '<Coords points="10,10 50,10 50,30 10,30"/><TextEquiv><Unicode>den</Unicode></TextEquiv></TextLine></Page></PcGts>'
        )
    return folder


def _cifar(folder):
    for name, images in (("train", 4), ("test", 2)):
        rows = torch.randint(0, 99, (images, 2 + 3 * 32 * 32), dtype=torch.uint8)
        (folder / f"{name}.bin").write_bytes(rows.numpy().tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(f"class{place}" for place in range(100)))
    return folder


def _cifar_pickles(folder):
    for name, images in (("train", 4), ("test", 2)):
        content = {"data": numpy.zeros((images, 3 * 32 * 32), numpy.uint8), "fine_labels": [0, 1] * (images // 2)}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"class{place}" for place in range(100)]}))
    return folder


def _with_masks(folder):
    """COCO's layout, without the object that has no mask."""
    for path in (write_coco(folder) / "annotations").iterdir():
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "annotations": content["annotations"][:-1]}))
    return folder


def _texts(folder):
    text_files(folder / "texts")
    return folder / "texts"


def _shards(folder):
    shard(folder / "train.bin", [place % 50 for place in range(400)])
    return folder


def _csv(folder):
    rows = [f"2026-01-{1 + hour // 24:02} {hour % 24:02}:00,{hour % 7},{hour % 5}.5" for hour in range(240)]
    (folder / "series.csv").write_text("\n".join(["date,one,two", *rows]) + "\n")
    return folder


def _m4(folder):
    for part, steps in (("train", 80), ("test", 12)):
        rows = [",".join(("id", *(f"V{step}" for step in range(steps))))]
        rows += [f"H{place}," + ",".join(str(step % (5 + place)) for step in range(steps)) for place in range(3)]
        (folder / f"Hourly-{part}.csv").write_text("\n".join(rows) + "\n")
    return folder


# By domain and layout: what writes it, and the options that it needs.
DATA_SETS = {
    "classify": (_by_class, {"image_size": 8}), "classify cifar": (_cifar, {}),
    "classify idx": (write_idx, {"image_size": 6}),
    "classify pickles": (_cifar_pickles, {"allow_pickle": True}), "detect": (write_coco, {}),
    "detect voc": (write_voc, {}), "detect3d": (_synthetic("detect3d"), {}), "faces": (_synthetic("faces"), {}),
    "generation": (_by_class, {"image_size": 8}), "handwriting": (_synthetic("handwriting"), {}),
    "handwriting lam": (_lam, {}), "handwriting page": (_page, {}), "instances": (_with_masks, {}),
    "jigsaw": (_by_class, {}), "satellite": (_synthetic("satellite"), {}),
    "satellite pastis24": (_pastis24, {"allow_pickle": True}), "segment": (_synthetic("segment"), {}),
    "timeseries": (_csv, {}), "timeseries m4": (_m4, {}), "timeseries tsf": (_synthetic("timeseries"), {}),
    "timeseries anomalies": (_synthetic("timeseries", goal="anomalies"), {"goal": "anomalies"}),
    "timeseries classes": (_synthetic("timeseries", goal="classes"), {"goal": "classes"}),
    "video": (_synthetic("video"), {}), "depth": (_synthetic("depth"), {}), "speech": (_synthetic("speech"), {}),
    "segment voc": (_voc_labels, {}), "segment3d": (_synthetic("segment3d"), {}),
    "segment3d pointcept": (_pointcept, {}), "text": (_texts, {"context": 16, "vocab": 300}),
    "text shards": (_shards, {"context": 16, "vocab": 64}),
}  # fmt: skip


def write_data_set(name, folder):
    """The folder of a data set, and the recipe that reads it."""
    write, options = DATA_SETS[name]
    folder.mkdir(parents=True)
    source = write(folder)
    (source / "synthetic.json").unlink(missing_ok=True)
    recipe = named_recipe(name.split()[0])
    recipe = recipe.preset("tiny") if "tiny" in recipe.presets else recipe
    return source, recipe.changed(data=str(source), control=False, **options)


def kinds_of(folder):
    """A file of each kind: of those in one folder with one suffix, and one name but for numbers, the last one."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    named = {".json", ".geojson", ".txt", ".npy"}  # whose names say what they are
    return list({(path.parent, re.sub(r"\d", "", path.stem) if path.suffix in named and len(files) < 99 else "", path.suffix): path
                 for path in files}.values())  # fmt: skip


def damages(path):
    """(label, bytes) for a file: what no reader takes, and for JSON and arrays each part in turn replaced."""
    whole = path.read_bytes()
    yield from RAW.items()
    yield "cut", whole[: len(whole) // 2]
    yield "cut at the end", whole[:-3]
    if path.suffix == ".npy":
        yield from HEADERS.items()
    if path.suffix in (".json", ".geojson"):
        content = json.loads(whole)
        for place in _places(content, ()):
            for label, value in ODD.items():
                other = copy.deepcopy(content)
                part = other
                for key in place[:-1]:
                    part = part[key]
                part[place[-1]] = value
                yield f"{'.'.join(map(str, place))} as {label}", json.dumps(other).encode()


def _places(content, above):
    """The path to each value; of a list of many only to the first, second and last."""
    if isinstance(content, dict):
        keys = [*content][:40]
    elif isinstance(content, list):
        keys = sorted({0, 1, len(content) - 1} & set(range(len(content)))) if len(content) > 4 else range(len(content))
    else:
        return
    for key in keys:
        yield (*above, key)
        yield from _places(content[key], (*above, key))


def without_file(path, how):
    """Put a pipe, a folder or nothing in a file's place."""
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
