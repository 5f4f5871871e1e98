"""nn.MultiheadAttention and the transformer layers that hold it, converted: every call that they take, or an error."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import polymix
from polymix.errors import CapabilityError, MaskError, OptionError, PolymixError, ShapeError
from polymix.models import VisionTransformer
from tests.convert.checks import (
    MIXERS,
    accounts,
    answer,
    converts,
    identical,
    ignores,
    near,
    refuses,
    same_as_host,
    stirred,
    survives,
    trains,
    undoes,
)  # fmt: skip

DIM, HEADS, TOKENS = 16, 2, 7
PAST = nn.Transformer.generate_square_subsequent_mask
X = torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(0))
HIDDEN = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])  # padding, as torch.nn says it: True hides
MISMATCHED = pytest.mark.filterwarnings("ignore:Support for mismatched")  # boolean and float masks in one call
NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
PADDING = torch.zeros(2, TOKENS).masked_fill(HIDDEN, -torch.inf)
FITS = {"poly_sa": {"grid": (TOKENS,)}}


def attention(**options):
    return nn.MultiheadAttention(DIM, HEADS, batch_first=options.pop("batch_first", True), **options)


def encoder(layers=2, nested=True, **options):
    options = {"dropout": 0.0, "batch_first": True, **options}
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(DIM, HEADS, 24, **options), layers, enable_nested_tensor=nested
    )


def decoder(layers=2):
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(DIM, HEADS, 24, dropout=0.0, batch_first=True), layers)


def swapped(module, mixer="softmax", **options):
    return polymix.convert(stirred(module), mixer, copy=True, **options)


def first(output):
    return output[0]


def real(output):
    return output[~HIDDEN]


# The layer alone


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_softmax_in_its_place_gives_what_attention_gives(batch_first, bias):
    x = X if batch_first else X.transpose(0, 1)
    module = attention(batch_first=batch_first, bias=bias)
    report = same_as_host(module, (x, x, x), of=first)
    accounts(report)
    assert report.model is report.adapters[""], "the model itself was the attention"
    recorded = same_as_host(module, (x, x, x), of=first, input=(x, x, x))
    assert recorded.layers[0].error < 1e-5 and recorded.layers[0].tokens == TOKENS


@MISMATCHED
def test_without_a_batch():
    x = X[0]
    same_as_host(attention(), (x, x, x), of=first)
    same_as_host(attention(batch_first=False), (x, x, x), of=first)
    masks = {"key_padding_mask": HIDDEN[1], "attn_mask": PAST(TOKENS).expand(HEADS, -1, -1)}
    same_as_host(attention(), {"query": x, "key": x, "value": x, **masks}, of=first)


def scattered():
    """Who is hidden from whom at random; everyone sees itself and the first."""
    mask = (torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.5) & ~torch.eye(TOKENS).bool()
    mask[:, 0] = False
    return mask


@pytest.mark.parametrize(
    "masks",
    [
        {"key_padding_mask": HIDDEN},
        {"key_padding_mask": PADDING},
        {"attn_mask": PAST(TOKENS)},
        {"attn_mask": PAST(TOKENS) != 0},
        {"attn_mask": PAST(TOKENS), "is_causal": True, "need_weights": False},
        {"attn_mask": PAST(TOKENS), "key_padding_mask": HIDDEN},
        {"attn_mask": scattered()},
        {"attn_mask": scattered(), "key_padding_mask": HIDDEN},
        {"attn_mask": torch.stack([PAST(TOKENS)] * HEADS + [torch.zeros(TOKENS, TOKENS)] * HEADS)},
    ],
    ids=["padding", "padding-float", "past-float", "past-bool", "hint", "past-and-padding", "any", "any-and-padding",
         "by-sample"],
)  # fmt: skip
@MISMATCHED
def test_masks_mean_what_they_meant(masks):
    inputs = {"query": X, "key": X, "value": X, **masks}
    same_as_host(attention(), inputs, of=first)
    same_as_host(attention(), inputs, of=first, input=inputs)


@MISMATCHED
@pytest.mark.parametrize("mixer", ["qt", "padre", "pom", "softmax"])
def test_both_forms_of_a_mask_are_one_under_autocast(mixer):
    """The infinities of a mask of floats must not become NaN where numbers are narrower."""
    model = swapped(attention(), mixer).model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, floats = (first(model(X, X, X, key_padding_mask=mask)) for mask in (HIDDEN, PADDING))
    assert torch.equal(real(ours), real(floats))
    torch.testing.assert_close(
        real(ours).float(), real(first(model(X, X, X, key_padding_mask=HIDDEN))), atol=0.05, rtol=0.05
    )


def test_a_context_of_its_own():
    other = torch.randn(2, 5, DIM)
    same_as_host(attention(), (X, other, other), of=first)
    hidden = torch.tensor([[False] * 5, [False, False, True, True, True]])
    same_as_host(attention(), (X, other, other, hidden), of=first, input=(X, other, other, hidden))
    with pytest.raises(CapabilityError, match="cannot do"):
        swapped(attention(), "padre", input=(X, other, other))


def test_scores_that_do_more_than_hide_are_an_error():
    model = swapped(attention()).model
    with pytest.raises(MaskError, match="more than hide"):
        model(X, X, X, attn_mask=-torch.arange(float(TOKENS)).expand(TOKENS, TOKENS))
    with pytest.raises(MaskError, match="more than hide"):  # a weight mask is no mask of scores
        model(X, X, X, key_padding_mask=(~HIDDEN).float())


def test_a_mask_that_differs_by_head_is_an_error():
    masks = torch.zeros(2 * HEADS, TOKENS, TOKENS)
    masks[1] = PAST(TOKENS)
    with pytest.raises(MaskError, match="differs between heads"):
        swapped(attention()).model(X, X, X, attn_mask=masks)


@NESTED
def test_values_of_their_own_without_a_choice_and_nested_tensors_are_errors():
    model = swapped(attention()).model
    with pytest.raises(OptionError, match="positions"):
        swapped(attention(), "se").model(X, X, X + 1)
    nested = torch.nested.nested_tensor([X[0], X[1, :4]])
    with pytest.raises(ShapeError, match="nested"):
        model(nested, nested, nested)


def test_there_are_no_weights_to_return():
    y, weights = swapped(attention()).model(X, X, X, need_weights=True)
    assert y.shape == X.shape and weights is None


def test_what_no_mixer_takes_over_is_listed_with_its_reason():
    module = attention(add_bias_kv=True, add_zero_attn=True, dropout=0.1)
    refuses(module, "softmax", OptionError, "--drop sinks")
    (layer,) = swapped(module, drop=("sinks",)).layers
    assert set(layer.dropped) == {"bias_k", "bias_v", "add_zero_attn", "dropout", "sinks"}
    assert layer.dropped["bias_k"] == "an extra key beside the tokens'"
    accounts(swapped(module, "pom", drop=("sinks",)))


def test_keys_of_another_width_are_an_error():
    refuses(attention(kdim=8, vdim=8), "padre", OptionError, r"expected 16 channels in key and value, .* got 8 and 8")


def test_a_single_token_has_no_order():
    model = swapped(attention(), "padre", causal=True).model
    one = X[:, :1]
    assert model(one, one, one)[0].shape == one.shape
    assert model(one, one, one, attn_mask=PAST(1))[0].shape == one.shape
    with pytest.raises(MaskError, match="built causal"):  # no mask: the host sees all
        model(X, X, X)


# nn.TransformerEncoder


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"batch_first": False}], ids=str)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_encoder_with_softmax_is_the_encoder(options):
    same_as_host(encoder(**options), X)
    same_as_host(encoder(**options), {"src": X, "mask": PAST(X.shape[int(options.get("batch_first", True))])})


@NESTED
def test_encoder_with_padding_is_the_encoder_on_real_tokens():
    inputs = {"src": X, "src_key_padding_mask": HIDDEN}
    same_as_host(encoder(), inputs, of=real)
    same_as_host(encoder(nested=False), inputs, of=real, input=inputs)


@NESTED
@pytest.mark.parametrize("mixer", MIXERS)
def test_encoder_converts(mixer):
    inputs = {"src": X, "src_key_padding_mask": HIDDEN}
    options = FITS.get(mixer, {})
    report = converts(encoder(), mixer, X, input=X, **options)
    if mixer != "poly_sa":  # whose row and column sums take no padding
        trains(report, inputs)
        ignores(report.model, inputs, {**inputs, "src": torch.where(HIDDEN[..., None], 9.0, X)}, of=real)
    survives(report.model, X, backend="eager" if mixer == "padre" else None)
    undoes(encoder(), mixer, X, **options)
    assert all(layer.error < 2 for layer in report.layers), "scaled to the attention's output"


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("mixer", ["padre", "pom", "qt", "poly_nl"])
def test_encoder_with_tokens_first_converts(mixer):
    """In evaluation, without gradients, the mixers see tensors that are no contiguous (B, N, D)."""
    x = X.transpose(0, 1)
    first, last = (polymix.convert(stirred(encoder(batch_first=which)), mixer).model for which in (True, False))
    last.load_state_dict(first.state_dict())
    near([answer(last, x)[0].transpose(0, 1)], answer(first, X))


def test_compiled_with_padding_and_order():
    how = {"mask": PAST(TOKENS), "src_key_padding_mask": PADDING, "is_causal": True}
    model = swapped(encoder(1, nested=False), "qt").model.train()
    torch._dynamo.reset()
    near([real(torch.compile(model, backend="eager", fullgraph=True)(X, **how))], [real(model(X, **how))])


def test_a_compiled_layer_fails_for_a_mask_that_it_did_not_see_coming():
    model = swapped(attention(), "qt").model
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(X, X, X, attn_mask=torch.zeros(TOKENS, TOKENS))
    for masks in (PAST(TOKENS), torch.full((TOKENS, TOKENS), 0.5)):
        with pytest.raises(RuntimeError, match="polymix: this compiled layer"):
            compiled(X, X, X, attn_mask=masks)


def test_gradients_under_checkpointing_are_the_same():
    model = swapped(encoder(), "padre").model.train()
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    (found,) = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).square().sum(), x)
    torch.testing.assert_close(found, expected)


@NESTED
def test_the_fused_path_does_not_pass_the_mixers_by():
    report = swapped(encoder(), "padre")
    calls = []
    for adapter in report.adapters.values():
        adapter.register_forward_hook(lambda *_: calls.append(1))
    answer(report.model, {"src": X, "src_key_padding_mask": HIDDEN})
    assert len(calls) == 2
    assert report.model.use_nested_tensor is False
    assert report.undo().use_nested_tensor is True, "what was set in the host is set back"


def test_one_sequence_model_that_hides_the_future():
    """Each mixer that can be causal: a later token changes no earlier one."""
    later = X.clone()
    later[:, 4:] += 1
    for mixer in ("padre", "pom", "qt", "softmax"):
        model = swapped(encoder(), mixer, causal=True).model
        inputs = [{"src": x, "mask": PAST(TOKENS), "is_causal": True} for x in (X, later)]
        ignores(model, *inputs, of=lambda y: y[:, :4])
    refuses(
        encoder(), "poly_nl", CapabilityError, r"layers.0.self_attn .*causal order, which this poly_nl", causal=True
    )


def test_an_order_that_a_mixer_does_not_have_is_an_error_of_the_call():
    model = swapped(encoder(), "poly_nl").model
    with pytest.raises(CapabilityError, match="causal"):
        model(X, mask=PAST(TOKENS))


# nn.TransformerDecoder and nn.Transformer


@MISMATCHED
def test_decoder_with_softmax_is_the_decoder():
    memory = torch.randn(2, 5, DIM)
    inputs = {"tgt": X, "memory": memory, "tgt_mask": PAST(TOKENS)}
    report = same_as_host(decoder(), inputs, input=inputs)
    assert len(report.layers) == 4
    hidden = torch.tensor([[False] * 5, [False, False, True, True, True]])
    same_as_host(decoder(), {**inputs, "memory_key_padding_mask": hidden, "tgt_key_padding_mask": HIDDEN}, of=real)


@pytest.mark.parametrize("mixer", ["qt", "pom"])
def test_decoder_converts(mixer):
    inputs = {"tgt": X, "memory": torch.randn(2, 5, DIM), "tgt_mask": PAST(TOKENS), "tgt_is_causal": True}
    report = converts(decoder(), mixer, inputs, input=inputs)
    later = X.clone()
    later[:, 4:] += 1
    ignores(report.model, inputs, {**inputs, "tgt": later}, of=lambda y: y[:, :4])
    survives(report.model, inputs, backend=None)
    undoes(decoder(), mixer, inputs)


def test_decoder_with_one_mixer_for_order_and_another_for_the_context():
    inputs = {"tgt": X, "memory": torch.randn(2, 5, DIM), "tgt_mask": PAST(TOKENS)}
    plan = {"layers.*.self_attn": "padre", "layers.*.multihead_attn": "pom"}
    converts(decoder(), plan, inputs)
    refuses(decoder(), "padre", CapabilityError, r"layers.0.multihead_attn .*a separate context")


def test_a_decoder_without_order_has_to_be_announced():
    """DETR's queries see each other: no mask, so that a mixer built causal is not asked in silence."""
    inputs = {"tgt": X, "memory": torch.randn(2, 5, DIM)}
    plan = {"layers.*.self_attn": "padre"}
    refuses(decoder(), plan, PolymixError, r"layers.0.self_attn .*built causal", input=inputs)
    converts(decoder(), plan, inputs, causal=False, input=inputs)


