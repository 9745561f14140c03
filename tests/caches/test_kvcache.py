"""Attention to caches of keys and values, in one tensor and in pages: every backend against a loop over rows in fp64.

test_cache_names.py has flash-attn's names, test_cache_errors.py bad input.
"""

import math

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from cached_calls import BACKENDS, DEVICE, GARBAGE, Call, by_loop, check_call, ints, make, on_device
from cases import check_error, check_lse
from conftest import HAS_GPU
from minimal_attn import attention as interface, attention_with_kvcache, flash_attn_with_kvcache
from minimal_attn.options import Cache, Lengths, Options

cpu = pytest.mark.cpu


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


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
    Call("pages_without_lengths", (4,) * 2, (32, 32), 16, is_paged=True, has_lengths=False),
    Call("pages_batch_idx", (2,) * 3, (9, 0, 20), 4, is_paged=True, has_batch_idx=True, leftpad=(6, 3, 0)),
    Call("pages_shared", (2,) * 3, (9, 4, 20), 4, is_paged=True, shares_pages=True, causal=True),
    Call("packed", (1, 5, 0, 3), (9, 5, 4, 20), 20, is_packed=True, causal=True),
    Call("packed_pages", (1, 5, 0, 3), (9, 5, 4, 20), 4, is_packed=True, is_paged=True, causal=True, has_sinks=True),
    Call("packed_pages_batch_idx", (1, 5, 0), (9, 5, 4), 4, is_packed=True, is_paged=True, has_batch_idx=True,
         leftpad=(6, 0, 3), head_dim_v=40),
    Call("packed_seqused_q", (3, 9, 1), (130, 90, 40), 140, is_packed=True, seqused_q=(1, 9, 0), has_sinks=True),
    Call("seqused_q", (6,) * 3, (100, 70, 90), 105, seqused_q=(2, 0, 6), causal=True, has_sinks=True),
    Call("window", (3,) * 3, (9, 2, 33), 40, window=(4, 1)),
    Call("window_causal_pages", (3,) * 3, (190, 2, 71), 16, is_paged=True, window=(70, -1), causal=True),
    Call("window_leftpad", (1,) * 2, (9, 12), 20, leftpad=(2, 8), window=(3, 0)),
    Call("window_right", (5,) * 3, (147, 0, 66), 155, window=(-1, 1), leftpad=(3, 0, 1)),
    Call("window_of_splits", (5,) * 3, (150, 3, 67), 155, window=(20, 2), num_splits=3),
    Call("window_largest", (2,) * 2, (150, 67), 155, window=(2**31 - 257, 2**31 - 257)),
    Call("softcap", (2,) * 2, (9, 20), 4, is_paged=True, softcap=1.5, sm_scale=2.0),
    Call("negative_scale", (2,) * 3, (150, 0, 67), 155, sm_scale=-0.4, causal=True),
    Call("zero_scale", (2,) * 3, (150, 0, 1), 155, sm_scale=0.0, causal=True),
    Call("alibi", (3,) * 2, (9, 20), 4, is_paged=True, slopes="heads"),
    Call("alibi_of_samples", (3, 1), (9, 20), 4, is_paged=True, is_packed=True, slopes="samples", causal=True),
    Call("alibi_leftpad", (2,) * 2, (9, 12), 20, leftpad=(2, 8), slopes="samples"),
    Call("all_options", (4,) * 3, (150, 0, 67), 3, is_paged=True, softcap=2.0, slopes="samples", has_sinks=True,
         window=(30, 1)),
    Call("head_dim_v", (2,) * 2, (9, 20), 4, is_paged=True, D=24, head_dim_v=40),
    Call("head_dim_256", (1,) * 3, (70, 0, 30), 75, D=192, head_dim_v=256),
    Call("gqa_of_3", (3,) * 2, (90, 130), 3, is_paged=True, causal=True, H=6),
    Call("gqa_of_20", (2,) * 2, (90, 130), 135, causal=True, H=20, Hk=1),
    Call("interleaved", (2,) * 2, (9, 20), 16, is_paged=True, layout="interleaved", causal=True),
    Call("interleaved_dense", (2,) * 2, (9, 20), 24, layout="interleaved", head_dim_v=8),
    Call("rows", (2,) * 2, (9, 20), 4, is_paged=True, layout="rows"),
    Call("slice", (2,) * 2, (9, 20), 4, is_paged=True, layout="slice"),
    # Keys beyond a block of a kernel, which may be split, and rows beyond a tile.
    Call("one_split", (3,) * 3, (150, 0, 2), 16, is_paged=True, num_splits=1, causal=True, has_sinks=True),
    Call("three_splits", (1,) * 3, (200, 0, 67), 205, num_splits=3),
    Call("splits_of_pages", (2,) * 2, (90, 700), 16, is_paged=True, num_splits=4, has_sinks=True),
    Call("many_splits", (1,) * 2, (1100, 65), 1105, num_splits=256, H=2, Hk=1, slopes="heads"),  # late maxima
    Call("pages_of_100", (1,) * 3, (50, 98, 102), 100, is_paged=True, leftpad=(100, 1, 99)),
    Call("several_tiles", (21,) * 2, (130, 17), 135, causal=True, H=3, Hk=1),
    Call("too_many_rows_to_split", (40,) * 2, (140, 30), 16, is_paged=True, causal=True),
    Call("packed_tiles", (7, 30, 1), (80, 66, 140), 145, is_packed=True, causal=True, H=3, Hk=1),
    Call("packed_beyond_max_seqlen_q", (1, 20, 1), (130, 140, 66), 16, is_packed=True, is_paged=True, causal=True,
         max_seqlen_q=2),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_against_a_loop(backend, call, poisoned_outputs):
    check_call(backend, call, BACKENDS[backend])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_results_are_within_the_error_rule(backend, dtype):
    call = Call("pages", (3,) * 3, (9, 0, 137), 4, is_paged=True, causal=True, has_sinks=True, slopes="heads", D=64)
    for call in call, Call("dense", (1,) * 3, (150, 9, 67), 155, sm_scale=0.5, D=64):
        inputs = make(call, dtype)
        want, want_lse = by_loop(call, *inputs)
        *qkv, given = inputs
        base = attention_with_kvcache(*qkv, **given, **call.options(), backend="reference")
        given = {name: on_device(x) for name, x in given.items()}

        def attend():
            return attention_with_kvcache(*map(on_device, qkv), **given, **call.options(), return_lse=True,
                                          backend=backend)

        if HAS_GPU and backend == "cuda" and dtype == torch.float32:
            with pytest.raises(TypeError, match="q is torch.float32"):
                attend()
            return
        out, lse = attend()
        check_error(out.cpu(), want, base, factor=4 if HAS_GPU or dtype == torch.float32 else 2)
        check_lse(lse.cpu(), want_lse)


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
    """Judges calls that a seed draws."""
    @hypothesis.seed(seed)
    @settings(max_examples=max_examples, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(call=drawn_calls(), values=st.integers(0, 99))
    def check(call, values):
        check_call(backend, call, BACKENDS[backend], values)

    check()


def test_drawn_calls(backend):
    is_interpreted = backend == "triton" and not HAS_GPU  # a third of a second each
    check_drawn_calls(backend, 0, 20 if is_interpreted else 300 if backend == "cuda" and HAS_GPU else 40)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 11))
