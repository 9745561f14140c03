"""Appending new keys and values to a cache, alone and in a call of attention: every backend against a loop over rows
in fp64, and all other bytes of the cache as they were.

test_cache_names.py has the names of flash-attn and vLLM, test_cache_errors.py bad input.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Optional

import pytest
import torch
from hypothesis import strategies as st
from torch.testing import assert_close

from cached_calls import (BACKENDS, DEVICE, GARBAGE, TOLERANCE, Call, backend, by_loop, close, ints,  # noqa: F401
                          make, on_device, place_of_row, rows_first, sequence_of)
from cases import CAMPAIGN, check_drawn, each_seed, make_tensor, slow_unless
from conftest import HAS_GPU, captured
from minimal_attn import (append_to_kvcache, attention as interface, attention_with_kvcache, flash_attn_with_kvcache,
                          reshape_and_cache)
from minimal_attn.options import Append
from minimal_attn.reference.append import append_in_torch
from test_kvcache import BRANCHES, drawn_calls

cpu = pytest.mark.cpu


@dataclass(frozen=True)
class Case(Call):
    """A call of attention after so many of its samples' keys were appended, the last ones of each."""

    causal: bool = True
    new: tuple = ()  # new keys of each sample, all alike unless packs_new
    packs_new: bool = False
    rotary_dim: int = 0  # 0: nothing is rotated
    interleaved: bool = True
    rotary_seqlens: Optional[tuple] = None

    @property
    def starts(self):
        """How many places each sample has taken before."""
        return [end - n for end, n in zip(self.ends, self.new)]


def case(name, new, *args, **options):
    return Case(name, *args, new=new, **options)


