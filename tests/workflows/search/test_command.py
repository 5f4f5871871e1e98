"""`polymix search` from the command line: models in folders, their data, the plan in `polymix convert`, mistakes."""

import json

import pytest
import torch

from polymix.cli import main
from polymix.workflows.search import stages
from tests.helpers import slow_but
from tests.workflows.search.helpers import bert, fixed_times, gpt2, vit

QUICK = ("--mixers", "qt,pom,keep", "--steps", "4", "--threads", "1")
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")


def lines(count=120):
    draw = torch.Generator().manual_seed(0)
    return ["".join(f"{WORDS[i]} " for i in torch.randint(6, (8,), generator=draw)) for _ in range(count)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Saved models of three libraries, with tokenizers, and data for them."""
    import transformers
    from safetensors.torch import save_file

    from polymix.domains.text.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("models")
    save_file(vit().state_dict(), folder / "vit.safetensors")
    (folder / "host.py").write_text(
        "def build():\n    from tests.workflows.search.helpers import vit\n    return vit()\n\n\n"
        "def digits():\n    from polymix import SoftmaxConfig\n    from polymix.models import VisionTransformer\n"
        "    import torch\n    torch.manual_seed(0)\n"
        "    return VisionTransformer(SoftmaxConfig(heads=2), image_size=8, patch_size=2, dim=16, depth=3, classes=10,\n"
        "                             channels=1).eval()\n"
    )
    model, words = bert(), ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    transformers.BertModel(model.config).save_pretrained(folder / "bert")  # with a pooler, which the folder must have
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder / "bert")
    tokenizer = train_tokenizer(lines(), 300, 32)
    causal = gpt2()
    causal.resize_token_embeddings(len(tokenizer))
    causal.config.bos_token_id = causal.config.eos_token_id = 0
    causal.save_pretrained(folder / "gpt2")
    tokenizer.save_pretrained(folder / "gpt2")
    (folder / "text.txt").write_text("\n".join(lines(400)))
    (folder / "short.txt").write_text("\n".join(lines(30)))
    return folder


@pytest.fixture
def run(models, monkeypatch, capsys):
    """polymix search in the models' folder: status, what it printed, what went wrong."""
    monkeypatch.chdir(models)

    def run(*words, verb="search"):
        with pytest.raises(SystemExit) as stop:
            main([verb, *map(str, words)])
        out, err = capsys.readouterr()
        return stop.value.code or 0, out, err

    return run


def test_a_vit_is_searched_and_converted_by_its_plan(run, tmp_path):
    out = tmp_path / "found"
    status, said, err = run("--model", "host.py:digits", "--data", "digits", *QUICK, "--out", out)
    assert status == 0, err
    assert "Predicted against true" in said and f"--plan {out / 'plan.json'}" in said
    content = json.loads((out / "results.json").read_text())
    assert content["finished"] and content["points"][0]["share"] <= 0.6
    status, said, err = run(
        "--model", "host.py:digits", "--plan", out / "plan.json", "--seconds", "0.05", "--lengths", "1", "--threads", "1",
        "--out", tmp_path / "converted", verb="convert",
    )  # fmt: skip
    assert status == 0, err
    assert "trained by polymix search" in said and "have not been trained" not in said


@pytest.mark.parametrize(("model", "damage"), [("bert", "features"), ("gpt2", "logits")])
def test_text_models_are_searched_on_text(run, tmp_path, model, damage, no_progress_bars):
    words = ("--tokens", "16", "--batch", "8") if model == "gpt2" else ()
    status, said, err = run(
        "--model", model, "--data", "text.txt", *QUICK, *words, "--json", "--out", tmp_path / "found"
    )
    assert status == 0, err
    content = json.loads(said)
    assert content["damage"] == damage and content["points"]


@pytest.mark.parametrize(
    ("words", "size"), slow_but([((), (16, 10))], [((), (16, 10)), (("--tokens", "24", "--batch", "2"), (2, 24))])
)
def test_an_encoder_is_timed_at_the_tokens_that_are_asked_for(run, tmp_path, monkeypatch, words, size):
    """On short lines attention is so cheap that no mixer would win, whatever the length that a user has in mind."""
    sizes = []

    def noted(candidates, *rest):
        sizes.extend(tuple(call.args[0].shape[:2]) for call in candidates.calls.values())
        return fixed_times(candidates, *rest)

    monkeypatch.setattr(stages, "layer_times", noted)
    status, _, err = run("--model", "bert", "--data", "text.txt", *QUICK, *words, "--out", tmp_path / "found")
    assert status == 0, err
    assert set(sizes) == {size}


def test_a_finished_search_is_resumed_to_itself(run, tmp_path):
    words = ("--model", "host.py:digits", "--data", "digits", *QUICK, "--out", tmp_path / "found")
    assert run(*words)[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "found").iterdir()}
    status, said, err = run(*words, "--resume")
    assert status == 0 and "Best plan within" in said, err
    assert {path.name: path.read_bytes() for path in (tmp_path / "found").iterdir()} == before
    status, _, err = run(*words)
    assert status == 2 and "holds the results of an earlier run" in err
    status, _, err = run(*words, "--resume", "--budget", "0.8")
    assert status == 2 and "budget=0.6" in err


