"""Speech: the Conformer's equations, streams, padding, BEST-RQ's codes and masks, error rates and whole runs."""

import pytest
import torch
from torch.nn.functional import cross_entropy, silu

from polymix.domains.speech import data as reading
from polymix.domains.speech.conformer import Conformer, ConformerBlock, Quantizer
from polymix.domains.speech.data import Sample, SpeechData, hidden_tokens
from polymix.domains.speech.metrics import code_losses, codes_of, listen
from polymix.domains.speech.recipe import SpeechRecipe
from polymix.domains.speech.task import SpeechTask
from polymix.errors import CapabilityError, OptionError, ShapeError
from polymix.mixers.spec import parse_mixer
from polymix.train.data.ctc import ReadText, ctc_losses, tokens_needed, words_of
from polymix.train.data.edits import error_rates
from polymix.train.run import train
from polymix.train.saved import SavedRun
from tests.helpers import slow_but

TINY = SpeechRecipe.tiny().changed(control=False)
SMALL = TINY.changed(depth=2, kernel=4)


def model(recipe=SMALL, mixer="pom", outputs=5):
    torch.manual_seed(0)
    host = Conformer(recipe, [parse_mixer(mixer)[1]] * recipe.depth, outputs).double().eval()
    host.mean += torch.randn(recipe.bands)
    host.deviation *= 2
    return host


def features(clips, frames, recipe=SMALL):
    return torch.randn(clips, frames, recipe.bands, dtype=torch.float64)


@pytest.mark.parametrize("subsample", [2, 4])
@pytest.mark.parametrize("mixer", ["pom", "pom:degree=3:expand=2", "padre", "qt", "linear_floor"])
@torch.no_grad()
def test_a_stream_is_the_whole_clip(mixer, subsample):
    """Else a model that was trained on clips hears something else in a stream."""
    recipe = SMALL.changed(causal=True, subsample=subsample)
    host, clip = model(recipe, mixer), features(2, 40, recipe)
    state, parts = None, []
    for part in clip.split((4, 12, 4, 20), 1):
        logits, state = host.step(part, state)
        parts.append(logits)
    assert (torch.cat(parts, 1) - host(clip)).abs().max() < 1e-10
    assert state.tokens == 40 // subsample


@torch.no_grad()
def test_the_state_of_a_stream_does_not_grow():
    recipe = SMALL.changed(causal=True)
    host, state, sizes = model(recipe), None, []
    for _ in range(3):
        state = host.step(features(1, 40, recipe), state)[1]
        sizes.append([part.numel() for part in torch.utils._pytree.tree_leaves(state[1:]) if torch.is_tensor(part)])
    assert sizes[0] == sizes[1] == sizes[2] and sum(sizes[0]) > 0


@pytest.mark.parametrize("mixer", ["pom", "softmax", "padre", "linear_floor"])
@torch.no_grad()
def test_a_causal_token_hears_nothing_after_its_first_frame(mixer):
    recipe = SMALL.changed(causal=True)
    host, clip = model(recipe, mixer), features(1, 32, recipe)
    other = clip.clone()
    other[:, 13:] += 1
    same = (host(clip) == host(other)).all(2)[0]
    assert same[:4].all() and not same[4:].any(), "token 3 begins at frame 12"


