"""Text and shards as people have them: found, kept apart, held out, checked, turned into tokens and back."""

import json
import math
import random
import sys
from itertools import pairwise

import pytest
import torch

from polymix.domains.text.data import find_source, held_out, load, prose
from polymix.domains.text.tokenizer import BORDER, count_bytes, encode, load_tokenizer, size, train_tokenizer
from polymix.domains.text.tokens import Tokens, shards_of, width
from polymix.errors import DataError, MissingExtraError, OptionError
from tests.domains.texts import TINY, document, folder, shard, tiny


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([document(i) for i in range(20)], 300, 16)


# Sources


def test_a_folder_is_read_sorted_and_below(tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in (
        ("b/a.md", "second"),
        ("a.txt", "first"),
        ("c.txt", f"third{BORDER}fourth{BORDER} \n"),
        ("x.py", "no"),
    ):
        (tmp_path / name).write_text(text, "utf-8")
    assert list(find_source(str(tmp_path), "text").documents()) == ["first", "second", "third", "fourth"]


def test_a_file_of_any_name_is_text(tmp_path):
    (tmp_path / "book").write_text("A book", "utf-8")
    assert list(find_source(str(tmp_path / "book"), "text").documents()) == ["A book"]


def test_parquet_gives_its_column(tmp_path):
    pyarrow = pytest.importorskip(
        "pyarrow", reason="untested: parquet, for which pyarrow is needed (the parquet extra)"
    )
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["one", None, "two", ""], "n": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    assert list(find_source(str(tmp_path), "body").documents()) == ["one", "two"]
    for column, match in (("text", "one of body, n"), ("n", "n of int64")):
        with pytest.raises(DataError, match=match):
            list(find_source(str(tmp_path), column).documents())
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(DataError, match=r"a\.parquet, which cannot be read"):
        list(find_source(str(tmp_path), "body").documents())


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"\.\[parquet\]"):
        list(find_source(str(tmp_path), "text").documents())


def test_python_s_prose_is_read_from_source_and_nothing_is_imported(tmp_path):
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text('topics = {"a": "About a", "b": "About b", "c": "About a"}')
    (tmp_path / "m.py").write_text(
        '"""Module."""\nraise SystemExit\nclass A:\n    """Class."""\n    def f():\n        """Method."""\n'
    )
    (tmp_path / "n.py").write_text('"""Module."""\n')
    (tmp_path / "bad.py").write_text("def (")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text('"""Left out."""')
    assert list(prose(tmp_path)) == ["Module.\n\nClass.\n\nMethod.", "About a", "About b"]


def test_a_text_is_held_out_by_what_it_says():
    texts = [document(i) + str(i) for i in range(2000)]
    share = sum(held_out(text, 0.1) for text in texts) / len(texts)
    assert 0.07 < share < 0.13
    assert [held_out(t, 0.1) for t in texts[:50]] == [held_out(t, 0.1) for t in texts[:50]]
    assert not any(held_out(t, 0.1) and not held_out(t, 0.2) for t in texts), "a larger share must contain a smaller"


@pytest.mark.parametrize(("make", "match"), [
    (lambda p: p / "nowhere", "does not exist"), (lambda p: p, "none of them text"),
    (lambda p: shard(p / "a.bin", []), "which is empty"),
    (lambda p: (shard(p / "a.bin", [1]), (p / "a.parquet").write_text("x"), p)[2], "files of one kind"),
])  # fmt: skip
def test_data_that_cannot_be_used_is_told(tmp_path, make, match):
    with pytest.raises(DataError, match=match):
        find_source(str(make(tmp_path)), "text")


