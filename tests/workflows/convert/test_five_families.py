"""Five families from end to end by the command line: convert, distil a few steps, save, load elsewhere, use, undo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import polymix
from polymix.compat import cure_torchvision
from polymix.convert.tracing import tensors
from tests.contracts.library_cases import whisper_config

pytestmark = pytest.mark.slow
cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: families of transformers (the extra text)")
pytest.importorskip("tokenizers", reason="untested: text, for which tokenizers are needed (the extra text)")
from polymix.domains.text.tokenizer import train_tokenizer  # noqa: E402  # needs transformers

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 300,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "cls_token_id": 0,
    "sep_token_id": 0,
}  # fmt: skip
DISTILLED = ("--distill-epochs", "1", "--batch", "4")
FEATURES = ("--distill-loss", "features")
TEXT, PHOTOS = (("--data", data, *DISTILLED) for data in ("texts", "photos"))
# The mixer, and what the command distils with: sound, and noise with captions, are no data of the command.
FAMILIES = {
    "qwen3": ("pom", (*TEXT, "--tokens", "16")), "modernbert": ("qt", (*TEXT, *FEATURES, "--tokens", "16")),
    "whisper": ("pom", ()), "dinov3": ("qt", (*PHOTOS, *FEATURES)), "sd3": ("pom", ()),
}  # fmt: skip
LOADING = """
import sys
import torch
import polymix
model = polymix.load_pretrained(sys.argv[1])
with torch.no_grad():
    output = model(**torch.load("call.pt"))
torch.save(output[0], "answer.pt")
if sys.argv[2] == "generates":
    call = torch.load("call.pt")
    one, two = (model.generate(**call, use_cache=use, max_new_tokens=4, do_sample=False) for use in (True, False))
    assert torch.equal(one, two), "the cache changes what is generated"
"""


def texts(seed):
    order = torch.randint(len(WORDS), (150,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in order)


def model_of(kind):
    torch.manual_seed(0)
    if kind == "whisper":
        return transformers.WhisperForConditionalGeneration(whisper_config())
    if kind == "sd3":
        diffusers = pytest.importorskip("diffusers", reason="untested: Stable Diffusion 3 (the extra diffusion)")
        return diffusers.SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
            joint_attention_dim=24, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
            pos_embed_max_size=8,
        )  # fmt: skip
    if kind == "dinov3":
        image = {"image_size": 32, "patch_size": 8, "num_register_tokens": 2}
        return transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**SMALL, **image))
    auto = transformers.AutoModelForCausalLM if kind == "qwen3" else transformers.AutoModel
    options = {"num_key_value_heads": 1, "head_dim": 8} if kind == "qwen3" else {"layer_types": ["full_attention"] * 2}
    return auto.from_config(transformers.AutoConfig.for_model(kind, **SMALL, **options))


def call_of(kind):
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 300, (2, 8), generator=draw)
    return {
        "qwen3": {"input_ids": ids[:1]}, "modernbert": {"input_ids": ids},
        "whisper": {"input_features": torch.randn(2, 16, 40, generator=draw), "decoder_input_ids": ids[:, :4] % 60},
        "dinov3": {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw)},
        "sd3": {
            "hidden_states": torch.randn(2, 4, 8, 8, generator=draw), "timestep": torch.tensor([3, 7]),
            "encoder_hidden_states": torch.randn(2, 5, 24, generator=draw),
            "pooled_projections": torch.randn(2, 16, generator=draw),
        },
    }[kind]  # fmt: skip


def answer(model, call):
    with torch.no_grad():
        return tensors(model.eval()(**call))[0]


def used_elsewhere(folder, call, *, generates=False):
    """What the model in a folder answers in a process of its own."""
    torch.save(call, "call.pt")
    subprocess.run([sys.executable, "-c", LOADING, folder, "generates" if generates else ""], check=True)
    return torch.load("answer.pt")


@pytest.fixture
def place(tmp_path, monkeypatch, no_progress_bars):
    """A working folder with texts and photos."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for seed in range(4):
        Path("texts", f"{seed}.txt").write_text(texts(seed))
    for name in ("cats", "dogs"):
        Path("photos", name).mkdir(parents=True)
        for seed in range(5):
            pixels = torch.randint(256, (32, 32, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(Path("photos", name, f"{seed}.png"))
    return tmp_path


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_from_its_folder_and_back(run, place, kind):
    mixer, data = FAMILIES[kind]
    host, call = model_of(kind).eval(), call_of(kind)
    host.save_pretrained("host")
    if kind in ("qwen3", "modernbert"):
        train_tokenizer([texts(9)], 280, 32).save_pretrained("host")
    before = {path: path.read_bytes() for path in Path("host").iterdir()}
    expected = answer(host, call)

    status, _, err = run("--model", "host", "--plan", mixer, *data)
    assert (status, err) == (0, ""), err
    content = json.loads(Path("out/results.json").read_text())["conversion"]
    assert content["layers"] and all(layer["now"] == mixer for layer in content["layers"])
    assert ("distilled" in content["accuracy"]) == bool(data), "nothing was distilled"

    assert {path: path.read_bytes() for path in Path("host").iterdir()} == before, "the host's folder was changed"
    ours = used_elsewhere("out", call, generates=kind == "qwen3")
    torch.testing.assert_close(ours, answer(polymix.load_pretrained("out"), call))  # another thread rounds otherwise
    assert ours.shape == expected.shape and ours.isfinite().all() and not torch.allclose(ours, expected)

    report = polymix.convert(host, mixer, input=call)
    polymix.distill(report, [call] * 2, loss="features")
    polymix.save_pretrained(host, "distilled")
    torch.testing.assert_close(used_elsewhere("distilled", call), answer(host, call))
    report.undo()
    assert torch.equal(answer(host, call), expected), "undo is not exact"
