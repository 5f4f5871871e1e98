"""What the tests of training on text share: a little text, tiny recipes."""

import json

from polymix.domains.text.data import TextData
from polymix.domains.text.recipe import TextRecipe
from polymix.domains.text.tokens import Tokens, write

SENTENCE = "the cat sat on a mat and saw what no other cat had ever seen before it fell asleep again"
WORDS = SENTENCE.split(" ")
MODEL = {"mixers": ["pom", "local"], "num_layers": 2, "hidden_size": 16, "num_heads": 2}
TINY = TextRecipe(
    options=MODEL, vocab=300, context=16, batch_size=4, steps=8, learning_rate=1e-2, evaluate_every=4, log_every=1,
    checkpoint_every=3, evaluate_tokens=256, prompts=("the cat ",), sample_tokens=4,
)  # fmt: skip


def document(number, words=60):
    return " ".join(WORDS[(number * 7 + i * i + i * number) % len(WORDS)] for i in range(words)) + "\n"


def folder(path, count=12):
    """Text files, some of which the hash holds out."""
    path.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (path / f"{number:02}.txt").write_text(f"Document {number}. {document(number)}", "utf-8")
    return path


def tiny(tmp_path, **changes):
    return TINY.changed(**{"data": str(folder(tmp_path / "texts")), "held_out": 0.2, **changes})


def shard(path, tokens, bytes_each=2):
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, [tokens], bytes_each)
    return path


def rows(out, *names):
    """metrics.jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second" and (not names or k in names)} for line in lines]


def prepared(tmp_path, train, val, vocab=64, end=0, tokenizer=None):
    return TextData(Tokens([shard(tmp_path / "train.bin", train)]), Tokens([shard(tmp_path / "val.bin", val)]),
                    vocab, end, tokenizer)  # fmt: skip
