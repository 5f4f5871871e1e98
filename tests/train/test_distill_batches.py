"""What `polymix.distill` makes of batches, labels and logits."""

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polymix.errors import DataError
from polymix.train.distill.batches import answer, first_of, foretells, labels_of, logits_of, moved, run
from polymix.train.distill.metrics import accuracy, perplexity
from tests.train.distilled import Stateful, X, Y, state, vit

A, B = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
TOKENS = torch.tensor([[1, 4, -100], [2, -100, 0]])


class Fixed(nn.Module):
    """Gives the same logits to everything, and keeps what it was called with."""

    def __init__(self, logits, wrap=lambda logits: logits):
        super().__init__()
        self.logits, self.wrap = logits, wrap
        self.called = None

    def forward(self, *args, **kwargs):
        self.called = (args, kwargs)
        return self.wrap(self.logits)


class FixedForCausalLM(Fixed):
    pass


class FixedForConditionalGeneration(Fixed):
    pass


class Cached(Fixed):
    def forward(self, x, use_cache=True):
        self.called = use_cache
        return self.logits


@pytest.mark.parametrize(("batch", "args", "kwargs", "labels"), [
    (X, (X,), {}, None), ([X], (X,), {}, None), ((X, Y), (X,), {}, Y), ([X, Y], (X,), {}, Y),
    ({"pixels": X, "labels": Y}, (), {"pixels": X}, Y), ({"pixels": X, "label": Y}, (), {"pixels": X}, Y), ({"pixels": X}, (), {"pixels": X}, None),
    (({"pixels": X}, Y), (), {"pixels": X}, Y), (UserDict(pixels=X, labels=Y), (), {"pixels": X}, Y),
], ids=str)  # fmt: skip
def test_forms_of_batches(batch, args, kwargs, labels):
    model = Fixed(A)
    run(model, batch)
    assert model.called[0] == args and model.called[1] == kwargs, "labels, or the wrong parts, went into the model"
    assert labels_of(batch) is labels
    assert first_of([batch], "data") is not None


def test_a_mapping_of_any_class_is_moved():
    """A collator of transformers returns one that PyTorch's trees know nothing of."""
    there = moved(UserDict(pixels=X, name="a"), "meta")
    assert there["pixels"].device.type == "meta" and there["name"] == "a"
    assert moved((X, [Y]), "meta")[1][0].device.type == "meta"


def test_no_cache_is_asked_for_that_nobody_uses():
    model = Cached(A)
    run(model, {"x": X})
    assert model.called is False
    run(model, {"x": X, "use_cache": True})
    assert model.called is True, "what the batch says counts more"


@pytest.mark.parametrize("wrap", [
    lambda y: y, lambda y: (y, "cache"), lambda y: [y], lambda y: SimpleNamespace(logits=y, loss=None),
    lambda y: SimpleNamespace(logits=(y, None)),
])  # fmt: skip
def test_logits_are_found_in_what_models_return(wrap):
    assert logits_of(Fixed(A, wrap), X) is A


@pytest.mark.parametrize("wrap", [lambda y: {"out": y}, lambda y: SimpleNamespace(last_hidden_state=y), lambda y: None])
def test_an_output_without_logits_is_told(wrap):
    with pytest.raises(DataError, match=r"`forward`.*Pass forward="):
        logits_of(Fixed(A, wrap), X)


def test_labels_of_images():
    answers = answer(Fixed(A[0]), (X[:3], torch.tensor([0, 4, -100])), logits_of)
    torch.testing.assert_close(answers.label_loss(), F.cross_entropy(A[0, :2], torch.tensor([0, 4])))


def test_labels_may_be_probabilities():
    """As mixup makes them."""
    soft = torch.rand(3, 5).softmax(-1)
    torch.testing.assert_close(answer(Fixed(A[0]), (X, soft), logits_of).label_loss(), F.cross_entropy(A[0], soft))


@pytest.mark.parametrize("model", [Fixed, FixedForConditionalGeneration], ids=["a pair", "an encoder-decoder"])
def test_labels_of_tokens_stand_under_their_logits(model):
    host = model(A)
    host.config = SimpleNamespace(is_encoder_decoder=True)
    batch = (X, TOKENS) if model is Fixed else {"x": X, "labels": TOKENS}
    expected = F.cross_entropy(A.flatten(0, 1), TOKENS.flatten())
    torch.testing.assert_close(answer(host, batch, logits_of).label_loss(), expected)


