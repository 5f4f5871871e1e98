"""A synthetic comparison whose answer is known."""

from polymix.workflows.compare.settings import Settings

SETTINGS = Settings(seeds=2).to_dict()


def row(mixer, scope, tokens, latency, stopped=None, spread=0.01, floor=None):
    if latency is None:
        return {"mixer": mixer, "scope": scope, "tokens": tokens, "latency": None, "low": None, "high": None, "runs": [],
                "peak_bytes": None, "floor": None, "flops": None, "clock": "wall", "stopped": stopped or "took 11 s"}  # fmt: skip
    return {"mixer": mixer, "scope": scope, "tokens": tokens, "latency": latency, "low": latency * (1 - spread),
            "high": latency * (1 + spread), "runs": [latency] * 3, "peak_bytes": 1000 * tokens, "floor": floor or latency / 2,
            "flops": 10, "clock": "wall", "stopped": None}  # fmt: skip


def trained(mixer, seed, value, name="accuracy", direction="up"):
    return {"task": "classify", "host": "VisionTransformer", "mixer": mixer, "seed": seed, "metrics": {name: value},
            "directions": {name: direction}, "units": {name: "%" if name == "accuracy" else ""}, "parameters": 1000,
            "steps": 30, "unit": "images",
            "training_per_second": 10.0, "inference_per_second": 20.0, "clock": "wall", "peak_bytes": 2**20,
            "paper": None}  # fmt: skip


def make(accuracies, speeds, tokens=(16, 64, 256, 1024), test=10_000, own=False, **settings):
    """own: on the user's data. accuracies: mixer -> runs; speeds: mixer -> latencies at the token counts, the same alone and in the host."""
    return {
        "schema": "polymix.compare/1", "finished": True, "settings": {**SETTINGS, **settings},
        "machine": {"cpu": "a cpu", "cpu_capability": "AVX512", "cores": 2, "gpu": None, "device": "cpu", "threads": 2,
                    "system": "Linux x86_64", "python": "3.11", "torch": "2.13"},
        "data": {"name": "photos" if own else "digit scenes", "classes": ["a", "b"], "train": 10, "test": test, "channels": 1, "image_size": 8,
                 "skipped": ["<broken>.png: cut & empty"], "majority": {"name": "b", "share": 0.5}, "samples": []},
        "host": {"name": "VisionTransformer", "describe": "A model on scenes.", "tokens": 16,
                 "recipe": {"steps": 30, "batch_size": 64}},
        "mixers": [{"label": m, "config": {"name": m.partition("-")[0]}, "flops": 10**6} for m in accuracies],
        "refused": [], "answers": [], "control": None, "pictures": {},
        "rows": [trained(m, s, a) for m, runs in accuracies.items() for s, a in enumerate(runs)],
        "sweep": [
            row(m, scope, n, latency)
            for scope in ("alone", "host") for m, points in speeds.items() for n, latency in zip(tokens, points, strict=True)
        ],
        "answer": None,
    }  # fmt: skip
