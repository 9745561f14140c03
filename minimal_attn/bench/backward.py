"""Benchmark of the backward pass: dq, dk and dv of the implementations of attention.py that have a derivative.

Only the backward pass is timed; a graph is made once for each case. Beside the usual pass there are deterministic ones
and those with dropout. Read next: forward_backward.py, both passes in one call; measure.py.
"""

import functools
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from .. import reference_attention
from .._build import GPU_KERNELS
from ..reference.dropout import seed_with_origins
from ..toolkit.validation import allowed_error
from . import attention
from .attention import BASELINE, DEFAULT_SEQLENS, DEFAULT_SHAPES, SHAPES, Shape  # noqa: F401: as options.py asks
from .attention import Call, by_kernel, flash_call, ours
from .measure import DTYPE_NAMES, MEASURED, compared

DTYPES = DTYPE_NAMES
TITLE = "Attention backward pass"
USUAL = {"deterministic": False, "dropout_p": 0.0}
ROW = (*attention.ROW[:-len(MEASURED)], *USUAL, *MEASURED)


class VariantShape(NamedTuple("Shape", [*Shape.__annotations__.items(), ("deterministic", bool),
                                        ("dropout_p", float)])):
    """The shape of a usual pass and the variant: deterministic, or with dropout."""

    __slots__ = ()

    @property
    def dense(self):
        return Shape(*self[:-len(USUAL)])

    @property
    def variant(self):
        return "deterministic" if self.deterministic else f"dropout {self.dropout_p:g}"

    def __str__(self):
        return f"{self.dense} {self.variant}"

    @property
    def x(self):
        return self.dense.x

    @property
    def parts(self):
        return self.dense.parts | {"with": self.variant}

    @property
    def sweeps(self):
        return [(head_dim, f"{fixed}, {self.variant}") for head_dim, fixed in self.dense.sweeps]

    @property
    def elements(self):
        return self.dense.elements


def variants(shapes, deterministic, dropout_ps):
    """Each of shapes as it is, then deterministic if that is asked for, then with each dropout_p."""
    kinds = [(True, 0.0)] * deterministic + [(False, p) for p in dropout_ps]
    return [x for shape in shapes for x in (shape, *(VariantShape(*shape, *kind) for kind in kinds))]


def backward_of(forward):
    """(q, k, v, dout, causal) -> (dq, dk, dv), by the graph that the first call with these tensors made."""
    def backward(q, k, v, dout, causal):
        return torch.autograd.grad(graph_of(forward, q, k, v, causal), (q, k, v), dout, retain_graph=True)

    return backward


@functools.lru_cache(maxsize=1)  # what one implementation saves must not take memory from the next
def graph_of(forward, q, k, v, causal):
    return forward(q, k, v, causal)


def forced_by(name, function):
    """Makes function run by the kernel of csrc that a name of IMPLS forces. The backward pass chooses its kernel anew,
    so it needs this too."""
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


@contextmanager
def deterministic_torch():
    """torch's own operations are deterministic, or raise. New memory is not filled, which would take time."""
    was_on, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def variant_of_peer(name, impl):
    """A backend of SDPA for a Call. Nobody knows what it drops, so with dropout there is nothing to judge it by."""
    gradients = backward_of(lambda q, k, v, call: impl.forward(q, k, v, call.causal,
                                                               call.keywords.get("dropout_p", 0.0)))

    def backward(*args):
        with deterministic_torch() if args[-1].keywords.get("deterministic") else nullcontext():
            return gradients(*args)

    def judge(case):
        out = backward(*case.args)  # also the warm-up
        return None if case.shape.dropout_p else compared(case, name, out)

    return impl._replace(forward=backward, judge=judge)


VARIANTS = impls_of(backward_of, ours(flash_call)) | {
    name: variant_of_peer(name, impl) for name, impl in attention.IMPLS.items() if name.startswith("torch:")}


class Case(attention.Case):
    """Inputs of a setting, their gradients (dq, dk, dv) in fp64, and the error that each of these allows."""

    impls = IMPLS
    op = "backward"
    columns = ROW
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

    def sizes(self):
        return USUAL | super().sizes()


class VariantCase(Case):
    """Inputs of a deterministic pass, or of one with dropout."""

    impls = VARIANTS
    scores_kept = 4  # and what dropout makes of them

    def call(self):
        seed = torch.zeros(1, dtype=torch.int64, device=self.device)
        keywords = dict(dropout_p=self.shape.dropout_p, dropout_seed=seed) if self.shape.dropout_p else {}
        return Call(self.causal, keywords | dict(deterministic=self.shape.deterministic))

    def exact(self, q, k, v):
        """The exact result for the judged heads, which are the last ones. It drops the same elements as the call."""
        keywords = {key: value for key, value in self.args[-1].keywords.items() if key != "deterministic"}
        if keywords:
            first_head, first = self.shape.nheads - q.shape[1], self.shape.batch_size - q.shape[0]
            origins = [[0, 0, first_head, sample] for sample in range(first, self.shape.batch_size)]
            keywords["dropout_seed"] = seed_with_origins(keywords["dropout_seed"],
                                                         torch.tensor(origins, device=self.device))
        return reference_attention(q, k, v, self.causal, **keywords)

    base = exact  # by plain torch in the dtype of the inputs, with scores in fp32 as in SDPA's math backend


CASES = {VariantShape: VariantCase, Shape: Case}
