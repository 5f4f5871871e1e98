"""benchmarks/gpu.py without a GPU: what it refuses, that it goes on where it stopped, and the arithmetic behind a verdict."""

import importlib
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="untested: the script for a GPU, for which Triton is needed")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PASSED = [
    {"what": f"{name}/test_triton.py", "said": "1 passed", "failed": None} for name in ("padre", "pom", "pooled", "qt")
]


def load(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module(name)


gpu, shared, ops, mixers, models, others, report = (
    load(name)
    for name in ("gpu", *(f"gpu_steps.{part}" for part in ("bench", "ops", "mixers", "models", "others", "report")))
)


@pytest.fixture
def dry(tmp_path, monkeypatch):
    """A dry run of the ceilings alone, its tests taken as passed."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # as the script sets it: to be what it was afterwards
    monkeypatch.setitem(gpu.JOBS, "tests", lambda bench: iter([("tests", lambda: PASSED)]))
    path = tmp_path / "gpu.json"

    def run(*more):
        status = gpu.main(["--device", "cpu", "--dry-run", "--only", "ceilings", "--out", str(path), *more])
        return status, json.loads(path.read_text())

    return run


@pytest.fixture
def bench(tmp_path):
    content = shared.begin(None, shared.DRY, {"gpu": None}, fresh=True)
    content["steps"]["tests"] = [dict(row) for row in PASSED]
    content["steps"]["ceilings"] = [
        {"what": "copy", "bytes_per_second": 1e9},
        *({"what": name, "flops_per_second": 1e12} for name in ("float32", "tf32")),
    ]
    return shared.Bench("cpu", shared.DRY, tmp_path / "a.json", content, float("inf"), True, shared.Clock("cpu"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--device", "cpu"], "with --dry-run"),
        (["--device", "cpu", "--dry-run"], "--out"),
        (["--only", "tests,opps"], "opps"),
        (["--budget", "0"], "--budget"),
        (["--device", "cpu", "--dry-run", "--out", "x", "--pom", "nowhere"], "pom_triton.py"),
    ],
)
def test_what_it_cannot_do_is_one_line_and_status_2(given, said, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1" if "cpu" in given else "0")
    assert gpu.main(given) == 2, "a wrong argument did not end the script"
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, f"the message does not name {said} in one line"


@pytest.mark.skipif(torch.cuda.is_available(), reason="untested: the script without a GPU, since there is one")
def test_without_a_gpu_it_says_so_and_measures_nothing(capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert gpu.main([]) == 2, "it went on without a GPU"
    assert "--device" in capsys.readouterr().err


def test_the_interpreter_is_refused_on_a_gpu(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert gpu.main(["--device", "cuda"]) == 2, "the interpreter would be timed as a GPU"
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def test_a_second_call_repeats_nothing_that_is_done(dry, monkeypatch, capsys):
    status, first = dry()
    assert status == 0 and {row["what"] for row in first["steps"]["ceilings"]} >= {"copy", "float32", "bfloat16"}
    assert not first["finished"], "a part of the steps passes for all"
    assert "dry run" in capsys.readouterr().out, "a dry run's times are not marked as meaningless"
    for job in ("_copy", "_product"):
        monkeypatch.setattr(gpu.ceilings, job, lambda *a: pytest.fail("measured again"))
    assert dry()[1]["steps"] == first["steps"], "what an earlier call measured was lost or measured again"


def test_numbers_of_other_code_are_not_continued(dry, monkeypatch, capsys):
    dry()
    monkeypatch.setattr(shared, "code", lambda: "other")
    assert dry()[0] == 2 and "code of the settings differ" in capsys.readouterr().err, "two codes' numbers in one file"
    assert dry("--fresh")[1]["settings"]["code"] == "other", "--fresh did not begin anew"


def test_when_time_is_up_nothing_more_begins(bench):
    bench.budget = 0.0
    assert not bench.do("ceilings", iter([("a", lambda: pytest.fail("a job began after the time was up"))]))
    assert bench.content["done"] == []


@pytest.mark.parametrize("name", ops.CASES)
def test_every_op_runs_as_it_is_timed(bench, name):
    case = ops.CASES[name]
    tensors = ops.prepared(bench, case, "float32", 2, 16)
    (out,) = ops.call(case, "forward", 16, tensors, impl="eager")
    _, *grads = ops.call(case, "training", 16, tensors, torch.ones_like(out), "eager")
    assert [g.shape for g in grads] == [t.shape for t in tensors], "an input has no gradient, or one of another shape"
    assert case.flops(12, 3) > 0


def test_an_op_that_computes_wrong_is_not_timed(bench, monkeypatch):
    monkeypatch.setattr(ops, "call", lambda *a, **kw: pytest.fail("it ran"))
    failed = {"op": "pom_pool", "dtype": "float32", "pass": "check", "failed": "off by 1"}
    bench.content["steps"]["ops"] = [failed]
    (row,) = ops._measure(bench, "pom_pool", "float32", "forward", 1, 16)
    assert row["seconds"] is None and row["stopped"] == "off by 1", "a speed for an op that computes wrong"
    bench.content["steps"]["tests"][1]["failed"] = "1 failed"
    (row,) = ops._check(bench, "pom_pool", "float32")
    assert "pom/test_triton.py" in row["failed"], "an op passes whose tests fail"


def test_an_op_whose_tests_have_no_verdict_waits(bench):
    bench.content["steps"]["tests"] = []
    assert not list(ops.jobs(bench)), "an op is measured before its tests have run"


def test_the_share_is_bytes_over_time_over_the_copy(bench, monkeypatch):
    monkeypatch.setattr(ops, "FROM", 16)
    monkeypatch.setattr(ops, "call", lambda case, pass_, n, tensors, *a: [case.run("eager", n, *tensors)])
    monkeypatch.setattr(shared.Clock, "__call__", lambda self, calls, s: {k: shared.Timing((1e-5,)) for k in calls})
    bench.content["steps"]["ops"] = [{"op": "pom_pool", "dtype": "float32", "pass": "check", "failed": None}]
    (row,) = ops._measure(bench, "pom_pool", "float32", "forward", 1, 16)
    moved = 4 * (16 * 24 + 24 * 2 + 24)  # h, alpha and the sums: 12 channels, expanded twice
    assert row["bytes"] == moved, "other bytes than those of the inputs and the output"
    assert row["byte_share"] == pytest.approx(moved / 1e-5 / 1e9)
    assert (row["bound"], row["verdict"]) == ("memory", "FAIL"), "18 % of the copy passes for 80 %"
    (row,) = ops._measure(bench, "pom_pool", "float32", "training", 1, 16)
    assert row["bytes"] == 4 * (3 * (16 * 24 + 24 * 2) + 2 * 24), "training reads inputs twice, and writes gradients"


def test_a_call_that_would_take_too_long_is_left_out():
    fast, slow = ({"tokens": 10, "seconds": s, "stopped": None} for s in (0.01, 1.0))
    assert shared.foreseen([fast], 40, 2) is None
    assert "16 s" in shared.foreseen([slow], 40, 2), "attention's quadratic growth is not foreseen"
    assert shared.foreseen([{**slow, "stopped": "out of memory"}], 40, 1) == "out of memory"


def test_attention_is_its_best_backend_and_the_papers_is_unfused():
    rows = [
        {"mixer": m, "impl": i, "seconds": s, "wall": s, "dtype": "float32", "stopped": None}
        for m, i, s in (("softmax", "math", 24.0), ("softmax", "flash", 4.0), ("padre-2", "triton", 2.0))
    ] + [{"mixer": "softmax", "impl": "cudnn", "seconds": None, "dtype": "float32", "stopped": "not here"}]
    ours = mixers._with_ratios(rows)[2]
    assert (ours["attention"], ours["ratio"], ours["unfused_ratio"]) == ("flash", 2.0, 12.0)
    assert report.paper_ratios(rows) == (12.0, None), "the paper's ratio is not over unfused float32 attention"


def test_others_kernels_are_compared_only_where_they_agree(bench):
    row = {"what": "PoM authors, mean", "dtype": "float32", "pass": "training", "batch": 1, "tokens": 16}

    def mine(h, alpha):
        return (h * alpha[:, 0]).mean(1) + 0 * alpha.sum()

    (same,) = others._measure(bench, row, "pom/test_triton.py", mine, lambda h, alpha: mine(h, alpha))
    assert same["ratio"] > 0 and same["verdict"] in ("PASS", "FAIL")
    (other,) = others._measure(bench, row, "pom/test_triton.py", mine, lambda h, alpha: 2 * mine(h, alpha))
    assert other["seconds"] is None and "something else" in other["stopped"], "different work was compared"
    assert len(others.missing(bench)) >= 1, "that there is no clone of the authors' code goes unsaid"


def test_a_job_that_raises_is_reported_and_the_others_run(bench):
    def broken():
        raise RuntimeError("no such kernel")

    def listed():
        yield "a", broken
        yield "b", lambda: [{"what": "b"}]
        raise KeyError("c")

    assert not bench.do("ceilings", listed()), "a step whose job failed passes for finished"
    saved = json.loads(bench.path.read_text())
    assert {"what": "b"} in saved["steps"]["ceilings"], "a failing job ended the step"
    assert saved["done"] == ["b"], "a job that failed is not tried again"
    assert saved["errors"] == {"a": "RuntimeError: no such kernel", "ceilings": "KeyError: 'c'"}
    assert bench.do("ceilings", iter([("a", lambda: [{"what": "a"}])]))
    assert json.loads(bench.path.read_text())["errors"] == {}, "a job that ran is still reported as failed"


def test_whole_models_run_with_and_without_attention(bench):
    for host in models.HOSTS:
        rows = models._measure(bench, host, "float32", 1)
        assert [row["mixer"] for row in rows] == ["attention", *models.HOSTS[host][1]]
        assert all(row["seconds"] and row["ratio"] for row in rows), [row["stopped"] for row in rows]
    assert "gpt2 float32 batch 1 qt" in report._models(rows)[0]


def test_arithmetic_on_tensor_cores_is_judged_by_the_products(bench, monkeypatch):
    monkeypatch.setattr(ops, "FROM", 16)
    bench.content["steps"]["ceilings"][1:] = [
        {"what": name, "flops_per_second": 1e3} for name in ("float32", "tf32")]  # fmt: skip
    bench.content["steps"]["ops"] = [{"op": "qt_causal compact", "dtype": "bfloat16", "pass": "check", "failed": None}]
    name = next(name for name, case in ops.CASES.items() if case.tensor_cores)
    bench.content["steps"]["ops"][0]["op"] = name
    monkeypatch.setattr(ops, "call", lambda case, pass_, n, tensors, *more: [tensors[0]])
    (row,) = ops._measure(bench, name, "bfloat16", "forward", 1, 16)
    assert (row["bound"], row["verdict"]) == ("compute", "PASS" if row["flop_share"] >= 0.6 else "FAIL")
