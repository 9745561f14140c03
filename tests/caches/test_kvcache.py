"""Attention to caches of keys and values, in one tensor and in pages: every backend against a loop over rows in fp64,
the calls of vLLM, SGLang and transformers, flash-attn's names, and one error for every bad input."""

import dataclasses
import inspect
import itertools
import math
from dataclasses import dataclass
from typing import Optional

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import minimal_attn
from conftest import HAS_GPU
from minimal_attn import (attention_with_kvcache, flash_attention, flash_attn_combine, flash_attn_varlen_func,
                          flash_attn_with_kvcache, interface)
from minimal_attn.backends import Cache, Lengths, Options
from minimal_attn.flash_attn_interface import flash_attn_with_kvcache as with_kvcache_of_flash_attn_2

# The backends to test, and the dtype in which each is judged: float64 where it is served, so that a wrong mask cannot
# hide in roundings. A backend that gets kernels for caches is added here.
BACKENDS = {"reference": torch.float64, "torch": torch.float64, "triton": torch.float32,
            "cuda": torch.float16 if HAS_GPU else torch.float64}
DEVICE = "cuda" if HAS_GPU else "cpu"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
GARBAGE = -7, 10**6  # page ids that must not be read

cpu = pytest.mark.cpu


@pytest.fixture(params=BACKENDS)
def backend(request):
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
    causal: bool = False
    sm_scale: Optional[float] = None
    softcap: float = 0.0
    has_sinks: bool = False
    slopes: Optional[str] = None  # "heads" (H,) or "samples" (B, H)
    num_splits: int = 0
    H: int = 4
    Hk: int = 2
    D: int = 16
    head_dim_v: Optional[int] = None  # D, if None
    layout: str = "heads"  # of the cache in memory

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
        """Those that hold no tensor."""
        return dict(causal=self.causal, window_size=self.window, sm_scale=self.sm_scale, softcap=self.softcap,
                    num_splits=self.num_splits)


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
    assert layout == "slice"
    return (full(sequences + 2, size + 3, nheads_k + 1, d + 8)[1:-1, :size, 1:, :d].transpose(1, 2)
            for d in (head_dim, head_dim_v))


def make(call, dtype, seed=0):
    """(q, k, v, the tensors among the arguments of attention_with_kvcache) of a call on the CPU. What no sample uses is
    NaN, and entries of the page table that none uses are no pages."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    B, D, head_dim_v = len(call.rows), call.D, call.head_dim_v or call.D
    shape = (1, call.H, sum(call.rows), D) if call.is_packed else (B, call.H, call.rows[0], D)
    q, given = randn(*shape), {}
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
        given["max_seqlen_q"] = max(call.rows)
    if call.seqused_q:
        given["seqused_q"] = torch.tensor(call.seqused_q, dtype=torch.int32)
    if call.has_sinks:
        given["sinks"] = randn(call.H).to(dtype)
    if call.slopes:
        given["alibi_slopes"] = randn(*([B] if call.slopes == "samples" else []), call.H).abs().float()
    return rounded(q, dtype), rounded(k, dtype), rounded(v, dtype), given


def sequence_of(given, b):
    """The cached sequence of sample b, or its row of page_table."""
    return int(given["cache_batch_idx"][b]) if "cache_batch_idx" in given else b


def rounded(x, dtype):
    """x in dtype, with its strides."""
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype).copy_(x)


def by_loop(call, q, k, v, given):
    """(out, lse) in fp64, a row at a time, by the definitions."""
    q, k, v = (x.double() for x in (q, k, v))
    B, group = len(call.rows), call.H // call.Hk
    out, lse = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -math.inf)
    left, right = call.window[0], 0 if call.causal else call.window[1]
    scale = 1 / math.sqrt(call.D) if call.sm_scale is None else call.sm_scale
    slopes = given.get("alibi_slopes", torch.zeros(call.H)).double().expand(B, call.H)
    sinks = given.get("sinks", torch.full((call.H,), -math.inf)).double()
    for b in range(B):
        begin = int(given["leftpad_k"][b]) if call.leftpad else 0
        end = int(given["seqused_k"][b]) if call.has_lengths else call.capacity
        keys, sequence = [], sequence_of(given, b)  # where each key of the sample is in the cache
        for key in range(begin, end):
            if call.is_paged:
                keys.append((int(given["page_table"][sequence, key // call.size]), key % call.size))
            else:
                keys.append((sequence, key))
        seqlen_q = call.seqused_q[b] if call.seqused_q else call.rows[b]
        for i in range(seqlen_q):
            place = (0, slice(None), sum(call.rows[:b]) + i) if call.is_packed else (b, slice(None), i)
            diagonal = i + len(keys) - seqlen_q
            seen = [j for j in range(len(keys)) if (left < 0 or j >= diagonal - left)
                    and (right < 0 or j <= diagonal + right)]
            lse[place] = sinks
            if not seen:
                continue
            for h in range(call.H):
                ks, vs = (torch.stack([x[keys[j][0], h // group, keys[j][1]] for j in seen]) for x in (k, v))
                scores = ks @ q[place][h] * scale
                if call.softcap:
                    scores = call.softcap * (scores / call.softcap).tanh()
                scores = scores - slopes[b, h] * torch.tensor([abs(diagonal - j) for j in seen])
                lse[place][h] = torch.cat([scores, sinks[h:h + 1]]).logsumexp(0)
                out[place][h] = (scores - lse[place][h]).exp() @ vs
    return out, lse


def on_device(x, device=DEVICE):
    """x on a device, with its strides."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def close(got, want, tolerance):
    """Equal up to so many parts of the largest value."""
    largest = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 1
    assert_close(got.double().cpu(), want, rtol=0, atol=tolerance * max(1, largest))


def check_call(backend, call, dtype, seed=0):
    q, k, v, given = make(call, dtype, seed)
    want, want_lse = by_loop(call, q, k, v, given)
    given = {name: on_device(x) for name, x in given.items()}
    out, lse = attention_with_kvcache(*map(on_device, (q, k, v)), **given, **call.options(), return_lse=True,
                                      backend=backend)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(out, want, TOLERANCE[dtype])
    close(lse, want_lse, 1e-10 if dtype == torch.float64 else 1e-5)


# What a call means.

