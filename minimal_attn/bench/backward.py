"""What is compared in the backward pass: dq, dk and dv of the implementations of attention.py that have a derivative.

Only the backward pass is timed; a graph is made once for each case. Read next: forward_backward.py, both passes in one
call; measure.py.
"""

import functools

import torch

from .._build import GPU_KERNELS
from ..validation import allowed_error
from . import attention
from .attention import BASELINE, DEFAULT_SEQLENS, DEFAULT_SHAPES, ROW, SHAPES, Shape  # noqa: F401: as options.py asks
from .attention import by_kernel
from .measure import DTYPE_NAMES

DTYPES = DTYPE_NAMES
TITLE = "Attention backward pass"


def backward_of(forward):
    """(q, k, v, dout, causal) -> (dq, dk, dv), by the graph that the first call with these tensors made."""
    def backward(q, k, v, dout, causal):
        return torch.autograd.grad(graph_of(forward, q, k, v, causal), (q, k, v), dout, retain_graph=True)

    return backward


@functools.lru_cache(maxsize=1)  # what one implementation saves must not take memory from the next
def graph_of(forward, q, k, v, causal):
    return forward(q, k, v, causal)


def forced_by(name, function):
    """function, by the kernel of csrc that a name of IMPLS forces: for the backward pass it is chosen there anew."""
    kernel = name.removeprefix("cuda:")
    return by_kernel(kernel, function) if kernel in GPU_KERNELS else function


def impls_of(gradients_of, impls=attention.IMPLS):
    """impls with gradients_of(forward) for the forward pass of each."""
    return {name: impl._replace(forward=forced_by(name, gradients_of(impl.forward)),
                                dtypes=tuple(x for x in impl.dtypes if x in DTYPES))
            for name, impl in impls.items() if name != "cuda:dmma"}  # its backward pass is that of simt


IMPLS = impls_of(backward_of)
PROFILES = {name: (f"{heading}, backward", backward_of(forward))
            for name, (heading, forward) in attention.PROFILES.items()}


class Case(attention.Case):
    """Inputs of a setting, their gradients (dq, dk, dv) in fp64, and the error that each of these allows."""

    impls = IMPLS
    op = "backward"
    scores_kept = 3  # autograd keeps the scores and makes their gradients
    flops_of_forward = 2.5  # five products instead of two; Q Kᵀ is formed again

    def __init__(self, setting, device):
        super().__init__(setting, device)
        *qkv, call = self.args
        qkv = [x.requires_grad_() for x in qkv]
        dout = torch.randn_like(qkv[0])
        self.args = *qkv, dout, call
        self.flops *= self.flops_of_forward
        self.out_bytes = sum(x.nbytes for x in qkv)
        self.bytes = 2 * self.out_bytes + 2 * dout.nbytes  # dout and out, which gives delta
        self.truth = self.tolerance = None
        if self.has_truth(self.shape, device):
            judged, dout = [self.judged(x).detach().requires_grad_() for x in qkv], self.judged(dout)
            exact = [x.detach().double().requires_grad_() for x in judged]
            self.truth = torch.autograd.grad(self.exact(*exact), exact, dout.double())
            by_math = torch.autograd.grad(self.base(*judged), judged, dout)
            # Four times the base's error, where the forward has two: MATH keeps P, all others form it again from lse.
            self.tolerance = tuple(2 * allowed_error(*pair) for pair in zip(by_math, self.truth))


CASES = {Shape: Case}
