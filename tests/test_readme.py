"""The README does what it says."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        scope = {}
        exec(compile(block, "README.md", "exec"), scope)
        if "z" in scope:
            assert scope["y"].shape == (2, 192)
            assert scope["z"].shape == (2, 196, 192)


def test_what_the_lens_is_said_to_print(capsys):
    """The comments beside the prints are what is printed."""
    block = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "lens" in block)
    exec(compile(block, "README.md", "exec"), {})
    said = [line.split("# ")[1] for line in block.splitlines() if line.startswith("print")]
    printed = capsys.readouterr().out.splitlines()
    for line, comment in zip(printed, said, strict=True):
        assert line.startswith(comment.split(":")[0]), (line, comment)


def test_ci_runs_the_commands_of_the_readme():
    ci = (ROOT / ".ci/run").read_text()
    for command in re.findall(r"```sh\n(pip install.*?)\n```", README):
        install, run = command.split(" && ")
        assert install in ci, "CI must install as the README says"
        assert run in ci


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_mixer_is_in_the_table():
    import polymix

    for name in polymix.list_mixers():
        assert f"| `{name}` |" in README


def test_the_table_of_costs_is_that_of_the_kept_results():
    script, results = (
        ROOT / "benchmarks" / "readme_table.py",
        ROOT / "benchmarks" / "results" / "bench" / "results.json",
    )
    run = subprocess.run([sys.executable, script, results, "--check"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
