"""Table 1 of PADRe as code: how far each mechanism is from its PADRe form, and what the approximate ones depend on.

    python benchmarks/table_1.py benchmarks/results/table-1.json docs/images/table-1.png

Random weights and tokens in float64, seeded. Error: root mean square of the difference over that of the mechanism's
own output. Softmax: one head of 4 channels, 16 tokens, queries scaled so that the logits have the given largest size.
Mamba: 8 channels, 16 tokens, 4 states; b_Δ is moved so that Δ has the given largest value. Its Δ is held either at what
it is without input (a polynomial of degree 3 for every input) or at the input itself, where only exp(Δ A) ≈ 1 + Δ A
is left to err.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from saving import save

import polymix
from polymix.lens import as_padre

F64 = {"dtype": torch.float64}
CONV = {"activation": "identity", "norm": None, "kernel_size": 11}
POM = {"activation": "identity", "gate": "identity"}
ROWS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("Conv2Former", "conv2former", CONV, {"grid": (4, 4)}),
    ("Hyena, order 2", "hyena", {"order": 2, "length": 16}, {}),
    ("Hyena, order 3", "hyena", {"order": 3, "length": 16}, {}),
    ("SimA, norms frozen", "sima", {"heads": 2}, {"x": True}),
    ("Castling-ViT, inference", "castling", {"heads": 2, "normalize": False}, {}),
    ("Poly-NL", "poly_nl", {}, {}),
    ("Poly-SA, no σ", "poly_sa", {"heads": 2, "grid": (4, 4), "sigma": "identity"}, {}),
    ("PoM, k = 2", "pom", POM, {}),
    ("PoM, k = 3", "pom", {**POM, "degree": 3}, {}),
    ("QT, full", "qt", {"heads": 2, "form": "full"}, {}),
]


class AlongTokens(torch.nn.Module):
    """A layer that runs along the tokens: ResMLP's token mixing, a convolution, PoolFormer's pooling."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


LINEAR = {
    "ResMLP, token mixing": lambda: torch.nn.Linear(16, 16),
    "convolution": lambda: torch.nn.Conv1d(8, 8, 3, padding=1),
    "pooling": lambda: torch.nn.AvgPool1d(3, 1, 1, count_include_pad=False),
}
REACHES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
ORDERS = range(9)
STEPS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def tokens(n: int, dim: int) -> torch.Tensor:
    return torch.randn(1, n, dim, generator=torch.Generator().manual_seed(1), **F64)


def shaken(mixer: torch.nn.Module) -> torch.nn.Module:
    """Every parameter moved from its init, so that no zero hides a term."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in mixer.parameters():
            p += 0.2 * torch.randn(p.shape, generator=generator, **F64)
    return mixer.eval()


def exact() -> list[dict[str, Any]]:
    rows = []
    for label, layer in LINEAR.items():
        torch.manual_seed(0)
        form = as_padre(AlongTokens(layer()).double(), 16, dim=8)
        row = {
            "mechanism": label,
            "degree": form.degree,
            "chains": len(form.chains),
            "error": form.error(tokens(16, 8)),
        }
        rows.append(row)
    for label, name, options, call in ROWS:
        torch.manual_seed(0)
        mixer, x = shaken(polymix.create_mixer(name, 8, **F64, **options)), tokens(16, 8)
        form = as_padre(mixer, 16, **({"x": x} if "x" in call else call))
        its = form.polynomial
        rows.append({"mechanism": label, "degree": its.degree or "/".join(map(str, its.rational or ())),
                      "chains": len(form.chains), "error": form.error(x)})  # fmt: skip
    return rows


def softmax() -> list[dict[str, float]]:
    rows = []
    for reach in REACHES:
        torch.manual_seed(0)
        mixer, x = polymix.create_mixer("softmax", 4, heads=1, **F64), tokens(16, 4)
        q, k, _ = (part.transpose(1, 2) for part in mixer.qkv(x, x))
        now = ((q @ k.transpose(-1, -2)).abs().max() / 2).item()
        with torch.no_grad():
            mixer.qkv.qkv.weight[:4] *= reach / now
        rows += [
            {"reach": reach, "order": order, "error": as_padre(mixer, 16, order=order).error(x)} for order in ORDERS
        ]
    return rows


def mamba() -> list[dict[str, Any]]:
    rows = []
    for step in STEPS:
        torch.manual_seed(0)
        mixer, x = polymix.create_mixer("mamba", 8, state_size=4, **F64).eval(), tokens(16, 8)
        with torch.no_grad():
            mixer.layer.D.zero_()
        low, high = -30.0, 30.0
        start = mixer.layer.dt_proj.bias.detach().clone()
        for _ in range(60):  # the largest Δ grows with the bias: bisect
            middle = (low + high) / 2
            with torch.no_grad():
                mixer.layer.dt_proj.bias.copy_(start + middle)
            low, high = (middle, high) if mixer.time_steps(x).max() < step else (low, middle)
        forms = {
            "without input": as_padre(mixer, 16), "without input, 1 + ΔA": as_padre(mixer, 16, decay="linear"),
            "at x": as_padre(mixer, 16, x=x), "at x, 1 + ΔA": as_padre(mixer, 16, x=x, decay="linear"),
        }  # fmt: skip
        rows += [{"largest": step, "held": label, "error": form.error(x)} for label, form in forms.items()]
    return rows


def plot(content: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    shades = ("#c6dbef", "#9ecae1", "#6baed6", "#3182bd", "#08519c", "#041f4a")
    for reach, colour in zip(REACHES, shades, strict=True):
        line = [row for row in content["softmax"] if row["reach"] == reach]
        left.plot([row["order"] for row in line], [row["error"] for row in line], "o-", color=colour, markersize=4,
                  label=f"{reach:g}")  # fmt: skip
    left.set(
        xlabel="order of the Taylor series", ylabel="relative error", yscale="log", title="Softmax as a rational PADRe"
    )
    left.legend(title="largest |logit|", frameon=False)
    for label, colour in (("without input", "#d55e00"), ("at x, 1 + ΔA", "#0072b2")):
        line = [row for row in content["mamba"] if row["held"] == label]
        right.plot([row["largest"] for row in line], [row["error"] for row in line], "o-", color=colour, markersize=4,
                   label=f"Δ held {label}")  # fmt: skip
    right.set(
        xlabel="largest Δ",
        ylabel="relative error",
        xscale="log",
        yscale="log",
        title="Mamba's scan as a PADRe of degree 3",
    )
    right.legend(frameon=False)
    for axis in (left, right):
        axis.grid(color="#e4e4e4")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    content: dict[str, Any] = {"torch": torch.__version__, "exact": exact(), "softmax": softmax(), "mamba": mamba()}
    for row in content["exact"]:
        print(f"{row['mechanism']:26} degree {row['degree']:>5}  chains {row['chains']:3}  error {row['error']:.1e}")
    for reach in REACHES:
        line = [f"{row['error']:.1e}" for row in content["softmax"] if row["reach"] == reach]
        print(f"softmax, |logit| ≤ {reach:4g}, orders 0 to {ORDERS[-1]}: {' '.join(line)}")
    for step in STEPS:
        line = [f"{row['held']}: {row['error']:.1e}" for row in content["mamba"] if row["largest"] == step]
        print(f"mamba, Δ ≤ {step:5g}  {', '.join(line)}")
    if len(sys.argv) > 1:
        save(content, Path(sys.argv[1]))
    if len(sys.argv) > 2:
        plot(content, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
