"""Forty families of transformers, each built small, converted with a mixer that reads x and one of q, k and v, and tried."""

from pathlib import Path

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from tests.helpers import slow_but

cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: families of transformers")
ROOT = Path(__file__).parents[2]
FAMILIES = [
    "albert",
    "bart",
    "bert",
    "clip",
    "codegen",
    "cohere",
    "deberta-v2",
    "dinov2",
    "dinov3_vit",
    "distilbert",
    "falcon",
    "gemma2",
    "gemma3_text",
    "glm",
    "gpt2",
    "gpt_neox",
    "gptj",
    "granite",
    "hubert",
    "llama",
    "mistral",
    "mixtral",
    "modernbert",
    "mpnet",
    "nemotron",
    "olmo2",
    "opt",
    "patchtst",
    "phi3",
    "qwen3",
    "qwen3_moe",
    "roberta",
    "siglip",
    "smollm3",
    "stablelm",
    "starcoder2",
    "t5",
    "vit",
    "wav2vec2",
    "whisper",
]


@pytest.mark.parametrize("mixer", slow_but((), ["pom", "qt"], ["pom"]))
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_converts_and_every_check_that_applies_holds(kind, mixer, monkeypatch):
    """Finite, learns, reads no padding, generates with a cache as without, comes back from disk, is undone to the bit."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import families

    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"untested: {kind}, which this transformers lacks")
    row = families.row_of(kind, mixer)
    assert families.works(row), row


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["pom", "qt"])
@pytest.mark.parametrize(("library", "kind"), [
    ("timm", "attention.Attention"), ("timm", "swin_transformer.WindowAttention"),
    ("diffusers", "SD3Transformer2DModel"), ("diffusers", "FluxTransformer2DModel"),
])  # fmt: skip
def test_a_model_of_timm_or_diffusers_does_too(library, kind, mixer, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pytest.importorskip(library, reason=f"untested: models of {library}")
    import families

    row = families.row_of(kind, mixer, library)
    assert families.works(row), row


@pytest.mark.slow
def test_what_does_not_work_is_told_apart(monkeypatch):
    """A refusal, a fault and a family that cannot be built here are three things in the table."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import families

    assert families.works({"finite": True, "generates": None})
    assert not families.works({"finite": True, "padding": False}) and not families.works({"why": "refused"})
    assert families.row_of("mamba", "pom")["stage"] == "refused"
    assert families.row_of("no family", "pom")["stage"] == "build"


class Zeroed(torch.nn.Module):
    """A host whose branch is zero at first, or dropped at random, or never learns."""

    def __init__(self, branch):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        torch.nn.init.zeros_(self.norm.weight)
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.branch = branch

    def forward(self, x):
        y = self.attention(x, x, x)[0]
        return x + self.branch(self.norm(y)) + self.norm.bias


class Detached(torch.nn.Module):
    def forward(self, x):
        return x.detach()


def test_a_mixer_behind_a_branch_of_its_host_that_is_zero_or_dropped_is_no_fault(monkeypatch):
    """LeViT's norms start at zero, Swin drops branches: only a mixer that no gradient can reach is one."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import families  # noqa: F401 (its steps import one another)
    from families_steps.checks import learns

    layers = pytest.importorskip("timm", reason="untested: branches that timm drops").layers
    x = torch.randn(1, 5, 16, requires_grad=True)
    for branch, right in ((torch.nn.Identity(), True), (layers.DropPath(0.999), True), (Detached(), False)):
        model = polymix.convert(Zeroed(branch), "pom").model
        before = [weight.clone() for weight in model.parameters()]
        assert learns(model, x) is right
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)), "it changed the model"


def test_a_backbone_of_stages_keeps_its_lists_whole(monkeypatch):
    """Swin says that it has four layers, and means stages: with lists of two, no Mask2Former can be called."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from families_steps.transformers_families import STEPS, small_config

    config = small_config(transformers.Mask2FormerConfig(), STEPS[0]).backbone_config
    assert len(config.depths) == len(config.num_heads) == len(config.out_features) == 4


def test_every_class_of_attention_in_timm_is_tried_or_left_out_for_a_reason(monkeypatch):
    """A class that no pattern knows would be missing from the table, without a word."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pytest.importorskip("timm", reason="untested: classes of timm")
    from families_steps import timm_attention

    named, left_out = timm_attention._classes(), timm_attention.left_out()
    assert {"attention.Attention", "shvit.SHSA", "convit.GPSA"} <= set(timm_attention.kinds())
    assert set(timm_attention.kinds()) | set(left_out) == set(named) and all(left_out.values())


def test_a_class_that_the_plan_leaves_is_named_so_that_the_reason_is_told(monkeypatch):
    """A model whose other layers convert would else stand in the table as one of a class that converts."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from families_steps.checks import converted

    class Odd(torch.nn.MultiheadAttention):
        """One whose forward has no adapter."""

        def forward(self, query, key, value, **options):
            return super().forward(query, key, value, **options)

    class Host(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.usual = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            self.odd = Odd(8, 2, batch_first=True)

        def forward(self, x):
            return self.odd(x := self.usual(x, x, x)[0], x, x)[0]

    assert converted(Host(), "qt", torch.randn(2, 5, 8))[0].adapters.keys() == {"usual"}
    with pytest.raises(polymix.errors.OptionError, match="odd"):
        converted(Host(), "qt", torch.randn(2, 5, 8), Odd)