@pytest.mark.parametrize("mixer", ["pom", "softmax", "padre", "qt", "linear_floor"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("goal", ["ctc", "best_rq"])
@torch.no_grad()
def test_a_clip_is_heard_alike_in_every_batch(goal, causal, mixer):
    """Padding reaches nothing: not through the stem, the convolutions or the mixers, whatever stands there."""
    recipe = SMALL.changed(causal=causal, goal=goal)
    host, clip, length = model(recipe, mixer), features(3, 50, recipe), 23
    clip[1, length:] = 1e3
    logits = host(clip, torch.tensor([50, length, 40]))
    alone = host(clip[1:2, :length])
    assert (logits[1, : alone.shape[1]] - alone[0]).abs().max() < 1e-10
    assert alone.shape[1] == 6, "⌈23 / 4⌉"


@torch.no_grad()
def test_a_block_is_its_equations():
    """x + ½ FF(x), + mixer(norm(x)), + conv(x), norm(x + ½ FF(x)), the convolution written as a sum over taps."""
    recipe = SMALL.changed(kernel=3)
    torch.manual_seed(0)
    block = ConformerBlock(recipe, parse_mixer("pom")[1]).double().eval()
    x = torch.randn(1, 6, recipe.dim, dtype=torch.float64)

    def feed(part, x):
        norm, enter, _, _, leave, _ = part
        return leave(silu(enter(norm(x))))

    y = x + feed(block.first, x) / 2
    y = y + block.mixer(block.norm(y))
    conv = block.convolution
    values, gates = conv.enter(conv.norm(y)).chunk(2, 2)
    inner = values * torch.sigmoid(gates)
    mixed = conv.depthwise.bias.expand_as(inner).clone()
    for token in range(6):
        for tap in range(3):
            if 0 <= token + tap - 1 < 6:
                mixed[:, token] += conv.depthwise.weight[:, 0, tap] * inner[:, token + tap - 1]
    y = y + conv.leave(silu(conv.inner_norm(mixed)))
    y = block.last_norm(y + feed(block.second, y) / 2)
    assert (block(x, None) - y).abs().max() < 1e-12


def test_a_code_is_that_of_the_nearest_entry():
    quantizer = Quantizer(TINY.changed(goal="best_rq"))
    frames = torch.randn(2, 10, TINY.bands)
    codes = quantizer(frames)
    assert codes.shape == (2, 3)
    stacked = torch.cat((frames[1, 4:8].flatten()[None], torch.cat((frames[1, 8:].flatten(), torch.zeros(16)))[None]))
    projected = stacked @ quantizer.projection.T
    near = torch.cdist(projected / projected.norm(dim=1, keepdim=True), quantizer.codebook).argmin(1)
    assert (codes[1, 1:] == near).all()
    assert not list(quantizer.parameters()), "nothing of it learns"


def test_spans_are_hidden_as_often_and_as_long_as_the_recipe_says():
    recipe = SpeechRecipe(goal="best_rq", mask_start=0.01, mask_seconds=0.4)
    draw = torch.Generator().manual_seed(0)
    hidden = hidden_tokens(400_000, recipe, draw)
    expected = 1 - 0.99 ** (4 * 10)  # no span of 10 tokens, of 4 frames each, starts in the 10 up to a token
    assert abs(hidden.float().mean() - expected) < 0.005
    ends = torch.diff(hidden.int(), prepend=torch.zeros(1, dtype=torch.int32))
    assert ((ends < 0).nonzero()[:100, 0] - (ends > 0).nonzero()[:100, 0]).min() == 10
    assert all(hidden_tokens(8, recipe.changed(mask_start=0.0), draw).any() for _ in range(20)), "never none"


@torch.no_grad()
def test_a_clip_has_the_same_codes_in_every_batch():
    """Of its last token too, some frames of which are padding."""
    host, clip = model(SMALL.changed(goal="best_rq")), features(2, 30)
    clip[1, 21:] = 0
    none = torch.zeros(0, dtype=torch.long)
    both, alone = (
        codes_of(host, reading.Batch(part, frames, none, none))[0]
        for part, frames in ((clip, torch.tensor([30, 21])), (clip[1:, :21], torch.tensor([21])))
    )
    assert torch.equal(both[1, :6], alone[0])


@torch.no_grad()
def test_hidden_tokens_are_heard_as_noise():
    recipe = SMALL.changed(goal="best_rq")
    host, clip = model(recipe), features(1, 16, recipe)
    hidden, noise = torch.tensor([[False, True, False, False]]), features(1, 16, recipe)
    other = clip.clone()
    other[:, 4:8] += 3
    assert torch.equal(host(clip, None, hidden, noise), host(other, None, hidden, noise))
    assert not torch.equal(host(clip), host(other))


def test_losses_are_means_of_clips_by_their_own_lengths():
    logits = torch.randn(2, 8, 4)
    losses = ctc_losses(logits, torch.tensor([8, 5]), torch.tensor([1, 2, 3, 3]), torch.tensor([3, 1]))
    alone = torch.nn.functional.ctc_loss(
        logits[1:, :5].log_softmax(-1).transpose(0, 1), torch.tensor([3]), torch.tensor([5]), torch.tensor([1])
    )
    assert (losses[1] - alone).abs() < 1e-6
    hidden = torch.tensor([[True, False], [True, True]])
    logits, codes = torch.randn(2, 2, 4), torch.tensor([[1, 2], [3, 0]])
    assert (code_losses(logits, codes, hidden)[0] - cross_entropy(logits[0, :1], codes[0, :1])).abs() < 1e-6


def test_error_rates_by_hand():
    rates = error_rates(["the cat sat", "a"], ["the bat sat down", "a"])
    assert rates == {"wer": 2 / 5, "cer": 6 / 17}, "bat, down; b and ' down', of 16 + 1 characters"
    assert tokens_needed("hello") == 6 and tokens_needed("aaa") == 5 and tokens_needed("") == 0


def test_words_have_the_seconds_of_their_characters():
    heard = ReadText("a bc", ((1, 2), (4, 4), (5, 5), (7, 9)), (0.9, 1.0, 0.8, 0.7))
    words = words_of(heard, 0.04)
    assert words == [{"word": "a", "from": 0.04, "to": 0.12, "probability": 0.9},
                     {"word": "bc", "from": 0.2, "to": 0.4, "probability": 0.7}]  # fmt: skip


@torch.no_grad()
def test_a_causal_model_listens_in_steps_and_says_the_same(monkeypatch):
    recipe = SMALL.changed(causal=True)
    host, clip = model(recipe), features(1, 70, recipe)
    monkeypatch.setattr("polymix.domains.speech.metrics.STEP_TOKENS", 5)
    assert (listen(host, clip, recipe) - host(clip)).abs().max() < 1e-10


def test_what_cannot_listen_to_a_stream_says_so():
    with pytest.raises(OptionError, match="causal"):
        model().step(features(1, 8))
    recipe = SMALL.changed(causal=True)
    with pytest.raises(CapabilityError):
        model(recipe, "softmax").step(features(1, 8))
    with pytest.raises(ShapeError, match="multiple of 4"):
        model(recipe).step(features(1, 6))
    with pytest.raises(ShapeError, match="log-mel"):
        model()(torch.randn(1, 8, 3))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mixer": "padre:token=circulant"}, "padding masks|grid"), ({"mixer": "poly_nl", "causal": True}, "a causal form"),
        ({"language_model": "x.arpa"}, "beam"), ({"goal": "best_rq", "beam": 5}, "goal=best_rq"), ({"codes": 64}, "goal=best_rq"),
        ({"rate": 1000, "bands": 40}, "at most 12"), ({"heads": 3}, "heads"),
        ({"codes": 10**6, "dim": 100_000}, "codes"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(options, said):
    with pytest.raises(OptionError, match=said):
        SpeechTask(SpeechRecipe(**{"mixer": "softmax", **options})).check()


def test_batches_are_padded_and_labelled():
    recipe = SpeechRecipe()
    none = reading.Clips((), recipe)
    data = SpeechData("x", " ab", none, none)
    batch = data.collate([Sample(torch.ones(5, 40), "ab"), Sample(torch.ones(3, 40), "b a")])
    assert batch.features.shape == (2, 5, 40) and batch.features[1, 3:].abs().max() == 0
    assert batch.frames.tolist() == [5, 3] and batch.lengths.tolist() == [2, 3]
    assert batch.labels.tolist() == [2, 3, 3, 1, 2] and batch.hidden is None


COMBINATIONS = (
    {}, {"causal": True, "subsample": 2, "kernel": 4}, {"goal": "best_rq"}, {"goal": "best_rq", "causal": True},
    {"plan": "1:1", "depth": 2, "heads": 2}, {"beam": 4, "dropout": 0.1}, {"rate": 8000, "bands": 20},
    {"match_parameters": True, "mixer": "pom", "ema": 0.9}, {"precision": "bfloat16", "accumulate": 2},
    {"mixer": "linear_floor", "plain_text": False},
)  # fmt: skip


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """Where the default data are kept."""
    pytest.importorskip("espeakng_loader", reason="untested: the default data, which espeakng-loader speaks")
    return tmp_path_factory.mktemp("spoken")


@pytest.mark.parametrize(
    "options", slow_but(COMBINATIONS[:3:2], COMBINATIONS), ids=lambda options: ",".join(options) or "default"
)
def test_a_run_measures_evaluates_and_predicts(options, tmp_path, spoken):
    if options.get("beam"):
        pytest.importorskip("flashlight", reason="untested: beams, for which flashlight-text is needed")
    recipe = TINY.changed(**options)
    measured = train(recipe, tmp_path / "run", data_folder=spoken)
    names = {"wer", "cer", "val_loss"} if recipe.goal == "ctc" else {"accuracy", "val_loss", "majority"}
    assert names <= {*measured}
    run = SavedRun.of(tmp_path / "run")
    clips = SpeechTask(recipe).load(spoken).test.clips[0].path.parent
    if recipe.goal == "best_rq":
        with pytest.raises(OptionError, match="predict"):
            run.predict([clips], tmp_path / "heard")
        return
    rows = run.predict([clips, clips / "00001.flac"], tmp_path / "heard")
    assert len(rows) == recipe.synthetic_test + 1 and rows[-1]["text"] == rows[1]["text"]
    assert all((tmp_path / "heard" / row["picture"]).is_file() for row in rows)


def test_a_pretrained_model_learns_to_transcribe(tmp_path, spoken):
    """init takes all but the head and the quantizer, the features' mean and deviation too."""
    said = []
    train(TINY.changed(goal="best_rq"), tmp_path / "pre", data_folder=spoken)
    recipe = TINY.changed(init=str(tmp_path / "pre"), learning_rate=1e-9)
    train(recipe, tmp_path / "run", data_folder=spoken, say=said.append)
    before, after = (torch.load(tmp_path / name / "model.pt") for name in ("pre", "run"))
    shared = [name for name in after if not name.startswith("head.")]
    assert shared and all((before[name] - after[name]).abs().max() < 1e-6 for name in shared)
    assert any(line.startswith("Fresh weights for head") for line in said)
