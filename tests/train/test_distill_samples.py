"""Data-free distillation: what models draw themselves follows their distribution, and is drawn once."""

from types import SimpleNamespace

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import CapabilityError, OptionError, ResultsError
from polymix.train.distill import Samples, distill
from tests.helpers import slow_but
from tests.train.distilled import same, vit

cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: models of transformers")
MASK, CLS, SEP = 3, 4, 5
TOKENIZER = SimpleNamespace(mask_token_id=MASK, cls_token_id=CLS, sep_token_id=SEP, all_special_ids=[MASK, CLS, SEP])
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def loud(model):
    """A model whose predictions are far from uniform and depend on what they are given."""
    draw = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.4, generator=draw)
    return model.eval()


def gpt2(size=4):
    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(vocab_size=size, n_positions=16, n_embd=16, n_layer=2, n_head=2, **ends)
    return loud(transformers.GPT2LMHeadModel(config))


def bert(cls=None):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=6, max_position_embeddings=16, **SIZES)
    return loud((cls or transformers.BertForMaskedLM)(config))


def table(texts, size):
    """The share of each text (…) among rows of tokens."""
    places = sum(texts[:, at] * size**at for at in range(texts.shape[1]))
    return torch.bincount(places, minlength=size ** texts.shape[1]) / len(texts)


def apart(a, b):
    """Half the sum of the differences of two distributions: 0 if they are the same, at most 1."""
    return 0.5 * float((a - b).abs().sum())


def every(size, length):
    """All texts, in the order of `table`."""
    return torch.cartesian_prod(*[torch.arange(size)] * length).flip(1)


@torch.no_grad()
def test_texts_of_a_causal_model_follow_its_distribution():
    model, texts = gpt2(), every(4, 3)
    chances = model(texts).logits.softmax(-1)
    exact = 0.25 * torch.stack([chances[:, at].gather(1, texts[:, at + 1, None]) for at in range(2)]).prod(0)[:, 0]
    assert apart(exact, torch.full_like(exact, 1 / 64)) > 0.2, "this model says nothing"
    drawn = Samples(batches=1, batch_size=20_000, tokens=(3, 3)).draw(model)[0]["input_ids"]
    assert apart(table(drawn, 4), exact) < 0.04


@torch.no_grad()
@pytest.mark.parametrize("rounds", [1, 2, 16])
def test_texts_of_a_masked_model_follow_its_distribution(rounds):
    """One round draws all places at once, each by itself; more than there are places, one after another."""
    model, texts = bert(), every(3, 2)

    def chances(left, right, place):
        ids = torch.stack([torch.full_like(left, CLS), left, right, torch.full_like(left, SEP)], 1)
        return model(ids).logits[:, 1 + place, :3].softmax(-1).gather(1, texts[:, place, None])[:, 0]

    hidden = torch.full((len(texts),), MASK)
    first = [chances(hidden, hidden, place) for place in range(2)]
    second = [chances(hidden, texts[:, 1], 0), chances(texts[:, 0], hidden, 1)]
    exact = first[0] * first[1] if rounds == 1 else (first[0] * second[1] + first[1] * second[0]) / 2
    options = {"batches": 1, "batch_size": 20_000, "tokens": (4, 4), "masked": 0.0, "tokenizer": TOKENIZER}
    drawn = Samples(rounds=rounds, **options).draw(model)[0]["input_ids"]
    assert set(drawn[:, 0].tolist()) == {CLS} and set(drawn[:, 3].tolist()) == {SEP}
    assert apart(table(drawn[:, 1:3], 3), exact) < 0.012
    if rounds > 1:
        assert apart(first[0] * first[1], exact) > 0.02, "the two ways cannot be told apart"


@torch.no_grad()
def test_cold_samples_are_the_likeliest_and_the_seed_draws_the_first_token_alone():
    drawn = Samples(batches=1, batch_size=50, tokens=(5, 5), temperature=1e-4).draw(gpt2())[0]["input_ids"]
    ours = {tuple(row) for row in drawn.tolist()}
    assert len(ours) == len({row[0] for row in ours}) == 4


