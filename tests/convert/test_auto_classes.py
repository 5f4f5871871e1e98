"""transformers' Auto classes load what `save_pretrained` wrote, or say why not; test_save.py has them in a new process."""

import importlib
import json
from pathlib import Path

import pytest
import torch

import polymix
from polymix.errors import OptionError
from tests.convert.saving_cases import AUTO, bert, gpt2, library, words

transformers = library("transformers")


@pytest.fixture(scope="module", autouse=True)
def known():
    importlib.import_module("polymix.convert.transformers_models")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A language model and an encoder."""
    place = tmp_path_factory.mktemp("saved")
    for name, build in (("gpt2", gpt2), ("bert", bert)):
        torch.manual_seed(0)
        polymix.save_pretrained(polymix.convert(build(), "qt").model, place / name)
    return place


@pytest.mark.slow  # a fixture of many hosts
@pytest.mark.parametrize("name", AUTO)
def test_another_process_loads_and_generates_the_same(saved, name):
    assert saved[1][f"{name} by {AUTO[name]}"], "another output or other words, or not in evaluation"


def test_the_model_without_its_head_comes_by_auto_model(folders):
    model = transformers.AutoModel.from_pretrained(folders / "gpt2")
    whole = polymix.load_pretrained(folders / "gpt2")
    assert type(model) is type(whole.base_model)
    ours, theirs = (part(**words())[0] for part in (model, whole.base_model))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "auto"])
def test_types_and_devices_are_as_asked(folders, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(folders / "gpt2", dtype=dtype, device_map={"": "cpu"})
    assert {part.dtype for part in model.parameters()} == {torch.float32 if dtype == "auto" else torch.bfloat16}


def test_another_task_is_refused_with_the_class_that_loads_it(folders):
    with pytest.raises(OptionError, match=r"BertForMaskedLM.*AutoModelForMaskedLM"):
        transformers.AutoModelForSequenceClassification.from_pretrained(folders / "bert")
    with pytest.raises(OptionError, match=r"BertForMaskedLM.*AutoModelForMaskedLM"):
        transformers.AutoModelForCausalLM.from_pretrained(folders / "bert")


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_labels", 3), ("attn_implementation", "eager"), ("use_cache", False), ("output_attentions", True),
     ("device_map", "auto"), ("device_map", {"transformer": 0, "lm_head": 1})],
)  # fmt: skip
def test_no_option_is_ignored_silently(folders, name, value):
    with pytest.raises(OptionError, match=name):
        transformers.AutoModelForCausalLM.from_pretrained(folders / "gpt2", **{name: value})


def test_a_config_alone_builds_no_model(folders):
    config = transformers.AutoConfig.from_pretrained(folders / "gpt2")
    with pytest.raises(OptionError, match=r"AutoModelForCausalLM\.from_pretrained"):
        transformers.AutoModelForCausalLM.from_config(config)


def test_damage_is_named_with_its_file(folders, tmp_path):
    for file in (folders / "gpt2").iterdir():
        (tmp_path / file.name).write_bytes(
            file.read_bytes()[:2000] if file.suffix == ".safetensors" else file.read_bytes()
        )
    with pytest.raises(polymix.errors.ResultsError, match=r"model\.safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_folder_with_a_tokenizer_is_a_pipeline(folders):
    tokenizers = pytest.importorskip("tokenizers", reason="untested: pipelines, for which tokenizers are needed")
    vocabulary = {f"w{i}": i for i in range(20)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = Path(folders, "gpt2")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w1").save_pretrained(folder)
    write = transformers.pipeline("text-generation", model=str(folder))
    text = write("w3 w4 w5", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    ids = polymix.load_pretrained(folder).generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False)
    assert text.replace(" ", "") == "".join(f"w{i}" for i in ids[0].tolist())


def test_the_config_of_a_model_of_another_library_names_no_type_of_transformers(tmp_path):
    polymix.save_pretrained(torch.nn.Linear(2, 2), tmp_path, host={
        "library": "torch", "class": "torch.nn.Linear", "kwargs": {"in_features": 2, "out_features": 2}})  # fmt: skip
    assert "model_type" not in json.loads((tmp_path / "config.json").read_text())
