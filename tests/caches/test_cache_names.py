"""Caches by the names of others: the calls of vLLM, transformers and flash-attn's tests, with new keys and without,
their signatures, and flash_attn_combine. tests/integrations/test_sglang.py has those of SGLang.

test_kvcache.py and test_append.py have what the calls mean.
"""

import dataclasses
import inspect
import itertools
import math

import pytest
import torch
from torch.testing import assert_close

import minimal_attn
from cached_calls import (BACKENDS, DEVICE, TOLERANCE, Call, backend, by_loop, close, ints, make,  # noqa: F401
                          on_device, rows_first)
from minimal_attn import (attention_with_kvcache, flash_attn_combine, flash_attn_varlen_func, flash_attn_with_kvcache,
                          reshape_and_cache)
from minimal_attn.flash_attn.flash_attn_interface import flash_attn_with_kvcache as with_kvcache_of_flash_attn_2
from test_kvcache import CALLS

cpu = pytest.mark.cpu


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
def test_signatures_are_those_of_flash_attn_and_vllm():
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
    parameters = inspect.signature(reshape_and_cache).parameters.values()
    assert tuple(x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD) == (
        "key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale")


# Their calls. Each is made of a cache that has all keys, and of one to which the last keys of each sample are new.

def packed_rows(x):
    """(1, H, T, D) as (T, H, D), or None."""
    return None if x is None else x[0].transpose(0, 1)


@dataclasses.dataclass
class Serving:
    """A packed batch of three samples on pages, by flash-attn's layouts, and what its call must give."""

    q: torch.Tensor  # (T, H, D)
    k: torch.Tensor | None  # (T, Hk, D), new ones
    v: torch.Tensor | None
    caches: list  # of K and V, (num_pages, page_size, Hk, D)
    given: dict  # the other arguments of attention_with_kvcache
    want: tuple  # out, lse, and the caches afterwards

    def check(self, out, lse=None):
        tolerance = TOLERANCE[out.dtype]
        close(out, self.want[0].double().cpu(), tolerance)
        if lse is not None:
            close(lse, self.want[1].double().cpu(), tolerance)
        for cache, want in zip(self.caches, self.want[2:]):
            assert_close(cache, want, rtol=0, atol=0, equal_nan=True)


