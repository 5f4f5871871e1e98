"""The control beside a run: what is wrong with its folder is said before the first of the two trainings."""

import pytest

from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.errors import PolymixError
from polymix.train.run import train

RECIPE = ClassifyRecipe.tiny().changed(control=True, steps=2)


def test_a_control_folder_that_is_a_file_is_refused_before_training(tmp_path):
    (tmp_path / "control").write_text("notes")
    with pytest.raises(PolymixError, match=r"`out`.*control, which is a file"):
        train(RECIPE, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["control"], "something was trained"


@pytest.mark.parametrize(("content", "said"), [(b"torn", "checkpoint"), (None, "Pass resume")])
def test_a_control_with_a_checkpoint_that_is_of_no_use_is_refused_before_training(tmp_path, content, said):
    """A damaged one when the run is continued; any when it is begun."""
    file = tmp_path / "control" / "checkpoint" / "last.ckpt"
    file.parent.mkdir(parents=True)
    file.write_bytes(content or b"")
    with pytest.raises(PolymixError, match=said):
        train(RECIPE, tmp_path, resume=content is not None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["control"], "something was trained"


def test_a_control_of_another_run_is_refused_before_training(tmp_path):
    train(RECIPE, tmp_path / "one")
    (tmp_path / "two").mkdir()
    (tmp_path / "one" / "control").rename(tmp_path / "two" / "control")
    with pytest.raises(PolymixError, match="dim"):
        train(RECIPE.changed(dim=2 * RECIPE.dim), tmp_path / "two", resume=True)
    assert not (tmp_path / "two" / "results.json").exists()
