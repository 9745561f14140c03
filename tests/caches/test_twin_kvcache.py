"""Attention to a cache of keys and values in Triton, against the copies of minimal_attn/pages.py in fp64.

Every key that no sample has is NaN: those of pages that no table names, beyond a sample's end and before its beginning.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Optional

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from cases import check_error, check_lse, make_tensor, rows_of_base  # noqa: E402
from conftest import HAS_GPU, captured, needs_gib  # noqa: E402

from minimal_attn import twin  # noqa: E402
from minimal_attn.backends import Cache, Lengths, Options  # noqa: E402
from minimal_attn.pages import over_gathered  # noqa: E402
from minimal_attn.reference import BACKEND as REFERENCE  # noqa: E402
from minimal_attn.tree_mask import pack_tree_mask  # noqa: E402
from triton_ref import decode, ops  # noqa: E402

DEVICE = "cuda" if HAS_GPU else "cpu"
CAUSAL, NONE = (-1, 0), (-1, -1)

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@dataclass(frozen=True)
class Case:
    """tokens: of each sample, the same number or with packed=True several. keys: where each sample's keys end."""

    name: str
    tokens: tuple = (1, 1, 1)
    keys: tuple = (150, 0, 67)
    packed: bool = False
    page_size: int = 0  # 0: one tensor of sequences
    leftpad: Optional[tuple] = None
    batch_idx: Optional[tuple] = None
    seqused_q: Optional[tuple] = None
    window: tuple = NONE
    softcap: float = 0.0
    alibi: str = ""  # "H" or "BH"
    sinks: bool = False
    num_splits: int = 0
    max_seqlen_q: int = 0
    heads: tuple = (4, 2)
    head_dims: tuple = (16, 16)
    tree: bool = False  # a tree mask, drawn, in which a row sees itself
    scale: float = 0.3
    layout: str = "bhsd"
    dtype: torch.dtype = torch.float32

    def __str__(self):
        return self.name


CASES = [
    Case("dense"),
    Case("one_split", num_splits=1),
    Case("three_splits", num_splits=3, keys=(200, 0, 67)),
    Case("many_splits", num_splits=256, keys=(1100, 65), tokens=(1, 1), heads=(2, 1), alibi="H"),  # late maxima
    Case("batch_idx", batch_idx=(3, 0, 4), leftpad=(3, 0, 60), layout="bshd"),
    Case("page_size_1", page_size=1, keys=(70, 0, 9)),
    Case("page_size_3", page_size=3, leftpad=(0, 0, 4), window=CAUSAL, tokens=(2, 2, 2)),
    Case("page_size_16", page_size=16, num_splits=3, layout="bshd"),
    Case("page_size_100", page_size=100, keys=(150, 99, 201), leftpad=(100, 1, 99), num_splits=1),
    Case("leftpad_beyond_keys", leftpad=(150, 5, 80)),
    Case("four_tokens_causal", tokens=(4, 4, 4), window=CAUSAL, keys=(150, 0, 2), page_size=16),
    Case("several_tiles", tokens=(21, 21), keys=(130, 17), window=CAUSAL, heads=(3, 1)),
    Case("too_many_rows_to_split", tokens=(40, 40), keys=(140, 30), window=CAUSAL, page_size=16),
    Case("group_3", heads=(6, 2), tokens=(3, 3), keys=(90, 130), page_size=3, window=CAUSAL),
    Case("group_20", heads=(20, 1), tokens=(2, 2), keys=(90, 130), window=CAUSAL),
    Case("seqused_q", tokens=(6, 6, 6), seqused_q=(2, 0, 6), keys=(100, 70, 90), window=CAUSAL, sinks=True),
    Case("packed", packed=True, tokens=(1, 0, 5, 2), keys=(70, 80, 150, 0), window=CAUSAL, page_size=16,
         heads=(2, 1)),
    Case("packed_dense", packed=True, tokens=(3, 1), keys=(130, 66), max_seqlen_q=3, batch_idx=(1, 0)),
    Case("packed_seqused_q", packed=True, tokens=(3, 9, 1), seqused_q=(1, 9, 0), keys=(130, 90, 40), sinks=True,
         max_seqlen_q=9),
    Case("packed_beyond_max_seqlen_q", packed=True, tokens=(1, 20, 1), keys=(130, 140, 66), max_seqlen_q=2,
         window=CAUSAL, page_size=16),
    Case("packed_group_3", packed=True, tokens=(7, 30, 1), keys=(80, 66, 140), heads=(3, 1), window=CAUSAL),
    Case("window", tokens=(3, 3, 3), window=(70, 0), keys=(190, 20, 71), page_size=16),
    Case("window_both_sides", tokens=(5, 5, 5), window=(20, 2), keys=(150, 3, 67), num_splits=3),
    Case("window_largest", tokens=(2, 2, 2), window=(2**31 - 257, 2**31 - 257)),
    Case("window_right", tokens=(5, 5, 5), window=(-1, 1), leftpad=(3, 0, 1)),
    Case("softcap", softcap=1.5, page_size=16),
    Case("alibi", alibi="H", tokens=(2, 2, 2), window=CAUSAL, leftpad=(10, 0, 3)),
    Case("alibi_of_samples_packed", alibi="BH", packed=True, tokens=(2, 3, 1), page_size=3, heads=(6, 2),
         max_seqlen_q=3),
    Case("softcap_alibi_sinks", softcap=2.0, alibi="BH", sinks=True, window=(30, 1), tokens=(4, 4, 4), page_size=3),
    Case("sinks", sinks=True, page_size=16),
    Case("sinks_one_split", sinks=True, num_splits=1, tokens=(3, 3, 3), window=CAUSAL, keys=(150, 0, 2)),
    Case("negative_scale", scale=-0.4, window=CAUSAL, tokens=(2, 2, 2)),
    Case("zero_scale", scale=0.0, window=CAUSAL, tokens=(2, 2, 2), keys=(150, 0, 1)),
    Case("large_scale", scale=30.0),
    Case("head_dims", head_dims=(40, 24), page_size=3),
    Case("head_dim_v_larger", head_dims=(17, 70), layout="odd"),
    Case("head_dim_256", head_dims=(192, 256), keys=(70, 0, 30)),
    Case("tree", tree=True, tokens=(7, 7, 7), keys=(150, 3, 70), page_size=16, sinks=True),
    Case("tree_of_64_seqused_q", tree=True, tokens=(64, 64), seqused_q=(64, 33), keys=(190, 66), leftpad=(5, 20),
         num_splits=3),
    Case("fp16", dtype=torch.float16, page_size=16, tokens=(2, 2, 2), window=CAUSAL),
    Case("bf16", dtype=torch.bfloat16, page_size=16, alibi="H", softcap=3.0),
]


