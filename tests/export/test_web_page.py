"""The page of the target web in a real browser: it draws, answers, compares and measures, and loads nothing from elsewhere."""

import functools
import http.server
import json
import shutil
import subprocess
import threading
import time

import pytest
import torch

import polymix
from polymix.cli import main
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.errors import MissingExtraError
from polymix.export.web.runtime import find_runtime
from polymix.train.run import train
from polymix.train.saved import SavedRun
from tests.browser import needs_browser, opened

pytest.importorskip("onnxruntime", reason="untested: exports, for which onnxruntime is needed (the export extra)")
pytestmark = [pytest.mark.slow, needs_browser]
TWO = [(0.3, 0.3), (0.38, 0.2), (0.5, 0.17), (0.6, 0.22), (0.64, 0.34), (0.55, 0.5), (0.4, 0.66), (0.28, 0.82), (0.5, 0.82), (0.72, 0.82)]  # fmt: skip
ONE = [(0.5, 0.1), (0.5, 0.4), (0.49, 0.7), (0.48, 0.9)]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """npm's onnxruntime-web, from node_modules or from npm."""
    try:
        return find_runtime()
    except MissingExtraError:
        folder = tmp_path_factory.mktemp("npm")
    if shutil.which("npm") is None:
        pytest.skip("untested: the page in a browser, for which npm is needed")
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "onnxruntime-web@1.30.0"]
    if subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode:
        pytest.skip("untested: the page in a browser, as npm cannot install onnxruntime-web")
    return find_runtime(folder)


