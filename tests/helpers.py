"""What several tests share: naive visibility, recomputation of a mixer from `matrices()`, golden cases."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from polymix.ops.shared.activations import ACTIVATIONS
from tests import references as reference

GOLDEN = Path(__file__).parent / "golden"
assert ACTIVATIONS  # imported so that a rename there is seen here


def real_positions(mask_row, ids_row, n):
    """Index of each token among the real tokens of its own segment, at least 0, by counting."""
    place = []
    for i in range(n):
        seen = sum(1 for j in range(i + 1) if mask_row[j] and ids_row[j] == ids_row[i])
        place.append(max(seen - 1, 0))
    return place


def visible(batch, m, n, *, mask=None, causal=0, segments=None):
    """(B, M, N) boolean, by the definition: query i may use context token j."""
    rows, cols = segments if isinstance(segments, tuple) else (segments, segments)
    rows, cols = (torch.zeros(batch, size, dtype=int) if ids is None else ids for ids, size in ((rows, m), (cols, n)))
    pad = mask if mask is not None and mask.ndim == 2 else torch.ones(batch, n, dtype=torch.bool)
    see = pad[:, None, :] & (rows[:, :, None] == cols[:, None, :])
    if mask is not None and mask.ndim == 3:
        see = see & mask
    if causal == 1:
        see = see & (torch.arange(n) <= torch.arange(m)[:, None])
    elif causal > 1:
        place = [real_positions(*row, n) for row in zip(pad.tolist(), cols.tolist(), strict=True)]
        block = torch.tensor(place) // causal
        see = see & (block[:, None, :] <= block[:, :, None])
    return see


def first_of_each(cases, *more):
    """One case of each mixer, and some more. cases: a mixer and its options by the name of the case."""
    return {*{name: case for case, (name, *_) in reversed(cases.items())}.values(), *more}


def slow_but(quick, values, kinds=None):
    """Parameters of a test, all but the quick ones in slow runs alone: they are of the same kinds.

    kinds: one value of each kind; the others are tried before a release alone. None: all are tried in slow runs.
    """

    def marks(value):
        if value in quick:
            return ()
        return pytest.mark.slow if kinds is None or value in kinds else pytest.mark.exhaustive

    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks(value)) for value in values]


def tokens(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def jitter(mixer, seed=1, scale=0.3):
    """Move every parameter away from its init, so that zeros and ones hide nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in mixer.parameters():
            p += scale * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
    return mixer


def build(name, dim, **options):
    import polymix

    torch.manual_seed(0)
    return jitter(polymix.create_mixer(name, dim, dtype=torch.float64, **options))


def poisoned(allocate):
    """`allocate` with NaN in fresh memory, so that what nobody writes shows."""

    def allocated(*args, **kw):
        out = allocate(*args, **kw)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    return allocated


def plus(x, bias):
    return x if bias is None else x + bias


def padre_from_matrices(mixer, x, n=None, grid=None, degrees=False, contexts=()):
    letters = mixer.matrices(n or x.shape[1], grid=grid, dtype=torch.float64)
    c = mixer.config
    return reference.padre(x, **letters, normalize=c.normalize, heads=c.heads, basis=c.basis, eps=c.eps,
                           pattern=c.pattern, contexts=contexts, degrees=degrees)  # fmt: skip


def attention_from_matrices(mixer, x, context=None, **see):
    context_ = x if context is None else context
    letters = mixer.matrices(x.shape[1], dtype=torch.float64)
    may = visible(x.shape[0], x.shape[1], context_.shape[1], **see)
    extra = {"order": mixer.config.order} if mixer.name == "qt" else {}
    return getattr(reference, mixer.name)(x, context_, may, mixer.heads, **letters, **extra)


def pom_from_matrices(mixer, x, context=None, grid=None, **see):
    context_ = x if context is None else context
    config, (batch, m), n = mixer.config, x.shape[:2], context_.shape[1]
    may = visible(batch, m, n, **see)
    rotations = {}
    if config.rotary is not None:
        heads = config.selection_heads
        axes = 1 if config.rotary == "1d" else 2
        mask, ids = see.get("mask"), see.get("segments")
        if axes == 2:
            places = torch.cartesian_prod(*(torch.arange(s) for s in grid)).t()
            rows, cols = torch.cat((torch.zeros(2, n - places.shape[1]), places), 1)  # an angle of 0 turns nothing
            place = {"gate": (rows[None], cols[None]), "terms": (rows[None], cols[None])}
        else:
            pair = ids if isinstance(ids, tuple) else (ids, ids)
            place = {}
            for key, length, its_ids, its_mask in (("gate", m, pair[0], mask), ("terms", n, pair[1], mask)):
                hide = (
                    its_mask
                    if its_mask is not None and its_mask.ndim == 2 and (context is None or key == "terms")
                    else None
                )
                rows = [
                    real_positions(
                        [True] * length if hide is None else hide[b].tolist(),
                        [0] * length if its_ids is None else its_ids[b].tolist(),
                        length,
                    )
                    for b in range(batch)
                ]
                place[key] = (torch.tensor(rows),)
        for key, width in (("gate", heads or mixer.inner), ("terms", mixer.inner)):
            pairs = width // (2 * axes)
            divisor = heads if key == "gate" and heads is not None and axes == 1 else pairs
            frequencies = torch.tensor([1e4 ** (-k / divisor) for k in range(pairs)], dtype=torch.float64)
            size = width // axes
            rotations[f"rotate_{key}"] = [
                (slice(a * size, (a + 1) * size), place[key][a], frequencies) for a in range(axes)
            ]
    return reference.pom(
        x, context_, may, **mixer.matrices(n, dtype=torch.float64), activation=config.activation, gate=config.gate,
        reduction=config.reduction, **rotations,
    )  # fmt: skip


PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def save_blank(figure, file, **options):
    """In place of matplotlib's Figure.savefig."""
    if hasattr(file, "write"):
        file.write("<svg ></svg>")
    else:
        Path(file).write_bytes(PIXEL)


def blank_pictures():
    """Figures are saved blank, in a `with` statement: in fixtures of wide scope, which draw where tests do not."""
    return patch("matplotlib.figure.Figure.savefig", save_blank)


class Golden:
    """Cases of one golden file."""

    def __init__(self, stem):
        self.data = np.load(GOLDEN / f"{stem}.npz")
        self.meta = json.loads((GOLDEN / f"{stem}.json").read_text())["cases"]

    def part(self, case, kind):
        head = f"{case}/{kind}/"
        return {key[len(head) :]: torch.from_numpy(self.data[key]) for key in self.data.files if key.startswith(head)}


def close(a, b, tol):
    """Largest difference relative to the largest entry."""
    error = (a - b).abs().max() / b.abs().max().clamp_min(1e-30)
    assert error <= tol, f"relative error {error:.2e} > {tol:.0e}"


def same_gradients(module, gradients, tol):
    """Each parameter's gradient is the one of its name."""
    parameters = dict(module.named_parameters())
    for name, gradient in gradients.items():
        close(parameters[name].grad, gradient, tol)


def published_host(name):
    """Arrays of a host's published code, {"in": {…}, "w": {…}, "out": {…}, …}, and the options it was built with."""
    file = np.load(GOLDEN / "hosts" / f"{name}.npz")
    parts = {}
    for key in file.files:
        kind, _, rest = key.partition(".")
        parts.setdefault(kind, {})[rest] = torch.from_numpy(file[key])
    return parts, json.loads((GOLDEN / "hosts" / f"{name}.json").read_text())["options"]
