"""Batches are a function of the seed and the step; packed documents never see each other; losses and bytes are right."""

import math
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from polymix.domains.text.metrics import HeldOut, evaluate, summed_loss
from polymix.domains.text.tokenizer import encode, train_tokenizer
from polymix.domains.text.tokens import Documents, Tokens, Windows, cut, padded, parts_of_steps, pieces
from polymix.errors import DataError
from polymix.models.language import PolymixGPTConfig, PolymixGPTForCausalLM
from polymix.train.data.sampling import Slices
from polymix.train.optimizers import warmup_and_cosine
from polymix.train.task import IGNORED, Process
from tests.domains.texts import TINY, document, prepared, shard

END = 0


@pytest.fixture
def stream(tmp_path):
    """Every token tells its place."""
    return Tokens([shard(tmp_path / "a.bin", range(1, 1001))])


# Order


def test_an_epoch_holds_every_window_once_and_epochs_differ(stream):
    windows = Windows(stream, 16, 1, seed=0)
    epochs = [
        torch.cat([windows(e * windows.windows + i)["input_ids"] for i in range(windows.windows)]) for e in (0, 1)
    ]
    for rows in epochs:
        assert (rows.diff(dim=1) == 1).all(), "a window is no stretch of the text"
        assert max(Counter(rows.flatten().tolist()).values()) == 1, "a token stands twice in an epoch"
        assert rows.numel() > 0.9 * len(stream)
    firsts = [rows[:, 0].tolist() for rows in epochs]
    assert firsts[0] != sorted(firsts[0]), "not shuffled"
    assert firsts[0] != firsts[1] and firsts[0][0] % 16 != firsts[1][0] % 16, "the second epoch cuts as the first"


def test_a_batch_does_not_depend_on_those_before(stream):
    first = Windows(stream, 16, 8, seed=3)
    expected = [first(step)["input_ids"] for step in range(40)]
    for step in (39, 7, 20, 7):
        assert torch.equal(Windows(stream, 16, 8, seed=3)(step)["input_ids"], expected[step])
        assert torch.equal(first(step)["input_ids"], expected[step])
    assert not torch.equal(Windows(stream, 16, 8, seed=4)(0)["input_ids"], expected[0])


def test_a_batch_may_be_larger_than_the_text(tmp_path):
    windows = Windows(Tokens([shard(tmp_path / "a.bin", range(17))]), 16, 5, seed=0)
    assert windows(2)["input_ids"].tolist() == [list(range(16))] * 5
    assert windows(2)["targets"].tolist() == [list(range(1, 17))] * 5


@pytest.mark.parametrize(("parts", "world"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)])
def test_parts_and_processes_share_the_same_batch(stream, parts, world):
    windows = Windows(stream, 16, 8, seed=0)
    feeds = [parts_of_steps(windows, Slices(5, parts * world, rank, world)) for rank in range(world)]
    for step in (5, 6):
        shares = [next(feed) for _ in range(parts) for feed in feeds]
        rows = torch.cat([share["input_ids"] for share in shares]).tolist()
        assert sorted(rows) == sorted(windows(step)["input_ids"].tolist()), "not the batch of one process"
        assert {len(share["input_ids"]) for share in shares} == {8 // parts // world}
        assert sum(int((share["targets"] != IGNORED).sum()) for share in shares) == 8 * 16


# Packing

DOCUMENTS = [[5, 6, 7, 8, END], [9, END], [10, 11, 12, END]]


def test_borders_are_nobody_s_target():
    batch = cut(torch.tensor([[x for d in DOCUMENTS for x in d]]), END)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, END, 9, END, 10, 11, 12]]
    assert batch["segment_ids"].tolist() == [[0, 0, 0, 0, 0, 1, 1, 2, 2, 2]]
    assert batch["targets"].tolist() == [[6, 7, 8, END, IGNORED, END, IGNORED, 11, 12, END]]
    assert "segment_ids" not in cut(torch.tensor([[1, END, 2]]), None)


@pytest.mark.parametrize("mixers", [["pom"], ["local:window=3"], ["softmax"], ["pom", "local:window=3"]], ids="+".join)
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_packed_documents_learn_as_separate_ones(mixers, positions):
    """The same loss and the same gradients; the stream, where documents do see each other, has others."""
    torch.manual_seed(0)
    config = PolymixGPTConfig(vocab_size=16, hidden_size=16, num_layers=2, num_heads=2, mixers=mixers,
                              max_position_embeddings=16, positions=positions)  # fmt: skip
    model = PolymixGPTForCausalLM(config).double()
    row = torch.tensor([[x for d in DOCUMENTS for x in d]])

    def gradients(batches):
        model.zero_grad()
        loss = sum(summed_loss(model, batch) for batch in batches)
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    alone, expected = gradients([cut(torch.tensor([d]), None) for d in DOCUMENTS])
    packed, found = gradients([cut(row, END)])
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=0)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    targets = cut(row, END)["targets"]
    leaking = summed_loss(model, {**cut(row, None), "targets": targets}).detach()
    assert abs(leaking - alone) > 1e-6 * alone, "the test cannot see a leak"


# Padding


@pytest.fixture
def stories(tmp_path):
    """Documents of 5, 2, 1, 4 and 12 tokens, and one without an end."""
    documents = [*DOCUMENTS[:2], [END], DOCUMENTS[2], [*range(21, 32), END], [50, 51]]
    return Tokens([shard(tmp_path / "a.bin", [x for d in documents for x in d])])