CALLS = [
    Call("decode", (1,) * 3, (9, 1, 20), 20),
    Call("decode_without_lengths", (1,) * 2, (20, 20), 20, has_lengths=False),
    Call("no_keys", (1,) * 3, (0, 5, 0), 8),
    Call("no_keys_sinks", (2,) * 3, (0, 5, 1), 8, has_sinks=True, causal=True),
    Call("some_rows_causal", (5,) * 3, (9, 3, 20), 20, causal=True),  # the second sample has rows without keys
    Call("batch_idx", (2,) * 3, (9, 7, 20), 20, has_batch_idx=True),
    Call("leftpad", (2,) * 3, (9, 0, 12), 20, leftpad=(3, 5, 0), causal=True),
    Call("leftpad_batch_idx", (1,) * 2, (9, 4), 20, leftpad=(3, 16), has_batch_idx=True),
    *(Call(f"pages_of_{size}", (1,) * 3, (9, 0, 33), size, is_paged=True) for size in (1, 3, 16)),
    Call("pages_causal", (4,) * 3, (9, 2, 33), 3, is_paged=True, causal=True),
    Call("pages_without_lengths", (4,) * 2, (32, 32), 16, is_paged=True, has_lengths=False),
    Call("pages_leftpad", (2,) * 2, (9, 20), 4, is_paged=True, leftpad=(6, 3)),
    Call("pages_batch_idx", (2,) * 3, (9, 0, 20), 4, is_paged=True, has_batch_idx=True, leftpad=(6, 3, 0)),
    Call("pages_shared", (2,) * 3, (9, 4, 20), 4, is_paged=True, shares_pages=True, causal=True),
    Call("packed", (1, 5, 0, 3), (9, 5, 4, 20), 20, is_packed=True, causal=True),
    Call("packed_pages", (1, 5, 0, 3), (9, 5, 4, 20), 4, is_packed=True, is_paged=True, causal=True, has_sinks=True),
    Call("packed_pages_batch_idx", (1, 5, 0), (9, 5, 4), 4, is_packed=True, is_paged=True, has_batch_idx=True),
    Call("packed_seqused_q", (3, 5), (9, 5), 10, is_packed=True, seqused_q=(2, 0), causal=True, has_sinks=True),
    Call("seqused_q", (4,) * 2, (9, 5), 10, seqused_q=(2, 4), causal=True, has_sinks=True),
    Call("window", (3,) * 3, (9, 2, 33), 40, window=(4, 1)),
    Call("window_causal_pages", (3,) * 3, (9, 2, 33), 3, is_paged=True, window=(4, -1), causal=True),
    Call("window_leftpad", (1,) * 2, (9, 12), 20, leftpad=(2, 8), window=(3, 0)),
    Call("softcap", (2,) * 2, (9, 20), 4, is_paged=True, softcap=1.5, sm_scale=2.0),
    Call("sinks", (1,) * 2, (9, 20), 4, is_paged=True, has_sinks=True),
    Call("alibi", (3,) * 2, (9, 20), 4, is_paged=True, slopes="heads"),
    Call("alibi_of_samples", (3, 1), (9, 20), 4, is_paged=True, is_packed=True, slopes="samples", causal=True),
    Call("alibi_leftpad", (2,) * 2, (9, 12), 20, leftpad=(2, 8), slopes="samples"),
    Call("head_dim_v", (2,) * 2, (9, 20), 4, is_paged=True, D=24, head_dim_v=40),
    Call("gqa_of_8", (1,) * 2, (9, 20), 4, is_paged=True, H=8, Hk=1),
    Call("interleaved", (2,) * 2, (9, 20), 16, is_paged=True, layout="interleaved", causal=True),
    Call("interleaved_head_dim_v", (2,) * 2, (9, 20), 16, is_paged=True, layout="interleaved", D=16, head_dim_v=8),
    Call("interleaved_dense", (2,) * 2, (9, 20), 24, layout="interleaved"),
    Call("rows", (2,) * 2, (9, 20), 4, is_paged=True, layout="rows"),
    Call("slice", (2,) * 2, (9, 20), 4, is_paged=True, layout="slice"),
    Call("splits", (2,) * 2, (90, 700), 16, is_paged=True, num_splits=4, has_sinks=True),
    Call("one_split", (1,) * 2, (90, 700), 16, is_paged=True, num_splits=1),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_against_a_loop(backend, call):
    check_call(backend, call, BACKENDS[backend])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(backend, dtype):
    call = Call("dtypes", (3,) * 3, (9, 0, 37), 4, is_paged=True, causal=True, has_sinks=True, slopes="heads", D=64)
    if HAS_GPU and backend == "cuda" and dtype == torch.float32:
        with pytest.raises(TypeError, match="q is torch.float32, and backend='cuda' reads caches on a GPU in float16"):
            check_call(backend, call, dtype)
        return
    check_call(backend, call, dtype)
    check_call(backend, dataclasses.replace(call, is_paged=False, size=40, slopes=None, has_sinks=False), dtype)


@st.composite
def drawn_calls(draw):
    B, is_paged, is_packed = draw(st.integers(1, 4)), draw(st.booleans()), draw(st.booleans())
    each = st.lists(st.integers(0, 5), min_size=B, max_size=B).map(tuple)
    rows = draw(each.filter(any)) if is_packed else (draw(st.integers(1, 5)),) * B
    keys = draw(st.lists(st.integers(0, 40), min_size=B, max_size=B).map(tuple))
    leftpad = draw(st.none() | each)
    size = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 32])) if is_paged else 50
    seqused_q = draw(st.none() | st.tuples(*(st.integers(0, n) for n in rows)))
    bound = st.sampled_from([-1, -1, 0, 1, 2, 3, 5, 8, 100, 2**40])
    Hk, D = draw(st.integers(1, 3)), draw(st.sampled_from([8, 16, 40]))
    return Call("drawn", rows, keys, size, is_paged, is_paged and leftpad is None and draw(st.booleans()), is_packed,
                has_batch_idx=draw(st.booleans()), leftpad=leftpad, seqused_q=seqused_q,
                window=(draw(bound), draw(bound)), causal=draw(st.booleans()),
                sm_scale=draw(st.sampled_from([None, 0.0, -0.3, 2.0])), softcap=draw(st.sampled_from([0.0, 1.5])),
                has_sinks=draw(st.booleans()), slopes=draw(st.sampled_from([None, "heads", "samples"])),
                num_splits=draw(st.sampled_from([0, 1, 3, 256])), H=Hk * draw(st.integers(1, 4)), Hk=Hk, D=D,
                head_dim_v=draw(st.sampled_from([None, 8, 24])),
                layout=draw(st.sampled_from(["heads", "rows", "interleaved", "slice"])))


def check_drawn_calls(backend, seed, max_examples):
    """The same ones for the same seed."""
    @hypothesis.seed(seed)
    @settings(max_examples=max_examples, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(call=drawn_calls(), values=st.integers(0, 99))
    def check(call, values):
        check_call(backend, call, BACKENDS[backend], values)

    check()


def test_drawn_calls(backend):
    is_interpreted = backend == "triton" and not HAS_GPU  # a third of a second each
    check_drawn_calls(backend, 0, 20 if is_interpreted else 500 if backend == "cuda" and HAS_GPU else 60)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 11))
def test_10000_drawn_calls(backend, seed):
    if backend == "triton" and not HAS_GPU:
        pytest.skip("an hour in the interpreter")
    check_drawn_calls(backend, seed, 1000)


def test_same_as_flash_attention(backend):
    """A cache in one tensor is what flash_attention takes as well."""
    dtype = BACKENDS[backend]
    q, k, v = (torch.randn(3, n, s, 16, dtype=dtype, device=DEVICE) for n, s in ((4, 5), (2, 20), (2, 20)))
    options = dict(causal=True, window_size=(7, -1), return_lse=True, backend=backend)
    for lengths in (None, ints(9, 0, 20)):
        for got, want in zip(attention_with_kvcache(q, k, v, lengths, **options),
                             flash_attention(q, k, v, seqused_k=lengths, **options)):
            close(got, want.double().cpu(), TOLERANCE[dtype])


