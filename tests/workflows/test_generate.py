"""polymix generate: what it writes, where, and what it refuses before the model runs."""

import copy
import io
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import polymix
from polymix.cli import main
from polymix.errors import DataError, OptionError, ShapeError
from tests.models.tiny import fresh, transformers

from polymix.workflows.generate import Clock, Settings, generate, load  # isort: skip  # not without transformers
from polymix.domains.text.tokenizer import train_tokenizer  # isort: skip

TEXT = "The cat sat on a mat, and the dog saw the cat sit. "
VOCAB = 300


def saved(path, model, tokenizer=None):
    model.save_pretrained(path)
    (tokenizer or train_tokenizer([TEXT], VOCAB, 64)).save_pretrained(path)
    return path


def sharp(mixers, shape="gpt", **options):
    """A model that is sure of what comes next, so that no rounding decides it; it never ends a text."""
    model = fresh(mixers, shape, vocab_size=VOCAB, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"), sharp(["pom", "local:window=4"]))


@pytest.fixture(scope="module")
def loaded(folder):
    return load(folder)


def run(capsys, *arguments):
    """Exit status, standard output and standard error."""
    with pytest.raises(SystemExit) as stop:
        main(["generate", *map(str, arguments), "--threads", "1"])
    return stop.value.code or 0, *capsys.readouterr()


def greedy(model, tokenizer, prompt, new):
    """The likeliest text, each token by a forward over all before it."""
    ids = tokenizer(prompt)["input_ids"]
    for _ in range(new):
        ids = [*ids, int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_the_likeliest_text_on_standard_output_and_the_speed_beside_it(folder, loaded, capsys):
    status, out, err = run(capsys, folder, "--prompt", "The cat", "--temperature", 0, "--max-new-tokens", 12)
    assert status == 0
    assert out == greedy(*loaded, "The cat", 12) + "\n"
    assert re.search(r"first token after \d+ ms, then \d+\.\d\d ms a token\n$", err)


def test_a_stream_prints_the_same_text(folder, loaded, capsys):
    options = [folder, "--prompt", "The dog", "--temperature", 0, "--max-new-tokens", 12]
    status, out, _ = run(capsys, *options, "--stream")
    assert status == 0
    assert out == greedy(*loaded, "The dog", 12) + "\n"


def test_standard_input_is_one_prompt_without_the_end_of_its_last_line(folder, loaded, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("The cat\nsat\n"))
    _, out, _ = run(capsys, folder, "--temperature", 0, "--max-new-tokens", 4)
    assert out == greedy(*loaded, "The cat\nsat", 4) + "\n"


def test_lines_are_prompts_of_their_own_in_batches(folder, loaded, capsys, monkeypatch):
    monkeypatch.setattr("polymix.workflows.generate.run.BATCH_SIZE", 3)
    prompts = ["The cat", "a", "the dog saw the cat", "mat", "on"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(prompts) + "\n"))
    _, out, _ = run(capsys, folder, "--lines", "--temperature", 0, "--max-new-tokens", 5)
    assert out == "\n---\n".join(greedy(*loaded, prompt, 5) for prompt in prompts) + "\n"


def test_what_is_drawn_follows_the_seed_and_nothing_else(loaded):
    def drawn(**options):
        return generate(*loaded, ["The cat"], Settings(max_new_tokens=12, **options))

    before = torch.random.get_rng_state()
    assert drawn(seed=1) == drawn(seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert drawn(seed=1) != drawn(seed=2)
    assert len(set(drawn(num=3, temperature=2.0))) == 3
    likeliest = [greedy(*loaded, "The cat", 12)]
    assert drawn(top_k=1) == drawn(top_p=1e-6) == likeliest
    assert drawn(temperature=50.0) != likeliest


def test_without_top_k_all_tokens_are_drawn(loaded, monkeypatch):
    """transformers draws among 50 where nothing is said."""
    model, tokenizer = loaded
    seen = []
    monkeypatch.setattr(model, "generate", lambda ids, **options: seen.append(options["generation_config"]) or ids)
    generate(model, tokenizer, ["a"], Settings())
    assert (seen[0].top_k, seen[0].top_p, seen[0].temperature, seen[0].do_sample) == (0, 1.0, 0.8, True)


def test_beams_find_what_transformers_finds(loaded):
    model, tokenizer = loaded
    ids = tokenizer("The cat", return_tensors="pt")
    options = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 8, "do_sample": False, "use_cache": False}
    expected = tokenizer.batch_decode(model.generate(**ids, **options), skip_special_tokens=True)
    assert generate(model, tokenizer, ["The cat"], Settings(beams=4, num=3, max_new_tokens=8)) == expected
    assert len(set(expected)) == 3


def test_a_text_that_ends_early_stops_there(loaded, monkeypatch):
    model, tokenizer = loaded
    whole = model.generate(**tokenizer("The cat", return_tensors="pt"), max_new_tokens=6, do_sample=False)[0].tolist()
    monkeypatch.setattr(model.generation_config, "eos_token_id", whole[-2])
    first = whole.index(whole[-2], len(tokenizer("The cat")["input_ids"]))
    clock = Clock()
    said = generate(model, tokenizer, ["The cat"], Settings(temperature=0, max_new_tokens=6), clock)
    assert said == [tokenizer.decode(whole[:first])]
    assert clock.steps < 5


@pytest.mark.parametrize(("options", "argument"), [
    (["--beams", 2, "--stream"], "beams"), (["--num", 2, "--stream"], "num"), (["--top-k", 5, "--temperature", 0], "top_k"),
    (["--top-p", 0.5, "--temperature", 0], "top_p"), (["--top-k", 5, "--beams", 2], "top_k"),
    (["--num", 2, "--temperature", 0], "num"), (["--num", 3, "--beams", 2], "num"), (["--top-p", 0], "top_p"),
    (["--top-k", 0], "top_k"), (["--temperature", -1], "temperature"), (["--temperature", "nan"], "temperature"),
    (["--max-new-tokens", 0], "max_new_tokens"), (["--lines"], "--lines"), (["--dtype", "float8"], "dtype"),
    (["--device", "nowhere"], "--device"), (["--seed", -1], "seed"),
])  # fmt: skip
def test_options_that_contradict_are_one_line_before_the_model_is_read(tmp_path, capsys, options, argument):
    status, out, err = run(capsys, tmp_path, "--prompt", "a", *options)
    assert (status, out) == (2, "")
    flag = f"--{argument.removeprefix('--').replace('_', '-')}"
    assert err.startswith(f"polymix: `{flag}`: expected ") and err.count("\n") == 1


def test_lines_and_a_stream_contradict(tmp_path, capsys):
    assert "`--lines`" in run(capsys, tmp_path, "--lines", "--stream")[2]


def test_lines_of_nothing(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "got nothing" in run(capsys, folder, "--lines")[2]


def test_an_empty_prompt_is_the_token_that_begins_a_text(loaded):
    model, tokenizer = loaded[0], copy.deepcopy(loaded[1])
    begun = greedy(model, tokenizer, tokenizer.bos_token, 5)
    settings = Settings(temperature=0, max_new_tokens=5)
    assert generate(model, tokenizer, [""], settings) == [begun]
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(OptionError, match=r"`prompt`: .*got an empty one"):
        generate(model, tokenizer, [""], settings)


def test_learned_positions_end_before_the_model_runs(loaded, monkeypatch):
    model, tokenizer = loaded
    long, clock = tokenizer.decode([30] * 60), Clock()
    assert len(tokenizer(long)["input_ids"]) == 60
    generate(model, tokenizer, [long], Settings(temperature=0), clock)
    assert clock.steps == 4 - 1  # as many new ones as there is room for; the first is counted apart
    monkeypatch.setattr(model, "generate", lambda *_, **__: pytest.fail("the model ran"))
    for prompt, new in ((long, 5), (tokenizer.decode([30] * 64), None), (tokenizer.decode([30] * 90), 1)):
        with pytest.raises(ShapeError, match="at most 64 in all"):
            generate(model, tokenizer, ["a", prompt], Settings(max_new_tokens=new))


def test_computed_positions_do_not_end(tmp_path):
    model, tokenizer = load(saved(tmp_path, sharp("pom", "llama", max_position_embeddings=8)))
    said = generate(model, tokenizer, ["The cat sat on a mat, and the dog"], Settings(temperature=0, max_new_tokens=20))
    assert said == [greedy(model, tokenizer, "The cat sat on a mat, and the dog", 20)]


def gpt2(vocab=VOCAB):
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"vocab_size": vocab, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)).eval()