def test_10000_drawn_calls(backend, seed):
    if backend == "triton" and not HAS_GPU:
        pytest.skip("an hour in the interpreter")
    check_drawn_calls(backend, seed, 1000)


@pytest.mark.parametrize("is_packed", [False, True])
def test_values_out_of_range_are_clamped(backend, is_packed):
    """Where the host may not read them, kernels take the nearest values that there are."""
    dtype = BACKENDS[backend]
    q = torch.randn(*((1, 4, 6) if is_packed else (3, 4, 2)), 16, dtype=dtype, device=DEVICE)
    pages = torch.randn(5, 2, 4, 16, dtype=dtype, device=DEVICE)
    cu_seqlens_q = ints(0, 2, 4, 6) if is_packed else None

    def run(seqused_k, seqused_q=None, **cache):
        options = Options.of(0.25, (-1, 0), Lengths(cu_seqlens_q, None, seqused_q, seqused_k))
        return interface.BACKENDS[backend].forward_cached(q, pages, pages, options, Cache(**cache))

    table = ints(*GARBAGE, 3, 2, -1, 4, 0, 1, 99).view(3, 3)
    nearest = ints(0, 4, 3, 2, 0, 4, 0, 1, 4).view(3, 3)
    for got, want in [
            (run(ints(-3, 2**31 - 1, 12), page_table=table), run(ints(0, 12, 12), page_table=nearest)),
            (run(ints(9, 12, 12), page_table=table, leftpad_k=ints(-5, 2**31 - 1, 3)),
             run(ints(9, 12, 12), page_table=nearest, leftpad_k=ints(0, 12, 3))),
            (run(ints(99, 4, -2), batch_idx=ints(-1, 5, 3)), run(ints(4, 4, 0), batch_idx=ints(0, 4, 3))),
            (run(None, batch_idx=ints(0, 1, 2), leftpad_k=ints(2**31 - 1, 4, -9)),
             run(None, batch_idx=ints(0, 1, 2), leftpad_k=ints(4, 4, 0))),
            (run(ints(9, 2, 4), ints(2**31 - 1, 1, -1), page_table=nearest),
             run(ints(9, 2, 4), ints(2, 1, 0), page_table=nearest))]:
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
    options = Options.of(0.25, lengths=Lengths(seqused_k=ints(3, 5, device="cpu")))
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


