"""Speech on disk: LibriSpeech, Common Voice and folders as they are published, features, and mistakes of users."""

import numpy
import pytest
import torch

from polymix.domains.speech import data
from polymix.domains.speech.recipe import SpeechRecipe
from polymix.domains.speech.synthetic import HOMOPHONES, SPOKEN, TOPICS
from polymix.errors import DataError, MissingExtraError
from polymix.train.data.audio import LogMel, mel_bank, read, resampled
from polymix.train.data.transcribed import plain
from polymix.train.run import train
from polymix.train.saved import SavedRun
from polymix.workflows.evaluate import Settings, evaluate

soundfile = pytest.importorskip("soundfile", reason="untested: files of audio, for which soundfile is needed")
TINY = SpeechRecipe.tiny().changed(control=False)


def sound(path, seconds=1.0, rate=16_000, channels=1, wave=None):
    """A tone in a file whose suffix says its format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if wave is None:
        wave = 0.3 * numpy.sin(2 * numpy.pi * 440 * numpy.arange(round(seconds * rate)) / rate)
    soundfile.write(
        str(path), numpy.stack([wave] * channels, 1), rate, **({"subtype": "FLOAT"} if path.suffix == ".wav" else {})
    )
    return path


def librispeech(root, parts=("train-clean-100", "dev-clean", "test-clean")):
    for place, part in enumerate(parts):
        folder = root / part / f"{place + 1}" / "7"
        names = [f"{place + 1}-7-{clip:04d}" for clip in range(3)]
        for name in names:
            sound(folder / f"{name}.flac")
        lines = "".join(f"{name} HE'S HERE {place}\n" for name in names)
        (folder / f"{place + 1}-7.trans.txt").write_text(lines, "utf-8")
    return root


def common_voice(root):
    for part, count in (("train", 3), ("dev", 2), ("test", 2), ("validated", 7)):
        rows = ["client_id\tpath\tsentence\tup_votes"]
        for clip in range(count):
            name = f"common_voice_{part}_{clip}.mp3"
            if part != "validated":
                sound(root / "clips" / name, rate=32_000)
            rows.append(f'{part}{clip}\t{name}\tIt is "so", Größe!\t2')
        (root / f"{part}.tsv").write_text("\n".join(rows) + "\n", "utf-8")
    return root


def folder(root, parts=("train", "test"), count=2):
    for part in parts:
        for clip in range(count):
            sound(root / part / f"{clip}.wav").with_suffix(".txt").write_text("so it is\n", "utf-8")
    return root


def loaded(root, **options):
    said = []
    return data.load(TINY.changed(data=str(root), **options), root, said.append)


def problems(root, **options):
    return data.list_problems(TINY.changed(data=str(root), **options), str(root))


def test_librispeech_has_its_parts(tmp_path):
    read_data = loaded(librispeech(tmp_path))
    assert [len(part) for part in (read_data.train, read_data.valid, read_data.test)] == [3, 3, 3]
    assert read_data.train.clips[0].text == "he's here 0" and read_data.train.clips[0].speaker == "1"
    assert read_data.characters == " '012ehrs"


def test_one_part_of_librispeech_is_split_by_speakers(tmp_path):
    librispeech(tmp_path, ("a", "b", "c"))
    read_data = loaded(tmp_path)
    heard = [{clip.speaker for clip in part.clips} for part in (read_data.train, read_data.test)]
    assert heard[0] & heard[1] == set() and heard[0] | heard[1] == {"1", "2", "3"}


def test_common_voice_has_its_lists_and_mp3_of_another_rate(tmp_path):
    read_data = loaded(common_voice(tmp_path))
    assert [len(part) for part in (read_data.train, read_data.valid, read_data.test)] == [3, 2, 2], "not validated.tsv"
    assert read_data.train.clips[0].text == "it is so größe"
    assert abs(len(read_data.train[0].features) - 98) <= 5, "one second at 16,000 a second; mp3 adds some"
    as_written = loaded(tmp_path, plain_text=False)
    assert as_written.train.clips[0].text == 'It is "so", Größe!', "quotes are no quotes of csv"


def test_a_folder_may_have_parts_or_none(tmp_path):
    assert [len(loaded(folder(tmp_path / "a")).train), len(loaded(tmp_path / "a").test)] == [2, 2]
    flat = folder(tmp_path / "b", ("x", "y"), 5)
    assert [len(loaded(flat).train), len(loaded(flat).test)] == [8, 2], "every fifth is for the test"


def test_pretraining_needs_no_texts(tmp_path):
    for clip in range(5):
        sound(tmp_path / f"{clip}.ogg")
    read_data = loaded(tmp_path, goal="best_rq")
    assert [len(read_data.train), len(read_data.test)] == [4, 1]
    sample = read_data.test[0]
    assert sample.hidden.any() and torch.equal(sample.noise, read_data.test[0].noise), (
        "the test hides the same each time"
    )


def _broken(root):
    (root / "train" / "0.wav").write_bytes(b"no audio")


MISTAKES = {
    "broken": (_broken, "0.wav, which cannot be read"),
    "stereo": (lambda root: sound(root / "train" / "0.wav", channels=2), "0.wav, which has 2 channels"),
    "8 kHz": (lambda root: sound(root / "train" / "0.wav", rate=8000), "has 8,000 samples a second, for a model of 16,000"),
    "empty": (lambda root: sound(root / "train" / "0.wav", 0), "0.wav, which is 0 ms long"),
    "short": (lambda root: sound(root / "train" / "0.wav", 0.03), "0.wav, which is 30 ms long"),
    "silence": (lambda root: sound(root / "train" / "0.wav", wave=numpy.zeros(16_000)), "0.wav, which is silent"),
    "NaN": (lambda root: sound(root / "train" / "0.wav", wave=numpy.full(16_000, numpy.nan)), "samples that are no numbers"),
    "no audio": (lambda root: (root / "train" / "0.wav").unlink(), "0.txt: a text without audio"),
    "no text": (lambda root: (root / "train" / "0.txt").unlink(), "audio without a text: there is no 0.txt"),
    "empty text": (lambda root: (root / "train" / "0.txt").write_text(" \n"), "0.txt: an empty text"),
    "no letters": (lambda root: (root / "train" / "0.txt").write_text("?!"), "a text without letters"),
    "too long": (lambda root: (root / "train" / "0.txt").write_text("ab" * 20), "it needs 40 tokens, and they are 25"),
    "not UTF-8": (lambda root: (root / "train" / "0.txt").write_bytes(b"\xff\xfe\xfa"), "0.txt, which is not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_sentence_with_its_file_for_check_and_for_training(kind, tmp_path):
    write, said = MISTAKES[kind]
    write(folder(tmp_path / "data"))
    (line,) = problems(tmp_path / "data")
    assert said in line and "\n" not in line
    with pytest.raises(DataError, match="0"):
        train(TINY.changed(data=str(tmp_path / "data"), batch_size=2), tmp_path / "out")


def test_mistakes_in_lists_name_their_line(tmp_path):
    root = librispeech(tmp_path / "a")
    next((root / "train-clean-100").rglob("*.flac")).unlink()
    listing = next((root / "dev-clean").rglob("*.trans.txt"))
    listing.write_text("".join(listing.read_text("utf-8").splitlines(keepends=True)[1:]), "utf-8")
    lines = problems(root)
    assert len(lines) == 2 and any("1-7-000" in line and "a text without audio" in line for line in lines)
    assert any("audio without a text in 2-7.trans.txt" in line for line in lines)
    root = common_voice(tmp_path / "b")
    (root / "clips" / "common_voice_test_1.mp3").unlink()
    (root / "dev.tsv").write_text("path\nx.mp3\n", "utf-8")
    assert ["line 3" in line and "clips/common_voice_test_1.mp3" in line for line in problems(root)].count(True) == 1
    assert any("dev.tsv: line 2: no path or no sentence" in line for line in problems(root))


def test_what_is_wrong_with_the_folder_is_said(tmp_path):
    (tmp_path / "none").mkdir()
    for source, said in (
        (tmp_path / "nowhere", "no folder"),
        (tmp_path / "none", "without clips in the layout folder"),
    ):
        with pytest.raises(DataError, match=said):
            loaded(source)
    with pytest.raises(DataError, match="librispeech, commonvoice, folder"):
        loaded(folder(tmp_path / "a"), layout="timit")
    with pytest.raises(DataError, match="some of both"):
        loaded(folder(tmp_path / "b", ("train",)))


def test_a_trained_model_measures_other_data_and_names_a_character_that_it_does_not_know(tmp_path):
    folder(tmp_path / "data")
    train(TINY.changed(data=str(tmp_path / "data"), batch_size=2), tmp_path / "run")
    run = SavedRun.of(tmp_path / "run")
    other = folder(tmp_path / "other", ("test", "train"), 3)
    assert evaluate(Settings(tmp_path / "run", str(other), split="all")).count == 6
    (other / "test" / "0.txt").write_text("zebra", "utf-8")
    with pytest.raises(DataError, match=r"the character 'z'.*0\.wav"):
        evaluate(Settings(tmp_path / "run", str(other)))
    with pytest.raises(DataError, match="channels"):
        run.predict([sound(tmp_path / "two.wav", channels=2)], tmp_path / "heard")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="none without audio"):
        run.predict([tmp_path / "none"], tmp_path / "heard")


def test_texts_become_plain():
    assert plain("Don’t  STOP—me_now, Ünder 42!") == "don't stop me now ünder 42"


def test_mel_bands_are_those_of_transformers():
    """HTK's triangles without a norm, which others use for 80 bands."""
    from transformers.audio_utils import mel_filter_bank

    theirs = mel_filter_bank(201, 80, 0, 8000, 16_000, norm=None, mel_scale="htk")
    assert (mel_bank(80, 400, 16_000) - torch.from_numpy(theirs).T).abs().max() < 1e-12


