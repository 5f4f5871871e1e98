"""A made-up comparison whose answer is known."""

SETTINGS = {"data": None, "quick": False, "dim": 192, "heads": 3, "seeds": 2, "dtype": "float32"}


def row(mixer, scope, tokens, latency, stopped=None, spread=0.01, floor=None):
    if latency is None:
        return {"mixer": mixer, "scope": scope, "tokens": tokens, "latency": None, "low": None, "high": None, "runs": [],
                "peak_bytes": None, "floor": None, "flops": None, "stopped": stopped or "took 11 s"}  # fmt: skip
    return {"mixer": mixer, "scope": scope, "tokens": tokens, "latency": latency, "low": latency * (1 - spread),
            "high": latency * (1 + spread), "runs": [latency] * 3, "peak_bytes": 1000 * tokens, "floor": floor or latency / 2,
            "flops": 10, "stopped": None}  # fmt: skip


def make(accuracies, speeds, tokens=(16, 64, 256, 1024), test=10_000, **settings):
    """accuracies: mixer -> runs; speeds: mixer -> latencies at the token counts, the same alone and in the host."""
    return {
        "schema": "polymix.compare/1", "finished": True, "settings": {**SETTINGS, **settings},
        "machine": {"cpu": "a cpu", "cpu_capability": "AVX512", "cores": 2, "gpu": None, "device": "cpu", "threads": 2,
                    "system": "Linux x86_64", "python": "3.11", "torch": "2.13"},
        "data": {"name": "made up", "classes": ["a", "b"], "train": 10, "test": test, "channels": 1, "image_size": 8,
                 "skipped": ["<broken>.png: cut & empty"]},
        "host": {"dim": 64, "depth": 3, "mlp_ratio": 2.0, "heads": 4, "patch_size": 2, "tokens": 16,
                 "recipe": {"epochs": 30, "batch_size": 64}},
        "mixers": [{"label": m, "config": {"name": m.partition("-")[0]}, "parameters": 1000, "flops": 10**6} for m in accuracies],
        "training": [
            {"mixer": m, "seed": s, "accuracy": a, "seconds": 1.0, "losses": [1.0, None]}
            for m, runs in accuracies.items() for s, a in enumerate(runs)
        ],
        "sweep": [
            row(m, scope, n, latency)
            for scope in ("alone", "host") for m, points in speeds.items() for n, latency in zip(tokens, points, strict=True)
        ],
        "answer": None,
    }  # fmt: skip
