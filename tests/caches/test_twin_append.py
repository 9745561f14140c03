"""New keys and values for a cache in Triton, against a plain loop. What the loop does not write must keep its bits: of
the caches, and of all that lies around them.

All numbers are multiples of 1/64 below 2. Their products are exact in fp32, so that results are compared bit by bit.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Optional

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from cases import make_tensor  # noqa: E402
from conftest import HAS_GPU, captured  # noqa: E402

import triton_ref.ops  # noqa: E402, F401  it registers the op

DEVICE = "cuda" if HAS_GPU else "cpu"
ROTARY_ROWS = 40  # of the tables; some positions are beyond

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@dataclass(frozen=True)
class Case:
    """taken: the places of each sample that are taken. new: its new rows, the same number or with packed=True several.
    q has as many rows."""

    name: str
    taken: tuple = (3, 0, 7)
    new: tuple = (2, 2, 2)
    packed: bool = False
    page_size: int = 0  # 0: one tensor of sequences, of `size` rows
    size: int = 16
    max_pages: int = 3
    pages: dict = dataclasses.field(default_factory=dict)  # entries of the table that are wrong
    batch_idx: Optional[tuple] = None
    slots: Optional[tuple] = None
    rotary_dim: int = 0
    interleaved: bool = False
    advances: bool = True
    rotary_seqlens: Optional[tuple] = None
    has_q: bool = True
    heads: tuple = (4, 2)
    head_dims: tuple = (32, 32)
    layout: str = "bhsd"
    dtype: torch.dtype = torch.float32

    def __str__(self):
        return self.name


WRONG = {(0, 0): -1, (1, 0): 10, (2, 1): 2**31 - 1, (2, 2): -(2**31)}
CASES = [
    Case("dense"),
    Case("one", taken=(15,), new=(1,), heads=(1, 1), head_dims=(16, 16)),
    Case("page_size_1", page_size=1, max_pages=9, layout="bshd"),
    Case("page_size_3", page_size=3, new=(4, 4, 4), rotary_dim=32),
    Case("page_size_16", page_size=16, taken=(15, 32, 47), layout="bshd"),
    Case("batch_idx", batch_idx=(4, 0, 1), rotary_dim=16, layout="odd"),
    Case("batch_idx_outside", batch_idx=(-1, 5, 2**31 - 1)),
    Case("packed", packed=True, new=(1, 0, 5), page_size=16, rotary_dim=32),
    Case("packed_dense", packed=True, new=(0, 3, 1), rotary_dim=16, interleaved=True),
    Case("pages_outside", page_size=4, taken=(3, 1, 6), new=(3, 3, 3), pages=WRONG),
    Case("beyond", page_size=4, max_pages=2, taken=(7, 8, 6), new=(3, 3, 3), rotary_dim=16),
    Case("lengths_outside", taken=(2**31 - 1, -(2**31), 16)),
    Case("rotary_interleaved", rotary_dim=32, interleaved=True, layout="bshd"),
    Case("rotary_all_at_first", rotary_dim=16, advances=False),
    Case("rotary_seqlens", rotary_dim=16, rotary_seqlens=(30, 0, 11)),
    Case("rotary_beyond_tables", rotary_dim=32, rotary_seqlens=(38, 2**31 - 1, -5), interleaved=True),
    Case("rotary_of_k", rotary_dim=16, has_q=False),
    Case("slots", taken=(), slots=(0, -1, 63, 64, 2**40, 17), page_size=16, layout="bshd"),
    Case("slots_of_3", taken=(), slots=(10, -(2**40), 2), page_size=3),
    Case("no_rows", new=(0, 0, 0), rotary_dim=16),
    Case("no_samples", taken=(), new=(), size=4),
    Case("no_places", size=0),
    Case("many_heads", heads=(70, 35), new=(1, 1, 1), rotary_dim=16),
    Case("head_dims", head_dims=(40, 24), rotary_dim=16, page_size=3),
    Case("head_dims_odd", head_dims=(17, 70), rotary_dim=16, interleaved=True, layout="odd"),
    Case("fp16", dtype=torch.float16, page_size=16, rotary_dim=32),
    Case("bf16", dtype=torch.bfloat16, page_size=16, rotary_dim=16, interleaved=True, packed=True, new=(2, 0, 3)),
    Case("bf16_slots", dtype=torch.bfloat16, taken=(), slots=(5, 9, -3), page_size=16),
]


def numbers(*shape, case):
    return (torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(sum(shape))) / 64).to(case.dtype)


def int32(values):
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=DEVICE)


def tensor(shape, case):
    """Of `shape` in the case's layout, NaN all around."""
    return make_tensor(shape, case.dtype, DEVICE, case.layout).copy_(numbers(*shape, case=case))


