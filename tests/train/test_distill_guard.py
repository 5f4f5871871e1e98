"""What was held back is not learnt from, a stage ends with its best weights, and rates rise and differ as documented."""

import copy
import multiprocessing

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

import polymix
import polymix.train.distill as package
from polymix.train.data.sampling import Slices
from polymix.train.distill import distill, guard, stages
from polymix.train.distill.fit import Fit
from polymix.train.distill.guard import HeldBack, hold_back
from polymix.train.distill.order import epochs_of
from polymix.train.distill.stages import imitation_loss
from tests.train.distilled import BATCHES, Stateful, X, Y, bits, converted, differing, loader, same

RUINOUS = {"imitate_epochs": 0, "epochs": 1, "learning_rate": 10.0}


@pytest.fixture
def seen(monkeypatch):
    """The stages of a distillation, as they end."""
    stages = []
    monkeypatch.setattr(package, "_say_kept", lambda stage, say: stages.append(stage))
    return stages


# What is held back


def rows(batches):
    return {tuple(row.flatten().tolist()) for images, _ in batches for row in images}


@pytest.mark.parametrize("data", [
    BATCHES, loader(), loader(shuffle=False, sampler=RandomSampler(X, generator=torch.Generator().manual_seed(4))),
    loader(generator=torch.Generator().manual_seed(3)),
], ids=["list", "shuffled", "sampler", "generator"])  # fmt: skip
def test_what_is_held_back_is_never_learnt_from(data):
    rest, held = hold_back(data, 0)
    learnt = []
    for _, batch in zip(range(3 * len(data)), epochs_of(rest, 0, Slices()), strict=False):
        learnt.append(batch)
    assert len(rest) == len(data) and {len(images) for images, _ in learnt} == {8}, "the schedule would be another"
    assert len(rows(held)) == 8 and not rows(held) & rows(learnt)
    assert rows(held) | rows(learnt) == rows(BATCHES), "samples are lost that were not held back"
    assert rows(hold_back(data, 0)[1]) == rows(held), "a resumed run would hold back others"


def test_a_sampler_that_leaves_samples_out_has_none_of_them_held_back():
    """Such as one that keeps the test set, in the same data set, from being trained on."""
    train = DataLoader(TensorDataset(X, Y), 8, sampler=torch.utils.data.SubsetRandomSampler(range(32)))
    assert rows(hold_back(train, 0)[1]) <= rows([(X[:32], Y)])


