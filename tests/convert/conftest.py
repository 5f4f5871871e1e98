"""Models saved once for all tests of saving."""

import json
import os
import subprocess
import sys

import pytest
import torch

import polymix
from tests.convert.checks import answer


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Folders of all cases; whether each gave the same in a process that had not built it; a save that failed there."""
    from tests.convert.saving_cases import AUTO, CASES, FRESH, ROOT, own, ready

    torch.manual_seed(0)
    folders, top = {}, tmp_path_factory.mktemp("saved")
    for place, (name, case) in enumerate(CASES.items()):
        model = ready(case)
        if model is None:
            continue
        inputs = case.given
        if "bfloat16" in name:
            model, inputs = model.bfloat16(), inputs.bfloat16()
        folders[name] = str(top / str(place))
        polymix.save_pretrained(model, folders[name], host=case.host)
        content = {"input": inputs, "output": answer(model, inputs)[0]}
        if getattr(model, "can_generate", bool)():
            content["words"] = model.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0)
        torch.save(content, folders[name] + ".pt")
    old = top / "old"
    polymix.save_pretrained(own(), old)
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    auto = {name: kind for name, kind in AUTO.items() if name in folders}
    run = [sys.executable, "-W", "ignore", "-c", FRESH, json.dumps(folders), str(old), json.dumps(auto)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    same, failure = json.loads(done.stdout)
    return folders, same, (old, before, failure)