@pytest.mark.parametrize("backend, name", [
    ("reference", "leftpad_batch_idx"), ("torch", "packed_pages_batch_idx"), ("triton", "packed_pages_batch_idx"),
    ("cuda", "packed_pages_batch_idx"), ("cuda", "leftpad_batch_idx")])
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


def test_rows_that_a_page_table_has_not():
    """They have no pages, so that kernels take the nearest. The host reads no numbers where torch.compile traces."""
    q, pages = (torch.randn(n, 2, s, 16, device=DEVICE) for n, s in ((3, 1), (6, 4)))

    def attend(table, rows):
        return attention_with_kvcache(q, pages, pages, page_table=table, cache_batch_idx=rows, backend="torch")

    torch._dynamo.reset()
    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(ints(0, 1, 2, 3).view(2, 2), ints(-1, 2, 1))
    assert_close(got, attend(ints(0, 0, 0, 0, 2, 3).view(3, 2), None))


# On GPUs.

@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("rows, size, D, head_dim_v, dtype", [  # tiles are alike for both types of 16 bits
    (1, 16, 64, 64, torch.float16), (5, 1, 128, 128, torch.bfloat16), (70, 256, 256, 256, torch.bfloat16),
    (1, 0, 192, 128, torch.float16), (5, 256, 40, 80, torch.float16), (70, 16, 64, 64, torch.float32),
    (70, 0, 128, 128, torch.bfloat16), (1, 1, 256, 256, torch.float32), (5, 16, 192, 128, torch.float32),
    (1, 256, 40, 80, torch.float32), (5, 0, 128, 128, torch.float32)], ids=str)
def test_large_caches(backend, rows, size, D, head_dim_v, dtype):
    if backend == "cuda" and dtype == torch.float32:
        pytest.skip("reads 16 bits alone")
    call = Call("large", (rows,) * 3, (3000, 1, 700), size or 3005, bool(size), causal=True, H=8, D=D,
                head_dim_v=head_dim_v)
    *qkv, given = make(call, dtype)
    q, k, v = map(on_device, qkv)
    given = {name: on_device(x) for name, x in given.items()}

    def attend(dtype, backend):
        return attention_with_kvcache(*(x.to(dtype) for x in (q, k, v)), **given, causal=True, return_lse=True,
                                      backend=backend)

    (out, lse), (want, want_lse) = attend(dtype, backend), attend(torch.float64, "reference")
    factor = 2 if backend == "triton" and dtype != torch.float32 else 4
    check_error(out, want, attend(dtype, "reference")[0], factor=factor)
    check_lse(lse, want_lse)
