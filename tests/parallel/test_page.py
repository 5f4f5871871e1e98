"""The commands on the page that need machines which tests have not: bash reads them, and torchrun has their options."""

import re
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

PAGE = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
BLOCKS = [block for block in re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE) if "torchrun" in block]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_of_shell_is_read_by_bash_and_torchrun(block):
    ran = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    for line in block.replace("\\\n", " ").splitlines():
        if "torchrun" in line:
            words = line.partition("torchrun")[2].replace("$SLURM_NNODES", "2").split()
            assert get_args_parser().parse_args(words).training_script == "polymix"


def test_the_page_has_lines_for_several_machines_and_slurm():
    assert any("--nnodes 2" in block for block in BLOCKS) and any("srun" in block for block in BLOCKS)