@pytest.mark.parametrize("is_packed", [False, True])
def test_values_out_of_range_are_clamped(backend, is_packed):
    """Where the host may not read them, kernels take the nearest values that there are."""
    dtype = BACKENDS[backend]
    q = torch.randn(*((1, 4, 6) if is_packed else (3, 4, 2)), 16, dtype=dtype, device=DEVICE)
    pages = torch.randn(5, 2, 4, 16, dtype=dtype, device=DEVICE)
    cu_seqlens_q = ints(0, 2, 4, 6) if is_packed else None

    def run(seqused_k, **cache):
        options = Options(0.25, (-1, 0), Lengths(cu_seqlens_q, None, None, seqused_k))
        return interface.BACKENDS[backend].forward_cached(q, pages, pages, options, Cache(**cache))

    table = ints(*GARBAGE, 3, 2, -1, 4, 0, 1, 99).view(3, 3)
    nearest = ints(0, 4, 3, 2, 0, 4, 0, 1, 4).view(3, 3)
    for got, want in [
            (run(ints(-3, 2**31 - 1, 12), page_table=table), run(ints(0, 12, 12), page_table=nearest)),
            (run(ints(9, 12, 12), page_table=table, leftpad_k=ints(-5, 2**31 - 1, 3)),
             run(ints(9, 12, 12), page_table=nearest, leftpad_k=ints(0, 12, 3))),
            (run(ints(99, 4, -2), batch_idx=ints(-1, 5, 3)), run(ints(4, 4, 0), batch_idx=ints(0, 4, 3)))]:
        for x, ref in zip(got, want):
            assert not x.isnan().any()
            assert_close(x, ref)


@pytest.mark.parametrize("is_packed", [False, True])
def test_empty(backend, is_packed):
    """No samples, no rows, no sequences, no pages, no room: out is 0, and lse the sink or -inf."""
    dtype = BACKENDS[backend]
    q = torch.randn(*((1, 4, 6) if is_packed else (2, 4, 3)), 16, dtype=dtype, device=DEVICE)
    lengths = dict(cu_seqlens_q=ints(0, 3, 6)) if is_packed else {}
    k, pages = (torch.randn(n, 2, 5, 16, dtype=dtype, device=DEVICE) for n in (2, 3))
    table, none = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE), ints(0, 0)
    sinks = torch.arange(4, device=DEVICE).to(dtype)
    for cache, given in [(k, dict(seqused_k=none)), (k[:, :, :0], {}), (pages, dict(seqused_k=none, page_table=table)),
                         (pages, dict(page_table=table[:, :0])), (pages[:, :, :0], dict(page_table=table)),
                         (pages[:0], dict(seqused_k=none, page_table=table))]:
        for sink in (None, sinks):
            out, lse = attention_with_kvcache(q, cache, cache, **given, **lengths, sinks=sink, return_lse=True,
                                              backend=backend)
            assert out.equal(torch.zeros_like(q)) and lse.shape == q.shape[:3]
            want = torch.full_like(lse, -math.inf) if sink is None else sinks.to(lse.dtype)[:, None].expand_as(lse)
            assert_close(lse, want)  # a kernel turns a sink into powers of two and back
    if not is_packed:
        assert attention_with_kvcache(q[:0], k[:0], k[:0], backend=backend).shape == (0, 4, 3, 16)
        assert attention_with_kvcache(q[:0], pages, pages, page_table=table[:0], backend=backend).shape == (0, 4, 3, 16)
        assert attention_with_kvcache(q[:0], pages, pages, page_table=table[:0], cache_batch_idx=none[:0],
                                      backend=backend).shape == (0, 4, 3, 16)
    no_rows = dict(cu_seqlens_q=ints(0, 0, 0)) if is_packed else {}
    assert attention_with_kvcache(q[:, :, :0], k, k, **no_rows, backend=backend).shape == (*q.shape[:2], 0, 16)


@cpu
@pytest.mark.parametrize("name", ["page_table", "batch_idx"])
def test_no_sequences_where_lengths_are_not_read(name):
    """reference serves all caches that hold nothing: a sample has no keys there, whatever its length says."""
    q, pages, none = torch.randn(2, 4, 3, 16), torch.randn(0, 2, 5, 16), torch.zeros(2, 4, dtype=torch.int32)
    cache = Cache(**{name: none if name == "page_table" else none[:, 0].contiguous()})
    options = Options(0.25, lengths=Lengths(seqused_k=ints(3, 5, device="cpu")))
    out, lse = interface.BACKENDS["reference"].forward_cached(q, pages, pages, options, cache)
    assert out.equal(torch.zeros_like(q)) and lse.eq(-math.inf).all()


@cpu
def test_autocast():
    """q is cast to the dtype of autocast where the cache has it, and the cache never is."""
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention_with_kvcache(q, k.bfloat16(), k.bfloat16())
        assert out.equal(attention_with_kvcache(q.bfloat16(), k.bfloat16(), k.bfloat16()))
        assert out.dtype == torch.bfloat16
        assert attention_with_kvcache(q, k, k).dtype == torch.float32
        place = torch.empty(2, 1, 4, 16)
        caches = [k.transpose(1, 2)] * 2
        assert flash_attn_with_kvcache(q.transpose(1, 2), *caches, out=place) is place
        with pytest.raises(TypeError, match="dtypes must match: q is torch.float32, k_cache is torch.float16"):
            attention_with_kvcache(q, k.half(), k.half())


@pytest.mark.parametrize("name", ["leftpad_batch_idx", "packed_pages", "pages_leftpad", "pages_batch_idx",
                                  "head_dim_v"])
def test_compiles_fullgraph(backend, name):
    call = next(call for call in CALLS if call.name == name)
    q, k, v, given = make(call, BACKENDS[backend])
    given = {name: on_device(x) for name, x in given.items()}
    q, k, v = map(on_device, (q, k, v))

    def attend(q, k, v, given):
        return attention_with_kvcache(q, k, v, **given, **call.options(), return_lse=True, backend=backend)

    torch._dynamo.reset()
    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v, given)
    for x, ref in zip(got, attend(q, k, v, given)):
        assert_close(x, ref)


def test_rows_that_a_page_table_has_not(backend):
    """They have no pages, so that kernels take the nearest. The host reads no numbers where torch.compile traces."""
    q, pages = (torch.randn(n, 2, s, 16, dtype=BACKENDS[backend], device=DEVICE) for n, s in ((3, 1), (6, 4)))

    def attend(table, rows):
        return attention_with_kvcache(q, pages, pages, page_table=table, cache_batch_idx=rows, backend=backend)

    torch._dynamo.reset()
    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(ints(0, 1, 2, 3).view(2, 2), ints(-1, 2, 1))
    assert_close(got, attend(ints(0, 0, 0, 0, 2, 3).view(3, 2), None))


# flash-attn's names, as their callers use them.

OF_FLASH_ATTN_3 = (
    "q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
    "cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens", "q_descale",
    "k_descale", "v_descale", "softmax_scale", "causal", "window_size", "attention_chunk", "softcap",
    "rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin", "return_softmax_lse")
