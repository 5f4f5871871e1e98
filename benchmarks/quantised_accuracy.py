"""What 8 bits cost in accuracy: digits transformers and a small DeiT, trained here, in PyTorch and quantised.

    python benchmarks/quantised_accuracy.py benchmarks/results/export/accuracy.json [--runs FOLDER] [--mixers pom,padre]

Each model is trained on scikit-learn's digits by `polymix train classify`, exported with the targets int8 and qnn, and
measured on the 360 held-out digits, one of which is 0.28 points. Ranges come from 128 training digits. The files of
qnn, in integers throughout, run on the CPU here. The aim: a8w8 within 1.0 point of PyTorch, a16w8 within 0.3. Finished
rows are kept: run the same command again to continue. `--runs` keeps the trained models.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from saving import save

from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.errors import CapabilityError, ParityError
from polymix.measure import manifest
from polymix.train.run import silent, train
from polymix.workflows.export import Settings, run

MIXERS = ("softmax", "pom", "padre", "qt", "poly_sa", "poly_nl")
HOSTS: dict[str, dict[str, Any]] = {
    "digits transformer": {},
    "DeiT-Tiny with 4 blocks": {"host": "deit_tiny_patch16_224", "host_depth": 4, "image_size": 64, "steps": 400,
                            "learning_rate": 1e-3},
}  # fmt: skip
TARGETS = ("int8", "qnn")


def trained(folder: Path, host: str, mixer: str) -> Path:
    """The run of a host and a mixer, trained once."""
    out = folder / f"{host.split()[0].lower()}-{mixer}".replace(":", "-")
    if not (out / "model.pt").is_file():
        train(ClassifyRecipe(**HOSTS[host], mixer=mixer, control=False), out, say=silent)
    return out


def row_of(folder: Path, host: str, mixer: str, target: str) -> dict[str, Any]:
    """The accuracy in PyTorch and of each scheme, or why there is none."""
    found: dict[str, Any] = {"host": host, "mixer": mixer, "target": target}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            content = run(Settings(models=[str(trained(folder, host, mixer))]), Path(scratch) / "out", [target], silent)
        except (CapabilityError, ParityError) as error:
            return {**found, "failed": str(error)}
    for row in content["measured"]:
        scheme = "float" if row["path"] is None else Path(row["path"]).stem.rpartition("-")[2]
        found[scheme] = row["metrics"]["accuracy"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=Path, help="keep the trained models here")
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--hosts", default=",".join(host.split()[0] for host in HOSTS), help="first words of hosts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    content = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {"rows": []}
    content["machine"] = manifest("cpu", 1)
    done = {(row["host"], row["mixer"], row["target"]) for row in content["rows"]}
    with tempfile.TemporaryDirectory() as scratch:
        for host in (host for host in HOSTS if host.split()[0] in options.hosts.split(",")):
            for mixer in options.mixers.split(","):
                for target in TARGETS:
                    if (host, mixer, target) not in done:
                        content["rows"].append(row_of(options.runs or Path(scratch), host, mixer, target))
                        print(content["rows"][-1], flush=True)
                        save(content, options.out)


if __name__ == "__main__":
    main()