def test_features_are_those_of_transformers():
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    wave = torch.randn(16_000, dtype=torch.float64) / 10
    bank = mel_filter_bank(201, 80, 0, 8000, 16_000, norm=None, mel_scale="htk")
    theirs = spectrogram(wave.numpy(), window_function(400, "hann"), 400, 160, power=2.0, center=False, mel_filters=bank,
                         mel_floor=1e-6, log_mel="log")  # fmt: skip
    ours = LogMel(16_000, 80)(wave)
    assert ours.shape == (98, 80) and (ours - torch.from_numpy(theirs).T).abs().max() < 1e-5


def test_the_features_of_a_stream_are_those_of_the_whole():
    wave, mel = torch.randn(8000, dtype=torch.float64), LogMel(16_000, 20)
    parts = torch.cat((mel(wave[: 20 * 160 + 240]), mel(wave[20 * 160 :])))
    assert mel.frames(8000) == len(mel(wave)) == 48 and (parts - mel(wave)).abs().max() < 1e-9
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mel(wave.float()), mel(wave.float()).float()), "the same in any precision of the model"
    assert len(mel(wave[:100])) == mel.frames(100) == 1


@pytest.mark.parametrize(("before", "after"), [(48_000, 16_000), (44_100, 16_000), (22_050, 16_000), (16_000, 22_051)])
def test_another_rate_keeps_what_it_can_and_nothing_above(before, after):
    time = torch.arange(before, dtype=torch.float64) / before
    places = torch.arange(after, dtype=torch.float64) / after
    for frequency in (100, 3000, 0.42 * min(before, after)):
        wave = resampled(torch.sin(2 * torch.pi * frequency * time), before, after)
        assert len(wave) == after
        assert (wave - torch.sin(2 * torch.pi * frequency * places))[200:-200].abs().max() < 0.01
    if before > after:
        assert resampled(torch.sin(2 * torch.pi * 1.1 * after / 2 * time), before, after)[200:-200].abs().max() < 0.01


