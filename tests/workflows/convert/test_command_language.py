"""`polymix convert` of GPT-2 and Llama folders: text in, a language model of ours out; errors before anything is written."""

import json
import math
import signal
from pathlib import Path

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision

cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: language models (the extra text)")
pytest.importorskip("tokenizers", reason="untested: text, for which tokenizers are needed (the extra text)")
import polymix.models.language  # noqa: E402  # so that the Auto classes know ours
from polymix.domains.text.tokenizer import train_tokenizer  # noqa: E402  # needs transformers

HYBRID = ("--plan", "1:1", "--mixer", "pom", "--tokens", "16")
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")


def poem(seed, words=150):
    order = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in order)


def model_of(kind, vocab=300):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=vocab, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.fixture
def place(tmp_path, monkeypatch, no_progress_bars):
    """A working folder with checkpoints of both kinds, their tokenizer, and text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts" / "more").mkdir(parents=True)
    for i in range(4):
        name = ("a.txt", "b.md", "more/c.txt", "more/d.md")[i]
        (tmp_path / "texts" / name).write_text(poem(i))
    tokenizer = train_tokenizer([poem(9)], 280, 32)
    for kind in ("gpt2", "llama"):
        model_of(kind).save_pretrained(kind)
        tokenizer.save_pretrained(kind)
    return tmp_path


def results(folder="out"):
    return json.loads(Path(folder, "results.json").read_text())


def loaded(folder="out"):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("kind", "name"), [("gpt2", "polymix-gpt"), ("llama", "polymix-llama")])
def test_a_folder_becomes_a_hybrid_that_the_auto_classes_load(run, kind, name):
    status, out, err = run("--model", kind, "--data", "texts", "--distill-epochs", "1", "--batch", "8", *HYBRID)
    assert (status, err) == (0, ""), err
    model, tokenizer = loaded(), transformers.AutoTokenizer.from_pretrained("out")
    assert model.config.model_type == name and [m["name"] for m in model.config.mixers] == ["pom", "softmax"]
    prompt = tokenizer(["alpha beta", "gamma"], return_tensors="pt", padding=True, padding_side="left")
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[0] == 2
    content = results()
    figures = content["conversion"]["accuracy"]
    assert [*figures] == ["before", "converted", "imitated", "distilled"] and content["conversion"][
        "metric"
    ] == "perplexity"
    assert figures["distilled"] < figures["converted"], "training on the text taught the model nothing of it"
    assert content["data"]["tokens"] == 16 and content["data"]["train"] > 8 * content["data"]["test"] > 0
    card, page = Path("out/README.md").read_text(), Path("out/report.html").read_text()
    for said in (card, page):
        assert "Perplexity" in said or "| perplexity |" in said
        assert f"({math.log(figures['distilled']):.4f} nats per token)" in said and "load_pretrained" not in said
    assert "AutoModelForCausalLM" in card and "AutoModelForCausalLM" in out and "text-generation" in card
    assert not Path("out/checkpoints").exists() and not list(Path("out").glob(".*")), "nothing is left of the work"
    assert Path("out/tokenizer.json").read_bytes() == Path(kind, "tokenizer.json").read_bytes()


def test_the_figures_are_the_models_own_on_the_same_tokens(run):
    """`before` is the checkpoint's perplexity, the last one that of the model which the folder has: as evaluate says."""
    from polymix.workflows import evaluate
    from polymix.workflows.convert.settings import Settings
    from polymix.workflows.convert.sources import load_model
    from polymix.workflows.convert.text import Text

    assert run("--model", "gpt2", "--data", "texts", *HYBRID)[0] == 0
    settings = Settings(model="gpt2", data="texts", tokens=16)
    text = Text("texts", load_model("gpt2"), settings)
    figures = results()["conversion"]["accuracy"]
    assert [*figures] == ["before", "converted"]
    for name, folder in (("before", "gpt2"), ("converted", "out")):
        model, nats = loaded(folder).eval(), []
        for i in range(len(text.test)):
            ids = text.test[i][None]
            with torch.no_grad():
                logits = model(ids[:, :-1]).logits
                nats.append(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).item())
        assert figures[name] == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-4)
        evaluated = evaluate.evaluate(evaluate.Settings(Path(folder), "texts", tokens=16))
        assert figures[name] == pytest.approx(evaluated.metrics["perplexity"], rel=1e-4)
        assert evaluated.count == results()["data"]["test"]


