"""Training on text: it learns, is resumed to the bit, refuses what it cannot do before it begins, and keeps what was good."""

import json
import math
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from polymix.domains.text.model import model_config
from polymix.domains.text.recipe import TextRecipe
from polymix.domains.text.task import TextTask
from polymix.errors import DataError, OptionError, PolymixError, ResultsError
from polymix.models.language import PolymixGPTConfig, parameters
from polymix.numbers import metric
from polymix.train.loop import Learner, averaged
from polymix.train.registry import chosen_recipe, options_of
from polymix.train.run import train
from polymix.train.task import Process
from tests.attacks.command import tree
from tests.domains.texts import MODEL, TINY, rows, tiny

NOISY = {"options": {**MODEL, "dropout": 0.2}, "accumulate": 2, "ema": 0.8, "packing": "segments"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run with everything that has a state: (recipe, folder)."""
    path = tmp_path_factory.mktemp("whole")
    recipe = tiny(path, **NOISY)
    train(recipe, path / "out")
    return recipe, path / "out"


def weights(out):
    return load_file(out / "model.safetensors")


def same(out, other):
    assert rows(out) == rows(other), "other losses, or rows that stand twice"
    a, b = weights(out), weights(other)
    assert list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a), "other weights"


def stopped(monkeypatch, step, run, error, harm=None):
    """A run in which something happens at the loss of a step."""
    own, slices = Learner.forward, []

    def forward(self, batch, counts):
        slices.append(batch)
        now = self.task.slices.step + (len(slices) - 1) // len(self.task.slices.mine) + 1
        if now == step:
            if harm is None:
                raise error
            return harm(own(self, batch, counts))
        return own(self, batch, counts)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "forward", forward)
        with pytest.raises(error) if error else nullcontext() as caught:
            run()
    return caught


# It learns, and what it leaves


def test_the_loss_falls_and_everything_is_left(whole):
    recipe, out = whole
    losses = [row["loss"] for row in rows(out) if "loss" in row]
    assert len(losses) == recipe.steps and losses[-1] < losses[0] - 0.3
    evaluated = [row for row in rows(out) if "val_loss" in row]
    assert [row["step"] for row in evaluated] == [4, 8] and evaluated[1]["val_loss"] < evaluated[0]["val_loss"]
    assert all(row["samples"][0].startswith("the cat ") for row in evaluated)
    assert math.log(evaluated[1]["perplexity"]) == pytest.approx(evaluated[1]["val_loss"])
    report = (out / "report.md").read_text()
    assert metric(evaluated[1]["bits_per_byte"], "") in report and "the cat" in report and recipe.data in report


def test_auto_classes_and_pipeline_load_it(whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    _, out = whole
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert type(model).__name__ == "PolymixGPTForCausalLM" and model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    said = pipeline("text-generation", str(out))("the cat", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    assert said.startswith("the cat") and len(said) > len("the cat")


def test_averaged_weights_are_those_that_are_saved(whole):
    _, out = whole
    models = torch.load(out / "checkpoint" / "last.ckpt", weights_only=True)["models"]
    for name, value in weights(out).items():
        assert torch.equal(value, models["average"][name])
    assert any(not torch.equal(value, models["model"][name]) for name, value in weights(out).items())


def test_an_average_is_what_its_formula_says():
    model = torch.nn.Linear(2, 1)
    average = averaged(model, 0.9)
    before = average.module.weight.detach().clone()
    torch.nn.init.ones_(model.weight)
    average.update_parameters(model)  # decay 2 / 11 at the first step
    torch.testing.assert_close(average.module.weight, before * 2 / 11 + model.weight * 9 / 11)
    before = average.module.weight.detach().clone()
    average.n_averaged.fill_(1000)
    average.update_parameters(model)
    torch.testing.assert_close(average.module.weight, before * 0.9 + model.weight * 0.1)


def test_the_random_numbers_outside_are_left_as_they_were(tmp_path):
    before = torch.get_rng_state()
    train(tiny(tmp_path, steps=1), tmp_path / "out")
    assert torch.equal(before, torch.get_rng_state())


def test_looking_at_the_model_does_not_change_what_it_learns(whole, tmp_path):
    """Dropout is on: an evaluation or a sample that drew from its numbers would show."""
    recipe, out = whole
    train(recipe.changed(evaluate_every=100, checkpoint_every=100, prompts=()), tmp_path)
    losses = [[row["loss"] for row in rows(folder) if "loss" in row] for folder in (out, tmp_path)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": 4},
        {"checkpointing": True},
        {"packing": "segments", "accumulate": 2},
        {"packing": "padded", "accumulate": 2},
    ],
    ids=str,
)
def test_how_it_is_computed_does_not_change_the_loss(tmp_path, changes):
    recipe = tiny(tmp_path, packing=changes.get("packing", "stream"), steps=4)
    for name, options in (("one", {}), ("two", changes)):
        train(recipe.changed(**options), tmp_path / name)
    one, two = ([row["loss"] for row in rows(tmp_path / name) if "loss" in row] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)


def test_bfloat16_learns_nearly_the_same(tmp_path):
    for precision in ("float32", "bfloat16"):
        train(tiny(tmp_path, steps=4, precision=precision), tmp_path / precision)
    one, two = ([row["loss"] for row in rows(tmp_path / p) if "loss" in row] for p in ("float32", "bfloat16"))
    assert two != one and two == pytest.approx(one, rel=0.02)


def test_a_causal_model_of_transformers_learns_too(tmp_path):
    from transformers import GPT2Config

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=16)
    train(tiny(tmp_path, model=config, options={"n_embd": 8}, steps=2), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_embd"] == 8


# Resumed


@pytest.mark.parametrize("step", [2, 5, 8], ids=["before a checkpoint", "between two", "at the end"])
def test_a_resumed_run_has_the_same_bits(whole, monkeypatch, tmp_path, step):
    """Dropout, accumulation, averaged weights; stopped in the middle of an epoch and of a step."""
    recipe, out = whole
    stopped(monkeypatch, step, lambda: train(recipe, tmp_path), KeyboardInterrupt)
    torch.manual_seed(77)
    train(recipe, tmp_path, resume=True)
    same(tmp_path, out)


def test_a_finished_run_is_not_trained_again(whole, monkeypatch, tmp_path):
    recipe, out = whole
    train(recipe, tmp_path)
    monkeypatch.setattr(Learner, "forward", lambda *a: pytest.fail("it trained again"))
    (tmp_path / "model.safetensors").unlink()
    train(recipe, tmp_path, resume=True)
    same(tmp_path, out)


def test_what_decides_no_loss_may_change_on_the_way(whole, monkeypatch, tmp_path):
    recipe, out = whole
    stopped(monkeypatch, 5, lambda: train(recipe, tmp_path), KeyboardInterrupt)
    train(recipe.changed(log_every=2, prompts=("a ",), checkpoint_every=50), tmp_path, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(out).values(), weights(tmp_path).values(), strict=True))


@pytest.mark.parametrize(("changes", "match"), [
    ({"steps": 9}, "expected .*steps=9.*got .*steps=8"), ({"seed": 1}, "seed=0"), ({"learning_rate": 1e-3}, "learning_rate=0.01"),
    ({"options": MODEL}, r"expected .*model\.dropout=0\.0.*got .*model\.dropout=0\.2"), ({"vocab": 290}, "vocab=300"), ({"held_out": 0.5}, "held_out=0.2"),
], ids=str)  # fmt: skip
def test_another_run_s_checkpoint_is_told_with_what_differs(whole, changes, match):
    recipe, out = whole
    before = tree(out)
    with pytest.raises(ResultsError, match=match):
        train(recipe.changed(**changes), out, resume=True)
    assert tree(out) == before


def test_another_text_is_told(monkeypatch, tmp_path):
    recipe = tiny(tmp_path)
    stopped(monkeypatch, 5, lambda: train(recipe, tmp_path / "out"), KeyboardInterrupt)
    (tmp_path / "texts" / "00.txt").write_text("Something else. " * 30, "utf-8")
    with pytest.raises(ResultsError, match=r"of a run on other data"):
        train(recipe, tmp_path / "out", resume=True)


def test_that_there_was_nothing_to_resume_is_told(tmp_path):
    said = []
    train(tiny(tmp_path, steps=1), tmp_path / "out", resume=True, say=said.append)
    assert any("No checkpoint" in line and "starting a new run" in line for line in said)


def test_a_checkpoint_is_not_overwritten_unasked(whole):
    recipe, out = whole
    with pytest.raises(ResultsError, match=r"`out`: .*got .*which has a checkpoint"):
        train(recipe, out)


@pytest.mark.parametrize("keep", [0, 200, -1])
def test_a_damaged_checkpoint_is_told(monkeypatch, tmp_path, keep):
    recipe = tiny(tmp_path)
    stopped(monkeypatch, 5, lambda: train(recipe, tmp_path / "out"), KeyboardInterrupt)
    file = tmp_path / "out" / "checkpoint" / "last.ckpt"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ResultsError, match=r"last\.ckpt, which cannot be read.*Delete it"):
        train(recipe, tmp_path / "out", resume=True)


# Numbers that are not finite


def forget(loss):
    return loss * math.nan


@pytest.mark.parametrize(("harm", "what"), [
    (forget, "loss is nan"), (lambda loss: loss + (loss - loss.detach()) * math.inf, "loss is nan"),
])  # fmt: skip
def test_a_loss_that_is_not_finite_stops_before_it_spoils_the_weights(whole, monkeypatch, tmp_path, harm, what):
    """… names the step, and leaves a checkpoint from which a better run goes on."""
    recipe, out = whole
    caught = stopped(monkeypatch, 6, lambda: train(recipe, tmp_path), OptionError, harm)
    assert f"{what} at step 6" in str(caught.value) and "Lower it" in str(caught.value)
    state = torch.load(tmp_path / "checkpoint" / "last.ckpt", weights_only=True)
    assert state["step"] == 3 and all(v.isfinite().all() for v in state["models"]["model"].values())
    train(recipe, tmp_path, resume=True)
    same(tmp_path, out)


def test_a_full_disk_leaves_the_checkpoint_before_whole(whole, monkeypatch, tmp_path):
    recipe, out = whole
    saves, own = [], torch.save

    def full(content, file):
        saves.append(file)
        if len(saves) == 2:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        own(content, file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OSError, match="No space"):
            train(recipe, tmp_path)
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["last.ckpt"]
    train(recipe, tmp_path, resume=True)
    same(tmp_path, out)


# Refused before it begins


@pytest.mark.parametrize(("changes", "match"), [
    ({"context": 0}, "`context`"), ({"steps": 1.5}, "`steps`"), ({"batch_size": 6, "accumulate": 4}, "`accumulate`"),
    ({"held_out": 0.0}, "`held_out`"), ({"warmup": 1.0}, "`warmup`"), ({"ema": 1.0}, "`ema`"), ({"clip": 0.0}, "`clip`"),
    ({"packing": "pad"}, "`packing`"), ({"precision": "float8"}, "`precision`"), ({"strategy": "dp"}, "`strategy`"),
    ({"betas": (0.9,)}, "`betas`"), ({"betas": (0.9, 1.0)}, "`betas`"),
    ({"prompts": ("",)}, "`prompts`"), ({"device": "tpu"}, "`device`"), ({"options": ["a"]}, "`options`"),
    ({"options": {"vocab_size": 3}}, "Set vocab"), ({"vocab": 0}, "`vocab`"), ({"learning_rate": 0.0}, "`learning_rate`"),
    ({"checkpointing": 1}, "`checkpointing`"), ({"seed": -1}, "`seed`"), ({"final": 1.5}, "`final`"),
], ids=str)  # fmt: skip
def test_a_recipe_says_what_it_cannot_be(changes, match):
    with pytest.raises(OptionError, match=match):
        TextRecipe(**changes)


def gpt2(**options):
    from transformers import GPT2Config

    return {"model": GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=16), "options": options}


@pytest.mark.parametrize(("make", "match"), [
    (lambda: {"model": "gtp"}, "gpt, llama"), (lambda: {"model": 3}, "`model`"),
    (lambda: {"options": {**MODEL, "hiden_size": 8}}, "`hiden_size`.*hidden_size"),
    (lambda: {"options": {**MODEL, "mixers": ["padr"]}}, "padre"),
    (lambda: {"options": {**MODEL, "positions": "learned", "max_position_embeddings": 8}}, "`context`: .*got 16"),
    (lambda: {**gpt2(), "context": 17}, "`context`: .*got 17"), (lambda: {**gpt2(), "packing": "segments"}, "`packing`"),
    (lambda: {"strategy": "fsdp"}, "torchrun"), (lambda: {"precision": "float16"}, "float16 on cpu"), (lambda: {"data": "/nowhere"}, "does not exist"),
    (lambda: {"tokenizer": "/nowhere"}, "does not exist"),
])  # fmt: skip
def test_what_a_run_cannot_do_is_told_and_nothing_is_written(tmp_path, make, match):
    with pytest.raises(PolymixError, match=match):
        train(tiny(tmp_path, **make()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_presets_and_families_take_options():
    small = {"hidden_size": 16, "num_layers": 2, "num_heads": 2}
    for model, kind in (("gpt", "polymix-gpt"), ("llama", "polymix-llama"), ("gppom2-s-hybrid", "polymix-gpt")):
        made = model_config(TINY.changed(model=model, options=small), 300, 7)
        assert (made.model_type, made.vocab_size, made.hidden_size, made.eos_token_id) == (kind, 300, 16, 7)
    assert made.mixers == ["pom", "local"]


def test_the_preset_of_the_paper_is_nanogpts_training():
    recipe = TextRecipe.paper()
    assert recipe.batch_size * recipe.context == 491_520 and recipe.steps * 491_520 == pytest.approx(15e9, rel=1e-4)
    assert (recipe.learning_rate, recipe.final, recipe.weight_decay, recipe.betas) == (6e-4, 0.1, 0.1, (0.9, 0.95))
    assert recipe.warmup * recipe.steps == pytest.approx(2000) and recipe.clip == 1.0
    for mixer, layers in (("pom", {"pom"}), ("pom,local", {"pom", "local"}), ("softmax", {"softmax"})):
        config = model_config(recipe.changed(mixer=mixer), 50304)
        assert {layer.name for layer in config.layer_configs()} == layers
        assert parameters(config) == pytest.approx(125e6, rel=0.01), mixer
        assert (config.num_layers, config.hidden_size, config.max_position_embeddings) == (12, 768, 2048)


# Recipes as files and words


def test_a_recipe_file_is_loaded_and_words_change_it(tmp_path):
    file = tmp_path / "r.py"
    file.write_text(
        "from polymix.domains.text.recipe import TextRecipe\nrecipe = TextRecipe(steps=5, options={'bias': False})\n"
    )
    words = ["steps=7", "mixers=pom:degree=3,local", "learning_rate=1e-3", "tokenizer=a/b", "checkpointing=true",
             "num_layers=2", "betas=0.9,0.99", "vocab=none", "positions=none"]  # fmt: skip
    recipe = chosen_recipe(file, options=options_of(words, {}))
    assert (recipe.steps, recipe.learning_rate, recipe.tokenizer, recipe.checkpointing) == (7, 1e-3, "a/b", True)
    assert recipe.options == {"bias": False, "mixers": ("pom:degree=3", "local"), "num_layers": 2, "positions": "none"}
    assert recipe.betas == (0.9, 0.99) and recipe.vocab is None


@pytest.mark.parametrize(("text", "words", "match"), [
    (None, [], "or a file"), ("x = 1", [], "in which it is NoneType"), ("recipe = {}", [], "in which it is dict"),
    ("", ["steps"], "option=value"), ("", ["steps="], "option=value"), ("", ["betas=a,b"], "`betas`: expected 2 values"),
    ("", ["steps=many"], "`steps`"),
])  # fmt: skip
def test_what_is_no_recipe_is_told(tmp_path, text, words, match):
    file = tmp_path / "r.py"
    if text is not None:
        file.write_text(text or "from polymix.domains.text.recipe import TextRecipe\nrecipe = TextRecipe()\n")
    with pytest.raises((DataError, OptionError), match=match):
        chosen_recipe(file, options=options_of(words, {}))


def test_init_takes_the_tokenizer_of_its_folder(tmp_path):
    """A model's weights mean nothing in other tokens, nor does its loss beside a control's in others. The first text has
    so few words that its tokenizer stays below `vocab`."""
    (tmp_path / "few.txt").write_text("colourless green ideas sleep furiously\n" * 60)
    first = tiny(tmp_path, data=str(tmp_path / "few.txt"), steps=1, control=False)
    train(first, tmp_path / "one")
    recipe = tiny(tmp_path, init=str(tmp_path / "one"), steps=1, learning_rate=1e-9, control=True)
    train(recipe, tmp_path / "on")
    tokenizers = {(tmp_path / name / "tokenizer.json").read_text() for name in ("one", "on", "on/control")}
    assert len(tokenizers) == 1
    old, new = weights(tmp_path / "one"), weights(tmp_path / "on")
    assert list(old) == list(new) and all(torch.allclose(old[name], new[name], atol=1e-6) for name in old)
    assert old["model.embed.weight"].shape[0] < first.vocab


def test_an_earlier_run_with_mixers_among_its_options_can_still_be_opened():
    """Its results.json also has the mixer that was the default then."""
    settings = {**TINY.to_dict(), "mixer": "pom:decay=8,local"}
    assert TextRecipe.without_idle(settings).mixer is None
    with pytest.raises(OptionError, match=r"`mixer`.*no effect"):
        TextRecipe(**settings)


def test_a_model_that_has_diverged_draws_its_samples_all_the_same(tmp_path):
    """Its loss says what it is; a run of hours does not end in a traceback."""
    recipe = tiny(tmp_path, steps=1, evaluate_every=1, ema=0.0)
    task = TextTask(recipe)
    data = task.load(tmp_path / "data")
    model = task.build(data).eval()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    assert len(task.samples(model, data, Process(torch.device("cpu")))) == 1


def test_a_preset_keeps_its_mixers_unless_others_are_given():
    """Also where those given are the families' own by default."""
    assert "mixers" not in TextRecipe(model="gpt2-s").model_options
    assert TextRecipe().model_options["mixers"] == ("pom:decay=8", "local")
    assert TextRecipe(model="gpt2-s", mixer="pom:decay=8,local").model_options["mixers"] == ("pom:decay=8", "local")


def test_the_control_has_linear_floor_in_every_layer_and_a_foreign_model_has_none():
    mixed = TextRecipe(options={"mixers": ("softmax", "pom"), "num_layers": 2})
    control = mixed.for_control()
    assert mixed.wants_control and control.model_options["mixers"] == ("linear_floor",)
    assert control.model_options["num_layers"] == 2 and not control.wants_control
    assert TextRecipe(model="gppom2-s").for_control().model_options["mixers"] == ("linear_floor",)
    own = PolymixGPTConfig(num_layers=1, num_heads=1, hidden_size=8, mixers=["pom"])
    assert TextRecipe(model=own).for_control().model_options["mixers"] == ("linear_floor",)
    assert TextRecipe(model=own).wants_control and TextRecipe(model=own, mixer="qt").wants_control
    foreign = {"model_type": "gpt2"}
    assert not TextRecipe(model=foreign).wants_control, "its layers are no mixers of ours"
    with pytest.raises(OptionError, match=r"`mixer`.*no effect"):
        TextRecipe(model=foreign, mixer="qt")
    with pytest.raises(OptionError, match=r"`control`.*no mixers"):
        TextRecipe(model=foreign, control=True)
    assert not TextRecipe(data="books").wants_control
    assert not TextRecipe(mixer="linear_floor,linear_floor:bias=false").wants_control
    assert TextRecipe(mixer="linear_floor,softmax").wants_control


def test_the_control_has_no_convolution_which_mixes_too():
    text, recall = (chosen_recipe(domain, options={"short_conv": 4}) for domain in ("text", "recall"))
    assert model_config(text, 300).short_conv == 4 and recall.short_conv == 4
    assert model_config(text.for_control(), 300).short_conv == 0 and recall.for_control().short_conv == 0
