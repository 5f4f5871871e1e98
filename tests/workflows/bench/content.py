"""Benchmark results that were made up, so that what follows from them is known."""

MACHINE = {
    "cpu": "a cpu", "cpu_capability": "AVX512", "cores": 2, "gpu": None, "device": "cpu", "threads": 2,
    "system": "Linux x86_64", "python": "3.11", "torch": "2.13",
}  # fmt: skip
SETTINGS = {
    "mixers": "pom,<b>", "tokens": [256, 4096], "dims": [192], "batch": [1], "dtypes": ["float32"], "passes": ["forward"],
    "impls": ["auto"], "threads": [2], "device": "cpu", "seconds": 0.4, "max_seconds": 10.0, "max_gib": 4.0, "quick": False,
}  # fmt: skip
NOTHING = dict.fromkeys((
    "seconds", "low", "high", "floor", "floor_ratio", "attention_ratio", "flops", "bytes", "flop_share", "byte_share",
    "peak_bytes", "resident_bytes", "output_bytes", "state_bytes",
))  # fmt: skip


def row(mixer="pom", seconds=1.0, *, spread=0.01, stopped=None, attention=None, floor=0.5, **key):
    where = {"mixer": mixer, "impl": "auto", "tokens": 4096, "dim": 192, "batch": 1, "dtype": "float32",
             "pass": "forward", "threads": 2, "clock": "wall",
             **{name.rstrip("_"): value for name, value in key.items()}}  # fmt: skip
    if stopped:
        return {**where, **NOTHING, "runs": [], "floor_runs": [], "stopped": stopped}
    times = 3 if where["pass"] == "training" else 1
    return {
        **where, "seconds": seconds, "low": seconds * (1 - spread), "high": seconds * (1 + spread), "runs": [seconds] * 3,
        "floor": floor, "floor_runs": [floor] * 3, "floor_ratio": seconds / floor / times,
        "attention_ratio": attention, "flops": 10**9, "bytes": 10**8, "flop_share": 0.1, "byte_share": 0.01,
        "peak_bytes": 2**20, "resident_bytes": 2**21, "output_bytes": 2**19, "state_bytes": None, "stopped": None,
    }  # fmt: skip


def content(*rows, finished=True, **machine):
    ceilings = [{"dtype": "float32", "threads": 2, "flops_per_second": 1e11, "bytes_per_second": 1e10}]
    return {"schema": "polymix.bench/1", "finished": finished, "settings": SETTINGS, "machine": {**MACHINE, **machine},
            "ceilings": ceilings, "rows": list(rows)}  # fmt: skip
