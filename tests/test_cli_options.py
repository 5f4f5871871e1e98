"""Options that every command line has, and options that are not overridden without a word."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import polymix
from polymix.cli import VERBS, _app, main
from polymix.domains.text.recipe import TextRecipe
from polymix.train.registry import OWN_RECIPES, domains, named_recipe


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as status:
        main([str(word) for word in arguments])
    said = capsys.readouterr()
    return status.value.code, said.out, said.err


def test_the_version(capsys):
    assert run(capsys, "--version") == (0, f"polymix {polymix.__version__}\n", "")


def test_python_m_polymix_is_the_command():
    done = subprocess.run([sys.executable, "-m", "polymix", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"polymix {polymix.__version__}\n"


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_h_is_help(capsys, verb):
    status, out, _ = run(capsys, *([verb] if verb else []), "-h")
    assert status == 0 and "Usage" in out


def test_list_and_show_as_json(capsys):
    status, out, _ = run(capsys, "list", "--json")
    mixers = json.loads(out)
    assert status == 0 and set(mixers) == set(polymix.list_mixers())
    assert mixers["pom"]["options"]["degree"] == 2 and mixers["pom"]["capabilities"]["causal"] is True
    status, out, _ = run(capsys, "show", "padre", "degree=3", "n=64", "--json")
    costs = json.loads(out)
    assert (
        status == 0
        and ["parameters", f"{polymix.create_mixer('padre', 192, degree=3).cost(64).parameters:,}", ""] in costs["rows"]
    )


def test_json_and_threads_mean_one_thing():
    """--json was a path in one verb and a flag in five. --threads has the environment's number wherever it is left out."""
    commands, kinds = get_command(_app()).commands, {}
    assert set(commands) >= set(VERBS)
    for verb, command in commands.items():
        for parameter in command.params:
            for flag in {"--json", "--threads"} & set(parameter.opts):
                kinds.setdefault(flag, {})[verb] = parameter
    assert len(kinds["--json"]) >= 6 and all(
        it.is_flag and it.help == "Print JSON instead of text." for it in kinds["--json"].values()
    )
    assert len(kinds["--threads"]) >= 9
    assert all(it.default is None and "default: OMP_NUM_THREADS" in it.help for it in kinds["--threads"].values())


@pytest.mark.parametrize(("words", "wanted"), [
    ([], (9, 2, (64, 256, 1024, 4096, 16384))),
    (["--quick"], (2, 1, (64, 256, 1024))),
    (["--quick", "--seeds", "3"], (2, 3, (64, 256, 1024))),
    (["--quick", "--epochs", "20", "--tokens", "32,2048"], (20, 1, (32, 2048))),
    (["--seeds", "1"], (9, 1, (64, 256, 1024, 4096, 16384))),
])  # fmt: skip
def test_quick_overrides_no_option_that_was_given(monkeypatch, capsys, words, wanted, tmp_path):
    """`--quick --seeds 3` used to run one seed without a word."""
    from polymix.errors import DataError
    from polymix.workflows.compare import run as compare

    def stop(settings, *args, **kwargs):
        asked = settings.check()
        seen.append((asked.recipe.epochs, settings.runs, asked.tokens))
        raise DataError("data", "seen", "nothing", "")

    seen = []
    monkeypatch.setattr(compare, "compare", stop)
    run(capsys, "compare", "--out", tmp_path / "out", *words)
    assert seen == [wanted]


@pytest.mark.parametrize("arguments", [
    ["compare", "--quick", "--seeds", "0"], ["compare", "--threads", "0"], ["recommend", "--shape", "64x16", "--threads", "-1"],
    ["show", "padre", "--threads", "0"], ["train", "text", "--threads", "0"], ["compare", "--epochs", "0"],
])  # fmt: skip
def test_none_and_negative_are_errors(capsys, tmp_path, monkeypatch, arguments):
    """`--threads 0` used to run two."""
    monkeypatch.chdir(tmp_path)
    status, _, error = run(capsys, *arguments)
    assert status == 2 and len(error.splitlines()) == 1 and arguments[-2].lstrip("-") in error
    assert not any(tmp_path.iterdir())


def test_recipes_of_polymix_have_names_and_work_anywhere(tmp_path, monkeypatch):
    """`polymix train recipes/text.py` outside a checkout was a dead end."""
    monkeypatch.chdir(tmp_path)
    folders = {path.parent.name for path in Path(polymix.__file__).parent.glob("domains/*/recipe.py")}
    assert folders == set(OWN_RECIPES) <= set(domains()), "a domain without a recipe, or the reverse"
    for name in OWN_RECIPES:
        assert type(named_recipe(name)).__module__ == OWN_RECIPES[name].partition(":")[0]
    Path("text").write_text("a file of the user's with this name is not meant")
    assert isinstance(named_recipe("text"), TextRecipe)


def test_a_folder_of_recipes_is_no_place_of_domains(capsys, tmp_path, monkeypatch):
    """`recipes/` beside the installation was searched, and with it whatever another package had put there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "evil.py").write_text("open('mark', 'w').close()\nrecipe = None\n")
    assert "evil" not in domains()
    status, _, error = run(capsys, "train", "evil", "--out", "out")
    assert status == 2 and "evil" in error and not (tmp_path / "mark").exists()


def test_an_unknown_recipe_names_those_there_are(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, error = run(capsys, "train", "recipes/text.py")
    assert status == 2 and "classify, " in error and "Did you mean text?" in error


@pytest.mark.parametrize("words", [("--quick",), ("--dtypes", "bfloat16"), ("--device", "cuda"), ("--resume",)])
def test_shared_sequences_take_no_option_that_they_ignore(capsys, tmp_path, words):
    status, _, said = run(capsys, "bench", "--parallel", "2", *words, "--out", tmp_path / "out")
    assert status == 2 and words[0] in said and not list(tmp_path.iterdir())
