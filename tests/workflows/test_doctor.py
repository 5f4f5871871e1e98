"""polymix doctor says what is there, and advises where something is amiss, and only there."""

import json

import pytest
import torch
from typer.testing import CliRunner

from polymix.cli import _app, main
from polymix.extras import EXTRAS
from polymix.ops.native import compile, library
from polymix.workflows import doctor


def finding(topic):
    (found,) = (each for each in doctor.examine() if each.topic == topic)
    return found


@pytest.mark.parametrize(("topic", "change", "state", "advice"), [
    ("C kernels", lambda p: p.setattr(library, "why_not", lambda: "not built"), "not built", "Run `polymix build-kernels`"),
    ("C kernels", lambda p: (p.setattr(library, "why_not", lambda: "not built"), p.setattr(compile, "compilers", list)),
     "not built", "Install gcc"),
    ("C kernels", lambda p: p.setenv("POLYMIX_NATIVE", "0"), "POLYMIX_NATIVE=0 is set", "Unset POLYMIX_NATIVE"),
    ("C kernels", lambda p: (p.setattr(library, "processor_flags", frozenset), p.setattr(library, "why_not", lambda: "need x")),
     "need x", ""),
    ("processor", lambda p: p.setattr(library, "processor_flags", lambda: frozenset({"amx_bf16"})), "bfloat16 products: AMX", ""),
    ("processor", lambda p: p.setattr(library, "processor_flags", frozenset), "bfloat16 products: none", ""),
    ("threads", lambda p: p.setattr(torch, "get_num_threads", lambda: 10_000), "10000 for", "more threads than cores"),
    ("threads", lambda p: (p.setattr(torch, "get_num_threads", lambda: 1), p.setenv("OMP_NUM_THREADS", "1"),
                           p.setattr(doctor.cpu_threads, "is_busy", lambda: True)), "(OMP_NUM_THREADS=1)", ""),
    ("threads", lambda p: (p.setattr(torch, "get_num_threads", lambda: 1), p.setenv("OMP_NUM_THREADS", "1"),
                           p.setattr(doctor.cpu_threads, "is_busy", lambda: False),
                           p.setattr(doctor.os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)),
     "1 for 3 cores (OMP_NUM_THREADS=1)", "use all 3 cores"),
    ("GPU", lambda p: p.setattr(torch.cuda, "is_available", bool), "none that PyTorch can use", ""),
    ("GPU", lambda p: (p.setattr(torch.cuda, "is_available", bool), p.setattr(torch.version, "cuda", None),
                       p.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")),
     "built for the CPU alone", "CUDA build"),
    ("GPU", lambda p: (p.setattr(torch.cuda, "is_available", lambda: True), p.setattr(torch.cuda, "get_device_name", lambda: "H100"),
                       p.setattr(doctor, "_version", lambda name: None)), "H100, no Triton", "Install triton"),
    ("extra vision", lambda p: p.setattr(doctor, "_version", lambda name: None), "missing: timm", '".[vision]"'),
    ("torchvision", lambda p: p.setattr(doctor, "_version", lambda name: None), "not installed", ""),
    ("torchvision", lambda p: (p.setattr(doctor, "_version", lambda name: "0.1"), p.setattr(doctor.compat, "cure_torchvision", bool)),
     "0.1", ""),
    ("torchvision", lambda p: (p.setattr(doctor, "_version", lambda name: "0.1"),
                               p.setattr(torch.version, "cuda", None),
                               p.setattr(doctor.compat, "cure_torchvision", lambda: 1 / 0)), "cannot be imported", "torchvision==0.1 --index-url"),
])  # fmt: skip
def test_each_finding_and_its_advice(monkeypatch, topic, change, state, advice):
    change(monkeypatch)
    line = finding(topic)
    assert state in line.state
    assert advice in line.advice if advice else not line.advice


def test_the_command_prints_every_finding():
    result = CliRunner().invoke(_app(), ["doctor"])
    assert result.exit_code == 0
    for each in doctor.examine():
        assert f"{each.topic}: {each.state}" in result.output


def test_as_json():
    result = CliRunner().invoke(_app(), ["doctor", "--json"])
    content = json.loads(result.output)
    assert content["machine"]["torch"] == torch.__version__
    topics = {each["topic"] for each in content["findings"]}
    assert topics >= {"processor", "C kernels", "threads", "GPU", "torchvision"} | {f"extra {name}" for name in EXTRAS}


def test_every_extra_has_its_line():
    """Seven of sixteen had one, so that nobody saw what the others lack."""
    extras = [each.topic for each in doctor.examine() if each.topic.startswith("extra ")]
    assert extras == [f"extra {name}" for name in EXTRAS]


def test_build_kernels_says_where_they_are(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compile, "build", lambda: [tmp_path / "kernels.so"])
    with pytest.raises(SystemExit) as status:
        main(["build-kernels"])
    assert status.value.code == 0 and str(tmp_path / "kernels.so") in capsys.readouterr().out


def test_build_kernels_without_a_compiler_is_one_line(monkeypatch, capsys):
    def fail():
        raise compile.CompileError("no C compiler was found: install gcc, or set CC")

    monkeypatch.setattr(compile, "build", fail)
    with pytest.raises(SystemExit) as status:
        main(["build-kernels"])
    assert status.value.code == 1
    assert capsys.readouterr().err == (
        "polymix: the kernels could not be built: no C compiler was found: install gcc, or set CC\n"
    )
