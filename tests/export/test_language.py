"""Language models as graphs that carry their state: the same tokens as PyTorch, at any length."""

import importlib.util
import itertools
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
    return model(config(mixers=mixers, **{**SIZES, **options})).eval()


def generated(folder, prompt, count):
    spec = importlib.util.spec_from_file_location("generate_onnx", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(zip(*module.generate(folder, prompt, count), strict=True))


@pytest.mark.parametrize(
    ("family", "mixers", "short_conv", "count"),
    [
        pytest.param("gpt", "pom", 3, 30, marks=pytest.mark.slow),
        pytest.param("llama", "padre", 0, 30, marks=pytest.mark.slow),
        pytest.param("llama", "qt", 3, 30, marks=pytest.mark.slow),
        pytest.param("gpt", "pom", 0, 1000, marks=pytest.mark.exhaustive),
        pytest.param("llama", "padre", 0, 1000, marks=pytest.mark.exhaustive),
        pytest.param("llama", "qt", 3, 1000, marks=pytest.mark.exhaustive),
        pytest.param("llama", "linear", 0, 100, marks=pytest.mark.exhaustive),
        pytest.param("gpt", "mamba", 0, 100, marks=pytest.mark.exhaustive),
    ],
)
def test_the_same_tokens_as_pytorch(family, mixers, short_conv, count, tmp_path):
    model = language_model(family, mixers, short_conv=short_conv)
    polymix.export.export_graphs(language_graphs(model), tmp_path / "out")
    prompt = torch.randint(50, (1, 14), generator=torch.Generator().manual_seed(1))
    expected = model.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens, sizes = generated(tmp_path / "out", prompt[0].tolist(), count)
    assert list(tokens) == expected[0, 14:].tolist()
    assert len(set(sizes)) == 1, "the state has grown"


def test_the_state_has_names_that_a_person_can_read():
    prefill, step = language_graphs(language_model("gpt", "pom", short_conv=3))
    states = [name for name in step.inputs if name.startswith("state.")]
    assert states[0] == "state.0.window" and all(name.startswith(("state.0.mixer.", "state.1.")) for name in states[1:])
    outputs = step.call(step.inputs)
    assert list(outputs) == ["logits", *(f"next_{name}" for name in states)]
    assert list(prefill.call(prefill.inputs)) == ["logits", *states]


@pytest.mark.slow
def test_attention_keeps_keys_and_values_and_mixers_a_fixed_size(tmp_path):
    """A hybrid: past is free in the graph of a step, and only the attention's part of the state grows."""
    model = language_model("llama", ["pom", "softmax"], positions="rotary")
    content = polymix.export.export_graphs(language_graphs(model), tmp_path / "out")
    assert {entry["path"]: entry["free"] for entry in content["files"]} == {
        "onnx/prefill.onnx": ["batch", "tokens"], "onnx/step.onnx": ["batch", "past"],
    }  # fmt: skip
    prompt = torch.randint(50, (1, 5), generator=torch.Generator().manual_seed(1))
    expected = model.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens, sizes = generated(tmp_path / "out", prompt[0].tolist(), 30)
    assert list(tokens) == expected[0, 5:].tolist()
    growth = {after - before for before, after in itertools.pairwise(sizes)}
    assert growth == {2 * 4 * SIZES["hidden_size"]}, "a key and a value of float32 for each token"


def test_the_command_takes_a_saved_language_model(tmp_path):
    from polymix.workflows.export import Settings, models_of

    language_model("gpt", "pom").save_pretrained(tmp_path / "model")
    settings = Settings(models=[str(tmp_path / "model")])
    assert [graph.name for graph in models_of(settings)] == ["prefill", "step"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A hybrid with its tokenizer: the folder of PyTorch's model, and its export by the command."""
    from polymix.cli import main
    from polymix.domains.text.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("language")
    model = language_model("gpt", ["pom", "softmax"], short_conv=3, vocab_size=300)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)  # sure of what comes next: no rounding decides it
    model.save_pretrained(folder / "model")
    train_tokenizer(["The cat sat on a mat, and the dog saw the cat sit. "], 300, 64).save_pretrained(folder / "model")
    with pytest.raises(SystemExit) as end:
        main(["export", "--model", str(folder / "model"), "--out", str(folder / "out")])
    assert end.value.code == 0
    return folder / "model", folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--temperature", "0"], ["--temperature", "0", "--stream"], ["--seed", "3", "--top-k", "9", "--num", "2"],
        ["--beams", "3"],
    ],
    ids=["likeliest", "stream", "drawn", "beams"],
)  # fmt: skip
def test_generate_writes_the_same_text_from_an_export(exported, options, capsys):
    from polymix.cli import main

    texts = []
    for folder in exported:
        with pytest.raises(SystemExit) as end:
            main(["generate", str(folder), "--prompt", "The cat", "--max-new-tokens", "15", *options])
        assert end.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) > 20


@pytest.mark.slow
def test_prompts_of_different_lengths_are_read_one_by_one(exported, capsys, monkeypatch):
    import io

    from polymix.cli import main

    texts = []
    for folder in exported:
        monkeypatch.setattr("sys.stdin", io.StringIO("The cat\nA mat, and the dog\n"))
        with pytest.raises(SystemExit):
            main(["generate", str(folder), "--lines", "--temperature", "0", "--max-new-tokens", "9"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].count("---") == 1


@pytest.mark.slow
@pytest.mark.parametrize("change", ["another model", "no tokenizer", "no step", "damaged", "half", "device"])
def test_folders_that_generate_cannot_use_are_one_line(exported, change, tmp_path, capsys):
    import json
    import shutil

    from polymix.cli import main

    out, more = tmp_path / "out", []
    shutil.copytree(exported[1], out)
    content = json.loads((out / "manifest.json").read_text())
    if change == "another model":
        del content["language"]
    elif change == "no tokenizer":
        shutil.rmtree(out / "tokenizer")
    elif change == "no step":
        content["files"] = [entry for entry in content["files"] if "step" not in entry["path"]]
    elif change == "damaged":
        (out / "onnx/step.onnx").write_bytes(b"none")
    elif change == "half":
        del content["language"]["vocabulary"]
    else:
        more = ["--dtype", "bfloat16"]
    (out / "manifest.json").write_text(json.dumps(content))
    said = {"another model": "onnx/prefill.onnx and onnx/step.onnx", "no tokenizer": "tokenizer", "half": "Export it again",
            "no step": "polymix export --model FOLDER", "damaged": "cannot load", "device": "float32 on the CPU"}  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main(["generate", str(out), "--prompt", "The cat", *more])
    printed = capsys.readouterr().err.strip()
    assert end.value.code == 2 and said[change] in printed and "\n" not in printed


@pytest.mark.slow
def test_an_exported_model_ends_where_its_positions_end(exported):
    from polymix.errors import ShapeError
    from polymix.workflows.generate import Settings, generate, load

    model, tokenizer = load(exported[1])
    assert model.positions == SIZES["max_position_embeddings"] and model.vocabulary == 300
    with pytest.raises(ShapeError, match="learned positions"):
        generate(model, tokenizer, ["The cat"], Settings(max_new_tokens=2048))
    with pytest.raises(errors.CapabilityError, match="one by one"):
        generate(model, tokenizer, ["The cat", "A mat, and the dog"], Settings(max_new_tokens=2))
