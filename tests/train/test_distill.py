"""`polymix.distill`: who learns what from whom, and that everything else is left as it was."""

import os
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polymix
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.task import ClassifyTask
from polymix.errors import DataError, OptionError
from polymix.train.distill import Distillation, distill, stages
from polymix.train.in_memory import train_in_memory
from tests.train.distilled import BATCHES, ONCE, Stateful, X, Y, bits, converted, differing, former, loader, state, vit

STILL = {"learning_rate": 1e-12, "weight_decay": 0.0}


def stateful(**options):
    torch.manual_seed(0)
    return converted(Stateful().eval(), polymix.PomConfig(dropout=0.1), **options)


def fails_at(monkeypatch, stage, step, error):
    """Raise in the middle of a stage."""
    kind = {"imitation": stages.Imitation, "fine-tuning": stages.FineTuning}[stage]
    own, batches = kind.loss, []

    def fail(self, model, batch):
        batches.append(batch)
        if len(batches) == step + 1:
            raise error
        return own(self, model, batch)

    monkeypatch.setattr(kind, "loss", fail)


@pytest.mark.slow
def test_both_stages_bring_the_accuracy_back():
    recipe = ClassifyRecipe(image_size=8, steps=270, evaluate_every=270, mixer="softmax", warmup=0.1)
    task = ClassifyTask(recipe)
    data = task.load(None)
    model = train_in_memory(task, data, lambda: vit(dim=32, depth=1, classes=10)).model
    images, tests = data.normalise(data.train.images), data.normalise(data.test.images)
    report = polymix.convert(model, "pom", init="fresh", input=images[:32])
    done = distill(
        report, DataLoader(TensorDataset(images, data.train.labels), 64, shuffle=True), val=[(tests, data.test.labels)],
        imitate_epochs=3, epochs=4, imitate_lr=5e-3, learning_rate=2e-3,
    )  # fmt: skip
    assert isinstance(done, Distillation) and done.accuracy == report.accuracy
    assert list(done.accuracy) == ["before", "converted", "imitated", "distilled"]
    assert done.imitation[-1] < done.imitation[0] and len(done.imitation) == 3 and len(done.fine_tuning) == 4
    accuracy = done.accuracy
    assert accuracy["converted"] < accuracy["imitated"], "stage 1 taught the mixer nothing"
    assert accuracy["distilled"] > accuracy["before"] - 0.02, "stage 2 did not bring the accuracy back"


# Stage 1


def test_imitation_trains_the_mixers_alone():
    report = stateful()
    host, mixers, attention = former(report), bits(report.adapters["attention"]), report.attentions["attention"]
    before = bits(attention)
    distill(report, BATCHES, imitate_epochs=2, epochs=0)
    assert not differing(before, bits(attention)), "attention was trained by its own imitation"
    assert not differing(bits(host), bits(former(report))), (
        "stage 1 changed a weight, a statistic or a buffer of the host"
    )
    assert differing(mixers, bits(report.adapters["attention"])) == set(mixers), (
        "a parameter of the mixer learnt nothing"
    )


def test_imitation_is_of_the_attention_in_evaluation_and_has_no_dropout():
    """Softmax with the attention's weights is the attention: its loss is nothing but for dropout on either side."""
    host = vit(polymix.SoftmaxConfig(heads=2, dropout=0.5)).train()
    report = converted(host, polymix.SoftmaxConfig(dropout=0.5))
    assert distill(report, BATCHES, epochs=0, imitate_lr=1e-12).imitation[0] < 1e-10


def test_the_loss_of_imitation_is_relative_and_by_layer():
    report = converted(plan=polymix.PomConfig())
    x, scale = X[:8], {}
    (loss,) = distill(report, [(x, Y[:8])], epochs=0, imitate_lr=1e-12).imitation
    layers = report.layers
    host = former(report)
    for name, adapter in report.adapters.items():
        found = {}
        hook = host.get_submodule(name).register_forward_hook(lambda m, a, y, found=found: found.update(x=a[0], y=y))
        with torch.no_grad():
            host(x)
            ours = adapter.eval()(found["x"])
        hook.remove()
        scale[name] = ((ours - found["y"]).square().mean() / found["y"].var(correction=0)).item()
    assert loss == pytest.approx(sum(scale.values()) / len(layers), rel=1e-5)


