"""Addresses that C takes: nothing of another dtype, size or place gets behind one, and no state of another dtype does."""

import re
from contextlib import suppress

import pytest
import torch

import polymix
from polymix import ops
from polymix.errors import ShapeError, StateError
from polymix.ops.decode import rows, try_attention, try_convolution
from polymix.ops.native import library
from polymix.ops.native.compile import OPS
from polymix.ops.native.functions import FUNCTIONS
from polymix.ops.native.library import Address, addresses
from tests.contracts.mixer_cases import CASES
from tests.ops.kernels import needs_it
from tests.ops.test_safety import RIGHT, call

pytestmark = needs_it
KINDS = {"void *": {"values"}, "float *": {"floats"}, "int64_t *": {"counts"}, "uint8_t *": {"mask"}, "Tokens *": {"tokens"},
         "Heads *": {"heads"}, "Linear *": {"linear", "map"}, "Taps *": {"taps"}}  # fmt: skip


def prototypes():
    """The functions of the C sources: the types and the names of their arguments."""
    text = "\n".join(path.read_text("utf-8") for path in sorted(OPS.glob("*/*.c")))
    for name, arguments in re.findall(r"^int (\w+)\(([^)]*)\) \{", text, flags=re.M):
        parts = [part.split() for part in arguments.replace("const ", "").replace("*", "* ").split(",")]
        yield name, [(" ".join(part[:-1]), part[-1]) for part in parts]


def test_every_function_is_described_as_c_declares_it():
    """A pointer that the table calls a number, or of another type than C's, would not be checked."""
    assert {name for name, _ in prototypes()} == set(FUNCTIONS)
    for name, arguments in prototypes():
        entries = [entry.strip() for entry in FUNCTIONS[name].split(";")]
        assert len(entries) == len(arguments), name
        for entry, (kind, _) in zip(entries, arguments, strict=True):
            pointer = entry.partition(":")[0].split()[0].rstrip("?") if ":" in entry else None
            assert pointer in KINDS[kind] if kind in KINDS else pointer is None, (name, entry, kind)


@pytest.fixture(scope="module")
def calls():
    """One right call of each function: its arguments as `library.call` gets them."""
    seen = {}

    def record(name, args):
        seen.setdefault(name, args)
        return addresses(name, args)

    library.addresses, original = record, library.addresses
    try:
        for name, arguments in RIGHT.items():
            leaves = arguments()
            leaves = {key: value.requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                      for key, value in leaves.items()}  # fmt: skip
            y = call(name, leaves)
            sum(part.sum() for part in (y if isinstance(y, tuple) else (y,))).backward()
        with torch.no_grad():
            x, maps = torch.randn(2, 1, 256), [(torch.randn(256, 256), torch.randn(256)) for _ in range(3)]
            rows.try_linear(x, *maps[0], "gelu", torch.randn(2, 1, 256))
            rows.try_feed_forward(x, *maps[:2], "silu", maps[2])
            rows.try_rms_norm(x, torch.ones(256), 1e-5)
            try_attention(*(torch.randn(2, 3, n, 8) for n in (1, 5, 5)), torch.ones(2, 1, 1, 5).bool(), 1.0)
            try_convolution(x, torch.randn(2, 2, 256), torch.randn(256, 1, 3), 1)
            mixer, tokens = polymix.create_mixer("pom", 8), torch.randn(2, 3, 8)
            mixer.step(tokens[:, 0], mixer.prefill(tokens)[1])
            for name in ("pom", "qt"):  # in order, with a mask and a state: every pointer is given
                _, state = polymix.create_mixer(name, 8, impl="eager").prefill(tokens)
                mixer, mask = polymix.create_mixer(name, 8, impl="native"), torch.ones(2, 3).bool()
                mixer.prefill(tokens, state, mask=mask)
                mixer(tokens, mask=mask)
    finally:
        library.addresses = original
    return seen


def wrong(x):
    """What C must not get in place of x."""
    yield x.double() if x.is_floating_point() else x.float()
    yield x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32 if x.is_floating_point() else torch.int32)
    yield x.new_ones(*x.shape[:-1], x.shape[-1] + 1)
    yield x.new_ones(*x.shape[:-1], x.shape[-1] - 1)
    yield x.to("meta")
    yield x.repeat_interleave(2, dim=-1)[..., ::2]  # the right size, but not in one piece
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    yield freed


