"""CPU threads: what is free, by affinity and cgroup; a busy machine; how long threads spin, set before PyTorch loads."""

import os
import subprocess
import sys

import pytest

from polymix import threads
from polymix.cli.shared import thread_count
from polymix.workflows import doctor

UNIFIED, OLD = "0::/box/inner\n", "3:cpuset:/\n2:cpu,cpuacct:/box\n0::/\n"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that says what the machine has: cores, affinity, load, and the files of its cgroups."""
    monkeypatch.setattr(threads, "_CGROUPS", tmp_path)
    monkeypatch.setattr(threads, "_MEMBERSHIP", tmp_path / "membership")
    for name in ("OMP_NUM_THREADS", *threads.CHOICES):
        monkeypatch.delenv(name, raising=False)

    def patch(cores=8, affinity=8, load=0.0, **files):
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_us", "#").replace("cpu_", "cpu.").replace("#", "_us")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return patch


@pytest.mark.parametrize(("files", "quota", "cores"), [
    ({}, None, 8),
    ({"membership": UNIFIED}, None, 8),
    ({"membership": UNIFIED, "box__inner__cpu_max": "max 100000\n"}, None, 8),
    ({"membership": UNIFIED, "box__inner__cpu_max": "250000 100000\n"}, 2.5, 2),
    ({"membership": UNIFIED, "box__inner__cpu_max": "max 100000\n", "box__cpu_max": "50000 100000\n"}, 0.5, 1),
    ({"membership": "0::/the/host's/path\n", "cpu_max": "300000 100000\n"}, 3.0, 3),  # as in a container
    ({"membership": UNIFIED, "cpu_max": "nonsense\n"}, None, 8),
    ({"membership": UNIFIED, "cpu_max": "1600000 100000\n"}, 16.0, 8),
    ({"membership": OLD, "cpu,cpuacct__box__cpu_cfs_quota_us": "-1\n", "cpu,cpuacct__box__cpu_cfs_period_us": "100000\n"},
     None, 8),
    ({"membership": OLD, "cpu,cpuacct__box__cpu_cfs_quota_us": "400000\n",
      "cpu,cpuacct__box__cpu_cfs_period_us": "100000\n"}, 4.0, 4),
])  # fmt: skip
def test_cores_are_what_the_cgroups_leave(machine, files, quota, cores):
    """In a container of two cores of 64 there were 64 threads, which the kernel stops for most of every period."""
    machine(**files)
    assert threads.quota() == quota
    assert threads.cores() == thread_count(None) == cores


def test_cores_are_what_affinity_leaves(machine):
    machine(cores=8, affinity=3)
    assert threads.cores() == 3


@pytest.mark.parametrize(("cores", "affinity", "load", "share"), [
    (2, 2, 3.2, 1), (8, 8, 10.0, 3), (64, 64, 80.0, 28), (64, 8, 80.0, 3), (64, 1, 200.0, 1), (4, 4, 4.9, 4),
])  # fmt: skip
def test_a_busy_machine_leaves_a_fair_share_of_the_threads(machine, cores, affinity, load, share):
    """Two threads beside three other programs trained at a fifth of their share, where one thread keeps its own."""
    machine(cores=cores, affinity=affinity, load=load)
    assert thread_count(None) == share


def test_one_line_on_a_busy_machine_and_only_where_threads_were_not_chosen(machine, monkeypatch, capsys):
    machine(cores=2, affinity=2, load=3.2)
    assert thread_count(None) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "polymix: The machine is busy: 3.2 programs run or wait for 2 cores. Commands use 1 of 2 threads"
    )
    assert "--threads" in said and said.count("\n") == 1
    assert thread_count(2) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert thread_count(None) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("cores", "affinity", "load"), [(2, 2, 2.1), (2, 1, 9.0), (8, 8, 4.0)])
def test_no_warning_after_one_s_own_command_or_on_one_core(machine, capsys, cores, affinity, load):
    machine(cores=cores, affinity=affinity, load=load)
    assert thread_count(None) == affinity
    assert capsys.readouterr().err == ""


def test_doctor_names_what_threads_share(machine, monkeypatch):
    machine(cores=2, affinity=2, load=3.2, membership=UNIFIED, cpu_max="150000 100000\n")
    monkeypatch.setattr(threads, "_prepared", False)
    found = doctor._cores()
    expected = f"GOMP_SPINCOUNT is not set; the commands set {threads.SPIN_COUNT}, or 1000 on a busy machine"
    assert found.state == f"2 of the machine, 2 by affinity, a cgroup quota of 1.5; load 3.2; {expected}"
    assert found.advice == "", "on one core there is nothing to choose"
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    machine(cores=2, affinity=2, load=3.2, cpu_max="max 100000\n")
    found = doctor._cores()
    assert found.state == "2 of the machine, 2 by affinity, no cgroup quota; load 3.2; OMP_WAIT_POLICY=passive"
    assert "use 1 of 2 threads" in found.advice


@pytest.mark.parametrize(("load", "spins"), [(0.3, threads.SPIN_COUNT), (9.0, threads.BUSY_SPIN_COUNT)])
def test_nothing_is_set_where_pytorch_is_loaded_already(machine, monkeypatch, load, spins):
    machine(cores=2, load=load)
    environment = {}
    threads.prepare(environment)
    assert environment == {}, "here it is loaded: the variable would only reach other programs"
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(threads, "_prepared", False)
    threads.prepare(environment)
    assert environment == {"GOMP_SPINCOUNT": str(spins)}, "on a busy machine threads sleep earlier"


WATCH = """
import os, sys
os.getloadavg = lambda: (0.0, 0.0, 0.0)

class Watch:  # the environment at the moment in which PyTorch is first looked for
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            print("seen", os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))

sys.meta_path.insert(0, Watch())
from polymix.cli import main
main(["doctor", "--json"])
"""


@pytest.mark.parametrize(("stated", "seen"), [
    ({}, f"{threads.SPIN_COUNT} None"), pytest.param({"GOMP_SPINCOUNT": "7"}, "7 None", marks=pytest.mark.slow),
    pytest.param({"OMP_WAIT_POLICY": "active"}, "None active", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_command_sets_it_before_pytorch_loads_and_leaves_the_user_s_own(stated, seen):
    """libgomp reads it when it is loaded, and never again."""
    environment = {name: value for name, value in os.environ.items() if name not in threads.CHOICES} | stated
    done = subprocess.run([sys.executable, "-c", WATCH], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"seen {seen}"
    assert ("set by polymix" in done.stdout) == (not stated)