def test_text_in_another_encoding_is_told_with_its_place(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc \xe9t\xe9")
    with pytest.raises(DataError, match=r"a\.txt, which is not UTF-8 at byte 4"):
        list(find_source(str(tmp_path), "text").documents())


# Tokenizers


def test_any_text_comes_back(tokenizer):
    """Every Unicode block, lone bytes of which the tokenizer never saw."""
    generator = random.Random(0)
    for _ in range(50):
        text = "".join(
            chr(generator.choice([c for c in (generator.randrange(1, 0x10FFFF),) if not 0xD800 <= c < 0xE000] or [65]))
            for _ in range(20)
        )
        ids = next(encode(tokenizer, [text]))
        assert ids[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id not in ids[:-1]
        assert tokenizer.decode(ids[:-1]) == text
        assert count_bytes(tokenizer, [ids]) == len(text.encode())


def test_long_texts_are_encoded_in_pieces_that_lose_nothing(tokenizer, monkeypatch):
    monkeypatch.setattr("polymix.domains.text.tokenizer._CHUNK", 50)
    text = document(1) + document(2, 5) * 20 + "x" * 300
    (ids,) = encode(tokenizer, [text])
    assert tokenizer.decode(ids[:-1]) == text and ids.count(tokenizer.eos_token_id) == 1


def test_a_tokenizer_loads_from_a_file_and_from_a_folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    expected = tokenizer("the cat")["input_ids"]
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        reader = load_tokenizer(path)
        assert reader("the cat")["input_ids"] == expected and reader.eos_token_id == tokenizer.eos_token_id
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(str(tmp_path)).decode(expected) == "the cat"


@pytest.mark.parametrize(("text", "match"), [(None, "does not exist"), ("{", "cannot be loaded")])
def test_a_tokenizer_that_cannot_be_loaded_is_told(tmp_path, text, match):
    path = tmp_path / "tokenizer.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=match):
        load_tokenizer(path)


def test_a_tokenizer_without_an_end_of_text_is_told(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="without a token that ends a text"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_the_separator_of_berts_texts_ends_a_text(tmp_path):
    """BERT's tokenizers name no end of a text: its encoders could not be distilled on one."""
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "alpha"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab_file=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).eos_token_id == words.index("[SEP]")


def test_a_vocabulary_needs_all_bytes():
    with pytest.raises(OptionError, match="at least 257"):
        train_tokenizer(["a"], 256, 16)


# Shards


def test_shards_behind_one_another_are_one_stream(tmp_path):
    tokens = torch.randint(0, 2**16, (1000,)).tolist()
    for bytes_each in (2, 4):
        cuts = [0, 1, 300, 301, 1000]
        files = [
            shard(tmp_path / f"{bytes_each}-{i}.bin", tokens[a:b], bytes_each)
            for i, (a, b) in enumerate(pairwise(cuts))
        ]
        stream = Tokens(files, bytes_each)
        for start, stop in ((0, 1000), (0, 1), (299, 302), (990, 1000), (5, 5)):
            assert stream[start:stop].tolist() == tokens[start:stop]
        assert stream.part(100, 900).part(50, 300)[10:260].tolist() == tokens[160:400], "a part reaches beyond its end"
        assert len(stream.part(100, 900)) == 800
    assert (width(2**16), width(2**16 + 1)) == (2, 4)


def test_shards_are_not_read_whole(tmp_path):
    """A terabyte that nobody has written: only the page that is asked for is touched."""
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(2**40)
    stream = Tokens([tmp_path / "a.bin"])
    assert len(stream) == 2**39 and stream[2**38 : 2**38 + 3].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("content", "match"), [(b"", "which is empty"), (b"abc", "3 bytes.*The file was cut off")])
def test_a_damaged_shard_is_told(tmp_path, content, match):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(DataError, match=match):
        Tokens([tmp_path / "a.bin"])


def test_a_token_beyond_the_vocabulary_is_told_with_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr("polymix.domains.text.tokens._CHUNK", 64)
    files = [shard(tmp_path / "a.bin", [1] * 100), shard(tmp_path / "b.bin", [1] * 130 + [77, 99])]
    Tokens(files).check(100)
    with pytest.raises(DataError, match=r"expected .*tokens below vocab=77.*got .*b\.bin with token 77 at place 130"):
        Tokens(files).check(77)


def test_held_out_shards_are_those_called_val_or_the_tail(tmp_path):
    train, val = shard(tmp_path / "train.bin", [1] * 10), shard(tmp_path / "val_00.bin", [2] * 5)
    for files in ([train, val], [train]):
        held, out = shards_of(files, 0.5)
        assert (held[:].unique().tolist(), out[:].unique().tolist()) == ([1], [2])
    val.unlink()
    held, out = shards_of([train], 0.3)
    assert (len(held), len(out)) == (7, 3)


# All together


def test_documents_are_kept_apart_and_none_is_on_both_sides(tmp_path):
    recipe = tiny(tmp_path)
    loaded = load(recipe, tmp_path / "data")
    sides = []
    for tokens in (loaded.train, loaded.val):
        texts = loaded.tokenizer.decode(tokens[:]).split(BORDER)
        assert texts.pop() == "", "the last document is not closed"
        sides.append(texts)
    assert sorted(sides[0] + sides[1]) == sorted(find_source(recipe.data, "text").documents())
    assert sides[0] and sides[1] and all(held_out(text, 0.2) for text in sides[1])
    assert loaded.end == loaded.tokenizer.eos_token_id and loaded.vocab == size(loaded.tokenizer) <= 300


def test_tokens_are_found_again_unless_the_text_or_what_makes_them_changes(tmp_path):
    recipe, out = tiny(tmp_path), tmp_path / "data"
    said = []
    first = load(recipe, out, said.append)
    assert said and (load(recipe, out, pytest.fail).fingerprint() == first.fingerprint())
    assert not list(out.glob("*.part"))
    (tmp_path / "texts" / "99.txt").write_text("A new document, " * 9, "utf-8")
    assert load(recipe, out).fingerprint() != first.fingerprint(), "new text was not seen"
    assert load(recipe.changed(vocab=280), out).vocab == 280
    for place in out.glob("tokens-*"):
        (place / "train.bin").write_bytes(b"")
    assert load(recipe.changed(vocab=280), out).vocab == 280


def test_one_document_is_held_out_at_its_end(tmp_path):
    (tmp_path / "book.txt").write_text(document(3, 600), "utf-8")
    loaded = load(TINY.changed(data=str(tmp_path / "book.txt"), held_out=0.1), tmp_path / "data")
    assert math.isclose(len(loaded.val) / (len(loaded.val) + len(loaded.train)), 0.1, abs_tol=0.01)


def shards(tmp_path, **changes):
    file = shard(tmp_path / "bins" / "a.bin", [i % 50 for i in range(400)])
    return TINY.changed(**{"data": str(file), "vocab": 50, **changes})


def test_shards_need_no_tokenizer(tmp_path):
    loaded = load(shards(tmp_path, end_of_text=49), tmp_path / "data")
    assert (loaded.vocab, loaded.end, loaded.tokenizer) == (50, 49, None)
    assert not (tmp_path / "data").exists(), "shards were copied"


def saved(tmp_path):
    train_tokenizer([document(1)], 280, 16).save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.mark.parametrize(("make", "error", "match"), [
    (lambda p: shards(p, vocab=None), OptionError, r"`vocab`: expected the vocabulary size.*got None"),
    (lambda p: shards(p, vocab=49), DataError, "token 49 at place 49"),
    (lambda p: shards(p, vocab=50, end_of_text=50), OptionError, "`end_of_text`: .*got 50"),
    (lambda p: shards(p, packing="segments"), OptionError, "`packing`: .*got segments for shards"),
    (lambda p: shards(p, packing="padded"), OptionError, "`packing`: .*got padded for shards"),
    (lambda p: shards(p, tokenizer=saved(p), vocab=60), OptionError, "at least .* as in the tokenizer"),
    (lambda p: shards(p, context=1000), DataError, "`context`: .*got 1000 with 380 tokens"),
    (lambda p: tiny(p, context=10**6), DataError, "`context`: .*got 1000000"),
    (lambda p: tiny(p, end_of_text=3), OptionError, "None, except with .bin shards"),
    (lambda p: tiny(p, tokenizer=saved(p), vocab=4096), OptionError, "`vocab`: expected .* as in the tokenizer.*got 4096"),
    (lambda p: tiny(p, vocab=256), OptionError, "at least 257"),
    (lambda p: TINY.changed(data=str(folder(p / "blank", 0))), DataError, "none of them text"),
    (lambda p: ((p / "a.txt").write_text(" \n "), TINY.changed(data=str(p / "a.txt")))[1], DataError, "without any text"),
])  # fmt: skip
def test_what_contradicts_is_told(tmp_path, make, error, match):
    with pytest.raises(error, match=match):
        load(make(tmp_path), tmp_path / "data")


def test_a_cached_shard_that_was_damaged_is_told(tmp_path):
    recipe = tiny(tmp_path)
    load(recipe, tmp_path / "data")
    with next((tmp_path / "data").glob("tokens-*/train.bin")).open("r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(DataError, match="token 65535 at place 0"):
        load(recipe, tmp_path / "data")


def test_the_cache_is_plain_json(tmp_path):
    load(tiny(tmp_path), tmp_path / "data")
    stamp = json.loads(next((tmp_path / "data").glob("tokens-*/synthetic.json")).read_text())
    assert json.loads(stamp["settings"])["held_out"] == 0.2


def test_what_lies_beside_the_cache_stays(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").write_text("mine")
    load(tiny(tmp_path), tmp_path / "data")
    assert (tmp_path / "data" / "mine.txt").read_text() == "mine"
