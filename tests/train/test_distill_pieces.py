"""`polymix.distill(piece=)`: long sequences in pieces, which carry the state."""

import copy

import pytest
import torch

import polymix
from polymix.errors import CapabilityError, OptionError
from polymix.train.distill.batches import logits_of
from polymix.train.distill.comparison import Comparison
from polymix.train.distill.fit import Fit
from polymix.train.distill.guard import HeldBack
from polymix.train.distill.stages import FineTuning, Listener
from tests.convert.language_hosts import converted, gpt2, llama

IDS = torch.randint(1, 60, (2, 24), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0
WHOLE = {"input_ids": IDS, "labels": IDS}
BATCHES = {
    "labels": WHOLE, "padding": {**WHOLE, "attention_mask": MASK, "labels": IDS.where(MASK.bool(), -100)},
    "teacher": {"input_ids": IDS, "attention_mask": MASK},
}  # fmt: skip


def stage(host, model, batch, piece, forward=logits_of):
    recipe = Fit(None, False, "cpu", 1, "float32").recipe([batch], 1, 1e-4, 0.0, 0)
    comparison = Comparison(1.0, 1.0, 2.0, forward=forward, piece=piece)
    held = HeldBack([batch], comparison, () if host is None else (host,))
    return FineTuning(recipe, [batch], model, host, Listener(), held, comparison, {}, epochs=1)


@pytest.mark.parametrize("host", [gpt2, llama])
@pytest.mark.parametrize("kind", BATCHES)
def test_the_loss_of_pieces_is_that_of_whole_sequences(host, kind):
    """The state and the kept attention's keys are carried, no label at an edge is lost; a mask reaches back."""
    model, batch = converted(host, "1:1", mixer="pom"), BATCHES[kind]
    whole, pieces = (stage(host(), model, batch, piece) for piece in (None, 7))
    torch.testing.assert_close(pieces.loss(model, batch), whole.loss(model, batch))
    assert pieces.held.loss(model, "cpu") == pytest.approx(whole.held.loss(model, "cpu"), rel=1e-4)
    assert (pieces.hits, pieces.count) == (whole.hits, whole.count)


def test_gradients_of_one_piece_are_those_of_the_sequence_and_end_at_an_edge():
    model = converted(gpt2, "qt")
    grads = []
    for piece in (None, 24, 8):
        model.zero_grad()
        stage(None, model, WHOLE, piece).loss(model, WHOLE).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1])
    assert not all(torch.allclose(a, b) for a, b in zip(grads[0], grads[2], strict=True)), "the state is detached"


def test_training_in_pieces_learns_and_resumes(tmp_path):
    report, again = (polymix.convert(gpt2(), "pom", context=80) for _ in range(2))
    ids = torch.randint(1, 60, (2, 80), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": ids, "labels": ids}] * 2
    options = {"imitate_epochs": 0, "piece": 32, "learning_rate": 1e-3}
    before = copy.deepcopy(report.model.state_dict())
    first = polymix.distill(report, data, epochs=2, **options).fine_tuning
    assert first[1] < first[0]
    assert any(not torch.equal(value, before[name]) for name, value in report.model.state_dict().items())
    assert polymix.distill(again, data, epochs=2, out=tmp_path, **options).fine_tuning == first
    assert polymix.distill(again, data, epochs=2, out=tmp_path, resume=True, **options).fine_tuning == first


@pytest.mark.parametrize(("plan", "options", "error", "reason"), [
    ("knn:k=3", {}, CapabilityError, "carries no state"), ("pom", {"piece": 0}, OptionError, "piece"),
    ("pom", {"loss": "squares"}, OptionError, "logits"),
    ("pom", {"epochs": 0, "imitate_epochs": 1}, OptionError, "epochs=0"),
])  # fmt: skip
def test_what_has_no_pieces(plan, options, error, reason):
    report = polymix.convert(gpt2(), plan)
    with pytest.raises(error, match=reason):
        polymix.distill(report, [WHOLE], **{"piece": 8, **options})


def test_pieces_are_for_language_models():
    report = polymix.convert(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), "pom")
    with pytest.raises(OptionError, match="a language model"):
        polymix.distill(report, [torch.randn(2, 8, 16)], piece=4)
