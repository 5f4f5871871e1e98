"""Compiled mixers against their own eager code (aot_eager: the same tracing and symbolic shapes as Inductor, without its
C++ compile time)."""

import torch
import torch._dynamo.testing

from tests.helpers import close


def graphs(mixer, calls, any_length=True, tolerance=1e-5):
    """How many graphs there are after each call (x, options); fullgraph, and backward where x asks for a gradient.

    The batch and the length are marked as dynamic: a trace that ties either to a number is an error."""
    torch._dynamo.reset()
    backward = any(x.requires_grad for x, _ in calls)  # AOTAutograd traces it, which takes half of the time
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager" if backward else "eager")
    compiled, found = torch.compile(mixer, fullgraph=True, backend=counter), []
    for x, options in calls:
        for tensor in (x, *options.values()) if any_length else ():
            if torch.is_tensor(tensor):
                torch._dynamo.mark_dynamic(tensor, (0, 1))
        y, expected = compiled(x, **options), mixer(x, **options)
        assert y.dtype == expected.dtype
        close(y, expected, tolerance)
        if x.requires_grad:
            (ours,), (plain,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x)
            close(ours, plain, 10 * tolerance)
        found.append(counter.frame_count)
    return found