def int32(values):
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=DEVICE)


def values(*shape, sample=0, name="q"):
    """Normal values, which depend on the sample and the name alone."""
    generator = torch.Generator().manual_seed(10 * sample + "qkvsa".index(name))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)


def tree_of(case):
    """The words (B, Sq) of a case's tree mask."""
    rows = case.tokens[0]
    is_seen = torch.rand(len(case.keys), rows, rows, generator=torch.Generator().manual_seed(5)) < 0.5
    return pack_tree_mask(is_seen | torch.eye(rows, dtype=torch.bool)).to(DEVICE)


def make(case, samples=None):
    """(q, k, v, options, cache). samples: their numbers, which decide their values; 0 and up by default."""
    batch_size, (nheads, nheads_k) = len(case.keys), case.heads
    samples = samples or range(batch_size)
    total = sum(case.tokens) + 3 if case.packed else max(case.tokens)  # three rows belong to no sample
    q = make_tensor((1 if case.packed else batch_size, nheads, total, case.head_dims[0]), case.dtype, DEVICE)
    q.fill_(math.nan)
    size = case.page_size or max(case.keys) + 5
    max_pages = -(-max(case.keys) // size) + 1
    num_sequences = batch_size * max_pages + 2 if case.page_size else max(case.batch_idx or [batch_size]) + 2
    k, v = (make_tensor((num_sequences, nheads_k, size, head_dim), case.dtype, DEVICE, case.layout).fill_(math.nan)
            for head_dim in case.head_dims)
    # Pages in any order. What a table says beyond a sample's keys is nonsense.
    order = torch.randperm(num_sequences, generator=torch.Generator().manual_seed(1)).tolist()
    table = torch.full((batch_size, max_pages), -(2**31), dtype=torch.int32)
    begin = 0
    for b, sample in enumerate(samples):
        used = case.tokens[b] if case.seqused_q is None else case.seqused_q[b]
        place = (0, slice(None), slice(begin, begin + used)) if case.packed else (b, slice(None), slice(0, used))
        q[place] = values(nheads, used, case.head_dims[0], sample=sample).to(case.dtype)
        begin += case.tokens[b]
        for i in range(-(-case.keys[b] // size) if case.page_size else 0):
            table[b, i] = order.pop()
        for x, name, head_dim in ((k, "k", case.head_dims[0]), (v, "v", case.head_dims[1])):
            keys = values(case.keys[b], nheads_k, head_dim, sample=sample, name=name).to(case.dtype)
            for row in range(case.leftpad[b] if case.leftpad else 0, case.keys[b]):
                sequence = table[b, row // size] if case.page_size else case.batch_idx[b] if case.batch_idx else b
                x[sequence, :, row % size] = keys[row]
    cu_seqlens_q = [sum(case.tokens[:b]) for b in range(batch_size + 1)] if case.packed else None
    lengths = Lengths(int32(cu_seqlens_q), None, int32(case.seqused_q), int32(case.keys))
    alibi_slopes = None
    if case.alibi:
        alibi_slopes = values(batch_size if case.alibi == "BH" else 1, nheads, name="a").float().abs() * 0.1
        alibi_slopes = alibi_slopes if case.alibi == "BH" else alibi_slopes[0]
    sinks = values(nheads, name="s").float() if case.sinks else None
    options = Options(case.scale, case.window, lengths, sinks, softcap=case.softcap, alibi_slopes=alibi_slopes)
    cache = Cache(table.to(DEVICE) if case.page_size else None, int32(case.batch_idx), int32(case.leftpad),
                  tree_of(case) if case.tree else None, case.num_splits, case.max_seqlen_q)
    return q, k, v, options, cache


reference = over_gathered(REFERENCE.forward)


def exact(q, k, v, options, cache):
    """(out, lse) in fp64."""
    sinks = None if options.sinks is None else options.sinks.double()
    return reference(*(x.double() for x in (q, k, v)), options._replace(sinks=sinks), cache)


def base(q, k, v, options, cache):
    """The reference's out in the dtype of the inputs. Rows that rows_of_base adds are padding."""
    rows, lengths = rows_of_base(q), options.lengths
    if rows.shape != q.shape and lengths.seqused_q is None:
        options = options._replace(lengths=lengths._replace(seqused_q=int32([1] * lengths.num_samples(q))))
    return reference(rows, k, v, options, cache)[0][:, :, :q.shape[2]]


def check(inputs, results):
    """By the project's error rule. lse is -inf in exactly the rows that see no key and have no sink.

    In fp32 on a GPU it is twice the rule, as test_forward.py has it for small shapes: of so few keys, the order of
    cuBLAS's sums decides by how much its error is below that of others.
    """
    (out, lse), (want, want_lse) = results, exact(*inputs)
    check_error(out, want, base(*inputs), factor=4 if out.is_cuda and out.dtype == torch.float32 else 2)
    check_lse(lse, want_lse)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cache_is_that_of_fp64(case):
    inputs = make(case)
    check(inputs, ops.forward_cached(*inputs))


def of_one_tensor(x, y):
    """Copies of two caches, x in the even and y in the odd heads of one tensor (N, S, heads, D)."""
    both = torch.stack([x, y], 2).flatten(1, 2).transpose(1, 2).contiguous().transpose(1, 2)
    return both[:, ::2], both[:, 1::2]


def test_keys_and_values_may_alternate_in_memory():
    q, k, v, options, cache = make(Case("pages", page_size=16, tokens=(2, 2, 2), window=CAUSAL))
    inputs = q, *of_one_tensor(k, v), options, cache
    assert inputs[1].stride(1) == 2 * k.shape[-1]
    assert all(map(torch.equal, ops.forward_cached(*inputs), ops.forward_cached(q, k, v, options, cache)))


@pytest.mark.parametrize("page_size", [0, 7])
def test_values_out_of_range_are_clamped(page_size):
    q, k, v, options, cache = make(Case("any", page_size=page_size, tokens=(2, 2, 2)))
    k, v = k.nan_to_num_(0.5), v.nan_to_num_(-0.5)  # NaN around them
    capacity, extreme = k.shape[2] * (cache.page_table.shape[1] if page_size else 1), 2**31 - 1
    options = options._replace(lengths=Lengths(None, None, int32([extreme, 2, -1]), int32([extreme, capacity, 70])))
    cache = Cache(leftpad_k=int32([-extreme, 40, -1]))
    if page_size:
        table = torch.arange(capacity // page_size).repeat(3, 1) % k.shape[0]
        table[:, ::2] = torch.tensor([extreme, -1, k.shape[0]])[:, None]
        cache = cache._replace(page_table=int32(table.tolist()))
    else:
        cache = cache._replace(batch_idx=int32([-extreme, extreme, k.shape[0]]))
    inputs = q.nan_to_num_(0.5), k, v, options, cache
    check(inputs, ops.forward_cached(*inputs))
    options = options._replace(lengths=options.lengths._replace(seqused_k=int32([-5, 0, capacity])))
    inputs = q, k, v, options, cache._replace(leftpad_k=int32([extreme, 3, extreme]))
    out, lse = ops.forward_cached(*inputs)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("packed", [False, True])
def test_cu_seqlens_and_lengths_of_keys_may_be_missing(packed):
    q, k, v, options, cache = make(Case("any", packed=packed, tokens=(2, 1, 2), page_size=7, max_seqlen_q=2))
    lengths = options.lengths._replace(seqused_k=None, cu_seqlens_q=int32([1, 2, 900, 4]) if packed else None)
    inputs = q.nan_to_num_(0.5), k.nan_to_num_(0.5), v.nan_to_num_(0.5), options._replace(lengths=lengths), cache
    check(inputs, ops.forward_cached(*inputs))


@pytest.mark.parametrize("sizes", [(0, 16, 3), (4, 0, 3), (4, 16, 0), (0, 16, None), (4, 0, None)], ids=str)
def test_caches_without_keys(sizes):
    """num_sequences, page_size, max_pages: none of them, or one of sequences."""
    num_sequences, size, max_pages = sizes
    q, k, v = torch.randn(2, 4, 1, 16, device=DEVICE), *torch.randn(2, num_sequences, 2, size, 16, device=DEVICE)
    cache = Cache(None if max_pages is None else int32([[1] * max_pages] * 2))
    inputs = q, k, v, Options(0.3), cache
    check(inputs, ops.forward_cached(*inputs))


def test_call_without_rows():
    q, k, v = (torch.randn(n, 2, 8, 16, device=DEVICE) for n in (2, 2, 2))
    for x in (q[:0], q[:, :, :0]):
        out, lse = ops.forward_cached(x, k, v, Options(0.3), Cache())
        assert out.shape == x.shape and lse.shape == x.shape[:3]


@pytest.mark.parametrize("num_splits, splits", [(0, [3, 1, 2]), (2, [2, 1, 2]), (1, None)])
def test_keys_are_split_by_their_number(num_splits, splits, monkeypatch):
    """What _decode does not store stays NaN."""
    stored = []

    class Launch(decode.Launch):
        def __call__(self, *arguments):
            super().__call__(*arguments)
            stored.append(arguments[7] if self.function is decode._decode else None)

    monkeypatch.setattr(decode, "Launch", Launch)
    monkeypatch.setattr(decode, "_plans", {})
    ops.forward_cached(*make(Case("any", keys=(190, 64, 65), num_splits=num_splits)))
    if splits is None:
        assert stored == [None]  # one kernel, without partial results
    else:
        assert len(stored) == 2
        is_stored = ~stored[0].isnan()  # (B, Hk, max_splits, rows)
        assert is_stored.sum(2).eq(int32([n if n > 1 else 0 for n in splits])[:, None, None]).all()


@pytest.mark.parametrize("case", [
    Case("decode", keys=(190, 30, 300, 65), tokens=(1, 1, 1, 1), page_size=16, sinks=True),
    Case("packed", keys=(190, 30, 100, 65), tokens=(1, 6, 0, 3), packed=True, window=CAUSAL, max_seqlen_q=6),
    Case("windows", keys=(190, 30, 100, 65), tokens=(2, 2, 2, 2), window=(90, 0), page_size=3)], ids=str)
def test_a_sample_has_the_same_bits_in_every_batch(case):
    """Also where the cache has more room."""
    out, lse = ops.forward_cached(*make(case))
    begin = 0
    for b, tokens in enumerate(case.tokens):
        alone = dataclasses.replace(case, tokens=(tokens,), keys=(case.keys[b],))
        of_sample = ops.forward_cached(*make(alone, samples=[b]))
        for got, want in zip(of_sample, (out, lse)):
            want = want[0, :, begin:begin + tokens] if case.packed else want[b]
            assert torch.equal(got[0, :, :tokens], want), b
        begin += tokens


CHECKED = [Case("dense", batch_idx=(2, 0), tokens=(1, 1), keys=(70, 3)),
           Case("pages", page_size=16, tokens=(2, 2), keys=(70, 3), leftpad=(1, 0), head_dims=(16, 24), sinks=True),
           Case("packed", page_size=16, tokens=(2, 1), keys=(70, 3), packed=True, max_seqlen_q=2, alibi="H"),
           Case("tree", tokens=(3, 3), keys=(70, 3), tree=True)]


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_opcheck(case):
    q, k, v, options, cache = make(case)
    q, k, v = (x.nan_to_num(0.5) for x in (q, k, v))
    lengths = options.lengths
    torch.library.opcheck(torch.ops.minimal_attn.triton_decode.default, (
        q, k, v, lengths.cu_seqlens_q, lengths.seqused_q, lengths.seqused_k, *cache[:4], options.sinks,
        options.alibi_slopes, options.softmax_scale, options.softcap, *options.window, *cache[4:]))


def test_compile_fullgraph():
    q, k, v, options, cache = make(Case("any", page_size=16, tokens=(2, 2, 2), head_dims=(16, 24), window=CAUSAL))

    def attend(q, k, v, seqused_k, page_table):
        lengths = Lengths(None, None, None, seqused_k)
        out, lse = twin.BACKEND.forward_cached(q, k, v, options._replace(lengths=lengths), Cache(page_table))
        return out * 2, lse

    inputs = q, k, v, options.lengths.seqused_k, cache.page_table
    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)
    assert all(map(torch.equal, got, attend(*inputs)))


def test_fp8_is_refused():
    q, k, v, options, cache = make(Case("any"))
    with pytest.raises(TypeError, match="q is torch.float8_e4m3fn"):
        ops.forward_cached(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)), options, cache)


def test_more_keys_than_can_be_counted():
    q, k = torch.zeros(1, 1, 1, 16, device=DEVICE), torch.zeros(1, 1, 1, 16, device=DEVICE).expand(1, 1, 2**20, 16)
    with pytest.raises(ValueError, match="keys of a sample"):
        ops.forward_cached(q, k, k, Options(0.3), Cache(int32([[0] * 2**11])))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dims, dtype", [(head_dims, dtype) for head_dims, of_16_bits in [
    # Tiles are alike for both types of 16 bits.
    ((64, 64), torch.float16), ((128, 128), torch.bfloat16), ((192, 128), torch.float16), ((256, 256), torch.bfloat16),
    ((40, 80), torch.float16)] for dtype in (torch.float32, of_16_bits)], ids=str)