OF_FLASH_ATTN_2 = (
    "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
    "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved",
    "alibi_slopes", "num_splits", "return_softmax_lse")


@cpu
def test_signatures_are_those_of_flash_attn():
    parameters = inspect.signature(flash_attn_with_kvcache).parameters.values()
    assert tuple(x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD) == OF_FLASH_ATTN_3
    named = {x.name for x in parameters if x.kind == x.KEYWORD_ONLY}
    assert named == {"block_table", "alibi_slopes", "s_aux", "learnable_sink", "sinks", "out", "return_lse", "ver",
                     "fa_version", "backend"}
    assert tuple(inspect.signature(with_kvcache_of_flash_attn_2).parameters) == OF_FLASH_ATTN_2
    assert tuple(inspect.signature(minimal_attn.get_scheduler_metadata).parameters) == (
        "batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "cache_seqlens",
        "qkv_dtype", "headdim_v", "cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad", "page_size",
        "max_seqlen_k_new", "causal", "window_size", "attention_chunk", "has_softcap", "num_splits", "pack_gqa",
        "sm_margin")


def rows_first(x):
    return x.transpose(1, 2)


def paged(backend=None, rows=(1, 5, 3), layout="rows", **options):
    """(q (T, H, D), caches (num_pages, page_size, Hk, D), the arguments, out and lse of attention_with_kvcache).
    Without a backend they are on the CPU, and the reference's."""
    device, backend = ("cpu", "reference") if backend is None else (DEVICE, backend)
    call = Call("serving", rows, (9, 5, 33), 16, is_paged=True, is_packed=True, causal=True, has_sinks=True,
                layout=layout, D=32)
    q, k, v, given = make(call, BACKENDS[backend])
    given = {name: on_device(x, device) for name, x in given.items()}
    q, k, v = (on_device(x, device) for x in (q, k, v))
    out, lse = attention_with_kvcache(q, k, v, **given, causal=True, **options, return_lse=True, backend=backend)
    return q[0].transpose(0, 1), rows_first(k), rows_first(v), given, out[0].transpose(0, 1), lse[0]


def test_call_of_vllm(backend):
    """One call for prefill and decode. K and V are halves of one tensor, and the result goes into a given one."""
    q, key_cache, value_cache, given, want, want_lse = paged(backend, layout="interleaved", window_size=(6, 0))
    assert key_cache.stride(-3) == 2 * 32 and key_cache.stride(-2) == 16 * 2 * 32
    output = torch.full_like(q, math.nan)
    metadata = minimal_attn.get_scheduler_metadata(
        batch_size=3, max_seqlen_q=5, max_seqlen_k=33, num_heads_q=4, num_heads_kv=2, headdim=32,
        cache_seqlens=given["seqused_k"], qkv_dtype=q.dtype, cu_seqlens_q=given["cu_seqlens_q"], page_size=16,
        causal=True, window_size=[6, 0], num_splits=32)
    assert (metadata.dtype, metadata.numel(), metadata.device.type) == (torch.int32, 0, DEVICE)
    got = flash_attn_varlen_func(
        q=q, k=key_cache, v=value_cache, out=output, cu_seqlens_q=given["cu_seqlens_q"], max_seqlen_q=5,
        seqused_k=given["seqused_k"], max_seqlen_k=33, softmax_scale=32**-0.5, causal=True, alibi_slopes=None,
        window_size=[6, 0], block_table=given["page_table"], softcap=0.0, scheduler_metadata=metadata, fa_version=3,
        q_descale=None, k_descale=None, v_descale=None, num_splits=32, s_aux=given["sinks"], return_softmax_lse=True,
        backend=backend)
    assert got[0] is output
    tolerance = TOLERANCE[q.dtype]
    close(output, want.double().cpu(), tolerance)
    close(got[1], want_lse.double().cpu(), tolerance)


def test_call_of_sglang(backend):
    """Pages of one key; q is packed, and cu_seqlens_k_new is given without k."""
    q, k, v, given, want, want_lse = paged(backend)
    table, places = given["page_table"], torch.arange(16, device=DEVICE, dtype=torch.int32)
    table = (table[:, :, None].clamp(0) * 16 + places).flatten(1)
    k, v = (x.reshape(-1, 1, *x.shape[2:]) for x in (k, v))
    out, lse, *rest = flash_attn_with_kvcache(
        q=q, k_cache=k, v_cache=v, page_table=table, cache_seqlens=given["seqused_k"],
        cu_seqlens_q=given["cu_seqlens_q"], cu_seqlens_k_new=ints(0, 9, 14, 47), max_seqlen_q=5,
        softmax_scale=32**-0.5, causal=True, window_size=(-1, -1), softcap=0.0, k_descale=None, v_descale=None,
        return_softmax_lse=True, num_splits=0, out=torch.empty_like(want), ver=3, sinks=given["sinks"],
        backend=backend)
    tolerance = TOLERANCE[q.dtype]
    close(out, want.double().cpu(), tolerance)
    close(lse.T, want_lse.T.double().cpu(), tolerance)
    assert rest == []


def test_call_of_transformers(backend):
    """Continuous batching, its decoding: q (n, 1, H, D), positional caches, the table by flash-attn 2's name."""
    q, k, v, given, want, _ = paged(backend, rows=(1, 1, 1))
    out = flash_attn_with_kvcache(q[:, None], k, v, block_table=given["page_table"], cache_seqlens=given["seqused_k"],
                                  causal=True, softmax_scale=32**-0.5, window_size=(-1, -1), s_aux=given["sinks"],
                                  backend=backend)
    close(out[:, 0], want.double().cpu(), TOLERANCE[q.dtype])


@pytest.mark.parametrize("name", ["pages_batch_idx", "packed_pages_batch_idx", "leftpad_batch_idx"])
def test_call_of_flash_attn_3s_tests(backend, name):
    """cache_batch_idx numbers rows of page_table, window_size is a tensor, and rotary_seqlens comes without rotary_cos,
    which has no new keys to rotate."""
    call = next(call for call in CALLS if call.name == name)
    call = dataclasses.replace(call, window=(6, 2), layout="rows")
    q, k, v, given = make(call, BACKENDS[backend])
    want, want_lse = by_loop(call, q, k, v, given)
    given = {name: on_device(x) for name, x in given.items()}
    q, (k, v) = on_device(q), (rows_first(on_device(x)) for x in (k, v))
    q = q[0].transpose(0, 1) if call.is_packed else rows_first(q)
    out, lse, *rest = flash_attn_with_kvcache(
        q, k, v, None, None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=given["seqused_k"],
        cache_batch_idx=given["cache_batch_idx"], cache_leftpad=given.get("leftpad_k"),
        page_table=given.get("page_table"), cu_seqlens_q=given.get("cu_seqlens_q"), cu_seqlens_k_new=None,
        max_seqlen_q=given.get("max_seqlen_q"), rotary_seqlens=given["seqused_k"], causal=False,
        window_size=torch.tensor([6, 2]), attention_chunk=0, rotary_interleaved=True, scheduler_metadata=None,
        num_splits=3, return_softmax_lse=True, backend=backend)
    tolerance = TOLERANCE[q.dtype]
    close(out, want[0].transpose(0, 1) if call.is_packed else rows_first(want), tolerance)
    close(lse, want_lse[0] if call.is_packed else want_lse, tolerance)
    assert rest == []