def test_random_tokens_are_uniform_and_never_signs():
    drawn = Samples(kind="random", batches=1, batch_size=4000, tokens=(5, 5), masked=0.0, tokenizer=TOKENIZER)
    ids = drawn.draw(bert())[0]["input_ids"][:, 1:-1]
    assert apart(torch.bincount(ids.flatten(), minlength=6) / ids.numel(), torch.tensor([1, 1, 1, 0, 0, 0]) / 3) < 0.02


def test_masked_places_have_labels():
    whole = Samples(batches=1, batch_size=400, tokens=(12, 12), masked=0.0, tokenizer=TOKENIZER)
    text = whole.draw(bert())[0]["input_ids"]
    batch = Samples(**{**vars(whole), "masked": 0.15}).draw(bert(), labels=True)[0]
    hidden = batch["input_ids"] == MASK
    assert 0.13 < hidden[:, 1:-1].float().mean() < 0.17 and not hidden[:, [0, -1]].any()
    assert torch.equal(batch["labels"] == -100, ~hidden)
    assert torch.equal(batch["input_ids"], text.masked_fill(hidden, MASK))


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(
        list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(ours, theirs, strict=True)
    )


def test_a_batch_depends_on_seed_and_place_alone():
    model, few = gpt2(), Samples(batches=2, batch_size=4)
    torch.manual_seed(5)
    first, state = few.draw(model, 1), torch.get_rng_state()
    assert equal(Samples(batches=4, batch_size=4).draw(model, 1)[:2], first)
    assert not equal(few.draw(model, 2), first)
    torch.manual_seed(5)
    assert torch.equal(state, torch.get_rng_state()), "the caller's random numbers were used"
    lengths = {batch["input_ids"].shape[1] for batch in Samples(batches=60, batch_size=1).draw(model)}
    assert lengths <= set(range(2, 17)) and len(lengths) > 10, "not from an eighth to all that the model takes"


def test_a_model_without_a_cache_draws_the_same():
    model, few = gpt2(), Samples(batches=1, batch_size=64, tokens=(8, 8))
    cached, model.forward = few.draw(model), _without_cache(model)
    assert equal(few.draw(model), cached)


def _without_cache(model):
    whole = model.forward

    def forward(input_ids, past_key_values=None, use_cache=False):
        assert past_key_values is None
        return SimpleNamespace(logits=whole(input_ids, use_cache=False).logits)

    return forward


class Cut(Exception):
    pass


def cut_after(monkeypatch, count):
    """The drawing stops after so many batches, as if the process were killed."""
    batch, done = Samples._batch, []

    def draw(self, *args):
        if len(done) == count:
            raise Cut
        done.append(batch(self, *args))
        return done[-1]

    monkeypatch.setattr(Samples, "_batch", draw)
    return done


def test_an_interrupted_drawing_continues_to_the_same_bits(monkeypatch, tmp_path):
    samples, file = Samples(batches=20, batch_size=2), tmp_path / "samples.ckpt"
    whole = samples.draw(gpt2())
    with monkeypatch.context() as patch:
        cut_after(patch, 11)
        with pytest.raises(Cut):
            samples.draw(gpt2(), file=file)
    rest = cut_after(monkeypatch, 99)
    assert equal(samples.draw(gpt2(), file=file), whole)
    assert len(rest) == 10, "batches that were saved are drawn again"
    with pytest.raises(ResultsError, match=r"temperature=1\.0"):
        Samples(batches=20, batch_size=2, temperature=0.5).draw(gpt2(), file=file)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ResultsError, match="Delete it"):
        samples.draw(gpt2(), file=file)


