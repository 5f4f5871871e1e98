"""`polymix train`: on the command line, killed and resumed, and on two processes."""

import os
import signal

import pytest
import torch

from polymix.cli import main
from polymix.models.language import PolymixGPTForCausalLM
from polymix.train.loop import Learner
from polymix.train.registry import named_recipe
from tests.domains.texts import folder, rows
from tests.processes import die_after, fork, statuses, torchrun

RECIPE = """
from polymix.domains.text.recipe import TextRecipe
recipe = TextRecipe(
    options={"mixers": ["pom", "local"], "num_layers": 2, "hidden_size": 16, "num_heads": 2}, vocab=300, context=16,
    batch_size=4, steps=8, held_out=0.2, evaluate_every=4, log_every=1, checkpoint_every=3, evaluate_tokens=256,
    prompts=("the cat ",), sample_tokens=4,
)
"""


@pytest.fixture
def written(tmp_path):
    """Arguments of a tiny run, and its folder."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    data = folder(tmp_path / "texts")
    return ["train", str(tmp_path / "recipe.py"), "--data", str(data), "--threads", "1", "--out"], tmp_path / "out"


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code or 0, *capsys.readouterr()


def says(environment, said, arguments, steps=None):
    """One of the processes that torchrun starts, ended after so many steps; all write into one file what they say."""
    if steps is not None:
        die_after(steps, signal.SIGTERM)
    os.environ.update(environment)
    file = os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    main(arguments)


def ended(said, arguments, world=2, steps=None):
    """The exit statuses of a command on so many processes."""
    return statuses([fork(says, environment, said, arguments, steps) for environment in torchrun(world)])


def test_it_trains_and_says_what_it_does(capsys, written):
    arguments, out = written
    status, said, _ = run(capsys, *arguments, str(out), "--set", "steps=3", "--set", "mixers=pom")
    assert status == 0
    for text in (
        "tokens in a vocabulary of 300",
        "3 steps from 0",
        "step 3",
        "val_loss",
        "bits_per_byte",
        "'the cat ",
        str(out),
    ):
        assert text in said, said
    assert [row["step"] for row in rows(out, "step", "loss") if "loss" in row] == [1, 2, 3]


@pytest.mark.parametrize(("words", "named"), [
    (["--set", "step=3"], "`step`"), (["--set", "steps"], "option=value"), (["--data", "/nowhere"], "does not exist"),
    (["--set", "strategy=ddp"], "torchrun"), (["--set", "mixers=pomm"], "pom"),
])  # fmt: skip
def test_errors_are_one_line_and_nothing_is_written(capsys, written, words, named):
    arguments, out = written
    status, _, error = run(capsys, *arguments, str(out), *words)
    assert status == 2 and len(error.splitlines()) == 1 and named in error
    assert not out.exists()


def test_ctrl_c_says_how_to_go_on(capsys, written, monkeypatch):
    arguments, out = written
    own, steps = Learner.forward, []

    def stop(self, batch, counts):
        steps.append(batch)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return own(self, batch, counts)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "forward", stop)
        status, said, _ = run(capsys, *arguments, str(out))
    assert status == 130 and "--resume" in said
    status, said, _ = run(capsys, *arguments, str(out), "--resume")
    assert status == 0 and "8 steps from 3" in said


def test_the_default_recipe_is_sound():
    recipe = named_recipe("text")
    assert recipe.data is None and recipe.mixer_name == "pom:decay=8,local" and recipe.model_options["num_layers"] == 4


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="untested: two processes, for torch.distributed")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_learn_as_one(written, strategy, tmp_path):
    """… the same curve, the same held-out loss, a model that loads alike; and they are resumed from half the way."""
    arguments, out = written
    both, half = out.with_name("both"), out.with_name("half")
    said, common = tmp_path / "said.txt", ("--set", "packing=segments", "--set", "ema=0.8", "--set", "accumulate=2")
    assert ended(tmp_path / "one.txt", [*arguments, str(out), *common], world=1) == [0]
    common += ("--set", f"strategy={strategy}")
    assert ended(said, [*arguments, str(both), *common]) == [0, 0], said.read_text()
    assert said.read_text().count("8 steps from 0") == 1, "both processes spoke"
    expected = rows(out)
    compare(rows(both), expected)
    ids = torch.arange(1, 17)[None]
    one, two = (PolymixGPTForCausalLM.from_pretrained(folder)(ids, use_cache=False).logits for folder in (out, both))
    torch.testing.assert_close(two, one, rtol=0, atol=1e-4)  # not of each weight: keys' biases do nothing, and drift
    state = torch.load(both / "checkpoint" / "last.ckpt", weights_only=True)
    assert state["step"] == 8 and state["slices"] == 4
    assert ended(said, [*arguments, str(half), *common], steps=4) == [-signal.SIGTERM] * 2, said.read_text()
    assert rows(half)[-1]["step"] == 4, "after the checkpoint and before the end"
    assert ended(said, [*arguments, str(half), *common, "--resume"]) == [0, 0], said.read_text()
    compare(rows(half), expected)


def compare(found, expected):
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("loss", "val_loss", "bits_per_byte"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5), f"{name} at step {theirs['step']}"
