"""`polymix.optimize`: the same outputs, undone exactly, never stale, and the plain way wherever it cannot help."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.flop_counter import FlopCounterMode

import polymix
from polymix.errors import CapabilityError, OptionError
from polymix.inference import forwards
from polymix.models import VisionTransformer
from polymix.ops.shared.optimized import forward_of, optimized
from tests.contracts.library_cases import imported

MIXERS = ("attention", "padre", "pom", "qt", "poly_sa", "poly_nl", "linear_floor")
PACKED, ACTIVATED = "products with packed weights", "activations in the product"


def timm_deit():
    model = imported("timm").create_model("deit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=2)
    return model, {"x": torch.randn(2, 3, 32, 32)}, 2


def transformers_vit():
    transformers = imported("transformers")
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **sizes))
    return model, {"pixel_values": torch.randn(2, 3, 32, 32)}, 2


def torchvision_vit():
    model = imported("torchvision").models.VisionTransformer(32, 8, 2, 2, 24, 40, num_classes=3)
    return model, {"x": torch.randn(2, 3, 32, 32)}, 2


def gpt2():
    transformers = imported("transformers")
    sizes = {"vocab_size": 40, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), {"input_ids": torch.randint(40, (2, 20))}, 2


def own_vit():
    model = VisionTransformer(polymix.SoftmaxConfig(heads=2), image_size=32, patch_size=8, dim=24, depth=2, classes=3)
    return model, {"images": torch.randn(2, 3, 32, 32)}, 2


def llama():
    transformers = imported("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    return model, {"input_ids": torch.randint(40, (2, 20))}, 2


def bert():
    transformers = imported("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=2))
    return model, {"input_ids": torch.randint(40, (2, 20))}, 2


HOSTS = (timm_deit, transformers_vit, torchvision_vit, gpt2, own_vit)
NOT_CAUSAL = ("poly_sa", "poly_nl")
CASES = [(build, mixer) for build in HOSTS for mixer in MIXERS if build is not gpt2 or mixer not in NOT_CAUSAL]


@torch.no_grad()
def run(model, inputs):
    y = model(**inputs)
    return y if isinstance(y, torch.Tensor) else y[0]


@pytest.fixture
def products(monkeypatch):
    """The layers whose fast product ran."""
    ran, parts = [], forwards.PackedLinear.parts

    def counted(self, x):
        found = parts(self, x)
        if found is not None:
            ran.append(self.module)
        return found

    monkeypatch.setattr(forwards.PackedLinear, "parts", counted)
    return ran


def converted(build, mixer, seed=0):
    torch.manual_seed(seed)
    model, inputs, depth = build()
    model.eval()
    if mixer != "attention":
        config = polymix.PadreConfig(causal=True) if mixer == "padre" and build is gpt2 else mixer
        polymix.convert(model, config)
    return model.eval(), inputs, depth


@pytest.fixture
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8)).eval()


X = torch.linspace(-2, 2, 2 * 5 * 8).view(2, 5, 8)


@pytest.mark.parametrize(("build", "mixer"), CASES)
def test_the_outputs_stay_and_the_layers_are_undone_exactly(build, mixer, products):
    model, inputs, depth = converted(build, mixer)
    before, keys = run(model, inputs), list(model.state_dict())
    modules, own = list(model.modules()), [set(vars(module)) for module in model.modules()]
    assert polymix.optimize(model) is model
    assert list(model.modules()) == modules and list(model.state_dict()) == keys
    assert optimized(model)[ACTIVATED] == depth
    torch.testing.assert_close(run(model, inputs), before, rtol=2e-5, atol=2e-6)
    assert len(products) >= 2 * depth, "the plain products ran"
    ran = len(products)
    assert polymix.optimize(model, enabled=False) is model
    assert list(model.modules()) == modules and list(model.state_dict()) == keys
    assert [set(vars(module)) for module in model.modules()] == own and optimized(model) == {}
    assert torch.equal(run(model, inputs), before) and len(products) == ran
    assert all(mixer.folded == () for mixer in modules if isinstance(mixer, polymix.TokenMixer))


@pytest.mark.parametrize("build", [llama, bert])
def test_gated_networks_and_networks_in_two_modules_are_recognised(build, products):
    model, inputs, depth = converted(build, "attention")
    before = run(model, inputs)
    polymix.optimize(model)
    assert optimized(model)[ACTIVATED] >= depth
    torch.testing.assert_close(run(model, inputs), before, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.SiLU()])
def test_each_activation_is_recognised_by_what_it_computes(activation, products):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), activation, nn.Linear(16, 8, bias=False)).eval()
    before = run(model, {"input": X})
    polymix.optimize(model)
    assert optimized(model) == {PACKED: 2, ACTIVATED: 1}
    torch.testing.assert_close(run(model, {"input": X}), before, rtol=1e-5, atol=1e-6)
    assert products == [model[0], model[2]]


@pytest.mark.parametrize("inside", [nn.Tanh(), nn.Sigmoid(), nn.Identity(), nn.LayerNorm(16)])
def test_other_functions_between_two_layers_stay(inside):
    model = nn.Sequential(nn.Linear(8, 16), inside, nn.Linear(16, 8)).eval()
    before = run(model, {"input": X})
    assert optimized(polymix.optimize(model)) == {PACKED: 2}
    torch.testing.assert_close(run(model, {"input": X}), before, rtol=1e-5, atol=1e-6)


def test_layers_that_read_different_tokens_are_no_network():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.GELU()

        def forward(self, x):
            return self.b(self.act(self.a(x)) + x)

    model = Two().eval()
    before = run(model, {"x": X})
    assert optimized(polymix.optimize(model)) == {PACKED: 2}
    torch.testing.assert_close(run(model, {"x": X}), before, rtol=1e-5, atol=1e-6)


def in_place(model):
    model[0].weight.mul_(2)


def loaded(model):
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})


def assigned(model):
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()}, assign=True)


def through_half(model):
    model.half().float()


def new_data(model):
    model[3].weight.data = model[3].weight.data * 3


def new_parameter(model):
    model[0].weight = nn.Parameter(model[0].weight * 3)


def new_layer(model):
    model[3] = nn.Linear(16, 8)


def new_activation(model):
    model[1] = nn.ReLU()


def other_activation(model):
    model[1].approximate = "tanh"


def without_bias(model):
    model[0].bias = None


def pruned(model):
    prune.l1_unstructured(model[0], "weight", 0.5)


def parametrized(model):
    parametrize.register_parametrization(model[3], "weight", nn.Tanh())


def hooked(model):
    model[1].register_forward_hook(lambda module, args, output: output + 1)


CHANGES = (in_place, loaded, assigned, through_half, new_data, new_parameter, new_layer, new_activation,
           other_activation, without_bias, pruned, parametrized, hooked)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_nothing_is_stale(network, change):
    polymix.optimize(network)
    before = run(network, {"input": X})
    with torch.no_grad():
        change(network)
    plain = polymix.optimize(copy.deepcopy(network), enabled=False)
    now = run(network, {"input": X})
    assert not torch.equal(now, before)
    torch.testing.assert_close(now, run(plain, {"input": X}), rtol=1e-5, atol=1e-6)


def test_folded_maps_of_padre_follow_a_change_of_the_dtype(products):
    """The memory of the weights must not be taken for the old one, even at the same address."""
    torch.manual_seed(0)
    mixer = polymix.create_mixer("padre", 16, grid=(4, 4)).eval()
    polymix.optimize(mixer)
    x = torch.randn(1, 16, 16)
    run(mixer, {"x": x})
    mixer.half().float()
    plain = polymix.optimize(copy.deepcopy(mixer), enabled=False)
    assert mixer.folded and not plain.folded
    torch.testing.assert_close(run(mixer, {"x": x}), run(plain, {"x": x}), rtol=1e-5, atol=1e-6)


def test_a_fold_of_the_users_survives(network):
    mixer = polymix.create_mixer("padre", 16, grid=(4, 4)).eval().fold()
    polymix.optimize(mixer)
    polymix.optimize(mixer, enabled=False)
    assert mixer.folded


def test_training_and_gradients_run_the_plain_layers(network, products):
    plain = copy.deepcopy(network)
    polymix.optimize(network)
    for model in (network, plain):
        model(X).sum().backward()
    assert torch.equal(network[0].weight.grad, plain[0].weight.grad)
    for model in (network, plain):
        torch.manual_seed(1)
        with torch.no_grad():
            model.y = model.train()(X)
    assert torch.equal(network.y, plain.y) and not products


def test_a_mode_of_dropout_alone_is_seen(network):
    polymix.optimize(network)
    network[2].train()
    assert not torch.equal(run(network, {"input": X}), run(network, {"input": X}))


def test_frozen_weights_give_gradients_to_the_tokens(network):
    polymix.optimize(network.requires_grad_(False))
    x = X.clone().requires_grad_()
    network(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


@pytest.mark.parametrize("place", ["autocast", "float64", "vmap", "flops", "subclass", "jvp", "mkldnn off"])
def test_calls_that_others_observe_run_the_plain_layers(network, products, place):
    plain, x = copy.deepcopy(network), X
    polymix.optimize(network)
    if place == "float64":
        x, network, plain = x.double(), network.double(), plain.double()
    if place == "subclass":
        x = X.as_subclass(type("Tokens", (torch.Tensor,), {}))
    outputs = []
    for model in (network, plain):
        with torch.no_grad():
            if place == "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    outputs.append(model(x))
            elif place == "vmap":
                outputs.append(torch.vmap(model)(x))
            elif place == "jvp":
                outputs.append(torch.func.jvp(model, (x,), (torch.ones_like(x),))[1])
            elif place == "flops":
                with FlopCounterMode(display=False) as counter:
                    model(x)
                outputs.append(torch.tensor(counter.get_total_flops()))
            elif place == "mkldnn off":
                before = torch._C._get_mkldnn_enabled()
                torch._C._set_mkldnn_enabled(False)
                outputs.append(model(x))
                torch._C._set_mkldnn_enabled(before)
            else:
                outputs.append(model(x))
    assert torch.equal(*outputs) and not products


def test_wrong_inputs_fail_as_before(network):
    errors = []
    for model in (network, polymix.optimize(copy.deepcopy(network))):
        with pytest.raises(RuntimeError) as caught, torch.no_grad():
            model(X[..., :5])
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("shape", [(8,), (3, 8), (0, 8), (2, 3, 4, 8)])
def test_inputs_of_any_rank(network, shape):
    plain, x = copy.deepcopy(network), torch.randn(shape)
    polymix.optimize(network)
    torch.testing.assert_close(run(network, {"input": x}), run(plain, {"input": x}), rtol=1e-5, atol=1e-6)


def test_strided_tokens(network):
    plain, x = copy.deepcopy(network), torch.randn(8, 5, 2).permute(2, 1, 0)
    polymix.optimize(network)
    torch.testing.assert_close(run(network, {"input": x}), run(plain, {"input": x}), rtol=1e-5, atol=1e-6)


def test_copies_and_pickles_are_optimized_and_independent(network, products):
    polymix.optimize(network)
    before = run(network, {"input": X})
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        products.clear()
        assert torch.equal(run(other, {"input": X}), before)
        assert products == [other[0], other[3]]
        with torch.no_grad():
            other[0].weight.zero_()
        assert torch.equal(run(network, {"input": X}), before)
        assert not torch.equal(run(other, {"input": X}), before)


def test_a_saved_conversion_comes_back(tmp_path):
    model, inputs, _ = converted(timm_deit, "padre")
    before = run(polymix.optimize(model), inputs)
    polymix.save_pretrained(model, tmp_path)
    again = polymix.load_pretrained(tmp_path).eval()
    assert optimized(again) == {}
    torch.testing.assert_close(run(again, inputs), before, rtol=2e-5, atol=2e-6)


def test_a_conversion_can_be_undone_afterwards():
    torch.manual_seed(0)
    model, inputs, _ = timm_deit()
    before = run(model.eval(), inputs)
    report = polymix.convert(model, "pom")
    polymix.optimize(model.eval())
    report.undo()
    torch.testing.assert_close(run(model, inputs), before, rtol=2e-5, atol=2e-6)


def test_bfloat16_runs_where_the_processor_multiplies_it(network, monkeypatch, products):
    network, x = network.bfloat16(), X.bfloat16()
    before = run(network, {"input": x})
    polymix.optimize(network)
    monkeypatch.setattr(forwards, "fast_types", lambda: {torch.float32})
    assert torch.equal(run(network, {"input": x}), before) and not products


def test_compiled_and_exported_models_hold_plain_layers(network):
    before = run(network, {"input": X})
    polymix.optimize(network)
    with torch.no_grad():
        exported = torch.export.export(network, (X,))
    names = {str(node.target) for node in exported.graph.nodes}
    assert not any("mkldnn" in name for name in names) and any("linear" in name for name in names)
    torch.testing.assert_close(exported.module()(X), before)
    torch.testing.assert_close(torch.jit.trace(network, X)(X), before)
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, {"input": X}), before)


def test_explain_says_what_is_optimized():
    model, inputs, _ = converted(timm_deit, "padre")
    with torch.inference_mode():
        assert "optimize" not in str(polymix.explain(model, **inputs))
        text = str(polymix.explain(polymix.optimize(model), **inputs))
    assert "folded: B_1 D_1" in text
    assert f"optimized: 2 {ACTIVATED}, 9 {PACKED}" in text


def test_errors_come_first(network, monkeypatch):
    with pytest.raises(OptionError, match=r"expected a torch.nn.Module, got int"):
        polymix.optimize(3)
    with pytest.raises(OptionError, match=r"enabled"):
        polymix.optimize(network, enabled=1)
    with pytest.raises(OptionError, match="`model`: expected a model with linear layers, got a Sequential"):
        polymix.optimize(nn.Sequential(nn.Conv2d(3, 3, 1)))
    with pytest.raises(OptionError, match="`model`: expected a model on the CPU, got a model on meta"):
        polymix.optimize(copy.deepcopy(network).to("meta"))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(CapabilityError, match="a PyTorch built without oneDNN"):
        polymix.optimize(network)
    assert optimized(network) == {}
    assert polymix.optimize(network, enabled=False) is network


def test_optimizing_twice_changes_nothing(network):
    polymix.optimize(network)
    first = run(network, {"input": X})
    polymix.optimize(network)
    assert optimized(network) == {PACKED: 2, ACTIVATED: 1} and torch.equal(run(network, {"input": X}), first)
    assert isinstance(forward_of(network[0]), forwards.PackedLinear)
