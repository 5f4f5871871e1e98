"""A real browser without a window, driven over a pair of pipes: what a page looks like to its reader.

It speaks the DevTools protocol of Chromium, which needs no further package. Tests are skipped where there is none.
"""

import base64
import itertools
import json
import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="untested: report pages in a browser, for which Chromium is needed"
)
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
           "--disable-background-networking", "--no-first-run", "--disable-dev-shm-usage",
           "--enable-unsafe-swiftshader")  # fmt: skip
PAPER = 1032  # CSS pixels across A4 landscape with margins of 12 mm

# What a reader could not use: content beyond the page's edge, text too faint or too small, charts that are not shown.
INSPECT = r"""
(() => {
  const found = {overflow: [], faint: [], small: [], columns: [], charts: 0};
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const over = (top, below) => {
    const a = top[3] / 255;
    return [0, 1, 2].map(i => top[i] * a + below[i] * (1 - a)).concat(255);
  };
  const luminance = colour => {
    const [r, g, b] = colour.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [x, y] = [luminance(a), luminance(b)];
    return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
  };
  const root = rgba(getComputedStyle(document.body).backgroundColor);
  const behind = element => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 255]);
  };
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) found.overflow.push(`the page: ${document.documentElement.scrollWidth}`);
  const printed = matchMedia("print").matches;
  for (const e of document.body.querySelectorAll("*")) {
    const box = e.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    const name = `${e.tagName} ${(e.textContent || "").trim().slice(0, 40)}`;
    const scrolls = e.closest(".scroll") && !printed;
    if ((box.right > width + 1 || box.left < -1) && !scrolls && !e.closest("svg")) found.overflow.push(`${name}: ${box.right}`);
    if (e.tagName === "TH") found.columns.push(e.textContent.trim());
    if (e.tagName === "svg") found.charts += 1;
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (own && !e.closest("svg")) {
      const ratio = contrast(over(rgba(getComputedStyle(e).color), behind(e)), behind(e));
      if (ratio < 4.5) found.faint.push(`${name}: ${ratio.toFixed(2)}`);
    }
    if (e.tagName === "svg") {  // glyphs of its texts are paths, in groups named text_1 …
      const scale = box.width / e.viewBox.baseVal.width;
      for (const text of e.querySelectorAll('g[id*="-text_"]')) {
        const part = text.querySelector("g[transform]");
        const size = part && /scale\(([\d.]+)/.exec(part.getAttribute("transform"));
        if (size && 100 * size[1] * scale < 8.9) found.small.push(`${e.getAttribute("aria-label")}: ${(100 * size[1] * scale).toFixed(1)}`);
        const paint = part && getComputedStyle(part).fill;
        const ratio = paint ? contrast(over(rgba(paint), root), root) : 21;
        if (ratio < 4.5) found.faint.push(`text in ${e.getAttribute("aria-label")}: ${ratio.toFixed(2)}`);
      }
    }
  }
  return JSON.stringify(found);
})()
"""


class Page:
    """An open page: look at it as a reader with some screen would."""

    def __init__(self, send, events=()):
        self.send, self.events = send, events

    def see(self, width, *, dark=False, media="screen"):
        """What INSPECT finds at a width in CSS pixels."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)
        return json.loads(self.evaluate(INSPECT))

    def evaluate(self, code):
        """The value of an expression, or of its promise."""
        answer = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path):
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def happened(self, method):
        """What events of this name told, of the page and its workers, in a browser opened with watch=True."""
        return [event["params"] for event in self.events if event["method"] == method]

    def drag(self, points):
        """Press the mouse at the first point in CSS pixels of the window, move it along the others, and let go."""
        kinds = ["mousePressed", *["mouseMoved"] * (len(points) - 1)]
        for kind, (x, y) in [*zip(kinds, points, strict=True), ("mouseReleased", points[-1])]:
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def pdf(self):
        """The printed page, by its own page size."""
        return base64.b64decode(self.send("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])


@contextmanager
def opened(path, profile, watch=False):
    """The page in a file or at a URL, in a browser with an empty profile. watch: note its requests and errors."""
    url = path if isinstance(path, str) else path.resolve().as_uri()
    inward, outward = os.pipe(), os.pipe()
    shell = f'exec "$0" "$@" 3<&{inward[0]} 4>&{outward[1]}'
    command = ["bash", "-c", shell, CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        command, pass_fds=(inward[0], outward[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )  # fmt: skip
    os.close(inward[0])
    os.close(outward[1])
    session, events = {}, []
    with os.fdopen(inward[1], "wb") as to, os.fdopen(outward[0], "rb") as back:
        rest = b""

        def receive():
            nonlocal rest
            while b"\0" not in rest:
                part = os.read(back.fileno(), 1 << 20)
                assert part, "the browser ended"
                rest += part
            message, _, rest = rest.partition(b"\0")
            return json.loads(message)

        count = itertools.count(1)

        def post(method, params, session):
            number = next(count)
            to.write(json.dumps({"id": number, "method": method, "params": params, **session}).encode() + b"\0")
            to.flush()
            return number

        def send(method, **params):
            number = post(method, params, session)
            while (message := receive()).get("id") != number:
                if watch and "method" in message:
                    events.append(message)
                    if message["method"] == "Target.attachedToTarget":  # a worker, which waits to be watched
                        worker = {"sessionId": message["params"]["sessionId"]}
                        post("Network.enable", {}, worker)
                        post("Runtime.runIfWaitingForDebugger", {}, worker)
            assert "error" not in message, message
            return message["result"]

        try:
            target = send("Target.createTarget", url="about:blank")["targetId"]
            session["sessionId"] = send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            send("Page.enable")
            if watch:
                for domain in ("Network", "Runtime", "Log"):
                    send(f"{domain}.enable")
                send("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=True, flatten=True)
            page = Page(send, events)
            send("Page.navigate", url=url)
            while page.evaluate("document.readyState + location.protocol") != "complete" + url.partition("/")[0]:
                pass
            yield page
        finally:
            process.kill()
            process.wait()