def train_digits(mixer, folder):
    options = {"mixer": mixer, "image_size": 16, "patch_size": 4, "dim": 32, "depth": 1, "learning_rate": 4e-3}
    train(ClassifyRecipe(**options, steps=200), folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [train_digits(mixer, folder / f"digits-{mixer}") for mixer in ("softmax", "padre")]


@pytest.fixture(scope="module")
def digits(package, runs, tmp_path_factory):
    """Two digit classifiers, exported by the command."""
    out = tmp_path_factory.mktemp("digits") / "out"
    models = [word for run in runs for word in ("--model", str(run))]
    with pytest.raises(SystemExit) as end:
        main(["export", *models, "--target", "web", "--runtime", str(package), "--out", str(out)])
    assert end.value.code == 0
    return out


@pytest.fixture
def serve():
    """A static server for a folder: the URL of its index.html."""
    servers = []

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    def start(folder):
        handler = functools.partial(Quiet, directory=str(folder))
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def wait(page, condition, seconds=600):
    end = time.monotonic() + seconds
    while not page.evaluate(f"Boolean({condition})"):
        assert time.monotonic() < end, page.evaluate("document.body.innerText")
        time.sleep(0.05)


def done(section):
    return f'document.querySelector("#{section}").dataset.done === "true"'


def draw(page, points):
    """Draw on the canvas, and return the models' answers by name."""
    page.evaluate('document.querySelector("#draw button").click()')
    wait(page, '[...document.querySelectorAll(".best")].every(e => e.textContent === "?")')
    box = json.loads(page.evaluate('JSON.stringify(document.querySelector(".pad").getBoundingClientRect())'))
    page.drag([(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points])
    wait(page, '[...document.querySelectorAll(".answer .small")].every(e => e.textContent.includes("sure"))')
    time.sleep(0.5)  # the last answer follows the last movement
    read = '[...document.querySelectorAll(".answer")].map(e => [e.dataset.model, e.querySelector(".best").textContent])'
    return dict(json.loads(page.evaluate(f"JSON.stringify({read})")))


def assert_clean(page, url):
    """No error in the page or its worker, and no request to another origin."""
    assert page.happened("Runtime.exceptionThrown") == []
    assert [entry for entry in page.happened("Log.entryAdded") if entry["entry"]["level"] == "error"] == []
    requests = [event["request"]["url"] for event in page.happened("Network.requestWillBeSent")]
    assert any(request.endswith(".wasm") for request in requests), "the worker is watched, too"
    assert [request for request in requests if not request.startswith((url, "data:", "blob:" + url))] == []


def test_it_reads_digits_while_one_draws(digits, serve, tmp_path):
    url = serve(digits / "web")
    with opened(url, tmp_path / "profile", watch=True) as page:
        wait(page, done("checks"))
        assert draw(page, TWO) == {"digits-softmax": "2", "digits-padre": "2"}
        assert draw(page, ONE) == {"digits-softmax": "1", "digits-padre": "1"}
        assert_clean(page, url)


def test_the_canvas_gives_models_what_their_training_gave_them(digits, runs, serve, tmp_path):
    """The image of a drawing, resized and normalised in the page, is what PyTorch makes of that image."""
    strokes = [[[100 + 200 * x, 300 * y] for x, y in TWO]]
    with opened(serve(digits / "web"), tmp_path / "profile", watch=True) as page:
        shown = page.evaluate(
            '(async () => { const { imageOf, inputOf } = await import("./canvas.js");'
            'const { models: [{ drawing }] } = await (await fetch("site.json")).json();'
            f"const image = imageOf({json.dumps(strokes)}, drawing);"
            "return JSON.stringify([[...image], [...inputOf(image, drawing).data]]); })()"
        )
    image, given = (torch.tensor(part, dtype=torch.float64) for part in json.loads(shown))
    image = image.reshape(1, 1, 8, 8)
    assert image.min() == 0 and image.max() == 16 and (image == image.round()).all()
    assert image.mean().item() == pytest.approx(0.305 * 16, rel=0.05), "as dark as the digits"
    assert image[0, 0, 0].sum() > 0 and image[0, 0, -1].sum() > 0 and image[..., 0].sum() == 0, "as high, and centred"
    summary = SavedRun.of(runs[0]).summary
    wide = torch.nn.functional.interpolate(image, size=16, mode="bilinear", antialias=True)
    expected = (wide - summary["mean"][0]) / summary["std"][0]
    torch.testing.assert_close(given.reshape(1, 1, 16, 16), expected, atol=1e-5, rtol=0)


def test_it_compares_with_pytorch_and_measures(digits, serve, tmp_path):
    url = serve(digits / "web")
    with opened(url, tmp_path / "profile", watch=True) as page:
        wait(page, done("checks"))
        rows = page.evaluate('[...document.querySelectorAll("#checks tbody tr")].map(e => e.className).join()')
        assert rows == "passed,passed"
        page.evaluate('document.querySelector("#latency button").click()')
        wait(page, done("latency"))
        table = json.loads(page.evaluate(
            'JSON.stringify([...document.querySelectorAll("#latency tr")].map(e => [...e.cells].map(c => c.textContent)))'
        ))  # fmt: skip
        assert table[0] == ["tokens", "softmax attention", "padre", "times as fast"]
        assert [row[0] for row in table[1:]] == ["256", "576", "1024", "2304", "4096"]
        assert all(row[1].endswith("ms") and row[2].endswith("ms") and float(row[3]) > 0 for row in table[1:])
        assert page.evaluate('document.querySelectorAll("#latency polyline").length') == 2
        for view in ({"width": 1200}, {"width": 1200, "dark": True}, {"width": 375}, {"width": 375, "dark": True}):
            seen = page.see(**view)
            assert not seen["overflow"] and not seen["faint"], (view, seen)
        assert_clean(page, url)


def test_a_page_that_differs_from_pytorch_says_so(digits, serve, tmp_path):
    folder = tmp_path / "web"
    shutil.copytree(digits / "web", folder)
    content = json.loads((folder / "site.json").read_text())
    first, second = content["models"]
    first["outputs"]["output"] = second["outputs"]["output"]
    second["file"] = "models/gone.onnx"
    (folder / "site.json").write_text(json.dumps(content))
    with opened(serve(folder), tmp_path / "profile") as page:
        wait(page, done("checks"))
        rows = json.loads(page.evaluate(
            'JSON.stringify([...document.querySelectorAll("#checks tbody tr")].map(e => [e.className, e.innerText]))'
        ))  # fmt: skip
    assert [state for state, _ in rows] == ["failed", "failed"]
    assert "more than 1e-5" in rows[0][1] and "gone.onnx could not be loaded (404)" in rows[1][1]


def test_other_models_are_compared_without_a_canvas(package, serve, tmp_path):
    """Inputs of several types, and a model without mixers: nothing to draw, nothing to time."""

    class Picked(torch.nn.Module):
        def forward(self, ids, keep):
            return {"half": torch.where(keep, ids, 0).float() * 0.5, "sum": ids.sum(1)}

    torch.manual_seed(0)
    inputs = {"ids": torch.randint(0, 9, (2, 5)), "keep": torch.rand(2, 5) > 0.5}
    content = polymix.export.export(Picked().eval(), inputs, tmp_path / "out", targets=("web",), runtime=package)
    if shutil.which("node"):
        assert all(entry["error_in_webassembly"] <= 1e-5 for entry in content["files"])
    url = serve(tmp_path / "out/web")
    with opened(url, tmp_path / "profile", watch=True) as page:
        wait(page, done("checks"))
        assert page.evaluate('document.querySelector("#checks tbody tr").className') == "passed"
        assert page.evaluate('document.querySelector("#draw").hidden && document.querySelector("#latency").hidden')
        assert_clean(page, url)


def test_a_file_that_is_not_served_says_what_to_do(digits, tmp_path):
    with opened(digits / "web/index.html", tmp_path / "profile") as page:
        assert "python -m http.server" in page.evaluate("document.body.innerText")
