"""New keys and values for a cache in Triton: one small kernel writes them to their places, rotates the keys and q by
their positions (Su et al., RoFormer, 2021), and counts the keys.

A program has one row of some heads: a new row of K and V, or a row of q. The last programs have the lengths. Nothing
outside of the cache is written, whatever lengths, tables and slots say. Read next: decode.py."""

import torch
import triton
import triton.language as tl

from minimal_attn.checks import empty_like

from .attention import block_d
from .launching import Launch, layouts, remember
from .sequence import head_of, new_rows, rotary_row, sample_row, strides_of

# Parameters that should not be compiled for.
NUMBERS = ("new_programs", "q_programs", "batch_size", "seqlen_new", "seqlen_q", "capacity", "num_sequences",
           "seqlen_rotary")

TILE = 1024  # elements of a tile: 8 a thread


@triton.jit
def _rotated(x, strides, element, row, heads, cols, is_in_tile, table_row, cos_ptr, sin_ptr, kRotaryDim: tl.constexpr,
             kInterleaved: tl.constexpr):
    """Loads [heads, cols] of a row of x and rotates it. A pair (x, y) of columns becomes (x cos - y sin,
    y cos + x sin), in fp32, rounded once. table_row: the row of the tables for the position of x, if there are
    tables."""
    rows = head_of(x, strides, element, 0, row) + heads.to(tl.int64)[:, None] * strides.head
    tile = tl.load(rows + cols[None, :], mask=is_in_tile, other=0.0)
    if cos_ptr is not None:
        half: tl.constexpr = kRotaryDim // 2
        if kInterleaved:
            is_first, others, angles = cols % 2 == 0, cols ^ 1, cols // 2
        else:
            is_first = cols < half
            others, angles = tl.where(is_first, cols + half, cols - half), tl.where(is_first, cols, cols - half)
        turns = cols < kRotaryDim
        other = tl.load(rows + others[None, :], mask=is_in_tile & turns[None, :], other=0.0).to(tl.float32)
        place = tl.cast(table_row, tl.int64) * half + angles
        cos = tl.load(cos_ptr + place, mask=turns, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + place, mask=turns, other=0.0).to(tl.float32)
        turned = tile.to(tl.float32) * cos[None, :] + other * tl.where(is_first, -sin, sin)[None, :]
        tile = tl.where(turns[None, :], turned.to(tile.dtype), tile)
    return tile


@triton.jit
def _store(x, strides, element, row, heads, cols, is_in_tile, tile):
    pointers = head_of(x, strides, element, 0, row) + heads.to(tl.int64)[:, None] * strides.head + cols[None, :]
    tl.store(pointers, tile, mask=is_in_tile)


@triton.jit
def _place_of(tables, b, i, row, page_table_stride, batch_size, seqlen_new, capacity, num_sequences,
              kPageSize: tl.constexpr):
    """(sequence, row in it, whether the cache has it) of a new row: row i of sample b, or row `row` of a slot."""
    seqused_k_ptr, page_table_ptr, batch_idx_ptr, cu_seqlens_new_ptr, slot_mapping_ptr = tables
    if slot_mapping_ptr is not None:
        slot = tl.load(slot_mapping_ptr + row)
        sequence, place, is_place = slot // kPageSize, slot % kPageSize, slot >= 0
    else:
        count, taken = new_rows(cu_seqlens_new_ptr, seqused_k_ptr, b, batch_size, seqlen_new, capacity)
        place, is_place = taken + i, i < tl.minimum(count, capacity - taken)
        if page_table_ptr is not None:
            sequence = tl.load(page_table_ptr + tl.cast(b, tl.int64) * page_table_stride + place // kPageSize,
                               mask=is_place, other=-1)
            place = place % kPageSize
        elif batch_idx_ptr is not None:
            sequence = tl.load(batch_idx_ptr + b)
        else:
            sequence = b
    return sequence, place, is_place & (sequence >= 0) & (sequence < num_sequences)


