"""transformers' encoders: ViT and its kin, BEiT, DETR, CvT, BERT and its kin, tiny but real."""

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import CapabilityError, MaskError, OptionError
from tests.convert import checks
from tests.convert.checks import MIXERS
from tests.helpers import close

pytestmark = pytest.mark.slow  # real hosts by the dozen: minutes together

cure_torchvision()
transformers = pytest.importorskip("transformers", minversion="5.0", reason="untested: its encoders (the text extra)")

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "hidden_dropout_prob": 0.0,
         "attention_probs_dropout_prob": 0.0}  # fmt: skip
VITS = ("ViT", "DeiT", "Dinov2", "Dinov2WithRegisters", "Beit")
BERTS = ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra")


def built(kind, model="Model", **options):
    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, kind + model)(config).eval()


def vit(kind="ViT", layers=2, **options):
    return built(kind, **SIZES, num_hidden_layers=layers, image_size=16, patch_size=4, **options)


def bert(kind="Bert", layers=2, model="Model", **options):
    sizes = {"vocab_size": 40, "max_position_embeddings": 40, "pad_token_id": 1}
    return built(kind, model, **SIZES, num_hidden_layers=layers, **sizes, **options)


def decoder(**options):
    return bert(is_decoder=True, add_cross_attention=True, **options)


def detr(layers=2, **options):
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    return built(
        "Detr", use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone,
        d_model=32, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=40, decoder_ffn_dim=40, num_queries=5, dropout=0.0, **options,
    )  # fmt: skip


def cvt(stride=2, stages=2):
    both = {
        "patch_sizes": [7, 3], "patch_stride": [4, 2], "patch_padding": [2, 1], "embed_dim": [16, 32], "num_heads": [1, 2],
        "depth": [1, 2], "mlp_ratio": [2.0, 2.0], "attention_drop_rate": [0.0] * 2, "drop_rate": [0.0] * 2,
        "drop_path_rate": [0.0] * 2, "qkv_bias": [True] * 2, "cls_token": [False, stages == 2],
        "qkv_projection_method": ["dw_bn"] * 2, "kernel_qkv": [3] * 2, "padding_kv": [1] * 2, "stride_kv": [stride] * 2,
        "padding_q": [1] * 2, "stride_q": [1] * 2,
    }  # fmt: skip
    return built("Cvt", num_channels=3, **{key: value[:stages] for key, value in both.items()})


def images(*size):
    return torch.randn(2, 3, *(size or (16, 16)))


