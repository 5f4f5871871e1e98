"""Recall and copying: the data is what it says, and the trainer learns from it and from nothing else."""

from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from polymix.compat import cure_torchvision
from polymix.domains.recall.data import Copying, Recall, stream
from polymix.domains.recall.metrics import accuracy, state_size
from polymix.domains.recall.recipe import RecallRecipe
from polymix.domains.recall.task import RecallTask
from polymix.errors import OptionError
from polymix.train.data.sampling import Slices
from polymix.train.in_memory import train_in_memory
from polymix.train.loop import Learner
from polymix.train.registry import named_recipe
from polymix.train.run import train as run
from polymix.train.task import IGNORED

cure_torchvision()
TASKS = [Recall(4, 32), Copying(5, 32)]


@given(st.integers(4, 60), st.data())
def test_every_key_comes_once_with_its_value_and_once_as_a_query_whose_target_is_that_value(vocab, data):
    task = Recall(data.draw(st.integers(1, vocab // 2 - 1)), vocab)
    tokens, targets = task.batch(3, "seed")
    assert tokens.shape == targets.shape == (3, task.length)
    for row, expected in zip(tokens.tolist(), targets.tolist(), strict=True):
        shown = 2 * task.pairs
        value_of = dict(zip(row[0:shown:2], row[1:shown:2], strict=True))
        assert len(value_of) == len(set(value_of.values())) == task.pairs
        assert max(value_of) < vocab // 2 <= min(value_of.values()), "keys and values share tokens"
        assert min(value_of) > 0 and max(value_of.values()) < vocab
        assert expected[:shown] == [IGNORED] * shown, "a pair is asked for where it is shown"
        assert sorted(filter(None, row[shown:])) == sorted(value_of), "a key is asked for twice, or never"
        assert [value_of.get(key, IGNORED) for key in row[shown:]] == expected[shown:]


def test_the_paper_s_power_law_puts_queries_near_and_the_order_of_the_keys_is_open():
    def places(power):
        task = Recall(8, 64, power=power)
        tokens, targets = task.batch(2000, 0)
        assert not torch.equal(tokens[:, 0:16:2], tokens[targets != IGNORED].view(2000, 8)), "the pairs' own order"
        return (targets[:, 16:] != IGNORED).double().mean(0)

    near, even = places(0.01), places(1.0)
    assert near[0] > 0.9 and near[-1] < 0.4 and (near[:-1] - near[1:] > -0.05).all()
    assert (even - 0.5).abs().max() < 0.05


def test_a_copy_is_the_text_behind_the_separator_and_each_token_is_asked_for_before_it_comes():
    task = Copying(5, 32)
    tokens, targets = task.batch(4, 0)
    text = tokens[:, :5]
    assert tokens.shape == targets.shape == (4, task.length)
    assert (text > 0).all() and (tokens[:, 5] == 0).all()
    assert torch.equal(tokens[:, 6:], text[:, :-1])
    assert torch.equal(targets[:, 5:], text) and (targets[:, :5] == IGNORED).all()


@pytest.mark.parametrize("task", TASKS, ids=["recall", "copying"])
def test_a_batch_depends_on_its_seed_alone(task):
    first = task.batch(8, "train", 0, 1)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = task.batch(8, "train", 0, 1)
    assert torch.equal(torch.get_rng_state(), state), "it draws from the global generator"
    assert all(map(torch.equal, first, again))
    for other in (("train", 0, 2), ("train", 1, 1), ("test", 0, 1)):
        assert not torch.equal(task.batch(8, *other).tokens, first.tokens), other


def test_the_tasks_take_turns_with_as_many_tokens_each():
    tasks = [Recall(2, 32), Recall(8, 32)]
    batches = stream(tasks, 64, 0, Slices())
    shapes = [tuple(next(batches).tokens.shape) for _ in range(4)]
    assert shapes == [(8, 8), (2, 32)] * 2
    assert tuple(next(stream(tasks, 1, 0, Slices())).tokens.shape) == (1, 8), "a step of nothing"


class Oracle(nn.Module):
    """Looks the key up among the pairs; knows `share` of the values."""

    def __init__(self, share=1.0):
        super().__init__()
        self.scale, self.share = nn.Parameter(torch.ones(())), share

    def forward(self, tokens):
        same = (tokens[:, :, None] == tokens[:, None]).tril(-1).double()  # earlier places of the same token
        place = same.argmax(-1) + 1
        said = tokens.gather(1, place.clamp(max=tokens.shape[1] - 1))
        said = torch.where(torch.rand(said.shape) < self.share, said, 0)
        return SimpleNamespace(logits=self.scale * nn.functional.one_hot(said, 64).float())


def test_accuracy_is_the_share_of_right_answers_where_something_is_asked():
    task = Recall(8, 64)
    assert accuracy(Oracle(), task) == 1
    assert accuracy(Oracle(0.0), task) == 0
    assert accuracy(Oracle(0.25), task, answers=20_000) == pytest.approx(0.25, abs=0.02)


def test_accuracy_leaves_the_mode_of_the_model():
    model = Oracle().train()
    accuracy(model, Recall(2, 64))
    assert model.training


def learned(model, **options):
    """A model that was built here, trained by a recipe."""
    recipe = RecallRecipe(**{"vocab": 64, "sizes": (4,), "tokens": 64, "answers": 512, **options})
    return train_in_memory(RecallTask(recipe), build=lambda: model)


def test_training_ends_at_the_second_measurement_in_a_row_that_is_good():
    done = learned(Oracle(), steps=50, evaluate_every=3, enough=0.99)
    assert (done.steps, done.latest["accuracy_4"]) == (6, 1.0)
    assert learned(Oracle(0.5), steps=9, evaluate_every=3, enough=0.99).steps == 9
    assert learned(Oracle(), steps=9, evaluate_every=3).steps == 9, "nobody asked for less"


class Broken(Oracle):
    def forward(self, tokens):
        return SimpleNamespace(logits=super().forward(tokens).logits * float("nan"))


def test_a_loss_that_is_not_finite_ends_the_training():
    with pytest.raises(OptionError, match="loss is nan at step 1"):
        learned(Broken(), steps=20)


def test_training_and_measuring_never_see_the_same_sequences():
    held_out = {tuple(row) for row in Recall(4, 64).batch(512, "test", 0).tokens.tolist()}
    batches = stream([Recall(4, 64)], 2048, 0, Slices())
    trained = {tuple(row) for _ in range(20) for row in next(batches).tokens.tolist()}
    assert not held_out & trained


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: Recall(16, 32), "pairs"),
        (lambda: Recall(0), "pairs"),
        (lambda: Recall(4, 3), "vocab"),
        (lambda: Recall(4, power=-1.0), "power"),
        (lambda: Copying(0), "span"),
        (lambda: Copying(4, 1), "vocab"),
        (lambda: RecallRecipe(sizes=()), "sizes"),
        (lambda: RecallTask(RecallRecipe(sizes=(16,), vocab=32)).check(), "pairs"),
        (lambda: accuracy(Oracle(), Recall(4), answers=0), "answers"),
    ],
)
def test_what_cannot_be_is_said_by_name(build, named):
    with pytest.raises(OptionError) as error:
        build()
    assert error.value.argument == named


