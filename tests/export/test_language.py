"""Language models as graphs that carry their state: the same tokens as PyTorch, at any length."""

import importlib.util
from pathlib import Path

import pytest
import torch

import polymix
from polymix import errors

pytest.importorskip("onnxruntime", reason="untested: exports, for which onnxruntime is needed (the export extra)")
pytest.importorskip("transformers", reason="untested: language models, for which transformers is needed")
from polymix.export.language import language_graphs
from polymix.models.language import PolymixGPTConfig, PolymixGPTForCausalLM, PolymixLlamaConfig, PolymixLlamaForCausalLM

EXAMPLE = Path(__file__).parents[2] / "examples/generate_onnx.py"
SIZES = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "intermediate_size": 32,
         "max_position_embeddings": 2048}  # fmt: skip


def language_model(family, mixers, **options):
    torch.manual_seed(0)
    config, model = {"gpt": (PolymixGPTConfig, PolymixGPTForCausalLM),
                     "llama": (PolymixLlamaConfig, PolymixLlamaForCausalLM)}[family]  # fmt: skip
    return model(config(mixers=mixers, **SIZES, **options)).eval()


def generated(folder, prompt, count):
    spec = importlib.util.spec_from_file_location("generate_onnx", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(zip(*module.generate(folder, prompt, count), strict=True))


@pytest.mark.parametrize(
    ("family", "mixers", "short_conv", "count"),
    [
        ("gpt", "pom", 3, 30),
        pytest.param("gpt", "pom", 0, 1000, marks=pytest.mark.slow),
        pytest.param("llama", "padre", 0, 1000, marks=pytest.mark.slow),
        pytest.param("llama", "qt", 3, 100, marks=pytest.mark.slow),
        pytest.param("llama", "linear", 0, 100, marks=pytest.mark.slow),
        pytest.param("gpt", "mamba", 0, 100, marks=pytest.mark.slow),
    ],
)
def test_the_same_tokens_as_pytorch(family, mixers, short_conv, count, tmp_path):
    model = language_model(family, mixers, short_conv=short_conv)
    polymix.export.export_graphs(language_graphs(model), tmp_path / "out")
    prompt = torch.randint(50, (1, 14), generator=torch.Generator().manual_seed(1))
    wanted = model.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens, sizes = generated(tmp_path / "out", prompt[0].tolist(), count)
    assert list(tokens) == wanted[0, 14:].tolist()
    assert len(set(sizes)) == 1, "the state has grown"


def test_the_state_has_names_that_a_person_can_read():
    prefill, step = language_graphs(language_model("gpt", "pom", short_conv=3))
    states = [name for name in step.inputs if name.startswith("state.")]
    assert states[0] == "state.0.window" and all(name.startswith(("state.0.mixer.", "state.1.")) for name in states[1:])
    outputs = step.call(step.inputs)
    assert list(outputs) == ["logits", *(f"next_{name}" for name in states)]
    assert list(prefill.call(prefill.inputs)) == ["logits", *states]


def test_attention_is_refused():
    with pytest.raises(errors.CapabilityError, match="attention in layer 1"):
        language_graphs(language_model("gpt", ["pom", "softmax"]))


def test_the_command_takes_a_saved_language_model(tmp_path):
    from polymix.workflows.export import Settings, models_of

    language_model("gpt", "pom").save_pretrained(tmp_path / "model")
    settings = Settings(models=[str(tmp_path / "model")])
    assert [graph.name for graph in models_of(settings)] == ["prefill", "step"]
