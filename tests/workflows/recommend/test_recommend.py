"""`polymix.recommend`: layers are found as models hold them, decisions follow from times, what is wrong is said."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import polymix
from polymix.compat import cure_torchvision
from polymix.convert.find import attention_modules, known_input
from polymix.convert.masks import Seen, seen_through
from polymix.convert.tracing import call_of
from polymix.errors import OptionError, PolymixError
from polymix.measure import timing
from polymix.measure.candidates import CandidateTimer
from polymix.measure.shapes import shape_of, shapes_of
from polymix.measure.timing import Timing, interleaved_within
from polymix.mixers import PadreConfig, SoftmaxConfig
from polymix.models import VisionTransformer
from polymix.workflows.recommend import Candidate, Shape, parse_shape, recommend
from polymix.workflows.recommend.advice import LayerAdvice, Recommendation
from polymix.workflows.recommend.decide import choose, gain, wins_from, worth_it
from polymix.workflows.recommend.layers import record

MACHINE = {"gpu": None, "cpu": "a CPU", "threads": 1}
PAIR = ("padre:degree=2:kernel_size=3", "pom")


def near(median, spread=0.02, runs=5):
    """A Timing around `median` seconds."""
    return Timing(tuple(median * (1 + spread * (i / (runs - 1) * 2 - 1)) for i in range(runs)))


def contender(name):
    """The contender behind a name of the harness, ("call", "pom"), or of a call that is timed by itself."""
    return name[1] if isinstance(name, tuple) else name


def advice(attention, *times, names=(), lengths=None):
    mixers = [Candidate(f"m{i}", PadreConfig(degree=i + 1), time) for i, time in enumerate(times)]
    return LayerAdvice(
        names, "Attention", Shape(tokens=16, dim=8, grid=(4, 4)), attention, tuple(mixers), lengths or {}
    )


@pytest.fixture
def stopwatch(monkeypatch):
    """Every call runs once, and takes what the test says: attention 10 ms, a padre 2, any other 20, a model 100."""
    times = {"attention": 0.010, "model": 0.100, "padre:degree=2:kernel_size=3": 0.002}

    def clock(calls, seconds, device):
        for call in calls.values():
            call()
        return {name: near(times.get(contender(name), 0.020)) for name in calls}

    monkeypatch.setattr("polymix.measure.candidates.interleaved_within", clock)
    monkeypatch.setattr("polymix.workflows.recommend.run.interleaved_within", clock)
    return times


# Decisions


def test_the_fastest_beyond_the_noise_is_chosen():
    fast, faster = Candidate("a", timing=near(0.5)), Candidate("b", timing=near(0.2))
    assert choose(near(1.0), [fast, faster, Candidate("c", reason="unfit")]) is faster
    assert choose(near(1.0), [fast, Candidate("b", timing=near(0.2, spread=5.0))]) is fast, "a scattered one is no gain"


@pytest.mark.parametrize(("attention", "candidate", "worth"), [
    (near(1.0), near(0.5), True), (near(1.0, spread=0.001), near(0.97, spread=0.001), False),
    (near(1.0, spread=0.3), near(0.9, spread=0.3), False), (near(1.0), near(1.5), False),
    (Timing((1.0,)), near(0.6), False), (Timing((1.0,)), near(0.4), True), (None, near(9.0), True), (near(1.0), None, False),
])  # fmt: skip
def test_worth_it_needs_five_per_cent_and_ranges_apart(attention, candidate, worth):
    """3 % is too little, ranges that overlap are noise, one run must win twice over, attention without memory loses."""
    assert worth_it(attention, Candidate("m", timing=candidate)) is worth


def test_gain_spans_what_the_runs_allow():
    middle, low, high = gain(near(1.0), Candidate("m", timing=near(0.5)))
    assert middle == pytest.approx(2.0)
    assert low == pytest.approx(0.98 / 0.51) and high == pytest.approx(1.02 / 0.49), "10 % and 90 % against each other"


def test_wins_from_is_the_start_of_an_unbroken_run():
    assert wins_from({64: True, 256: False, 1024: True, 4096: True}) == 1024
    assert wins_from({64: True, 256: False}) is None


def test_keep_everywhere_is_an_answer():
    answer = Recommendation((advice(near(1.0), near(2.0)),), None, "float32", False, MACHINE)
    assert answer.headline.startswith("Keep attention everywhere")
    assert answer.layers[0].action == "keep"
    assert answer.layers[0].gain == pytest.approx(0.5), "how far the fastest is from it"
    assert answer.layers[0].mixer is None
    assert "accuracy" in str(answer)


def test_the_model_gains_what_its_layers_save():
    layers = (advice(near(0.010), near(0.004), names=("a", "b", "c")), advice(near(0.001), near(0.002), names=("d",)))
    answer = Recommendation(layers, near(0.100), "float32", False, MACHINE)
    assert answer.estimate == pytest.approx(0.100 - 3 * 0.006), "one saving a call, none where attention is kept"
    assert "3 of 4 layers" in answer.headline and "estimate" in answer.headline
    impossible = Recommendation(layers, near(0.001), "float32", False, MACHINE)
    assert impossible.estimate == pytest.approx(3 * 0.004), "never less than the mixers alone"


def test_the_table_fits_and_the_dict_is_json():
    names = tuple(f"transformer.encoder.layers.{i}.attention.self" for i in range(48))
    long = Candidate("padre:degree=3:token=monarch:blocks=8:heads=4", PadreConfig(), near(0.00123), folded=True)
    layer = LayerAdvice(names, "VeryLongNameOfAnAttention", Shape(tokens=65536, dim=1024, grid=(256, 256), heads=16, batch=64),
                        near(12.3456), (long, Candidate("poly_nl", reason="word " * 60)), {16384: False, 65536: True})  # fmt: skip
    answer = Recommendation((layer,), near(300.0), "bfloat16", True, MACHINE, ("a note " * 40,))
    assert max(map(len, str(answer).splitlines())) <= 96
    assert "65,536 tokens on" in str(answer) and ".fold()" in str(answer)
    content = json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    assert content["layers"][0]["wins_from"] == 65536
    assert content["layers"][0]["candidates"][1]["reason"]


# Layers


class SplitProjections(nn.Module):
    """Attention as transformers writes it: q_proj, k_proj, v_proj, and the heads in a config."""

    def __init__(self, causal=False):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, 8) for _ in range(4))
        self.config, self.is_causal = SimpleNamespace(num_attention_heads=2), causal

    def forward(self, hidden_states, key_value_states=None, attention_mask=None, past_key_values=None, **kwargs):
        source = hidden_states if key_value_states is None else key_value_states
        q, k, v = self.q_proj(hidden_states), self.k_proj(source), self.v_proj(source)
        if past_key_values is not None:
            past_key_values.append(k)
        return self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v, attention_mask)), None


def found(model, *args, **kwargs):
    layers, notes = record(model, call_of(model.eval(), args, kwargs, False), False)
    assert not notes
    return layers


def test_our_vit_with_its_own_grid():
    model = VisionTransformer(
        SoftmaxConfig(heads=2), image_size=(8, 16), patch_size=4, dim=8, depth=3, class_token=True
    )
    (layer,) = found(model, torch.randn(2, 3, 8, 16))
    assert layer.names == ("blocks.0.mixer", "blocks.1.mixer", "blocks.2.mixer")
    assert layer.shape == Shape(tokens=9, dim=8, heads=2, batch=2, grid=(2, 4))
    assert layer.shape.prefix == 1


def test_a_mixer_is_no_attention():
    model = VisionTransformer(PadreConfig(kernel_size=3), image_size=8, patch_size=4, dim=8, depth=1)
    assert not dict(attention_modules(model))


def test_timm():
    cure_torchvision()
    timm = pytest.importorskip("timm", reason="untested: timm's attention, for which timm is needed")
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, depth=2, embed_dim=24, num_heads=3)
    (layer,) = found(model, torch.randn(1, 3, 32, 32))
    assert layer.names == ("blocks.0.attn", "blocks.1.attn")
    assert layer.shape == Shape(tokens=5, dim=24, heads=3, grid=(2, 2)), "a class token before a grid of 2 × 2"


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_alone(batch_first):
    x = torch.randn(2, 9, 8) if batch_first else torch.randn(9, 2, 8)
    (layer,) = found(nn.MultiheadAttention(8, 2, batch_first=batch_first), x, x, x)
    assert layer.shape == Shape(tokens=9, dim=8, heads=2, batch=2, grid=(3, 3), assumed=True)


def test_the_fast_path_of_the_encoder_hides_nothing():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    (layer,) = found(model, torch.randn(2, 9, 8))
    assert layer.names == ("layers.0.self_attn", "layers.1.self_attn")
    assert torch.backends.mha.get_fastpath_enabled(), "it is on again for the measurement"
    with torch.inference_mode():
        layer.call(False)()


def test_an_encoder_with_a_causal_mask_and_padding():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False)
    mask, padding = torch.ones(9, 9).triu(1).bool(), torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 7:] = True
    (layer,) = found(model, torch.randn(2, 9, 8), mask=mask, src_key_padding_mask=padding)
    assert layer.shape == Shape(tokens=9, dim=8, heads=2, batch=2, grid=(9,), causal=True, mask="padding")


def test_a_decoder_attends_to_itself_and_to_a_context():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1)
    layers = found(model, torch.randn(1, 9, 8), torch.randn(1, 4, 8))
    assert [layer.shape.cross for layer in layers] == [None, 4]


def test_split_projections_causal_by_attribute_or_cross():
    (layer,) = found(SplitProjections(causal=True), torch.randn(1, 6, 8))
    assert layer.shape == Shape(tokens=6, dim=8, heads=2, grid=(6,), causal=True)
    (layer,) = found(SplitProjections(), torch.randn(1, 6, 8), key_value_states=torch.randn(1, 5, 8))
    assert layer.shape.cross == 5 and not layer.shape.causal


def test_a_call_again_and_again_fills_no_cache():
    cache = []
    (layer,) = found(SplitProjections(), torch.randn(1, 6, 8), past_key_values=cache)
    layer.call(False)()
    assert len(cache) == 1, "the model's own run alone"


def test_a_layer_is_timed_as_self_attention_if_it_is():
    x = torch.randn(1, 4, 8)
    (layer,) = found(nn.MultiheadAttention(8, 2, batch_first=True), x, x, x)
    assert layer.args[0] is layer.args[1] is layer.args[2], "three copies would be projected apart"


def test_transformers():
    cure_torchvision()
    transformers = pytest.importorskip("transformers", reason="untested: transformers' attention")
    gpt = transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=20, n_positions=16))
    bert = transformers.BertModel(transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                                          intermediate_size=8, vocab_size=20))  # fmt: skip
    for model, causal, count in ((gpt, True, 2), (bert, False, 1)):
        layers, _ = record(model, call_of(model.eval(), (torch.arange(6)[None],), {}, False), True)
        (layer,) = layers
        assert len(layer.names) == count
        assert layer.shape == Shape(tokens=6, dim=8, heads=2, grid=(6,), causal=causal), type(model).__name__
        layer.call(True)()


def test_masks_in_every_convention():
    tril = torch.ones(4, 4).tril().bool()
    added = torch.zeros(1, 1, 4, 4).masked_fill(~tril, torch.finfo(torch.float32).min)
    padded = torch.tensor([[1, 1, 0, 0]])
    plain, mha = nn.Identity(), nn.MultiheadAttention(4, 1)
    for module, given, expected in (
        (plain, {}, Seen(False, None)), (plain, {"attention_mask": added}, Seen(True, None)), (plain, {"mask": tril}, Seen(True, None)),
        (mha, {"attn_mask": ~tril}, Seen(True, None)), (plain, {"attention_mask": padded}, Seen(False, "padding")),
        (mha, {"key_padding_mask": torch.zeros(2, 4).bool()}, Seen(False, None)), (plain, {"is_causal": True}, Seen(True, None)),
        (plain, {"mask": tril.roll(1, 1)}, Seen(False, "arbitrary")), (plain, {"mask": tril & padded.bool()}, Seen(True, "padding")),
    ):  # fmt: skip
        assert seen_through(module, given, 4, 4) == expected, given


# Shapes


def test_shapes_as_people_write_them():
    assert shapes_of((16, 8), 3) == [Shape(tokens=16, dim=8, batch=3)]
    assert shapes_of([(2, 16, 8), {"tokens": 9, "dim": 8, "heads": 2}], 1) == [
        Shape(tokens=16, dim=8, batch=2), Shape(tokens=9, dim=8, heads=2)]  # fmt: skip
    assert shape_of(parse_shape("2x16x8:heads=2:grid=4x4"), 1) == Shape(tokens=16, dim=8, heads=2, batch=2, grid=(4, 4))
    assert shape_of({"tokens": 9, "dim": 8, "cross": True}, 1).cross == 9


@pytest.mark.parametrize(
    ("tokens", "grid", "prefix"), [(196, (14, 14), 0), (197, (14, 14), 1), (128, (8, 16), 0), (211, (211,), 0)]
)
def test_a_grid_nobody_named_is_assumed_and_said(tokens, grid, prefix):
    shape = Shape(tokens=tokens, dim=8).placed()
    assert (shape.grid, shape.prefix, shape.assumed) == (grid, prefix, True)
    assert ("assumed" in str(shape)) is (len(grid) > 1)


def test_longer_keeps_form_and_prefix():
    shape = Shape(tokens=17, dim=8, grid=(4, 4))
    assert (shape.longer(4.0).grid, shape.longer(4.0).tokens) == ((8, 8), 65)
    assert Shape(tokens=64, dim=8, causal=True).placed().longer(0.25).tokens == 16


# The whole


def test_a_model_from_end_to_end(stopwatch):
    model = VisionTransformer(SoftmaxConfig(heads=2), image_size=16, patch_size=4, dim=8, depth=3).train()
    answer = recommend(model, candidates=PAIR, seconds=5.0)
    (layer,) = answer.layers
    assert (layer.action, layer.mixer) == ("replace", PAIR[0])
    assert layer.options == {"kernel_size": 3, "grid": (4, 4)}, "what the mixer needs to be told"
    assert layer.gain == pytest.approx(5.0)
    assert answer.estimate == pytest.approx(0.100 - 3 * 0.008)
    assert layer.wins_from == 4 and sorted(layer.lengths) == [4, 16, 64], "0.25, 1 and 4 times the tokens"
    assert all(part.training for part in model.modules()), "the model is as it was"
    assert all(not part._forward_pre_hooks for part in model.modules())


def advised(model, given, mixer):
    """The recommendation of a model, followed."""
    answer = recommend(model.eval(), input=given, candidates=(mixer, "poly_sa"), seconds=1.0)
    return answer, polymix.convert(model, answer, input=given, copy=True)


def test_convert_follows_a_recommendation(stopwatch):
    stopwatch["padre-2"] = 0.001
    model = VisionTransformer(SoftmaxConfig(heads=2), image_size=16, patch_size=4, dim=8, depth=2)
    parts = list(model.modules())
    answer, report = advised(model, torch.randn(1, 3, 16, 16), "padre:degree=2")
    assert answer.plan() == dict.fromkeys(("blocks.0.mixer", "blocks.1.mixer"), PadreConfig(degree=2))
    assert [layer.now for layer in report.layers] == ["padre", "padre"]
    assert all(a is b for a, b in zip(parts, model.modules(), strict=True)), "the model is as it was"
    stopwatch["padre-2"] = 0.1
    answer, report = advised(model, torch.randn(1, 3, 16, 16), "padre:degree=2")
    assert set(answer.plan().values()) == {"keep"} and not report.adapters


def test_a_plan_has_the_names_of_convert_and_nothing_that_it_refuses(stopwatch):
    stopwatch |= {"padre-2": 0.002, "poly_sa": 0.001}
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    answer, report = advised(model, torch.randn(1, 16, 8), "padre:degree=2")
    assert [layer.now for layer in report.layers] == ["padre"], "poly_sa needs a grid, which nobody said"
    assert "grid" in answer.layers[0].candidates[1].reason and answer.layers[0].shape.assumed
    alone, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 16, 8)
    answer, report = advised(alone, (x, x, x), "padre:degree=2")
    assert answer.plan() == {"": PadreConfig(degree=2)} and type(report.model) is not type(alone)


def test_a_plan_for_what_convert_does_not_know(stopwatch):
    with pytest.raises(OptionError, match="shapes"):
        recommend((16, 8), candidates=("pom",), seconds=1.0).plan()
    answer = recommend(SplitProjections(), input=torch.randn(1, 6, 8), candidates=("pom",), seconds=1.0)
    with pytest.raises(OptionError, match="no adapter"):
        answer.plan()


def test_training_leaves_the_model_alone(stopwatch):
    model = nn.Sequential(nn.BatchNorm1d(9), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    answer = recommend(model, input=torch.randn(2, 9, 8), training=True, candidates=PAIR, seconds=5.0)
    assert answer.layers[0].action == "replace"
    assert model[0].num_batches_tracked == 0 and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("shape", "mixers", "unfit"), [
    ({"causal": True}, ("padre:degree=2:kernel_size=3", "pom", "poly_nl", "poly_sa"), {"poly_nl": "causal", "poly_sa": "causal"}),
    ({"cross": 5}, ("padre:degree=2:kernel_size=3", "pom"), {"padre:degree=2:kernel_size=3": "context"}),
    ({"mask": "arbitrary"}, ("pom", "qt"), {"qt": "mask"}),
])  # fmt: skip
@pytest.mark.parametrize("training", [False, True])
def test_what_a_mixer_cannot_do_is_said(stopwatch, shape, mixers, unfit, training):
    answer = recommend({"tokens": 16, "dim": 8, **shape}, candidates=mixers, training=training, seconds=5.0)
    reasons = {it.mixer: it.reason for it in answer.layers[0].candidates if it.reason}
    assert reasons.keys() == unfit.keys(), reasons
    assert all(word in reasons[mixer] for mixer, word in unfit.items())


def test_an_order_that_is_asked_for_in_the_call_is_said(stopwatch):
    stopwatch["pom"] = 0.001
    answer = recommend({"tokens": 16, "dim": 8, "causal": True}, candidates=PAIR[:1], seconds=1.0)
    assert answer.layers[0].options["causal"] is True and "called with" not in str(answer), "padre is built so"
    answer = recommend({"tokens": 16, "dim": 8, "causal": True}, candidates=("pom",), seconds=1.0)
    assert 'create_mixer("pom", 8), called with causal=True' in str(answer)


def test_a_candidate_that_computes_wrong_has_no_time(stopwatch, monkeypatch):
    monkeypatch.setattr("polymix.mixers.PomMixer.mix", lambda self, x, context, call: x * torch.rand(()))
    answer = recommend((16, 8), candidates=("pom",), seconds=5.0)
    assert "off float64" in answer.layers[0].candidates[0].reason


def test_times_are_taken_within_the_budget(monkeypatch):
    clock = {"slow": 3.0, "fast": 0.001}
    monkeypatch.setattr(timing, "once", lambda call, device: clock[call()])
    monkeypatch.setattr(
        timing, "interleaved", lambda calls, seconds, device: {name: near(clock[name]) for name in calls}
    )
    times = interleaved_within({"slow": lambda: "slow", "fast": lambda: "fast"}, 2.0, "cpu")
    assert (len(times["slow"].runs), len(times["fast"].runs)) == (1, 5), "what would take too long has one run"

    def exhausted():
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    assert "slow" not in interleaved_within({"slow": exhausted, "fast": lambda: "fast"}, 2.0, "cpu")


def test_really_measured():
    answer = recommend([(16, 8), (2, 9, 8)], candidates=("pom",), seconds=0.5, dtype="bfloat16")
    assert [layer.action in ("keep", "replace") for layer in answer.layers] == [True, True]
    assert all(it.timing is not None for layer in answer.layers for it in layer.candidates)
    assert answer.dtype == "bfloat16"


class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize(("what", "options", "named"), [
    (nn.Linear(2, 2), {"input": torch.zeros(1, 2)}, "nn.MultiheadAttention"), (Opaque(), {}, "input"), (Opaque(), {"input": 3}, "input"),
    (Opaque(), {"input": torch.zeros(1, 4, 8), "batch": 2}, "batch"), ((16, 8), {"input": torch.zeros(1)}, "input"),
    ((16,), {}, "shapes"), ([], {}, "shapes"), ("16x8", {}, "shapes"), ((16, 0), {}, "dim"), ({"tokens": 16}, {}, "dim"),
    ({"tokens": 16, "dim": 8, "head": 2}, {}, "heads"), ({"tokens": 16, "dim": 8, "heads": 3}, {}, "heads"),
    ({"tokens": 16, "dim": 8, "grid": (5, 5)}, {}, "grid"), ({"tokens": 16, "dim": 8, "causal": True, "cross": 3}, {}, "causal"),
    ((16, 8), {"device": "cuda:99"}, "device"), ((16, 8), {"device": "meta"}, "device"), ((16, 8), {"dtype": "int8"}, "dtype"),
    ((16, 8), {"dtype": torch.float64}, "dtype"), ((16, 8), {"candidates": "pom"}, "candidates"), ((16, 8), {"candidates": ()}, "candidates"),
    ((16, 8), {"candidates": ("pom", "softmax")}, "candidates"), ((16, 8), {"candidates": ("pomm",)}, "pom"),
    ((16, 8), {"batch": 0}, "batch"), ((16, 8), {"seconds": 0}, "seconds"), ((16, 8), {"seconds": math.nan}, "seconds"),
    ((16, 8), {"threads": 0}, "threads"), ((16, 8), {"training": 1}, "training"),
])  # fmt: skip
def test_errors_name_what_is_wrong(what, options, named):
    with pytest.raises(PolymixError, match=named):
        recommend(what, **options)


def test_a_bad_shape_on_the_command_line():
    with pytest.raises(OptionError, match="--shape"):
        parse_shape("4096")


def test_inputs_that_a_model_tells():
    model = VisionTransformer(SoftmaxConfig(), image_size=(8, 12), patch_size=4, dim=8, depth=1, channels=2)
    assert known_input(model, 3).shape == (3, 2, 8, 12)


def test_threads_are_as_they_were(stopwatch):
    before = torch.get_num_threads()
    recommend((16, 8), candidates=("pom",), threads=before + 1, seconds=1.0)
    assert torch.get_num_threads() == before


def test_candidates_are_folded_for_inference_alone():
    shape = Shape(tokens=16, dim=8, grid=(4, 4))
    for training in (False, True):
        _, (candidate,) = CandidateTimer("cpu", torch.float32, training).compare(
            shape, {"p": PadreConfig(kernel_size=3)}, 0.05
        )
        assert candidate.folded is not training
