"""Low-rank fine-tuning: it reaches every kind of mixer, trains nothing else, and is merged without a trace."""

import pytest
import torch

import polymix
from polymix.errors import OptionError
from polymix.train.distill import distill
from polymix.train.distill.lora import low_rank
from tests.train.distilled import BATCHES, X, converted, vit

MIXERS = ["padre", "pom", "qt", "poly_sa", "poly_nl", "linear", "hydra", "efficient", "performer"]


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_term_is_used_and_merged(mixer):
    """Mixers hand their weights to kernels: a term that a module adds in its own forward would never be called."""
    report = converted(plan=mixer)
    before = {name: value.clone() for name, value in report.model.state_dict().items()}
    plain = report.model(X[:4])
    names = {name for name, _ in report.model.named_parameters()}
    with low_rank(report.model, report.adapters, 2, 0):
        torch.testing.assert_close(report.model(X[:4]), plain, msg="B is zero at the start")
        terms = [(name, p) for name, p in report.model.named_parameters() if p.requires_grad]
        assert terms and all(".parametrizations." in name for name, _ in terms)
        report.model(X[:4]).square().sum().backward()
        for name, p in terms:
            if name.endswith("second"):
                assert p.grad is not None and p.grad.abs().sum() > 0, f"{name} has no effect"
        with torch.no_grad():
            for name, p in terms:
                if name.endswith("second"):
                    p.normal_()
        changed = report.model(X[:4])
    assert (changed - plain).abs().max() > 1e-3
    torch.testing.assert_close(report.model(X[:4]), changed, atol=1e-4, rtol=1e-4)
    after = report.model.state_dict()
    assert after.keys() == before.keys() and {name for name, _ in report.model.named_parameters()} == names
    assert all(p.requires_grad for p in report.model.parameters())
    rank = {torch.linalg.matrix_rank((after[name] - value).double(), atol=1e-4).item() for name, value in before.items() if value.ndim == 2 and not torch.equal(after[name], value)}  # fmt: skip
    assert rank == {2}


def test_distilling_with_it_learns_and_can_be_undone():
    model = vit()
    host = {name: value.clone() for name, value in model.state_dict().items()}
    report = polymix.convert(model, "qt", input=X[:8])
    imitated = polymix.distill(report, BATCHES, imitate_epochs=0, epochs=3, learning_rate=5e-3, lora=4)
    assert imitated.fine_tuning[-1] < imitated.fine_tuning[0]
    weights = {name: value for name, value in report.model.state_dict().items() if ".mixer." not in name}
    assert all(torch.equal(value, host[name]) for name, value in weights.items())
    undone = report.undo().state_dict()
    assert all(torch.equal(value, host[name]) for name, value in undone.items())


def test_a_resumed_run_has_the_same_bits(tmp_path, monkeypatch):
    from polymix.train.distill.stages import FineTuning

    whole = converted()
    distill(whole, BATCHES, imitate_epochs=0, epochs=2, lora=3, out=tmp_path / "whole")
    report, own, batches = converted(), FineTuning.loss, []

    def stop(stage, model, batch):
        batches.append(batch)
        if len(batches) > stage.epoch_steps:
            raise RuntimeError("stopped")
        return own(stage, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(FineTuning, "loss", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            distill(report, BATCHES, imitate_epochs=0, epochs=2, lora=3, out=tmp_path / "part")
    report = converted()
    with pytest.raises(polymix.errors.ResultsError, match="lora"):
        distill(converted(), BATCHES, imitate_epochs=0, epochs=2, lora=2, out=tmp_path / "part", resume=True)
    distill(report, BATCHES, imitate_epochs=0, epochs=2, lora=3, out=tmp_path / "part", resume=True)
    theirs = whole.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in report.model.state_dict().items())


@pytest.mark.parametrize(("options", "named"), [({"lora": 0}, "lora"), ({"lora": 2.0}, "lora"), ({"lora": 4, "epochs": 0}, "epochs"), ({"lora": 500}, "larger")])  # fmt: skip
def test_what_cannot_be(options, named):
    report = converted()
    before = {name: value.clone() for name, value in report.model.state_dict().items()}
    with pytest.raises(OptionError, match=named):
        distill(report, BATCHES, **options)
    assert not report.accuracy and all(torch.equal(v, before[k]) for k, v in report.model.state_dict().items())
