"""Benchmark of mixed batches: samples that decode and one that is prefilled, packed in one call on one cache,
beside one call for each of the two.

Caches and times are those of decode.py. The prefilled sample is the last one, and its keys are as many as its rows.

Read next: read.py, the plain read; measure.py.
"""

import functools
import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import attention_with_kvcache, flash_attention, reference_attention
from ..toolkit.validation import allowed_error
from . import attention, decode
from .append import measured  # noqa: F401: as options.py asks
from .attention import MEASURED
from .decode import DEFAULTS, DTYPES  # noqa: F401: as options.py asks
from .measure import Impl, normal, truth_fits

TITLE = "Decoding and prefill in one batch"
BASELINE = "cuda:apart"
ROW = (*attention.ROW[:-len(MEASURED)], "page_size", "prefill", *MEASURED, "us")
SHAPES = "B,H,1,D,Hk,Sk prefill TOKENS, also with ' page SIZE' behind it"


class Shape(decode.OfCache, NamedTuple("Shape", [*attention.Shape.__annotations__.items(), ("page_size", int),
                                                 ("prefill", int)])):
    """batch_size samples of seqlen_k keys that decode one token each, and one of `prefill` tokens, at most seqlen_k."""

    __slots__ = ()
    is_drawn = False
    sweeps = ()

    def __str__(self):
        return f"{self.dense} prefill {self.prefill}{f' page {self.page_size}' * bool(self.page_size)}"

    @property
    def seqlens(self):
        return [self.seqlen_k] * self.batch_size + [self.prefill]

    @property
    def parts(self):
        return self.dense.parts | {"prefill": str(self.prefill)} | (
            {"page": str(self.page_size)} if self.page_size else {})

    @property
    def elements(self):
        """Elements in fp64 that the truth needs: keys as in decode.py for one more sample, or the scores of the prefill
        where these are more."""
        keys = (self.batch_size + 1) * self.seqlen_k * self.head_dim
        return self.nheads * max(keys, self.prefill**2)


def shape_of(text, ints):
    """A shape of SHAPES; ints(text) reads integers between commas. Raises ValueError."""
    found = re.fullmatch(r"(\S+) prefill ([1-9]\d*)(?: page ([1-9]\d*))?", text, re.ASCII)
    if not found:
        raise ValueError("it is not of the form 'B,H,1,D,Hk,Sk prefill TOKENS' or '... prefill TOKENS page SIZE'")
    dense, prefill, page_size = attention.Shape.of(ints(found[1])), int(found[2]), int(found[3] or 0)
    if dense.seqlen_q != 1 or prefill > dense.seqlen_k:
        raise ValueError("Sq must be 1, and TOKENS at most Sk")
    if page_size and dense.seqlen_k % page_size:
        raise ValueError(f"Sk must be a multiple of the page size, {page_size}")
    return Shape(*dense, page_size, prefill)


DEFAULT_SHAPES = {"cuda": [Shape(32, 32, 1, 128, 8, 8192, page_size, 2048) for page_size in (0, 16)],
                  "cpu": [Shape(2, 4, 1, 64, 2, 64, page_size, 24) for page_size in (0, 16)]}


@dataclass(eq=False)
class Call(decode.Call):
    parts: tuple = ()  # (q, k_cache, v_cache, keywords) of the samples that decode and of the prefill


def one_call(q, k, v, call, backend):
    out = attention_with_kvcache(q, k, v, causal=call.causal, backend=backend, **call.keywords)
    rows = call.parts[0][0].shape[0]
    return out[0, :, :rows].transpose(0, 1).unsqueeze(2), out[:, :, rows:]


def two_calls(q, k, v, call, backend):
    return tuple(attention_with_kvcache(*tensors, causal=call.causal, backend=backend, **keywords)
                 for *tensors, keywords in call.parts)


def prefill_without_cache(q, k, v, call, backend):
    """Two calls, of which the prefill is flash_attention's."""
    (*decoding, keywords), (*prefill, _) = call.parts
    if not call.has_sequences:
        raise NotImplementedError("flash_attention has no pages")
    prefill = [x[:, :, :prefill[0].shape[2]] for x in prefill]
    return (attention_with_kvcache(*decoding, causal=call.causal, backend=backend, **keywords),
            flash_attention(*prefill, call.causal, backend=backend))


CALLS = {"": one_call, ":apart": two_calls, ":dense": prefill_without_cache}


def impl_of(name, backend):
    """Makes the Impl of a name such as "cuda:apart", run by this backend. A prefill without cache names no backend:
    it does not have to serve pages, so its failure there is no fault of ours."""
    call = CALLS[name.removeprefix(name.split(":")[0])]
    return Impl(functools.partial(call, backend=backend), backend=None if call is prefill_without_cache else backend)


IMPLS = {f"{backend}{kind}": impl_of(f"{backend}{kind}", backend) for backend in ("cuda", "triton") for kind in CALLS}
PROFILES = {"cuda": ("minimal flash decoding beside a prefill", IMPLS["cuda"].forward),
            "triton": ("triton flash decoding beside a prefill", IMPLS["triton"].forward)}


class Case(decode.Case):
    """q is packed: a row of each sample that decodes, then those of the prefill. Results are (out of the samples that
    decode (B, H, 1, D), out of the prefill (1, H, prefill, D))."""

    impls = IMPLS
    op = "mixed"
    columns = ROW

    def inputs(self):
        shape = self.shape
        k, v = self.make_caches(shape.batch_size + 1)
        size = 1, shape.nheads, shape.batch_size + shape.prefill, shape.head_dim
        return normal(size, self.device, self.dtype), k, v

    def call_of(self, q, memory, table):
        q, k, v, call = super().call_of(q, memory, table)
        samples, prefill = self.shape.batch_size, self.shape.prefill
        begins = torch.tensor([*range(samples + 1), samples + prefill], dtype=torch.int32, device=self.device)
        keywords = call.keywords | {"cu_seqlens_q": begins, "max_seqlen_q": prefill}
        decoding, prefilled = slice(0, samples), slice(samples, samples + 1)
        parts = tuple((x, *((k, v) if table is not None else (k[part], v[part])),
                       {name: values[part] for name, values in call.keywords.items()})
                      for x, part in zip(self.parts_of(q), (decoding, prefilled)))
        return q, k, v, Call(self.causal, keywords, has_sequences=table is None, parts=parts)

    def parts_of(self, q):
        """q of the samples that decode (B, H, 1, D) and of the prefill (1, H, prefill, D)."""
        samples = self.shape.batch_size
        return q[0, :, :samples].transpose(0, 1).unsqueeze(2).contiguous(), q[:, :, samples:].contiguous()

    def pairs(self):
        return self.shape.batch_size * self.shape.seqlen_k + self.shape.prefill**2 / (2 if self.causal else 1)

    def exact(self, q, k, v):
        (decoding, prefilled), rows = self.parts_of(q), self.shape.prefill
        return (reference_attention(decoding, k[:-1], v[:-1]),
                reference_attention(prefilled, k[-1:, :, :rows], v[-1:, :, :rows], self.causal))

    base = exact

    def allowed(self, base, truth):
        return tuple(map(allowed_error, base, truth))

    @classmethod
    def has_truth(cls, shape, device):
        return truth_fits(shape.elements // shape.nheads_k, device)

    def judged(self, x):
        """The part of x that is compared with the truth: all of it, or, where that does not fit in fp64, the last
        key/value head or the query heads that read it."""
        return x if truth_fits(self.shape.elements, self.device) else x[:, -(x.shape[1] // self.shape.nheads_k):]


CASES = {Shape: Case}
