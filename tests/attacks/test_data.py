"""Damaged data of every domain in every layout: --check lists them and training refuses them, each in a sentence.

Never another error, never a wait for what does not come (pytest would end it), and nothing that a file names is run.
"""

import shutil
import zlib

import pytest

from polymix.errors import PolymixError, reason_of
from polymix.train.registry import domain_of
from polymix.train.run import check_data, check_recipe
from tests.attacks.command import offline
from tests.attacks.data_sets import DATA_SETS, damages, kinds_of, without_file, write_data_set
from tests.helpers import slow_but

PART = 37  # of the damages, those of the quick test
SLOW = ("satellite", "detect3d")  # reading the whole data takes a second


@pytest.fixture(scope="module", params=DATA_SETS)
def data_set(request, tmp_path_factory):
    """The folder of a data set and its recipe."""
    folder, recipe = write_data_set(request.param, tmp_path_factory.mktemp("data") / "set")
    assert outcome(recipe, tmp_path_factory.mktemp("scratch")) == "read", "the whole data are sound"
    return folder, recipe


def outcome(recipe, scratch):
    """ "read", "refused", or what should not have come."""
    try:
        with offline():
            said, found = [], "read"
            checks = [] if domain_of(recipe) == "text" else [lambda: check_data(recipe)]
            for attempt in (*checks, lambda: loaded(recipe, scratch, said.append)):
                try:
                    lines = attempt()
                except (PolymixError, OSError) as error:
                    lines = [str(error)]
                    named = isinstance(error, PolymixError) or (error.filename and reason_of(error))
                    if "\n" in str(error) or not named:
                        return f"no sentence: {error!r}"
                if lines:
                    found = "refused"
                if any("\n" in line or len(line) > 2000 for line in lines):
                    return f"more than a line: {lines}"
            return found
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def loaded(recipe, scratch, say):
    """Load the data, and read the samples that tell them from others."""
    shutil.rmtree(scratch, ignore_errors=True)
    check_recipe(recipe, say).load(scratch).fingerprint()
    return []


def attacked(data_set, scratch, part):
    folder, recipe = data_set
    wrong, count = [], 0
    for path in kinds_of(folder):
        whole, name = path.read_bytes(), path.relative_to(folder).as_posix()
        for label, content in damages(path):
            if zlib.crc32(f"{name} {label}".encode()) % part:
                continue
            count += 1
            path.write_bytes(content)
            result = outcome(recipe, scratch)
            if result not in ("read", "refused"):
                wrong.append((name, label, result))
        path.write_bytes(whole)
    assert not wrong
    return count


@pytest.mark.slow
def test_a_refusal_names_the_file_and_its_folder(data_set, tmp_path):
    """Of a text it names the list and the line with its name; "the data" or a bare name would leave the search to you."""
    folder, recipe = data_set
    wrong = []
    for path in kinds_of(folder):
        whole = path.read_bytes()
        half = whole[: len(whole) // 2] if path.suffix != ".txt" else b""  # of a list of names, a shorter list
        for label, content in (("empty", b""), ("zeros", bytes(64)), ("cut", half)):
            path.write_bytes(content)
            try:
                with offline():
                    loaded(recipe, tmp_path / "scratch", str)
            except (PolymixError, OSError) as error:
                if str(folder) not in str(error) or path.stem not in str(error):
                    wrong.append((path.relative_to(folder).as_posix(), label, str(error)[:300]))
        path.write_bytes(whole)
    assert not wrong


def test_some_damages(data_set, tmp_path):
    attacked(data_set, tmp_path / "scratch", 3 * PART if domain_of(data_set[1]) in SLOW else PART)


@pytest.mark.exhaustive
def test_every_damage(data_set, tmp_path):
    """All of them; one in five where reading the whole data takes a second."""
    part = 5 if domain_of(data_set[1]) in SLOW else 1
    assert part * attacked(data_set, tmp_path / "scratch", part) > 9


@pytest.mark.parametrize("how", slow_but(["nothing"], ["pipe", "folder", "nothing"]))
def test_what_is_no_file(data_set, tmp_path, how):
    folder, recipe = data_set
    wrong = []
    for path in kinds_of(folder):
        whole = path.read_bytes()
        without_file(path, how)
        result = outcome(recipe, tmp_path / "scratch")
        if result not in ("read", "refused"):
            wrong.append((path.relative_to(folder).as_posix(), result))
        if how == "folder":
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(whole)
    assert not wrong