@cpu
def test_with_kvcache_in_one_tensor():
    """Lengths by an int, positions in the order of flash-attn 2 and 3, and the shapes of what is returned."""
    q, k, v = (torch.randn(3, s, n, 16) for s, n in ((2, 4), (20, 2), (20, 2)))
    want, want_lse = attention_with_kvcache(*map(rows_first, (q, k, v)), ints(9, 9, 9, device="cpu"), causal=True,
                                            return_lse=True)
    of_3 = flash_attn_with_kvcache(q, k, v, None, None, None, None, None, 9, causal=True, return_softmax_lse=True)
    of_2 = with_kvcache_of_flash_attn_2(q, k, v, None, None, None, None, 9, causal=True, return_softmax_lse=True)
    for out, lse in (of_2, of_3):
        assert out.equal(rows_first(want)) and lse.equal(want_lse) and out.shape == (3, 2, 4, 16)
    assert flash_attn_with_kvcache(q, k, v, cache_seqlens=9, causal=True).equal(rows_first(want))
    packed = flash_attn_with_kvcache(q.flatten(0, 1), k, v, cache_seqlens=9, causal=True, return_lse=True,
                                     cu_seqlens_q=ints(0, 2, 4, 6, device="cpu"), max_seqlen_q=2)
    assert_close(packed[0], rows_first(want).flatten(0, 1))
    assert_close(packed[1], want_lse.transpose(0, 1).flatten(1))
    idx, pads = (ints(*x, device="cpu") for x in ((2, 0, 1), (1, 0, 8)))
    got = flash_attn_with_kvcache(q, k, v, cache_seqlens=9, cache_batch_idx=idx, cache_leftpad=pads, window_size=None)
    assert got.equal(rows_first(attention_with_kvcache(*map(rows_first, (q, k, v)), ints(9, 9, 9, device="cpu"),
                                                       cache_batch_idx=idx, leftpad_k=pads)))


@cpu
def test_names_of_one_argument():
    q, k, v, given, want, _ = paged()
    lengths = dict(cu_seqlens_q=given["cu_seqlens_q"], causal=True)
    for call, seqused in ((flash_attn_varlen_func, "seqused_k"), (flash_attn_with_kvcache, "cache_seqlens")):
        for table, sinks in itertools.product(("block_table", "page_table"), ("s_aux", "learnable_sink", "sinks")):
            got = call(q, k, v, **lengths, **{seqused: given["seqused_k"], table: given["page_table"],
                                              sinks: given["sinks"]}, backend="reference")
            assert got.equal(want)
        with pytest.raises(TypeError, match=f"{call.__name__}: .* are names of the same argument"):
            call(q, k, v, **lengths, block_table=given["page_table"], page_table=given["page_table"])
        with pytest.raises(TypeError, match=f"{call.__name__}: s_aux and sinks are names of the same argument"):
            call(q, k, v, **lengths, s_aux=given["sinks"], sinks=given["sinks"])


@cpu
def test_varlen_func_with_lengths_of_flash_attn_2():
    """cu_seqlens_k with a page table says how many keys a sample has, and nothing else."""
    q, k, v, given, want, want_lse = paged()
    cu_seqlens_k = ints(0, 9, 14, 47, device="cpu")
    out, lse, probs = flash_attn_varlen_func(q, k, v, given["cu_seqlens_q"], cu_seqlens_k, 5, 33, 0.0, None, True,
                                             block_table=given["page_table"], sinks=given["sinks"],
                                             return_attn_probs=True, backend="reference")
    assert out.equal(want) and lse.equal(want_lse) and probs is None


@cpu
def test_names_compile_fullgraph():
    q, k, v, given, want, _ = paged()

    def attend(q, k, v, table, seqused_k, cu_seqlens_q, sinks):
        a = flash_attn_varlen_func(q, k, v, cu_seqlens_q, block_table=table, seqused_k=seqused_k, max_seqlen_q=5,
                                   causal=True, s_aux=sinks)
        b = flash_attn_with_kvcache(q, k, v, page_table=table, cache_seqlens=seqused_k, cu_seqlens_q=cu_seqlens_q,
                                    causal=True, sinks=sinks)
        return a, b

    torch._dynamo.reset()
    names = "page_table", "seqused_k", "cu_seqlens_q", "sinks"
    for got in torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v, *(given[x] for x in names)):
        assert_close(got, want)


@cpu
def test_errors_of_names_while_tracing():
    """Dynamo fails in its own words, but with ours among them."""
    q, k, v, given, *_ = paged()
    options = dict(block_table=given["page_table"][:2], cu_seqlens_q=given["cu_seqlens_q"])
    torch._dynamo.reset()
    for call in (flash_attn_varlen_func, flash_attn_with_kvcache):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="ValueError.*block_table must have 3 rows"):
            torch.compile(call, fullgraph=True, backend="eager")(q, k, v, **options)


# flash_attn_combine.

@cpu
@pytest.mark.parametrize("is_packed", [False, True])
def test_combine(is_packed):
    """Parts of a cache, of which some are empty for a sample and one is for all, beside one undivided call."""
    q, k, v = (torch.randn(3, n, s, 16, dtype=torch.float64) for n, s in ((4, 2), (2, 20), (2, 20)))
    lengths = ints(20, 9, 0, device="cpu")
    want, want_lse = attention_with_kvcache(q, k, v, lengths, return_lse=True)
    outs, lses = [], []
    for begin in range(0, 24, 6):
        part = [x[:, :, begin:begin + 6] for x in (k, v)]
        out, lse = attention_with_kvcache(q, *part, (lengths - begin).clamp(0, part[0].shape[2]), return_lse=True)
        outs.append(rows_first(out).masked_fill(rows_first(lse)[..., None] == -math.inf, math.nan))
        lses.append(rows_first(lse))
    outs, lses = torch.stack(outs), torch.stack(lses)
    if is_packed:
        outs, lses = outs.flatten(1, 2), lses.flatten(1, 2)
    out, lse = flash_attn_combine(outs, lses)
    shape = (6, 4, 16) if is_packed else (3, 2, 4, 16)
    assert out.shape == shape and lse.shape == shape[:-1] and lse.stride(-2) == 1
    assert_close(out, rows_first(want).reshape(shape))
    assert_close(lse, rows_first(want_lse).reshape(shape[:-1]))
    place = torch.empty(shape, dtype=torch.float64)
    assert flash_attn_combine(outs, lses, place)[0] is place and place.equal(out)


