"""What domains share is written once: a fault that is mended in one place must not live on in another."""

from pathlib import Path

import pytest

import polymix

ROOT = Path(polymix.__file__).parent


@pytest.mark.parametrize(("call", "places"), [
    ("Image.open(", {"train/data/pictures.py"}), ("exif_transpose(", {"train/data/pictures.py"}),
    ("Image.frombytes(", set()), (".alpha_composite(", {"train/data/pictures.py"}),
    ("has_transparency", {"train/data/pictures.py"}),
    # lens and pages draw figures that are no results of a training, in other formats.
    (".savefig(", {"train/data/drawing.py", "lens/plots.py", "pages/plots.py"}),
    ("import pycocotools.mask", {"train/data/boxes/masks.py"}), ("class Confusion", {"train/data/label_maps.py"}),
    ("class Problems", {"train/data/problems.py"}), ("* count // few", {"train/data/splits.py"}),
])  # fmt: skip
def test_it_is_in_one_place(call, places):
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if call in path.read_text("utf-8")}
    assert files == places, f"{call} belongs to {places or 'nothing'}"
