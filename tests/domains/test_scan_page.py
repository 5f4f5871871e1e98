"""The page in which one can turn a scan: what it holds, and that it draws, turns and switches in a real browser."""

import io
import time

import numpy
import pytest
import torch

from polymix.domains.detect3d.rotated import corners
from polymix.domains.segment3d.layouts import VOID
from polymix.domains.segment3d.metrics import scene_of
from polymix.train.data.scans import page as scan_page
from polymix.train.data.scans.page import Boxes, Colouring, Scene, write_page
from tests.browser import needs_browser, opened

LEGEND = {0: ("road", "#ff0000"), 1: ("car", "#0000ff"), 2: ("tree", "#00ff00")}


def scene(points=400):
    """A flat square, all of it road, of which the prediction makes cars; and a box above it."""
    draw = numpy.random.default_rng(0)
    places = numpy.concatenate((draw.uniform(-10, 10, (points, 2)), numpy.zeros((points, 1))), 1)
    road, car = numpy.zeros(points, int), numpy.ones(points, int)
    box = corners(torch.tensor([[0.0, 0, 2, 6, 4, 3, 0.3]]))
    colourings = {"truth": Colouring(road, LEGEND), "prediction": Colouring(car, LEGEND)}
    return Scene(places, colourings, {"true boxes": Boxes(box, ["lorry"], "#00ff00")})


def test_the_page_holds_all_that_it_needs_and_allows_no_requests(tmp_path):
    page = write_page(tmp_path / "a.html", scene(), "<scan> & more").read_text("utf-8")
    assert "default-src 'none'" in page
    assert "&lt;scan&gt; &amp; more: 400 points." in page and "<scan>" not in page
    assert all(name in page for name in ("road", "car", "true boxes", "lorry"))
    assert '"name":"tree"' not in page.replace(" ", ""), "a class without points has no place in the legend"
    assert "<script src" not in page


def test_large_clouds_are_thinned_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(scan_page, "MAX_POINTS", 100)
    page = write_page(tmp_path / "a.html", scene(350), "scan").read_text("utf-8")
    assert "350 points, one in 4 of them drawn." in page


def test_clouds_without_classes_and_without_points(tmp_path):
    for points in (numpy.zeros((0, 3)), numpy.ones((1, 4))):
        assert f"{len(points)} points" in write_page(tmp_path / "a.html", Scene(points), "scan").read_text("utf-8")
    empty = Scene(numpy.ones((5, 3)), boxes={"prediction": Boxes(torch.zeros(0, 8, 3), [], "#00ff00")})
    write_page(tmp_path / "a.html", empty, "scan")


def test_every_class_of_a_scan_has_a_colour_that_the_page_takes(tmp_path):
    """With void and more classes than the palette, which has names that only matplotlib knows."""
    classes = numpy.array([VOID, *range(30)])
    scan = scene_of(numpy.ones((31, 3)), {"truth": classes}, [f"class {place}" for place in range(30)])
    page = write_page(tmp_path / "a.html", scan, "scan").read_text("utf-8")
    assert "class 29" in page and "void" in page


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1000, 400])
def test_it_draws_turns_and_switches_in_a_browser(width, tmp_path):
    image = pytest.importorskip("PIL.Image")
    page_file = write_page(tmp_path / "page.html", scene(4000), "scan")

    def pixels(page):
        page.screenshot(tmp_path / "shot.png")
        return numpy.asarray(image.open(io.BytesIO((tmp_path / "shot.png").read_bytes())).convert("RGB")).astype(int)

    def drawn(page, colour):
        """How many pixels have about this colour, once there are some, or after ten seconds."""
        for _ in range(40):
            count = int((numpy.abs(pixels(page) - colour).max(2) < 90).sum())
            if count > 500:
                return count
            time.sleep(0.25)
        return count

    with opened(page_file, tmp_path / "profile", watch=True) as page:
        page.send("Emulation.setDeviceMetricsOverride", width=width, height=700, deviceScaleFactor=1, mobile=False)
        assert drawn(page, (255, 0, 0)) > 500, "the road, in the colour of its class"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        before = pixels(page)
        page.drag([(width // 2 + 4 * step, 400) for step in range(25)])
        time.sleep(1)
        assert (pixels(page) != before).any(2).mean() > 0.01, "the cloud has turned"
        where = page.evaluate(
            "(() => { const b = [...document.querySelectorAll('.updatemenu-button')]"
            ".find(e => e.textContent === 'prediction').getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        page.drag([where])
        assert drawn(page, (0, 0, 255)) > 500, "the prediction, in its colours"
        requests = [event["request"]["url"] for event in page.happened("Network.requestWillBeSent")]
    assert requests and all(url.startswith(("file:", "blob:", "data:")) for url in requests)
