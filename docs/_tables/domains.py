"""The tables of the tasks' pages: what was measured on the default data, and the papers' figures beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from polymix.train import published

from .figures import RESULTS, load, over_seeds, table, where

NONE = "–"
PASTIS = "polymix train satellite --preset paper --data PASTIS --mixer {}"
MATCHED = " --set match_parameters=True"  # as the paper keeps the parameters of its hosts
LAM = "polymix train handwriting --preset paper --data LAM --layout lam --mixer {}"
PAGES = " --set lines=16 --set steps=50000"
HYBRID = "pom --plan 1:1"
MAIN_METRICS = {
    "satellite": "miou", "segment": "miou", "handwriting": "cer_blotted", "detect": "AP", "instances": "mask_AP",
    "faces": "AP_hard", "jigsaw": "in_place", "segment3d": "miou",
    "detect3d": "NDS", "timeseries": "mase", "timeseries/anomalies": "auc", "timeseries/classes": "accuracy",
    "video": "accuracy", "depth": "abs_rel", "speech": "wer", "generation": "fd",
}  # fmt: skip


def all_runs(task: str) -> dict[str, list[dict[str, Any]]]:
    """The runs of a task by mixer, those of its file's rows first; none where it has not been measured."""
    name = f"tasks/{task}/results.json"
    if not (RESULTS / name).is_file():
        return {}
    content = load(name)
    runs = {row["mixer"]: [row] for row in content["rows"]}
    for row in content.get("other_seeds", ()):
        runs[row["mixer"]].append(row)
    return runs


def mean(runs: list[dict[str, Any]], metric: str) -> float | None:
    """Over the seeds; None where one of them has none."""
    values = [run["metrics"].get(metric) for run in runs]
    return None if None in values else fmean(values)


def metric_over_seeds(runs: list[dict[str, Any]], metric: str) -> str:
    """A metric of a mixer's runs, in its unit."""
    values = [run["metrics"].get(metric) for run in runs]
    if None in values:
        return NONE
    if runs[0].get("units", {}).get(metric) == "%":
        return over_seeds([100 * value for value in values], "{:.1f}".format) + "\u00a0%"
    return over_seeds(values)