@triton.jit(do_not_specialize=[*NUMBERS])
def _append(k_new_ptr, v_new_ptr, k_cache_ptr, v_cache_ptr, q_ptr, q_rotated_ptr, lengths_ptr, tables, cu_seqlens_q_ptr,
            cos_ptr, sin_ptr, rotary_seqlens_ptr, strides, page_table_stride, new_programs, q_programs, batch_size,
            nheads, nheads_k, seqlen_new, seqlen_q, capacity, num_sequences, seqlen_rotary, head_dim, head_dim_v,
            kMaskCols: tl.constexpr, kRotaryDim: tl.constexpr, kInterleaved: tl.constexpr, kAdvances: tl.constexpr,
            kPageSize: tl.constexpr, kHeads: tl.constexpr, kBlockD: tl.constexpr, kBlockDv: tl.constexpr,
            kBlock: tl.constexpr):
    """tables: the first five fields of minimal_attn.options.Append. strides: of the first six tensors."""
    k_new_strides, v_new_strides, k_strides, v_strides, q_strides, rotated_strides = strides
    seqused_k_ptr, page_table_ptr, batch_idx_ptr, cu_seqlens_new_ptr, slot_mapping_ptr = tables
    pid = tl.program_id(0)
    cols, cols_v = tl.arange(0, kBlockD), tl.arange(0, kBlockDv)
    is_col = (cols < head_dim) | (not kMaskCols)
    if pid < new_programs:
        parts = (nheads_k + kHeads - 1) // kHeads
        heads = pid % parts * kHeads + tl.arange(0, kHeads)
        b, i, element, row = sample_row(cu_seqlens_new_ptr, pid // parts, batch_size, seqlen_new)
        sequence, place, is_place = _place_of(tables, b, i, row, page_table_stride, batch_size, seqlen_new, capacity,
                                              num_sequences, kPageSize)
        table_row = rotary_row(cos_ptr, rotary_seqlens_ptr, seqused_k_ptr, b, i, capacity, seqlen_rotary)
        is_head = heads < tl.where(is_place, nheads_k, 0)  # no scalar condition in a mask, see decode.py
        is_in_tile = is_head[:, None] & is_col[None, :]
        is_in_tile_v = is_head[:, None] & ((cols_v < head_dim_v) | (not kMaskCols))[None, :]
        k = _rotated(k_new_ptr, k_new_strides, element, row, heads, cols, is_in_tile, table_row, cos_ptr, sin_ptr,
                     kRotaryDim, kInterleaved)
        v = _rotated(v_new_ptr, v_new_strides, element, row, heads, cols_v, is_in_tile_v, 0, None, None, 0, False)
        _store(k_cache_ptr, k_strides, sequence, place, heads, cols, is_in_tile, k)
        _store(v_cache_ptr, v_strides, sequence, place, heads, cols_v, is_in_tile_v, v)
    elif q_ptr is not None and pid < new_programs + q_programs:
        parts = (nheads + kHeads - 1) // kHeads
        of_q = pid - new_programs
        heads = of_q % parts * kHeads + tl.arange(0, kHeads)
        b, i, element, row = sample_row(cu_seqlens_q_ptr, of_q // parts, batch_size, seqlen_q)
        table_row = rotary_row(cos_ptr, rotary_seqlens_ptr, seqused_k_ptr, b, i if kAdvances else 0, capacity,
                               seqlen_rotary)
        is_in_tile = (heads < nheads)[:, None] & is_col[None, :]
        q = _rotated(q_ptr, q_strides, element, row, heads, cols, is_in_tile, table_row, cos_ptr, sin_ptr, kRotaryDim,
                     kInterleaved)
        _store(q_rotated_ptr, rotated_strides, element, row, heads, cols, is_in_tile, q)
    elif lengths_ptr is not None:
        samples = (pid - new_programs - q_programs) * kBlock + tl.arange(0, kBlock)
        count, taken = new_rows(cu_seqlens_new_ptr, seqused_k_ptr, tl.minimum(samples, batch_size - 1), batch_size,
                                seqlen_new, capacity)
        tl.store(lengths_ptr + samples, taken + tl.minimum(count, capacity - taken), mask=samples < batch_size)


_plans = {}  # {all that the launch depends on: the launch}


def launch_of(k_new, v_new, k_cache, v_cache, append, q_rotated):
    """The Launch of _append for minimal_attn.options.Append, whose q is None where it is not rotated, as q_rotated."""
    (nheads_k, seqlen_new, head_dim), head_dim_v = k_new.shape[1:], v_new.shape[3]
    nheads, seqlen_q = (0, 0) if q_rotated is None else q_rotated.shape[1:3]
    num_sequences, _, page_size, _ = k_cache.shape
    page_table, by_slots = append.page_table, append.seqused_k is None
    batch_size = 1 if by_slots else len(append.seqused_k)
    kBlockD, kBlockDv = block_d(k_new.dtype, head_dim), block_d(k_new.dtype, head_dim_v)
    kHeads, kBlock = min(triton.next_power_of_2(max(nheads, nheads_k)), max(1, TILE // max(kBlockD, kBlockDv))), 128
    new_programs = seqlen_new * (batch_size if append.cu_seqlens_k_new is None else 1) * triton.cdiv(nheads_k, kHeads)
    q_programs = seqlen_q * (batch_size if append.cu_seqlens_q is None else 1) * triton.cdiv(nheads, kHeads)
    of_lengths = 0 if by_slots else triton.cdiv(batch_size, kBlock)
    max_pages = 1 if page_table is None else page_table.shape[1]
    capacity = page_size * max_pages if num_sequences else 0
    seqlen_rotary, half = (0, 0) if append.rotary_cos is None else append.rotary_cos.shape
    is_paged = page_table is not None or by_slots  # else one kernel serves caches of any length
    return Launch(_append, new_programs + q_programs + of_lengths, (
        strides_of(k_new, v_new, k_cache, v_cache, append.q, q_rotated),
        None if page_table is None else page_table.stride(0), new_programs, q_programs, batch_size, nheads, nheads_k,
        seqlen_new, seqlen_q, capacity, num_sequences, seqlen_rotary, head_dim, head_dim_v,
        head_dim < kBlockD or head_dim_v < kBlockDv, 2 * half, append.rotary_interleaved, append.q_advances,
        max(1, page_size) if is_paged else 1, kHeads, kBlockD, kBlockDv, kBlock), num_warps=4)


def run(k_new, v_new, k_cache, v_cache, append):
    """(q_rotated, lengths) of checked inputs and minimal_attn.options.Append, see ops.triton_append; writes into the
    caches."""
    if append.rotary_cos is None:
        append = append._replace(q=None, cu_seqlens_q=None, rotary_seqlens=None)
    q_rotated = None if append.q is None else empty_like(append.q)
    lengths = None if append.seqused_k is None else torch.empty_like(append.seqused_k)
    key = k_new.device, *append[-2:], *layouts(k_new, v_new, k_cache, v_cache, *append[:-2])
    with torch.accelerator.device_index(k_new.device.index):  # None on the CPU: nothing to switch
        plan = _plans.get(key) or remember(
            _plans, key, launch_of(k_new, v_new, k_cache, v_cache, append, q_rotated), k_new.device)
        if plan.grid[0]:
            plan(k_new, v_new, k_cache, v_cache, append.q, q_rotated, lengths, append[:5], *append[6:10])
    return (k_new.new_empty(0) if q_rotated is None else q_rotated,
            k_new.new_empty(0, dtype=torch.int32) if lengths is None else lengths)
