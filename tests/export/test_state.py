"""Recurrent mixers as two graphs that carry their state."""

import pytest
import torch

import polymix
from polymix import errors
from polymix.export.modes import mixer_graphs, modes_of
from tests.contracts.mixer_cases import CASES

onnxruntime = pytest.importorskip("onnxruntime", reason="untested: exports, for which onnxruntime is needed")
DIM, PROMPT = 12, 12


def built(case):
    name, options = CASES[case]
    torch.manual_seed(0)
    return polymix.create_mixer(name, DIM, **options).eval()


def sessions(folder):
    return (
        onnxruntime.InferenceSession(str(folder / f"onnx/{name}.onnx"), providers=["CPUExecutionProvider"])
        for name in ("prefill", "step")
    )


def exported_tokens(folder, words, prompt, count):
    """Token ids that ONNX Runtime finds: the word nearest to the output is the next input. Also the state's bytes."""
    prefill, step = sessions(folder)
    output, *values = prefill.run(None, {"x": words[prompt][None].numpy()})
    output, names = output[:, -1], [part.name for part in prefill.get_outputs()][1:]
    for _ in range(count):
        token = int((output @ words.numpy().T).argmax())
        yield token, sum(value.nbytes for value in values)
        state = dict(zip(names, values, strict=True))
        output, *values = step.run(None, {"x_t": words[token][None].numpy(), **state})
        names = [part.name.removeprefix("next_") for part in step.get_outputs()][1:]


def pytorch_tokens(mixer, words, prompt, count):
    with torch.no_grad():
        output, state = mixer.prefill(words[prompt][None])
        output = output[:, -1]
        for _ in range(count):
            token = int((output @ words.T).argmax())
            yield token
            output, state = mixer.step(words[token][None], state)


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("pom", 60),
        pytest.param("pom", 1000, marks=pytest.mark.exhaustive),
        *(
            pytest.param(case, count, marks=mark)
            for case in ("padre-causal", "qt", "linear", "mamba", "pom-decay")
            for count, mark in ((60, pytest.mark.slow), (1000, pytest.mark.exhaustive))
        ),
    ],
)
def test_a_mixer_finds_the_tokens_of_pytorch_step_by_step(case, count, tmp_path):
    mixer = built(case)
    polymix.export.export_graphs(mixer_graphs(mixer, PROMPT, modes=("prefill", "step")), tmp_path / "out")
    words = torch.randn(40, DIM, generator=torch.Generator().manual_seed(1))
    prompt = torch.randint(40, (PROMPT,), generator=torch.Generator().manual_seed(2))
    pieces = list(exported_tokens(tmp_path / "out", words, prompt, count))
    assert [token for token, _ in pieces] == list(pytorch_tokens(mixer, words, prompt, count))
    assert len({size for _, size in pieces}) == 1, "the state has grown"


def test_a_mixer_without_a_state_is_refused():
    mixer = built("padre-2")
    assert "step" not in modes_of(mixer)
    with pytest.raises(errors.CapabilityError, match="step, which this padre cannot do"):
        mixer_graphs(mixer, PROMPT, modes=("step",))


def test_the_state_has_readable_names():
    prefill, step = mixer_graphs(built("pom"), PROMPT, modes=("prefill", "step"))
    assert list(step.inputs) == ["x_t", "state.total", "state.count"]
    assert list(prefill.call(prefill.inputs)) == ["output", "state.total", "state.count"]
    assert list(step.call(step.inputs)) == ["output", "next_state.total", "next_state.count"]
