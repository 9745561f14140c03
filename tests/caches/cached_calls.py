"""Calls of attention to caches, their tensors, and their results by a loop over rows in fp64: what test_kvcache.py,
test_append.py and test_cache_names.py share.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Optional

import pytest
import torch

from cases import close
from conftest import HAS_GPU
from minimal_attn import attention as interface, attention_with_kvcache
from test_lengths import TOLERANCE, Batch, by_loop as loop_over_samples

# The backends to test, and the dtype in which each is judged: float64 where it is served, so that a wrong mask cannot
# hide in roundings. A backend that gets kernels for caches is added here.
BACKENDS = {"reference": torch.float64, "torch": torch.float64, "triton": torch.float32,
            "cuda": torch.float16 if HAS_GPU else torch.float64}
DEVICE = "cuda" if HAS_GPU else "cpu"
GARBAGE = -7, 10**6  # page ids that must not be read


@pytest.fixture(params=BACKENDS)
def backend(request):
    assert interface.BACKENDS[request.param].why_not(torch.device(DEVICE)) is None  # loads it
    return request.param


@dataclass(frozen=True)
class Call:
    """Samples with so many rows and keys each, in a cache with room for `size` keys in a sequence, or in a page."""

    name: str
    rows: tuple  # all alike, unless packed
    keys: tuple  # from leftpad on; all are valid where has_lengths is False
    size: int
    is_paged: bool = False
    shares_pages: bool = False  # all samples have the pages of the first, as far as they go
    is_packed: bool = False
    has_lengths: bool = True
    has_batch_idx: bool = False
    leftpad: Optional[tuple] = None
    seqused_q: Optional[tuple] = None
    window: tuple = (-1, -1)
    chunk: int = 0
    causal: bool = False
    sm_scale: Optional[float] = None
    softcap: float = 0.0
    has_sinks: bool = False
    slopes: Optional[str] = None  # "heads" (H,) or "samples" (B, H)
    num_splits: int = 0
    max_seqlen_q: Optional[int] = None  # the largest of rows, if None
    H: int = 4
    Hk: int = 2
    D: int = 16
    head_dim_v: Optional[int] = None  # D, if None
    layout: str = "heads"  # of the cache in memory
    tree: Optional[torch.Tensor] = None  # the tree mask, (Sq, Sq) or (B, Sq, Sq)

    def __str__(self):
        return self.name

    @property
    def ends(self):
        """Where the keys of each sample end."""
        return [n + pad for n, pad in zip(self.keys, self.leftpad or itertools.repeat(0))]

    @property
    def capacity(self):
        return self.size * max(1, -(-max(self.ends) // self.size)) if self.is_paged else self.size

    def options(self):
        """The options that hold no tensor."""
        return dict(causal=self.causal, window_size=self.window, attention_chunk=self.chunk, sm_scale=self.sm_scale,
                    softcap=self.softcap, num_splits=self.num_splits)


def ints(*values, device=DEVICE):
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_cache(layout, sequences, nheads_k, size, head_dim, head_dim_v):
    """k and v (N, Hk, S, D), full of NaN, in fp64."""
    def full(*shape):
        return torch.full(shape, math.nan, dtype=torch.float64)

    if layout == "interleaved":  # vLLM's: K and V of a row side by side, head by head
        return full(sequences, nheads_k, size, head_dim + head_dim_v).split([head_dim, head_dim_v], -1)
    if layout == "heads":
        return full(sequences, nheads_k, size, head_dim), full(sequences, nheads_k, size, head_dim_v)
    if layout == "rows":  # flash-attn's
        return (full(sequences, size, nheads_k, d).transpose(1, 2) for d in (head_dim, head_dim_v))
    gap = {"slice": 8, "odd": 1}[layout]  # rows of "odd" are not aligned
    return (full(sequences + 2, size + 3, nheads_k + 1, d + gap)[1:-1, :size, 1:, :d].transpose(1, 2)
            for d in (head_dim, head_dim_v))


def make(call, dtype, seed=0):
    """(q, k, v, the tensors among the arguments of attention_with_kvcache) of a call on the CPU. What no sample uses is
    NaN, also the last rows of a packed q, and entries of the page table that none uses are no pages."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    B, D, head_dim_v = len(call.rows), call.D, call.head_dim_v or call.D
    q, given = randn(*((1, call.H, sum(call.rows) + 2, D) if call.is_packed else (B, call.H, call.rows[0], D))), {}
    if call.is_packed:
        q[:, :, sum(call.rows):] = math.nan
    for b, used in enumerate(call.seqused_q or ()):
        q[place_of_row(call, b, slice(used, call.rows[b]))] = math.nan
    if call.is_paged:
        max_pages = call.capacity // call.size
        ids = torch.randperm(B * max_pages + 1, generator=generator)
        table = ids[:B * max_pages].view(B, max_pages)
        if call.shares_pages:
            table = table[:1].repeat(B, 1)
        used = table.clone()
        for b, end in enumerate(call.ends):
            begin = call.leftpad[b] if call.leftpad else 0
            is_used = [begin // call.size <= p < -(-end // call.size) and begin < end for p in range(max_pages)]
            used[b, ~torch.tensor(is_used)] = GARBAGE[b % 2]
        given["page_table"], sequences = used.int(), len(ids)
        if call.has_batch_idx:  # the samples have some of its rows, in any order
            given["cache_batch_idx"] = torch.randperm(B + 2, generator=generator)[:B].int()
            given["page_table"] = torch.full((B + 2, max_pages), GARBAGE[0], dtype=torch.int32)
            given["page_table"][given["cache_batch_idx"]] = used.int()
    else:
        sequences = B + 2 * call.has_batch_idx
        table = torch.randperm(sequences, generator=generator)[:B, None] if call.has_batch_idx else (
            torch.arange(B)[:, None])
        if call.has_batch_idx:
            given["cache_batch_idx"] = table[:, 0].int()
    k, v = make_cache(call.layout, sequences, call.Hk, call.size, D, head_dim_v)
    for b, end in enumerate(call.ends):
        for key in range(call.leftpad[b] if call.leftpad else 0, end):
            place = table[b, key // call.size], slice(None), key % call.size
            if k[place].isnan().any():
                k[place], v[place] = randn(call.Hk, D), randn(call.Hk, head_dim_v)
    if call.has_lengths:
        given["seqused_k"] = torch.tensor(call.ends, dtype=torch.int32)
    if call.leftpad:
        given["leftpad_k"] = torch.tensor(call.leftpad, dtype=torch.int32)
    if call.is_packed:
        given["cu_seqlens_q"] = torch.tensor([0, *itertools.accumulate(call.rows)], dtype=torch.int32)
        given["max_seqlen_q"] = call.max_seqlen_q or max(call.rows)
    if call.seqused_q:
        given["seqused_q"] = torch.tensor(call.seqused_q, dtype=torch.int32)
    if call.has_sinks:
        given["sinks"] = randn(call.H).to(dtype)
    if call.tree is not None:
        given["tree_mask"] = call.tree
    if call.slopes:
        given["alibi_slopes"] = randn(*([B] if call.slopes == "samples" else []), call.H).abs().float()
    return rounded(q, dtype), rounded(k, dtype), rounded(v, dtype), given


def place_of_row(call, b, row):
    """Where a row of sample b, or a slice of them, is in q."""
    if not call.is_packed:
        return b, slice(None), row
    first = sum(call.rows[:b])
    return 0, slice(None), slice(first + row.start, first + row.stop) if isinstance(row, slice) else first + row


def sequence_of(given, b):
    """The cached sequence of sample b, or its row of page_table."""
    return int(given["cache_batch_idx"][b]) if "cache_batch_idx" in given else b


def rounded(x, dtype):
    """x in dtype, with its strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype).copy_(x)


def by_loop(call, q, k, v, given):
    """(out, lse) in fp64, one sample after the other, of keys that are gathered by their definition."""
    q, k, v = (x.double() for x in (q, k, v))
    out, lse = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -math.inf)
    for b, rows in enumerate(call.seqused_q or call.rows):
        begin = int(given["leftpad_k"][b]) if call.leftpad else 0
        end = int(given["seqused_k"][b]) if call.has_lengths else call.capacity
        place, page = torch.arange(begin, end), torch.full((end - begin,), sequence_of(given, b))
        if call.is_paged:
            page = given["page_table"][page, place // call.size]
        keys, values = (x[page, :, place % call.size].transpose(0, 1)[None] for x in (k, v))
        own, seen = place_of_row(call, b, slice(0, rows)), None
        if call.tree is not None:
            new = torch.arange(end - begin) - (end - begin - rows)  # the number of a key among the new ones
            tree = call.tree.expand(len(call.rows), -1, -1)[b, :rows]
            seen = (new < 0) | tree[:, new.clamp(min=0)]
        sample = Batch("sample", (rows,), (end - begin,), window=call.window, causal=call.causal, is_packed=False,
                       H=call.H, Hk=call.Hk, D=call.D, head_dim_v=call.head_dim_v, sm_scale=call.sm_scale,
                       softcap=call.softcap, chunk=call.chunk)
        slopes = given["alibi_slopes"].expand(len(call.rows), -1)[b] if call.slopes else None
        result = loop_over_samples(sample, q[own][None], keys, values, given.get("sinks"), slopes,
                                   seen=seen if seen is None else seen.expand(1, call.H, -1, -1))
        out[own], lse[own] = result[0][0], result[1][0]
    return out, lse


def on_device(x, device=DEVICE):
    """x on a device, with its strides."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def check_call(backend, call, dtype, seed=0):
    q, k, v, given = make(call, dtype, seed)
    want, want_lse = by_loop(call, q, k, v, given)
    given = {name: on_device(x) for name, x in given.items()}
    out, lse = attention_with_kvcache(*map(on_device, (q, k, v)), **given, **call.options(), return_lse=True,
                                      backend=backend)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(out, want, TOLERANCE[dtype])
    close(lse, want_lse, 1e-10 if dtype == torch.float64 else 1e-5)


def rows_first(x):
    """(B, H, S, D) and (B, S, H, D) are each made of the other."""
    return x.transpose(1, 2)
