"""`polymix bench --parallel`: attention by ring and all-to-all is attention, and rows say what was counted."""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist

from polymix import create_mixer
from polymix.errors import OptionError
from polymix.mixers.spec import parse_mixers
from polymix.parallel.collectives import Processes
from polymix.workflows.bench.attention import all_to_all, ring
from polymix.workflows.bench.parallel import HEADINGS, ParallelResults, ParallelSettings, bench_parallel, table
from tests.processes import fork, free_port, statuses

SETTINGS = ParallelSettings("", 2, (16,), 12, 2, 1e-3, 10.0, 1.0)
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="untested: two processes, for torch.distributed")


def work(rank, world, port, out):
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    report = {}
    for way in (ring, all_to_all):
        torch.manual_seed(0)
        mixer = create_mixer("softmax", 12, heads=3 if way is ring else 4, dtype=torch.float64)
        x, goal = torch.randn(2, 2, 8, 12, dtype=torch.float64)
        whole = x.clone().requires_grad_()
        expected = mixer(whole)
        (expected * goal).sum().backward()
        mine = slice(4 * rank, 4 * rank + 4)
        part = x[:, mine].clone().requires_grad_()
        y = way(mixer, Processes(dist.group.WORLD), part)
        (y * goal[:, mine]).sum().backward()
        differences = y - expected[:, mine], part.grad - whole.grad[:, mine]
        report[way.__name__] = max(d.abs().max().item() for d in differences)
    (out / f"{rank}.json").write_text(json.dumps(report))


def test_the_attention_that_mixers_are_compared_with_is_exact(tmp_path):
    port = free_port()
    assert statuses([fork(work, rank, 2, port, tmp_path) for rank in range(2)]) == [0, 0]
    for rank in range(2):
        report = json.loads((tmp_path / f"{rank}.json").read_text())
        assert max(report.values()) < 1e-12, report


class Silent:
    def start(self, what, total):
        return lambda *done: None


@pytest.mark.slow
def test_rows_are_those_of_the_model(tmp_path):
    content = bench_parallel(SETTINGS, parse_mixers("pom,poly_sa,xca,softmax"), tmp_path, Silent()).content
    assert ParallelResults.load(tmp_path / "results.json") == content and content["finished"]
    rows = {(row["mixer"], row["way"]): row for row in content["rows"]}
    assert [way for _, way in rows] == [
        "one process", "sum", "one process", "sum", "one process", "shared", "one process", "ring", "all-to-all", "gather"]  # fmt: skip
    assert "several processes" in rows["xca", "shared"]["stopped"]
    for (_, way), row in rows.items():
        if row["stopped"] is None:
            agreed = 0 if way in ("one process", "ring", "all-to-all") else 4096
            assert 0 <= row["sent_forward"] - row["model_forward"] <= agreed, way
            assert row["sent_backward"] == row["model_backward"] and row["seconds"] > 0
    assert {len(line) for line in table(content["rows"])} == {len(HEADINGS)}


def test_what_cannot_be_measured_is_refused(tmp_path):
    for change in ({"processes": 1}, {"dim": 0}):
        settings = ParallelSettings(**{**vars(SETTINGS), **change})
        with pytest.raises(OptionError):
            bench_parallel(settings, {}, tmp_path, partial(Silent))
    assert not list(tmp_path.iterdir()), "something began"