def test_a_host_of_transformers_and_its_learned_positions(tmp_path):
    model, tokenizer = load(saved(tmp_path, gpt2()), dtype="bfloat16")
    assert (type(model).__name__, model.dtype) == ("GPT2LMHeadModel", torch.bfloat16)
    with pytest.raises(ShapeError, match="at most 64"):
        generate(model, tokenizer, ["a"], Settings(max_new_tokens=64))


@pytest.mark.parametrize("prompts", [["The cat"], ["The cat", "a", "the dog saw"]])
def test_a_converted_host_that_polymix_saved(tmp_path, prompts):
    model = polymix.convert(gpt2(), "1:1", mixer="pom").model.eval()
    tokenizer = train_tokenizer([TEXT], VOCAB, 64)
    polymix.save_pretrained(model, tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = load(tmp_path)
    said = generate(*again, prompts, Settings(temperature=0, max_new_tokens=6))
    assert said == [
        generate(model, tokenizer, [prompt], Settings(temperature=0, max_new_tokens=6))[0] for prompt in prompts
    ]
    assert polymix.mixers.TokenMixer in {kind for part in again[0].modules() for kind in type(part).__mro__}


def test_folders_that_hold_no_language_model(tmp_path, folder):
    with pytest.raises(DataError, match=r"no config\.json.*Nothing is downloaded"):
        load(tmp_path / "nowhere")
    (tmp_path / "stopped" / "checkpoint").mkdir(parents=True)
    with pytest.raises(DataError, match=r"training was interrupted: continue it with .*--resume"):
        load(tmp_path / "stopped")
    fresh("pom").save_pretrained(tmp_path / "alone")
    with pytest.raises(DataError, match=r"`tokenizer`: .*got .*Copy the tokenizer's files"):
        load(tmp_path / "alone")
    gpt2().save_pretrained(tmp_path / "gpt2")  # for which transformers makes up an empty tokenizer
    with pytest.raises(DataError, match=r"`tokenizer`: .*got none"):
        load(tmp_path / "gpt2")
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    t5 = saved(tmp_path / "t5", transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)))
    with pytest.raises(DataError, match=r"`folder`: .*got .*which fails with"):
        load(t5)
    shutil.copytree(folder, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"`folder`: .*got .*which fails with"):
        load(tmp_path / "cut")


