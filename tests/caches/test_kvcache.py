"""Attention to caches of keys and values, in one tensor and in pages: every backend against a loop over rows in fp64.

test_cache_names.py has flash-attn's names, test_cache_errors.py bad input.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch.testing import assert_close

from cached_calls import (BACKENDS, DEVICE, GARBAGE, TOLERANCE, Call, backend, by_loop, check_call, close,  # noqa: F401
                          ints, make, on_device)
from cases import check_drawn, check_error, check_lse, each_seed
from conftest import HAS_GPU, captured, needs_gib
from minimal_attn import attention as interface, attention_with_kvcache, flash_attn_with_kvcache, pack_tree_mask
from minimal_attn.backends import triton as twin
from minimal_attn.options import Cache, Lengths, Options

twin.why_not_imported()  # registers the twin and its ops
cpu = pytest.mark.cpu


def draft(parents):
    """bool (Sq, Sq) of tokens with these parents, which are tokens before them or -1 for none."""
    is_seen = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            is_seen[token] |= is_seen[parent]
    return is_seen


CAUSAL, BRANCHES = draft(range(-1, 4)), draft([-1, 0, 0, 1, 2])  # five tokens, in one branch and in two
EACH = torch.stack([BRANCHES, CAUSAL, ~CAUSAL])  # the last one hides all new keys of some rows
PARENTS = torch.arange(64) - 1 - torch.randint(3, (64,), generator=torch.Generator().manual_seed(0))
CALLS = [
    Call("decode", (1,) * 3, (9, 1, 20), 20),
    Call("decode_without_lengths", (1,) * 2, (20, 20), 20, has_lengths=False),
    Call("no_keys_sinks", (2,) * 3, (0, 5, 1), 8, has_sinks=True, causal=True),
    Call("some_rows_causal", (5,) * 3, (9, 3, 20), 20, causal=True),  # the second sample has rows without keys
    Call("batch_idx", (2,) * 3, (9, 7, 20), 20, has_batch_idx=True),
    Call("leftpad", (2,) * 3, (9, 0, 12), 20, leftpad=(3, 5, 0), causal=True),
    Call("leftpad_batch_idx", (1,) * 2, (9, 4), 20, leftpad=(3, 16), has_batch_idx=True),
    *(Call(f"pages_of_{size}", (1,) * 3, (9, 0, 33), size, is_paged=True) for size in (1, 16)),
    Call("pages_without_lengths", (4,) * 2, (32, 32), 16, is_paged=True, has_lengths=False),
    Call("pages_batch_idx", (2,) * 3, (9, 0, 20), 4, is_paged=True, has_batch_idx=True, leftpad=(6, 3, 0)),
    Call("pages_shared", (2,) * 3, (9, 4, 20), 4, is_paged=True, shares_pages=True, causal=True),
    Call("packed_pages", (1, 5, 0, 3), (9, 5, 4, 20), 4, is_packed=True, is_paged=True, causal=True, has_sinks=True),
    Call("packed_pages_batch_idx", (1, 5, 0), (9, 5, 4), 4, is_packed=True, is_paged=True, has_batch_idx=True,
         leftpad=(6, 0, 3), head_dim_v=40),
    Call("packed_seqused_q", (3, 9, 1), (130, 90, 40), 140, is_packed=True, seqused_q=(1, 9, 0), has_sinks=True),
    Call("seqused_q", (6,) * 3, (100, 70, 90), 105, seqused_q=(2, 0, 6), causal=True, has_sinks=True),
    Call("window", (3,) * 3, (9, 2, 33), 40, window=(4, 1)),
    Call("window_causal_pages", (3,) * 3, (190, 2, 71), 16, is_paged=True, window=(70, -1), causal=True),
    Call("window_right", (5,) * 3, (147, 0, 66), 155, window=(-1, 1), leftpad=(3, 0, 1)),
    Call("window_of_splits", (5,) * 3, (150, 3, 67), 155, window=(20, 2), num_splits=3),
    Call("window_largest", (2,) * 2, (150, 67), 155, window=(2**31 - 257, 2**31 - 257)),
    Call("chunks", (1,) * 4, (90, 1, 33, 64), 95, chunk=32),
    Call("chunks_causal_pages", (5,) * 3, (190, 2, 66), 16, is_paged=True, causal=True, chunk=64, has_sinks=True),
    Call("chunks_packed", (1, 40, 3), (9, 130, 70), 140, is_packed=True, causal=True, chunk=50, window=(30, 0)),
    Call("softcap", (2,) * 2, (9, 20), 4, is_paged=True, softcap=1.5, sm_scale=2.0),
    Call("negative_scale", (2,) * 3, (150, 0, 67), 155, sm_scale=-0.4, causal=True),
    Call("alibi_of_samples", (3, 1), (9, 20), 4, is_paged=True, is_packed=True, slopes="samples", causal=True),
    Call("all_options", (4,) * 3, (150, 0, 67), 3, is_paged=True, softcap=2.0, slopes="samples", has_sinks=True,
         window=(30, 1)),
    Call("head_dim_v", (2,) * 2, (9, 20), 4, is_paged=True, D=24, head_dim_v=40),
    Call("head_dim_256", (1,) * 3, (70, 0, 30), 75, D=192, head_dim_v=256),
    Call("gqa_of_3", (3,) * 2, (90, 130), 3, is_paged=True, causal=True, H=6),
    Call("gqa_of_20", (2,) * 2, (90, 130), 135, causal=True, H=20, Hk=1),
    Call("interleaved", (2,) * 2, (9, 20), 16, is_paged=True, layout="interleaved", causal=True),
    Call("rows", (2,) * 2, (9, 20), 4, is_paged=True, layout="rows"),
    # Keys beyond a block of a kernel, which may be split, and rows beyond a tile.
    Call("one_split", (3,) * 3, (150, 0, 2), 16, is_paged=True, num_splits=1, causal=True, has_sinks=True),
    Call("splits_of_pages", (2,) * 2, (90, 700), 16, is_paged=True, num_splits=4, has_sinks=True),
    Call("many_splits", (1,) * 2, (1100, 65), 1105, num_splits=256, H=2, Hk=1, slopes="heads"),  # late maxima
    Call("pages_of_100", (1,) * 3, (50, 98, 102), 100, is_paged=True, leftpad=(100, 1, 99)),
    Call("several_tiles", (21,) * 2, (130, 17), 135, causal=True, H=3, Hk=1),
    Call("too_many_rows_to_split", (40,) * 2, (140, 30), 16, is_paged=True, causal=True),
    Call("packed_tiles", (7, 30, 1), (80, 66, 140), 145, is_packed=True, causal=True, H=3, Hk=1),
    Call("packed_beyond_max_seqlen_q", (1, 20, 1), (130, 140, 66), 16, is_packed=True, is_paged=True, causal=True,
         max_seqlen_q=2),
    Call("odd", (2,) * 2, (150, 67), 155, D=17, head_dim_v=70, causal=True, layout="odd"),
    # Tree masks of drafts. The second sample of some has fewer keys than rows.
    Call("tree", (5,) * 3, (90, 3, 70), 95, tree=BRANCHES),
    Call("tree_leftpad", (5,) * 3, (83, 3, 69), 95, leftpad=(7, 0, 1), tree=BRANCHES),
    Call("tree_seqused_q", (5,) * 3, (90, 3, 70), 95, seqused_q=(5, 0, 3), tree=EACH),
    Call("tree_splits", (5,) * 3, (90, 3, 70), 95, num_splits=2, tree=EACH),
    # Bit 63 of a word, more rows than a tile has, and keys that are split.
    Call("tree_of_64", (64,) * 2, (185, 46), 190, leftpad=(5, 20), seqused_q=(64, 33), num_splits=3,
         tree=draft(PARENTS.clamp(min=-1).tolist())),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_against_a_loop(backend, call, poisoned_outputs):
    if HAS_GPU and backend == "cuda" and call.layout == "odd":
        pytest.skip("cannot serve it")
    check_call(backend, call, BACKENDS[backend])


@pytest.mark.parametrize("call, dtype", [
    *((call, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16) for call in (
        Call("pages", (3,) * 3, (9, 0, 137), 4, is_paged=True, causal=True, has_sinks=True, slopes="heads", D=64),
        Call("dense", (1,) * 3, (150, 9, 67), 155, sm_scale=0.5, D=64))),
    *(pytest.param(Call(f"large_{rows}_{size}_{D}", (rows,) * 3, (3000, 1, 700), size or 3005, bool(size), causal=True,
                        H=8, D=D, head_dim_v=head_dim_v), dtype, marks=pytest.mark.gpu)
      for rows, size, D, head_dim_v, dtype in [  # tiles are alike for both types of 16 bits
          (1, 16, 64, 64, torch.float16), (5, 1, 128, 128, torch.bfloat16), (70, 256, 256, 256, torch.bfloat16),
          (1, 0, 192, 128, torch.float16), (5, 256, 40, 80, torch.float16), (70, 16, 64, 64, torch.float32),
          (70, 0, 128, 128, torch.bfloat16), (1, 1, 256, 256, torch.float32), (5, 16, 192, 128, torch.float32),
          (1, 256, 40, 80, torch.float32), (5, 0, 128, 128, torch.float32)])], ids=str)
def test_results_are_within_the_error_rule(backend, call, dtype):
    if "large" in call.name and backend in ("reference", "torch"):
        pytest.skip("of kernels")
    *qkv, given = inputs = make(call, dtype)

    def attend():
        return attention_with_kvcache(*map(on_device, qkv), **{name: on_device(x) for name, x in given.items()},
                                      **call.options(), return_lse=True, backend=backend)

    if HAS_GPU and backend == "cuda" and dtype == torch.float32:
        with pytest.raises(TypeError, match="q is torch.float32"):
            attend()
        return
    out, lse = attend()
    want, want_lse = by_loop(call, *inputs)
    base = attention_with_kvcache(*qkv, **given, **call.options(), backend="reference")
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
    call = Call("drawn", rows, keys, size, is_paged, is_paged and leftpad is None and draw(st.booleans()), is_packed,
                has_batch_idx=draw(st.booleans()), leftpad=leftpad, seqused_q=seqused_q,
                window=(draw(bound), draw(bound)), chunk=draw(st.sampled_from([0, 0, 3, 64])),
                causal=draw(st.booleans()),
                sm_scale=draw(st.sampled_from([None, 0.0, -0.3, 2.0])), softcap=draw(st.sampled_from([0.0, 1.5])),
                has_sinks=draw(st.booleans()), slopes=draw(st.sampled_from([None, "heads", "samples"])),
                num_splits=draw(st.sampled_from([0, 1, 3, 256])), H=Hk * draw(st.integers(1, 4)), Hk=Hk, D=D,
                head_dim_v=draw(st.sampled_from([None, 8, 24])),
                layout=draw(st.sampled_from(["heads", "rows", "interleaved", "slice"])))
    if is_packed or draw(st.integers(0, 2)):
        return call
    is_seen = torch.rand(B, rows[0], rows[0], generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < 0.4
    return replace(call, tree=is_seen, causal=False, window=(-1, -1), chunk=0, slopes=None)


def check_drawn_calls(backend, seed, max_examples):
    check_drawn(lambda call, values: check_call(backend, call, BACKENDS[backend], values), seed, max_examples,
                call=drawn_calls(), values=st.integers(0, 99))


def test_drawn_calls(backend):
    is_interpreted = backend == "triton" and not HAS_GPU  # a third of a second each
    check_drawn_calls(backend, 0, 20 if is_interpreted else 300 if backend == "cuda" and HAS_GPU else 40)


@each_seed
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton" or HAS_GPU])
def test_many_drawn_calls(backend, seed):
    check_drawn_calls(backend, seed, 600)


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


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("sizes", [(0, 16, 3), (4, 0, 3), (4, 16, 0), (0, 16, None), (4, 0, None)], ids=str)
def test_no_keys_where_lengths_are_not_read(backend, sizes):
    """num_sequences, page_size, max_pages: none of them, or one of sequences. The facade serves such calls itself."""
    num_sequences, size, max_pages = sizes
    q, pages = torch.randn(2, 4, 3, 16, device=DEVICE), torch.randn(num_sequences, 2, size, 16, device=DEVICE)
    cache = Cache(batch_idx=ints(1, 1)) if max_pages is None else Cache(ints(*[1] * 2 * max_pages).view(2, max_pages))
    for x in (q, q[:, :, :0]):
        options = Options.of(0.25, lengths=Lengths(seqused_k=ints(3, 5)))
        out, lse = interface.BACKENDS[backend].forward_cached(x, pages, pages, options, cache)
        assert out.equal(torch.zeros_like(x)) and lse.shape == x.shape[:3] and lse.eq(-math.inf).all()


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


def test_rows_that_a_page_table_has_not():
    """They have no pages, so that kernels take the nearest. The host reads no numbers where torch.compile traces."""
    q, pages = (torch.randn(n, 2, s, 16, device=DEVICE) for n, s in ((3, 1), (6, 4)))

    def attend(table, rows):
        return attention_with_kvcache(q, pages, pages, page_table=table, cache_batch_idx=rows, backend="torch")

    torch._dynamo.reset()
    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(ints(0, 1, 2, 3).view(2, 2), ints(-1, 2, 1))
    assert_close(got, attend(ints(0, 0, 0, 0, 2, 3).view(3, 2), None))


# Tree masks.

def test_words_are_served_as_masks(backend):
    *qkv, given = make(next(call for call in CALLS if call.name == "tree_seqused_q"), BACKENDS[backend])
    qkv, given = [on_device(x) for x in qkv], {name: on_device(x) for name, x in given.items()}
    masks = given.pop("tree_mask")
    for mask in (masks, masks[0]):
        words = pack_tree_mask(mask)
        strided = torch.stack([words, words], -1)[..., 0]
        want = attention_with_kvcache(*qkv, **given, tree_mask=mask, backend=backend)
        for x in (words, strided):
            assert attention_with_kvcache(*qkv, **given, tree_mask=x, backend=backend).equal(want)


@cpu
def test_pack_tree_mask():
    assert pack_tree_mask(BRANCHES).tolist() == [0b00001, 0b00011, 0b00101, 0b01011, 0b10101]
    assert pack_tree_mask(torch.ones(64, 64).bool()).eq(-1).all()
    last = torch.zeros(2, 64, 64).bool()
    last[1, 3, 63] = True
    words = pack_tree_mask(last)
    assert (words.shape, words.dtype, words.is_contiguous()) == ((2, 64), torch.int64, True)
    assert words[1, 3] == -2**63 and words.count_nonzero() == 1
    assert pack_tree_mask(torch.ones(0, 0).bool()).shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_graph_serves_other_trees(backend):
    call = next(call for call in CALLS if call.name == "tree")
    *qkv, given = make(call, torch.float16)
    qkv, given = [on_device(x) for x in qkv], {name: on_device(x) for name, x in given.items()}
    words = given["tree_mask"] = pack_tree_mask(given["tree_mask"]).repeat(3, 1)
    graph, (out, _) = captured(lambda: attention_with_kvcache(*qkv, **given, return_lse=True, backend=backend))
    words.copy_(pack_tree_mask(CAUSAL))
    graph.replay()
    causal = replace(call, tree=CAUSAL)
    close(out, by_loop(causal, *make(causal, torch.float16))[0], TOLERANCE[torch.float16])


# Triton's op.

def on_triton(call, dtype=torch.float32):
    """The tensors of a call, and the arguments that attention_with_kvcache takes beside them."""
    *qkv, given = make(call, dtype)
    given = {name: on_device(x) for name, x in given.items()}
    return [on_device(x) for x in qkv], dict(given, **call.options(), return_lse=True, backend="triton")


@pytest.mark.parametrize("call", [
    Call("decode", (1,) * 4, (190, 30, 300, 65), 16, is_paged=True, has_sinks=True),
    Call("packed", (1, 6, 0, 3), (190, 30, 100, 65), 16, is_paged=True, is_packed=True, causal=True),
    Call("windows", (2,) * 4, (190, 30, 100, 65), 3, is_paged=True, window=(90, 0))], ids=str)
def test_a_sample_has_the_same_bits_in_every_batch(call):
    """Also where the cache has more room."""
    (q, k, v), options = on_triton(call)
    out, lse = attention_with_kvcache(q, k, v, **options)
    for b, (rows, keys) in enumerate(zip(call.rows, call.keys)):
        begin, num_pages = sum(call.rows[:b]), -(-keys // call.size)
        own = (slice(1), slice(None), slice(begin, begin + rows)) if call.is_packed else slice(b, b + 1)
        alone = dict(options, seqused_k=ints(keys), page_table=options["page_table"][b:b + 1, :num_pages])
        if call.is_packed:
            alone |= dict(cu_seqlens_q=ints(0, rows), max_seqlen_q=max(call.rows))
        for got, want in zip(attention_with_kvcache(q[own], k, v, **alone), (out[own], lse[own])):
            assert torch.equal(got, want), b


def test_a_wrong_cu_seqlens_reads_nothing_outside():
    call = Call("any", (2, 1, 2), (21,) * 3, 7, is_paged=True, is_packed=True)
    (q, k, v), options = on_triton(call)
    lengths = Lengths(ints(1, 2, 900, 4))
    inputs = (*(x.nan_to_num(0.5) for x in (q, k, v)), Options.of(0.3, lengths=lengths),
              Cache(options["page_table"], max_seqlen_q=2))
    for got, want in zip(*(interface.BACKENDS[name].forward_cached(*inputs) for name in ("triton", "reference"))):
        close(got, want.double().cpu(), 2e-5)


@pytest.mark.parametrize("call", [
    Call("dense", (3, 3), (70, 3), 75, has_batch_idx=True),
    Call("pages", (2, 2), (69, 3), 16, is_paged=True, leftpad=(1, 0), head_dim_v=24, has_sinks=True),
    Call("packed", (2, 1), (70, 3), 16, is_paged=True, is_packed=True, slopes="heads")], ids=str)
def test_opcheck(call):
    (q, k, v), given = on_triton(call)
    tree = None if call.is_paged else pack_tree_mask(torch.eye(3, dtype=torch.bool)).repeat(2, 1).to(DEVICE)
    torch.library.opcheck(torch.ops.minimal_attn.triton_decode.default, (
        *(x.nan_to_num(0.5) for x in (q, k, v)), given.get("cu_seqlens_q"), None, given["seqused_k"],
        given.get("page_table"), given.get("cache_batch_idx"), given.get("leftpad_k"), tree, given.get("sinks"),
        given.get("alibi_slopes"), 0.25, 0.0, -1, -1, 0, given.get("max_seqlen_q", 0)))


@pytest.mark.gpu
@needs_gib(24)
@pytest.mark.parametrize("is_paged", [False, True])
def test_cache_beyond_int32(is_paged, much_memory):
    """The last sequence, or page, begins beyond 2^31 elements."""
    k = torch.empty(2**12 + 8, 8, 1024, 64, dtype=torch.float16, device=DEVICE)
    k[-1] = torch.randn(k.shape[1:], device=DEVICE)
    last = k.shape[0] - 1
    q = torch.randn(1, 8, 1, 64, dtype=torch.float16, device=DEVICE)
    cache = Cache(ints(last).view(1, 1)) if is_paged else Cache(None, ints(last))
    forward, reference = (interface.BACKENDS[name].forward_cached for name in ("triton", "reference"))
    want, _ = reference(q.double(), k[-1:].double(), k[-1:].double(), Options.of(0.3), Cache())
    close(forward(q, k, k, Options.of(0.3), cache)[0], want.cpu(), 3e-3)
