"""polymix generate on two processes: they read a prompt together and the first one writes what one process writes."""

import io
import os
import sys

import pytest
import torch
import torch.distributed as dist

from polymix.errors import OptionError, PolymixError
from tests.models.tiny import fresh
from tests.processes import fork, statuses, torchrun
from tests.workflows.test_generate import VOCAB, saved, sharp

from polymix.workflows.generate import Settings, command, generate, load  # isort: skip

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="untested: two processes, for torch.distributed")
MIXERS = ["pom:decay=2", "local:window=4", "linear", "mamba:state_size=2", "pom:rotary=1d"]
LINES = ["The cat sat on a mat, and the dog saw the cat sit. The dog", "a", "the dog saw the cat", "mat"]


def writes(rank, environment, folder, out, settings):
    """A process of torchrun; the first one alone has the prompts."""
    os.environ.update(environment)
    sys.stdin, sys.stdout = io.StringIO("" if rank else "\n".join(LINES)), io.StringIO()
    assert command(folder, None, settings, lines=True, threads=1, sequence_parallel=2) == 0
    (out / f"{rank}").write_bytes(sys.stdout.getvalue().encode())


@pytest.mark.parametrize("settings", [
    Settings(num=2, max_new_tokens=6, seed=3),
    pytest.param(Settings(temperature=0, max_new_tokens=8), marks=pytest.mark.slow),
    pytest.param(Settings(beams=3, num=2, max_new_tokens=6), marks=pytest.mark.slow)])  # fmt: skip
def test_two_processes_write_what_one_writes(tmp_path, settings):
    folder = saved(tmp_path / "model", sharp(MIXERS, num_layers=len(MIXERS)))
    expected = generate(*load(folder), LINES, settings)
    both = [fork(writes, rank, environment, folder, tmp_path, settings) for rank, environment in enumerate(torchrun(2))]
    assert statuses(both) == [0, 0]
    assert (tmp_path / "0").read_bytes().decode() == "\n---\n".join(expected) + "\n"
    assert (tmp_path / "1").read_bytes() == b"", "both processes wrote"


def states(environment):
    """The caches of two processes against one process's, of rows with padding in front."""
    from polymix.workflows.generate.shared import read_together, share

    os.environ.update(environment)
    torch.manual_seed(0)
    model = fresh(MIXERS, "gpt", vocab_size=VOCAB, num_layers=len(MIXERS)).double().eval()
    ids, mask = torch.randint(VOCAB, (2, 11)), torch.ones(2, 11, dtype=torch.int64)
    mask[0, :7] = 0
    whole = model(ids, attention_mask=mask)
    with read_together(model, ids, mask, 1, share(model)) as known, torch.no_grad():
        last = model(ids[:, -1:], attention_mask=mask, past_key_values=known["past_key_values"])
    worst = (last.logits[:, 0] - whole.logits[:, -1]).abs().max()
    for mine, other in zip(last.past_key_values.layers, whole.past_key_values.layers, strict=True):
        leaves = [torch.utils._pytree.tree_leaves(layer.state) for layer in (mine, other)]
        pairs = [(a.double(), b.double()) for a, b in zip(*leaves, strict=True) if a is not None]
        worst = max(worst, *((a - b).abs().max() for a, b in pairs))
        assert mine.seen == other.seen and mine.real.tolist() == other.real.tolist()
    assert worst < 1e-12, worst


@pytest.mark.slow
def test_the_states_after_a_prompt_are_those_of_one_process():
    assert statuses([fork(states, environment) for environment in torchrun(2)]) == [0, 0]


@pytest.mark.parametrize(("mixers", "options", "what"), [
    (["pom", "softmax"], {}, "softmax"), (["hyena:filter=explicit:length=8"], {}, "hyena"), (["pom"], {"short_conv": 3}, "short_conv"),
])  # fmt: skip
def test_models_that_cannot_read_together_are_refused_before_the_others_are_waited_for(
    tmp_path, monkeypatch, mixers, options, what
):
    folder = saved(tmp_path / "model", fresh(mixers, "gpt", vocab_size=VOCAB, **options))
    with pytest.raises(OptionError, match="with 1 process"):
        command(folder, "a", Settings(), sequence_parallel=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PolymixError, match=what):
        command(folder, "a", Settings(), sequence_parallel=2)
