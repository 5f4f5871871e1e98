"""Models to save, one for each way in which a host is built, and what the tests of saving share."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import torch as safetensors
from torch import nn

import polymix
from polymix.compat import cure_torchvision
from polymix.models import VisionTransformer
from tests.convert.checks import stirred
from tests.helpers import tokens

ROOT = Path(__file__).parents[2]
PADRE, QT = polymix.PadreConfig(degree=3, kernel_size=3), polymix.QtConfig()
ENCODER = "tests.convert.saving_cases:encoder"


def encoder(dim=16, depth=2, tied=False):
    """A host of nobody's: layers of torch.nn, the last one twice where `tied`."""
    layers = [nn.TransformerEncoderLayer(dim, 2, 24, dropout=0.0, batch_first=True) for _ in range(depth)]
    return nn.Sequential(*layers, *layers[-1:] * tied)


def own(**changes):
    options = {"image_size": 8, "patch_size": 2, "dim": 16, "depth": 2, "classes": 3, "class_token": True}
    return VisionTransformer(polymix.SoftmaxConfig(heads=2), **{**options, **changes})


def images(size=8):
    return tokens(2, 3, size, size, dtype=torch.float32)


def words(count=20):
    return {"input_ids": torch.arange(10).reshape(2, 5) % count}


def library(name):
    cure_torchvision()
    return pytest.importorskip(name, reason=f"untested: models of {name}, which is not installed")


def text(kind, **changes):
    transformers = library("transformers")
    config = getattr(transformers, f"{kind}Config")
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 20, "bos_token_id": 0,
             "eos_token_id": 1, "max_position_embeddings": 16, "intermediate_size": 24}  # fmt: skip
    return config(**{**sizes, **changes})


def gpt2():
    return library("transformers").GPT2LMHeadModel(text("GPT2", attn_implementation="eager"))


def bert():
    return library("transformers").BertForMaskedLM(text("Bert"))


def vit():
    transformers = library("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=8, patch_size=2))


def timm_vit(**options):
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
    return library("timm").create_model("vit_tiny_patch16_224", **{**sizes, "num_classes": 3, **options})


TORCHVISION = {"image_size": 8, "patch_size": 2, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24}


def torchvision_vit():
    return library("torchvision.models").VisionTransformer(**TORCHVISION, num_classes=3)


class Case:
    """A host, what it is called with, its plan, and how `convert` and `save_pretrained` are told of it."""

    def __init__(self, build, given, plan, host=None, **options):
        self.build, self.given, self.plan, self.host, self.options = build, given, plan, host, options

    def model(self, cast=None):
        model = stirred(self.build())
        if self.plan is not None:
            model = polymix.convert(model, self.plan, copy=True, **self.options).model
        return stirred(model.to(cast) if cast else model).eval()


CALL = {"call": ENCODER, "kwargs": {"tied": True}}
BUILT = {
    "library": "torchvision",
    "class": "torchvision.models.VisionTransformer",
    "kwargs": {**TORCHVISION, "num_classes": 3},
}
HYBRID = {"blocks.0.*": PADRE, "blocks.1.*": "keep", "blocks.2.*": polymix.PolySaConfig()}
CASES = {
    "own": Case(own, images(), "1:1", mixer=PADRE),
    "own, never converted": Case(own, images(), None),
    "torch.nn, a shared layer": Case(lambda: encoder(tied=True), tokens(2, 5, 16, dtype=torch.float32), "pom", CALL),
    "timm, hybrid": Case(timm_vit, images(16), HYBRID),
    "timm, bfloat16": Case(timm_vit, images(16), "qt"),
    "torchvision": Case(torchvision_vit, images(), "poly_nl", BUILT),
    "GPT-2, tied weights": Case(gpt2, words(), "1:1", mixer=QT, causal=True),
    "BERT": Case(bert, words(), "pom"),
    "ViT": Case(vit, images(), PADRE),
}
# The Auto class of transformers that loads the model of a case.
AUTO = {
    "GPT-2, tied weights": "AutoModelForCausalLM",
    "BERT": "AutoModelForMaskedLM",
    "ViT": "AutoModelForImageClassification",
}


def ready(case):
    """The converted model, or None where its library is missing."""
    try:
        return case.model()
    except pytest.skip.Exception:
        return None


FRESH = """
import json, sys, torch, polymix
torch.set_num_threads(1)  # as in the tests: more threads may round sums otherwise
found = {}
for name, folder in json.loads(sys.argv[1]).items():
    model = polymix.load_pretrained(folder, trust="call" in json.load(open(f"{folder}/config.json"))["host"])
    given = torch.load(f"{folder}.pt")
    with torch.no_grad():
        output = model(**given["input"]) if isinstance(given["input"], dict) else model(given["input"])
    output = output if isinstance(output, torch.Tensor) else output.logits
    found[name] = torch.equal(output, given["output"]) and not model.training
if autos := json.loads(sys.argv[3]):
    import polymix.convert.transformers_models, transformers
    for name, auto in autos.items():
        folder = json.loads(sys.argv[1])[name]
        model, given = getattr(transformers, auto).from_pretrained(folder), torch.load(f"{folder}.pt")
        with torch.no_grad():
            output = model(**given["input"]) if isinstance(given["input"], dict) else model(given["input"])
        found[f"{name} by {auto}"] = torch.equal(output.logits, given["output"]) and not model.training
        if model.can_generate():
            words = model.generate(**given["input"], max_new_tokens=3, do_sample=False, pad_token_id=0)
            found[f"{name} by {auto}"] &= torch.equal(words, given["words"])
failure = None
try:
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.dont_write_bytecode = True  # which CPython 3.11 leaves cut off on a full disk, and then cannot import
    resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000))
    polymix.save_pretrained(torch.nn.Linear(128, 128), sys.argv[2], host={
        "library": "torch", "class": "torch.nn.Linear", "kwargs": {"in_features": 128, "out_features": 128}})
except ImportError:
    pass
except Exception as error:
    failure = str(error)
print(json.dumps([found, failure]))
"""


def said(folder):
    return json.loads((Path(folder) / "config.json").read_text())


def round_trip(model, folder, **options):
    polymix.save_pretrained(model, folder, **{key: options.pop(key) for key in ("host", "metadata") if key in options})
    return polymix.load_pretrained(folder, **options)


def rewrite(folder, change):
    """A model file whose header was changed by hand."""
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
        content = json.loads(file.metadata()["polymix"])
        weights = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    change(content, weights)
    safetensors.save_file(weights, folder / "model.safetensors", {"format": "pt", "polymix": json.dumps(content)})
