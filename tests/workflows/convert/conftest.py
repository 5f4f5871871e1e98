"""polymix convert as the tests run it."""

from pathlib import Path

import pytest

from polymix.cli import main

QUICK = ("--seconds", "0.05", "--lengths", "1", "--threads", "1")


@pytest.fixture
def run(place, capsys):
    """polymix convert, quickly, with these words, in the test's own `place`, into the folder `out`: status, what it printed, what went wrong."""

    def run(*words):
        with pytest.raises(SystemExit) as stop:
            main(["convert", *QUICK, "--out", "out", *map(str, words)])
        out, err = capsys.readouterr()
        return stop.value.code or 0, out, err

    return run


@pytest.fixture
def fails(run):
    """One line, status 2, and nothing written."""

    def fails(*words, named):
        before = sorted(Path().rglob("*"))
        status, _, err = run(*words)
        assert (status, len(err.splitlines())) == (2, 1), err
        assert named in err
        assert sorted(Path().rglob("*")) == before, "nothing is written before all has been checked"

    return fails
