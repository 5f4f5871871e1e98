"""Generation with a cache against generation without one: greedy, beams, sampling, assisted, streamed."""

from threading import Thread

import pytest
import torch

from polymix import errors
from tests.models.tiny import IDS, LEFT, MIXERS, STATES, VOCAB, error, tiny, transformers

SHAPE = dict(zip(MIXERS, ["llama", "gpt", "gpt-none", "llama-none"] * 4, strict=False))
MORE = 7


def generate(model, ids=IDS, mask=LEFT, **options):
    torch.manual_seed(0)
    return model.generate(ids, attention_mask=mask, **{"max_new_tokens": MORE, "do_sample": False, **options})


def both(model, **options):
    """What comes with and without a cache."""
    return generate(model, **options), generate(model, use_cache=False, **options)


@pytest.mark.parametrize("name", MIXERS)
def test_greedy_with_a_cache_is_greedy_without_token_for_token(name):
    model = tiny(name, SHAPE[name])
    for options in ({"no_repeat_ngram_size": 1}, {}):  # the first for tokens that differ: small models repeat one
        cached, plain = both(model, **options)
        assert torch.equal(cached, plain)
        if options:
            assert len(set(cached[:, IDS.shape[1] :].flatten().tolist())) > 1, "one token for everything shows nothing"
    for row, ids, mask in zip(cached, IDS, LEFT, strict=True):
        one = model.generate(ids[mask.bool()][None], max_new_tokens=MORE, do_sample=False)
        assert torch.equal(row[-MORE:], one[0, -MORE:]), "padding changed what follows"


@pytest.mark.parametrize("name", MIXERS)
def test_beams_with_a_cache_are_beams_without(name):
    model = tiny(name, SHAPE[name])
    cached, plain = both(model, num_beams=3, num_return_sequences=2)
    assert torch.equal(cached, plain), "the beams' states were not reordered with them"
    assert len(cached) == 2 * len(IDS)


@pytest.mark.parametrize("name", ["pom", "pom-local", "mamba", "softmax"])
def test_beams_are_reordered_at_all(name, monkeypatch):
    """Else the test above would show nothing."""
    model = tiny(name, SHAPE[name])
    expected = generate(model, num_beams=4, max_new_tokens=12)
    monkeypatch.setattr(transformers.DynamicCache, "reorder_cache", lambda cache, order: None)
    assert not torch.equal(generate(model, num_beams=4, max_new_tokens=12), expected)


@pytest.mark.parametrize("name", ["pom", "pom-softmax", "hyena", "softmax"])
def test_samples_with_a_cache_are_samples_without(name):
    cached, plain = both(tiny(name, SHAPE[name]), do_sample=True, top_k=9, num_return_sequences=3)
    assert torch.equal(cached, plain)
    new = cached[:, -MORE:]
    assert not torch.equal(new[0], new[1]), "the sequences of a prompt are all the same"


@pytest.mark.parametrize("name", MIXERS)
def test_generation_goes_on_from_a_cache_of_the_users(name):
    model = tiny(name, SHAPE[name])
    with torch.no_grad():
        cache = model(IDS[:, :8], LEFT[:, :8]).past_key_values
    assert torch.equal(generate(model, past_key_values=cache), generate(model))


@pytest.mark.parametrize("name", ["pom", "softmax", "pom-local"])
def test_prompts_given_as_embeddings(name):
    model = tiny(name, SHAPE[name])
    embeds = model.get_input_embeddings()(IDS)
    new = model.generate(inputs_embeds=embeds, attention_mask=LEFT, max_new_tokens=MORE, do_sample=False)
    assert torch.equal(new, generate(model)[:, IDS.shape[1] :])


@pytest.mark.parametrize("name", ["pom", "softmax"])
def test_a_prompt_in_chunks(name):
    model = tiny(name, SHAPE[name])
    assert torch.equal(generate(model, prefill_chunk_size=5), generate(model))


def test_logits_to_keep():
    model = tiny("pom-local", "llama")
    with torch.no_grad():
        full = model(IDS, LEFT).logits
        for kept in (1, 5, torch.tensor([2, 7, 11])):
            expected = full[:, -kept:] if isinstance(kept, int) else full[:, kept]
            got = model(IDS, LEFT, logits_to_keep=kept).logits
            assert got.shape == expected.shape and error(got, expected) <= 1e-6


# -- what takes tokens back, or wants a cache of fixed length


def test_attention_alone_can_be_assisted_and_can_assist():
    model = tiny("softmax", "llama")
    expected = generate(model, IDS[:1], None)
    for assistant in ({"assistant_model": tiny("softmax", "gpt")}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(generate(model, IDS[:1], None, **assistant), expected)


@pytest.mark.parametrize("name", [*STATES, "pom-softmax"])
def test_a_model_with_a_state_says_that_it_cannot_be_assisted(name):
    model = tiny(name)
    for assistant in ({"assistant_model": tiny("softmax")}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            generate(model, IDS[:1], None, **assistant)


@pytest.mark.parametrize("name", ["pom", "pom-softmax", "local"])
def test_a_model_with_a_state_says_that_it_cannot_assist(name):
    with pytest.raises(errors.CapabilityError, match=r"only grows.*crop.*no assistant_model"):
        generate(tiny("softmax"), IDS[:1], None, assistant_model=tiny(name), max_new_tokens=20)


@pytest.mark.parametrize("name", ["pom", "softmax", "pom-softmax"])
def test_a_cache_of_fixed_length_raises(name):
    with pytest.raises(errors.CapabilityError, match=r"StaticCache of fixed length.*Leave cache_implementation out"):
        generate(tiny(name), cache_implementation="static")
    cache = transformers.StaticCache(config=tiny(name).config, max_cache_len=32)
    with pytest.raises(errors.CapabilityError, match="StaticCache"):
        tiny(name)(IDS, past_key_values=cache)


# -- streaming


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers", reason="untested: tokenizers is not installed")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")


def test_text_is_streamed_word_by_word():
    words, model = tokenizer(), tiny("pom-local")
    streamer = transformers.TextIteratorStreamer(words, skip_prompt=True)
    options = {"input_ids": IDS[:1], "streamer": streamer, "max_new_tokens": MORE, "do_sample": False}
    thread = Thread(target=model.generate, kwargs=options)
    thread.start()
    parts = [part for part in streamer if part]
    thread.join()
    assert len(parts) > 2, "the text came in one piece"
    assert "".join(parts).split() == words.decode(generate(model, IDS[:1], None)[0, -MORE:]).split()


def test_the_pipeline_for_text():
    words, model = tokenizer(), tiny("pom")
    said = transformers.pipeline("text-generation", model, tokenizer=words, device="cpu")(
        ["w5 w6 w7", "w9"], batch_size=2, max_new_tokens=MORE, do_sample=False, return_full_text=False
    )
    for prompt, ((answer,)) in zip(([5, 6, 7], [9]), said, strict=True):
        new = generate(model, torch.tensor([prompt]), None)[0, len(prompt) :]
        assert answer["generated_text"].split() == words.decode(new).split()
