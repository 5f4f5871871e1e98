"""One cache of synthetic data: another seed's or size's are never found, and nothing half written is taken for data."""

import os

import pytest

from polymix.train.data.synthetic import MAX_VERSIONS, cached


def write_number(number):
    return lambda folder: (folder / "data.txt").write_text(str(number))


def test_seed_0_then_1_then_0_gives_the_data_of_0(tmp_path):
    calls = []

    def data(seed):
        def write(folder):
            calls.append(seed)
            (folder / "data.txt").write_text(str(seed))

        return (cached(tmp_path, "digits", {"seed": seed, "size": 8}, write) / "data.txt").read_text()

    assert [data(seed) for seed in (0, 1, 0)] == ["0", "1", "0"]
    assert calls == [0, 1], "what is there is written again"


def test_every_setting_and_the_name_tell_data_apart(tmp_path):
    places = {
        cached(tmp_path, name, settings, write_number(0))
        for name, settings in (
            ("digits", {"seed": 0}), ("digits", {"seed": "0"}), ("digits", {"seed": 0, "size": 1}), ("faces", {"seed": 0}),
        )
    }  # fmt: skip
    assert len(places) == 4
    assert cached(tmp_path, "a", {"x": 1, "y": 2}, write_number(0)) == cached(tmp_path, "a", {"y": 2, "x": 1}, print)


def test_data_that_failed_half_way_are_written_again(tmp_path):
    def broken(folder):
        (folder / "data.txt").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, "digits", {"seed": 0}, broken)
    assert not list(tmp_path.iterdir()), "something is left of it"
    assert (cached(tmp_path, "digits", {"seed": 0}, write_number(7)) / "data.txt").read_text() == "7"


def test_of_two_writers_the_first_to_finish_wins(tmp_path):
    def slow(folder):
        cached(tmp_path, "digits", {"seed": 0}, write_number(1))
        (folder / "data.txt").write_text("2")

    place = cached(tmp_path, "digits", {"seed": 0}, slow)
    assert (place / "data.txt").read_text() == "1" and [*tmp_path.iterdir()] == [place]


def test_old_versions_do_not_pile_up_and_those_used_last_stay(tmp_path):
    (tmp_path / "digits-of-mine").mkdir()
    first = cached(tmp_path, "digits", {"seed": 0}, write_number(0))
    for seed in range(1, MAX_VERSIONS + 4):
        os.utime(first / "synthetic.json", ns=(0, 0))
        assert cached(tmp_path, "digits", {"seed": 0}, print) == first, "used again and again"
        place = cached(tmp_path, "digits", {"seed": seed}, write_number(seed))
    assert first.is_dir() and place.is_dir() and (tmp_path / "digits-of-mine").is_dir()
    assert len(list(tmp_path.glob("digits-*/synthetic.json"))) == MAX_VERSIONS
    cached(tmp_path, "faces", {"seed": 0}, write_number(0))
    assert len(list(tmp_path.glob("digits-*/synthetic.json"))) == MAX_VERSIONS, "the data of another kind count"
