"""Benchmark of packed batches: samples of several lengths one after the other, and dense batches beside them.

The rows of dense batches, with about as many tokens, have op "forward" and are those of attention.py. Read next:
varlen_backward.py, the derivative; window.py; measure.py.
"""

import functools
import inspect
import re
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from . import attention
from .attention import HALVES, Call, flash_call, flex_call, host_cost, ours  # noqa: F401: as options.py asks
from .measure import DTYPE_NAMES, MEASURED, Impl, normal

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

DTYPES = DTYPE_NAMES
TITLE = "Attention of packed batches"
BASELINE = "torch:varlen"
ROW = (*attention.ROW[:-len(MEASURED)], "lengths", *MEASURED)
SHAPES = "LENGTHS,H,D,Hk or B,H,S,D or B,H,Sq,D,Hk,Sk"

# Lengths that were drawn once, by their name.
DRAWN = {"16 of 64..4096": (862, 1654, 712, 3359, 1799, 1201, 2383, 3162, 2852, 3536, 3181, 2413, 457, 1050, 3908,
                            3372)}


@functools.lru_cache
def lengths_of(text):
    """(32, 32, 8) of "2 x 32 + 8", or those of DRAWN. Raises ValueError."""
    if text in DRAWN:
        return DRAWN[text]
    lengths = ()
    for part in text.split(" + "):
        found = re.fullmatch(r"(?:([1-9]\d*) x )?([1-9]\d*)", part, re.ASCII)
        if not found:
            raise ValueError(f"{text!r} is neither {', '.join(map(repr, DRAWN))} nor lengths such as '8192 + 64 x 128'")
        lengths += (int(found[2]),) * int(found[1] or 1)
    return lengths


class Shape(NamedTuple):
    lengths: str
    nheads: int
    head_dim: int
    nheads_k: int

    def __str__(self):
        return ",".join(map(str, self))

    @property
    def batch_size(self):
        return len(lengths_of(self.lengths))

    @property
    def seqlen_q(self):
        return max(lengths_of(self.lengths))

    seqlen_k = seqlen_q

    @property
    def parts(self):
        heads = attention.Shape(1, self.nheads, 1, self.head_dim, self.nheads_k, 1).parts
        return {"lengths": self.lengths, "H": heads["H"], "D": heads["D"]}

    sweeps = ()

    @property
    def pairs(self):
        """Number of pairs of a row and a key, in each head."""
        return sum(x * x for x in lengths_of(self.lengths))

    @property
    def elements(self):
        return self.nheads * self.pairs


def shape_of(text, ints):
    """A shape of SHAPES; ints(text) reads integers between commas. Raises ValueError."""
    lengths, *sizes = text.split(",")
    if lengths.isdecimal():
        return attention.Shape.of(ints(text))
    shape = Shape(lengths, *ints(",".join(sizes))) if lengths_of(lengths) and len(sizes) == 3 else None
    if shape is None:
        raise ValueError(f"neither {SHAPES.replace(' or', ' nor')}")
    attention.Shape.of((1, shape.nheads, 1, shape.head_dim, shape.nheads_k, 1))  # checks heads and head_dim
    return shape


def beside(packed, dense):
    """Packed batches of 16 query heads and 4 key heads, then dense ones (batch size, length) for comparison."""
    return [*(Shape(lengths, 16, 128, 4) for lengths in packed),
            *(attention.Shape(b, 16, seqlen, 128, 4, seqlen) for b, seqlen in dense)]


DEFAULT_SHAPES = {
    "cuda": beside(("16 of 64..4096", "32 x 512", "8192 + 64 x 128"), ((18, 2048), (32, 512), (2, 8192))),
    "cpu": [Shape("64 + 2 x 32 + 7", 4, 64, 2), attention.Shape(2, 4, 64, 64, 2, 64)],  # Triton's interpreter is slow
}
DEFAULTS = {"dtypes": "bfloat16", "causal": "both",
            "impls": ("cuda:sm90", "cuda:sm80", "cuda:host", "triton", "torch:varlen", "torch:cudnn", "torch:flash")}


def by_sample(forward, lengths, *qkv):
    """forward, which knows dense batches, of each sample of a packed one. The scores of one sample alone are in memory,
    in the backward pass too, which forms them again."""
    samples = zip(*(x.split(lengths, dim=2) for x in qkv))
    return torch.cat([checkpoint(forward, *sample, use_reentrant=False) for sample in samples], 2)


@functools.lru_cache(maxsize=1)  # not part of what is timed
def repeated(k, v, times):
    return tuple(x.repeat_interleave(times, dim=1) for x in (k, v))


def torch_varlen(q, k, v, call):
    """varlen_attn of torch, FlashAttention-2. Where it has no enable_gqa, keys are repeated outside of what is
    timed."""
    known = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    keywords = causal if call.causal else {}
    if "enable_gqa" in known:
        keywords = keywords | {"enable_gqa": q.shape[1] != k.shape[1]}
    elif q.shape[1] != k.shape[1]:
        k, v = repeated(k, v, q.shape[1] // k.shape[1])
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    longest = call.keywords["max_seqlen_q"]
    bounds = call.keywords["cu_seqlens_q"]
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, **keywords).transpose(0, 1)[None]


PACKED = {
    **ours(flash_call),
    "torch:varlen": Impl(torch_varlen, ("cuda",) * (varlen_attn is not None), dtypes=HALVES),
    "flex": Impl(flex_call, ("cuda",), dtypes=HALVES),
}
IMPLS = attention.IMPLS | PACKED  # also those of dense batches alone
PROFILES = {"cuda": ("minimal flash attention", functools.partial(flash_call, backend="cuda")),
            "triton": ("triton flash attention", functools.partial(flash_call, backend="triton")),
            "torch": ("varlen_attn", torch_varlen), "flex": ("FlexAttention", flex_call)}


class Case(attention.Case):
    """Inputs of a packed batch as views (1, H, T, D) of memory (T, H, D), as a model has them. FLOPs are those of its
    samples."""

    impls = PACKED
    op = "varlen"
    columns = ROW

    def inputs(self):
        total, d = sum(lengths_of(self.shape.lengths)), self.shape.head_dim
        return [normal((total, heads, d), self.device, self.dtype).transpose(0, 1)[None]
                for heads in (self.shape.nheads, self.shape.nheads_k, self.shape.nheads_k)]

    def call(self):
        lengths = torch.tensor(lengths_of(self.shape.lengths), device=self.device)
        bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        sample = torch.repeat_interleave(lengths)
        causal = self.causal

        def mask_mod(b, h, row, col):
            return (sample[row] == sample[col]) & (col <= row) if causal else sample[row] == sample[col]

        longest = self.shape.seqlen_q
        return Call(causal, dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest),
                    mask_mod)

    def pairs(self):
        return self.shape.pairs / (2 if self.causal else 1)

    def exact(self, q, k, v):
        return by_sample(super().exact, lengths_of(self.shape.lengths), q, k, v)

    def base(self, q, k, v):
        return by_sample(super().base, lengths_of(self.shape.lengths), q, k, v)

    def sizes(self):
        return {x: getattr(self.shape, x) for x in self.columns if hasattr(self.shape, x)}


CASES = {Shape: Case, attention.Shape: attention.Case}