@cpu
def test_combine_dtypes():
    parts, lses = torch.randn(3, 2, 5, 4, 16), torch.randn(3, 2, 5, 4)
    want, want_lse = flash_attn_combine(parts.double(), lses.double())
    for dtype, out_dtype in itertools.product((torch.float32, torch.float16, torch.bfloat16), repeat=2):
        out, lse = flash_attn_combine(parts.to(dtype), lses, out_dtype=out_dtype)
        assert out.dtype == out_dtype and lse.dtype == torch.float32
        close(out, want, 2 * max(TOLERANCE[dtype], TOLERANCE[out_dtype]))
        close(lse, want_lse, 1e-6)
    assert flash_attn_combine(parts.half(), lses)[0].dtype == torch.float16
    assert flash_attn_combine(parts, lses, torch.empty(2, 5, 4, 16, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


PARTIAL, PARTIAL_LSE = torch.randn(3, 2, 5, 4, 16), torch.randn(3, 2, 5, 4)


@cpu
@pytest.mark.parametrize("error, match, change", [
    (TypeError, "out_partial must be a torch.Tensor, got list", dict(out_partial=[])),
    (TypeError, "lse_partial must be a torch.Tensor", dict(lse_partial=None)),
    (TypeError, "out_partial is torch.int32", dict(out_partial=PARTIAL.int())),
    (TypeError, "lse_partial must be torch.float32", dict(lse_partial=PARTIAL_LSE.half())),
    (TypeError, "out_dtype must be None or one of", dict(out_dtype=torch.int8)),
    (ValueError, r"out_partial must be \(num_splits, B, S, H, D\)", dict(out_partial=PARTIAL[0, 0])),
    (ValueError, "with 1 to 256 splits", dict(out_partial=PARTIAL[:0])),
    (ValueError, "with 1 to 256 splits", dict(out_partial=PARTIAL[:1].expand(257, -1, -1, -1, -1))),
    (ValueError, r"lse_partial must have shape \(3, 2, 5, 4\)", dict(lse_partial=PARTIAL_LSE.transpose(2, 3))),
    (TypeError, "out must be a torch.Tensor", dict(out=3)),
    (ValueError, "out must be torch.float32 of shape", dict(out=PARTIAL)),
    (ValueError, "out must be torch.float16 of shape", dict(out=PARTIAL[0].clone(), out_dtype=torch.float16)),
    (NotImplementedError, "flash_attn_combine has no backward pass yet", dict(
        out_partial=PARTIAL.clone().requires_grad_())),
])
def test_combine_bad_input(error, match, change):
    with pytest.raises(error, match=match):
        flash_attn_combine(**{"out_partial": PARTIAL, "lse_partial": PARTIAL_LSE, **change})


# Bad input.

def case():
    """Arguments of a call of pages, on the CPU."""
    return dict(q=torch.randn(2, 4, 3, 16), k_cache=torch.randn(5, 2, 4, 16), v_cache=torch.randn(5, 2, 4, 16),
                seqused_k=ints(9, 5, device="cpu"), page_table=ints(0, 1, 2, 3, 4, 0, device="cpu").view(2, 3))


def dense():
    return dict(case(), k_cache=torch.randn(2, 2, 12, 16), v_cache=torch.randn(2, 2, 12, 16), page_table=None)


def packed():
    return dict(case(), q=torch.randn(1, 4, 6, 16), cu_seqlens_q=ints(0, 2, 6, device="cpu"))


def one(*values):
    return ints(*values, device="cpu")


BAD = [
    (TypeError, "q must be a torch.Tensor, got list", case, dict(q=[1.0])),
    (TypeError, "k_cache must be a torch.Tensor, got NoneType", case, dict(k_cache=None)),
    (TypeError, "v_cache must be a dense tensor", case, dict(v_cache=torch.randn(5, 4).to_sparse())),
    (TypeError, "Unsupported dtype: k_cache is torch.int32", case, dict(k_cache=torch.ones(5, 2, 4, 16).int())),
    (TypeError, "Unsupported dtype: q is torch.float8_e4m3fn", case, dict(q=torch.ones(2, 4, 3, 16).to(
        torch.float8_e4m3fn))),
    (TypeError, "dtypes must match: q is torch.float32, k_cache is torch.float16, v_cache is torch.float16", case,
     dict(k_cache=torch.randn(5, 2, 4, 16).half(), v_cache=torch.randn(5, 2, 4, 16).half())),
    (ValueError, "q, k_cache and v_cache must be on the same device: q is on cpu, k_cache on meta", case,
     dict(k_cache=torch.randn(5, 2, 4, 16, device="meta"))),
    (ValueError, "Expected 4D tensors", case, dict(q=torch.randn(2, 4, 16))),
    (ValueError, "Unsupported head_dim 300", case, dict(q=torch.randn(2, 4, 3, 300))),
    (ValueError, "Unsupported head_dim 300", case, dict(v_cache=torch.randn(5, 2, 4, 300))),
    (ValueError, "q and k_cache must have the same head_dim", case, dict(q=torch.randn(2, 4, 3, 8))),
    (ValueError, "k_cache and v_cache must have the same shape", case, dict(v_cache=torch.randn(5, 2, 3, 16))),
    (ValueError, "the number of query heads must be a multiple", case, dict(q=torch.randn(2, 3, 3, 16))),
    (ValueError, "k_cache must be contiguous in its last dimension, since no cache is copied", case,
     dict(k_cache=torch.randn(5, 2, 16, 4).mT)),
    (ValueError, "v_cache must be contiguous in its last dimension", case,
     dict(v_cache=torch.randn(5, 2, 4, 32)[..., ::2])),
    (TypeError, "page_table must be a torch.Tensor, got list", case, dict(page_table=[[0, 1], [2, 3]])),
    (TypeError, "page_table must be int32, got torch.int64", case, dict(page_table=torch.zeros(2, 3).long())),
    (ValueError, "page_table must be on the same device as q", case,
     dict(page_table=torch.zeros(2, 3, dtype=torch.int32, device="meta"))),
    (ValueError, r"page_table must have two dimensions, \(B, max_pages\)", case, dict(page_table=one(0, 1))),
    (ValueError, "page_table must have two dimensions.*contiguous", case,
     dict(page_table=torch.zeros(3, 2, dtype=torch.int32).mT)),
    (ValueError, r"page_table must have 2 rows, one for each sample, got \(3, 3\)", case,
     dict(page_table=torch.zeros(3, 3, dtype=torch.int32))),
    (ValueError, "page_table must be in 0..4 for sample 1, got 5", case,
     dict(page_table=one(0, 1, 2, 3, 5, 0).view(2, 3))),
    (ValueError, "page_table must be in 0..4 for sample 0, got -1", case,
     dict(page_table=one(0, 1, -1, 3, 4, 0).view(2, 3))),
    (ValueError, "seqused_k must be in 0..0 for sample 0, got 9", case,
     dict(k_cache=torch.randn(0, 2, 4, 16), v_cache=torch.randn(0, 2, 4, 16))),
    (TypeError, "cache_batch_idx must be int32", case, dict(cache_batch_idx=torch.zeros(2).long())),
    (ValueError, r"cache_batch_idx must have shape \(2,\)", case, dict(cache_batch_idx=one(0, 1, 1))),
    (ValueError, "cache_batch_idx must be in 0..1 for sample 1, got 2", case, dict(cache_batch_idx=one(0, 2))),
    (ValueError, "cache_batch_idx must be in 0..1 for sample 0, got -1", case, dict(cache_batch_idx=one(-1, 0))),
    (ValueError, r"page_table must have rows for cache_batch_idx.*got \(0, 3\)", case,
     dict(page_table=torch.zeros(0, 3, dtype=torch.int32), cache_batch_idx=one(0, 1))),
    (ValueError, "page_table must be in 0..4 for sample 0, got 5", case,
     dict(page_table=one(0, 1, 2, 3, 5, 0).view(2, 3), cache_batch_idx=one(1, 0))),
    (ValueError, "rows and keys together.*with room for 3221225472 keys a sample", case,
     {name: torch.randn(5, 2, 1, 16).expand(-1, -1, 2**30, -1) for name in ("k_cache", "v_cache")}),
    (TypeError, "seqused_k must be a torch.Tensor, got int", case, dict(seqused_k=9)),
    (TypeError, "seqused_k must be int32", case, dict(seqused_k=torch.tensor([9, 5]))),
    (ValueError, r"seqused_k must have shape \(2,\)", case, dict(seqused_k=one(9, 5, 1))),
    (ValueError, "seqused_k must be contiguous", case, dict(seqused_k=one(9, 0, 5, 0)[::2])),
    (ValueError, "seqused_k must be in 0..12 for sample 0, got 13", case, dict(seqused_k=one(13, 5))),
    (ValueError, "seqused_k must be in 0..12 for sample 1, got -1", dense, dict(seqused_k=one(3, -1))),
    (TypeError, "leftpad_k must be int32", case, dict(leftpad_k=torch.zeros(2))),
    (ValueError, r"leftpad_k must have shape \(2,\)", case, dict(leftpad_k=one(0))),
    (ValueError, "leftpad_k must be in 0..5, the length of sample 1, got 6", case, dict(leftpad_k=one(0, 6))),
    (ValueError, "leftpad_k must be in 0..12, the length of sample 0, got -1", dense,
     dict(seqused_k=None, leftpad_k=one(-1, 0))),
    (TypeError, "cache_batch_idx must be int32", dense, dict(cache_batch_idx=torch.zeros(2).long())),
    (ValueError, r"cache_batch_idx must have shape \(2,\)", dense, dict(cache_batch_idx=one(0, 1, 1))),
    (ValueError, "cache_batch_idx must be in 0..1 for sample 1, got 2", dense, dict(cache_batch_idx=one(0, 2))),
    (ValueError, "the cache must have as many sequences as there are samples, 2", dense,
     dict(k_cache=torch.randn(3, 2, 12, 16), v_cache=torch.randn(3, 2, 12, 16))),
    (ValueError, "seqused_q must be in 0..3 for sample 0, got 4", case, dict(seqused_q=one(4, 0))),
    (ValueError, r"with cu_seqlens_q, q must be packed, \(1, H, Tq, D\)", packed, dict(q=torch.randn(2, 4, 3, 16))),
    (ValueError, r"cu_seqlens_q must have one shape \(B \+ 1,\), with B at least 1, got \(1,\)", packed,
     dict(cu_seqlens_q=one(0))),
    (ValueError, "cu_seqlens_q must ascend", packed, dict(cu_seqlens_q=one(0, 5, 4))),
    (ValueError, "cu_seqlens_q must start at 0 and stay within 0..6", packed, dict(cu_seqlens_q=one(0, 2, 7))),
    (TypeError, "max_seqlen_q must be None, an int or a tensor", packed, dict(max_seqlen_q=2.5)),
    (TypeError, "num_splits must be an int, got None", case, dict(num_splits=None)),
    (TypeError, "num_splits must be an int, got True", case, dict(num_splits=True)),
    (ValueError, "num_splits must be in 0..256.*got 257", case, dict(num_splits=257)),
    (ValueError, "num_splits must be in 0..256.*got -1", case, dict(num_splits=-1)),
    (TypeError, "causal must be a bool", case, dict(causal=1)),
    (ValueError, "sm_scale must be finite", case, dict(sm_scale=math.inf)),
    (TypeError, "window_size must be a pair of ints", case, dict(window_size=3)),
    (ValueError, "window_size must be at least -1", case, dict(window_size=(-2, 0))),
    (ValueError, "softcap must be at least 0", case, dict(softcap=-1.0)),
    (ValueError, r"sinks must have shape \(4,\)", case, dict(sinks=torch.ones(2))),
    (ValueError, r"alibi_slopes must have shape \(4,\) or \(2, 4\)", case, dict(alibi_slopes=torch.ones(3))),
    (ValueError, "unknown backend 'other'", case, dict(backend="other")),
    (TypeError, "unexpected keyword argument 'block_table'", case, dict(block_table=None)),
]


@cpu
@pytest.mark.parametrize("error, match, arguments, change", BAD, ids=[x[1] for x in BAD])
def test_bad_input(error, match, arguments, change):
    attention_with_kvcache(**arguments())
    with pytest.raises(error, match=match):
        attention_with_kvcache(**{**arguments(), **change})


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "sinks"])
def test_gradients_are_refused(backend, name):
    arguments = {key: on_device(x.to(BACKENDS[backend]) if x.is_floating_point() else x)
                 for key, x in dict(case(), sinks=torch.ones(4)).items()}
    arguments["backend"] = backend
    arguments[name].requires_grad_()
    match = f"attention_with_kvcache has no backward pass yet, but {name} requires grad"
    with pytest.raises(NotImplementedError, match=match):
        attention_with_kvcache(**arguments)
    with torch.no_grad():
        assert not attention_with_kvcache(**arguments).requires_grad
    with torch.autograd.forward_ad.dual_level():
        x = arguments[name].detach()
        arguments[name] = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=f"no forward-mode derivative, but {name} has a tangent"):
            attention_with_kvcache(**arguments)