def test_indices_that_are_no_numbers_are_left_alone():
    """Such as (row, crop) of a data set with a sampler of its own; lists cannot even be hashed."""

    class Crops(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return X[index[0]], Y[index[0]]

    data = DataLoader(Crops(), 8, sampler=[[row, 0] for row in range(64)])
    rest, held = hold_back(data, 0)
    assert rest is data and len(held) == 1


def test_data_too_few_to_hold_any_back_are_watched_as_they_are():
    few = BATCHES[:3]
    rest, held = hold_back(few, 0)
    assert rest is few and held == few[:1]


def test_many_samples_are_held_back_by_64():
    images = torch.arange(4096.0)[:, None]
    _, held = hold_back(DataLoader(TensorDataset(images, images), 32, sampler=SequentialSampler(images)), 0)
    assert [len(part) for part, _ in held] == [32, 32]


# The guard


def test_buffers_belong_to_the_weights_that_are_kept():
    torch.manual_seed(0)
    report = converted(Stateful().eval(), polymix.PomConfig(dropout=0.3))
    before = copy.deepcopy(report.model.state_dict())
    distill(report, BATCHES, **RUINOUS)
    assert not differing(before, report.model.state_dict()), "the statistics of batch norm are another state's"


def test_a_stage_ends_with_its_best_weights(monkeypatch, seen):
    """Of several looks the best one counts, not the last one and not the start."""
    weights = {}
    own = stages.FineTuning.held_back_loss

    def scripted(self, process):
        weights[self.done] = bits(self.model)
        own(self, process)
        return {4: 0.1}.get(self.done, 0.5)

    monkeypatch.setattr(stages.FineTuning, "held_back_loss", scripted)
    report = converted()
    distill(report, BATCHES, imitate_epochs=0, epochs=2)
    assert list(seen[0].looks) == [0, 4, 8, 12, 16] and seen[0].kept_step == 4
    assert not differing(weights[4], bits(report.model)) and differing(weights[16], weights[4])


@pytest.mark.slow
def test_a_resumed_run_keeps_what_was_best_before_it_was_interrupted(monkeypatch, tmp_path):
    monkeypatch.setattr(stages.FineTuning, "held_back_loss", lambda self, process: {4: 0.1}.get(self.done, 0.5))
    expected, resumed = converted(), converted()
    distill(expected, loader(), imitate_epochs=0, epochs=2)
    own = stages.FineTuning.loss

    def stop(self, model, batch):
        if self.done == 11:
            raise KeyboardInterrupt
        return own(self, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(stages.FineTuning, "loss", stop)
        with pytest.raises(KeyboardInterrupt):
            distill(converted(), loader(), imitate_epochs=0, epochs=2, out=tmp_path)
    distill(resumed, loader(), imitate_epochs=0, epochs=2, out=tmp_path, resume=True)
    same(resumed, expected)


def test_a_ruinous_imitation_ends_where_it_began():
    report = converted()
    before = bits(report.model)
    done = distill(report, BATCHES, imitate_epochs=1, epochs=0, imitate_lr=10.0)
    assert not differing(before, bits(report.model)) and done.kept == "converted"


def test_layers_whose_turn_has_not_come_are_watched_with_their_mixers(seen):
    """Else the attention that stands in for them would make the first looks the best."""
    report = converted()
    done = distill(report, BATCHES, imitate_epochs=0, epochs=1, progressive=4)
    assert seen[0].looks[0] == done.held_back["converted"] > 0
    assert done.held_back["distilled"] == min(seen[0].looks.values())


def test_low_rank_terms_that_did_harm_are_not_merged(monkeypatch):
    monkeypatch.setattr(stages.FineTuning, "held_back_loss", lambda self, process: 0.5 if self.done else 0.1)
    report = converted(plan="pom")
    before = bits(report.model)
    distill(report, BATCHES, lora=4, **RUINOUS)
    for name, value in bits(report.model).items():
        torch.testing.assert_close(value, before[name], msg=name)


def test_models_whose_outputs_are_unknown_can_imitate():
    """Nothing but their layers can be compared, so the last stage counts."""

    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Stateful()

        def forward(self, x):
            return str(self.inner(x).shape)

    torch.manual_seed(0)
    report = polymix.convert(Silent().eval(), "pom", input=X[:8], copy=True)
    assert distill(report, BATCHES, imitate_epochs=1, epochs=0).kept == "imitated"


forks = "fork" in multiprocessing.get_all_start_methods() and torch.distributed.is_available()


@pytest.mark.slow
@pytest.mark.skipif(not forks, reason="untested: two processes, which need fork and torch.distributed")
def test_two_processes_keep_the_same_weights():
    torch.manual_seed(0)
    report = converted(Stateful().eval(), polymix.PomConfig(dropout=0.3))
    before = copy.deepcopy(report.model.state_dict())
    done = distill(report, BATCHES, devices=2, **RUINOUS)
    assert done.kept == "converted" and not differing(before, report.model.state_dict())


# Rates


def test_short_trainings_warm_up_in_half_of_their_steps(seen):
    distill(converted(), BATCHES, imitate_epochs=0, epochs=1, learning_rate=1.0, keep="last")
    stage = seen[0]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    schedule, rates = stage.schedule(optimizer), []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4:] == sorted(rates[4:], reverse=True) and rates[-1] == 0
    shares = {count: Fit(None, False, "cpu", 1, "float32").recipe([0] * count, 1, 1e-4, 0.0, 0).warmup for count in (6, 100, 4000)}  # fmt: skip
    assert shares == {6: 0.5, 100: 0.2, 4000: 0.1}


def test_mixers_learn_at_their_own_rate_and_the_rest_at_a_share_of_it(seen):
    report = converted()
    distill(report, BATCHES, imitate_epochs=0, epochs=1, learning_rate=1e-3, rest_rate=0.2)
    mixers = {id(value) for part in report.adapters.values() for value in part.parameters()}
    groups = seen[0].optimizer(report.model).param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(report.model.parameters()))
    for group in groups:
        for value in group["params"]:
            assert group["lr"] == pytest.approx(1e-3 if id(value) in mixers else 2e-4)


# Padding


def test_imitation_counts_real_tokens_alone():
    draw = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(2, 6, 4, generator=draw) for _ in range(2))
    real = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    expected = imitation_loss(ours[real], theirs[real])
    ours[0, 4:], theirs[0, 5] = torch.nan, 1e6
    torch.testing.assert_close(imitation_loss(ours, theirs, real), expected)
    torch.testing.assert_close(imitation_loss(ours[:, :3], theirs[:, :3], real[:, :3]), imitation_loss(ours[:, :3], theirs[:, :3]))  # fmt: skip


@pytest.mark.parametrize("first", [True, False], ids=["batch first", "tokens first"])
def test_padding_does_not_change_what_imitation_minimises(monkeypatch, first):
    """The loss of a padded batch is that of the same sentence alone."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=first)

        def forward(self, x, hidden=None):
            x = x if first else x.transpose(0, 1)
            x = self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
            return (x if first else x.transpose(0, 1)).mean((1, 2))

    torch.manual_seed(0)
    words = torch.randn(1, 5, 16)
    padded = torch.cat((words, torch.full((1, 3, 16), 9.0)), 1)
    hidden = torch.arange(8)[None] >= 5
    report = polymix.convert(Encoder().eval(), "pom", input={"x": words}, copy=True)
    losses = [
        distill(report, [batch], imitate_epochs=1, epochs=0, imitate_lr=1e-12, weight_decay=0.0).imitation[0]
        for batch in ({"x": words}, {"x": padded, "hidden": hidden})
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_loss_that_is_no_number_is_never_the_best(seen, monkeypatch):
    monkeypatch.setattr(HeldBack, "loss", lambda self, model, device: float("nan"))
    assert distill(converted(), BATCHES, imitate_epochs=0, epochs=1).kept == "distilled"
    assert seen[0].kept_step is None and guard.SHARE == 8