def tiny(*mixers, **options):
    pytest.importorskip("transformers", reason="untested: the state of a language model; the text extra")
    from polymix.models.language import PolymixGPTConfig, PolymixGPTForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64}
    return PolymixGPTForCausalLM(PolymixGPTConfig(**sizes, mixers=list(mixers), **options))


def test_the_state_of_a_mixer_stays_and_that_of_attention_grows():
    model = tiny("pom:expand=2", "softmax")
    small, large = (state_size(model, Recall(pairs, 32)) for pairs in (2, 8))
    assert small == [2 * 16 + 1, 2 * 8 * 16], "D_inner and a count; keys and values of 8 tokens"
    assert large == [2 * 16 + 1, 2 * 32 * 16]


@pytest.mark.slow
def test_two_pairs_are_learned_from_labels_at_the_queries_alone():
    torch.manual_seed(0)
    model = tiny("padre:degree=1:channel=identity:kernel_size=3", "softmax", positions="none")
    task = Recall(2, 8)
    before = accuracy(model, task)
    done = learned(
        model, vocab=8, sizes=(2,), steps=500, tokens=512, evaluate_every=25, learning_rate=5e-3, enough=0.99
    )
    assert before < 0.5
    assert done.latest["accuracy"] > 0.9


# As a task


@pytest.mark.slow
@pytest.mark.draws
def test_a_recipe_leaves_the_accuracy_of_each_size_and_is_resumed_to_the_same_numbers(tmp_path):
    pytest.importorskip("transformers", reason="untested: recall as a task; the text extra")
    recipe = RecallRecipe(sizes=(2, 4), vocab=32, tokens=64, steps=6, hidden_size=16, evaluate_every=3, log_every=1,
                          checkpoint_every=2, answers=64)  # fmt: skip
    whole = run(recipe, tmp_path / "whole")
    assert {"accuracy", "accuracy_2", "accuracy_4"} <= set(whole) and (tmp_path / "whole" / "recall.png").stat().st_size

    class Stopped(Exception):
        pass

    def stop(self, batch, counts):
        steps.append(batch)
        if len(steps) == 5:
            raise Stopped
        return own(self, batch, counts)

    own, steps = Learner.forward, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "forward", stop)
        with pytest.raises(Stopped):
            run(recipe, tmp_path / "out")
    again = run(recipe, tmp_path / "out", resume=True)
    assert {k: v for k, v in again.items() if "second" not in k} == {
        k: v for k, v in whole.items() if "second" not in k
    }


def test_the_parts_of_a_step_are_the_whole_batch():
    tasks = [Recall(2, 32), Recall(4, 32)]
    (whole,) = islice(stream(tasks, 64, 0, Slices(3)), 1)
    parts = list(islice(stream(tasks, 64, 0, Slices(3, 2)), 2))
    assert torch.equal(torch.cat([part.tokens for part in parts]).sort(0)[0], whole.tokens.sort(0)[0])


def test_the_default_recipe_is_sound():
    recipe = named_recipe("recall")
    assert [question.pairs for question in recipe.to_questions()] == [4, 8, 16]
    assert recipe.changed(mixer="softmax", sizes="4,32").sizes == (4, 32)
