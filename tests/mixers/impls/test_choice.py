"""What each implementation refuses when asked for by name, and what "auto" makes of each way of calling."""

import pytest
import torch

import polymix
from polymix.errors import CapabilityError, OptionError
from polymix.ops.dispatch import IMPLS
from tests.helpers import build, close, tokens
from tests.mixers.impls.cases import OPTIONS, main, make, of, padding

NEED_GRID = {"poly_sa", "tesa", "conv2former", "focused"}


def refuses(mixer, impl, match, x, **kw):
    with pytest.raises(CapabilityError, match=match) as caught:
        mixer(x, **kw)
    assert caught.value.argument == "impl" and impl in str(caught.value), "the message must name what was asked for"


@main
def test_blocked_asked_for_by_name_refuses_what_it_cannot(case):
    mixer, x = of(make(case), "blocked"), tokens(2, 35, 12)
    refuses(mixer, "blocked", "no backward", x)
    mixer.requires_grad_(False)
    refuses(mixer, "blocked", "no backward", x.clone().requires_grad_())
    mixer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refuses(mixer, "blocked", "autocast", x)
    with torch.no_grad(), pytest.raises(CapabilityError, match=r"torch\.func"):
        torch.func.jvp(mixer, (x,), (x,))
    with pytest.raises(CapabilityError, match=r"torch\.func"):
        torch.func.vmap(mixer)(x[None])


@main
def test_blocked_asked_for_by_name_refuses_to_be_compiled(case):
    mixer, x = of(make(case), "blocked").requires_grad_(False), tokens(2, 35, 12)
    with pytest.raises(Exception, match=r"impl.*blocked"):
        torch.compile(mixer, fullgraph=True, backend="eager")(x)
    with pytest.raises(Exception, match=r"impl.*blocked"):
        torch.export.export(mixer, (x,))


@torch.no_grad()
def test_blocked_asked_for_by_name_refuses_masks_order_and_options():
    x, mask = tokens(2, 11, 12), padding(2, 11)
    pom, qt = (of(make(case), "blocked") for case in ("pom: 2", "qt: compact 2"))
    for kw in ({"causal": 3}, {"mask": mask[:, None].expand(2, 11, 11)}, {"segments": mask.long()}):
        refuses(pom, "blocked", "supports .* only", x, **kw)
    refuses(qt, "blocked", "supports non-causal attention only", x, causal=True)
    for mixer in (pom, qt, of(make("padre: causal"), "blocked")):
        with pytest.raises(CapabilityError, match="impl"):
            mixer.prefill(x)
    for name, options in (
        ("pom", {"groups": 2}), ("pom", {"rotary": "1d"}), ("poly_nl", {"order": 2}), ("poly_nl", {"order": "2+3"}),
        ("padre", {"heads": 2}), ("padre", {"normalize": "rms"}), ("padre", {"denominator": 1}),
        ("padre", {"basis": "legendre"}), ("padre", {"channel": "monarch:blocks=2"}), ("padre", {"token": "mean"}),
        ("padre", {"token": "mean", "grid": (11,), "num_prefix_tokens": 1}),
    ):  # fmt: skip
        mixer = build(name, 12, impl="blocked", **options)
        refuses(mixer, "blocked", "supports .* only", tokens(2, 12, 12))


@main
def test_triton_asked_for_by_name_refuses_what_it_cannot(case, monkeypatch):
    pytest.importorskip("triton", reason="untested: what Triton is refused for, for which it is needed")
    mixer, x = of(make(case), "triton"), tokens(2, 11, 12)
    refuses(mixer, "triton", "float32", x)
    mixer, x = mixer.float(), x.float()
    with pytest.raises(CapabilityError, match=r"torch\.func"):
        torch.func.jvp(mixer, (x,), (x,))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    if not x.is_cuda:
        refuses(mixer, "triton", "needs a GPU", x)
    monkeypatch.setattr("polymix.ops.dispatch._HAS_TRITON", False)
    refuses(mixer, "triton", "not installed", x)


def test_an_arbitrary_mask_is_not_for_triton():
    x = tokens(2, 5, 12, dtype=torch.float32)
    refuses(of(make("pom: 2").float(), "triton"), "triton", "arbitrary", x, mask=torch.ones(2, 5, 5, dtype=torch.bool))


@pytest.mark.parametrize("name", polymix.list_mixers())
def test_names_of_implementations(name):
    mixer = polymix.create_mixer(name, 12, **({"grid": (3, 4)} if name in NEED_GRID else {}))
    assert set(mixer.impls) == (set(IMPLS) if name in OPTIONS else {"auto", "eager"})
    for impl in {*IMPLS, "cuda", None, ""} - set(mixer.impls):
        with pytest.raises(OptionError, match="impl"):
            mixer.config.changed(impl=impl)
    assert mixer.config.impl == "auto"


@main
def test_auto_is_right_whichever_way_it_is_called(case):
    mixer, x = make(case), tokens(2, 9, 12)
    plain = of(mixer, "eager")
    with torch.no_grad():
        expected = plain(x)
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with context:
            close(mixer(x), expected, 1e-12)
    u = tokens(2, 9, 12, seed=7)
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            y, slope = torch.func.jvp(mixer, (x,), (u,))
            close(y, expected, 1e-12)
            close(torch.func.vmap(mixer, in_dims=1)(torch.stack((x, u), 1))[0], expected, 1e-12)
    small = tokens(1, 3, 12)
    jacobian = torch.func.jacrev(mixer)(x[:1])
    close(torch.einsum("bndBND,BND->bnd", jacobian, u[:1]), slope[:1], 1e-11)
    close(torch.func.jacfwd(mixer)(small), torch.func.jacrev(plain)(small), 1e-11)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, u)
        close(torch.autograd.forward_ad.unpack_dual(mixer(dual)).tangent, slope, 1e-12)
    weights = {name: p.detach() for name, p in mixer.named_parameters()}
    stacked = {name: torch.stack((p, 2 * p)) for name, p in weights.items()}
    many = torch.func.vmap(lambda w: torch.func.functional_call(mixer, w, (x,)))(stacked)
    close(many[0], expected, 1e-12)


@main
def test_auto_compiled_and_exported_without_gradients(case):
    mixer, x = make(case).float().eval(), tokens(2, 9, 12, dtype=torch.float32)
    expected = of(mixer, "eager")(x)
    torch._dynamo.reset()
    with torch.no_grad():
        close(torch.compile(mixer, fullgraph=True, backend="aot_eager")(x), expected, 1e-5)
        close(torch.export.export(mixer, (x,)).module()(x), expected, 1e-5)
