"""Benchmark of sliding windows and of attention sinks, with dense batches beside them.

A window is named by its left side. The right side is 0 with a causal mask, else equal to the left one. Rows of calls
with sinks have op "sinks", and rows of dense calls have op "forward", as in attention.py. Read next: measure.py.
"""

import functools
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from .. import reference_attention
from ..options import Lengths
from ..reference.scores import visible_keys
from . import attention
from .attention import HALVES, Call, flash_call, flex_call, ours
from .measure import DTYPE_NAMES, MEASURED, Impl

DTYPES = DTYPE_NAMES
TITLE = "Attention with sliding windows and sinks"
BASELINE = "flex"
ROW = (*attention.ROW[:-len(MEASURED)], "window_size", *MEASURED)
SHAPES = "B,H,S,D or B,H,Sq,D,Hk,Sk, also with ' window LEFT' or ' sinks' behind it"


class Shape(NamedTuple("Shape", [*attention.Shape.__annotations__.items(), ("window_size", tuple)])):
    """The shape of a dense batch, and its window (left, right), which a causal mask makes (left, 0)."""

    __slots__ = ()

    def __str__(self):
        return f"{self.dense} window {self.window_size[0]}"

    @property
    def dense(self):
        return attention.Shape(*self[:-1])

    @property
    def parts(self):
        return self.dense.parts | {"window": str(self.window_size[0])}

    sweeps = ()

    @property
    def elements(self):
        return self.dense.elements


class SinksShape(attention.Shape):
    """The shape of a dense batch with sinks. It equals no shape without sinks."""

    __slots__ = ()
    sweeps = ()

    def __str__(self):
        return f"{super().__str__()} sinks"

    def __eq__(self, other):
        return isinstance(other, SinksShape) and super().__eq__(other)

    def __hash__(self):
        return hash((SinksShape, *self))

    @property
    def parts(self):
        return super().parts | {"with": "sinks"}


def shape_of(text, ints):
    """A shape of SHAPES; ints(text) reads integers between commas. Raises ValueError."""
    sizes, _, more = text.partition(" ")
    dense = attention.Shape.of(ints(sizes))
    name, *left = more.split()[:2] or [""]
    if more == "":
        return dense
    if more == "sinks":
        return SinksShape(*dense)
    if name != "window" or len(more.split()) != 2 or not left[0].isdecimal():
        raise ValueError(f"behind the sizes there is ' window LEFT' or ' sinks', not {more!r}")
    return Shape(*dense, (int(left[0]), int(left[0])))


def shapes(dense, windows, *others):
    """The shapes of a run: a dense batch with each of the windows, then this batch and others without a window, each
    without and with sinks."""
    return [*(Shape(*dense, (left, left)) for left in windows),
            *(kind(*x) for x in (dense, *others) for kind in (attention.Shape, SinksShape))]


DEFAULT_SHAPES = {
    "cuda": shapes((1, 16, 16384, 128, 4, 16384), (512, 4096), (8, 16, 2048, 128, 4, 2048)),
    "cpu": shapes((2, 4, 64, 64, 2, 64), (16,)),
}
DEFAULTS = {"dtypes": "bfloat16", "causal": "yes",  # FlexAttention is tuned for most of a minute for each window
            "impls": ("cuda:sm90", "cuda:sm80", "cuda:host", "triton", "torch:cudnn", "torch:flash", "flex")}

WINDOWED = ours(flash_call) | {"flex": Impl(flex_call, ("cuda",), dtypes=HALVES)}
WITH_SINKS = ours(flash_call)
IMPLS = attention.IMPLS | WINDOWED  # also those of dense batches alone
PROFILES = {"cuda": ("minimal flash attention", functools.partial(flash_call, backend="cuda")),
            "triton": ("triton flash attention", functools.partial(flash_call, backend="triton")),
            "flex": ("FlexAttention", flex_call)}


def by_math(q, k, v, mask):
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


class Case(attention.Case):
    """Inputs of a window. FLOPs count the pairs of a row and a key that it sees."""

    impls = WINDOWED
    op = "window"
    columns = ROW

    @property
    def window_size(self):
        left, right = self.shape.window_size
        return left, 0 if self.causal else right

    def call(self):
        left, right = self.window_size
        shift = self.shape.seqlen_k - self.shape.seqlen_q

        def mask_mod(b, h, row, col):
            return (col >= row + shift - left) & (col <= row + shift + right)

        return Call(self.causal, dict(window_size=self.window_size), mask_mod)

    def pairs(self):
        left, right = self.window_size
        diagonals = range(self.shape.seqlen_k - self.shape.seqlen_q, self.shape.seqlen_k)
        seen = (min(x + right, self.shape.seqlen_k - 1) - max(x - left, 0) + 1 for x in diagonals)
        return self.shape.batch_size * sum(max(x, 0) for x in seen)

    def exact(self, q, k, v):
        return reference_attention(q, k, v, self.causal, window_size=self.window_size)

    def base(self, q, k, v):
        return by_math(q, k, v, visible_keys(q.shape[2], k.shape[2], self.window_size, Lengths(), self.device))

    def sizes(self):
        return self.shape._asdict() | {"window_size": list(self.window_size)}


class SinksCase(attention.Case):
    """Inputs of a dense batch and normal sinks."""

    impls = WITH_SINKS
    op = "sinks"

    def call(self):
        return Call(self.causal, dict(sinks=torch.randn(self.shape.nheads, device=self.device)))

    def sinks_of(self, q):
        """Sinks of the judged heads, which are the last ones."""
        return self.args[-1].keywords["sinks"][-q.shape[1]:]

    def exact(self, q, k, v):
        return reference_attention(q, k, v, self.causal, sinks=self.sinks_of(q).double())

    def base(self, q, k, v):
        """PyTorch's result with one more key, whose scores are the sinks and whose value is 0."""
        scores = q.new_zeros(q.shape[1], q.shape[2], k.shape[2])
        if self.causal:
            scores.masked_fill_(~attention.causal_mask(q.shape[2], k.shape[2], q.device), -torch.inf)
        sink = self.sinks_of(q).to(q.dtype)[:, None, None].expand(-1, q.shape[2], 1)
        return by_math(q, pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1)), torch.cat([scores, sink], 2))


CASES = {Shape: Case, SinksShape: SinksCase, attention.Shape: attention.Case}