def seeds_of(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A sentence about the number of runs."""
    counts = sorted({len(its) for its in runs.values()})
    if counts == [1]:
        return "One seed."
    several = " or ".join(str(count) for count in counts if count > 1)
    without = "; without ±: one seed" if 1 in counts else ""
    return f"With ±: the mean of {several} seeds and half their range{without}."


def default_run(task: str, metrics: tuple[str, ...]) -> str:
    """A row for each mixer of the default run."""
    runs = all_runs(task)
    if not runs:
        return "Not measured yet."
    unit = {"km2": "km²"}.get(unit := next(iter(runs.values()))[0]["unit"], unit)
    lines = []
    for name, its in runs.items():
        row = its[0]
        speeds = [number(row[f"{kind}_per_second"], 1) for kind in ("training", "inference")]
        peak = number(row["peak_bytes"], 0, 2**-20)
        lines.append((f"`{name}`", *(metric_over_seeds(its, key) for key in metrics), row["steps"], *speeds, peak))
    head = ("mixer", *(key.replace("_", " ") for key in metrics), "steps", f"{unit}/s training", f"{unit}/s inference",
            "peak MiB of a step")  # fmt: skip
    content = load(f"tasks/{task}/results.json")
    speeds = f" {content['speeds']}" if "speeds" in content else ""
    return f"{seeds_of(runs)} {content['machine']}.{speeds}\n\n{table(head, lines)}"


def satellite_tried() -> str:
    """What was tried on the synthetic series to bring PoM nearer to attention, and what each gave."""
    tried = load("tasks/satellite/results.json")["tried"]
    return _tried(tried["rows"], f"mIoU after {tried['steps']} steps of {tried['batch_size']} windows")


def satellite_longer() -> str:
    """Longer training, wider hosts and more features on the synthetic series."""
    return _tried(load("tasks/satellite/results.json")["longer"]["rows"], "mIoU, one change to the default each")


def _tried(rows: list[dict[str, Any]], what: str) -> str:
    lines = [(row["change"], number(row["softmax"], 3), number(row["pom"], 3)) for row in rows]
    return table((what, "attention", "pom"), lines)


def number(value: float | None, digits: int, factor: float = 1.0) -> str:
    return NONE if value is None else f"{factor * value:.{digits}f}"


def paper_table(rows: Iterator[tuple[str, str, str, str, str]]) -> str:
    """A row for each figure of the paper, and below them the command for each model.

    Beside each stands what was counted or measured at the paper's size: nothing of the default data.
    """
    lines: list[tuple[str, ...]] = []
    commands: dict[str, dict[str, None]] = {}  # the models of each command, in order
    last = ""
    for model, command, what, paper, here in rows:
        lines.append(("" if model == last else model, what, paper, here))
        commands.setdefault(command, {})[model] = None
        last = model
    head = ("model", "", "in the paper", "here, at that size")
    block = "\n".join(f"# {' and '.join(models)}\n{command}" for command, models in commands.items())
    return f"{table(head, lines)}\n\n```sh\n{block}\n```"


def satellite_paper() -> Iterator[tuple[str, str, str, str, str]]:
    """PoM, Table 3."""
    from polymix.domains.satellite.tsvit import TSViT
    from polymix.mixers.spec import parse_mixer

    names = {"TSViT": "TSViT (retrained)", "TSViT, as its paper has it": "TSViT (paper)"}
    for paper in published.rows(domain="satellite"):
        mixer, figures = paper.mixer, {**paper.metrics, **paper.cost}
        model = "TSViPoM" if mixer == "pom" else names[paper.host]
        with torch.device("meta"):
            host = TSViT(parse_mixer(mixer)[1], match_parameters=True).eval()
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                host(torch.empty(1, 60, 10, 24, 24), torch.zeros(1, 60, dtype=torch.int64))
        size = sum(p.numel() for p in host.parameters())
        command = PASTIS.format(mixer) + (MATCHED if mixer != "softmax" else "")
        counted = f"{counter.get_total_flops() / 2e9:.1f}"
        yield model, command, "parameters, M", str(figures["parameters_M"]), f"{size / 1e6:.3f}"
        yield model, command, "multiply-adds of a window, G", "announced, not printed", counted
        yield model, command, "OA, %", number(figures["accuracy"], 1, 100), NONE
        yield model, command, "mIoU, %", number(figures["miou"], 1, 100), NONE
        if "km2_per_second" in figures:
            yield model, command, "km²/s", str(figures["km2_per_second"]), NONE


def handwriting_paper() -> Iterator[tuple[str, str, str, str, str]]:
    """PoM, Table 2. The parameters include the fixed positions, as the authors' code of HTR-VT counts them."""
    from polymix.domains.handwriting.htr_vt import sine_positions
    from polymix.domains.handwriting.recipe import HandwritingRecipe
    from polymix.domains.handwriting.task import HandwritingTask

    timed = load("tasks/handwriting/lines.json")["rows"]
    speeds = {(row["model"], row["lines"]): row["lines_per_second"] for row in timed}
    names = {"softmax": "HTR-VT", "pom": "HTR-VPoM", "pom (1:1)": "HTR-VPoM Hyb."}
    for paper in published.rows(domain="handwriting"):
        name, printed = paper.mixer, {**paper.metrics, **paper.cost}
        lines = 16 if "16 lines" in paper.split else 1
        model, mixer = names[name], HYBRID if name == "pom (1:1)" else name
        command = LAM.format(mixer) + (MATCHED if mixer != "softmax" else "") + (PAGES if lines > 1 else "")
        model += f", {lines} lines" if lines > 1 else ""
        options = {"mixer": mixer.split()[0], "lines": lines, "match_parameters": True}
        recipe = HandwritingRecipe.paper().changed(**options, plan="1:1" if mixer == HYBRID else None)
        size = sum(p.numel() for p in HandwritingTask(recipe).sized(80, "meta").parameters())
        size += sine_positions(128 * lines, 768).numel()
        yield model, command, "parameters, M", str(printed["parameters_M"]), f"{size / 1e6:.1f}"
        for metric in ("cer", "wer"):
            yield model, command, f"{metric.upper()}, %", number(printed[metric], 1, 100), NONE
        timed_here = speeds["hybrid" if mixer == HYBRID else mixer, lines]
        yield model, command, "lines/s", str(printed["lines_per_second"]), f"{timed_here:.2f} (one CPU thread)"


def printed_figures() -> str:
    """All of polymix/published.toml, a table for each paper."""
    parts = []
    for paper in published.papers():
        lines = published.cells(published.of(paper))
        parts += [f"### {paper}", table(published.HEAD, lines)]
    return "\n\n".join(parts)


def handwriting_lines() -> str:
    """Lines per second of the published host by the number of lines side by side, and where the time goes."""
    content, lines = load("tasks/handwriting/lines.json"), []
    counts = sorted({row["lines"] for row in content["rows"]})
    rows = {(row["model"], row["lines"]): row for row in content["rows"]}
    pages = published.rows(data="LAM", split="basic, 16 lines")
    paper = {row.mixer.replace("pom (1:1)", "hybrid"): row.cost["lines_per_second"] for row in pages}
    for model in dict.fromkeys(model for model, _ in rows):
        cases = [rows[model, count] for count in counts]
        lines.append((f"`{model}`", *(f"{row['lines_per_second']:.2f}" for row in cases),
                      *(f"{row['transformer_seconds']:.2f}" for row in cases),
                      paper.get(model, NONE)))  # fmt: skip
    stem = [rows[next(iter(rows))[0], count]["stem_seconds"] for count in counts]
    lines.append(("the stem", *[""] * len(counts), *(f"{seconds:.2f}" for seconds in stem), ""))
    names = [f"{count} line" + "s" * (count > 1) for count in counts]
    head = ("", *(f"lines/s, {name}" for name in names), *(f"seconds of the transformer, {name}" for name in names),
            "lines/s in the paper, up to 16 lines, GPU")  # fmt: skip
    clock = "processor time" if content["clock"] == "processor" else "wall time"
    about = f"{where(content['machine'])}, {clock}; {content['dim']} channels, one image at a time, parameters as with"
    about += " attention"
    return f"{about}.\n\n{table(head, lines)}\n\n`python benchmarks/handwriting_lines.py OUT.json`"


def whole_patches() -> str:
    """The spatial encoder over more and more places, and TSViT on whole patches against windows."""
    content = load("whole-patches.json")
    settings, rows, lines = content["settings"], content["rows"], []
    places = [case for case in rows[0]["seconds"] if case.endswith("places")]
    for row in rows:
        spatial = [f"{1e3 * row['seconds'][case]:.0f} ms, {row['peak_bytes'][case] / 2**20:.0f} MiB" for case in places]
        speeds = [f"{row[f'km2_per_second {case}']:.4f}, {row['peak_bytes'][case] / 2**20:.0f} MiB"
                  for case in ("windows", "whole patch")]  # fmt: skip
        lines.append((f"`{row['mixer']}`", *spatial, *speeds))
    head = ("mixer", *(f"spatial encoder, {case.removesuffix(' places')} places" for case in places),
            "km²/s, 36 windows", "km²/s, whole patch")  # fmt: skip
    busy = " Other work ran on the machine: the times are rough." if settings["busy"] else ""
    setting = f"{where(content['machine'])}; {settings['dates']} dates, {settings['dim']} channels, inference.{busy}"
    return f"{setting}\n\n{table(head, lines)}\n\n`python benchmarks/whole_patches.py OUT.json`"


def segment3d() -> str:
    """The default run; then streets that ask nothing, without and with convolutional position encodings."""
    content, runs, lines = load("tasks/segment3d/results.json"), all_runs("segment3d"), []
    others = [{row["mixer"]: row["metrics"]["miou"] for row in content[key]} for key in ("what", "with_cpe")]
    for name, its in runs.items():
        numbers = (metric_over_seeds(its, key) for key in ("miou", "accuracy"))
        speeds = (number(its[0][f"{kind}_per_second"], 0) for kind in ("training", "inference"))
        plain = (number(other.get(name), 3) for other in others)
        lines.append((f"`{name}`", *numbers, *plain, its[0]["steps"], *speeds))
    head = ("mixer", "mIoU", "accuracy", "mIoU, `question=what`", "the same with `cpe=True`", "steps",
            "points/s training", "points/s inference")  # fmt: skip
    about = f"{seeds_of(runs)} The columns without the question are of one seed."
    return f"{about} {content['machine']}. {content['speeds']}\n\n{table(head, lines)}"


def along_curves() -> str:
    """A mixer along a curve over more and more points: in windows, and over the whole cloud."""
    content = load("points.json")
    settings, cells = content["settings"], {}
    for row in content["rows"]:
        what = row.get("left_out") or f"{1e3 * row['seconds']:,.0f} ms, {row['peak_bytes'] / 2**20:,.0f} MiB"
        cells[row["mixer"], row["window"], row["points"]] = what
    points = list(dict.fromkeys(row["points"] for row in content["rows"]))
    pairs = list(dict.fromkeys((row["mixer"], row["window"]) for row in content["rows"]))
    lines = [
        (f"`{mixer}`", window or "whole cloud", *(cells[mixer, window, n] for n in points)) for mixer, window in pairs
    ]
    busy = " Other work ran on the machine: the times are rough." if settings["busy"] else ""
    setting = f"{where(content['machine'])}; one layer of {settings['dim']} channels, inference.{busy}"
    head = ("mixer", "window", *(f"{n:,} points" for n in points))
    return f"{setting}\n\n{table(head, lines)}\n\n`python benchmarks/points.py OUT.json`"


def whole_clouds() -> str:
    """The same points as one cloud and as many, each whole."""
    content, cells = load("points.json"), {}
    for row in content["clouds"]:
        cells[row["mixer"], row["clouds"]] = [f"{1e3 * row[key]:.0f} ms" for key in ("seconds", "step_seconds")]
    counts = list(dict.fromkeys(row["clouds"] for row in content["clouds"]))
    lines = [(f"`{mixer}`", *(", ".join(cells[mixer, count]) for count in counts))
             for mixer in dict.fromkeys(row["mixer"] for row in content["clouds"])]  # fmt: skip
    head = ("mixer", *(f"{count} cloud{'s' if count > 1 else ''}" for count in counts))
    size = content["clouds"][0]["points"]
    text = f"One layer over {size:,} points in all: forward, and forward and backward. One thread's processor time."
    return f"{text}\n\n{table(head, lines)}"


def generation_sizes() -> str:
    """Parameters of SiT as published and with PoM: as given, and by both ways to match attention's."""
    from polymix.domains.generation.sit import SiT
    from polymix.mixers.spec import parse_mixer

    narrow, lines = "pom:expand=0.75", []
    figures = published.rows(domain="generation")
    printed = {(row.host, row.mixer): row.cost["parameters_M"] for row in figures}
    cases = (("softmax", None), ("pom", None), ("pom", "expand"), ("pom", "mlp"), (narrow, None))
    for size in ("L", "XL"):
        for name, match in cases:
            with torch.device("meta"):
                model = SiT.of_size(size, parse_mixer(name)[1], match_parameters=match, double_output=True)
            count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
            block, dim = model.blocks[0], model.embed.out_channels
            width = NONE if name == "softmax" else f"{block.mixer.config.expand:.3f}"
            ratio = f"{block.mlp[0].out_features / dim:.3f}"
            paper = printed.get((f"SiT-{size}/2", name), NONE)
            lines.append((f"{size}/2, `{name}`", f"`{match}`" if match else NONE, width, ratio, f"{count:.1f}", paper))
    head = ("model", "`match_parameters`", "`expand`", "width of the MLP / D", "parameters, M", "in the paper")
    return table(head, lines)


def generation_resolution(file: str = "images.json") -> str:
    """A training step and a sampling step of SiT by the number of tokens."""
    from polymix.domains.generation.settings import SIZES

    content, cells, parameters = load(file), {}, {}
    for row in content["rows"]:
        taken = NONE if row.get("seconds") is None else f"{significant(row['seconds'])} s"
        work = f"{row.get('multiply_adds', 0) / 1e9:,.0f} G"
        what = row.get("left_out") or f"{work}, {taken}, {row['peak_bytes'] / 2**20:,.0f} MiB"
        cells[row["mixer"], row["step"], row["tokens"]] = what
        parameters[row["mixer"]] = parameters.get(row["mixer"]) or row.get("parameters")
    pairs = list(dict.fromkeys((row["step"], row["tokens"]) for row in content["rows"]))
    lines = [(f"`{name}`", *(cells.get((name, *pair), NONE) for pair in pairs)) for name in parameters]
    settings = content["settings"]
    busy = " Other work ran on the machine: the times are rough." if settings["busy"] else ""
    clock = " Seconds are those of one thread by the processor's clock." if settings["clock"] == "processor" else ""
    whole = SIZES[settings["size"]]["depth"]
    blocks = "" if settings["depth"] is None else f" cut to {settings['depth']} of its {whole} blocks"
    setting = (
        f"{where(content['machine'])}. One image, without guidance. G: multiply-adds of all blocks of "
        f"SiT-{settings['size']}/2, counted. The rest is of the model{blocks}.{clock}{busy}"
    )
    head = ("mixer", *(f"{step}, {tokens:,} tokens" for step, tokens in pairs))
    size = "" if settings["size"] == "S" else f" --size {settings['size']}"
    return f"{setting}\n\n{table(head, lines)}\n\n`python benchmarks/images.py OUT.json{size}`"


def significant(seconds: float) -> str:
    """Seconds with two significant digits."""
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def mask_rcnn() -> str:
    """Mask R-CNN with blocks of the non-local family: what is counted, and what Poly-NL prints."""
    content, lines = load("mask-rcnn.json"), []
    for row in content["rows"]:
        paper = row["printed"]
        counts = [(f"{row[key]:.2f}", paper[key]) for key in ("block_parameters", "block_multiply_adds")]
        shown = (f"{ours} ({NONE if theirs is None else theirs})" for ours, theirs in counts)
        precision = [NONE if paper[key] is None else paper[key] for key in ("AP", "mask_AP")]
        mixer = f"`{row['mixer']}`" if row["mixer"] else "`none`"
        whole = (f"{row['parameters']:.2f}", f"{row['backbone_multiply_adds']:.1f}")
        lines.append((row["block"], mixer, *shown, *whole, *precision))
    head = ("block", "mixer", "its parameters, M (paper)", "its multiply-adds at 14 × 14, G (paper)",
            "parameters in all, M", "backbone at 800 × 1088, G", "box AP in the paper",
            "mask AP in the paper")  # fmt: skip
    notes = "\n".join(f"- **{block}.** {note}" for block, note in content["notes"].items())
    command = "`python benchmarks/mask_rcnn.py benchmarks/results/mask-rcnn.json`"
    return f"{table(head, lines)}\n\n{notes}\n\nPyTorch {content['torch']}. {command}"


def detr() -> str:
    """DETR's encoder at two strides: time, memory, and what is counted, beside PADRe's Table 3."""
    content, lines = load("detr.json"), []
    settings = content["settings"]
    for row in content["rows"]:
        counts = [f"{row[key]:.2f} ({row[f'mixer_{key}']:.2f})" for key in ("parameters", "multiply_adds")]
        paper = row["printed"] or {}
        printed = [paper.get(key, NONE) for key in ("parameters", "multiply_adds", "AP")]
        lines.append((row["stride"], f"{row['tokens']:,}", f"`{row['mixer']}`", f"{row['seconds']:.2f}",
                      number(row["peak_bytes"], 0, 2**-20), *counts, *printed))  # fmt: skip
    busy = " Other work ran on the machine: the times are rough." if settings["busy"] else ""
    setting = f"{where(content['machine'])}; {settings['height']} × {settings['width']} pixels, inference.{busy}"
    head = ("stride", "tokens", "mixer", "seconds", "MiB", "parameters, M", "multiply-adds, G",
            "parameters in the paper", "FLOPs in the paper", "AP in the paper")  # fmt: skip
    return f"{setting}\n\n{table(head, lines)}\n\n{content['note']} `python benchmarks/detr.py OUT.json`"


def qt_vit() -> str:
    """QT-ViT and EfficientViT of the same sizes: latency, and accuracy on scenes of digits where it was measured."""
    content, lines = load("tasks/classify/qt-vit.json"), []
    rows, settings = {(row["mixer"], row["size"]): row for row in content["rows"]}, content["settings"]
    papers = {row.host: row.metrics["accuracy"] for row in published.rows(paper="EfficientViT")}
    for size in dict.fromkeys(row["size"] for row in content["rows"]):
        pair = [rows["keep", size], rows["qt", size]]
        parameters = (f"{row['parameters'] / 1e6:.2f}" for row in pair)
        times = (number(row["milliseconds"], 0) for row in pair)
        right = ("not measured" if row["accuracy"] is None else f"{100 * row['accuracy']:.1f} %" for row in pair)
        printed = papers.get(f"efficientvit_{size}")
        lines.append((size.upper(), *parameters, *times, *right, NONE if printed is None else f"{100 * printed:.1f} %"))
    both = (
        f"{name}, {what}" for what in ("M parameters", "ms an image", "accuracy") for name in ("EfficientViT", "QT-ViT")
    )
    busy = " The time of the processor, beside other work." if settings["busy"] else ""
    setting = (
        f"{where(content['machine'])}; one image of {settings['side']} × {settings['side']} pixels, inference.{busy}"
    )
    return f"{setting}\n\n{table(('size', *both, 'EfficientViT on ImageNet, as printed'), lines)}"


TABLES: dict[str, Callable[[], str]] = {
    "published": printed_figures,
    "satellite": lambda: default_run("satellite", ("miou", "accuracy")),
    "satellite-tried": satellite_tried,
    "satellite-longer": satellite_longer,
    "detect": lambda: default_run("detect", ("AP", "AP50", "AP75")),
    "detr": detr,
    "faces": lambda: default_run("faces", ("AP_hard", "AP_medium", "AP_easy")),
    "instances": lambda: default_run("instances", ("mask_AP", "mask_AP50", "AP", "AP50")),
    "instances-efficientvit": lambda: default_run("instances/efficientvit", ("mask_AP", "mask_AP50", "AP", "AP50")),
    "jigsaw": lambda: default_run("jigsaw", ("in_place", "neighbours", "solved")),
    "qt-vit": qt_vit,
    "segment": lambda: default_run("segment", ("miou", "accuracy")),
    "segment3d": segment3d,
    "detect3d": lambda: default_run("detect3d", ("NDS", "mAP", "ATE", "ASE", "AOE", "AVE", "AAE")),
    "generation": lambda: default_run("generation", ("fd", "fd_real", "fd_noise", "precision", "recall", "fd_plain")),
    "generation-sizes": generation_sizes,
    "generation-resolution": generation_resolution,
    "generation-resolution-xl": partial(generation_resolution, "images-xl.json"),
    "generation-by-class": lambda: default_run(
        "generation-by-class", ("fd", "fd_none", "accuracy", "precision", "recall")
    ),
    "mask-rcnn": mask_rcnn,
    "satellite-paper": lambda: paper_table(satellite_paper()),
    "handwriting": lambda: default_run("handwriting", ("cer", "wer", "cer_blotted")),
    "handwriting-lines": handwriting_lines,
    "handwriting-pages": lambda: default_run("handwriting/pages", ("cer", "wer", "cer_blotted")),
    "handwriting-paper": lambda: paper_table(handwriting_paper()),
    "whole-patches": whole_patches,
    "segment3d-speed": along_curves,
    "segment3d-clouds": whole_clouds,
}
