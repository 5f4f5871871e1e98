"""lm-evaluation-harness reads our models through its own transformers interface, and finds what we find by hand."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.models.tiny import transformers
from tests.workflows.test_generate import saved, sharp

pytest.importorskip("lm_eval", reason="untested: lm-evaluation-harness, which the extra eval brings")

QUESTIONS = [
    ("The cat sat on", ["a mat", "the dog", "it, and the cat sat"]), ("the dog saw", ["the cat sit", "a", "mat. mat"]),
    ("on a mat, and", ["the dog", "cat", "sit sit"]), ("a", ["b", "dog", "cat saw the mat"]),
    ("The dog", ["sat", "saw a cat", "on"]), ("and the cat", ["sat on a mat", "dog", "the"]),
]  # fmt: skip
TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
RUN = """
import json, sys
import lm_eval
assert "polymix.models.language" not in sys.modules
folder, tasks = sys.argv[1:]
found = lm_eval.simple_evaluate(
    model="hf", model_args={"pretrained": folder, "trust_remote_code": True}, device="cpu", batch_size=4,
    tasks=["local_choice"], task_manager=lm_eval.tasks.TaskManager(include_path=tasks, include_defaults=False),
    bootstrap_iters=0,
)
said = sorted(found["samples"]["local_choice"], key=lambda sample: sample["doc_id"])
likelihoods = [[float(value[0]) for value in sample["filtered_resps"]] for sample in said]
print("FOUND", json.dumps([found["results"]["local_choice"], likelihoods]))
"""


def likelihood(model, tokenizer, question, choice):
    """log P(choice | question), token by token."""
    before, ids = (tokenizer(text)["input_ids"] for text in (question, f"{question} {choice}"))
    logs = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    return sum(float(logs[place - 1, ids[place]]) for place in range(len(before), len(ids)))


@pytest.mark.slow
@pytest.mark.parametrize(("mixers", "shape"), [(["pom", "local:window=4"], "gpt"), (["padre:degree=2:kernel_size=3", "softmax"], "llama")],
                         ids=["pom-local", "padre-softmax"])  # fmt: skip
@torch.no_grad()
def test_a_task_of_choices_scores_as_by_hand(tmp_path, mixers, shape):
    model = sharp(mixers, shape)
    folder = saved(tmp_path / "model", model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = [
        [likelihood(model, tokenizer, question, choice) for choice in choices] for question, choices in QUESTIONS
    ]
    best = [row.index(max(row)) for row in expected]
    by_length = [
        max(range(3), key=lambda k, row=row, choices=choices: row[k] / len(choices[k]))
        for row, (_, choices) in zip(expected, QUESTIONS, strict=True)
    ]
    answers = [best[0], (best[1] + 1) % 3, by_length[2], best[3], (by_length[4] + 1) % 3, (best[5] + 1) % 3]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    data = tasks / "choices.jsonl"
    rows = [{"question": q, "choices": c, "answer": a} for (q, c), a in zip(QUESTIONS, answers, strict=True)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "choice.yaml").write_text(TASK.format(data=data))

    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), str(tasks)],
        capture_output=True,
        text=True,
        env={**os.environ, **offline},
    )
    assert done.returncode == 0, done.stderr
    results, likelihoods = json.loads(done.stdout.partition("FOUND ")[2])
    assert torch.allclose(torch.tensor(likelihoods), torch.tensor(expected), rtol=1e-4, atol=1e-3)
    assert results["acc,none"] == pytest.approx(sum(map(int.__eq__, best, answers)) / 6)
    assert results["acc_norm,none"] == pytest.approx(sum(map(int.__eq__, by_length, answers)) / 6)
    assert 0 < results["acc,none"] < 1


# The four tasks of PoM's Table 1a: the harness's own definitions, on questions of a few words. By task, the definition,
# its questions as their data sets have them, and what a model is to tell apart: the text before, and the choices.
MINIATURES = {
    "arc_easy": ("arc/arc_easy.yaml", {
        "question": "What sat?", "choices": {"text": ["the cat", "a mat"], "label": ["A", "B"]}, "answerKey": "B"},
        [("Question: What sat?\nAnswer:", " the cat"), ("Question: What sat?\nAnswer:", " a mat")], 1),
    "hellaswag": ("hellaswag/hellaswag.yaml", {
        "activity_label": "cat", "ctx_a": "The cat sat.", "ctx_b": "the dog", "endings": ["saw it", "sat [a] on a mat"],
        "label": "1"}, [("cat: The cat sat. The dog", " saw it"), ("cat: The cat sat. The dog", " sat on a mat")], 1),
    # the same end after either name
    "winogrande": ("winogrande/default.yaml", {
        "sentence": "The dog saw _ on a mat.", "option1": "the cat", "option2": "it", "answer": "2"},
        [("The dog saw the cat", " on a mat."), ("The dog saw it", " on a mat.")], 1),
    "mmlu": ("mmlu/default/mmlu_anatomy.yaml", {
        "question": "What sat?", "choices": ["cat", "dog", "mat", "it"], "answer": 2},
        [("The following are multiple choice questions (with answers) about anatomy.\n\n"
          "What sat?\nA. cat\nB. dog\nC. mat\nD. it\nAnswer:", f" {letter}") for letter in "ABCD"], 2),
}  # fmt: skip
RUN_FOUR = """
import json, sys
import lm_eval, lm_eval.tasks
folder, tasks, *names = sys.argv[1:]
found = lm_eval.simple_evaluate(
    model="hf", model_args={"pretrained": folder, "trust_remote_code": True}, device="cpu", batch_size=4, tasks=names,
    task_manager=lm_eval.tasks.TaskManager(include_path=tasks, include_defaults=False), bootstrap_iters=0, num_fewshot=0,
)
print("FOUND", json.dumps({name: [found["results"][name]["acc,none"],
      [float(value[0]) for value in found["samples"][name][0]["filtered_resps"]]] for name in names}))
"""


@pytest.mark.slow
@torch.no_grad()
def test_the_four_tasks_of_the_papers_score_as_by_hand(tmp_path):
    """Wrong prompts, spaces or normalisation in any of the four would change a log-likelihood."""
    from pathlib import Path

    import lm_eval

    model = sharp(["pom", "local:window=4"], "gpt", max_position_embeddings=256)
    folder = saved(tmp_path / "model", model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name, (definition, question, _, _) in MINIATURES.items():
        data = tasks / f"{name}.jsonl"
        data.write_text(json.dumps(question) + "\n")
        files = dict.fromkeys(("train", "dev", "validation", "test"), str(data))
        own = Path(lm_eval.__file__).parent / "tasks" / definition
        (tasks / f"{name}.yaml").write_text(
            f"include: {own}\ntask: small_{name}\ndataset_path: json\ndataset_name: null\n"
            f"dataset_kwargs: {json.dumps({'data_files': files})}\n"
        )
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN_FOUR, str(folder), str(tasks), *(f"small_{name}" for name in MINIATURES)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **offline})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.partition("FOUND ")[2])
    for name, (_, _, pairs, answer) in MINIATURES.items():
        expected = [likelihood(model, tokenizer, before, choice[1:]) for before, choice in pairs]
        assert found[f"small_{name}"][1] == pytest.approx(expected, rel=1e-4, abs=1e-3), name
        assert found[f"small_{name}"][0] == float(expected.index(max(expected)) == answer)