@pytest.mark.parametrize(("words", "named"), [
    (("--model", "timm/vit_tiny_patch16_224", "--data", "digits"), "untrained weights, whose output carries nothing"),
    (("--model", "host.py:digits", "--data", "text.txt"), "text.txt"),
    (("--model", "bert", "--data", "short.txt"), "at least 64"),
    (("--model", "host.py:digits", "--data", "digits", "--budget", "0.1"), "at least 0.3,"),
    (("--model", "host.py:digits", "--data", "digits", "--budget", "2"), "--budget"),
    (("--model", "host.py:digits", "--data", "digits", "--mixers", "nope"), "nope"),
    (("--model", "host.py:digits", "--data", "digits", "--mixers", "qt:degree"), "degree"),
    (("--model", "host.py:digits", "--data", "digits", "--steps", "0"), "--steps"),
    (("--model", "host.py:build", "--data", "digits"), "5"),
    (("--model", "gpt2", "--data", "text.txt", "--tokens", "16", "--mixers", "poly_nl,keep"), "poly_nl"),
    (("--model", "gpt2", "--data", "digits", "--tokens", "16"), "digits"),
    (("--model", "host.py:digits", "--data", "nowhere"), "does not exist"),
    (("--model", "gpt2", "--data", "self"), "which a search does not measure on"),
])  # fmt: skip
def test_mistakes_are_one_line_and_leave_nothing(run, tmp_path, words, named, no_progress_bars):
    status, _, err = run(*words, "--threads", "1", "--out", tmp_path / "found")
    assert (status, len(err.splitlines())) == (2, 1), err
    assert named in err
    assert not (tmp_path / "found").exists()


def test_an_interrupted_search_says_how_to_go_on(run, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    words = ("--model", "host.py:digits", "--data", "digits", *QUICK, "--out", tmp_path / "found")
    with monkeypatch.context() as patch:
        patch.setattr(stages.Run, "_train", interrupt)
        status, said, _ = run(*words)
    assert status == 130 and "--resume" in said
    scored = json.loads((tmp_path / "found" / "results.json").read_text())["damages"]
    with monkeypatch.context() as patch:
        patch.setattr(stages, "layer_times", interrupt)  # the times of the interrupted search hold
        assert run(*words, "--resume")[0] == 0
    assert json.loads((tmp_path / "found" / "results.json").read_text())["damages"][: len(scored)] == scored


def test_a_plan_for_another_model_is_refused_by_convert(run, tmp_path):
    assert run("--model", "host.py:digits", "--data", "digits", *QUICK, "--out", tmp_path / "found")[0] == 0
    options = ("--seconds", "0.05", "--lengths", "1", "--threads", "1", "--out", tmp_path / "converted")
    for model, named in (("host.py:build", "another model"), ("host.py:digits", "does not exist")):
        plan = tmp_path / "found" / ("plan.json" if named == "another model" else "none.json")
        status, _, err = run("--model", model, "--plan", plan, *options, verb="convert")
        assert (status, len(err.splitlines())) == (2, 1) and named in err and "--plan" in err, err
    assert not (tmp_path / "converted").exists()


def test_times_are_those_of_the_layers(monkeypatch):
    """Each layer's attention and every candidate has a time, equal layers the same; nothing of it is asserted."""
    from polymix.workflows.search import timing
    from polymix.workflows.search.candidates import Candidates

    calls = []

    def noted(contenders, seconds, device):
        calls.append(set(contenders))
        for call in contenders.values():
            call()
        return {}

    monkeypatch.setattr(timing, "interleaved_within", noted)
    import polymix

    host, x = vit(), torch.randn(2, 3, 16, 16)
    candidates = Candidates(host, {"qt": polymix.QtConfig(), "pom": polymix.PomConfig()}, x, x, lambda label: None)
    rows = timing.layer_times(candidates, 1.0, "cpu", lambda done: None)
    assert calls == [{"keep", "qt", "pom"}], "equal layers are timed once"
    assert len(rows) == 12 and {row["layer"] for row in rows} == set(candidates.layers)
    assert [(row["layer"], row["mixer"]) for row in rows] == [
        (row["layer"], row["mixer"]) for row in fixed_times(candidates, 1, "cpu", None)
    ]
