"""Files of an earlier run, or of a stranger, that are cut, empty, deep or of other types.

Each is refused in one line that names the file, and stays as it is.
"""

import copy
import json
import shutil

import pytest
import torch

from polymix.results import empty_parts
from polymix.train.rows import TrainRow
from polymix.workflows.bench.run import BenchRow
from tests.attacks.command import run, tree
from tests.helpers import blank_pictures, slow_but

TINY = ["--set", "context=16", "--set", "vocab=300", "--set", "steps=4", "--set", "hidden_size=8", "--set", "num_heads=1",
        "--set", "num_layers=1", "--set", "mixers=pom", "--set", "batch_size=2", "--set", "checkpoint_every=2", "--threads",
        "1", "--set", "evaluate_every=2", "--set", "sample_tokens=0"]  # fmt: skip
COMMANDS = {
    "compare": ["compare", "--quick", "--mixers", "pom", "--threads", "1", "--out", "compared"],
    "bench": ["bench", "--quick", "--mixers", "pom", "--tokens", "16", "--threads", "1", "--out", "measured"],
    "convert": ["convert", "--model", "model.py:build", "--threads", "1", "--out", "converted"],
}
TRAIN = ["train", "text", "--data", "text.txt", *TINY, "--out", "trained"]
ROWS = {
    "compare": {"rows": {**empty_parts(TrainRow), "task": "classify", "host": "ViT", "mixer": "pom", "seed": 0,
                         "metrics": {"accuracy": 0.5}, "directions": {"accuracy": "up"}, "units": {"accuracy": "%"}, "parameters": 1, "steps": 1,
                         "unit": "images", "clock": "wall"},
                "sweep": {"mixer": "pom", "scope": "alone", "tokens": 64, "latency": 1.0, "low": 1.0, "high": 1.0, "runs": [1.0],
                          "peak_bytes": 1, "floor": 1.0, "flops": 1, "clock": "wall", "stopped": None}},
    "bench": {"rows": {**empty_parts(BenchRow), "mixer": "pom", "impl": "auto", "tokens": 16, "dim": 192, "batch": 1,
                       "dtype": "float32", "pass": "forward", "threads": 1, "clock": "wall", "seconds": 1.0, "low": 1.0,
                       "high": 1.0, "floor": 1.0, "stopped": None},
              "ceilings": {"dtype": "float32", "threads": 1, "flops_per_second": 1.0, "bytes_per_second": 1.0}},
    "convert": {},
}  # fmt: skip
RAW = {
    "empty": b"", "zeros": bytes(64), "list": b"[]", "null": b"null", "number": b"3", "text": b'"x"', "binary": b"\xff\xfe\x00",
    "deep": b"[" * 100_000, "deep dict": b'{"a":' * 100_000, "other": b'{"schema": "other/1"}', "nan": b"NaN", "word": b"x",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(material, tmp_path_factory):
    """Folders of runs that were interrupted, and of a training that can be resumed."""
    folder = tmp_path_factory.mktemp("runs") / "place"
    shutil.copytree(material, folder)
    with pytest.MonkeyPatch.context() as patch, blank_pictures():
        patch.chdir(folder)
        for verb, command in COMMANDS.items():
            assert run(command).status == "reached"
            path = folder / command[-1] / "results.json"
            content = json.loads(path.read_text())
            for part, row in ROWS[verb].items():
                content[part] = [row]
            path.write_text(json.dumps(content))
            if verb != "bench":
                assert run([*command, "--resume"]).status == "reached", "the whole file is accepted"
                path.write_text(json.dumps(content))
        assert run(TRAIN, work=()).status == 0
    return folder


@pytest.fixture
def place(runs, tmp_path, monkeypatch):
    shutil.copytree(runs, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def attempt(arguments, place, path, content, wrong, label, accepted=()):
    """Put `content` into a file, run, and note where the command did not refuse it, or changed something."""
    before = path.read_bytes()
    path.write_bytes(content)
    files = tree(place)
    try:
        outcome = run(arguments)
        name = path.name if path.name in outcome.err else str(path.parent.name)
        fine = (outcome.refused and name in outcome.err and tree(place) == files) or outcome.status in accepted
    except Exception as error:
        outcome, fine = repr(error), False
    if not fine:
        wrong.append((label, outcome))
    path.write_bytes(before)


def variants(content):
    """The content of a results file with each key missing, or of other types, also in the first row of each list."""
    for key in content:
        if key in ("data", "host", "answer", "plan", "mixers", "control"):  # written again by the run, or not read
            continue
        yield f"without {key}", {k: v for k, v in content.items() if k != key}
        for value in ([], {}, 3, "x", None, [3], ["x"], [[]]):
            if type(value) is not type(content[key]) or (value and isinstance(value, list)):
                yield f"{key}={value!r}", {**content, key: value}
        if isinstance(content[key], list) and content[key] and isinstance(content[key][0], dict):
            for name in set(content[key][0]) & {name for rows in ROWS.values() for name in rows.get(key, ())}:
                if name in ("runs", "flops", "metrics", "paper"):  # which hold any names
                    continue
                less = copy.deepcopy(content)
                del less[key][0][name]
                yield f"{key} without {name}", less
                other = copy.deepcopy(content)
                other[key][0][name] = {"x": 1}
                yield f"{key} with {name} of another type", other


@pytest.mark.parametrize("verb", slow_but([verb for verb in COMMANDS if verb not in ("bench", "compare")], COMMANDS))
def test_results_that_are_damaged(place, verb):
    command, wrong, rows = [*COMMANDS[verb], "--resume"], [], 0
    path = place / COMMANDS[verb][-1] / "results.json"
    whole = path.read_bytes()
    damaged = {**RAW, "cut": whole[: len(whole) // 2], "cut at the end": whole[:-3]}
    damaged |= {label: json.dumps(content).encode() for label, content in variants(json.loads(whole))}
    for label, content in damaged.items():
        attempt(command, place, path, content, wrong, label)
        rows += 1
    path.unlink()
    path.mkdir()
    outcome = run(command)
    assert outcome.refused and "results.json" in outcome.err, outcome
    assert not wrong, [label for label, _ in wrong]
    assert rows > 25


def test_results_that_are_damaged_are_not_compared(place):
    path, wrong = place / "measured" / "results.json", []
    (place / "good.json").write_bytes(path.read_bytes())
    whole = json.loads(path.read_bytes())
    for label, content in [*RAW.items(), *((label, json.dumps(c).encode()) for label, c in variants(whole))]:
        attempt(["bench", "--compare", "good.json", "measured/results.json"], place, path, content, wrong, label,
                accepted=(0,) if label.startswith(("settings", "without settings", "ceilings", "without ceilings")) else ())  # fmt: skip
    assert not wrong
    assert run(["bench", "--compare", "good.json", "nowhere"]).refused
    assert run(["bench", "--compare", "good.json", "lm"]).refused


def _saved(content, folder):
    torch.save(content, folder / "saved")
    return (folder / "saved").read_bytes()


@pytest.mark.slow
def test_checkpoints_that_are_damaged(place, tmp_path):
    path, wrong = place / "trained" / "checkpoint" / "last.ckpt", []
    whole = path.read_bytes()
    content = torch.load(path, weights_only=True)
    damaged = {**RAW, "cut": whole[: len(whole) // 2], "cut at the end": whole[:-3]}
    for part in ("settings", "step", "slices", "models", "optimizer", "schedule", "kept", "scaler", "task"):
        damaged[f"without {part}"] = _saved({k: v for k, v in content.items() if k != part}, tmp_path)
        for value in ("x", None, 3.5):
            damaged[f"{part}={value}"] = _saved({**content, part: value}, tmp_path)
    damaged["a list"], damaged["a tensor"] = _saved([1], tmp_path), _saved(torch.ones(2), tmp_path)
    command = [*TRAIN, "--resume"]
    assert run(command).status == "reached", "the whole file is accepted"
    for label, bad in damaged.items():
        attempt(command, place, path, bad, wrong, label)
    assert not wrong


def test_metrics_that_are_damaged(place):
    path, wrong = place / "trained" / "metrics.jsonl", []
    damaged = {label: bad + b"\n" for label, bad in RAW.items() if label != "empty"}
    damaged |= {"a row without a step": b'{"loss": 1}\n', "a step that is text": b'{"step": "x"}\n'}
    for label, bad in damaged.items():
        attempt([*TRAIN, "--resume"], place, path, bad, wrong, label)
    assert not wrong


@pytest.mark.parametrize(
    "name", ["synthetic.json", "train.bin", "val.bin", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]
)
def test_cached_tokens_that_are_damaged_are_made_again(place, name):
    path = next((place / "trained" / "data").glob("tokens-*")) / name
    whole = path.read_bytes()
    for bad in (b"", whole[: len(whole) // 2 // 2 * 2], *RAW.values()):
        path.write_bytes(bad)
        assert run([*TRAIN, "--resume"]).status == "reached"
        assert path.read_bytes() == whole, "the same tokens as before"


def test_a_run_is_not_resumed_on_another_text_or_tokenizer(place):
    (place / "text.txt").write_text("Another text altogether. " * 60)
    outcome = run([*TRAIN, "--resume"])
    assert outcome.refused and "of a run " in outcome.err and "last.ckpt" in outcome.err


@pytest.mark.parametrize("options", [
    {"eos_token_id": "x"}, {"eos_token_id": [10**9, None]}, {"num_beam_groups": 7}, {"max_length": -3}, {"do_sample": "maybe"},
    {"repetition_penalty": -1}, {"no_repeat_ngram_size": "x"}, {"suppress_tokens": [10**9]}, {"typical_p": 9},
    {"cache_implementation": "nope"}, {"min_p": "x"}, {"bad_words_ids": 3}, {"watermarking_config": 5},
    {"assistant_lookbehind": None}, {"pad_token_id": -5},
], ids=str)  # fmt: skip
def test_generation_configs_that_cannot_be_used(place, options):
    """Refused in one line, or the text comes as if the option were not there."""
    (place / "lm" / "generation_config.json").write_text(json.dumps(options))
    outcome = run(["generate", "lm", "--prompt", "a", "--max-new-tokens", "3", "--threads", "1"], work=())
    assert outcome.refused or outcome.status == 0, outcome


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_folders_of_language_models_that_are_damaged(place, name):
    path, wrong = place / "lm" / name, []
    for label, bad in RAW.items():
        if (name, label) == ("generation_config.json", "other"):  # a config with an unknown option
            continue
        attempt(["generate", "lm", "--prompt", "a", "--stream", "--threads", "1"], place, path, bad, wrong, label)
    assert not wrong


HUGE = [("num_layers", 10**9), ("hidden_size", 10**9), ("vocab_size", 10**12), ("num_heads", -1), ("num_layers", [1]),
        ("vocab_size", "x"), ("mixers", ["nope"]), ("mixers", 3), ("mixers", []), ("max_position_embeddings", 10**12),
        ("architectures", [3]), ("model_type", "nope"), ("model_type", 3), ("vocab_size", 10**30),
        ("intermediate_size", 10**11)]  # fmt: skip


@pytest.mark.parametrize("verb", ["generate", "convert"])
def test_configs_that_no_machine_can_build(place, verb):
    path, wrong = place / "lm" / "config.json", []
    command = {"generate": ["generate", "lm", "--prompt", "a", "--stream", "--threads", "1"],
               "convert": ["convert", "--model", "lm", "--threads", "1"]}[verb]  # fmt: skip
    content = json.loads(path.read_bytes())
    for name, value in HUGE:
        if verb == "generate" and name == "architectures":
            continue
        attempt(command, place, path, json.dumps({**content, name: value}).encode(), wrong, f"{name}={value}")
    assert not wrong
