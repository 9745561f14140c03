"""Benchmark of appending: attention to caches that first writes one new key of each sample, with and without
rotary embedding, beside the call that finds all keys there.

Caches and times are those of decode.py. The new keys are the last ones of each sample. Every call writes them again, so
that all calls read and write the same.

Read next: mixed.py; measure.py.
"""

import functools
from dataclasses import dataclass, field

import torch

from .. import attention_with_kvcache
from . import decode, measure
from .decode import DEFAULTS, DTYPES, Shape, shape  # noqa: F401: as options.py asks
from .measure import Impl

TITLE = "Appending to caches"
BASELINE = "cuda:attend"
ROW = tuple(name for name in decode.ROW if name != "read_gbps")
SHAPES = "B,H,1,D,Hk,Sk, also with ' page SIZE' or ' drawn' behind it"
DEFAULT_SHAPES = {
    "cuda": [shape(*size, page_size) for size in ((1, 32, 8, 8192), (32, 32, 8, 8192), (128, 32, 8, 1024))
             for page_size in (0, 16)],
    "cpu": [Shape(2, 4, 1, 64, 2, 64, page_size, "full") for page_size in (0, 16)],
}


def shape_of(text, ints):
    """A shape of SHAPES; ints(text) reads integers between commas. Raises ValueError."""
    found = decode.shape_of(text, ints)
    if found.seqlen_q != 1:
        raise ValueError("Sq must be 1: one new token of each sample")
    return found


@dataclass(eq=False)
class Call(decode.Call):
    append: dict = field(default_factory=dict)  # the keywords of attention_with_kvcache to append
    rotary: dict = field(default_factory=dict)  # and to rotate; their k, and q, are rotated back before
    q_before: torch.Tensor | None = None


def appending_call(q, k, v, call, backend):
    return attention_with_kvcache(q, k, v, causal=call.causal, backend=backend, **call.append)


def rotating_call(q, k, v, call, backend):
    return attention_with_kvcache(call.q_before, k, v, causal=call.causal, backend=backend, **call.rotary)


def judge_append(forward, impl, case):
    """Judges a call as measure.judge does, but first fills the places of the new keys and values with NaN."""
    for x in case.args[1:3]:
        x[case.places] = torch.nan
    return measure.compared(case, impl, forward(*case.args))


CALLS = {":attend": decode.cached_call, "": appending_call, ":rotary": rotating_call}


def impl_of(name, backend):
    """Makes the Impl of a name such as "cuda:rotary", run by this backend."""
    kind = name.removeprefix(name.split(":")[0])
    forward = functools.partial(CALLS[kind], backend=backend)
    judge = functools.partial(judge_append, forward, name) if kind != ":attend" else None
    return Impl(forward, backend=backend, judge=judge)


IMPLS = {f"{backend}{kind}": impl_of(f"{backend}{kind}", backend) for backend in ("cuda", "triton") for kind in CALLS}
PROFILES = {"cuda": ("minimal flash decoding that appends", IMPLS["cuda"].forward),
            "triton": ("triton flash decoding that appends", IMPLS["triton"].forward)}


def measured(case, impl):
    """Adds the time in µs to the numbers of measure.measured."""
    numbers = measure.measured(case, impl)
    return numbers | {"us": float(f"{1e3 * numbers['ms']:.6g}")}


def quarter_turns(positions, num_pairs, device, dtype):
    """Cosines and sines (positions, num_pairs) of multiples of 90°, so that rotating back and forth is exact."""
    turns = torch.arange(positions, device=device)[:, None] + torch.arange(num_pairs, device=device)
    return [torch.tensor(values, device=device, dtype=dtype)[turns % 4] for values in ([1, 0, -1, 0], [0, 1, 0, -1])]


def rotated_back(x, cos, sin):
    """x (B, heads, 1, D), whose columns i and i + rotary_dim / 2 are turned back by the angles (B, rotary_dim / 2)."""
    num_pairs = cos.shape[-1]
    a, b, rest = x.split([num_pairs, num_pairs, x.shape[-1] - 2 * num_pairs], -1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    return torch.cat([a * cos + b * sin, b * cos - a * sin, rest], -1)


class Case(decode.Case):
    """The caches of decode.py, in which the last key of each sample is the new one."""

    impls = IMPLS
    op = "append"
    columns = ROW

    def __init__(self, setting, device):
        super().__init__(setting, device)
        self.places = self.places_of(self.args[-1].keywords.get("page_table"))

    def places_of(self, page_table):
        """The indices of the new keys in a cache (N, Hk, S, D)."""
        samples, last = torch.arange(self.shape.batch_size, device=self.device), self.seqused_k.long() - 1
        if page_table is None:
            return samples, slice(None), last
        size = self.shape.page_size
        return page_table[samples, last // size].long(), slice(None), last % size

    def call_of(self, q, memory, table):
        q, k, v, call = super().call_of(q, memory, table)
        places, before = self.places_of(table), self.seqused_k - 1
        k_new, v_new = (x[places].unsqueeze(2) for x in (k, v))
        num_pairs = self.shape.head_dim // 16 * 8
        tables = quarter_turns(self.shape.seqlen_k, num_pairs, self.device, q.dtype)
        angles = [x[before.long()] for x in tables]
        append = call.keywords | {"seqused_k": before, "k": k_new, "v": v_new}
        rotary = append | {"k": rotated_back(k_new, *angles), "rotary_cos": tables[0], "rotary_sin": tables[1],
                           "rotary_interleaved": False}
        return q, k, v, Call(self.causal, call.keywords, append=append, rotary=rotary,
                             q_before=rotated_back(q, *angles))


CASES = {Shape: Case}
