"""Forty families of transformers, each built small, converted with a mixer that reads x and one of q, k and v, and tried."""

from pathlib import Path

import pytest

from polymix.compat import cure_torchvision

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


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["pom", "qt"])
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


def test_what_does_not_work_is_told_apart(monkeypatch):
    """A refusal, a fault and a family that cannot be built here are three things in the table."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import families

    assert families.works({"finite": True, "generates": None})
    assert not families.works({"finite": True, "padding": False}) and not families.works({"why": "refused"})
    assert families.row_of("mamba", "pom")["stage"] == "refused"
    assert families.row_of("no family", "pom")["stage"] == "build"
