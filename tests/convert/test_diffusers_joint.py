"""Attention of diffusers with a processor of its own: SD3's and Flux's joint attention, padded texts, rotary angles."""

import copy

import pytest
import torch
from torch import nn

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import CapabilityError, MaskError, OptionError
from polymix.train.distill import distill
from tests.convert.checks import accounts, answer, gradients, identical, keeps_form, near, refuses, stirred, undoes

cure_torchvision()
diffusers = pytest.importorskip("diffusers", reason="untested: diffusers' hosts (the diffusion extra)")

TEXT = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
REAL = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]], dtype=torch.bool)


def sd3():
    """Two blocks, the first with a second attention over the picture alone, as SD3.5 has; the last drops the text."""
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=2, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=8, out_channels=2,
        pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip


def flux():
    """A double block and a single one, whose attention has no output map."""
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip


def sd3_call(text=TEXT, mask=None):
    draw = torch.Generator().manual_seed(0)
    call = {"hidden_states": torch.randn(2, 2, 8, 8, generator=draw), "timestep": torch.tensor([3.0, 400.0])}
    return {**call, **spoken(text, mask)}


def flux_call(text=TEXT, mask=None):
    draw = torch.Generator().manual_seed(0)
    places = torch.stack((torch.zeros(16), torch.arange(16) // 4, torch.arange(16) % 4), 1).float()
    call = {"hidden_states": torch.randn(2, 16, 4, generator=draw), "timestep": torch.tensor([0.3, 0.7])}
    return {**call, "img_ids": places, "txt_ids": torch.zeros(text.shape[1], 3), **spoken(text, mask)}


def spoken(text, mask):
    own = {"encoder_hidden_states": text, "pooled_projections": torch.ones(2, 8)}
    return own if mask is None else {**own, "joint_attention_kwargs": {"text_mask": mask}}


def awake(model):
    """Fresh models are almost deaf: the gates of their norms start near 0."""
    draw = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data = torch.randn(weight.shape, generator=draw) * 1.2 / weight.shape[1] ** 0.5
    return model.eval()


@pytest.fixture(params=["sd3", "flux"])
def host(request):
    build, call = {"sd3": (sd3, sd3_call), "flux": (flux, flux_call)}[request.param]
    return awake(build()), call


def test_softmax_is_the_host(host):
    """One mixer sees both streams, in the host's order, after its norms and rotary angles."""
    model, call = host
    expected = answer(model, call())
    report = polymix.convert(model, "softmax", input=call())
    near(answer(model, call()), expected)
    assert len(report.adapters) == len(report.layers) and not report.left_out
    assert not any(layer.dropped for layer in report.layers)


@pytest.mark.parametrize("mixer", ["softmax", "qt", "linear", "pom"])
def test_what_the_text_mask_hides_plays_no_part(host, mixer):
    """Padded texts reach the picture in the host; with a mask the result is that of the text without its padding."""
    model, call = host
    other = torch.where(REAL[..., None], TEXT, 9.0)
    assert not torch.allclose(*answer(model, call(other)), *answer(model, call()), rtol=1e-3)
    polymix.convert(model, mixer, input=call())
    near(answer(model, call(other, REAL)), answer(model, call(TEXT, REAL)))
    near(answer(model, call(TEXT, REAL)), answer(model, call(TEXT[:, :3])))


@pytest.mark.parametrize("mixer", ["qt", "pom"])
def test_it_keeps_the_form_learns_and_is_undone(host, mixer):
    model, call = host
    report = polymix.convert(stirred(model), mixer, input=call())
    keeps_form(model, report, call())
    grads = gradients(report.model, call())
    ours = [f"{name}.mixer.{key}" for name, part in report.adapters.items() for key, _ in part.mixer.named_parameters()]
    assert ours and all(grads[key].isfinite().all() and grads[key].any() for key in ours), "a mixer that does not learn"
    accounts(report)
    undoes(model, mixer, call(), input=call())


@pytest.mark.slow
def test_it_is_compiled_with_its_text_mask():
    model = awake(flux())
    polymix.convert(model, {"transformer_blocks.*": "pom", "single_*": "qt"}, input=flux_call())
    expected = answer(model, flux_call(TEXT, REAL))
    near(answer(torch.compile(model, backend="eager"), flux_call(TEXT, REAL)), expected)


@pytest.mark.parametrize("mixer", ["qt", "pom"])
def test_it_is_saved_and_copied(host, mixer, tmp_path):
    model, call = host
    report = polymix.convert(model, {"*transformer_blocks.0.attn": mixer}, input=call(), copy=True)
    assert mixer in str(report)
    assert 0 < len(report.adapters) < 3, "a plan by layer"
    expected = answer(report.model, call(TEXT, REAL))
    polymix.save_pretrained(report.model, tmp_path)
    identical(answer(polymix.load_pretrained(tmp_path), call(TEXT, REAL)), expected)
    identical(answer(copy.deepcopy(report.model), call(TEXT, REAL)), expected)


def test_a_mixer_that_reads_tokens_leaves_the_maps_to_queries_keys_and_values_out():
    model = awake(flux())
    report = polymix.convert(model, "pom", input=flux_call())
    double, single = report.layers
    assert "rotary" in double.dropped["image_rotary_emb"] and "image_rotary_emb" in single.dropped
    assert {"to_q.weight", "add_k_proj.bias", "norm_added_q.weight"} <= set(double.dropped)
    assert {"layer.to_out.0.weight", "layer.to_add_out.bias"} <= set(double.inherited)
    parts = {name for name, part in report.adapters["transformer_blocks.0.attn"].named_modules() if name}
    assert not [name for name in parts if isinstance(report.model.get_submodule(f"transformer_blocks.0.attn.{name}"),
                                                     nn.Linear) and "to_q" in name]  # fmt: skip
    layer = polymix.convert(awake(flux()), "qt", input=flux_call()).layers[0]
    assert "image_rotary_emb" not in layer.dropped, "a mixer of queries and keys gets them turned"


def test_it_is_distilled_one_layer_after_another():
    """Both streams of every layer teach, then the whole; afterwards the original comes back to the bit."""
    model = awake(sd3())
    batches = [sd3_call() for _ in range(4)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = polymix.convert(model, "pom", input=batches[0])
    done = distill(
        report, batches, forward=lambda model, batch: model(**batch).sample, loss="squares", imitate_epochs=2, epochs=2,
        learning_rate=1e-3, progressive=2, blocks=0.1,
    )  # fmt: skip
    assert done.imitation[1] < done.imitation[0] and list(report.schedule.values()) == [0, 2, 4]
    report.undo()
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_low_rank_terms_go_into_the_layer_s_maps_where_the_mixer_has_none():
    model = awake(flux())
    report = polymix.convert(model, "qt", input=flux_call())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"forward": lambda model, batch: model(**batch).sample, "loss": "squares", "learning_rate": 1e-2}
    distill(report, [flux_call()] * 4, imitate_epochs=0, epochs=1, lora=2, **options)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(".attn.layer." in name for name in changed)


@pytest.mark.parametrize(
    ("mask", "match"),
    [(REAL.float(), "float32"), (REAL[:, :4], r"\(2, 4\) for 5 tokens"), (REAL[:1], "booleans")],
    ids=["scores", "length", "batch"],
)
def test_a_text_mask_of_another_form_is_an_error(mask, match):
    model = awake(sd3())
    polymix.convert(model, "qt", input=sd3_call())
    with pytest.raises(MaskError, match=match):
        model(**sd3_call(TEXT, mask))


def test_a_text_mask_needs_a_known_order():
    """Where the streams could not be read, a mask would hide the first tokens of the picture instead."""
    model = awake(sd3())
    report = polymix.convert(model, "qt", input=sd3_call())
    for adapter in report.adapters.values():
        adapter.tokens = []
    with pytest.raises(MaskError, match="unknown"):
        model(**sd3_call(TEXT, REAL))


def test_what_cannot_be_is_refused_before_anything_changes():
    refuses(sd3(), "qt", OptionError, "Pass input=")
    refuses(sd3(), "mamba", CapabilityError, "transformer_blocks.0.attn.*is causal", input=sd3_call())