def make_inputs(case, dtype, seed=0):
    """The tensors of a case, on the CPU: q, k and v, the caches before the append, `where` the new rows go and how they
    are rotated, and the `others` of attention_with_kvcache. In fp64, by a loop: what becomes of q and of the caches,
    and which places of a cache are new (N, S)."""
    generator = torch.Generator().manual_seed(seed + 1)
    q, k_cache, v_cache, others = make(case, dtype, seed)
    shape = (1, case.Hk, sum(case.new)) if case.packs_new else (len(case.new), case.Hk, case.new[0])
    k, v = (torch.randn(*shape, d, generator=generator, dtype=torch.float64).to(dtype)
            for d in (case.D, case.head_dim_v or case.D))
    where = {"seqused_k": torch.tensor(case.starts, dtype=torch.int32)}
    where.update((name, others.pop(name)) for name in ("page_table", "cache_batch_idx") if name in others)
    others.pop("seqused_k")
    if case.packs_new:
        where["cu_seqlens_k_new"] = torch.tensor([0, *itertools.accumulate(case.new)], dtype=torch.int32)
    if case.rotary_dim:
        angle = torch.randn(100, case.rotary_dim // 2, generator=generator, dtype=torch.float64)
        where.update(rotary_cos=angle.cos().to(dtype), rotary_sin=angle.sin().to(dtype),
                     rotary_interleaved=case.interleaved)
        if case.rotary_seqlens:
            where["rotary_seqlens"] = torch.tensor(case.rotary_seqlens, dtype=torch.int32)
    want_q, want_k, want_v = (x.double().clone() for x in (q, k_cache, v_cache))
    is_new = torch.zeros(k_cache.shape[0], k_cache.shape[2], dtype=torch.bool)
    begins, positions = [0, *itertools.accumulate(case.new)], case.rotary_seqlens or case.starts
    advances = case.causal or case.window != (-1, -1)
    for b, n in enumerate(case.new):
        for t in range(n):
            row = (0, slice(None), begins[b] + t) if case.packs_new else (b, slice(None), t)
            sequence, place = sequence_of(where, b), case.starts[b] + t
            if case.is_paged:
                sequence, place = int(where["page_table"][sequence, place // case.size]), place % case.size
            at, is_new[sequence, place] = (sequence, slice(None), place), True
            want_k[at], want_v[at] = turned(k[row].double(), positions[b] + t, case, where), v[row].double()
            k_cache[at] = v_cache[at] = math.nan
        for i in range(case.rows[b]):
            row = place_of_row(case, b, i)
            want_q[row] = turned(want_q[row], positions[b] + i * advances, case, where)
    return SimpleNamespace(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, where=where, others=others, want_q=want_q,
                           want_k=want_k, want_v=want_v, is_new=is_new)


def turned(x, position, case, where):
    """x (H, D), its pairs of columns rotated one after the other by the angles of a position."""
    x, half = x.clone(), case.rotary_dim // 2
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if case.interleaved else (i, i + half)
        cos, sin = (where[name][position, i].double() for name in ("rotary_cos", "rotary_sin"))
        a, b = x[:, first].clone(), x[:, second].clone()
        x[:, first], x[:, second] = a * cos - b * sin, a * sin + b * cos
    return x


def bits(x):
    """All that lies in the memory of x, also between its elements, as integers."""
    whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    return whole.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


def check_cache(cache, before, is_new, want, tolerance):
    """The new rows are what is wanted, and every other bit in the memory is as in bits(cache) before."""
    is_written = torch.zeros_like(before, dtype=torch.bool)
    is_written.as_strided(cache.shape, cache.stride(), cache.storage_offset()).transpose(1, 2)[is_new] = True
    assert bits(cache)[~is_written].equal(before[~is_written])
    close(cache.transpose(1, 2)[is_new], want.transpose(1, 2)[is_new.cpu()], tolerance)


def check(backend, case, dtype, seed=0, attends=True):
    """One call of attention_with_kvcache that appends, or append_to_kvcache alone."""
    x = make_inputs(case, dtype, seed)
    q, k, v, *caches = map(on_device, (x.q, x.k, x.v, x.k_cache, x.v_cache))
    before = [bits(cache).clone() for cache in caches]
    where, others = ({name: on_device(y) for name, y in of.items()} for of in (x.where, x.others))
    rotated = TOLERANCE[dtype] if case.rotary_dim else 0
    if attends:
        out, lse = attention_with_kvcache(q, *caches, **where, **others, **case.options(), k=k, v=v, return_lse=True,
                                          backend=backend)
        given = {**x.where, **x.others, "seqused_k": torch.tensor(case.ends)}
        want, want_lse = by_loop(case, x.want_q, x.want_k, x.want_v, given)
        close(out, want, TOLERANCE[dtype])
        # Rotated queries and keys are rounded once more than the loop's.
        close(lse, want_lse, rotated or (1e-10 if dtype == torch.float64 else 1e-5))
    else:
        lengths = append_to_kvcache(k, v, *caches, **where, backend=backend)
        assert lengths.tolist() == case.ends and lengths.dtype == torch.int32
    check_cache(caches[0], before[0], x.is_new.to(DEVICE), x.want_k, rotated)
    check_cache(caches[1], before[1], x.is_new.to(DEVICE), x.want_v, 0)


CASES = [
    case("decode", (1,) * 3, (1,) * 3, (9, 1, 20), 20),
    case("fewer_rows_than_keys", (4,) * 2, (1,) * 2, (9, 4), 20),
    case("not_causal", (3,) * 2, (3,) * 2, (9, 3), 20, causal=False),
    case("batch_idx", (2,) * 3, (2,) * 3, (9, 7, 20), 20, has_batch_idx=True),
    case("leftpad_batch_idx", (1,) * 2, (1,) * 2, (9, 4), 20, leftpad=(3, 16), has_batch_idx=True),
    *(case(f"pages_of_{size}", (4,) * 3, (4,) * 3, (9, 4, 33), size, is_paged=True) for size in (1, 3)),
    case("pages_batch_idx", (2,) * 3, (2,) * 3, (9, 2, 20), 4, is_paged=True, has_batch_idx=True, leftpad=(6, 3, 0)),
    case("packed_pages", (0, 1, 5, 0, 0, 3, 0), (1, 1, 5, 0, 2, 3, 0), (4, 9, 5, 4, 2, 20, 0), 4, packs_new=True,
         is_packed=True, is_paged=True, has_sinks=True),
    case("packed_keys_alone", (1, 0, 3), (2,) * 3, (9, 2, 20), 4, packs_new=True, is_paged=True),
    case("packed_rows_alone", (2,) * 3, (1, 0, 4), (9, 2, 20), 4, is_packed=True, is_paged=True),
    case("mixed", (1, 1, 12, 1), (1, 1, 12, 1), (9, 33, 12, 1), 16, packs_new=True, is_packed=True, is_paged=True,
         rotary_dim=16),
    case("rotary", (3,) * 2, (3,) * 2, (9, 20), 20, rotary_dim=16),
    case("rotary_in_part", (3,) * 2, (3,) * 2, (9, 20), 3, is_paged=True, rotary_dim=16, D=40),
    case("rotary_halves_in_part", (3,) * 2, (3,) * 2, (9, 20), 20, rotary_dim=32, interleaved=False, D=40),
    case("rotary_seqlens", (3,) * 2, (3,) * 2, (9, 20), 20, rotary_dim=16, rotary_seqlens=(90, 0)),
    case("rotary_of_q_stands_still", (3,) * 2, (3,) * 2, (9, 20), 20, rotary_dim=16, causal=False),
    case("rotary_window", (3,) * 2, (3,) * 2, (9, 20), 20, rotary_dim=16, causal=False, window=(5, 1)),
    case("rotary_leftpad", (2,) * 2, (2,) * 2, (9, 12), 20, rotary_dim=16, leftpad=(2, 8)),
    case("rotary_packed", (1, 5, 0, 3), (2, 5, 1, 3), (9, 5, 4, 20), 4, packs_new=True, is_packed=True, is_paged=True,
         rotary_dim=16, interleaved=False, rotary_seqlens=(3, 0, 99, 50)),
    case("head_dim_v", (2,) * 2, (2,) * 2, (9, 20), 4, is_paged=True, D=24, head_dim_v=40, rotary_dim=16),
    case("interleaved", (2,) * 2, (2,) * 2, (9, 20), 16, is_paged=True, layout="interleaved"),
    case("many_heads", (1,) * 3, (1,) * 3, (9, 3, 12), 20, rotary_dim=16, H=70, Hk=35),
    case("tree", (5,) * 3, (5,) * 3, (9, 5, 33), 4, is_paged=True, causal=False, has_sinks=True, tree=BRANCHES),
    case("full", (2,) * 2, (2,) * 2, (12, 12), 4, is_paged=True),
    case("options", (3,) * 2, (3,) * 2, (9, 20), 4, is_paged=True, window=(6, -1), softcap=1.5, slopes="samples",
         has_sinks=True, num_splits=3),
]
# Rows of which no kernel can load 16 bytes. Not all backends read such a cache.
UNALIGNED = [case("odd_head_dims", (2,) * 2, (2,) * 2, (6, 11), 5, is_paged=True, D=33, head_dim_v=17, rotary_dim=16),
             case("half_aligned", (2,) * 2, (2,) * 2, (6, 9), 4, is_paged=True, D=36),
             case("odd_rows", (2,) * 2, (2,) * 2, (6, 2), 5, is_paged=True, D=64, layout="odd", rotary_dim=48)]


def case_of(name):
    return next(x for x in CASES if x.name == name)


OF_KERNELS = ("decode", "packed_pages", "mixed", "rotary_in_part", "rotary_packed", "rotary_of_q_stands_still",
              "interleaved", "leftpad_batch_idx", "tree")


def is_in_gate(backend, case):
    """Kernels in an interpreter or in a build for the CPU get a few cases."""
    return HAS_GPU or backend in ("reference", "torch") or str(case) in OF_KERNELS


@pytest.mark.parametrize("backend, case", [
    pytest.param(backend, case, id=f"{backend}-{case}")
    for backend, case in itertools.product(BACKENDS, CASES + UNALIGNED)
    if not HAS_GPU or backend != "triton" or str(case) in OF_KERNELS])  # it compiles anew for most cases
def test_append_against_a_loop(backend, case, poisoned_outputs):
    check(backend, case, BACKENDS[backend], attends=False)


@pytest.mark.parametrize("backend, case", [
    pytest.param(backend, case, id=f"{backend}-{case}", marks=slow_unless(is_in_gate(backend, case)))
    for backend, case in itertools.product(BACKENDS, CASES)])
def test_attention_against_a_loop(backend, case):
    check(backend, case, BACKENDS[backend])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(backend, dtype):
    x = dataclasses.replace(case_of("rotary_packed"), D=64, rotary_dim=64)
    for attends in (False, True):
        if HAS_GPU and backend == "cuda" and dtype == torch.float32:
            with pytest.raises(TypeError, match="k is torch.float32, and backend='cuda' writes caches on a GPU"):
                check(backend, x, dtype, attends=attends)
        else:
            check(backend, x, dtype, attends=attends)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rotation_rounds_once(backend, dtype):
    """Products of two such numbers are exact in fp32, so that the sum there, and then its rounding, is the nearest."""
    generator = torch.Generator().manual_seed(0)
    k, angle = torch.randn(1, 1, 8, 16, generator=generator), torch.randn(8, 8, generator=generator)
    k, cos, sin = (x.to(DEVICE, dtype) for x in (k, angle.cos(), angle.sin()))
    cache = [torch.zeros(1, 1, 8, 16, dtype=dtype, device=DEVICE) for _ in "kv"]
    append_to_kvcache(k, k, *cache, ints(0), rotary_cos=cos, rotary_sin=sin, backend=backend)
    a, b = k[..., ::2].double(), k[..., 1::2].double()
    want = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(dtype)
    assert cache[0].equal(want) and cache[1].equal(k)


@st.composite
def drawn_cases(draw):
    call = draw(drawn_calls().filter(lambda call: not call.shares_pages and call.tree is None))
    packs_new = draw(st.booleans())
    new = [draw(st.integers(0, min(n, 6))) for n in call.keys]
    rotary_dim = draw(st.sampled_from([x for x in (0, 16, 32) if x <= call.D]))
    positions = st.none() | st.tuples(*[st.integers(0, 90)] * len(new))
    return Case(**vars(call) | dict(
        new=tuple(new) if packs_new else (min(new),) * len(new), packs_new=packs_new, rotary_dim=rotary_dim,
        interleaved=draw(st.booleans()), rotary_seqlens=draw(positions) if rotary_dim else None))


def check_drawn_appends(backend, seed, max_examples):
    """Appends alone and with attention."""
    def check_both(case, values):
        check(backend, case, BACKENDS[backend], values, attends=False)
        if any(case.rows):
            check(backend, case, BACKENDS[backend], values)

    check_drawn(check_both, seed, max_examples, case=drawn_cases(), values=st.integers(0, 99))


@pytest.mark.parametrize("backend, max_examples", [
    ("reference", 60), ("torch", 60), *([("triton", 25), ("cuda", 200)] if HAS_GPU else [
        ("triton", 5), ("cuda", 20), pytest.param("triton", 25, marks=CAMPAIGN),
        pytest.param("cuda", 100, marks=pytest.mark.slow)])])
def test_drawn_appends(backend, max_examples):
    check_drawn_appends(backend, 0, max_examples)


@each_seed
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton" or HAS_GPU])
def test_many_drawn_appends(backend, seed):
    check_drawn_appends(backend, seed, 300)


# Places that are not there.

def placed(backend, dtype, **change):
    """Appends 3 rows to each of 4 samples, in pages of 4 that hold zeros, without the checks of the facade. Returns the
    pages and the lengths."""
    k = torch.arange(1, 13, dtype=dtype, device=DEVICE).view(4, 1, 3, 1).expand(4, 2, 3, 16).contiguous()
    caches = [torch.zeros(6, 2, 4, 16, dtype=dtype, device=DEVICE) for _ in "kv"]
    table = ints(0, 1, 2, GARBAGE[1], *GARBAGE, 4, 5).view(4, 2)
    append = Append(**{"seqused_k": ints(2, 3, 1, 6), "page_table": table, **change})
    _, lengths = interface.BACKENDS[backend].append(k, k, *caches, append)
    assert caches[0].equal(caches[1]) and caches[0].equal(caches[0][:, :1, :, :1].expand(6, 2, 4, 16))
    return caches[0][:, 0, :, 0].tolist(), lengths.tolist()


def test_rows_without_a_place_are_not_written(backend):
    """Beyond the capacity, in pages that do not exist, and with lengths that are none."""
    dtype, zeros = BACKENDS[backend], [0.0] * 4
    rows, lengths = placed(backend, dtype)
    assert rows == [[0, 0, 1, 2], [3, 0, 0, 0], [0, 0, 0, 4], zeros, zeros, [0, 0, 10, 11]]
    assert lengths == [5, 6, 4, 8]
    rows, lengths = placed(backend, dtype, seqused_k=ints(8, 2**31 - 1, 0, 2**31 - 2))
    assert rows == [zeros] * 6 and lengths == [8, 8, 3, 8]
    rows, lengths = placed(backend, dtype, seqused_k=ints(-2, 8, 0, -(2**31)))
    assert rows == [[1, 2, 3, 0], zeros, zeros, zeros, [10, 11, 12, 0], zeros] and lengths == [3, 8, 3, 3]
    rows, lengths = placed(backend, dtype, page_table=None, batch_idx=ints(5, -1, 6, 0), seqused_k=ints(0, 0, 0, 3))
    assert rows == [[0, 0, 0, 10]] + [zeros] * 4 + [[1, 2, 3, 0]] and lengths == [3, 3, 3, 4]


@pytest.mark.parametrize("backend", ["torch", "cuda"])
def test_rows_that_a_page_table_has_not_are_not_written(backend):
    """The host reads no numbers where torch.compile traces."""
    k = torch.randn(3, 2, 1, 16, dtype=BACKENDS[backend], device=DEVICE)
    caches = [torch.zeros(5, 2, 4, 16, dtype=k.dtype, device=DEVICE) for _ in "kv"]
    append = torch.compile(append_to_kvcache, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    lengths = append(k, -k, *caches, ints(5, 5, 5), page_table=ints(0, 1, 2, 3).view(2, 2),
                     cache_batch_idx=ints(-1, 2**31 - 1, 1), backend=backend)
    assert lengths.tolist() == [6, 6, 6]
    for cache, rows in zip(caches, (k, -k)):
        assert cache[3, :, 1].equal(rows[2, :, 0])
        cache[3, :, 1] = 0
        assert not cache.any()


def test_packed_rows_of_no_sample_are_not_written(backend):
    dtype = BACKENDS[backend]
    k = torch.arange(1, 8, dtype=dtype, device=DEVICE).view(1, 1, 7, 1).expand(1, 2, 7, 16).contiguous()
    for bounds, want, want_lengths in [((0, 2, 2, 5), [[1, 2, 0, 0], [0] * 4, [3, 4, 5, 0]], [2, 0, 3]),
                                       ((0, 2, 2, 99), [[1, 2, 0, 0], [0] * 4, [3, 4, 5, 6]], [2, 0, 4]),
                                       ((0, 0, 0, 0), [[0] * 4] * 3, [0, 0, 0])]:
        caches = [torch.zeros(3, 2, 4, 16, dtype=dtype, device=DEVICE) for _ in "kv"]
        append = Append(ints(0, 0, 0), cu_seqlens_k_new=ints(*bounds))
        _, lengths = interface.BACKENDS[backend].append(k, k, *caches, append)
        assert caches[0][:, 1, :, 3].tolist() == caches[1][:, 0, :, 15].tolist() == want
        assert lengths.tolist() == want_lengths


def test_a_wrong_cu_seqlens_writes_nothing_outside(backend):
    k = torch.randn(1, 2, 7, 16, dtype=BACKENDS[backend], device=DEVICE)
    caches = [make_tensor((3, 2, 4, 16), k.dtype, DEVICE, "slice") for _ in "kv"]
    before = [bits(x).clone() for x in caches]
    _, lengths = interface.BACKENDS[backend].append(k, k, *caches, Append(ints(0, 0, 0), cu_seqlens_k_new=ints(
        5, -7, 2**31 - 1, 2)))
    assert (lengths >= 0).all() and (lengths <= 4).all()
    for cache, bits_before in zip(caches, before):
        outside = torch.ones_like(bits_before, dtype=torch.bool)
        outside.as_strided(cache.shape, cache.stride(), cache.storage_offset()).fill_(False)
        assert bits(cache)[outside].equal(bits_before[outside])


def test_positions_beyond_the_tables_count_as_the_last(backend):
    dtype = BACKENDS[backend]
    k, q = (torch.randn(2, n, 3, 16, dtype=dtype, device=DEVICE) for n in (1, 2))
    angle = torch.randn(4, 8, device=DEVICE)
    tables = dict(rotary_cos=angle.cos().to(dtype), rotary_sin=angle.sin().to(dtype), q=q, q_advances=True)

    def run(rotary_seqlens):
        caches = [torch.zeros(2, 1, 4, 16, dtype=dtype, device=DEVICE) for _ in "kv"]
        append = Append(ints(1, 0), rotary_seqlens=rotary_seqlens, **tables)
        return interface.BACKENDS[backend].append(k, k, *caches, append)[0], caches[0]

    (q_far, k_far), (q_near, k_near) = run(ints(2**31 - 1, 7)), run(ints(3, 3))
    assert q_far.equal(q_near) and k_far.equal(k_near)  # the tables end with position 3
    (q_far, k_far), (q_near, k_near) = run(ints(-9, -1)), run(ints(0, 0))
    assert q_far[:, :, 0].equal(q_near[:, :, 0]) and k_far[1, :, 0].equal(k_near[1, :, 0])


@pytest.mark.parametrize("is_packed", [False, True])
def test_empty(backend, is_packed):
    """No new rows, no samples, no room, no pages: nothing is written, and q is still rotated."""
    dtype = BACKENDS[backend]
    caches = [torch.randn(2, 2, 5, 16, dtype=dtype, device=DEVICE) for _ in "kv"]
    before = [x.clone() for x in caches]
    packed = dict(cu_seqlens_k_new=ints(0, 0, 0)) if is_packed else {}
    k = torch.randn(1 if is_packed else 2, 2, 0, 16, dtype=dtype, device=DEVICE)
    assert append_to_kvcache(k, k, *caches, ints(3, 0), **packed, backend=backend).tolist() == [3, 0]
    q = torch.randn(2, 4, 3, 16, dtype=dtype, device=DEVICE)
    angle = torch.randn(9, 8, device=DEVICE)
    tables = dict(rotary_cos=angle.cos().to(dtype), rotary_sin=angle.sin().to(dtype))
    got = attention_with_kvcache(q, *caches, ints(3, 5), k=k, v=k, **packed, **tables, backend=backend)
    turned_q, _ = append_in_torch(k, k, *caches, Append(ints(3, 5), q=q, **packed, **tables))
    assert_close(got, attention_with_kvcache(turned_q, *caches, ints(3, 5), backend=backend))
    assert all(x.equal(y) for x, y in zip(caches, before)) and not turned_q.equal(q)
    table = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    for cache, given in ((caches[0][:, :, :0], {}), (caches[0][:0], dict(page_table=table)),
                         (caches[0], dict(page_table=table[:, :0]))):
        assert append_to_kvcache(k, k, cache, cache, ints(0, 0), **packed, **given, backend=backend).tolist() == [0, 0]
    if not is_packed:
        none = torch.randn(0, 2, 3, 16, dtype=dtype, device=DEVICE)
        empty = [x[:0] for x in caches]
        assert append_to_kvcache(none, none, *empty, ints()[:0].int(), backend=backend).shape == (0,)


@cpu
def test_autocast():
    """New rows are cast to the dtype of autocast where the cache has it."""
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16)
    lengths = ints(3, 0, device="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            caches, want = ([torch.zeros(2, 2, 5, 16, dtype=dtype) for _ in "kv"] for _ in "12")
            assert attention_with_kvcache(q, *caches, lengths, k=k, v=k).dtype == dtype
            append_to_kvcache(k, k, *want, lengths)
            assert caches[0].equal(want[0]) and caches[0][0, :, 3].equal(k[0, :, 0].to(dtype))


@cpu
def test_last_dimension_of_new_rows_may_have_any_stride():
    k = torch.randn(2, 2, 16, 3).mT
    caches = [torch.zeros(2, 2, 5, 16) for _ in "kv"]
    append_to_kvcache(k, k, *caches, ints(2, 0, device="cpu"))
    assert caches[0][0, :, 2:].equal(k[0]) and caches[1][1, :, :3].equal(k[1])


# torch.compile.

@pytest.mark.parametrize("backend, name", [
    ("reference", "leftpad_batch_idx"), ("torch", "rotary_packed"), ("triton", "rotary_packed"), ("triton", "tree"),
    ("cuda", "rotary_packed"), ("cuda", "leftpad_batch_idx"), ("cuda", "tree"), ("torch", "pages_batch_idx")])
def test_compiles_fullgraph(backend, name):
    x = case_of(name)
    inputs = make_inputs(x, BACKENDS[backend])
    arguments = {name: on_device(x) for name, x in {**inputs.where, **inputs.others}.items()}
    rows = [on_device(x) for x in (inputs.q, inputs.k, inputs.v)]

    def attend(q, k, v, k_cache, v_cache):
        return attention_with_kvcache(q, k_cache, v_cache, **arguments, **x.options(), k=k, v=v, return_lse=True,
                                      backend=backend)

    torch._dynamo.reset()
    results = []
    for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        caches = [on_device(x) for x in (inputs.k_cache, inputs.v_cache)]
        results.append((*call(*rows, *caches), *map(bits, caches)))
    for got, want in zip(results[1], results[0]):
        assert_close(got, want)


@cpu
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=slow_unless(False, False))])
def test_halves_of_one_tensor_compile_fullgraph(compiler):
    """vLLM's caches: both are views of one tensor, made in the graph or before it. All functions write them."""
    k, slots = torch.randn(2, 1, 2, 16), torch.tensor([3, 18])

    def halves(cache):
        return [x.transpose(1, 2) for x in cache.split(16, -1)]

    def append(k_cache, v_cache):
        out = flash_attn_with_kvcache(k, k_cache, v_cache, k, 2 * k, cache_seqlens=4, page_table=ints(
            4, 1, 2, 0, device="cpu").view(2, 2), causal=True)
        append_to_kvcache(rows_first(k), rows_first(k), rows_first(k_cache), rows_first(v_cache), ints(
            0, 1, device="cpu"), cache_batch_idx=ints(2, 3, device="cpu"))
        reshape_and_cache(k[:, 0], -k[:, 0], k_cache, v_cache, slots)
        return out

    want = torch.zeros(5, 2, 4, 32)
    want_out = append(*halves(want))
    assert want.count_nonzero() == 6 * 2 * 32  # each call wrote two rows
    for call in (lambda cache: torch.compile(append, fullgraph=True, backend=compiler)(*halves(cache)),
                 torch.compile(lambda cache: append(*halves(cache)), fullgraph=True, backend=compiler)):
        torch._dynamo.reset()
        cache = torch.zeros(5, 2, 4, 32)
        assert_close(call(cache), want_out)
        assert cache.equal(want)


@cpu
@pytest.mark.parametrize("name", ["batch_idx", "rotary_packed"])
def test_opcheck(name):
    if HAS_GPU:
        pytest.skip("it is interpreted on CPUs alone")
    check = torch.ops.minimal_attn.triton_append.default
    inputs = make_inputs(case_of(name), BACKENDS["triton"])
    caches = [x.nan_to_num() for x in (inputs.k_cache, inputs.v_cache)]
    names = {"cache_batch_idx": "batch_idx"}
    append = Append(q=inputs.q.nan_to_num(), cu_seqlens_q=inputs.others.get("cu_seqlens_q"),
                    **{names.get(name, name): x for name, x in inputs.where.items()})
    torch.library.opcheck(check, (inputs.k, inputs.v, *caches, *append))
    slots = Append(slot_mapping=torch.tensor([2]))
    k, v = (x[:1, :, :1] for x in (inputs.k, inputs.v))
    torch.library.opcheck(check, (k, v, *caches, *slots))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_cuda_graph_takes_other_lengths(backend):
    """One graph, replayed with other lengths, also without room for some."""
    dtype = torch.float16
    q, k = (torch.randn(2, n, 1, 64, dtype=dtype, device="cuda") for n in (4, 2))
    caches = [torch.zeros(2, 2, 8, 64, dtype=dtype, device="cuda") for _ in "kv"]
    lengths = ints(0, 3)

    def attend():
        return attention_with_kvcache(q, *caches, lengths, k=k, v=k, causal=True, backend=backend)

    graph, out = captured(attend)
    for values in ((5, 7), (8, 0)):
        for cache in caches:
            cache.zero_()
        lengths.copy_(ints(*values))
        graph.replay()
        got, written = out.clone(), [x.clone() for x in caches]
        for cache in caches:
            cache.zero_()
        assert_close(got, attend())
        assert all(x.equal(y) for x, y in zip(written, caches))


# reshape_and_cache.

@pytest.mark.parametrize("layout", ["interleaved", "rows"])
def test_reshape_and_cache_as_vllm_calls_it(backend, layout):
    """Rows beyond slot_mapping, which pad a CUDA graph, and those of negative slots are not written."""
    dtype = BACKENDS[backend]
    key, value = (torch.randn(7, 2, 16, dtype=dtype, device=DEVICE) for _ in "kv")
    shape = (5, 2, 4, 32) if layout == "interleaved" else (5, 4, 2, 32)
    whole = torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
    key_cache, value_cache = whole.split(16, -1)
    if layout == "interleaved":
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    slots = [7, -1, 0, 19, 5]
    slot_mapping, scale = torch.tensor(slots, device=DEVICE), torch.ones((), device=DEVICE)
    assert reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, "auto", scale, scale,
                             backend=backend) is None
    for cache, rows in ((key_cache, key), (value_cache, value)):
        for slot in range(20):
            row = cache[slot // 4, slot % 4]
            assert row.equal(rows[slots.index(slot)]) if slot in slots else row.isnan().all()


@pytest.mark.parametrize("slots", [(-1, -5), (20, 2**40), ()])
def test_slots_that_are_not_there_are_not_written(backend, slots):
    dtype = BACKENDS[backend]
    k = torch.randn(1, 2, len(slots), 16, dtype=dtype, device=DEVICE)
    caches = [torch.randn(5, 2, 4, 16, dtype=dtype, device=DEVICE) for _ in "kv"]
    before = [x.clone() for x in caches]
    mapping = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    if slots:
        _, lengths = interface.BACKENDS[backend].append(k, k, *caches, Append(slot_mapping=mapping))
        assert lengths.shape == (0,)
    else:
        rows = k[0].transpose(0, 1)
        reshape_and_cache(rows, rows, *map(rows_first, caches), mapping, backend=backend)
    assert all(x.equal(y) for x, y in zip(caches, before))
