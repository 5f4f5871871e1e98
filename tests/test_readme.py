"""The README does what it says."""

import re
import subprocess
import sys
from pathlib import Path

import polymix

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_it_can_be_read_in_a_minute():
    assert 80 <= len(README.splitlines()) <= 100


def test_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        scope = {}
        exec(compile(block, "README.md", "exec"), scope)
        if "y" in scope:
            assert scope["y"].shape == (2, 196, 192)
        if "report" in scope:
            mixers = [m for m in scope["model"].modules() if isinstance(m, polymix.TokenMixer)]
            assert len(mixers) == len(scope["report"].layers) == 4


def test_ci_runs_the_commands_of_the_readme():
    ci = (ROOT / ".ci/run").read_text()
    commands = re.findall(r"```sh\n(pip install.*?)\n```", README)
    assert len(commands) == 2, "for users, and for developers"
    for command in commands:
        install, run = command.split(" && ")
        assert install in ci, "CI must install as the README says"
        assert run in ci


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_table_of_speed_is_that_of_the_kept_results():
    script, results = (
        ROOT / "benchmarks" / "readme_table.py",
        ROOT / "benchmarks" / "results" / "bench" / "results.json",
    )
    run = subprocess.run([sys.executable, script, results, "--check"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
