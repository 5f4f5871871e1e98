"""Detectors of transformers whose attention adds positions to queries and keys alone: what a mixer in it reads."""

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import CapabilityError
from tests.convert import checks
from tests.helpers import close

cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: detectors, without transformers")
DETECTORS = ("Detr", "TableTransformer", "ConditionalDetr")


def detector(name="Detr", layers=1):
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = getattr(transformers, f"{name}Config")(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=32,
        encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=40, decoder_ffn_dim=40, num_queries=5, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, f"{name}Model")(config)


def photos():
    mask = torch.ones(2, 32, 48, dtype=torch.long)
    mask[0, :, 32:] = 0
    return {"pixel_values": torch.randn(2, 3, 32, 48), "pixel_mask": mask}


def last(output):
    return output.last_hidden_state


@pytest.mark.parametrize("name", ["Detr", "TableTransformer"])
def test_softmax_is_the_host_with_positions_and_padding(name):
    inputs = photos()
    report = checks.same_as_host(detector(name, 2), inputs, of=last, input=inputs)
    assert [layer.positions for layer in report.layers] == ["values"] * 6 and not report.left_out


def test_conditional_detr_converts_its_encoder_and_names_what_it_leaves():
    """Its decoder projects positions: self-attention reads their plain sum; cross-attention has wider queries."""
    inputs = photos()
    checks.same_as_host(detector("ConditionalDetr"), inputs, of=last, plan={"encoder.*": "softmax"}, input=inputs)
    report = checks.converts(detector("ConditionalDetr"), "qt", inputs, input=inputs)
    assert [layer.name for layer in report.layers] == ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn"]
    assert "projects positions" in report.layers[1].dropped["q_pos_proj.weight"]
    assert report.left_out == ("decoder.layers.0.encoder_attn (ConditionalDetrDecoderCrossAttention)",)


@pytest.mark.parametrize("name", DETECTORS)
@pytest.mark.parametrize("choice", [None, "all", "drop", "values"])
def test_what_the_mixers_read(name, choice):
    plan = {"encoder.*": "padre", "decoder.*.self_attn": "qt"}
    report = polymix.convert(detector(name).eval(), plan, input=photos(), positions=choice)
    assert {layer.now: layer.positions for layer in report.layers if layer.now} == {
        "padre": choice or "all", "qt": choice or "values",
    }  # fmt: skip
    x, p = torch.randn(2, 6, 32), torch.randn(2, 6, 32)
    for layer, place in (("encoder", "all"), ("decoder", "values")):
        adapter = report.adapters[f"{layer}.layers.0.self_attn"]
        key = next(name for name in adapter.names if name.endswith(("position_embeddings", "object_queries")))
        adapter.current_grid = (2, 3) if layer == "encoder" else None
        grid = adapter.grid_options(x)
        expected = {
            "all": lambda mixer, grid=grid: mixer(x + p, **grid), "drop": lambda mixer, grid=grid: mixer(x, **grid),
            "values": lambda mixer, grid=grid: mixer(x + p, values=x, **grid),
        }[choice or place]  # fmt: skip
        close(adapter(hidden_states=x, **{key: p})[0], expected(adapter.mixer), 1e-6)


@pytest.mark.parametrize("name", ["Detr", "TableTransformer"])
def test_padding_reaches_nothing(name):
    inputs = photos()
    plan = {"encoder.*": "pom", "decoder.*.self_attn": "qt", "*.encoder_attn": "linear"}
    report = checks.converts(detector(name), plan, inputs, input=inputs)
    other = inputs["pixel_values"].masked_fill(inputs["pixel_mask"][:, None] == 0, 5.0)
    adapter = report.adapters["decoder.layers.0.encoder_attn"]
    memory, seen = torch.randn(2, 24, 32), torch.arange(24) < torch.tensor([[16], [24]])
    broken = torch.where(seen[..., None], memory, torch.nan)
    x = torch.randn(2, 5, 32)
    assert torch.equal(
        *(adapter(hidden_states=x, key_value_states=m, attention_mask=seen)[0] for m in (memory, broken))
    )
    assert checks.answer(report.model, {**inputs, "pixel_values": other}, last)[0].isfinite().all()


def test_saved_with_the_choice_and_older_files_as_they_were(tmp_path):
    inputs = photos()
    for choice in (None, "drop"):
        report = polymix.convert(detector().eval(), "qt", input=inputs, positions=choice)
        polymix.save_pretrained(report.model, tmp_path / str(choice))
        loaded = polymix.load_pretrained(tmp_path / str(choice))
        checks.near(checks.answer(loaded, inputs, last), checks.answer(report.model, inputs, last), 0)
    adapter = report.adapters["encoder.layers.0.self_attn"]
    del adapter.positions  # files from before the option do not have it
    x, p = torch.randn(2, 6, 32), torch.randn(2, 6, 32)
    close(adapter(hidden_states=x, position_embeddings=p)[0], adapter.mixer(x + p), 1e-6)


@pytest.mark.parametrize("pattern", ["ab", "abb", "abc"])
def test_padre_with_a_pattern_reads_the_memory(pattern):
    """Cross-attention by PADRe: factor a reads the queries, b the keys (or with "values" values), c the values."""
    inputs = photos()
    config = polymix.PadreConfig(degree=len(pattern), pattern=pattern)
    report = checks.converts(detector(), {"*.encoder_attn": config}, inputs, input=inputs, positions="values")
    adapter = report.adapters["decoder.layers.0.encoder_attn"]
    x, p = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    memory, q = torch.randn(2, 24, 32), torch.randn(2, 24, 32)
    seen = torch.arange(24) < torch.tensor([[16], [24]])
    places = {"position_embeddings": p, "encoder_position_embeddings": q}
    y = adapter(hidden_states=x, key_value_states=memory, attention_mask=seen, **places)[0]
    context, mask = ((memory + q, memory), (seen, seen)) if pattern == "abc" else (memory, seen)
    close(y, adapter.mixer(x + p, context, mask=mask), 1e-6)
    m = adapter.mixer.matrices(24)  # the first factor alone reads x: by its equation, with the means over the memory
    means = [(t * seen[..., None]).sum(1, keepdim=True) / seen.sum(1)[:, None, None] for t in (memory + q, memory)]
    factors = [x + p if letter == "a" else means[letter == "c" or pattern != "abc"] for letter in pattern]
    ys = [f @ m["B"][i] + m["b_B"][i] for i, f in enumerate(factors)]
    ys = [f if m["b_A"][i] is None else f + m["b_A"][i] for i, f in enumerate(ys)]
    expected = sum(torch.stack([f.expand_as(x) for f in ys[: i + 1]]).prod(0) for i in range(1, len(pattern)))
    close(y, expected, 1e-5)


def test_without_a_value_map_values_cannot_be_kept_apart():
    with pytest.raises(CapabilityError, match=r"positions.*values from another input"):
        polymix.convert(detector(), {"decoder.*.encoder_attn": "se"}, positions="values")