def test_a_language_model_s_labels_are_its_tokens_and_foretell_the_next():
    model, batch = FixedForCausalLM(A), {"input_ids": X, "labels": TOKENS}
    expected = F.cross_entropy(A[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    torch.testing.assert_close(answer(model, batch, logits_of).label_loss(), expected)
    pair = answer(model, (X, TOKENS), logits_of)
    (
        torch.testing.assert_close(pair.label_loss(), F.cross_entropy(A.flatten(0, 1), TOKENS.flatten())),
        "a pair was shifted",
    )
    own = answer(model, batch, lambda model, batch: model(batch["input_ids"]))
    torch.testing.assert_close(own.label_loss(), pair.label_loss()), "logits of one's own forward were shifted"
    assert foretells(FixedForConditionalGeneration(A), batch) and not foretells(Fixed(A), batch)


def test_the_teacher_is_heard_where_there_is_a_label():
    """… which for a language model are the positions whose next token has one."""
    batch = {"input_ids": X, "labels": TOKENS}
    for kind, real in ((Fixed, TOKENS != -100), (FixedForCausalLM, F.pad(TOKENS[:, 1:] != -100, (0, 1)))):
        ours, theirs = (answer(kind(logits), batch, logits_of) for logits in (A, B))
        expected = F.kl_div((A / 2).log_softmax(-1), (B / 2).softmax(-1), reduction="none").sum(-1)[real].mean() * 4
        torch.testing.assert_close(ours.teacher_loss(theirs, 2.0), expected)


def test_without_labels_padding_is_left_out():
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    hidden = A.clone().masked_fill_(mask[..., None] == 0, torch.nan)
    ours, theirs = (answer(Fixed(logits), {"attention_mask": mask}, logits_of) for logits in (hidden, B))
    loss = ours.teacher_loss(theirs, 1.0)
    expected = F.kl_div(A.log_softmax(-1), B.softmax(-1), reduction="none").sum(-1)[mask.bool()].mean()
    torch.testing.assert_close(loss, expected)


def test_a_batch_in_which_nothing_counts_has_no_loss():
    none = torch.full((2, 3), -100)
    answers = answer(Fixed(A), (X, none), logits_of)
    assert answers.label_loss() == 0 and answers.teacher_loss(answers, 1.0) == 0


@pytest.mark.parametrize("labels", [
    torch.zeros(3, dtype=torch.long), torch.zeros(2, 3), torch.zeros(2, 5, 3, dtype=torch.long), [0, 1], torch.zeros(2),
])  # fmt: skip
def test_labels_that_do_not_fit_are_told(labels):
    """Regression, maps of classes behind the channels, lists: nothing is broadcast."""
    with pytest.raises(DataError, match=r"labels .* for logits"):
        answer(Fixed(A), (X, labels), logits_of)


def test_accuracy_is_the_share_of_hits_over_all_that_count():
    model = Fixed(torch.eye(4)[Y[:8]])
    wrong = torch.where(torch.arange(8) < 2, (Y[:8] + 1) % 4, Y[:8])
    ignored = wrong.clone()
    ignored[:4] = -100
    assert accuracy(model, [(X, Y[:8])], logits_of, "cpu") == 1.0
    assert accuracy(model, [(X, wrong), (X, ignored)], logits_of, "cpu") == pytest.approx(10 / 12)
    assert accuracy(model, [(X, torch.full((8,), -100))], logits_of, "cpu") == 0.0
    with pytest.raises(DataError, match="`val`"):
        accuracy(model, [(X, torch.eye(4)[Y[:8]])], logits_of, "cpu")


def test_perplexity_counts_every_label_alike():
    """Over batches of different sizes, by hand; a model that says nothing has as many choices as there are classes."""
    model, labels = Fixed(torch.zeros(8, 4)), Y[:8].clone()
    assert perplexity(model, [(X, labels)], logits_of, "cpu") == pytest.approx(4)
    labels[2:] = -100
    sure = Fixed(20.0 * torch.eye(4)[labels.clamp_min(0)])
    known, unknown = (sure, [(X, labels)]), (model, [(X, Y[:8])])
    assert perplexity(*known, logits_of, "cpu") == pytest.approx(1, abs=1e-6)
    assert perplexity(*unknown, logits_of, "cpu") == pytest.approx(4)
    halves = Fixed(torch.where(torch.arange(8)[:, None] < 2, 20.0 * torch.eye(4)[Y[:8]], 0.0))
    few, many = labels, torch.where(torch.arange(8) < 2, -100, Y[:8])  # 2 that are known, 6 that are not
    assert perplexity(halves, [(X, few), (X, many)], logits_of, "cpu") == pytest.approx(4**0.75)
    for worst in (1e6, torch.nan):
        far = Fixed(worst * torch.eye(4)[(Y[:8] + 1) % 4])
        assert perplexity(far, [(X, Y[:8])], logits_of, "cpu") < torch.inf, "a report is JSON, which has no such number"
    with pytest.raises(DataError, match="`val`"):
        perplexity(model, [(X, torch.eye(4)[Y[:8]])], logits_of, "cpu")


def test_accuracy_is_measured_in_evaluation_and_leaves_the_mode():
    model = Stateful().train()
    model.norm.eval()
    before, calls = state(model), model.calls.clone()
    assert accuracy(model, [(X, Y)], logits_of, "cpu") == accuracy(model, [(X, Y)], logits_of, "cpu"), "dropout was on"
    assert state(model) == before and torch.equal(model.calls, calls)


def test_accuracy_agrees_with_the_plain_count():
    model = vit()
    with torch.no_grad():
        expected = (model(X).argmax(-1) == Y).double().mean()
    assert accuracy(model, [(X[:40], Y[:40]), (X[40:], Y[40:])], logits_of, "cpu") == pytest.approx(expected.item())