def test_the_whole_transformer():
    model = nn.Transformer(DIM, HEADS, 1, 1, 24, dropout=0.0, batch_first=True)
    inputs = {"src": torch.randn(2, 5, DIM), "tgt": X, "tgt_mask": PAST(TOKENS)}
    same_as_host(model, inputs)
    report = converts(model, {"encoder.*": "padre", "decoder.*": "pom"}, inputs, input=inputs)
    assert [layer.now for layer in report.layers] == ["padre", "pom", "pom"]


# A host of images


class Images(nn.Module):
    """A small ViT of torch.nn's parts, as people write it."""

    def __init__(self, register_tokens=0):
        super().__init__()
        self.image_size, self.patch_size = 12, 4
        self.patches = nn.Conv2d(3, DIM, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, DIM))
        self.reg_token = nn.Parameter(torch.randn(1, register_tokens, DIM)) if register_tokens else None
        self.encoder = encoder()

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        front = [t.expand(len(x), -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
        return self.encoder(torch.cat([*front, x], 1))[:, 0]


@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize("mixer", ["padre", "pom", "qt", "poly_nl"])
def test_grid_and_tokens_in_front_are_read_off_the_host(mixer, registers):
    images = torch.randn(2, 3, 12, 12)
    report = converts(Images(registers), mixer, images, input=images)
    for adapter in report.adapters.values():
        assert (adapter.grid, adapter.prefix) == ((3, 3), 1 + registers)
    assert {layer.tokens for layer in report.layers} == {10 + registers}
    if mixer == "padre":
        config = report.adapters["encoder.layers.0.self_attn"].mixer.config
        assert (config.grid, config.num_prefix_tokens) == ((3, 3), 1 + registers)


def test_images_of_another_size_keep_their_proportions():
    report = swapped(encoder(), "padre", grid=(2, 3))
    assert answer(report.model, torch.randn(1, 24, DIM))[0].shape == (1, 24, DIM)
    with pytest.raises(ShapeError, match="25 tokens"):
        report.model(torch.randn(1, 25, DIM))


# polymix's own host


@pytest.mark.parametrize("class_token", [False, True])
def test_own_attention_converts(class_token):
    config = polymix.SoftmaxConfig(heads=2, relative=not class_token)
    model = VisionTransformer(config, image_size=12, patch_size=4, dim=DIM, depth=2, class_token=class_token)
    images = torch.randn(2, 3, 12, 12)
    same_as_host(model, images)
    for mixer in ("padre", "qt", "poly_nl") if class_token else MIXERS:
        drop = () if class_token else ("position_bias",)
        report = converts(model, mixer, images, input=images, drop=drop)
        survives(report.model, images, backend=None)
        undoes(model, mixer, images, drop=drop)
        assert ("table" in report.layers[0].dropped) is not class_token
    identical(answer(model, images), answer(model, images))


def test_own_attention_behind_contexts_masks_and_order():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = polymix.create_mixer("softmax", DIM, heads=2)

        def forward(self, x, context=None, **options):
            return self.attn(x, context, **options)

    for given in ({"context": torch.randn(2, 5, DIM)}, {"causal": True}, {"mask": ~HIDDEN}):
        same_as_host(Block(), {"x": X, **given}, input={"x": X, **given})
    later = X.clone()
    later[:, 4:] += 1
    model = polymix.convert(Block(), "padre", causal=True).model
    ignores(model, {"x": X, "causal": True}, {"x": later, "causal": True}, of=lambda y: y[:, :4])
