"""Appending new keys and values to a cache, alone and in a call of attention: every backend against a loop over rows
in fp64, all other bytes of the cache as they were, the calls of vLLM, SGLang and transformers, and every error."""

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
from cases import slow_unless
from conftest import HAS_GPU, captured
from minimal_attn import (append_to_kvcache, attention_with_kvcache, flash_attn_with_kvcache, interface,
                          reshape_and_cache)
from minimal_attn.append import append_in_torch
from minimal_attn.backends import Append
from minimal_attn.flash_attn_interface import flash_attn_with_kvcache as with_kvcache_of_flash_attn_2
from test_kvcache import (BACKENDS, DEVICE, GARBAGE, TOLERANCE, Call, by_loop, close, ints, make, on_device, rows_first,
                          sequence_of)

cpu = pytest.mark.cpu


@pytest.fixture(params=BACKENDS)
def backend(request):
    assert interface.BACKENDS[request.param].why_not(torch.device(DEVICE)) is None  # loads it
    return request.param


@dataclass(frozen=True)
class Case:
    """A call of attention after so many of its samples' keys were appended, the last ones of each."""

    call: Call
    new: tuple  # new keys of each sample, all alike unless packs_new
    packs_new: bool = False
    rotary_dim: int = 0  # 0: nothing is rotated
    interleaved: bool = True
    rotary_seqlens: Optional[tuple] = None

    def __str__(self):
        return self.call.name

    @property
    def starts(self):
        """How many places each sample has taken before."""
        return [end - n for end, n in zip(self.call.ends, self.new)]


def case(name, new, rows, keys, size, *, packs_new=False, rotary_dim=0, interleaved=True, rotary_seqlens=None,
         causal=True, **options):
    return Case(Call(name, rows, keys, size, causal=causal, **options), new, packs_new, rotary_dim, interleaved,
                rotary_seqlens)


