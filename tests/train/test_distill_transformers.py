"""`polymix.distill` on models of transformers: dicts with labels, padding, caches, language models."""

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import PolymixError
from polymix.train.distill import distill
from polymix.train.distill.batches import answer, logits_of
from tests.train.distilled import X, Y, bits, differing, former

pytestmark = pytest.mark.slow  # real hosts by the dozen: minutes together

cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: models of transformers, which is not installed")
IDS = torch.randint(3, 40, (8, 12), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[::2, 8:] = 0
LABELS = IDS.masked_fill(PADDED == 0, -100)
TEXT = {"input_ids": IDS, "attention_mask": PADDED}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config), {**TEXT, "labels": LABELS}, "pom"


def llama():
    config = transformers.LlamaConfig(vocab_size=40, max_position_embeddings=16, **SIZES)
    return transformers.LlamaForCausalLM(config), {**TEXT, "labels": LABELS}, "pom"


def masked_lm():
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=16, **SIZES, **CALM)
    return transformers.BertForMaskedLM(config), {**TEXT, "labels": LABELS}, "pom"


def classifier():
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=16, num_labels=4, **SIZES)
    return transformers.BertForSequenceClassification(config), {**TEXT, "labels": Y[:8]}, "pom"


def images():
    config = transformers.ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=4, **SIZES)
    return (
        transformers.ViTForImageClassification(config),
        {"pixel_values": X[:8], "labels": Y[:8]},
        "padre:kernel_size=3",
    )


def built(make):
    torch.manual_seed(0)
    model, batch, plan = make()
    return model.eval(), transformers.BatchEncoding(batch), plan


HOSTS = [gpt2, llama, masked_lm, classifier, images]


@pytest.mark.parametrize("make", HOSTS, ids=lambda make: make.__name__)
def test_the_loss_is_the_model_s_own(make):
    """What transformers computes from the same labels: shifted for language models, not for others."""
    model, batch, _ = built(make)
    with torch.no_grad():
        torch.testing.assert_close(answer(model, batch, logits_of).label_loss(), model(**batch).loss)


@pytest.mark.parametrize("make", HOSTS, ids=lambda make: make.__name__)
def test_both_stages(make):
    model, batch, plan = built(make)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    report = polymix.convert(model, plan, input=inputs)
    host, mixers = former(report), {name: bits(part.mixer) for name, part in report.adapters.items()}
    done = distill(report, [batch, batch], val=[batch], imitate_epochs=12, epochs=2, imitate_lr=3e-3)
    assert done.imitation[-1] < 0.9 * done.imitation[0], "the mixers did not learn from their attention"
    assert torch.tensor(done.fine_tuning).isfinite().all() and set(done.accuracy) >= {
        "before",
        "converted",
        "distilled",
    }
    assert all(differing(mixers[name], bits(part.mixer)) for name, part in report.adapters.items())
    assert not differing(bits(host), bits(report.undo()))


@pytest.mark.parametrize("make", [gpt2, masked_lm], ids=lambda make: make.__name__)
@pytest.mark.parametrize("side", ["left", "right"])
def test_softmax_imitates_from_the_start_whatever_is_padding(make, side):
    """Its mixers are the attention that they replaced: masks reach them in both stages, or the losses are not nothing."""
    model = built(make)[0]
    mask = PADDED if side == "right" else PADDED.flip(1)
    inputs = {"input_ids": IDS, "attention_mask": mask}
    try:
        report = polymix.convert(model, "softmax", input=inputs)
    except PolymixError as error:
        pytest.skip(f"untested: {error}")
    done = distill(report, [inputs], imitate_lr=1e-12, learning_rate=1e-12, weight_decay=0.0)
    assert done.imitation[0] < 1e-8 and done.fine_tuning[0] < 1e-6


def test_a_feature_map_of_another_size_is_followed():
    """CvT's layers are told their grid in each call: stage 1, with the attention in place, too."""
    config = transformers.CvtConfig(
        num_channels=1, embed_dim=[8, 16, 16], depth=[1, 2, 3], num_heads=[1, 2, 2], patch_sizes=[3, 3, 3],
        patch_stride=[2, 2, 1], patch_padding=[1, 1, 1], num_labels=4, drop_rate=[0.0] * 3, drop_path_rate=[0.0, 0.0, 0.1],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.CvtForImageClassification(config).eval()
    small, large = torch.randn(4, 1, 16, 16), torch.randn(4, 1, 24, 24)
    report = polymix.convert(model, polymix.PadreConfig(kernel_size=3), input=small)
    done = distill(report, [{"pixel_values": small, "labels": Y[:4]}, {"pixel_values": large, "labels": Y[:4]}])
    assert torch.tensor(done.imitation + done.fine_tuning).isfinite().all()
