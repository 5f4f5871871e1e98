"""A read-only disk, a full one, a closed pipe, a narrow terminal, and Ctrl-C: one line each, and no traceback."""

import errno
import os
import subprocess
import sys
from unittest.mock import patch

import pytest

from polymix.cli.shared import bars
from tests.attacks.command import run, tree
from tests.attacks.test_command_line import CONVERT, TRAIN
from tests.helpers import slow_but

VERBS = {
    "compare": ["compare", "--quick", "--mixers", "pom", "--threads", "1"],
    "bench": ["bench", "--quick", "--mixers", "pom", "--tokens", "16", "--threads", "1"],
    "convert": [*CONVERT, "--threads", "1"],
    "search": ["search", "--model", "model.py:vit", "--data", "digits", "--steps", "2", "--threads", "1",
               "--mixers", "pom,keep", "--budget", "1"],
    "train": [*TRAIN, "--threads", "1"],
    "lens": ["lens", "pom", "dim=2"],
}  # fmt: skip


def failing(number):
    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def place(material, monkeypatch):
    monkeypatch.chdir(material)
    before = tree(material)
    yield material
    assert tree(material) == before


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EDQUOT])
@pytest.mark.parametrize("verb", [*VERBS, "recommend"])
def test_a_disk_that_takes_nothing_is_seen_before_the_work(place, verb, number):
    command = ["recommend", "--shape", "16x8", "--out", "new/answer.json"] if verb == "recommend" else None
    with patch("polymix.files.tempfile.TemporaryFile", failing(number)):
        outcome = run(command or [*VERBS[verb], "--out", "new"])
    assert outcome.refused and os.strerror(number) in outcome.err, outcome


@pytest.mark.parametrize("verb", ["compare", "bench", "convert", "search", "train"])
def test_a_disk_that_is_full_later_is_one_line_too(material, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(material)
    with patch("polymix.files.tempfile.mkstemp", failing(errno.ENOSPC)):
        outcome = run([*VERBS[verb], "--out", str(tmp_path / "new")])
    assert outcome.refused and "No space left on device" in outcome.err, outcome


@pytest.mark.parametrize("there", [True, False])
def test_ctrl_c_promises_only_what_is_there(tmp_path, capsys, there):
    import typer
    from rich.console import Console

    if there:
        (tmp_path / "results.json").write_text("{}")
    with pytest.raises(typer.Exit) as stop, bars(Console(), tmp_path):
        raise KeyboardInterrupt
    said = capsys.readouterr().out
    assert (
        stop.value.exit_code == 130
        and ("--resume" in said) is there
        and ("run the same command again" in said) is not there
    )


@pytest.mark.parametrize("verb", ["compare", "bench", "recommend", "show"])
def test_ctrl_c_before_anything_is_written(place, verb):
    command = {**VERBS, "recommend": ["recommend", "--shape", "16x8"], "show": ["show", "pom"]}[verb]
    with patch("polymix.mixers.spec.config_class", side_effect=KeyboardInterrupt):
        outcome = run(command)
    assert outcome.status == 130 and "--resume" not in outcome.out


@pytest.mark.parametrize(
    ("where", "status"), slow_but([("> /dev/full", 2)], [("> /dev/full", 2), ("| head -n 1", 0), (">&-", None)])
)
def test_standard_output_that_takes_nothing(where, status):
    command = f"{sys.executable} -m polymix list {where}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env={**os.environ, "COLUMNS": "60"})
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1 and (status is None or done.returncode == status), done
