"""`polymix.assess`: what a conversion cost and gained, as an object, as JSON, as a page and as a model card."""

import copy
import json
import re
from collections import UserDict
from dataclasses import replace

import pytest
import torch
from torch import nn

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import OptionError
from polymix.measure.timing import Timing
from polymix.mixers import SoftmaxMixer
from polymix.models import VisionTransformer
from polymix.workflows.convert import assess
from polymix.workflows.convert.assessment import Assessment, LayerCost, Length, Pair

cure_torchvision()
yaml = pytest.importorskip("yaml", reason="untested: the model card's metadata, for which PyYAML is needed")
X = torch.randn(2, 1, 8, 8)
QUICK = {"seconds": 0.05, "lengths": (1, 4)}
PADRE = polymix.PadreConfig(kernel_size=3)


def report(plan=PADRE, **options):
    torch.manual_seed(0)
    model = VisionTransformer(
        polymix.SoftmaxConfig(heads=2), image_size=8, patch_size=2, dim=16, depth=3, classes=4, channels=1, mlp_ratio=2,
        class_token=True,
    )  # fmt: skip
    return polymix.convert(model.eval(), plan, input=X, **options)


def snapshot(model):
    parts = [(name, id(part), part.training, len(part._forward_hooks)) for name, part in model.named_modules()]
    state = {name: (id(t), t.clone()) for name, t in (*model.named_parameters(), *model.named_buffers())}
    return parts, state


def unchanged(before, model):
    parts, state = snapshot(model)
    assert parts == before[0], "a module, a mode or a hook is another"
    assert state.keys() == before[1].keys()
    assert all(state[name][0] == t[0] and torch.equal(state[name][1], t[1]) for name, t in before[1].items())
    assert all(p.grad is None for p in model.parameters())


@pytest.fixture(scope="module")
def found():
    its = report({"blocks.*.mixer": PADRE, "blocks.1.mixer": "keep"})
    its.accuracy.update(before=0.98, converted=0.41, distilled=0.97, mine=0.5)
    return assess(its, X, **QUICK)


# What is measured


def test_before_and_after_of_the_model_and_of_each_converted_layer(found):
    assert set(found.layers) == {"blocks.0.mixer", "blocks.2.mixer"}, "a kept layer has no before and after"
    for pair in (found.whole, *(cost.pair for cost in found.layers.values())):
        assert all(time.median > 0 for time in pair.times) and all(size > 0 for size in pair.memory)
        assert pair.gain == pytest.approx(pair.times[0].median / pair.times[1].median)
    assert found.layers["blocks.0.mixer"].shape == (2, 17, 16)
    assert [length.tokens for length in found.curve] == [(17,), (65,)] and not found.training


def test_flops_are_those_of_the_formulas(found):
    """Of the layers by `cost`, and of the model by what its layers changed."""
    its = {layer.name: layer for layer in found.report.layers if layer.now}
    for name, cost in found.layers.items():
        assert cost.pair.flops[0] == 2 * its[name].flops[0], "2 images"
        assert cost.pair.flops[1] == pytest.approx(
            2 * its[name].flops[1], rel=0.35
        )  # what is no product is not counted
    saved = sum(before - after for before, after in (cost.pair.flops for cost in found.layers.values()))
    assert found.whole.flops[0] - found.whole.flops[1] == saved


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_was(training):
    """Modules, bits, modes, hooks, the random state; statistics too, though a training step changes them."""

    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.attention = nn.BatchNorm1d(9), nn.MultiheadAttention(16, 2, batch_first=True, dropout=0.1)

        def forward(self, x):
            x = self.norm(x)
            return x + self.attention(x, x, x)[0]

    its = polymix.convert(Host(), "pom", input=torch.randn(2, 9, 16))
    its.model.norm.eval()
    before, attention, random = snapshot(its.model), snapshot(its.attentions["attention"]), torch.get_rng_state()
    answer = assess(its, torch.randn(2, 9, 16), training=training, **QUICK)
    unchanged(before, its.model)
    unchanged(attention, its.attentions["attention"])
    assert answer.training is training and not its.undone and ("step" in answer.headline) is training
    torch.set_rng_state(random)


def test_what_was_distilled_is_what_is_measured_and_stays():
    """Measuring takes the attention back for a while, and with it the weights of before."""
    its = report()
    its.remember()
    with torch.no_grad():
        its.model.head.weight.add_(1.0)
    before = snapshot(its.model)
    assess(its, X, **QUICK)
    unchanged(before, its.model)