def test_a_tokenizer_of_another_model(tmp_path):
    model, tokenizer = load(saved(tmp_path, fresh("pom")))  # 61 tokens
    with pytest.raises(DataError, match="tokens below 61, the model's vocabulary"):
        generate(model, tokenizer, ["The cat sat on"])


def test_ctrl_c_in_a_stream_leaves_what_had_come(folder, loaded, capsys, monkeypatch):
    timed = Clock.__call__

    def interrupted(clock, ids, scores, **options):
        if clock.steps == 5:
            signal.raise_signal(signal.SIGINT)
        return timed(clock, ids, scores, **options)

    monkeypatch.setattr(Clock, "__call__", interrupted)
    options = ["--prompt", "The cat", "--temperature", 0, "--max-new-tokens", 40, "--stream"]
    status, out, err = run(capsys, folder, *options)
    assert status == 130
    assert out.endswith("\n") and greedy(*loaded, "The cat", 8).startswith(out[:-1]) and len(out) > len("The cat\n")
    assert err.endswith("Stopped.\n") and "Traceback" not in err


@pytest.mark.slow
def test_a_reader_that_has_enough_is_no_error(folder):
    code = "from polymix.cli import main; main()"
    command = [sys.executable, "-c", code, "generate", str(folder), "--prompt", "The cat", "--stream", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 141
    assert "Traceback" not in err and "Exception" not in err


PIPELINE = """
import sys, threading
import polymix.compat
polymix.compat.cure_torchvision()
{setup}
from transformers import TextIteratorStreamer, pipeline
assert ("polymix.models.language" in sys.modules) == {known}
pipe = pipeline("text-generation", model=sys.argv[1], {trust}max_new_tokens=6, do_sample=False)
assert type(pipe.model).__name__ == "PolymixGPTForCausalLM"
prompts = ["The cat", "a", "the dog saw"]
alone = [pipe(prompt)[0]["generated_text"] for prompt in prompts]
together = [said[0]["generated_text"] for said in pipe(prompts, batch_size=3)]
assert together == alone, (together, alone)
streamer = TextIteratorStreamer(pipe.tokenizer, skip_special_tokens=True)
thread = threading.Thread(target=pipe, args=("The cat",), kwargs=dict(streamer=streamer))
thread.start()
parts = list(streamer)
thread.join()
assert "".join(parts) == alone[0], (parts, alone)
print(repr(alone))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "known", "trust"), [
    ("import polymix.models.language", True, ""), ("", False, "trust_remote_code=True, "),
], ids=["imported", "trusted"])  # fmt: skip
def test_a_pipeline_in_a_fresh_process_streams_and_batches(folder, loaded, tmp_path, setup, known, trust):
    code = PIPELINE.format(setup=setup, known=known, trust=trust)
    environment = {"HF_HOME": str(tmp_path), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout) == [greedy(*loaded, prompt, 6) for prompt in ("The cat", "a", "the dog saw")]
