"""One set of options a mixer and form, for tests that go over the whole registry."""

CASES = {
    "softmax": ("softmax", {"heads": 3}),
    "linear_floor": ("linear_floor", {}),
    "padre-1": ("padre", {"degree": 1, "grid": (3, 4), "kernel_size": 3}),
    "padre-2": ("padre", {"grid": (3, 4), "kernel_size": 3}),
    "padre-3": ("padre", {"degree": 3, "grid": (3, 4), "kernel_size": 3, "normalize": "rms", "weight": "channel"}),
    "padre-3d": ("padre", {"degree": 2, "grid": (3, 2, 2), "kernel_size": 3, "constant": "full"}),
    "padre-1d": ("padre", {"degree": 3, "preset": "full", "heads": 3}),
    "padre-causal": ("padre", {"degree": 3, "causal": True, "kernel_size": 4}),
    "pom": ("pom", {}),
    "pom-groups": ("pom", {"degree": 3, "groups": 2, "selection_heads": 3, "reduction": "sum"}),
    "pom-rotary": ("pom", {"rotary": "1d"}),
    "qt": ("qt", {"heads": 3}),
    "qt-full": ("qt", {"heads": 3, "form": "full"}),
    "poly_nl": ("poly_nl", {}),
    "poly_nl-4": ("poly_nl", {"reduction": 4, "order": "2+3"}),
    "poly_sa": ("poly_sa", {"heads": 3, "grid": (3, 4)}),
    "poly_sa-dw": ("poly_sa", {"heads": 3, "grid": (3, 4), "head_mixing": "depthwise", "sigma": "tanh"}),
    "poly_sa-mean": ("poly_sa", {"heads": 3, "positions": "mean"}),
}
