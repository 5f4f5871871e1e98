"""The error of QT's Taylor expansion against softmax attention, by order and by the range of the logits.

    python benchmarks/qt_error.py benchmarks/results/qt-error.json

Random queries, keys and values (4 heads of 64 channels, 256 tokens, float64); the queries are scaled so that the
logits q·k/√d have the given standard deviation. Error: the root mean square of the difference from softmax attention's
output, divided by that of the output.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from saving import save

from polymix.ops.qt import qt_attention

SPREADS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)


def error(order: int, spread: float, n: int = 256, d: int = 64) -> float:
    """Relative error of the full form of this order at logits of this standard deviation."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, n, d, generator=generator, dtype=torch.float64) for _ in range(3))
    q = q * spread
    exact = F.scaled_dot_product_attention(q, k, v)
    difference = qt_attention(q, k, v, form="full", order=order) - exact
    return (difference.square().mean() / exact.square().mean()).sqrt().item()


def table() -> list[dict[str, float]]:
    """One row for each spread of the logits: the largest logit, and the errors of orders 0, 1 and 2."""
    rows = []
    for spread in SPREADS:
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(1, 4, 256, 64, generator=generator, dtype=torch.float64) for _ in range(2))
        largest = (q @ k.transpose(-1, -2)).abs().max().item() * spread / 8
        rows.append({"spread": spread, "largest": largest, **{f"order_{o}": error(o, spread) for o in (0, 1, 2)}})
    return rows


if __name__ == "__main__":
    rows = table()
    for row in rows:
        print("  ".join(f"{name} {value:9.3g}" for name, value in row.items()))
    if len(sys.argv) > 1:
        save({"torch": torch.__version__, "rows": rows}, Path(sys.argv[1]))