def test_a_file_is_read_at_the_rate_of_the_model(tmp_path):
    wave = read(sound(tmp_path / "a.wav", 0.5, 44_100), 16_000)
    assert wave.shape == (8000,) and abs(wave.abs().max() - 0.3) < 0.02


@pytest.mark.slow
def test_synthetic_words_are_spelt_by_the_first_one_and_of_their_seed(tmp_path):
    pytest.importorskip("espeakng_loader", reason="untested: the default data, which espeakng-loader speaks")
    first = data.load(TINY, tmp_path / "a", lambda text: None)
    spelt = {topic: {pair[place] for pair in HOMOPHONES} for place, topic in enumerate(TOPICS)}
    for clip in (*first.train.clips, *first.test.clips):
        topic, *words = clip.text.split()
        assert {*words} <= spelt[topic] and SPOKEN[0] <= len(words) <= SPOKEN[1]
    again = data.load(TINY, tmp_path / "b", lambda text: None)
    assert all(torch.equal(first.train[place].features, again.train[place].features) for place in range(16))
    other = data.load(TINY.changed(seed=1), tmp_path / "a", lambda text: None)
    assert [clip.text for clip in other.train.clips] != [clip.text for clip in first.train.clips]


def test_without_the_libraries_the_extra_is_named(tmp_path, monkeypatch):
    sound(tmp_path / "a.wav")
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(MissingExtraError, match=r"soundfile.*\[speech\]"):
        read(tmp_path / "a.wav", 16_000)