def test_calls_as_models_take_them(found):
    """A tuple, keyword arguments, any mapping of them."""

    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)

        def forward(self, x, scale):
            return scale * self.attention(x, x, x)[0]

    x, scale = torch.randn(9, 2, 16), torch.tensor(2.0)  # (tokens, batch, channels)
    its = polymix.convert(Host().eval(), "pom", input=(x, scale))
    for given in ((x, scale), {"x": x, "scale": scale}, UserDict(x=x, scale=scale)):
        answer = assess(its, given, **QUICK)
        assert answer.layers["attention"].shape == (9, 2, 16)
        assert [length.tokens for length in answer.curve] == [(9,), (36,)], "the batch was taken for the tokens"


def test_attention_to_another_context_has_no_curve():
    decoder = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True).eval()
    x, memory = torch.randn(2, 6, 16), torch.randn(2, 9, 16)
    its = polymix.convert(decoder, {"multihead_attn": "pom"}, input=(x, memory))
    answer = assess(its, (x, memory), **QUICK)
    assert answer.curve == () and set(answer.layers) == {"multihead_attn"}
    assert "on this input" in answer.headline and "tokens" not in answer.headline


def test_lengths_too_slow_for_the_budget_are_left_out(monkeypatch):
    """Four times as many tokens take attention up to sixteen times as long."""
    monkeypatch.setattr(
        "polymix.measure.candidates.interleaved_within", lambda calls, *_: {name: timed(1000) for name in calls}
    )
    for most, lengths in ((15.9, [1]), (16.1, [1, 4])):
        its = report({"blocks.0.mixer": "pom"})
        assessment = assess(its, X, seconds=0.05, lengths=(4, 1), max_seconds=most)
        assert [length.factor for length in assessment.curve] == lengths


def test_a_call_that_runs_out_of_memory_is_told(monkeypatch):
    """On the model's own input, and at the first length at which it happens, where the curve ends."""
    own = SoftmaxMixer.mix

    def small(self, x, context, call):
        if x.shape[1] > 20:
            raise RuntimeError("not enough memory: you tried to allocate")
        return own(self, x, context, call)

    its = report()
    monkeypatch.setattr(SoftmaxMixer, "mix", small)
    assert [length.factor for length in assess(its, X, seconds=0.05, lengths=(1, 4, 16)).curve] == [1]
    monkeypatch.setattr("polymix.workflows.convert.assessment.interleaved_within", lambda runs, seconds, device: {})
    answer = assess(its, X, **QUICK)
    assert answer.whole == Pair((None, None), (None, None), (None, None)) and "ran out of memory" in answer.headline
    assert "–" in str(answer) and json.dumps(answer.to_dict(), allow_nan=False)


@pytest.mark.parametrize(("change", "match"), [
    (lambda its: its.undo(), "`report`.*undone"), (lambda its: "report", "`report`: .*got str"),
    (lambda its: polymix.insert(copy.deepcopy(its.model), "blocks.0", "pom", input=X), "`report`: .*got InsertionReport"),
])  # fmt: skip
def test_what_is_no_standing_conversion_is_told(change, match):
    its = report()
    changed = change(its)
    with pytest.raises(OptionError, match=match):
        assess(its if isinstance(changed, nn.Module) else changed, X)


@pytest.mark.parametrize(
    "options",
    [{"training": 1}, {"seconds": 0.0}, {"max_seconds": -1.0}, {"seconds": float("nan")}, {"lengths": (1, 0)}],
)
def test_options_out_of_range(options):
    with pytest.raises(OptionError, match=f"`{next(iter(options))}`"):
        assess(report(), X, **options)


# What it says


def timed(ms):
    return Timing((ms / 1e3,) * 3)


def made(before=2.0, after=1.0, curve=(), training=False):
    its = report()
    pair = Pair((timed(before), timed(after)), (2**20, 2**19), (10**6, 10**5))
    return Assessment(its, pair, {"blocks.0.mixer": LayerCost((2, 17, 16), pair)}, curve, training, {})


@pytest.mark.parametrize(("answer", "says"), [
    (made(2.0, 1.0), "2.00 × as fast on this input."), (made(1.0, 2.0), "takes 2.00 × as long"),
    (made(curve=(Length(1, (17,), 1.0, 2.0), Length(4, (65,), 3.0, 2.0))), "faster than attention from 65 tokens on"),
    (made(curve=(Length(1, (17,), 1.0, 2.0), Length(4, (65,), 1.0, 2.0))), "slower than attention at every measured length"),
    (made(curve=(Length(1, (17,), 1.0, 2.0),)), "not clearly faster than attention at 17 tokens, the only length measured."),
    (made(curve=(Length(1, (17, 1024), 2.0, 1.0),)), "faster than attention at 17 / 1,024 tokens, the only length measured."),
    (made(1.0, 1.05, curve=(Length(1, (17,), 2.0, 1.0),)),
     "The model is about as fast as before on this input (0.95 ×). The mixers alone are faster than attention at 17 tokens,"),
    (made(training=True), "A training step is"),
])  # fmt: skip
def test_the_headline_is_the_answer(answer, says):
    assert says in answer.headline
    assert answer.headline in str(answer) and "blocks.0.mixer: " in str(answer)