@dataclass
class Inputs:
    """Those of a Case, on the CPU."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor  # before the append
    v_cache: torch.Tensor
    where: dict  # the arguments that say where the new rows go, and those of the rotation
    others: dict  # further ones of attention_with_kvcache
    # By the loop, in fp64:
    places: list  # (sequence, place) of each new row
    want_k: torch.Tensor  # the rows that are written, in the order of places
    want_v: torch.Tensor
    want_q: torch.Tensor  # q, rotated


def make_inputs(case, dtype, seed=0):
    call, generator = case.call, torch.Generator().manual_seed(seed + 1)
    q, k_cache, v_cache, others = make(call, dtype, seed)
    batch_size, head_dim_v = len(case.new), call.head_dim_v or call.D
    shape = (1, call.Hk, sum(case.new)) if case.packs_new else (batch_size, call.Hk, case.new[0])
    k, v = (torch.randn(*shape, d, generator=generator, dtype=torch.float64).to(dtype) for d in (call.D, head_dim_v))
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
    inputs = Inputs(q, k, v, k_cache, v_cache, where, others, [], [], [], q.double().clone())
    add_what_the_loop_wants(case, inputs)
    for x in (k_cache, v_cache):
        for sequence, place in inputs.places:
            x[sequence, :, place] = math.nan
    return inputs


def add_what_the_loop_wants(case, inputs):
    call, where = case.call, inputs.where
    begins = [0, *itertools.accumulate(case.new)]
    positions = case.rotary_seqlens or case.starts
    for b, n in enumerate(case.new):
        for t in range(n):
            row = (0, slice(None), begins[b] + t) if case.packs_new else (b, slice(None), t)
            sequence, place = sequence_of(where, b), case.starts[b] + t
            if call.is_paged:
                sequence, place = int(where["page_table"][sequence, place // call.size]), place % call.size
            inputs.places.append((sequence, place))
            inputs.want_k.append(turned(inputs.k[row].double(), positions[b] + t, case, where))
            inputs.want_v.append(inputs.v[row].double())
    inputs.want_k, inputs.want_v = (
        torch.stack(x) if x else like.new_empty(0, *like.shape[1::2], dtype=torch.float64)
        for x, like in ((inputs.want_k, inputs.k), (inputs.want_v, inputs.v)))
    advances = call.causal or call.window != (-1, -1)
    for b, n in enumerate(call.rows):
        for i in range(n):
            row = (0, slice(None), sum(call.rows[:b]) + i) if call.is_packed else (b, slice(None), i)
            inputs.want_q[row] = turned(inputs.want_q[row], positions[b] + i * advances, case, where)


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


def check_cache(cache, before, places, want, tolerance):
    """The rows at these places are what is wanted, and every other bit in its memory is as in bits(cache) before."""
    is_written = torch.zeros_like(before, dtype=torch.bool)
    of_cache = is_written.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    for sequence, place in places:
        of_cache[sequence, :, place] = True
    assert bits(cache)[~is_written].equal(before[~is_written])
    if places:
        close(torch.stack([cache[sequence, :, place] for sequence, place in places]), want, tolerance)


def check_append(backend, case, dtype, seed=0):
    """append_to_kvcache alone."""
    inputs = make_inputs(case, dtype, seed)
    k, v, k_cache, v_cache = map(on_device, (inputs.k, inputs.v, inputs.k_cache, inputs.v_cache))
    before = bits(k_cache).clone(), bits(v_cache).clone()
    lengths = append_to_kvcache(k, v, k_cache, v_cache, **{name: on_device(x) for name, x in inputs.where.items()},
                                backend=backend)
    assert lengths.tolist() == case.call.ends and lengths.dtype == torch.int32
    tolerance = TOLERANCE[dtype] if case.rotary_dim else 0
    check_cache(k_cache, before[0], inputs.places, inputs.want_k, tolerance)
    check_cache(v_cache, before[1], inputs.places, inputs.want_v, 0)


def check_attention(backend, case, dtype, seed=0, by_flash_attn_3=False):
    """The append and attention in one call of attention_with_kvcache."""
    inputs = make_inputs(case, dtype, seed)
    q, k, v, k_cache, v_cache = map(on_device, (inputs.q, inputs.k, inputs.v, inputs.k_cache, inputs.v_cache))
    before = bits(k_cache).clone(), bits(v_cache).clone()
    arguments = {name: on_device(x) for name, x in {**inputs.where, **inputs.others}.items()}
    if by_flash_attn_3:
        out, lse = call_of_flash_attn_3s_tests(case, q, k, v, k_cache, v_cache, arguments, backend)
    else:
        out, lse = attention_with_kvcache(q, k_cache, v_cache, **arguments, **case.call.options(), k=k, v=v,
                                          return_lse=True, backend=backend)
    check_cache(k_cache, before[0], inputs.places, inputs.want_k, TOLERANCE[dtype] if case.rotary_dim else 0)
    check_cache(v_cache, before[1], inputs.places, inputs.want_v, 0)
    want_k, want_v = inputs.k_cache.double(), inputs.v_cache.double()
    for row, (sequence, place) in enumerate(inputs.places):
        want_k[sequence, :, place], want_v[sequence, :, place] = inputs.want_k[row], inputs.want_v[row]
    given = {**inputs.where, **inputs.others, "seqused_k": torch.tensor(case.call.ends)}
    want, want_lse = by_loop(case.call, inputs.want_q, want_k, want_v, given)
    close(out, want, TOLERANCE[dtype])
    # Rotated queries and keys are rounded once more than the loop's.
    close(lse, want_lse, TOLERANCE[dtype] if case.rotary_dim else 1e-10 if dtype == torch.float64 else 1e-5)


def call_of_flash_attn_3s_tests(case, q, k, v, k_cache, v_cache, given, backend):
    """As hopper/test_flash_attn.py spells it, with a window in a tensor."""
    call = case.call

    def theirs(x, is_packed):
        return x[0].transpose(0, 1) if is_packed else rows_first(x)

    out, lse, *rest = flash_attn_with_kvcache(
        theirs(q, call.is_packed), rows_first(k_cache), rows_first(v_cache), theirs(k, case.packs_new),
        theirs(v, case.packs_new), qv=None, rotary_cos=given["rotary_cos"], rotary_sin=given["rotary_sin"],
        cache_seqlens=given["seqused_k"], cache_batch_idx=given["cache_batch_idx"],
        cache_leftpad=given.get("leftpad_k"), page_table=given["page_table"], cu_seqlens_q=given.get("cu_seqlens_q"),
        cu_seqlens_k_new=given.get("cu_seqlens_k_new"), max_seqlen_q=given.get("max_seqlen_q"),
        rotary_seqlens=given["rotary_seqlens"], causal=call.causal, window_size=torch.tensor(call.window),
        attention_chunk=0, rotary_interleaved=given["rotary_interleaved"], scheduler_metadata=None, num_splits=3,
        return_softmax_lse=True, backend=backend)
    assert rest == []
    return (out.transpose(0, 1)[None], lse[None]) if call.is_packed else (rows_first(out), lse)


CASES = [
    case("decode", (1,) * 3, (1,) * 3, (9, 1, 20), 20),
    case("prefill", (7,) * 2, (7,) * 2, (7, 7), 20),
    case("chunk", (5,) * 3, (5,) * 3, (9, 5, 20), 20),
    case("more_rows_than_keys", (1,) * 2, (4,) * 2, (9, 2), 20),
    case("fewer_rows_than_keys", (4,) * 2, (1,) * 2, (9, 4), 20),
    case("not_causal", (3,) * 2, (3,) * 2, (9, 3), 20, causal=False),
    case("batch_idx", (2,) * 3, (2,) * 3, (9, 7, 20), 20, has_batch_idx=True),
    case("leftpad", (2,) * 3, (2,) * 3, (9, 2, 12), 20, leftpad=(3, 5, 0)),
    case("leftpad_batch_idx", (1,) * 2, (1,) * 2, (9, 4), 20, leftpad=(3, 16), has_batch_idx=True),
    *(case(f"pages_of_{size}", (4,) * 3, (4,) * 3, (9, 4, 33), size, is_paged=True) for size in (1, 3, 16)),
    case("pages_leftpad", (2,) * 2, (2,) * 2, (9, 20), 4, is_paged=True, leftpad=(6, 3)),
    case("pages_batch_idx", (2,) * 3, (2,) * 3, (9, 2, 20), 4, is_paged=True, has_batch_idx=True, leftpad=(6, 3, 0)),
    case("packed", (1, 5, 0, 3), (1, 5, 0, 3), (9, 5, 4, 20), 20, packs_new=True, is_packed=True),
    case("packed_pages", (0, 1, 5, 0, 0, 3, 0), (1, 1, 5, 0, 2, 3, 0), (4, 9, 5, 4, 2, 20, 0), 4, packs_new=True,
         is_packed=True, is_paged=True, has_sinks=True),
    case("packed_keys_alone", (1, 0, 3), (2,) * 3, (9, 2, 20), 4, packs_new=True, is_paged=True),
    case("packed_rows_alone", (2,) * 3, (1, 0, 4), (9, 2, 20), 4, is_packed=True, is_paged=True),
    case("mixed", (1, 1, 12, 1), (1, 1, 12, 1), (9, 33, 12, 1), 16, packs_new=True, is_packed=True, is_paged=True,
         rotary_dim=16),
    case("rotary", (3,) * 2, (3,) * 2, (9, 20), 20, rotary_dim=16),
    case("rotary_halves", (3,) * 2, (3,) * 2, (9, 20), 20, rotary_dim=16, interleaved=False),
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
    case("interleaved_dense", (2,) * 2, (2,) * 2, (9, 20), 24, layout="interleaved", head_dim_v=8),
    case("rows", (2,) * 2, (2,) * 2, (9, 20), 4, is_paged=True, layout="rows"),
    case("slice", (2,) * 2, (2,) * 2, (9, 20), 4, is_paged=True, layout="slice"),
    case("full", (2,) * 2, (2,) * 2, (12, 12), 4, is_paged=True),
    case("options", (3,) * 2, (3,) * 2, (9, 20), 4, is_paged=True, window=(6, -1), softcap=1.5, slopes="samples",
         has_sinks=True, num_splits=3),
]
OF_KERNELS = "decode", "packed_pages", "mixed", "rotary_in_part", "rotary_packed", "interleaved", "leftpad_batch_idx"


def is_in_gate(backend, case):
    """Of kernels in an interpreter or in a build for the CPU, only a few cases are."""
    return HAS_GPU or backend in ("reference", "torch") or str(case) in OF_KERNELS


@pytest.mark.parametrize("case", CASES, ids=str)
def test_append_against_a_loop(backend, case):
    check_append(backend, case, BACKENDS[backend])


@pytest.mark.parametrize("backend, case", [
    pytest.param(backend, case, id=f"{backend}-{case}", marks=slow_unless(is_in_gate(backend, case)))
    for backend, case in itertools.product(BACKENDS, CASES)])
def test_attention_against_a_loop(backend, case):
    check_attention(backend, case, BACKENDS[backend])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(backend, dtype):
    x = next(x for x in CASES if str(x) == "rotary_packed")
    x = dataclasses.replace(x, call=dataclasses.replace(x.call, D=64), rotary_dim=64)
    if HAS_GPU and backend == "cuda" and dtype == torch.float32:
        for check in (check_append, check_attention):
            with pytest.raises(TypeError, match="k is torch.float32, and backend='cuda' writes caches on a GPU"):
                check(backend, x, dtype)
        return
    check_append(backend, x, dtype)
    check_attention(backend, x, dtype)


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
    B, is_paged, packs_new, is_packed = draw(st.integers(1, 4)), *(draw(st.booleans()) for _ in range(3))
    each = st.lists(st.integers(0, 6), min_size=B, max_size=B).map(tuple)
    new = draw(each) if packs_new else (draw(st.integers(0, 6)),) * B
    rows = draw(st.just(new) | each) if is_packed else (draw(st.integers(1, 6)),) * B
    old = draw(st.lists(st.integers(0, 30), min_size=B, max_size=B))
    leftpad = draw(st.none() | st.lists(st.integers(0, 5), min_size=B, max_size=B).map(tuple))
    size = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 32])) if is_paged else 45
    bound = st.sampled_from([-1, -1, -1, 0, 2, 5, 100])
    D = draw(st.sampled_from([8, 16, 40]))
    Hk, rotary_dim = draw(st.integers(1, 2)), draw(st.sampled_from([x for x in (0, 16, 32) if x <= D]))
    call = Call("drawn", rows, tuple(a + b for a, b in zip(old, new)), size, is_paged, is_packed=is_packed,
                has_batch_idx=draw(st.booleans()), leftpad=leftpad, window=(draw(bound), draw(bound)),
                causal=draw(st.booleans()), softcap=draw(st.sampled_from([0.0, 1.5])), has_sinks=draw(st.booleans()),
                slopes=draw(st.sampled_from([None, "heads", "samples"])), num_splits=draw(st.sampled_from([0, 1, 3])),
                H=Hk * draw(st.integers(1, 3)), Hk=Hk, D=D, head_dim_v=draw(st.sampled_from([None, 8, 24])),
                layout=draw(st.sampled_from(["heads", "rows", "interleaved", "slice"])))
    positions = st.none() | st.lists(st.integers(0, 90), min_size=B, max_size=B).map(tuple)
    return Case(call, new, packs_new, rotary_dim, draw(st.booleans()), draw(positions) if rotary_dim else None)


def check_drawn_appends(backend, seed, max_examples):
    """Appends alone and with attention, the same ones for the same seed."""
    @hypothesis.seed(seed)
    @settings(max_examples=max_examples, database=None, deadline=None,
              suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(case=drawn_cases(), values=st.integers(0, 99))
    def check(case, values):
        check_append(backend, case, BACKENDS[backend], values)
        if any(case.call.rows):
            check_attention(backend, case, BACKENDS[backend], values)

    check()


@pytest.mark.parametrize("backend, max_examples", [
    ("reference", 100), ("torch", 100), *([("triton", 25), ("cuda", 300)] if HAS_GPU else [
        ("triton", 5), ("cuda", 20), pytest.param("triton", 25, marks=pytest.mark.slow),
        pytest.param("cuda", 100, marks=pytest.mark.slow)])])
def test_drawn_appends(backend, max_examples):
    check_drawn_appends(backend, 0, max_examples)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton" or HAS_GPU])
def test_5000_drawn_appends(backend, seed):
    check_drawn_appends(backend, seed, 500)


# Places that are not there.

def placed(backend, dtype, **change):
    """What an append of 3 rows to each of 4 samples leaves of zeros in pages of 4, past the checks of the facade."""
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


def test_two_rows_at_one_place(backend):
    """Each element is that of one of them, whichever it is, and nothing else is written."""
    dtype = BACKENDS[backend]
    k = torch.randn(2, 2, 1, 16, dtype=dtype, device=DEVICE)
    caches = [torch.zeros(3, 2, 4, 16, dtype=dtype, device=DEVICE) for _ in "kv"]
    lengths = append_to_kvcache(k, -k, *caches, ints(3, 3), cache_batch_idx=ints(1, 1), backend=backend)
    assert lengths.tolist() == [4, 4]
    for cache, rows in zip(caches, (k, -k)):
        assert (cache[1, :, 3] == rows[:, :, 0]).any(0).all()
        cache[1, :, 3] = 0
        assert not cache.any()


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

@pytest.mark.parametrize("name", ["rotary_packed", "leftpad_batch_idx", "head_dim_v", "rows"])
def test_compiles_fullgraph(backend, name):
    x = next(x for x in CASES if str(x) == name)
    inputs = make_inputs(x, BACKENDS[backend])
    arguments = {name: on_device(x) for name, x in {**inputs.where, **inputs.others}.items()}
    rows = [on_device(x) for x in (inputs.q, inputs.k, inputs.v)]

    def attend(q, k, v, k_cache, v_cache):
        return attention_with_kvcache(q, k_cache, v_cache, **arguments, **x.call.options(), k=k, v=v, return_lse=True,
                                      backend=backend)

    torch._dynamo.reset()
    results = []
    for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        caches = [on_device(x) for x in (inputs.k_cache, inputs.v_cache)]
        results.append((*call(*rows, *caches), *map(bits, caches)))
    for got, want in zip(results[1], results[0]):
        assert_close(got, want)


@cpu
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
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
@pytest.mark.parametrize("name", ["rotary_packed", "decode"])
def test_opcheck(name):
    inputs = make_inputs(next(x for x in CASES if str(x) == name), torch.float64)
    caches = [x.nan_to_num() for x in (inputs.k_cache, inputs.v_cache)]
    names = {"cache_batch_idx": "batch_idx"}
    append = Append(q=inputs.q, cu_seqlens_q=inputs.others.get("cu_seqlens_q"),
                    **{names.get(name, name): x for name, x in inputs.where.items()})
    torch.library.opcheck(torch.ops.minimal_attn.torch_append.default, (inputs.k, inputs.v, *caches, *append))
    slots = Append(slot_mapping=torch.tensor([2]))
    k, v = (x[:1, :, :1] for x in (inputs.k, inputs.v))
    torch.library.opcheck(torch.ops.minimal_attn.torch_append.default, (k, v, *caches, *slots))


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


# reshape_and_cache, and the names of others.

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


@cpu
def test_signature_is_that_of_vllm():
    names = "key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale"
    parameters = inspect.signature(reshape_and_cache).parameters.values()
    assert tuple(x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD) == names


def serving(backend, new, **options):
    """([q (T, H, D), k and v (T, Hk, D)], caches (num_pages, page_size, Hk, D), the other arguments, want), all on a
    device. want is what attention_with_kvcache gives after append_to_kvcache, and the caches then."""
    dtype = BACKENDS[backend]
    x = case("serving", new, new, (9, 5, 33), 16, packs_new=True, is_packed=True, is_paged=True, has_sinks=True,
             layout="rows", D=32, **options)
    inputs = make_inputs(x, dtype)
    where, others = ({name: on_device(x) for name, x in y.items()} for y in (inputs.where, inputs.others))
    q, k, v, k_cache, v_cache = map(on_device, (inputs.q, inputs.k, inputs.v, inputs.k_cache, inputs.v_cache))
    caches = [on_device(x) for x in (inputs.k_cache, inputs.v_cache)]
    append_to_kvcache(k, v, k_cache, v_cache, **where, backend="reference")
    out, lse = attention_with_kvcache(q, k_cache, v_cache, ints(9, 5, 33), page_table=where["page_table"], **others,
                                      causal=True, return_lse=True, backend="reference")
    return ([y[0].transpose(0, 1) for y in (q, k, v)], list(map(rows_first, caches)), {**where, **others},
            (out[0].transpose(0, 1), lse[0], rows_first(k_cache), rows_first(v_cache)))


def check_serving(out, caches, want, lse=None):
    tolerance = TOLERANCE[out.dtype]
    close(out, want[0].double().cpu(), tolerance)
    if lse is not None:
        close(lse, want[1].double().cpu(), tolerance)
    for cache, wanted in zip(caches, want[2:]):
        assert bits(cache).equal(bits(wanted))


def test_call_of_transformers(backend):
    """Continuous batching, its decoding: q, k and v (n, 1, H, D), all but the table by position."""
    (q, k, v), (k_cache, v_cache), given, want = serving(backend, (1, 1, 1))
    out = flash_attn_with_kvcache(
        q[:, None], k_cache, v_cache, k[:, None], v[:, None], block_table=given["page_table"],
        cache_seqlens=given["seqused_k"], causal=True, softmax_scale=32**-0.5, window_size=(-1, -1),
        s_aux=given["sinks"], backend=backend)
    check_serving(out[:, 0], (k_cache, v_cache), want)


def test_call_of_sglang(backend):
    """A mixed batch, packed, by flash-attn 3's names; k and v go into pages of one key."""
    (q, k, v), caches, given, want = serving(backend, (1, 5, 3))
    table, places = given["page_table"], torch.arange(16, device=DEVICE, dtype=torch.int32)
    table = (table[:, :, None].clamp(0) * 16 + places).flatten(1)
    k_cache, v_cache = (x.view(-1, 1, *x.shape[2:]) for x in caches)
    out, lse = flash_attn_with_kvcache(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, page_table=table, cache_seqlens=given["seqused_k"],
        cu_seqlens_q=given["cu_seqlens_q"], cu_seqlens_k_new=given["cu_seqlens_k_new"], max_seqlen_q=5,
        softmax_scale=32**-0.5, causal=True, window_size=(-1, -1), softcap=0.0, k_descale=None, v_descale=None,
        return_softmax_lse=True, num_splits=0, out=torch.empty_like(want[0]), ver=3, sinks=given["sinks"],
        backend=backend)
    check_serving(out, caches, want, lse)