class Tagger(nn.Module):
    """torch.nn's encoder, which in evaluation would go round the modules that hold its attention."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 4)

    def forward(self, x, mask):
        return self.head(self.encoder(x, src_key_padding_mask=~mask))


def test_the_encoder_of_torch_is_heard_layer_by_layer_and_padding_is_not():
    torch.manual_seed(0)
    x, mask = torch.randn(8, 6, 16), torch.ones(8, 6, dtype=torch.bool)
    mask[4:, 4:] = False
    labels = torch.randint(4, (8, 6)).masked_fill(~mask, -100)
    batch = {"x": x, "mask": mask, "labels": labels}
    model = Tagger().eval()
    report = polymix.convert(model, "softmax", input={"x": x, "mask": mask})
    done = distill(report, [batch], val=[batch], imitate_epochs=1, teacher=1.0, labels=0.0, imitate_lr=1e-12, **STILL)
    assert done.imitation[0] < 1e-10 and done.fine_tuning[0] < 1e-6 and len(set(done.accuracy.values())) == 1


@pytest.mark.parametrize("error", [None, ValueError("data"), KeyboardInterrupt()], ids=["done", "error", "ctrl-c"])
@pytest.mark.parametrize("stage", ["imitation", "fine-tuning"])
def test_flags_and_modes_are_as_they_were(monkeypatch, stage, error):
    report = stateful()
    report.model.train()
    report.model.norm.eval()  # frozen statistics
    report.model.head.requires_grad_(False)
    report.attentions["attention"].out_proj.requires_grad_(False)
    before, theirs = state(report.model), state(report.attentions["attention"])
    if error is not None:
        fails_at(monkeypatch, stage, 2 if stage == "imitation" else 3, error)
        with pytest.raises(type(error)):
            distill(report, BATCHES, **ONCE)
    else:
        distill(report, BATCHES, **ONCE)
    assert state(report.model) == before, "a flag or a mode of the model was changed for good"
    assert state(report.attentions["attention"])[1] == theirs[1]
    assert not report.undone and report.model.attention is report.adapters["attention"], "the mixers are not in place"
    assert not report.model._forward_hooks and not report.attentions["attention"]._forward_hooks, "a hook was left"
    report.undo()


# Stage 2


def test_what_asks_for_no_gradients_is_not_trained():
    report = stateful()
    report.model.head.requires_grad_(False)
    before = bits(report.model)
    distill(report, BATCHES, imitate_epochs=0, epochs=1)
    changed = differing(before, bits(report.model))
    assert not [name for name in changed if name.startswith("head.")]
    assert "norm.running_mean" in changed and "norm.weight" in changed and any("mixer" in name for name in changed)


@pytest.mark.parametrize(("labels", "teacher"), [(1.0, 0.0), (0.0, 1.0), (0.7, 0.3)])
def test_the_losses_of_stage_two_are_labels_and_the_model_before_its_conversion(labels, teacher):
    """With nearly no learning rate the mean loss is that of the definition, whatever was trained before."""
    report = converted(plan="pom")
    host = former(report)
    distill(report, BATCHES, imitate_epochs=0, epochs=2, teacher=0.0, learning_rate=1e-2)
    batch = [(X, Y)]
    (found,) = distill(
        report, batch, imitate_epochs=0, labels=labels, teacher=teacher, temperature=3.0, **STILL
    ).fine_tuning
    with torch.no_grad():
        ours, theirs = report.model(X), host(X)
    divergence = F.kl_div((ours / 3).log_softmax(-1), (theirs / 3).softmax(-1), reduction="batchmean") * 9
    expected = labels * F.cross_entropy(ours, Y) + teacher * divergence
    assert found == pytest.approx(expected.item(), rel=1e-4)


def test_inputs_alone_learn_from_the_teacher():
    report = converted()
    before = bits(report.model)
    done = distill(report, [X[:8], X[8:16]], keep="last", **ONCE)
    assert differing(before, bits(report.model)) and torch.tensor(done.fine_tuning).isfinite().all()


def test_zero_epochs_measure_alone():
    report = converted()
    before = bits(report.model)
    done = distill(report, BATCHES, val=BATCHES, imitate_epochs=0, epochs=0)
    assert not differing(before, bits(report.model)) and (done.imitation, done.fine_tuning) == ((), ())
    assert set(done.accuracy) == {"before", "converted"}


# Taking it back


def test_undo_restores_every_bit_and_redo_what_was_learnt():
    report = stateful()
    host = former(report)
    distill(report, BATCHES, imitate_epochs=1, epochs=2)
    learnt = bits(report.model)
    assert learnt["calls"] > 0 and learnt["norm.num_batches_tracked"] > 0
    assert not differing(bits(host), bits(report.undo())), "undo left a trained weight, a statistic or a buffer"
    report.redo()
    assert not differing(learnt, bits(report.model)), "what was learnt got lost on the way there and back"
    assert not differing(bits(host), bits(report.undo()))


def test_a_second_distillation_goes_on_from_the_first():
    report = stateful()
    host = former(report)
    distill(report, BATCHES, imitate_epochs=0, epochs=1)
    learnt = bits(report.model)
    distill(report, BATCHES, val=BATCHES, imitate_epochs=1, epochs=0, imitate_lr=1e-12)
    assert not {name for name in differing(learnt, bits(report.model)) if ".mixer." not in name}
    distill(report, BATCHES, imitate_epochs=0, epochs=1)
    assert not differing(bits(host), bits(report.undo())), "the second made undo forget the first state"


def test_the_random_state_and_the_environment_are_left_alone():
    report = converted()
    torch.manual_seed(5)
    random.seed(5)
    before, theirs, env = torch.get_rng_state(), random.getstate(), dict(os.environ)
    distill(report, loader(), **ONCE)
    assert torch.equal(before, torch.get_rng_state()) and theirs == random.getstate() and env == dict(os.environ)


# Precision, numbers, mistakes


def test_bfloat16_is_autocast():
    report = converted()
    seen = set()
    report.model.head.register_forward_hook(lambda m, a, y: seen.add((m.training, y.dtype)))
    done = distill(report, BATCHES, precision="bfloat16", **ONCE)
    assert torch.tensor(done.imitation + done.fine_tuning).isfinite().all()
    assert (True, torch.bfloat16) in seen, "the model was not trained in bfloat16"
    assert all(p.dtype == torch.float32 for p in report.model.parameters())


@pytest.mark.parametrize("stage", ["imitation", "fine-tuning"])
def test_a_loss_that_is_not_finite_stops_at_once_and_says_where(monkeypatch, stage):
    report = converted()
    kind = {"imitation": stages.Imitation, "fine-tuning": stages.FineTuning}[stage]
    own, steps = kind.loss, []

    def poisoned(self, model, batch):
        steps.append(batch)
        return own(self, model, batch) * (torch.nan if len(steps) == 12 else 1.0)

    monkeypatch.setattr(kind, "loss", poisoned)
    with pytest.raises(OptionError, match=f"`{kind.rate}`.*stays finite.*epoch 2 of {stage} loss is nan"):
        distill(report, BATCHES, imitate_epochs=3, epochs=3)
    assert len(steps) == 12, "it went on for a whole epoch"


def test_weights_that_left_the_finite_numbers_in_the_last_step_are_seen(monkeypatch):
    """The loss is of before the step."""
    own = torch.optim.AdamW.step

    def spoil(self, closure=None):
        loss = own(self, closure)
        self.param_groups[0]["params"][0].data.fill_(torch.inf)
        return loss

    monkeypatch.setattr("torch.optim.AdamW.step", spoil)
    with pytest.raises(OptionError, match="epoch 1 of imitation"):
        distill(converted(), BATCHES[:1], **ONCE)


def undone():
    report = converted()
    report.undo()
    return report


@pytest.mark.parametrize(("options", "match"), [
    ({"report": "nothing"}, "`report`: .*got str"),
    ({"report": undone}, "`report`.*undone"),
    ({"report": lambda: converted(plan={"blocks.0.mixer": "keep"})}, "`report`.*replaced nothing"),
    ({"epochs": -1}, "`epochs`"), ({"imitate_epochs": 1.5}, "`imitate_epochs`"), ({"seed": -1}, "`seed`"),
    ({"labels": -1.0}, "`labels`"), ({"teacher": float("nan")}, "`teacher`"), ({"temperature": 0}, "`temperature`"),
    ({"imitate_lr": 0.0}, "`imitate_lr`"), ({"learning_rate": float("inf")}, "`learning_rate`"),
    ({"weight_decay": -0.1}, "`weight_decay`"), ({"labels": 0.0, "teacher": 0.0}, "`labels, teacher`"),
    ({"data": [X[:8]], "teacher": 0.0}, "`labels, teacher`"), ({"resume": True}, "`resume`.*out="),
    ({"precision": "float64"}, "`precision`"), ({"precision": "float16"}, "`precision`.*float16 on cpu"),
    ({"device": "cuda:99"}, "`device`.*cuda:99"), ({"device": "tpu"}, "`device`.*tpu"), ({"device": "cuda:x"}, "`device`"),
    ({"devices": 0}, "`devices`"), ({"devices": 2, "device": "cpu:0"}, "`device`.*devices=2"),
    ({"devices": 99}, "`data`.*99 devices.*8 batches"), ({"data": iter(BATCHES)}, "`data`.*list_iterator"),
    ({"data": []}, "`data`.*length 0"), ({"data": [("a", "b")]}, "`data`.*without tensors"),
    ({"data": [(X[:8], Y[:8], Y[:8])]}, "`data`.*3 parts"), ({"data": [(X[:8], Y[:8, None])]}, r"`data`.*\(8, 1\)"),
    ({"data": TensorDataset(X, Y)}, "`data`.*TensorDataset"), ({"val": [X[:8]]}, "`val`.*without class labels"),
    ({"val": iter([])}, "`val`"),
])  # fmt: skip
def test_mistakes_are_said_before_anything_is_changed(options, match):
    arguments = {"report": converted, "data": BATCHES, **ONCE, **options}
    report = arguments.pop("report")
    report = report() if callable(report) else report
    before = None if isinstance(report, str) else bits(report.model)
    with pytest.raises((OptionError, DataError), match=match):
        distill(report, arguments.pop("data"), **arguments)
    assert before is None or not differing(before, bits(report.model)), "it had begun"


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_names_of_devices(device):
    assert torch.tensor(distill(converted(), BATCHES, device=device, **ONCE).fine_tuning).isfinite().all()


def test_one_of_ten_steps_warms_up():
    """At exactly one step of warm-up PyTorch's schedule divides by zero."""
    assert len(distill(converted(), BATCHES[:5], imitate_epochs=2, epochs=2).imitation) == 2


def test_a_model_that_calls_no_converted_layer_says_so():
    report = converted()
    with pytest.raises(DataError, match="calls no converted layer"):
        distill(
            report, BATCHES, epochs=0, forward=lambda model, batch: model.head(model.norm(batch[0].flatten(1)[:, :16]))
        )
    assert not report.undone


def test_a_forward_of_ones_own_serves_both_stages():
    wrapped = [{"picture": x, "labels": y} for x, y in BATCHES]
    done = distill(converted(), wrapped, val=wrapped, forward=lambda model, batch: model(batch["picture"]), **ONCE)
    assert done == distill(converted(), BATCHES, val=BATCHES, **ONCE)
