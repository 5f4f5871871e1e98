"""Parameters and multiply-adds of real models before and after conversion, next to the papers' figures.

    python benchmarks/hosts.py benchmarks/results/hosts.json

Nothing is computed: the models run on the meta device, with one input, under PyTorch's FLOP counter, with unfused
attention. "Layers" are the attention layers that are converted; their figures are by formula.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from saving import save
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import PolymixError

cure_torchvision()
import timm  # noqa: E402
import transformers  # noqa: E402


class Printed(NamedTuple):
    """A paper's figures: millions of parameters and 10⁹ multiply-adds of `what`, the model or its layers."""

    parameters: float
    multiply_adds: float
    what: str
    source: str


class Host(NamedTuple):
    build: Callable[[], nn.Module]
    given: Callable[[], dict[str, Any]]
    plans: dict[str, Any]  # by label
    printed: Mapping[str, Printed] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})  # of polymix.convert


def vision(name: str, plans: dict[str, Any], printed: dict[str, Printed], **options: Any) -> Host:
    return Host(partial(timm.create_model, name), lambda: {"x": torch.empty(1, 3, 224, 224)}, plans, printed, options)


def same(*names: str) -> dict[str, Any]:
    return {name: name for name in names}


def padre(parameters: float, multiply_adds: float) -> Printed:
    return Printed(parameters, multiply_adds, "model", "PADRe, Table 2")


def pooled(parameters: float, multiply_adds: float) -> Printed:
    return Printed(parameters, multiply_adds, "layers", "Poly-NL/SA, Table 3")


SA = "poly_sa:head_mixing=depthwise"
FIVE = same("padre-2", "padre-3", "qt", "pom", "poly_nl", "poly_sa")
HOSTS = {
    "deit_tiny_patch16_224": vision("deit_tiny_patch16_224", FIVE | {SA: SA}, {
        "attention": padre(5, 1.3), "padre-2": padre(5, 1.2), "padre-3": padre(7, 1.7), SA: pooled(5.4, 0.28),
    }),
    "deit_small_patch16_224": vision("deit_small_patch16_224", FIVE, {
        "attention": padre(22, 4.6), "padre-2": padre(20, 4.8), "padre-3": padre(26, 6.1),
    }),
    "deit_base_patch16_224": vision("deit_base_patch16_224", FIVE, {
        "attention": padre(86, 17.6), "padre-2": padre(80, 18.8),
    }),
    "swin_tiny, windows kept": vision("swin_tiny_patch4_window7_224", FIVE, {"attention": pooled(28.3, 2.05)}),
    "swin_tiny, windows merged": vision("swin_tiny_patch4_window7_224", FIVE | {SA: SA}, {
        "attention": pooled(28.3, 2.05), SA: pooled(26.1, 1.6),
    }, windows="merge"),
    "xcit_tiny_12_p16_224": vision("xcit_tiny_12_p16_224", FIVE, {
        "attention": pooled(6.7, 0.57), "poly_sa": pooled(6.7, 0.39),
    }),
    "caformer_s18": vision("caformer_s18", FIVE, {}),
    "efficientvit_b1": vision("efficientvit_b1", FIVE, {}),
    "DETR-R50, encoder": Host(
        lambda: transformers.DetrModel(transformers.DetrConfig(use_timm_backbone=True, backbone="resnet50",
                                                               use_pretrained_backbone=False)),
        lambda: {"pixel_values": torch.empty(1, 3, 800, 1088)},
        {name: {"encoder.*": name} for name in FIVE},
        {"attention": Printed(6.1, 10.1, "layers", "PADRe, Table 3"),
         "padre-2": Printed(2.7, 4.5, "layers", "PADRe, Table 3")},
        {"grid": (25, 34)},
    ),
    "gpt2, 1,024 tokens": Host(
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()),
        lambda: {"input_ids": torch.zeros(1, 1024, dtype=torch.int64), "use_cache": False}, FIVE,
    ),
}  # fmt: skip


def count(model: nn.Module, given: dict[str, Any]) -> float | None:
    """Multiply-adds of one call, in 10⁹; None if the model reads values, which the meta device does not have."""
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            model(**given)
    except (RuntimeError, NotImplementedError) as error:
        print(f"  not counted: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return counter.get_total_flops() / 2e9


def row(name: str, label: str, given: Host, model: nn.Module, layers: Any) -> dict[str, Any]:
    """One row. `layers` are the converted layers' reports, and 0 for before or 1 for after."""
    reports, which = layers
    flops = [report.flops[which] for report in reports if report.flops]
    return {
        "host": name, "mixer": label, "parameters": sum(p.numel() for p in model.parameters()) / 1e6,
        "multiply_adds": count(model, given.given()),
        "layer_parameters": sum(report.parameters[which] for report in reports) / 1e6,
        "layer_multiply_adds": sum(flops) / 2e9 if len(flops) == len(reports) else None,
        "printed": given.printed[label]._asdict() if label in given.printed else None, "refused": None,
    }  # fmt: skip


def rows(name: str, host: Host) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with torch.device("meta"):
        for label, plan in host.plans.items():
            model = host.build().eval()
            try:
                report = polymix.convert(model, plan, **host.options)
            except PolymixError as error:
                found.append({"host": name, "mixer": label, "refused": str(error.got)})
                continue
            swapped = [layer for layer in report.layers if layer.now]
            after = row(name, label, host, report.model, (swapped, 1))
            if not any(line["mixer"] == "attention" for line in found):
                found.insert(0, row(name, "attention", host, report.undo(), (swapped, 0)))
            found.append(after)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    found = []
    for name, host in HOSTS.items():
        for line in rows(name, host):
            found.append(line)
            told = line["refused"] or f"{line['parameters']:.2f} M, {line['multiply_adds']} G"
            print(f"{name}, {line['mixer']}: {told}", flush=True)
    save({"rows": found}, given.out)


if __name__ == "__main__":
    main()