def text(padded=True):
    """Two sequences, the first of them padded."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = 0
    return {"input_ids": torch.randint(2, 40, (2, 9)), **({"attention_mask": mask} if padded else {})}


def photos(*size):
    """Two images (1/8 of their size in places), the right third of the first is padding."""
    height, width = size or (32, 48)
    mask = torch.ones(2, height, width, dtype=torch.long)
    mask[0, :, 2 * width // 3 :] = 0
    return {"pixel_values": images(height, width), "pixel_mask": mask}


def real(inputs):
    """The outputs of real tokens alone."""
    return lambda output: output.last_hidden_state[inputs["attention_mask"].bool()]


def last(output):
    return output.last_hidden_state


def without_positions(model):
    model = checks.stirred(model).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position" in name:
                parameter.zero_()
    return model


class TestSoftmaxIsTheHost:
    @pytest.mark.parametrize("kind", VITS)
    def test_images(self, kind):
        inputs = {"pixel_values": images()}
        checks.same_as_host(vit(kind), inputs)
        report = checks.same_as_host(vit(kind), inputs, input=inputs)
        assert max(layer.error for layer in report.layers) < 1e-5
        front = {"DeiT": 2, "Dinov2WithRegisters": 5}.get(kind, 1)
        assert {adapter.prefix for adapter in report.adapters.values()} == {front}, "another number of tokens in front"
        assert {layer.tokens for layer in report.layers} == {front + 16}

    @pytest.mark.parametrize("how", ["sdpa", "eager"])
    def test_images_with_hidden_patches(self, how):
        mask = torch.ones(2, 17, dtype=torch.long)
        mask[0, 9:] = 0
        inputs = {"pixel_values": images(), "attention_mask": mask}
        checks.same_as_host(vit(attn_implementation=how), inputs, of=real(inputs))

    @pytest.mark.parametrize("how", ["sdpa", "eager"])
    @pytest.mark.parametrize("kind", BERTS)
    def test_text(self, kind, how):
        inputs = text()
        checks.same_as_host(bert(kind, attn_implementation=how), inputs, of=real(inputs), input=inputs)
        checks.same_as_host(bert(kind, attn_implementation=how), text(padded=False))

    @pytest.mark.parametrize("how", ["sdpa", "eager"])
    def test_text_with_a_mask_of_pairs_and_token_types(self, how):
        pairs = (torch.rand(2, 1, 9, 9) > 0.3) | torch.eye(9, dtype=torch.bool)
        added = torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
        mask = pairs if how == "sdpa" else added
        inputs = {**text(), "attention_mask": mask, "token_type_ids": torch.randint(0, 2, (2, 9))}
        model = bert(attn_implementation=how)
        checks.same_as_host(model, inputs, input=inputs)
        with pytest.raises(CapabilityError, match="other than causal order and padding"):
            polymix.convert(model, "padre", copy=True).model(**inputs)
        checks.refuses(model, "padre", CapabilityError, "encoder.layer.0.attention.*arbitrary masks", input=inputs)

    def test_a_decoder_that_reads_an_encoder(self):
        hidden = torch.ones(2, 7, dtype=torch.long)
        hidden[1, 4:] = 0
        inputs = {**text(), "encoder_hidden_states": torch.randn(2, 7, 32), "encoder_attention_mask": hidden}
        checks.same_as_host(decoder(), inputs, of=lambda output: real(inputs)(output))
        checks.same_as_host(decoder(), {**inputs, "use_cache": False}, of=real(inputs), input=inputs)

    def test_detr_without_positions(self):
        model = without_positions(detr(position_embedding_type="learned"))
        inputs = {**photos(), "decoder_inputs_embeds": torch.randn(2, 5, 32)}
        expected = checks.answer(model, inputs, last)
        report = polymix.convert(model, "softmax", input=inputs)
        assert len(report.layers) == 6 and max(layer.error for layer in report.layers) < 1e-5
        checks.near(checks.answer(report.model, inputs, last), expected)

    @pytest.mark.parametrize("stride", [1, 2])
    def test_cvt(self, stride):
        """All three convolutions, with their strides."""
        x = images(32, 48)
        report = checks.same_as_host(cvt(stride), x, input=x)
        assert all(layer.error < 1e-5 for layer in report.layers)

    def test_cvt_with_one_convolution_for_all(self):
        model = checks.stirred(cvt(stride=1)).eval()
        for attention in (part for part in model.modules() if type(part).__name__ == "CvtSelfAttention"):
            state = attention.convolution_projection_value.state_dict()
            attention.convolution_projection_query.load_state_dict(state)
            attention.convolution_projection_key.load_state_dict(state)
        x = images(32, 48)
        expected = checks.answer(model, x)
        report = polymix.convert(model, "softmax", copy=True, input=x)
        checks.near(checks.answer(report.model, x), expected)
        assert [(layer.tokens, adapter.prefix) for layer, adapter in zip(report.layers, report.adapters.values(), strict=True)] == [
            (96, 0), (25, 1), (25, 1)]  # fmt: skip


class TestEveryMixer:
    @pytest.mark.parametrize("mixer", MIXERS)
    def test_images(self, mixer):
        inputs = {"pixel_values": images()}
        checks.converts(vit(), mixer, inputs, input=inputs)

    @pytest.mark.parametrize("kind", VITS[1:])
    def test_kin(self, kind):
        checks.converts(vit(kind, layers=1), "padre", {"pixel_values": images()})

    @pytest.mark.parametrize("mixer", ["padre", "pom", "qt", "poly_sa:positions=mean", "poly_nl"])
    def test_text(self, mixer):
        inputs = text()
        checks.converts(bert(), mixer, inputs, input=inputs)

    @pytest.mark.parametrize("mixer", ["padre", "pom", "qt"])
    def test_decoders(self, mixer):
        inputs = {**text(), "encoder_hidden_states": torch.randn(2, 7, 32), "use_cache": False}
        checks.converts(decoder(), {"*.attention": mixer}, inputs, input=inputs)

    @pytest.mark.parametrize("mixer", ["pom", "qt"])
    def test_decoders_across(self, mixer):
        inputs = {**text(), "encoder_hidden_states": torch.randn(2, 7, 32), "use_cache": False}
        checks.converts(decoder(), {"*.crossattention": mixer}, inputs, input=inputs)

    @pytest.mark.parametrize("mixer", ["padre", "pom", "qt", "poly_nl"])
    def test_detr(self, mixer):
        inputs, plan = photos(), {"encoder.*.self_attn": mixer, "decoder.layers.1.self_attn": mixer}
        if mixer != "pom":  # which pools values alone, and those of the first decoder layer are zeros
            plan["decoder.layers.0.self_attn"] = mixer
        checks.converts(detr(), plan, inputs, input=inputs)

    @pytest.mark.parametrize("mixer", ["pom", "qt"])
    def test_detr_across(self, mixer):
        inputs = photos()
        checks.converts(detr(), {"*.encoder_attn": mixer}, inputs, input=inputs)

    @pytest.mark.parametrize("mixer", MIXERS)
    def test_cvt(self, mixer):
        x = images(32, 48)
        checks.converts(cvt(), mixer, x, input=x)


class TestPadding:
    @pytest.mark.parametrize("mixer", ["padre", "pom", "qt", "poly_nl"])
    def test_text(self, mixer):
        inputs = text()
        others = {**inputs, "input_ids": torch.where(inputs["attention_mask"] == 1, inputs["input_ids"], 7)}
        checks.ignores(polymix.convert(bert(), mixer).model, inputs, others, of=real(inputs))

    @pytest.mark.parametrize("mixer", ["padre", "pom", "qt"])
    def test_feature_maps(self, mixer):
        model = polymix.convert(detr(), {"encoder.*": mixer}, grid=(4, 4)).model
        mask = torch.ones(2, 4, 4, dtype=torch.long)
        mask[0, :, 3:] = 0
        inputs = {"inputs_embeds": torch.randn(2, 16, 32), "pixel_mask": mask}
        others = torch.where(mask.flatten(1)[..., None] == 1, inputs["inputs_embeds"], 3.0)
        checks.ignores(model, inputs, {**inputs, "inputs_embeds": others}, of=last)

    @pytest.mark.parametrize("mixer", ["pom", "qt"])
    def test_contexts(self, mixer):
        hidden = torch.ones(2, 7, dtype=torch.long)
        hidden[1, 4:] = 0
        context = torch.randn(2, 7, 32)
        inputs = {**text(padded=False), "encoder_hidden_states": context, "encoder_attention_mask": hidden}
        others = {**inputs, "encoder_hidden_states": torch.where(hidden[..., None] == 1, context, 3.0)}
        checks.ignores(polymix.convert(decoder(), mixer).model, inputs, others, of=last)


class TestGrids:
    def test_images_of_another_shape_are_mixed_on_their_own_grid(self):
        model = polymix.convert(vit(layers=1), "padre").model
        adapter = model.layers[0].attention
        seen = []
        adapter.mixer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs.get("grid")), with_kwargs=True
        )
        for size in ((16, 16), (8, 32), (32, 8), (16, 16)):
            model(images(*size), interpolate_pos_encoding=True)
        assert seen == [None, (2, 8), (8, 2), None], "None is what it was built for"

    def test_detr_takes_the_grid_from_its_feature_map(self):
        inputs = photos()
        report = polymix.convert(detr(), {"encoder.*": "padre"}, input=inputs)
        assert {layer.options["grid"] for layer in report.layers if layer.now} == {(4, 6)}
        seen = []
        adapter = report.adapters["encoder.layers.1.self_attn"]
        adapter.mixer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs.get("grid")), with_kwargs=True
        )
        for size in ((32, 48), (48, 32), (64, 24)):
            report.model(**photos(*size))
        assert seen == [None, (6, 4), (8, 3)]

    def test_detr_and_cvt_must_be_shown_a_grid_where_a_mixer_needs_one(self):
        checks.refuses(detr(), {"encoder.*": "padre"}, OptionError, r"encoder.layers.0.self_attn.*grid.*input=")
        checks.refuses(cvt(), "padre", OptionError, r"encoder.stages.0.layers.0.attention.*grid.*input=")
        polymix.convert(detr(), {"encoder.*": "padre"}, grid=(4, 6)).model(**photos(48, 32))
        polymix.convert(detr(), "qt").model(**photos())


class TestWhatDiffers:
    def test_detr_can_add_positions_to_all_that_the_mixer_reads_and_says_so(self):
        report = polymix.convert(detr(layers=1), "softmax", input=photos(), positions="all")
        assert all("values as well" in layer.dropped["position_embeddings"] for layer in report.layers)
        assert all(layer.error > 1e-3 for layer in report.layers), "positions in values would be the host's"
        x, c, p, q = (torch.randn(2, 6, 32) for _ in range(4))
        alone, across = (report.adapters[f"decoder.layers.0.{name}"] for name in ("self_attn", "encoder_attn"))
        close(alone(hidden_states=x, position_embeddings=p)[0], alone.mixer(x + p), 1e-6)
        y = across(hidden_states=x, key_value_states=c, position_embeddings=p, encoder_position_embeddings=q)[0]
        close(y, across.mixer(x + p, c + q), 1e-6)

    def test_beits_relative_positions_go_and_come_back(self):
        model = vit("Beit", use_relative_position_bias=True)
        inputs = {"pixel_values": images()}
        lost = ("position_bias",)
        checks.refuses(model, "softmax", OptionError, "position_bias", input=inputs)
        checks.undoes(model, "padre", inputs, input=inputs, drop=lost)
        report = checks.converts(model, {"layers.0.*": "padre"}, inputs, input=inputs, drop=lost)
        assert "logits" in report.layers[0].dropped["position_bias"]
        assert report.model.layers[0].relative_position_bias is None, "N² scores would be made for nobody"
        assert report.model.layers[1].relative_position_bias is not None
        shared = vit("Beit", use_shared_relative_position_bias=True)
        report = checks.converts(shared, "qt", inputs, input=inputs, drop=lost)
        assert "logits" in report.layers[0].dropped["position_bias"]

    def test_dropout_of_weights_is_reported_and_that_of_the_output_kept(self):
        (layer,) = polymix.convert(built("Bert", vocab_size=9, num_hidden_layers=1, hidden_size=24), "pom").layers
        assert "weights" in layer.dropped["dropout"] and layer.options["dropout"] == 0.1

    def test_bert_is_matched_before_its_norm(self):
        model, inputs = checks.stirred(bert(layers=1), 0.3).eval(), text(padded=False)
        theirs, ours = [], []
        model.encoder.layer[0].attention.output.dense.register_forward_hook(lambda *call: theirs.append(call[2]))
        model(**inputs)
        report = polymix.convert(model, "pom", input=inputs)
        report.adapters["encoder.layer.0.attention"].mixer.register_forward_hook(lambda *call: ours.append(call[2]))
        report.model(**inputs)
        close(ours[0].mean((0, 1)), theirs[0].mean((0, 1)), 1e-4)
        close(ours[0].std(), theirs[0].std(), 0.2)


class TestRefusals:
    @pytest.mark.parametrize(("model", "inputs"), [
        (vit, {"pixel_values": images()}), (bert, text()), (detr, photos()),
    ], ids=["vit", "bert", "detr"])  # fmt: skip
    def test_attention_weights_are_asked_in_vain(self, model, inputs):
        converted = polymix.convert(model(layers=1, attn_implementation="eager"), "qt").model
        assert converted(**inputs, output_hidden_states=True) is not None
        with pytest.raises(OptionError, match=r"output_attentions.*no attention weights"):
            converted(**inputs, output_attentions=True)
        converted.config.output_attentions = True
        with pytest.raises(OptionError, match="output_attentions"):
            converted(**inputs)

    def test_packed_sequences_of_flash_attention(self):
        lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
        with pytest.raises(OptionError, match="cu_seq_lens_q"):
            polymix.convert(bert(layers=1), "qt").model(**text(padded=False), cu_seq_lens_q=lengths)

    def test_scores_in_a_mask(self):
        inputs = {**text(), "attention_mask": torch.randn(2, 1, 9, 9)}
        with pytest.raises(MaskError, match="do more than hide"):
            polymix.convert(bert(layers=1), "pom").model(**inputs)

    def test_what_a_layer_needs_and_a_mixer_has_not(self):
        checks.refuses(decoder(), "padre", CapabilityError, "crossattention.*a separate context")
        checks.refuses(decoder(), {"*.attention": "poly_nl"}, CapabilityError, "layer.0.attention.*causal order")
        checks.refuses(bert(), "poly_sa", CapabilityError, "padding masks", input=text())
        checks.refuses(bert(), polymix.PadreConfig(A="dense", grid=(9,)), CapabilityError, "one number of tokens")
        checks.refuses(detr(), {"*.encoder_attn": "poly_nl"}, CapabilityError, "encoder_attn.*a separate context")


class TestCaches:
    @pytest.mark.parametrize("mixer", ["padre", "pom", "qt"])
    def test_a_decoder_goes_on_after_its_cache(self, mixer):
        model, inputs = decoder(), text(padded=False)
        context = {"encoder_hidden_states": torch.randn(2, 7, 32)}
        model = polymix.convert(model, {"*.attention": mixer}).model
        ids = inputs["input_ids"]
        with torch.no_grad():
            expected = model(ids, use_cache=False, **context).last_hidden_state
            first = model(ids[:, :5], **context)
            parts, cache = [first.last_hidden_state], first.past_key_values
            for place in range(5, 9):
                step = model(ids[:, place : place + 1], past_key_values=cache, **context)
                parts.append(step.last_hidden_state)
        close(torch.cat(parts, 1), expected, 1e-4)

    def test_generation_with_states_is_generation_without(self):
        model = polymix.convert(checks.stirred(bert(model="LMHeadModel", is_decoder=True), 0.3).eval(), "qt").model
        prompt = torch.randint(2, 40, (1, 4))
        how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
        assert torch.equal(model.generate(prompt, **how), model.generate(prompt, use_cache=False, **how))


class TestLife:
    def test_vit(self):
        inputs = {"pixel_values": images()}
        checks.survives(polymix.convert(vit(layers=1), "padre").model, inputs)

    def test_bert(self):
        inputs = text()
        checks.survives(polymix.convert(bert(layers=1), "qt").model, inputs, of=real(inputs))

    def test_detr(self):
        inputs = {"inputs_embeds": torch.randn(2, 16, 32), "pixel_mask": torch.ones(2, 4, 4).tril()}
        model = polymix.convert(detr(layers=1), {"encoder.*": "padre", "decoder.*": "qt"}, input=inputs).model
        checks.survives(model, inputs, of=last)

    def test_cvt(self):
        x = images(32, 48)
        checks.survives(polymix.convert(cvt(stages=1), "padre", input=x).model, x)

    def test_a_copy_of_a_converted_model_follows_its_own_images(self):
        model = polymix.convert(vit(layers=1), "padre").model
        twin = checks.deepcopy(model)
        model(images(8, 32), interpolate_pos_encoding=True)
        assert twin.layers[0].attention.current_grid is None
        twin(images(32, 8), interpolate_pos_encoding=True)
        assert (model.layers[0].attention.current_grid, twin.layers[0].attention.current_grid) == ((2, 8), (8, 2))

    @pytest.mark.parametrize(("model", "plan", "inputs"), [
        (vit, "padre", {"pixel_values": images()}), (bert, "qt", text()), (detr, {"*.self_attn": "padre"}, photos()),
    ], ids=["vit", "bert", "detr"])  # fmt: skip
    def test_checkpointing(self, model, plan, inputs):
        report = polymix.convert(model(), plan, input=inputs)
        checks.checkpoints(report, inputs, lambda host: host.activation_checkpointing_enable())

    @pytest.mark.parametrize(("model", "plan", "inputs"), [
        (vit, "padre", {"pixel_values": images()}), (bert, "qt", text()), (detr, {"encoder.*": "padre"}, photos()),
        (cvt, "padre", images(32, 48)),
    ], ids=["vit", "bert", "detr", "cvt"])  # fmt: skip
    def test_undo(self, model, plan, inputs):
        host = model()
        checks.undoes(host, plan, inputs, input=inputs)
        assert not any(part._forward_hooks for part in host.modules()), "a hook was left"

    @pytest.mark.parametrize(("model", "inputs"), [(bert, text()), (cvt, images(32, 48))], ids=["bert", "cvt"])
    def test_undo_after_training_gives_the_attention_as_it_was(self, model, inputs):
        host = model()
        before = checks.snapshot(host)[2]
        report = polymix.convert(host, "qt", input=inputs)
        optimizer = torch.optim.SGD([p for part in report.adapters.values() for p in part.parameters()], 0.1)
        checks.gradients(host, inputs)
        optimizer.step()
        report.undo()
        after = host.state_dict()
        changed = [key for key, (_, bits) in before.items() if not torch.equal(bits, after[key])]
        assert not [key for key in changed if ".attention." in key], "the norm or the convolutions that stayed in use"
