"""The tables of series and clips: what mixers and controls do on the default data, and the speed of a stream."""

from __future__ import annotations

from collections.abc import Callable

from .domains import NONE, all_runs, default_run, mean, number
from .figures import RESULTS, load, table, where

SERIES = ("mase", "crps", "mae", "mse", "coverage_error")
CLASS_CONTROLS = ("accuracy_majority", "accuracy_nearest", "accuracy_linear")
ANOMALY_CONTROLS = ("auc_naive", "auc_seasonal", "auc_smoothing", "auc_linear", "auc_level", "f1_adjusted_chance")
CONTROLS = ("dlinear", "linear_floor")
DATA = {"": "each series has its period", **{f"/{name}": name for name in ("lead", "electricity", "weather")}}
DEPTHS = ("abs_rel", "delta_1", "rmse", "si_log")


def series_controls() -> str:
    """The MASE of the controls that every run of timeseries measures, beside the best and the floor."""
    lines = []
    for name, data in DATA.items():
        runs = all_runs(f"timeseries{name}")
        if not runs:
            continue
        own = next(iter(runs.values()))
        controls = [number(mean(own, f"mase_{name}"), 3) for name in ("naive", "seasonal", "smoothing", "linear")]
        mixed = {key: mean(its, "mase") for key, its in runs.items() if key not in CONTROLS}
        best = min(mixed, key=lambda key: mixed[key])
        others = [number(mean(runs[key], "mase"), 3) if key in runs else NONE for key in CONTROLS]
        lines.append((data, *controls, *others, f"{mixed[best]:.3f} (`{best}`)"))
    head = ("MASE on", "naive", "seasonal naive", "exponential smoothing", "linear, least squares", "DLinear",
            "`linear_floor`", "best mixer")  # fmt: skip
    return table(head, lines) if lines else "Not measured yet."


def goal_controls(goal: str, metric: str, controls: tuple[str, ...]) -> str:
    """The controls that every run of a goal of timeseries measures, beside the best mixer and the floor."""
    runs = all_runs(f"timeseries/{goal}")
    if not runs:
        return "Not measured yet."
    own = next(iter(runs.values()))
    mixed = {key: mean(its, metric) for key, its in runs.items() if key not in CONTROLS}
    best = max(mixed, key=lambda key: mixed[key])
    others = [number(mean(runs[key], metric), 3) for key in CONTROLS if key in runs]
    line = (*(number(mean(own, name), 3) for name in controls), *others, f"{mixed[best]:.3f} (`{best}`)")
    head = (*(f"`{name}`" for name in controls), *(f"`{key}`" for key in CONTROLS if key in runs),
            f"best mixer, {metric}")  # fmt: skip
    return table(head, [line])


def video_stream() -> str:
    """Frames a second of a stream by the frames so far, and what is kept of them."""
    content, lines = load("video-stream.json"), []
    rows, settings = {(row["mixer"], row["frames"]): row for row in content["rows"]}, content["settings"]
    for frames in dict.fromkeys(row["frames"] for row in content["rows"]):
        pair = [rows[mixer, frames] for mixer in ("pom", "softmax")]
        speeds = [1 / row["seconds"] for row in pair]
        kept = [f"{row['kept_bytes'] / 2**20:.3g}" for row in pair]
        lines.append((frames, *(f"{speed:.1f}" for speed in speeds), f"{speeds[0] / speeds[1]:.2g} ×", *kept))
    head = ("frame of the stream", "`pom`, frames/s", "attention, frames/s", "ratio", "`pom` keeps, MiB",
            "attention keeps, MiB")  # fmt: skip
    busy = " Other work ran on the machine." if settings["busy"] else ""
    about = f"{where(content['machine'])}, processor time on one thread; {settings['tokens']} tokens a frame, "
    about += f"{settings['dim']} channels, {settings['depth']} blocks, one stream.{busy}"
    return f"{about}\n\n{table(head, lines)}\n\n`python benchmarks/video_stream.py OUT.json`"


def speech_lengths() -> str:
    """Time and memory of a Conformer by the length of a recording."""
    if not (RESULTS / "speech-lengths.json").is_file():
        return "Not measured yet."
    content, lines = load("speech-lengths.json"), []
    rows, settings = {(row["mixer"], row["seconds"]): row for row in content["rows"]}, content["settings"]
    for length in dict.fromkeys(row["seconds"] for row in content["rows"]):
        pair = [rows[mixer, length] for mixer in ("pom", "softmax")]
        cells = [
            " / ".join(f"{row[name] * unit:.3g}" for row in pair)
            for kind in ("training", "inference")
            for name, unit in ((f"{kind}_s", 1), (f"{kind}_bytes", 2**-20))
        ]
        said = f"{length} s" if length < 120 else f"{length // 60} min"
        lines.append((said, f"{rows['pom', length]['tokens']:,}", *cells))
    head = ("recording", "tokens", "training step, s", "its memory, MiB", "inference, s", "its memory, MiB")
    busy = " Other work ran on the machine." if settings["busy"] else ""
    about = f"{where(content['machine'])}, processor time on one thread, `pom` / attention; one recording, "
    about += f"{settings['depth']} blocks of {settings['dim']} channels, `{settings['pom']}`. "
    about += f"Memory is the most that is held beyond weights.{busy}"
    return f"{about}\n\n{table(head, lines)}\n\n`python benchmarks/speech_lengths.py OUT.json`"


TABLES: dict[str, Callable[[], str]] = {
    "timeseries": lambda: default_run("timeseries", SERIES),
    "timeseries-controls": series_controls,
    "timeseries-anomalies": lambda: default_run("timeseries/anomalies", ("auc", "f1", "f1_best", "f1_adjusted", "mae")),
    "timeseries-anomalies-controls": lambda: goal_controls("anomalies", "auc", ANOMALY_CONTROLS),
    "timeseries-classes": lambda: default_run("timeseries/classes", ("accuracy", "val_loss")),
    "timeseries-classes-controls": lambda: goal_controls("classes", "accuracy", CLASS_CONTROLS),
    "timeseries-lead": lambda: default_run("timeseries/lead", SERIES),
    "timeseries-electricity": lambda: default_run("timeseries/electricity", SERIES),
    "timeseries-weather": lambda: default_run("timeseries/weather", SERIES),
    "timeseries-vowels": lambda: default_run("timeseries/vowels", ("accuracy", "val_loss")),
    "timeseries-vowels-controls": lambda: goal_controls("vowels", "accuracy", CLASS_CONTROLS),
    "video": lambda: default_run("video", ("accuracy", "val_loss")),
    "video-collision": lambda: default_run("video/collision", ("accuracy", "val_loss")),
    "video-hidden": lambda: default_run("video/hidden", ("accuracy", "val_loss")),
    "video-next": lambda: default_run("video/next", ("psnr", "psnr_copy")),
    "video-stream": video_stream,
    "speech": lambda: default_run("speech", ("wer", "cer")),
    "speech-lengths": speech_lengths,
    "depth": lambda: default_run("depth", DEPTHS),
    "depth-cameras": lambda: default_run("depth/cameras", DEPTHS),
}
