"""What is compared in the backward pass: dq, dk and dv of the implementations of attention.py that have a derivative.

Only the backward pass is timed; a graph is made once for each case. Read next: attention.py; measure.py.
"""

import functools

import torch

from .. import reference_attention
from ..validation import allowed_error
from . import attention
from .attention import BASELINE, DEFAULT_SEQLENS, DEFAULT_SHAPES, ROW, SHAPES, Shape  # noqa: F401: as options.py asks
from .measure import DTYPE_NAMES, truth_fits

DTYPES = DTYPE_NAMES
TITLE = "Attention backward"


def backward_of(forward):
    """(q, k, v, dout, causal) -> (dq, dk, dv), by the graph that the first call with these tensors made."""
    def backward(q, k, v, dout, causal):
        return torch.autograd.grad(graph_of(forward, q, k, v, causal), (q, k, v), dout, retain_graph=True)

    return backward


@functools.lru_cache(maxsize=1)  # what one implementation saves must not take memory from the next
def graph_of(forward, q, k, v, causal):
    return forward(q, k, v, causal)


IMPLS = {name: impl._replace(forward=backward_of(impl.forward),
                             dtypes=tuple(x for x in impl.dtypes if x in DTYPES))
         for name, impl in attention.IMPLS.items() if not name.startswith("cuda:")}
PROFILES = {name: (f"{heading}, backward", backward_of(forward))
            for name, (heading, forward) in attention.PROFILES.items() if name != "cuda"}


class Case(attention.Case):
    """Inputs of a setting, their gradients in fp64 one after the other, and the error these allow."""

    impls = IMPLS
    op = "backward"

    def __init__(self, setting, device):
        super().__init__(setting, device)
        *qkv, causal = self.args
        qkv = [x.requires_grad_() for x in qkv]
        dout = torch.randn_like(qkv[0])
        self.args = *qkv, dout, causal
        self.flops *= 2.5  # five products instead of two; Q Kᵀ is formed again
        self.out_bytes = sum(x.nbytes for x in qkv)
        self.bytes = 2 * self.out_bytes + 2 * dout.nbytes  # dout and out, which gives delta
        self.truth = self.tolerance = None
        if truth_fits(3 * self.shape.elements, device):
            exact = [x.detach().double().requires_grad_() for x in qkv]
            out = reference_attention(*exact, causal)
            self.truth = torch.cat([x.flatten() for x in torch.autograd.grad(out, exact, dout.double())])
            by_math = backward_of(attention.IMPLS["torch:math"].forward)(*self.args)
            # Three times the base's error, as in tests/test_backward.py, where the forward has two.
            self.tolerance = 1.5 * allowed_error(torch.cat([x.flatten() for x in by_math]), self.truth)