@pytest.mark.parametrize("is_packed", [False, True])
def test_call_of_flash_attn_3s_tests(backend, is_packed):
    """New keys go to the pages of rows of page_table that cache_batch_idx numbers."""
    new = (2, 0, 3) if is_packed else (2,) * 3
    check_attention(backend, case(
        "flash_attn_3", new, new, (9, 7, 20), 4, is_paged=True, has_batch_idx=True, leftpad=(3, 0, 5), causal=False,
        window=(6, 2), layout="rows", packs_new=is_packed, is_packed=is_packed, rotary_dim=16, interleaved=False,
        rotary_seqlens=(3, 7, 10)), BACKENDS[backend], by_flash_attn_3=True)


def test_calls_of_vllm(backend):
    """The append by slots, then attention."""
    (q, k, v), (k_cache, v_cache), given, want = serving(backend, (1, 5, 3))
    slots = [int(given["page_table"][b, place // 16]) * 16 + place % 16
             for b, begin, n in ((0, 8, 1), (1, 0, 5), (2, 30, 3)) for place in range(begin, begin + n)]
    reshape_and_cache(k, v, k_cache, v_cache, torch.tensor(slots, device=DEVICE), "auto", None, None, backend=backend)
    out = torch.empty_like(want[0])
    minimal_attn.flash_attn_varlen_func(
        q=q, k=k_cache, v=v_cache, out=out, cu_seqlens_q=given["cu_seqlens_q"], max_seqlen_q=5,
        seqused_k=ints(9, 5, 33), max_seqlen_k=33, softmax_scale=32**-0.5, causal=True, alibi_slopes=None,
        window_size=[-1, -1], block_table=given["page_table"], softcap=0.0, scheduler_metadata=None, fa_version=3,
        q_descale=None, k_descale=None, v_descale=None, num_splits=32, s_aux=given["sinks"], backend=backend)
    check_serving(out, (k_cache, v_cache), want)


@cpu
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_by_the_names_of_flash_attn(interleaved):
    """By positions in the orders of flash-attn 2 and 3, with an int as cache_seqlens."""
    q, k, v = (torch.randn(3, 2, n, 16) for n in (4, 2, 2))
    before = torch.randn(2, 3, 20, 2, 16)
    cos, sin = torch.randn(2, 100, 8)
    rotary = dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
    want_caches = before.clone()
    want = attention_with_kvcache(rows_first(q), *map(rows_first, want_caches), ints(9, 9, 9, device="cpu"),
                                  k=rows_first(k), v=rows_first(v), causal=True, **rotary)
    results = []
    for call, arguments in ((flash_attn_with_kvcache, (None, cos, sin, 9)), (with_kvcache_of_flash_attn_2,
                                                                             (cos, sin, 9))):
        caches = before.clone()
        out = call(q, *caches, k, v, *arguments, causal=True, rotary_interleaved=interleaved)
        assert out.equal(rows_first(want)) and caches.equal(want_caches) and not caches.equal(before)
        results.append(out)
    caches = before.clone()
    moved = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=9, causal=True, **rotary,
                                    rotary_seqlens=ints(50, 50, 50, device="cpu"))
    assert caches[1].equal(want_caches[1]) and not caches[0].equal(want_caches[0]) and not moved.equal(results[0])


# Bad input. Nothing is written before an error.

def one(*values):
    return ints(*values, device="cpu")


def arguments():
    """Arguments of append_to_kvcache for pages, on the CPU."""
    return dict(k=torch.randn(2, 2, 3, 32), v=torch.randn(2, 2, 3, 32), k_cache=torch.randn(5, 2, 4, 32),
                v_cache=torch.randn(5, 2, 4, 32), seqused_k=one(9, 5), page_table=one(0, 1, 2, 3, 4, 0).view(2, 3),
                rotary_cos=torch.randn(12, 8), rotary_sin=torch.randn(12, 8))


def dense():
    return dict(arguments(), k_cache=torch.randn(2, 2, 12, 32), v_cache=torch.randn(2, 2, 12, 32), page_table=None)


def packed():
    return dict(arguments(), k=torch.randn(1, 2, 6, 32), v=torch.randn(1, 2, 6, 32), cu_seqlens_k_new=one(0, 2, 6))


TABLE = torch.randn(12, 8)
BAD = [
    (TypeError, "k must be a torch.Tensor, got list", arguments, dict(k=[1.0])),
    (TypeError, "k_cache must be a torch.Tensor, got NoneType", arguments, dict(k_cache=None)),
    (TypeError, "v must be a dense tensor", arguments, dict(v=torch.randn(5, 4).to_sparse())),
    (TypeError, "Unsupported dtype: k is torch.int32", arguments, dict(k=torch.ones(2, 2, 3, 32).int())),
    (TypeError, "dtypes must match: k is torch.float16", arguments, dict(k=torch.randn(2, 2, 3, 32).half())),
    (ValueError, "k, v, k_cache and v_cache must be on the same device: k is on cpu, v on meta", arguments,
     dict(v=torch.randn(2, 2, 3, 32, device="meta"))),
    (ValueError, "Expected 4D tensors: k is", arguments, dict(k=torch.randn(2, 3, 32))),
    (ValueError, "k and v must have the same shape, and the heads and head_dims of the caches", arguments,
     dict(k=torch.randn(2, 2, 2, 32))),
    (ValueError, "k and v must have the same shape, and the heads", arguments,
     {name: torch.randn(2, 4, 3, 32) for name in ("k", "v")}),
    (ValueError, "k and v must have the same shape, and the heads", arguments, dict(v=torch.randn(2, 2, 3, 16))),
    (ValueError, "k and k_cache must have the same head_dim", arguments, dict(k=torch.randn(2, 2, 3, 16))),
    (ValueError, "k_cache and v_cache must have the same shape", arguments, dict(v_cache=torch.randn(5, 2, 3, 32))),
    (ValueError, "Unsupported head_dim 300", arguments,
     {"v": torch.randn(2, 2, 3, 300), "v_cache": torch.randn(5, 2, 4, 300)}),
    (ValueError, "k_cache must be contiguous in its last dimension", arguments,
     dict(k_cache=torch.randn(5, 2, 32, 4).mT)),
    (ValueError, "v_cache cannot be written, since its elements share memory", arguments,
     dict(v_cache=torch.randn(5, 2, 1, 32).expand(-1, -1, 4, -1))),
    (ValueError, "seqused_k must be given with new keys", arguments, dict(seqused_k=None)),
    (TypeError, "seqused_k must be a torch.Tensor, got int", arguments, dict(seqused_k=9)),
    (TypeError, "seqused_k must be int32", arguments, dict(seqused_k=torch.tensor([9, 5]))),
    (ValueError, r"seqused_k must have shape \(2,\)", arguments, dict(seqused_k=one(9, 5, 1))),
    (ValueError, "seqused_k must be on the same device as k", arguments,
     dict(seqused_k=torch.zeros(2, dtype=torch.int32, device="meta"))),
    (ValueError, "seqused_k must be in 0..12 for sample 1, got -1", arguments, dict(seqused_k=one(9, -1))),
    (ValueError, "no room for the new keys of sample 0: seqused_k is 10, 3 are new, and there is room for 12",
     arguments, dict(seqused_k=one(10, 5))),
    (ValueError, "no room for the new keys of sample 1: seqused_k is 12, 3 are new", dense,
     dict(seqused_k=one(9, 12))),
    (ValueError, "no room for the new keys of sample 1: seqused_k is 9, 4 are new", packed, dict(seqused_k=one(9, 9))),
    (ValueError, "page_table must be in 0..4 for the new keys of sample 1, got 5", arguments,
     dict(page_table=one(0, 1, 2, 3, 5, 0).view(2, 3), seqused_k=one(9, 4))),
    (ValueError, "page_table must be in 0..4 for the new keys of sample 0, got -1", arguments,
     dict(page_table=one(0, 1, -1, 3, 4, 0).view(2, 3))),
    (TypeError, "page_table must be int32", arguments, dict(page_table=torch.zeros(2, 3))),
    (ValueError, "page_table must have 2 rows", arguments, dict(page_table=torch.zeros(3, 3, dtype=torch.int32))),
    (ValueError, "cache_batch_idx must be in 0..1 for the new keys of sample 0, got 2", arguments,
     dict(cache_batch_idx=one(2, 0))),
    (ValueError, "page_table must be in 0..4 for the new keys of sample 0, got 5", arguments,
     dict(page_table=one(0, 1, 2, 3, 4, 5).view(2, 3), cache_batch_idx=one(1, 0))),
    (TypeError, "cache_batch_idx must be int32", dense, dict(cache_batch_idx=torch.zeros(2).long())),
    (ValueError, "cache_batch_idx must be in 0..1 for the new keys of sample 1, got 2", dense,
     dict(cache_batch_idx=one(0, 2))),
    (ValueError, "the cache must have as many sequences as there are samples, 2", dense,
     {name: torch.randn(3, 2, 12, 32) for name in ("k_cache", "v_cache")}),
    (TypeError, "cu_seqlens_k_new must be int32", packed, dict(cu_seqlens_k_new=torch.tensor([0, 2, 6]))),
    (ValueError, r"with cu_seqlens_k_new, k must be packed, \(1, H, Tq, D\)", arguments,
     dict(cu_seqlens_k_new=one(0, 1, 3))),
    (ValueError, r"cu_seqlens_k_new must have one shape \(B \+ 1,\)", packed, dict(cu_seqlens_k_new=one(0))),
    (ValueError, "cu_seqlens_k_new must ascend", packed, dict(cu_seqlens_k_new=one(0, 5, 4))),
    (ValueError, "cu_seqlens_k_new must start at 0 and stay within 0..6", packed, dict(cu_seqlens_k_new=one(0, 2, 7))),
    (ValueError, "rotary_cos and rotary_sin must both be given", arguments, dict(rotary_sin=None)),
    (ValueError, "rotary_seqlens needs rotary_cos and rotary_sin", arguments,
     dict(rotary_cos=None, rotary_sin=None, rotary_seqlens=one(0, 0))),
    (TypeError, "rotary_cos must be a torch.Tensor, got float", arguments, dict(rotary_cos=1.0)),
    (TypeError, "rotary_cos must have the dtype of k, torch.float32, got torch.float64", arguments,
     dict(rotary_cos=TABLE.double())),
    (ValueError, "rotary_sin must be on the same device as k", arguments, dict(rotary_sin=TABLE.to("meta"))),
    (ValueError, r"rotary_cos must be \(S_ro, rotary_dim / 2\), contiguous", arguments, dict(rotary_cos=TABLE[None])),
    (ValueError, r"rotary_sin must be \(S_ro, rotary_dim / 2\), contiguous", arguments, dict(rotary_sin=TABLE.mT)),
    (ValueError, "contiguous and not empty", arguments, dict(rotary_cos=TABLE[:0], rotary_sin=TABLE[:0])),
    (ValueError, r"must have the same shape, got \(12, 8\) and \(11, 8\)", arguments, dict(rotary_sin=TABLE[:11])),
    (ValueError, "rotary_dim must be a multiple of 16 and at most the head_dim 32, got 8", arguments,
     {name: torch.randn(12, 4) for name in ("rotary_cos", "rotary_sin")}),
    (ValueError, "rotary_dim must be a multiple of 16 and at most the head_dim 32, got 48", arguments,
     {name: torch.randn(12, 24) for name in ("rotary_cos", "rotary_sin")}),
    (ValueError, "rotary_cos has 11 positions, and sample 0 needs those from seqused_k 9 on, as many as its 3 rows",
     arguments, dict(rotary_cos=TABLE[:11], rotary_sin=TABLE[:11])),
    (ValueError, "sample 1 needs those from rotary_seqlens 10 on", arguments, dict(rotary_seqlens=one(0, 10))),
    (ValueError, "sample 0 needs those from rotary_seqlens -1 on", arguments, dict(rotary_seqlens=one(-1, 0))),
    (TypeError, "rotary_seqlens must be int32", arguments, dict(rotary_seqlens=torch.tensor([0, 0]))),
    (ValueError, r"rotary_seqlens must have shape \(2,\)", arguments, dict(rotary_seqlens=one(0))),
    (TypeError, "rotary_interleaved must be a bool, got 1", arguments, dict(rotary_interleaved=1)),
    (ValueError, "unknown backend 'other'", arguments, dict(backend="other")),
]


def check_error(call, error, match, given):
    """The call raises this error, and writes nothing."""
    before = {name: x.clone() for name, x in given.items() if "cache" in name and isinstance(x, torch.Tensor)}
    with pytest.raises(error, match=match):
        call(**given)
    for name, x in before.items():
        assert x.equal(given[name])


@cpu
@pytest.mark.parametrize("error, match, make_arguments, change", BAD, ids=[x[1] for x in BAD])
def test_bad_input(error, match, make_arguments, change):
    append_to_kvcache(**make_arguments())
    check_error(append_to_kvcache, error, match, {**make_arguments(), **change})
    if "k_cache must be a torch" not in match and "unknown" not in match:  # the same from a call of attention
        given = dict(q=torch.randn(2, 4, 3, 32), **make_arguments(), causal=True)
        attention_with_kvcache(**given)
        check_error(attention_with_kvcache, error, "", {**given, **change})


@cpu
@pytest.mark.parametrize("error, match, change", [
    (ValueError, "k and v must both be given, or neither", dict(v=None)),
    (ValueError, "k and v must both be given, or neither", dict(k=None)),
    (ValueError, "rotary_cos needs new keys and values, k and v", dict(k=None, v=None)),
    (ValueError, "rotary_sin needs new keys and values", dict(k=None, v=None, rotary_cos=None)),
    (ValueError, "rotary_seqlens needs new keys and values", dict(
        k=None, v=None, rotary_cos=None, rotary_sin=None, rotary_seqlens=one(0, 0))),
    (ValueError, "cu_seqlens_k_new needs new keys and values", dict(
        k=None, v=None, rotary_cos=None, rotary_sin=None, cu_seqlens_k_new=one(0, 3, 6))),
    (ValueError, "k must have as many samples as q, got 3", {name: torch.randn(3, 2, 3, 32) for name in ("k", "v")}),
    (ValueError, "leftpad_k must be in 0..9, the length of sample 0, got 10", dict(leftpad_k=one(10, 0))),
    (ValueError, "rotary_cos has 12 positions, and sample 0 needs those from seqused_k 9 on, as many as its 4 rows",
     dict(q=torch.randn(2, 4, 4, 32))),
    (TypeError, "causal must be a bool", dict(causal=1)),
    (ValueError, "sm_scale must be finite", dict(sm_scale=math.inf)),
    (ValueError, "softcap must be at least 0", dict(softcap=-1.0)),
    (ValueError, r"sinks must have shape \(4,\)", dict(sinks=torch.ones(2))),
    (ValueError, r"alibi_slopes must have shape \(4,\) or \(2, 4\)", dict(alibi_slopes=torch.ones(3))),
])
def test_bad_input_of_attention(error, match, change):
    given = dict(q=torch.randn(2, 4, 3, 32), **arguments(), causal=True)
    attention_with_kvcache(**given)
    check_error(attention_with_kvcache, error, match, {**given, **change})


@cpu
@pytest.mark.parametrize("error, match, change", [
    (ValueError, "no room for the new keys: cache_seqlens is 19, 2 are new, and there is room for 20",
     dict(cache_seqlens=19)),
    (ValueError, "no room for the new keys: cache_seqlens is 39, 2 are new, and there is room for 40",
     dict(cache_seqlens=39, page_table=one(*range(3), *range(3)).view(3, 2))),
    (ValueError, "no room for the new keys of sample 2: cache_seqlens is 19", dict(cache_seqlens=one(3, 3, 19))),
    (ValueError, "no room for the new keys of sample 1: cache_seqlens is 18, 3 are new", dict(
        k=torch.randn(6, 2, 16), v=torch.randn(6, 2, 16), cu_seqlens_k_new=one(0, 1, 4, 6), cache_seqlens=18)),
    (ValueError, "cache_seqlens must be given with new keys", dict(cache_seqlens=None)),
    (ValueError, r"flash_attn_with_kvcache: k must be \(B, Sn, Hk, D\)", dict(k=torch.randn(6, 2, 16))),
    (ValueError, r"flash_attn_with_kvcache: v must be \(T, Hk, D\)", dict(
        k=torch.randn(6, 2, 16), cu_seqlens_k_new=one(0, 1, 4, 6))),
    (ValueError, "k and v must both be given", dict(v=None)),
    (ValueError, "rotary_cos needs new keys", dict(k=None, v=None, rotary_cos=TABLE, rotary_sin=TABLE)),
    (NotImplementedError, "flash_attn_with_kvcache has no backward pass yet, but k requires grad",
     dict(k=torch.randn(3, 2, 2, 16, requires_grad=True))),
    (ValueError, "out must be torch.float32 of shape", dict(out=torch.empty(3, 2, 4, 15))),
])
def test_bad_input_by_the_names_of_flash_attn(error, match, change):
    q, k, v, k_cache, v_cache = (torch.randn(3, s, n, 16) for s, n in ((2, 4), (2, 2), (2, 2), (20, 2), (20, 2)))
    given = dict(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, cache_seqlens=9)
    flash_attn_with_kvcache(**given)
    check_error(flash_attn_with_kvcache, error, match, {**given, **change})


def slots():
    return dict(key=torch.randn(5, 2, 16), value=torch.randn(5, 2, 8), key_cache=torch.randn(3, 4, 2, 16),
                value_cache=torch.randn(3, 4, 2, 8), slot_mapping=torch.tensor([0, 3, -1, 11, 5]))


@cpu
@pytest.mark.parametrize("error, match, change", [
    (TypeError, "key must be a torch.Tensor, got list", dict(key=[])),
    (TypeError, "Unsupported dtype: key is torch.int32", dict(key=torch.ones(5, 2, 16).int())),
    (TypeError, "dtypes must match: key is torch.float32, value is torch.float16", dict(
        value=torch.randn(5, 2, 8).half())),
    (ValueError, "must be on the same device: key is on cpu", dict(value=torch.randn(5, 2, 8, device="meta"))),
    (ValueError, r"Expected key and value \(T, Hk, D\) and caches", dict(key=torch.randn(5, 1, 2, 16))),
    (ValueError, "the heads and head_dims of the caches", dict(key=torch.randn(5, 2, 8))),
    (ValueError, "the heads and head_dims of the caches", dict(value=torch.randn(4, 2, 8))),
    (ValueError, "the heads and head_dims of the caches", dict(value_cache=torch.randn(3, 5, 2, 8))),
    (ValueError, "Unsupported head_dim 300 of value", dict(
        value=torch.randn(5, 2, 300), value_cache=torch.randn(3, 4, 2, 300))),
    (ValueError, "value_cache must be contiguous in its last dimension", dict(value_cache=torch.randn(3, 4, 8, 2).mT)),
    (ValueError, "key_cache cannot be written, since its elements share memory", dict(
        key_cache=torch.randn(1, 4, 2, 16).expand(3, -1, -1, -1))),
    (TypeError, "slot_mapping must be a torch.Tensor", dict(slot_mapping=[0, 1])),
    (TypeError, "slot_mapping must be int64, got torch.int32", dict(slot_mapping=one(0, 1, 2, 3, 4))),
    (ValueError, "slot_mapping must be on the same device as key", dict(
        slot_mapping=torch.zeros(5, dtype=torch.int64, device="meta"))),
    (ValueError, "slot_mapping must be contiguous, with one value a row of key, 5, or fewer", dict(
        slot_mapping=torch.arange(6))),
    (ValueError, "slot_mapping must be contiguous", dict(slot_mapping=torch.arange(10)[::2])),
    (ValueError, "slot_mapping must be below 12, the number of slots, got 12", dict(
        slot_mapping=torch.tensor([0, 12]))),
    (NotImplementedError, "kv_cache_dtype 'fp8' is not supported for caches in torch.float32", dict(
        kv_cache_dtype="fp8")),
    (NotImplementedError, "reshape_and_cache has no backward pass yet, but value requires grad", dict(
        value=torch.randn(5, 2, 8, requires_grad=True))),
    (ValueError, "unknown backend 'other'", dict(backend="other")),
])
def test_bad_slots(error, match, change):
    reshape_and_cache(**slots())
    check_error(reshape_and_cache, error, match, {**slots(), **change})


@cpu
@pytest.mark.parametrize("change", [
    dict(k=torch.randn(2, 3, 5, 32)), dict(v=torch.randn(2, 2, 4, 32)), dict(k=torch.randn(2, 2, 32, 5).mT),
    dict(k_cache=torch.randn(6, 1, 8, 32), v_cache=torch.randn(6, 1, 8, 32)), dict(v_cache=torch.randn(6, 2, 7, 32)),
    dict(v_cache=torch.randn(6, 2, 8, 16)),
    dict(seqused_k=None), dict(seqused_k=torch.ones(3, dtype=torch.int32)), dict(seqused_k=torch.ones(2).long()),
    dict(page_table=None), dict(page_table=torch.zeros(1, 3, dtype=torch.int32)),
    dict(page_table=torch.zeros(2, 6, dtype=torch.int32)[:, ::2]), dict(batch_idx=torch.zeros(3, dtype=torch.int32)),
    dict(cu_seqlens_k_new=torch.tensor([0, 2, 5], dtype=torch.int32)), dict(slot_mapping=torch.arange(5)),
    dict(seqused_k=None, page_table=None, slot_mapping=torch.arange(4)), dict(q=torch.randn(1, 4, 5, 32)),
    dict(q=torch.randn(2, 4, 5, 16)), dict(rotary_cos=torch.ones(9, 8)),
    dict(rotary_cos=torch.ones(9, 4), rotary_sin=torch.ones(9, 4)),
    dict(rotary_cos=torch.ones(9, 24), rotary_sin=torch.ones(9, 24)),
    dict(rotary_cos=torch.ones(9, 8), rotary_sin=torch.ones(8, 8)),
    dict(rotary_seqlens=torch.ones(1, dtype=torch.int32)),
], ids=lambda change: "-".join(f"{name}_{tuple(getattr(x, 'shape', ()))}" for name, x in change.items()))
def test_op_refuses_what_would_write_out_of_bounds(change):
    minimal_attn.load()
    k, cache = torch.randn(2, 2, 5, 32), torch.randn(6, 2, 8, 32)
    given = dict(k=k, v=k, k_cache=cache, v_cache=cache.clone(), **Append(
        torch.ones(2, dtype=torch.int32), torch.arange(6, dtype=torch.int32).view(2, 3))._asdict())
    torch.ops.minimal_attn.append_kvcache(*given.values())
    with pytest.raises(ValueError):
        torch.ops.minimal_attn.append_kvcache(*{**given, **change}.values())


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache", "rotary_cos", "rotary_sin"])
def test_gradients_are_refused(backend, name):
    given = {key: on_device(x.to(BACKENDS[backend]) if x.is_floating_point() else x) for key, x in arguments().items()}
    q = torch.randn(2, 4, 3, 32, dtype=BACKENDS[backend], device=DEVICE)
    given[name].requires_grad_()
    for function, call in (("append_to_kvcache", append_to_kvcache), ("attention_with_kvcache", lambda **given:
                                                                      attention_with_kvcache(q, causal=True, **given))):
        check_error(call, NotImplementedError, f"{function} has no backward pass yet, but {name} requires grad",
                    dict(given, backend=backend))
        with torch.no_grad():
            assert not call(**given, backend=backend).requires_grad
    with torch.autograd.forward_ad.dual_level():
        x = given[name].detach()
        given[name] = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=f"no forward-mode derivative, but {name} has a tangent"):
            append_to_kvcache(**given, backend=backend)


@cpu
def test_errors_while_tracing():
    """Dynamo fails in its own words, but with ours among them."""
    given = arguments()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="ValueError.*page_table must have 2 rows"):
        torch.compile(append_to_kvcache, fullgraph=True, backend="eager")(
            **{**given, "page_table": given["page_table"][:1]})