def serving(backend=None, rows=(1, 5, 3), has_new=False, layout="rows", **options):
    """Without a backend on the CPU. The reference says what the call must give."""
    device, dtype = ("cpu", torch.float64) if backend is None else (DEVICE, BACKENDS[backend])
    call = Call("serving", rows, (9, 5, 33), 16, is_paged=True, is_packed=True, causal=True, has_sinks=True,
                layout=layout, D=32)
    q, k, v, given = make(call, dtype)
    q = q[:, :, :sum(rows)]
    given = {name: on_device(x, device) for name, x in given.items()}
    q, k, v = (on_device(x, device) for x in (q, k, v))
    out, lse = attention_with_kvcache(q, k, v, **given, causal=True, **options, return_lse=True, backend="reference")
    caches, new = [on_device(x, device) for x in (k, v)], []
    if has_new:
        given["seqused_k"] -= torch.tensor(rows, dtype=torch.int32, device=device)
        given["cu_seqlens_k_new"] = given["cu_seqlens_q"]
        for x, cache in zip((k, v), caches):
            places = [(given["page_table"][b, place // 16], place % 16) for b, begin in enumerate(
                given["seqused_k"].tolist()) for place in range(begin, begin + rows[b])]
            new.append(torch.stack([x[page, :, place] for page, place in places]))
            for page, place in places:
                cache[page, :, place] = math.nan
    return Serving(packed_rows(q), *(new or (None, None)), [rows_first(x) for x in caches], given,
                   (packed_rows(out), lse[0], rows_first(k), rows_first(v)))


@pytest.mark.parametrize("has_new", [False, True])
def test_call_of_vllm(backend, has_new):
    """One call for prefill and decode, after an append by slots. K and V are halves of one tensor, and the result goes
    into a given one."""
    x = serving(backend, has_new=has_new, layout="interleaved", window_size=(6, 0))
    (key_cache, value_cache), given = x.caches, x.given
    assert key_cache.stride(-3) == 2 * 32 and key_cache.stride(-2) == 16 * 2 * 32
    if has_new:
        slots = [int(given["page_table"][b, place // 16]) * 16 + place % 16
                 for b, begin, n in ((0, 8, 1), (1, 0, 5), (2, 30, 3)) for place in range(begin, begin + n)]
        reshape_and_cache(x.k, x.v, key_cache, value_cache, torch.tensor(slots, device=DEVICE), "auto", None, None,
                          backend=backend)
    seqused_k = ints(9, 5, 33)
    metadata = minimal_attn.get_scheduler_metadata(
        batch_size=3, max_seqlen_q=5, max_seqlen_k=33, num_heads_q=4, num_heads_kv=2, headdim=32,
        cache_seqlens=seqused_k, qkv_dtype=x.q.dtype, cu_seqlens_q=given["cu_seqlens_q"], page_size=16,
        causal=True, window_size=[6, 0], num_splits=32)
    assert (metadata.dtype, metadata.numel(), metadata.device.type) == (torch.int32, 0, DEVICE)
    output = torch.full_like(x.q, math.nan)
    out, lse = flash_attn_varlen_func(
        q=x.q, k=key_cache, v=value_cache, out=output, cu_seqlens_q=given["cu_seqlens_q"], max_seqlen_q=5,
        seqused_k=seqused_k, max_seqlen_k=33, softmax_scale=32**-0.5, causal=True, alibi_slopes=None,
        window_size=[6, 0], block_table=given["page_table"], softcap=0.0, scheduler_metadata=metadata, fa_version=3,
        q_descale=None, k_descale=None, v_descale=None, num_splits=32, s_aux=given["sinks"], return_softmax_lse=True,
        backend=backend)
    assert out is output
    x.check(out, lse)


@pytest.mark.parametrize("has_new", [False, True])
def test_call_of_transformers(backend, has_new):
    """Continuous batching, its decoding: q, k and v (n, 1, H, D), all but the table by position."""
    x = serving(backend, (1, 1, 1), has_new)
    new = [y[:, None] for y in (x.k, x.v)] if has_new else []
    out = flash_attn_with_kvcache(
        x.q[:, None], *x.caches, *new, block_table=x.given["page_table"], cache_seqlens=x.given["seqused_k"],
        causal=True, softmax_scale=32**-0.5, window_size=(-1, -1), s_aux=x.given["sinks"], backend=backend)
    x.check(out[:, 0])


@pytest.mark.parametrize("name", ["packed_pages_batch_idx", "leftpad_batch_idx"])
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
def test_rotary_by_the_names_of_flash_attn():
    """By positions in the orders of flash-attn 2 and 3, with an int as cache_seqlens."""
    q, k, v = (torch.randn(3, 2, n, 16) for n in (4, 2, 2))
    before, (cos, sin) = torch.randn(2, 3, 20, 2, 16), torch.randn(2, 100, 8)
    want_caches = before.clone()
    want = attention_with_kvcache(rows_first(q), *map(rows_first, want_caches), ints(9, 9, 9, device="cpu"),
                                  k=rows_first(k), v=rows_first(v), causal=True, rotary_cos=cos, rotary_sin=sin,
                                  rotary_seqlens=ints(50, 50, 50, device="cpu"), rotary_interleaved=False)
    for call, arguments, options in (
            (flash_attn_with_kvcache, (None, cos, sin, 9), dict(rotary_seqlens=ints(50, 50, 50, device="cpu"))),
            (with_kvcache_of_flash_attn_2, (cos[41:], sin[41:], 9), {})):
        caches = before.clone()
        out = call(q, *caches, k, v, *arguments, causal=True, rotary_interleaved=False, **options)
        assert out.equal(rows_first(want)) and caches.equal(want_caches) and not caches.equal(before)


@cpu
def test_names_of_one_argument():
    x = serving()
    lengths = dict(cu_seqlens_q=x.given["cu_seqlens_q"], causal=True)
    table, sinks = x.given["page_table"], x.given["sinks"]
    for call, seqused in ((flash_attn_varlen_func, "seqused_k"), (flash_attn_with_kvcache, "cache_seqlens")):
        for of_table, of_sinks in (("block_table", "s_aux"), ("page_table", "learnable_sink"), ("page_table", "sinks")):
            got = call(x.q, *x.caches, **lengths, **{seqused: x.given["seqused_k"], of_table: table, of_sinks: sinks},
                       backend="reference")
            assert got.equal(x.want[0])
        with pytest.raises(TypeError, match=f"{call.__name__}: .* are names of the same argument"):
            call(x.q, *x.caches, **lengths, block_table=table, page_table=table)
        with pytest.raises(TypeError, match=f"{call.__name__}: s_aux and sinks are names of the same argument"):
            call(x.q, *x.caches, **lengths, s_aux=sinks, sinks=sinks)


@cpu
def test_varlen_func_with_lengths_of_flash_attn_2():
    """cu_seqlens_k with a page table says how many keys a sample has, and nothing else."""
    x = serving()
    out, lse, probs = flash_attn_varlen_func(
        x.q, *x.caches, x.given["cu_seqlens_q"], ints(0, 9, 14, 47, device="cpu"), 5, 33, 0.0, None, True,
        block_table=x.given["page_table"], sinks=x.given["sinks"], return_attn_probs=True, backend="reference")
    assert out.equal(x.want[0]) and lse.equal(x.want[1]) and probs is None


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
