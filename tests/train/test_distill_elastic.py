"""`polymix.distill` that replaces one layer after another in the processes of torchrun, killed and resumed."""

import os
import signal

import pytest
import torch

import polymix
from polymix.errors import OptionError
from polymix.train.distill import distill, stages
from tests.processes import fork, statuses, torchrun
from tests.train.distilled import BATCHES, bits, converted, differing

HOW = {"imitate_epochs": 0, "epochs": 2, "progressive": 5, "blocks": 0.1}  # steps of two processes: 4 an epoch
two = pytest.mark.skipif(not torch.distributed.is_available(), reason="untested: two processes, for torch.distributed")


def run(result, out, environment, dies_at):
    """One process: distil, and leave its weights and losses in a file of its own."""
    os.environ.update(environment)
    own, steps = stages.FineTuning.loss, []

    def loss(self, model, batch):
        steps.append(batch)
        if dies_at is not None and len(steps) > dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(self, model, batch)

    stages.FineTuning.loss = loss
    report = converted(plan=polymix.PomConfig())
    resume = out is not None and (out / "fine-tuning" / "last.ckpt").exists()
    done = distill(report, BATCHES, val=BATCHES, out=out, resume=resume, **HOW)
    content = {"weights": bits(report.model), "losses": done.fine_tuning, "schedule": report.schedule}
    torch.save(content, f"{result}-{environment['RANK']}")


def start(result, out=None, dies_at=None):
    """The exit statuses of two processes as torchrun starts them."""
    return statuses([fork(run, result, out, environment, dies_at) for environment in torchrun(2)])


def outcomes(result):
    return [torch.load(f"{result}-{rank}", weights_only=True) for rank in range(2)]


@two
@pytest.mark.slow
def test_two_processes_replace_the_same_layers_and_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    """It is killed in its sixth step, and the checkpoint is of the fourth, before the first layer's turn."""
    assert start(tmp_path / "whole") == [0, 0]
    assert start(tmp_path / "killed", tmp_path / "out", dies_at=5) == [-signal.SIGKILL] * 2
    assert start(tmp_path / "again", tmp_path / "out") == [0, 0]
    one, *others = outcomes(tmp_path / "whole") + outcomes(tmp_path / "again")
    for other in others:
        assert other["losses"] == one["losses"] and other["schedule"] == one["schedule"]
        assert not differing(other["weights"], one["weights"])


@two
@pytest.mark.slow
def test_two_processes_learn_as_one_with_their_batches_together():
    """Gradients of layers that wait are nobody's: neither process may hang on them, or decay their weights."""
    pairs = [(torch.cat((a, c)), torch.cat((b, d))) for (a, b), (c, d) in zip(BATCHES[::2], BATCHES[1::2], strict=True)]
    one, both = (converted(plan=polymix.PomConfig()) for _ in range(2))
    how = {**HOW, "blocks": 0.0, "keep": "last"}  # else other samples are held back of other batches
    expected = distill(one, pairs, **how)
    done = distill(both, BATCHES, devices=2, **how)
    assert done.fine_tuning == pytest.approx(expected.fine_tuning, rel=1e-4) and one.schedule == both.schedule
    for name, value in bits(one.model).items():
        torch.testing.assert_close(bits(both.model)[name], value, rtol=1e-4, atol=1e-6, msg=f"{name} is another")


def test_the_command_is_refused_in_several_processes(tmp_path, monkeypatch):
    """Each of them would write the same folder, and find the other's results in it."""
    from polymix.workflows.convert.run import run as command
    from polymix.workflows.convert.settings import Settings

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match=r"2 processes.*polymix\.distill"):
        command(Settings(model="timm/test_vit", plan="pom"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