def converted(model=None, plan="pom"):
    model = model or gpt2(40)
    ids = torch.randint(3, model.config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    return polymix.convert(model, plan, input={"input_ids": ids}, copy=True)


SAMPLES = Samples(batches=16, batch_size=4, tokens=(4, 12))


@pytest.mark.slow
def test_an_interrupted_run_draws_once_and_ends_the_same(monkeypatch, tmp_path):
    whole = converted()
    distill(whole, SAMPLES)
    with monkeypatch.context() as patch:
        cut_after(patch, 7)
        with pytest.raises(Cut):
            distill(converted(), SAMPLES, out=tmp_path / "run")
    with pytest.raises(ResultsError, match="resume=True"):
        distill(converted(), SAMPLES, out=tmp_path / "run")
    report = converted()
    distill(report, SAMPLES, out=tmp_path / "run", resume=True)
    same(report, whole)
    monkeypatch.setattr(Samples, "_batch", None)  # all that is needed is in the folder
    again = converted()
    distill(again, SAMPLES, out=tmp_path / "run", resume=True)
    same(again, whole)


QUICK = [{"lora": 2}, {"piece": 4}, {"epochs": 0}]
OPTIONS = [
    {"lora": 2}, {"progressive": 2, "blocks": 0.1}, {"piece": 4}, {"loss": "features"}, {"precision": "bfloat16"},
    {"keep": "last"}, {"labels": 0.0, "temperature": 3.0}, {"imitate_epochs": 0}, {"epochs": 0},
]  # fmt: skip


@pytest.mark.parametrize("options", slow_but(QUICK, OPTIONS), ids=lambda options: "-".join(options))
def test_other_options_of_distill_take_samples(options):
    done = distill(converted(), SAMPLES, **options)
    assert all(torch.isfinite(torch.tensor(done.imitation + done.fine_tuning)))
    assert (len(done.imitation), len(done.fine_tuning)) == (
        options.get("imitate_epochs", 1),
        options.get("epochs", 1),
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [bert, lambda: gpt2(40)], ids=["masked", "causal"])
def test_a_model_comes_closer_to_what_it_was_which_nothing_surpasses(make):
    """Labels are drawn by the original's own chances, so that its perplexity is the least that there is."""
    model = make()
    held_out = Samples(batches=8, batch_size=128, tokenizer=TOKENIZER).draw(model, 1, labels=True)
    report = converted(model)
    samples = Samples(batches=40, batch_size=16, tokenizer=TOKENIZER)
    done = distill(report, samples, val=held_out, metric=polymix.train.distill.perplexity, imitate_epochs=3, epochs=3)
    assert done.accuracy["before"] < done.accuracy["distilled"] < done.accuracy["converted"]


def test_the_original_draws_and_not_the_converted_model():
    drawn, report = SAMPLES.draw(gpt2(40), 3), converted()
    seen = []
    report.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    distill(report, SAMPLES, seed=3, epochs=0, keep="last")
    shapes = [batch["input_ids"].shape for batch in drawn]
    whole = [ids for ids in seen if ids.shape in shapes]
    assert all(any(ids.shape == batch["input_ids"].shape and torch.equal(ids, batch["input_ids"]) for ids in whole)
               for batch in drawn)  # fmt: skip


@pytest.mark.parametrize("kind", ["self", "random"])
def test_models_without_tokens_are_refused_by_name(kind):
    report = polymix.convert(vit(), "padre:kernel_size=3", input=torch.zeros(2, 1, 8, 8))
    with pytest.raises(CapabilityError, match=f"'{kind}' for VisionTransformer.*noise_batches"):
        distill(report, kind)


def test_models_without_a_head_are_refused_and_random_tokens_are_the_way_out():
    report = converted(bert(transformers.BertModel))
    with pytest.raises(CapabilityError, match=r"BertModel, which has no head.*BertForMaskedLM.*'random'"):
        distill(report, "self")
    distill(report, Samples(kind="random", batches=8, batch_size=2), epochs=0)


def test_a_model_of_two_texts_is_refused():
    config = transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(CapabilityError, match="reads two texts"):
        Samples().draw(transformers.T5ForConditionalGeneration(config))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "sefl"}, "self"), ({"batches": 0}, "batches"), ({"temperature": 0.0}, "temperature"),
        ({"masked": 1.0}, "masked"), ({"tokens": (8, 4)}, "shortest"), ({"tokens": 8}, "shortest"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options, said):
    with pytest.raises(OptionError, match=said):
        Samples(**options)


def test_what_the_model_cannot_take_is_refused():
    with pytest.raises(OptionError, match="at most 16"):
        Samples(tokens=(4, 17)).draw(gpt2())
    with pytest.raises(OptionError, match=r"mask.*Samples\(tokenizer="):
        Samples().draw(bert())
    with pytest.raises(OptionError, match="data"):
        distill(converted(), "selfie")
