"""Continue texts with a language model: the options, transformers' own generate, and the command around it."""

from __future__ import annotations

import copy
import math
import os
import sys
import unicodedata
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polymix.compat import cure_torchvision
from polymix.convert.context import learned_positions, longest
from polymix.devices import check_all_share, check_device, processes
from polymix.errors import (
    DataError,
    OptionError,
    PolymixError,
    ShapeError,
    check_int,
    check_number,
    check_seed,
    one_line,
)
from polymix.limits import LONGEST
from polymix.measure import Stopwatch
from polymix.measure.timing import out_of_memory

cure_torchvision()  # before transformers, which imports it
from transformers import TextStreamer  # noqa: E402

from polymix.workflows.generate.exported import ExportedLanguageModel  # noqa: E402
from polymix.workflows.generate.folder import load  # noqa: E402

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NEW_TOKENS = 100  # new tokens by default
BATCH_SIZE = 16  # prompts that are processed together
SEPARATOR = "---"


@dataclass(frozen=True)
class Settings:
    """How a text is continued.

    Args:
        max_new_tokens: the most new tokens; None: 100, or what the model's positions leave.
        temperature: 0 takes the most likely token each time; None: 0.8, or 0 with beams.
        top_k: draw among this many of the most likely tokens; None: among all.
        top_p: draw among the most likely tokens that have this probability together; None: among all.
        beams: texts that are followed at once; the most likely one is kept.
        num: texts for each prompt.
        seed: of the random draws.
        stream: print to standard output word by word.
    Raises:
        OptionError: an option is out of range, or another option makes it meaningless.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    beams: int = 1
    num: int = 1
    seed: int = 0
    stream: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("top_k", 1), ("beams", 1), ("num", 1)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least, LONGEST)
        check_seed("seed", self.seed)
        check_number("temperature", self.effective_temperature, 0.0, math.inf, "a number of at least 0", 0.8)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError("top_p", self.top_p, "a share above 0 and up to 1", "Pass top_p=0.9, say.")
        for name in ("top_k", "top_p"):
            if not self.effective_temperature and getattr(self, name) is not None:
                got = f"{getattr(self, name)} at temperature 0, where nothing is drawn"
                raise OptionError(name, got, "None", "Leave it out, or pass a temperature, such as 0.8.")
        if self.num > (self.beams if self.beams > 1 or not self.effective_temperature else self.num):
            got = f"{self.num} with {self.beams} beams at temperature {self.effective_temperature:g}"
            raise OptionError("num", got, "at most the number of beams", "Pass more beams, or a temperature above 0.")
        for name in ("beams", "num"):
            if self.stream and getattr(self, name) > 1:
                got = f"{getattr(self, name)} with stream"
                raise OptionError(name, got, "1, because a stream is a single text", "Leave one of the two out.")

    @property
    def effective_temperature(self) -> float:
        """The temperature, with the default filled in."""
        return self.temperature if self.temperature is not None else 0.8 if self.beams == 1 else 0.0


def command(
    folder: str | Path, prompt: str | None, settings: Settings, *, lines: bool = False, device: str = "cpu",
    dtype: str | None = None, trust: bool = False, threads: int | None = None, sequence_parallel: int = 1,
) -> int:  # fmt: skip
    """Print each prompt with its continuation, and the speed on standard error. Returns the exit status.

    Without a prompt, standard input is one; with `lines`, each of its lines is one.

    sequence_parallel: processes that read a prompt together: all that torchrun has started. The first one writes.
    """
    for option, other in (("--prompt", prompt is not None), ("--stream", settings.stream)):
        if lines and other:
            raise OptionError("--lines", f"--lines with {option}", "one of the two", "Leave one out.")
    check_device(device, "--device")
    if threads:
        torch.set_num_threads(threads)
    check_all_share(sequence_parallel)
    model, tokenizer = load(folder, device=device, dtype=dtype, trust=trust)
    mesh, read = None, partial(read_prompts, lines)
    if sequence_parallel > 1:
        from polymix.workflows.generate.shared import from_first, share

        mesh, read = share(model), partial(from_first, read)
    prompts = [unicodedata.normalize("NFC", text) for text in (read() if prompt is None else [prompt])]
    clock = Clock()
    together = 1 if isinstance(model, ExportedLanguageModel) else BATCH_SIZE  # its graphs take no padding
    try:
        for start in range(0, len(prompts), together):
            texts = generate(model, tokenizer, prompts[start : start + together], settings, clock, mesh)
            if not settings.stream and texts:
                separator = [SEPARATOR] if start else []
                print(*separator, f"\n{SEPARATOR}\n".join(texts), sep="\n", flush=True)
        if processes()[0] == 0:
            print(clock, file=sys.stderr)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def read_prompts(lines: bool) -> list[str]:
    """Standard input without its last line break, whole or line by line."""
    if sys.stdin.isatty():
        print("Type the prompt; end it with Ctrl-D.", file=sys.stderr)
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DataError("standard input", str(error), f"text in {sys.stdin.encoding}", "Convert it.") from error
    if not lines:
        return [text.removesuffix("\n")]
    if not text:
        raise DataError("standard input", "nothing", "a prompt in each line", "Write some, or leave --lines out.")
    return text.removesuffix("\n").split("\n")


class Clock:
    """Times tokens, as a stopping criterion that never stops. `first`, `rest`: seconds, over `starts` calls."""

    def __init__(self) -> None:
        self.starts, self.first, self.rest, self.steps, self.fresh = 0, 0.0, 0.0, 0, False
        self.watch = Stopwatch()

    def start(self) -> None:
        self.starts, self.fresh = self.starts + 1, True
        self.watch.restart()

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        passed = self.watch.restart()
        if self.fresh:
            self.first += passed
        else:
            self.rest, self.steps = self.rest + passed, self.steps + 1
        self.fresh = False
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def __str__(self) -> str:
        rest = f", then {1e3 * self.rest / self.steps:.2f} ms a token" if self.steps else ""
        return f"first token after {1e3 * self.first / max(self.starts, 1):.0f} ms{rest}"


def generate(
    model: Any, tokenizer: Any, prompts: Sequence[str], settings: Settings | None = None, clock: Clock | None = None,
    mesh: DeviceMesh | None = None,
) -> list[str]:  # fmt: skip
    """Each prompt with its continuation, `settings.num` times.

    mesh: of the processes that share the model (`shared.share`), which call this alike. All but the first get no texts.

    Raises OptionError, ShapeError or DataError before the model runs: an empty prompt for a tokenizer without a start
    token, more tokens than the model has positions, a tokenizer with more tokens than the model.
    """
    settings, clock = settings or Settings(), clock or Clock()
    rows = [_tokens(model, tokenizer, prompt) for prompt in prompts]
    longest = max(map(len, rows))
    new = _room(model, longest, settings.max_new_tokens)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    known = (tokenizer.pad_token_id, tokenizer.eos_token_id, ends[0])
    padding = next((k for k in known if k is not None and k < _vocabulary(model)), 0)  # hidden by the mask
    ids = torch.tensor([[padding] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    config, drawn = copy.deepcopy(model.generation_config), settings.effective_temperature > 0
    config.update(
        max_new_tokens=new, max_length=None, do_sample=drawn, num_beams=settings.beams, pad_token_id=padding,
        num_return_sequences=settings.num, temperature=settings.effective_temperature if drawn else None,
        top_k=(settings.top_k or 0) if drawn else None, top_p=(settings.top_p or 1.0) if drawn else None,
    )  # fmt: skip
    streamer: Any = TextStreamer(tokenizer, skip_special_tokens=True) if settings.stream else None
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        clock.start()
        writing: AbstractContextManager[dict[str, Any]] = nullcontext({})
        if mesh is not None:
            from polymix.workflows.generate.shared import read_together

            writing = read_together(model, ids, mask, max(settings.beams, settings.num), mesh)
            if mesh.get_local_rank():
                return []
        try:
            with writing as cache:
                out = model.generate(
                    ids, attention_mask=mask, generation_config=config, streamer=streamer, stopping_criteria=[clock],
                    **cache,
                )  # fmt: skip
        except KeyboardInterrupt:
            if streamer is not None:
                streamer.end()  # prints the rest of the last word
            raise
        except (
            ValueError,
            TypeError,
            RuntimeError,
            IndexError,
            KeyError,
            AttributeError,
            NotImplementedError,
        ) as error:
            if isinstance(error, PolymixError) or out_of_memory(error):
                raise
            got = f"options with which {type(model).__name__} fails ({one_line(error)[:300]})"
            cure = "Correct the model's generation_config.json, or remove it."
            raise DataError("generation_config", got, "options that the model can generate with", cure) from error
    texts = []
    for place, row in enumerate(out.tolist()):
        prompt, more = rows[place // settings.num], row[longest:]
        stop = next((i for i, token in enumerate(more) if token in ends), len(more))
        texts.append(tokenizer.decode(prompt + more[:stop], skip_special_tokens=True))
    return texts


def _tokens(model: Any, tokenizer: Any, prompt: str) -> list[int]:
    ids = list(tokenizer(prompt, verbose=False)["input_ids"])
    if not ids:
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if start is None:
            got = "an empty one, and the tokenizer has no token that begins or ends a text"
            raise OptionError("prompt", got, "at least one word", "Pass some text.")
        ids = [start]
    there = _vocabulary(model)
    if max(ids) >= there:
        got = f"token {max(ids)} for {prompt[:40]!r}"
        allowed = f"tokens below {there}, the model's vocabulary"
        raise DataError("tokenizer", got, allowed, "Put the model's own tokenizer into its folder.")
    return ids


def _vocabulary(model: Any) -> int:
    if isinstance(model, ExportedLanguageModel):
        return model.vocabulary
    return model.get_input_embeddings().num_embeddings


def _room(model: Any, longest: int, new: int | None) -> int:
    """The number of new tokens, for which the model must have positions."""
    there = positions(model)
    if there is None:
        return new or NEW_TOKENS
    if longest + (new or 1) > there:
        got = f"{longest} tokens" + (f" and max_new_tokens={new}" if new else "")
        cure = "Shorten it, or ask for fewer tokens." if longest < there else "Shorten it."
        raise ShapeError("prompt", got, f"at most {there} in all, the model's learned positions", cure)
    return new or min(NEW_TOKENS, there - longest)


def positions(model: Any) -> int | None:
    """The number of learned positions of a model; None: it takes any length."""
    if isinstance(model, ExportedLanguageModel):
        return model.positions
    return longest(model) if learned_positions(model) else None