def changed(value):
    """A checked argument with each of its tensors replaced by what does not fit."""
    if isinstance(value, torch.Tensor):
        yield from (
            bad for bad in wrong(value) if not (value.numel() == 1 and bad.is_contiguous() and same(bad, value))
        )
        return
    if isinstance(value, tuple):  # a weight and a bias
        for i, tensor in enumerate(value):
            for bad in wrong(tensor) if tensor is not None else ():
                if not (tensor.shape[-1] == 1 and same(bad, tensor)):
                    yield (*value[:i], bad, *value[i + 1 :])
        return
    for i, tensor in enumerate(value.tensors):
        for bad in wrong(tensor):
            if tensor.shape[-1] == 1 and same(bad, tensor):
                continue
            copy = type(value).__new__(type(value))
            for name, _ in value._fields_:
                setattr(copy, name, getattr(value, name))
            copy.__dict__.update(value.__dict__, tensors=(*value.tensors[:i], bad, *value.tensors[i + 1 :]))
            yield copy


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and a.untyped_storage().nbytes() > 0


@pytest.mark.parametrize("function", sorted(FUNCTIONS))
def test_no_tensor_of_another_dtype_size_or_place_reaches_c(calls, function):
    """It would be read, or written, beyond its end: a crash, or another user's memory in the result."""
    arguments, accepted = calls[function], []
    addresses(function, arguments)
    for i, entry in enumerate(FUNCTIONS[function].split(";")):
        if ":" not in entry:
            continue
        if "?" not in entry.partition(":")[0]:
            with pytest.raises((ShapeError, TypeError), match="None"):
                addresses(function, [*arguments[:i], None, *arguments[i + 1 :]])
        if arguments[i] is None:
            continue
        for bad in changed(arguments[i]):
            with suppress(ShapeError):
                addresses(function, [*arguments[:i], bad, *arguments[i + 1 :]])
                parts = bad if isinstance(bad, tuple) else getattr(bad, "tensors", (bad,))
                accepted.append((entry, [(t.dtype, t.shape, t.stride(), t.device) for t in parts if t is not None]))
    assert not accepted


def test_the_structs_keep_what_they_point_into():
    """A struct with an address alone could not be checked."""
    for kind in Address.__subclasses__():
        assert kind.__init__ is not Address.__init__ and kind.fits is not Address.fits, kind


RECURRENT = {**CASES, "padre-mean": ("padre", {"causal": True, "token": "mean+depthwise:kernel=3"}),
             "performer-relu": ("performer", {"kernel": "relu"})}  # fmt: skip


def replaced(state, change):
    """Copies of a state in which one tensor is changed."""
    for i, field in enumerate(state):
        if isinstance(field, tuple):
            yield from (state._replace(**{state._fields[i]: (*field[:j], change(part), *field[j + 1 :])})
                        for j, part in enumerate(field))  # fmt: skip
        else:
            yield state._replace(**{state._fields[i]: change(field)})


@pytest.mark.parametrize("case", RECURRENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_of_another_dtype_is_an_error_that_names_the_right_one(case, dtype):
    """A cache that was cast (.half(), .to(bfloat16), a model moved to float64 and back) must not be computed with."""
    name, options = RECURRENT[case]
    mixer = polymix.create_mixer(name, 12, dtype=dtype, **options)
    if not mixer.capabilities.recurrent:
        return
    x = torch.randn(2, 6, 12, dtype=dtype)
    with torch.no_grad():
        _, state = mixer.prefill(x)
        mixer.step(x[:, 0], state)
        for kind in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool, torch.complex64):
            for cast in replaced(state, lambda part, kind=kind: part.to(kind)):
                for use in (lambda s=cast: mixer.step(x[:, 0], s), lambda s=cast: mixer.prefill(x, s)):
                    with pytest.raises(
                        StateError, match=r"(float32|int64).* got .*" + str(kind).removeprefix("torch.")
                    ):
                        use()
        for change in (
            torch.Tensor.to_sparse,
            lambda part: part.to("meta"),
            lambda part: part[..., :0],
            lambda part: None,
        ):
            for other in replaced(state, change):
                with pytest.raises(StateError, match="state"):
                    mixer.step(x[:, 0], other)


def test_the_step_of_pom_checks_its_state_below_the_mixer_too():
    """`ops.pom_chunk` takes a state from anybody."""
    mixer, x = polymix.create_mixer("pom", 8), torch.randn(2, 1, 8)
    with torch.no_grad():
        _, state = mixer.prefill(x)
        arguments = mixer._weights, mixer._options
        for total in (state.total.half(), state.total.double(), state.total[:, :3]):
            with pytest.raises(ShapeError, match="before"):
                ops.pom_chunk(x, state._replace(total=total), *arguments, impl="native")


def test_the_beam_search_reads_as_many_classes_as_it_knows():
    """The library gets an address and the number of classes; with fewer it would read behind the last row."""
    pytest.importorskip("flashlight", reason="untested: a beam search")
    from polymix.train.data.ctc import BeamSearch

    assert len(BeamSearch("ab", beam=3)(torch.randn(2, 4, 3))) == 2
    for classes in (1, 2, 4):
        with pytest.raises(ShapeError, match="logits"):
            BeamSearch("ab", beam=3)(torch.randn(2, 4, classes))