@pytest.mark.parametrize("tokens, page_size", [(1, 0), (1, 16), (5, 1), (70, 256)])
def test_large_caches(tokens, page_size, head_dims, dtype):
    inputs = make(Case("any", (tokens,) * 3, (3000, 1, 700), page_size=page_size, head_dims=head_dims, heads=(8, 2),
                       window=CAUSAL, dtype=dtype))
    check(inputs, ops.forward_cached(*inputs))


@pytest.mark.gpu
def test_graph_serves_other_lengths_and_tables():
    q, k, v, options, cache = make(Case("any", page_size=16, keys=(900, 3, 70), dtype=torch.float16))
    graph, results = captured(lambda: ops.forward_cached(q, k, v, options, cache))
    options.lengths.seqused_k.copy_(int32([64, 0, 900]))
    cache.page_table.copy_(cache.page_table.flip(0))  # the first and the last sample change places
    graph.replay()
    check((q, k, v, options, cache), results)


@pytest.mark.gpu
@needs_gib(24)
@pytest.mark.parametrize("is_paged", [False, True])
def test_cache_beyond_int32(is_paged, much_memory):
    """The last sequence, or page, begins beyond 2^31 elements."""
    k = torch.empty(2**12 + 8, 8, 1024, 64, dtype=torch.float16, device=DEVICE)
    k[-1] = torch.randn(k.shape[1:], device=DEVICE)
    v, last = k, k.shape[0] - 1
    q = torch.randn(1, 8, 1, 64, dtype=torch.float16, device=DEVICE)
    cache = Cache(int32([[last]])) if is_paged else Cache(None, int32([last]))
    check((q, k[-1:], v[-1:], Options(0.3), Cache()), ops.forward_cached(q, k, v, Options(0.3), cache))