def make(case):
    """The arguments of the op."""
    batch_size, (nheads, nheads_k), (head_dim, head_dim_v) = len(case.taken), case.heads, case.head_dims
    rows = len(case.slots) if case.slots else sum(case.new) + 2 if case.packed else max(case.new, default=0)
    elements = 1 if case.packed or case.slots else batch_size
    num_sequences = batch_size * case.max_pages + 1 if case.page_size and not case.slots else max(batch_size, 4) + 1
    if not case.page_size and case.batch_idx is None:
        num_sequences = batch_size
    k_new, v_new = (tensor((elements, nheads_k, rows, d), case) for d in case.head_dims)
    size = case.page_size or case.size
    k_cache, v_cache = (tensor((num_sequences, nheads_k, size, d), case) for d in case.head_dims)
    order = torch.randperm(num_sequences, generator=torch.Generator().manual_seed(1))
    table = None
    if case.page_size and not case.slots:
        table = order[:batch_size * case.max_pages].view(batch_size, -1).int()
    for place, page in case.pages.items():
        table[place] = page
    bounds = int32([sum(case.new[:b]) for b in range(batch_size + 1)]) if case.packed else None
    cos, sin = (numbers(ROTARY_ROWS + i, case.rotary_dim // 2, case=case)[i:].contiguous().to(DEVICE) for i in range(2))
    q = tensor((elements, nheads, rows, head_dim), case) if case.has_q and case.rotary_dim else None
    return (k_new, v_new, k_cache, v_cache, None if case.slots else int32(case.taken),
            None if table is None else table.to(DEVICE), int32(case.batch_idx), bounds,
            torch.tensor(case.slots, device=DEVICE) if case.slots else None, q, bounds if q is not None else None,
            *((cos, sin) if case.rotary_dim else (None, None)), int32(case.rotary_seqlens), case.interleaved,
            case.advances)


def turned(row, cos, sin, position, interleaved):
    """row (H, D) at a position, in fp64."""
    row = row.double()
    if cos is None:
        return row
    position, half = max(0, min(position, len(cos) - 1)), cos.shape[1]
    x, y = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    out, cos, sin = row.clone(), cos[position].double(), sin[position].double()
    out[:, x], out[:, y] = row[:, x] * cos - row[:, y] * sin, row[:, y] * cos + row[:, x] * sin
    return out


def loop(case, k_new, v_new, k_cache, v_cache, seqused_k, table, batch_idx, bounds, slots, q, _, cos, sin,
         rotary_seqlens, interleaved, advances):
    """The op: its outputs, and the caches are written. Rows of q that belong to no sample are left out: None."""
    num_sequences, size = k_cache.shape[0], k_cache.shape[2]
    if slots is not None:
        for t, slot in enumerate(slots.tolist()):
            if 0 <= slot < num_sequences * size:
                k_cache[slot // size, :, slot % size] = k_new[0, :, t]
                v_cache[slot // size, :, slot % size] = v_new[0, :, t]
        return None, []
    capacity = size * (1 if table is None else table.shape[1])
    rotated, lengths = None if q is None else torch.full_like(q, math.nan), []
    for b, taken in enumerate(case.taken):
        taken = max(0, min(taken, capacity))
        first = taken if rotary_seqlens is None else case.rotary_seqlens[b]
        lengths.append(min(capacity, taken + case.new[b]))
        for t in range(case.new[b]):
            element, row = (0, sum(case.new[:b]) + t) if case.packed else (b, t)
            if q is not None:
                rotated[element, :, row] = turned(q[element, :, row], cos, sin, first + t * advances, interleaved)
            if taken + t >= capacity:
                continue
            sequence, place = b if batch_idx is None else case.batch_idx[b], taken + t
            if table is not None:
                sequence, place = int(table[b, place // size]), place % size
            if 0 <= sequence < num_sequences:
                k_cache[sequence, :, place] = turned(k_new[element, :, row], cos, sin, first + t, interleaved).to(
                    k_cache.dtype)
                v_cache[sequence, :, place] = v_new[element, :, row]
    return rotated, lengths


def bits(x):
    """All of the memory that x is a view of."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    return whole.clone().view(torch.int16 if x.itemsize == 2 else torch.int32)


def check(case, inputs, outputs, before):
    """before: copies of the inputs, of which the loop changes the caches."""
    want_q, want_lengths = loop(case, *before)
    q_rotated, lengths = outputs
    for got, want in zip(inputs, before):
        if isinstance(got, torch.Tensor):
            assert torch.equal(got if got.dtype.itemsize > 4 else bits(got), want if want.dtype.itemsize > 4 else
                               bits(want))
    assert lengths.dtype == torch.int32 and lengths.tolist() == want_lengths
    if want_q is None:
        assert q_rotated.shape == (0,)
    else:
        assert q_rotated.shape == want_q.shape and q_rotated.dtype == want_q.dtype and q_rotated.stride(-1) == 1
        rows = sum(case.new) if case.packed else None
        assert torch.equal(q_rotated[:, :, :rows], want_q[:, :, :rows])


def append(*inputs):
    return torch.ops.minimal_attn.triton_append(*inputs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_append_is_that_of_a_loop(case):
    inputs, before = make(case), make(case)
    check(case, inputs, append(*inputs), before)


def test_keys_and_values_may_alternate_in_memory():
    case = Case("any", page_size=4, rotary_dim=16)

    def alternating():
        inputs = make(case)
        both = torch.stack(inputs[2:4], 2).transpose(1, 3).contiguous().transpose(1, 3)  # (N, S, 2, Hk, D) in memory
        return *inputs[:2], both[:, :, 0], both[:, :, 1], *inputs[4:]

    inputs, before = alternating(), alternating()
    assert inputs[2].stride(2) == 2 * inputs[2].shape[1] * inputs[2].shape[3]
    check(case, inputs, append(*inputs), before)


def test_two_samples_at_one_place():
    """One of them wins, for each head and each of K and V."""
    k_new, v_new, k_cache, v_cache, *others = make(Case("any", taken=(3, 3), new=(1, 1), batch_idx=(1, 1)))
    append(k_new, v_new, k_cache, v_cache, *others)
    for new, cache in ((k_new, k_cache), (v_new, v_cache)):
        assert (cache[1, :, 3] == new[:, :, 0]).all(-1).any(0).all()


def test_a_wrong_cu_seqlens_writes_nothing_outside():
    case = Case("any", packed=True, page_size=4, new=(2, 1, 2), rotary_dim=16)
    inputs, before = list(make(case)), make(case)
    inputs[7] = inputs[10] = int32([5, -7, 2**31 - 1, 2])
    _, lengths = append(*inputs)
    assert (lengths >= 0).all() and (lengths <= 12).all()
    for got, want in zip(inputs[2:4], before[2:4]):
        outside = torch.ones_like(bits(got), dtype=torch.bool)
        outside.as_strided(got.shape, got.stride(), got.storage_offset()).fill_(False)
        assert torch.equal(bits(got)[outside], bits(want)[outside])


CHECKED = [Case("dense", batch_idx=(2, 0, 4), rotary_dim=16), Case("packed", packed=True, page_size=4, new=(1, 0, 2)),
           Case("slots", taken=(), slots=(3, -1, 9), page_size=4)]


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_opcheck(case):
    torch.library.opcheck(torch.ops.minimal_attn.triton_append.default, make(case))


def test_compile_fullgraph():
    case = Case("any", page_size=4, rotary_dim=16)
    inputs, before = make(case), make(case)
    check(case, inputs, torch.compile(append, fullgraph=True, backend="aot_eager")(*inputs), before)


@pytest.mark.gpu
def test_graph_serves_other_lengths_and_tables():
    case = Case("any", page_size=16, rotary_dim=32, dtype=torch.float16)
    inputs = make(case)
    graph, outputs = captured(lambda: append(*inputs))
    inputs[4].copy_(int32([40, 5, 47]))
    inputs[5].copy_(inputs[5].flip(0))
    before = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    graph.replay()
    want_q, want_lengths = loop(dataclasses.replace(case, taken=(40, 5, 47)), *before)
    assert torch.equal(outputs[0], want_q) and outputs[1].tolist() == want_lengths
    assert torch.equal(inputs[2], before[2]) and torch.equal(inputs[3], before[3])
