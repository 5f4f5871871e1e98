"""What a call's time goes to: PyTorch's profiler, by kind of operation."""

from collections.abc import Callable
from typing import Any

import torch

from polymix.measure import once

KINDS = {
    "products": ("addmm", "mm", "bmm", "baddbmm", "_linear_pointwise", "mkldnn_convolution", "dot", "mv"),
    "attention": ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math", "_softmax"),
    "norms": ("native_layer_norm",),
    "activations": ("gelu", "tanh", "pow", "sigmoid", "relu", "silu"),
}


def parts_of(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds of a call by kind: products, attention, our C kernels, norms, activations, other passes, and Python.

    "python" is what the call takes beyond all operations; the profiler makes it larger.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        whole = once(call)
    parts = dict.fromkeys(("products", "attention", "kernels", "norms", "activations", "passes", "python"), 0.0)
    for event in profile.key_averages():
        library, _, name = event.key.partition("::")
        seconds = event.self_cpu_time_total / 1e6
        known = next((kind for kind, names in KINDS.items() if name in names), "passes")
        parts["kernels" if library == "polymix" else known] += seconds
    parts["python"] = max(0.0, whole - sum(parts.values()))
    return parts