@cpu
@pytest.mark.parametrize("name", ["qv", "q_descale", "k_descale", "v_descale", "attention_chunk"])
def test_what_is_not_there_is_refused_by_name(name):
    q, k, v, given, *_ = paged(rows=(1, 1, 1))
    value = 16 if name == "attention_chunk" else torch.ones(3, 2)
    lengths = dict(page_table=given["page_table"], cu_seqlens_q=given["cu_seqlens_q"])
    with pytest.raises(NotImplementedError, match=f"^flash_attn_with_kvcache: {name} is not supported yet"):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=given["seqused_k"], **lengths, **{name: value})
    with pytest.raises(NotImplementedError, match=f"^flash_attn_varlen_func: {name} is not supported yet"):
        flash_attn_varlen_func(q, k, v, seqused_k=given["seqused_k"], **lengths, **{name: value})


def tables(**change):
    q, k, v, given, *_ = paged()
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": given["cu_seqlens_q"], "seqused_k": given["seqused_k"],
            "block_table": given["page_table"], **change}


@cpu
@pytest.mark.parametrize("error, match, change", [
    (ValueError, r"flash_attn_varlen_func: q must be \(T, H, D\)", dict(q=torch.randn(1, 9, 4, 32))),
    (ValueError, r"flash_attn_varlen_func: k must be \(num_pages, page_size, Hk, D\)", dict(k=torch.randn(9, 2, 32))),
    (ValueError, "cu_seqlens_q must be given", dict(cu_seqlens_q=None)),
    (ValueError, "cu_seqlens_k and seqused_k cannot both be given with block_table", dict(
        cu_seqlens_k=one(0, 9, 14, 47))),
    (TypeError, "cu_seqlens_k must be int32", dict(seqused_k=None, cu_seqlens_k=torch.tensor([0, 9, 14, 47]))),
    (ValueError, r"the difference of entries of cu_seqlens_k must have shape \(3,\)",
     dict(seqused_k=None, cu_seqlens_k=one(0, 9, 14))),
    (ValueError, "the difference of entries of cu_seqlens_k must be in 0..48 for sample 1, got -1",
     dict(seqused_k=None, cu_seqlens_k=one(0, 9, 8, 12))),
    (ValueError, "seqused_k without cu_seqlens_k needs a page table: give block_table", dict(block_table=None)),
    (NotImplementedError, "flash_attn_varlen_func: dropout_p is not supported with block_table", dict(dropout_p=0.1)),
    (TypeError, "dropout_p must be a number", dict(dropout_p=False)),
    (ValueError, "block_table must have 3 rows", dict(block_table=torch.zeros(2, 3, dtype=torch.int32))),
    (ValueError, "softmax_scale must be finite", dict(softmax_scale=math.nan)),
    (TypeError, "dtypes must match: q is torch.float32, k is torch.float64, v is torch.float64",
     dict(q=torch.randn(9, 4, 32))),
    (ValueError, r"out must be torch.float64 of shape \(9, 4, 32\)", dict(out=torch.empty(9, 4, 32))),
    (NotImplementedError, "flash_attn_varlen_func has no backward pass yet, but k requires grad",
     dict(k=torch.randn(10, 16, 2, 32, dtype=torch.float64, requires_grad=True))),
])
def test_varlen_func_bad_input(error, match, change):
    flash_attn_varlen_func(**tables())
    with pytest.raises(error, match=match):
        flash_attn_varlen_func(**tables(**change))


