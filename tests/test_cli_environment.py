"""Commands and their surroundings: the environment's threads, outputs that are not UTF-8, paths that are not there."""

import os
import subprocess
import sys

import pytest
import torch

import polymix
from polymix.cli import main
from polymix.cli.shared import thread_count
from polymix.errors import UnknownNameError, UnknownOptionError
from polymix.mixers.spec import parse_mixer
from polymix.threads import cores


@pytest.mark.parametrize(("stated", "count"), [("1", 1), ("3", 3), ("4,2", 4), ("", None), ("many", None), ("0", None)])
def test_threads_are_the_environment_s_unless_they_are_given(monkeypatch, stated, count):
    """torchrun sets OMP_NUM_THREADS=1 for its processes, which then do not take all cores each."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)  # a busy machine leaves fewer
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert thread_count(None) == (count or cores())
    assert thread_count(2) == 2


@pytest.mark.slow
def test_an_output_that_is_not_utf_8_is_no_traceback():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "polymix", "list"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr == ""
    assert "q?k/?d truncated" in " ".join(done.stdout.split())


@pytest.mark.parametrize("arguments", [
    ["predict", ".", "gone.png"], ["predict", "gone", "x.png"], ["evaluate", "gone"],
    ["evaluate", ".", "--data", "gone"], ["convert", "--model", "timm/x", "--weights", "gone"],
    ["convert", "--model", "timm/x", "--data", "gone"], ["export", "--model", "timm/x", "--data", "gone"],
    ["compare", "--data", "gone"], ["train", "detect", "--data", "gone"], ["train", "detect", "--init", "gone"],
    ["train", "detect", "--annotations", "gone", "--images", "."], ["generate", "gone"],
])  # fmt: skip
def test_a_path_that_is_not_there_is_told_before_torch_is_imported(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "gone" in error and "does not exist. Check the path." in error
    assert len(error.splitlines()) == 1 and not any(tmp_path.iterdir())


def test_messages_name_what_one_types(capsys, tmp_path):
    """Flags on the command line, arguments in Python; an unknown option is no `expected`; a mixer is no `name`."""
    with pytest.raises(SystemExit):
        main(["train", "detect", "--data", str(tmp_path / "gone")])
    assert "`--data`" in capsys.readouterr().err
    with pytest.raises(UnknownOptionError, match=r"`bogus` is an unknown option\. Choose from the options of pom: "):
        polymix.create_mixer("pom", 8, bogus=1)
    with pytest.raises(UnknownNameError, match="`mixer`: expected pom"):
        parse_mixer("pomm")


def test_a_compiled_mixer_under_autocast_warns_of_nothing(recwarn, processor):
    processor(False, True)
    model = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), polymix.create_mixer("pom", 8)), backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 6, 8)).sum().backward()
    assert not [str(each.message) for each in recwarn if "lru_cache" in str(each.message)]
