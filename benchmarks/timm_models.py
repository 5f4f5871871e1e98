"""Parameters and multiply-adds of the models that `import polymix.timm` registers, beside the papers' figures.

    python benchmarks/timm_models.py benchmarks/results/tasks/classify/timm-models.json

Nothing is computed: the models run on the meta device, for one image of 224 × 224 and 1,000 classes.
"""

import argparse
from pathlib import Path

import torch
from hosts import count, printed
from saving import save

from polymix.compat import cure_torchvision

cure_torchvision()
import timm  # noqa: E402

from polymix.timm import create, names  # noqa: E402


def figures(name: str | None, mixer: str, host: str, matched: bool = False) -> dict:
    with torch.device("meta"):
        model = create(mixer, host, match="parameters" if matched else None).eval()
        flops = count(model, {"x": torch.empty(1, 3, 224, 224)})
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    paper = printed(host, "attention" if name is None else mixer)
    paper = paper if paper is not None and paper["what"] == "model" and not matched else None
    return {
        "name": name or host, "host": host, "mixer": None if name is None else mixer, "matched": matched,
        "parameters": parameters, "multiply_adds": flops, "printed": paper,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    registered = names()
    rows = [figures(None, "keep", host) for host in dict.fromkeys(host for _, host, _ in registered.values())]
    rows += [figures(name, *of) for name, of in registered.items()]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save({"rows": rows, "timm": timm.__version__}, options.out)


if __name__ == "__main__":
    main()
