"""The README does what it says."""

import re
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
    blocks = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)
    commands = [part.strip() for block in blocks for line in block.splitlines()
                for part in line.partition("#")[0].split(" && ")]  # fmt: skip
    own = [command for command in commands if not command.startswith(("git clone", "cd ", "pip install torch=="))]
    assert len(own) == 5, "for users: an installation and two commands; for developers: an installation and the tests"
    for command in own:
        assert command in ci, "CI must do as the README says"


def test_the_cpu_build_is_the_one_of_the_constraints():
    pins = set((ROOT / "constraints.txt").read_text().split())
    (command,) = set(re.findall(r"pip install torch==.*", README))
    assert len(set(re.findall(r"\S+==\S+", command)) & pins) == 2, command
    for page in ("index.md", "tutorial.md"):
        assert command in (ROOT / "docs" / page).read_text(), page


def test_there_is_one_form_of_installation():
    said = (path for folder in ("docs", "benchmarks", "examples", "polymix") for path in (ROOT / folder).rglob("*")
            if path.suffix in (".md", ".py", ".j2", ".ipynb", ".html"))  # fmt: skip
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *said]:
        text = path.read_text("utf-8")
        assert not re.search(r"pip install (-\S+ \S+ )?[\"']?polymix\b", text), (
            f"{path}: nothing of this name is published"
        )


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
