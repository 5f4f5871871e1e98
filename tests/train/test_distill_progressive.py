"""`polymix.distill` that replaces one layer after another, with a loss for each layer, and by features alone."""

import pytest
import torch
from torch import nn

import polymix
from polymix.errors import CapabilityError, OptionError
from polymix.train.distill import distill, stages
from polymix.train.distill.batches import features_of
from tests.contracts.library_cases import imported
from tests.train.distilled import BATCHES, bits, converted, differing, former, same

ONE_BY_ONE = {"imitate_epochs": 0, "epochs": 2, "progressive": 6, "blocks": 0.1}


def watched(monkeypatch):
    """Which adapters run as mixers, step by step."""
    steps, own = [], stages.FineTuning.loss

    def loss(self, model, batch):
        value = own(self, model, batch)
        steps.append([name for name, part in self.stand_ins.adapters.items() if "forward" not in vars(part)])
        return value

    monkeypatch.setattr(stages.FineTuning, "loss", loss)
    return steps


def test_the_last_layer_comes_first_and_one_more_follows_every_few_steps(monkeypatch):
    steps, report = watched(monkeypatch), converted()
    first, last = report.adapters
    distill(report, BATCHES, **ONE_BY_ONE)
    assert steps == [[last]] * 6 + [[first, last]] * 10
    assert report.schedule == {last: 0, first: 6} == report.to_dict()["schedule"]
    assert f"{last} after 0 steps, {first} after 6 steps" in str(report)
    assert not any("forward" in vars(part) for part in report.adapters.values()), (
        "attention stands in for a mixer still"
    )


def test_until_its_turn_a_mixer_does_not_learn(monkeypatch):
    report = converted()
    first, last = report.adapters
    before = {name: bits(part) for name, part in report.adapters.items()}
    monkeypatch.setattr(stages.FineTuning, "loss", interrupted(stages.FineTuning.loss, 5))
    with pytest.raises(KeyboardInterrupt):
        distill(report, BATCHES, **ONE_BY_ONE)
    assert differing(before[last], bits(report.adapters[last]))
    assert not differing(before[first], bits(report.adapters[first]))
    assert "forward" not in vars(report.adapters[first]), "the interrupted run left attention in a mixer's place"


def interrupted(own, at):
    calls = []

    def loss(self, model, batch):
        calls.append(batch)
        if len(calls) > at:
            raise KeyboardInterrupt
        return own(self, model, batch)

    return loss


def resumes(monkeypatch, folder, calls, options):
    """A run that is interrupted after so many calls goes on to what one that was not makes."""
    whole = converted()
    expected = distill(whole, BATCHES, **options)
    with monkeypatch.context() as patch:
        patch.setattr(stages.FineTuning, "loss", interrupted(stages.FineTuning.loss, calls))
        with pytest.raises(KeyboardInterrupt):
            distill(converted(), BATCHES, out=folder, **options)
    report = converted()
    assert distill(report, BATCHES, out=folder, resume=True, **options) == expected
    same(report, whole)


def test_a_resumed_run_goes_on_with_the_same_layers(monkeypatch, tmp_path):
    resumes(monkeypatch, tmp_path, 11, ONE_BY_ONE)


def test_a_run_is_resumed_from_before_a_layer_s_turn(monkeypatch, tmp_path):
    """The optimizer knows nothing yet of the layers that wait."""
    late = {**ONE_BY_ONE, "progressive": 10}  # of 16 steps, and the checkpoint is of the eighth
    resumes(monkeypatch, tmp_path, 9, late)


def test_it_goes_with_lora_and_undo():
    report = converted()
    host = former(report)
    distill(report, BATCHES, lora=2, **{**ONE_BY_ONE, "imitate_epochs": 1})
    assert not differing(bits(host), bits(report.undo()))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"progressive": 16, "epochs": 2}, "at least 17 steps, got 16 for 2 layers, in a training of 16 steps"),
        ({"progressive": 16, "epochs": 2}, "more epochs, or pass 15 or less"),
        ({"progressive": 2, "piece": 4}, "Leave piece or progressive out: attention carries no"),
        ({"blocks": 0.1, "piece": 4}, "Leave piece or blocks out: losses of layers are of whole"),
        ({"progressive": 2, "epochs": 0}, "progressive.*epochs=0"),
        ({"progressive": 2, "teacher": 0.0}, "progressive.*teacher=0"),
        ({"blocks": 0.1, "teacher": 0.0}, "blocks.*teacher=0"),
        ({"loss": "features", "temperature": 3.0}, "temperature.*features"),
        ({"loss": "features", "teacher": 0.0}, "labels in the batches, or a teacher"),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_is_trained(options, match):
    report = converted()
    before = bits(report.model)
    with pytest.raises(OptionError, match=match):
        distill(report, BATCHES, **options)
    assert not differing(before, bits(report.model))


def test_attention_cannot_stand_in_where_the_host_runs_without_a_part_of_it():
    """BEiT gives its layers biases by position, and none while mixers are in it: attention would miss them."""
    transformers = imported("transformers")
    config = transformers.BeitConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8,
        use_relative_position_bias=True,
    )  # fmt: skip
    x = torch.randn(2, 3, 16, 16)
    report = polymix.convert(
        transformers.BeitForImageClassification(config).eval(), "qt", input=x, drop=("position_bias",)
    )
    with pytest.raises(CapabilityError, match="runs without its relative_position_bias"):
        distill(report, [(x, torch.zeros(2).long())] * 4, imitate_epochs=0, epochs=1, progressive=1)


def test_features_teach_a_model_without_logits():
    """Batches are pictures alone; the original's features are what is measured by."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True) for _ in range(2)))
    tokens = torch.randn(32, 6, 16, generator=torch.Generator().manual_seed(0))
    batches = [tokens[i : i + 8] for i in range(0, 32, 8)]
    report = polymix.convert(model, "pom", input=batches[0])
    done = distill(report, batches, val=batches, loss="features", imitate_epochs=4, epochs=8, learning_rate=2e-3)
    assert done.accuracy["before"] == 0.0 and report.metric == "relative_error"
    assert done.accuracy["distilled"] < done.accuracy["imitated"] < done.accuracy["converted"]


def test_the_features_of_a_model_are_its_last_hidden_states_without_padding():
    transformers = imported("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=16)).eval()
    ids, real = torch.randint(40, (2, 5)), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    features = features_of(model, {"input_ids": ids, "attention_mask": real})
    assert torch.equal(features, model(input_ids=ids, attention_mask=real).last_hidden_state[real.bool()])


def test_the_features_of_a_model_of_timm_come_before_its_head():
    timm = imported("timm")
    options = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(features_of(model, x), model.forward_features(x))