@cpu
@pytest.mark.parametrize("error, match, change", [
    (ValueError, r"cache_seqlens must be in 0..20, got 21", dict(cache_seqlens=21)),
    (ValueError, r"cache_seqlens must be in 0..20, got -1", dict(cache_seqlens=-1)),
    (ValueError, r"cache_seqlens must be in 0..20 for sample 2, got 21", dict(cache_seqlens=one(3, 3, 21))),
    (TypeError, "cache_seqlens must be a torch.Tensor, got float", dict(cache_seqlens=3.0)),
    (TypeError, "cache_seqlens must be a torch.Tensor, got bool", dict(cache_seqlens=True)),
    (ValueError, "cache_leftpad must be in 0..9, the length of sample 0, got 10", dict(cache_leftpad=one(10, 0, 0))),
    (ValueError, r"flash_attn_with_kvcache: k_cache must be \(B, S, Hk, D\)", dict(k_cache=torch.randn(20, 2, 16))),
    (ValueError, r"flash_attn_with_kvcache: q must be \(T, H, D\)", dict(cu_seqlens_q=one(0, 2, 4, 6))),
    (TypeError, "q must be a torch.Tensor, got NoneType", dict(q=None)),
    (ValueError, r"cache_seqlens must be in 0..40, got 41", dict(cache_seqlens=41, page_table=one(*range(3), *range(
        3)).view(3, 2))),
    (TypeError, "block_table must be int32", dict(block_table=torch.zeros(3, 2))),
    (TypeError, "cu_seqlens_q must be a torch.Tensor", dict(q=torch.randn(6, 4, 16), cu_seqlens_q=[0, 2, 4, 6])),
    (ValueError, "softmax_scale must be finite", dict(softmax_scale=math.nan)),
    (NotImplementedError, "flash_attn_with_kvcache has no backward pass yet, but k_cache requires grad",
     dict(k_cache=torch.randn(3, 20, 2, 16, requires_grad=True))),
    (ValueError, "out cannot be given where gradients are wanted",
     dict(q=torch.randn(3, 2, 4, 16, requires_grad=True), out=torch.empty(3, 2, 4, 16))),
])
def test_with_kvcache_bad_input(error, match, change):
    q, k, v = (torch.randn(3, s, n, 16) for s, n in ((2, 4), (20, 2), (20, 2)))
    arguments = dict(q=q, k_cache=k, v_cache=v, cache_seqlens=9)
    flash_attn_with_kvcache(**arguments)
    with pytest.raises(error, match=match):
        flash_attn_with_kvcache(**{**arguments, **change})


@cpu
def test_get_scheduler_metadata_bad_input():
    with pytest.raises(TypeError, match="cache_seqlens must be a torch.Tensor, got int"):
        minimal_attn.get_scheduler_metadata(1, 1, 9, 4, 2, 16, 9)


@cpu
@pytest.mark.parametrize("change", [
    dict(q=torch.randn(3, 4, 5, 16)), dict(q=torch.randn(2, 3, 5, 16)), dict(q=torch.randn(2, 4, 5, 8)),
    dict(v=torch.randn(6, 2, 9, 16)), dict(v=torch.randn(6, 2, 8, 257)), dict(k=torch.randn(6, 2, 16, 8).mT),
    dict(page_table=None), dict(page_table=torch.zeros(1, 4, dtype=torch.int32)),
    dict(page_table=torch.zeros(2, 4, dtype=torch.int64)),
    dict(page_table=torch.zeros(2, 8, dtype=torch.int32)[:, ::2]),
    dict(seqused_k=torch.ones(3, dtype=torch.int32)), dict(leftpad_k=torch.ones(2, dtype=torch.int64)),
    dict(seqused_q=torch.ones(4, dtype=torch.int32)[::2]),
    dict(cu_seqlens_q=torch.tensor([0, 2, 5], dtype=torch.int32)),
    dict(sinks=torch.zeros(2)), dict(alibi_slopes=torch.zeros(2)), dict(tree_mask=torch.zeros(2, 4).long()),
    dict(softmax_scale=math.nan), dict(softcap=-1.0), dict(window_left=-2), dict(num_splits=257), dict(max_seqlen_q=-1),
], ids=lambda change: "-".join(f"{name}_{tuple(getattr(x, 'shape', ())) or x}" for name, x in change.items()))
def test_op_refuses_what_would_read_out_of_bounds(change):
    """Without a GPU the compiled op checks its arguments alike, and then says that it needs one."""
    minimal_attn.load()
    k, table = torch.randn(6, 2, 8, 16), torch.arange(6, dtype=torch.int32).view(2, 3)
    given = dict(q=torch.randn(2, 4, 5, 16), k=k, v=k, cu_seqlens_q=None, seqused_q=None, seqused_k=None,
                 page_table=table, cache_batch_idx=None, leftpad_k=None, tree_mask=None, sinks=None, alibi_slopes=None,
                 softmax_scale=0.25, softcap=0.0, window_left=-1, window_right=-1, num_splits=0, max_seqlen_q=0)
    with pytest.raises(NotImplementedError, match="flash_decode needs tensors on a GPU"):
        torch.ops.minimal_attn.flash_decode(*given.values())
    with pytest.raises(ValueError):
        torch.ops.minimal_attn.flash_decode(*{**given, **change}.values())
