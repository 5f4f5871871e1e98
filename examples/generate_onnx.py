"""Generate text from an exported language model with numpy and ONNX Runtime alone: no PyTorch, no polymix.

    polymix export --model my-language-model --target onnx --out out
    python examples/generate_onnx.py out 12,7,99 100        # token ids of the prompt, number of new tokens

It takes the most likely token each time. The state has the same size after every token, but for keys and values of
layers with attention.
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime


def generate(folder, prompt, count):
    """Yield `count` token ids after those of `prompt`, and the bytes of the state."""
    prefill, step = (
        onnxruntime.InferenceSession(str(Path(folder) / "onnx" / name), providers=["CPUExecutionProvider"])
        for name in ("prefill.onnx", "step.onnx")
    )
    names = [output.name for output in prefill.get_outputs()]
    logits, *state = prefill.run(None, {"input_ids": np.array([prompt], np.int64)})
    state = dict(zip(names[1:], state, strict=True))
    for place in range(len(prompt), len(prompt) + count - 1):
        token = int(logits.argmax())
        yield token, sum(part.nbytes for part in state.values())
        feed = {"input_ids": np.array([[token]], np.int64), "position": np.array([place], np.int64), **state}
        used = [part.name for part in step.get_inputs()]
        logits, *state = step.run(None, {name: feed[name] for name in used})
        names = [output.name.removeprefix("next_") for output in step.get_outputs()]
        state = dict(zip(names[1:], state, strict=True))
    yield int(logits.argmax()), sum(part.nbytes for part in state.values())


if __name__ == "__main__":
    folder, ids, count = sys.argv[1:]
    print(*(token for token, _ in generate(folder, [int(each) for each in ids.split(",")], int(count))))