def test_a_document_is_a_row_and_a_long_one_several(stories):
    batch = padded(stories, *pieces(stories, END, 5), END, 5)
    assert batch["input_ids"].tolist() == [
        [5, 6, 7, 8, END], [9, END, END, END, END], [10, 11, 12, END, END],
        [21, 22, 23, 24, 25], [26, 27, 28, 29, 30], [31, END, END, END, END], [50, 51, END, END, END],
    ]  # fmt: skip
    gone = IGNORED
    assert batch["targets"].tolist() == [
        [6, 7, 8, END, gone], [END, gone, gone, gone, gone], [11, 12, END, gone, gone],
        [22, 23, 24, 25, 26], [27, 28, 29, 30, 31], [END, gone, gone, gone, gone], [51, gone, gone, gone, gone],
    ]  # fmt: skip


def test_an_epoch_of_documents_holds_each_row_once(stories):
    windows = Documents(stories, 5, 1, 0, END)
    epochs = [[windows(e * 7 + i)["input_ids"][0].tolist() for i in range(7)] for e in (0, 1)]
    assert (
        sorted(epochs[0])
        == sorted(epochs[1])
        == sorted(padded(stories, *pieces(stories, END, 5), END, 5)["input_ids"].tolist())
    )
    assert epochs[0] != epochs[1], "not shuffled anew"
    assert Documents(stories, 5, 3, 0, END)(1)["input_ids"].tolist() == epochs[0][3:6]


@pytest.mark.parametrize("mixers", [["pom"], ["padre"], ["local:window=3"], ["softmax"]], ids="+".join)
def test_what_pads_a_document_changes_nothing(mixers, stories):
    """The loss and gradients of the documents alone, without a mask: no mixer may look ahead."""
    torch.manual_seed(0)
    config = PolymixGPTConfig(vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, mixers=mixers,
                              max_position_embeddings=16)  # fmt: skip
    model = PolymixGPTForCausalLM(config).double()
    rows = padded(stories, *pieces(stories, END, 16), END, 16)
    alone = [
        cut(stories[a : a + n][None], None)
        for a, n in zip(*map(torch.Tensor.tolist, pieces(stories, END, 16)), strict=True)
    ]
    found = []
    for batches in ([rows], alone):
        model.zero_grad()
        loss = sum(summed_loss(model, batch) for batch in batches)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_documents_without_a_target_are_refused(tmp_path):
    with pytest.raises(DataError, match="one token each"):
        pieces(Tokens([shard(tmp_path / "a.bin", [END] * 9)]), END, 4)


# What a model is worth


class Uniform(nn.Module):
    """Every token as likely as any other."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab = vocab

    def forward(self, input_ids, use_cache, segment_ids=None):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, self.vocab))


@pytest.mark.parametrize("packing", ["stream", "segments", "padded"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_bits_per_byte_of_a_uniform_model(tmp_path, packing, world):
    """log2(vocab) bits for each target, over the bytes of the text that they spell: counted by hand here."""
    texts = [f"{document(i)} — naïve 文字 {i}" for i in range(8)]
    tokenizer = train_tokenizer(texts, 300, 16)
    ids = list(encode(tokenizer, texts))
    tokens, vocab = [token for each in ids for token in each], len(tokenizer)
    recipe = TINY.__class__(vocab=300, context=len(tokens) - 1, packing=packing, evaluate_tokens=10**6)
    held = HeldOut.of(prepared(tmp_path, tokens, tokens, vocab, tokenizer.eos_token_id, tokenizer), recipe)
    first = 1 if packing == "stream" else len(texts)  # tokens that nobody predicts
    unseen = [ids[0][0]] if packing == "stream" else [each[0] for each in ids]
    size = sum(len(text.encode()) for text in texts) - sum(len(tokenizer.decode([t]).encode()) for t in unseen)
    targets = len(tokens) - first
    parts = [evaluate(Uniform(vocab), held, Process("cpu", rank, world)) for rank in range(world)]
    assert (held.targets, held.bytes) == (targets, size)
    assert sum(p["val_loss"] for p in parts) == pytest.approx(math.log(vocab), rel=1e-5)
    assert sum(p["bits_per_byte"] for p in parts) == pytest.approx(targets * math.log2(vocab) / size, rel=1e-5)
    if world == 1:
        assert parts[0]["perplexity"] == pytest.approx(vocab, rel=1e-4)


def test_held_out_text_shorter_than_the_context_is_measured_all_the_same(tmp_path):
    held = HeldOut.of(prepared(tmp_path, range(1, 50), range(1, 8)), TINY)
    assert held.targets == 6 and held.bytes is None
    said = evaluate(Uniform(64), held, Process())
    assert set(said) == {"val_loss", "perplexity"}, "bits per byte without a tokenizer"


def test_held_out_windows_predict_each_token_once_and_no_more_than_asked(tmp_path):
    held = HeldOut.of(prepared(tmp_path, range(1, 50), range(1, 60)), TINY.__class__(context=8, evaluate_tokens=33))
    assert torch.cat([b["targets"] for b in held.batches]).flatten().tolist() == list(range(2, 34))


def test_the_learning_rate_rises_in_a_line_and_falls_to_its_end():
    rates = [*map(warmup_and_cosine(100, 0.1, 0.05), range(100))]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(a > b for a, b in pairwise(rates[9:])) and rates[-1] == pytest.approx(0.05)
    assert warmup_and_cosine(1, 0.0, 0.1)(0) == 1.0