def test_what_is_held_back_is_nothing_that_is_trained_on(place):
    from polymix.workflows.convert.settings import Settings
    from polymix.workflows.convert.sources import load_model
    from polymix.workflows.convert.text import Text

    Path("one.txt").write_text("".join(f"{i:05d} " for i in range(400)))  # no piece of it comes twice
    text = Text("one.txt", load_model("gpt2"), Settings(model="gpt2", data="one.txt", tokens=8))
    tokenizer = transformers.AutoTokenizer.from_pretrained("gpt2")
    seen, held = (
        set(tokenizer.decode(torch.cat([part[i][:-1] for i in range(len(part))])).split()[1:-1])
        for part in (text.train, text.test)
    )
    assert len(seen) > 300 and held and not seen & held


def test_local_attention_over_the_whole_context_keeps_the_perplexity(run):
    assert run("--model", "llama", "--data", "texts", "--plan", "local:window=32", "--tokens", "16")[0] == 0
    figures = results()["conversion"]["accuracy"]
    assert figures["converted"] == pytest.approx(figures["before"], rel=1e-5)
    assert all(not layer["fresh"] and not layer["dropped"] for layer in results()["conversion"]["layers"])


def test_without_text_and_with_the_host_kept(run, place):
    assert run("--model", "gpt2", *HYBRID)[0] == 0
    status, out, _ = run("--model", "gpt2", *HYBRID, "--keep-host", "--out", "kept")
    assert status == 0 and "load_pretrained" in out
    kept = polymix.load_pretrained("kept")
    assert type(kept).__name__ == "GPT2LMHeadModel" and Path("kept/tokenizer.json").exists()
    ids = torch.arange(10)[None]
    torch.testing.assert_close(loaded()(ids).logits, kept(ids).logits)
    assert run("--model", "kept", "--plan", "qt", "--out", "again", "--tokens", "8")[0] == 0, "converted a second time"
    assert [m["name"] for m in loaded("again").config.mixers] == ["pom", "qt"]


def test_a_tokenizer_that_its_folder_leaves_to_the_kind_of_model(run):
    """As GPT-2's own has it: another kind of model must say it, or no tokenizer is found."""
    said = json.loads(Path("gpt2/tokenizer_config.json").read_text())
    said.pop("tokenizer_class")
    Path("gpt2/tokenizer_config.json").write_text(json.dumps(said))
    theirs = transformers.AutoTokenizer.from_pretrained("gpt2")
    assert run("--model", "gpt2", *HYBRID)[0] == 0
    ours = transformers.AutoTokenizer.from_pretrained("out")
    assert type(ours) is type(theirs) and ours("alpha beta").input_ids == theirs("alpha beta").input_ids


def interrupt(*_, **__):
    signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_interrupted_and_resumed(run, place, monkeypatch):
    """Ctrl-C in the second stage, then --resume: the bits of a run that nothing interrupted."""
    words = ("--model", "gpt2", "--data", "texts", "--distill-epochs", "1", "--batch", "8", *HYBRID)
    assert run(*words, "--out", "whole")[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr("polymix.train.distill.stages.FineTuning.after_step", interrupt)
        assert run(*words)[0] == 130
    assert not results()["finished"] and Path("out/checkpoints/imitation/last.ckpt").exists()
    assert run(*words, "--resume", "--keep-host")[0] == 2, "another run does not go on with it"
    status, _, err = run(*words, "--resume")
    assert (status, err) == (0, "")
    same(loaded(), loaded("whole"))
    assert results()["conversion"]["accuracy"] == results("whole")["conversion"]["accuracy"]
    assert "This run is finished" in run(*words, "--resume")[1]


def test_text_that_cannot_be_used(fails, place):
    text = ("--model", "gpt2", "--data", "texts")
    fails("--model", "gpt2", "--data", "gone", named="--data")
    fails(*text, "--tokens", "33", named="32")
    fails(*text, "--image-size", "8", named="--image-size")
    (place / "empty.txt").write_text("")
    fails("--model", "gpt2", "--data", "empty.txt", named="empty")
    (place / "short.txt").write_text("alpha beta")
    fails("--model", "gpt2", "--data", "short.txt", named="--tokens")
    (place / "photos").mkdir()
    fails("--model", "gpt2", "--data", "photos", named="--data")
    model_of("gpt2", vocab=260).save_pretrained("gpt2")  # beside the tokenizer of 280
    fails(*text, named="260")
    for file in Path("gpt2").glob("tokenizer*"):
        file.unlink()
    fails(*text, named="tokenizer")


def test_models_that_cannot_become_ours(fails, place):
    odd = transformers.GPT2Config(
        vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=32, activation_function="relu"
    )
    transformers.GPT2LMHeadModel(odd).save_pretrained("odd")
    fails("--model", "odd", "--plan", "pom", named="--keep-host")
    fails("--model", "gpt2", "--plan", "knn:k=3", named="--keep-host")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=20, **small))
    bert.save_pretrained("bert")
    fails("--model", "bert", "--plan", "qt", "--keep-host", named="--keep-host")