def test_what_a_single_run_decides_is_said_to_its_maker_and_to_the_readers_of_the_card():
    """The one is told how to measure again; "measure again" on a public card addressed nobody who could."""
    its = made()
    its = replace(its, whole=Pair((Timing((1.7e-3,)), Timing((1e-3,))), its.whole.memory, its.whole.flops))
    assert "1.70 × as fast" in its.headline and its.headline.endswith("measure for longer, by --seconds.")
    assert (
        its.finding == "In a short measurement, which decides nothing, the model was 1.70 × as fast as with attention."
    )


def test_every_count_of_operations_and_bytes_says_of_what_it_is():
    """One layer had 14.6 MFLOPs in one table, and 437 two paragraphs below: of an image, and of the batch."""
    text = str(made())
    assert "operations of one sequence, by formula" in text, "the table of layers"
    assert "One call with the whole input, MFLOPs as counted:" in text, "what was measured"
    assert "1 → 0.5 MiB peak beside weights" in text, "a model's weights may be a hundred times as many"


def test_wins_from_needs_all_longer_ones_to_win():
    lengths = (Length(1, (17,), 3.0, 1.0), Length(4, (65,), 1.0, 2.0), Length(16, (257,), 3.0, 1.0))
    assert made(curve=lengths).wins_from == 16
    assert made(curve=lengths[:2]).wins_from is None


@pytest.mark.draws
def test_the_files(found, tmp_path):
    page = found.write(tmp_path / "new", title="A <small> ViT", card={"license": "mit", "tags": ["mine"]})
    assert {path.name for path in page.parent.iterdir()} == {
        "results.json", "report.html", "README.md", "layers.png", "lengths.png",
    }  # fmt: skip
    content = json.loads((page.parent / "results.json").read_text())
    assert content == json.loads(json.dumps(found.to_dict()))
    assert content["conversion"]["accuracy"]["distilled"] == 0.97 and set(content["layers"]) == set(found.layers)
    html = page.read_text()
    assert "<title>A &lt;small&gt; ViT</title>" in html, "the title was not escaped"
    assert found.headline in html and html.count("<svg role=") == 4
    assert not re.search(r'(?:src|href)="(?!data:|#)', html), "the page needs another file"
    assert html.count("<tr>") == 1 + 4 + 4, "the header, the model and 3 layers; 4 accuracies"


def test_the_card_has_metadata_that_a_hub_reads_and_a_table(found, tmp_path):
    found.write(tmp_path, title="A ViT", card={"license": "mit", "base_model": "me/vit: small"})
    card = (tmp_path / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    metadata = yaml.safe_load(head)
    assert metadata == {
        "library_name": "polymix", "tags": ["polymix", "linear-attention", "padre"], "license": "mit",
        "base_model": "me/vit: small",
    }  # fmt: skip
    assert "# A ViT\n" in body and found.finding in body and "polymix.load_pretrained(" in body
    assert "2 × `padre`, 1 × `attention`" in body
    rows = [line for line in body.splitlines() if line.startswith(("| blocks", "| the whole model"))]
    assert len(rows) == 4 and all(row.count(" | ") == 8 for row in rows), "a row without a cell for each column"
    assert "| blocks.1.mixer | SoftmaxMixer | kept |" in body
    accuracy = re.findall(r"^\| (before|converted|distilled|mine) \| ([\d.]+ %) \|$", body, re.MULTILINE)
    assert accuracy == [("before", "98.0 %"), ("converted", "41.0 %"), ("distilled", "97.0 %"), ("mine", "50.0 %")]
    blocks = body.split("\n\n")
    assert any(block.startswith("| layer ") for block in blocks), "a table that no empty line goes before"
    assert all((tmp_path / name).exists() for name in re.findall(r"!\[\]\((.*?)\)", body))


def test_a_conversion_without_a_curve_or_accuracies_has_its_files_too(tmp_path):
    answer = assess(report("pom"), X, seconds=0.05, lengths=())
    answer.write(tmp_path)
    assert not (tmp_path / "lengths.png").exists() and "Accuracy" not in (tmp_path / "report.html").read_text()
    assert yaml.safe_load((tmp_path / "README.md").read_text().split("---\n")[1])["library_name"] == "polymix"
