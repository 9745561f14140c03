"""Attention of a few query tokens to a cache of keys and values, in Triton: one tensor of sequences, or pages.

Decoding is bound by the reading of K and V. So one program serves all query heads of a key/value head, and all tokens
that fit. Its tile has packed rows: row r is token r // kGroup and query head h_k · kGroup + r % kGroup.

One sample has too few programs for a GPU, so its keys are split (Dao et al., Flash-Decoding, 2023), by its own lengths
alone: its bits depend neither on its batch nor on the room in the cache. Each split leaves the maximum of its scores,
the sum of exp(score - maximum), and its o, which is not normalised. A second kernel adds them up in a fixed order. The
host reads no lengths: it launches as many programs as the cache may need, and those without keys return at once. So a
CUDA graph stays valid while lengths and tables change.

Read next: ../minimal_attn/reference/pages.py, the same in plain torch.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minimal_attn.checks import MAX_SEQLEN, empty_outputs
from minimal_attn.reference.pages import capacity_of

from .attention import add_product, block_d, config_of, finish, shared_memory, tile_of
from .launching import WINDOW, Launch, layouts, mask_of, properties, remember
from .mask import keys_of, make_mask, sees
from .scores import (Scores, capped, log2_unit, online_softmax, score_numbers, score_options, score_strides, shifted,
                     unit_of)
from .sequence import block_of_slot, head_of, num_slots, sequence, strides_of

MAX_SPLITS = 32  # where num_splits is 0
# Every split but the last has a multiple of MIN_KEYS keys, and so of kBlockN: no block has keys of two splits.
MIN_KEYS = tl.constexpr(64)
# Samples with more packed rows are not split: they have programs enough, and partial results take memory.
SPLIT_ROWS = 64
SIZES = ("batch_size", "seqlen_q", "capacity", "num_sequences", "page_table_stride", "tree_batch_stride", "max_splits",
         "split_tokens")


class Share(NamedTuple):
    """The rows of a tile see keys in [begin, end). Each of num_splits programs takes `size` of them, the last one what
    is left."""
    begin: Any
    end: Any
    size: Any
    num_splits: Any  # at least 1


@triton.jit
def share_keys(seq, mask, row0, max_splits, split_tokens, kGroup: tl.constexpr, kBlockM: tl.constexpr):
    """The Share of a tile of packed rows from row0 on."""
    first, last = row0 // kGroup, tl.minimum((row0 + kBlockM - 1) // kGroup, seq.seqlen_q - 1)
    begin = keys_of(mask, first).begin
    # Where all rows are padding nothing need be read.
    end = tl.where(first < seq.seqlen_q, keys_of(mask, last).end, 0)
    n_keys = tl.maximum(end - begin, 0)
    size = tl.cdiv(tl.cdiv(n_keys, max_splits), MIN_KEYS) * MIN_KEYS
    size = tl.maximum(tl.where(seq.seqlen_q <= split_tokens, size, n_keys), 1)
    return Share(begin, end, size, tl.maximum((n_keys - 1) // size + 1, 1))  # no sum overflows


@triton.jit
def _gather(x, block, row, block_stride, row_stride, is_row, num_cols, kMaskCols: tl.constexpr, kBlock: tl.constexpr):
    """[rows, kBlock] of x: each row lies in its block, a page or a head, or all in one. 0 where is_row is False."""
    cols = tl.arange(0, kBlock)
    pointers = x + (block.to(tl.int64) * block_stride + row.to(tl.int64) * row_stride)[:, None] + cols[None, :]
    is_there = is_row[:, None] & ((cols < num_cols) | (not kMaskCols))[None, :]
    return tl.load(pointers, mask=is_there, other=0.0)


@triton.jit
def _block_of_keys(page_table_ptr, batch_idx_ptr, b, row, is_key, page_table_stride, num_sequences,
                   kPageSize: tl.constexpr):
    """(block, row in it) of rows of a sample: of its pages, or of its cached sequence. Entries of tables are clamped. A
    cache without sequences has block -1."""
    if page_table_ptr is not None:
        block = tl.load(page_table_ptr + tl.cast(b, tl.int64) * page_table_stride + row // kPageSize, mask=is_key,
                        other=0)
        row = row % kPageSize
    elif batch_idx_ptr is not None:
        block = tl.load(batch_idx_ptr + b) + tl.zeros_like(row)
    else:
        block = b + tl.zeros_like(row)
    return tl.minimum(tl.maximum(block, 0), num_sequences - 1), row


@triton.jit
def _sees_in_tree(trees, new):
    """Whether rows see keys, by the rows' words of a tree mask: bool [rows, keys]. new: the number of each key among
    the new ones, negative before them."""
    bits = trees[:, None] >> tl.minimum(tl.maximum(new, 0), 63).to(tl.int64)[None, :]
    return (new < 0)[None, :] | ((bits & 1) != 0)


@triton.jit(do_not_specialize=[*WINDOW, *SIZES])
def _decode(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
            partial,  # o_accum fp32 (B, Hk, max_splits, split_tokens · kGroup, Dv), max_accum and sum_accum without Dv
            lengths, tables, sinks_ptr, softmax_scale, score_options,  # tables: the tensors of minimal_attn's Cache
            strides, page_table_stride, tree_batch_stride, score_strides, batch_size, nheads_k, seqlen_q, capacity,
            num_sequences, max_splits, split_tokens, head_dim, head_dim_v, window_left, window_right,
            kIsCausal: tl.constexpr, kIsLocal: tl.constexpr, kChunk: tl.constexpr, kNegateQ: tl.constexpr,
            kPageSize: tl.constexpr, kGroup: tl.constexpr, kTile: tl.constexpr):
    kBlockM: tl.constexpr = kTile.kBlockM
    kBlockN: tl.constexpr = kTile.kBlockN
    kBlockDv: tl.constexpr = kTile.kBlockDv
    kMaskCols: tl.constexpr = kTile.kMaskCols
    q_strides, k_strides, v_strides, o_strides = strides
    page_table_ptr, batch_idx_ptr, leftpad_k_ptr, tree_ptr = tables
    # Key/value heads are neighbours, for those of one page may be so in memory.
    h_k, split_idx = tl.program_id(0) % nheads_k, tl.program_id(0) // nheads_k % max_splits
    slot = tl.program_id(0) // nheads_k // max_splits
    if lengths.cu_seqlens_q is not None:
        sample, m_block = block_of_slot(lengths.cu_seqlens_q, slot, batch_size, seqlen_q, kBlockM, kGroup)
        b = 0
    else:
        m_blocks = num_slots(None, batch_size, seqlen_q, kBlockM, kGroup)
        sample, m_block = slot // m_blocks, slot % m_blocks
        b = sample
    seq = sequence(lengths, sample, batch_size, seqlen_q, capacity, leftpad_k_ptr)
    mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal, kChunk)
    row0 = m_block * kBlockM
    share = share_keys(seq, mask, row0, max_splits, split_tokens, kGroup, kBlockM)
    if (split_idx >= share.num_splits) | (row0 // kGroup >= seq.padded_q):
        return
    key_begin = share.begin + split_idx * share.size
    key_end = key_begin + tl.minimum(share.size, share.end - key_begin)

    rows = row0 + tl.arange(0, kBlockM)
    tokens, heads = rows // kGroup, h_k * kGroup + rows % kGroup
    is_row = tokens < seq.seqlen_q
    q = _gather(head_of(q_ptr, q_strides, b, 0, seq.q_begin), heads, tokens, q_strides.head, q_strides.row, is_row,
                head_dim, kMaskCols, kTile.kBlockD)
    if kNegateQ:  # a masked score of -inf needs a scale above 0
        q = (-q.to(tl.float32)).to(q.dtype)
    k_base, v_base = head_of(k_ptr, k_strides, 0, h_k, 0), head_of(v_ptr, v_strides, 0, h_k, 0)
    numbers = score_numbers(tl.abs(tl.cast(softmax_scale, tl.float32)), score_options, score_strides, seq,
                            heads[:, None])
    scores, unit_log2 = Scores(numbers, score_options, score_strides), log2_unit(numbers.unit)
    visible = keys_of(mask, tokens)
    if tree_ptr is not None:
        trees = tl.load(tree_ptr + tl.cast(sample, tl.int64) * tree_batch_stride + tokens, mask=is_row, other=0)

    acc_o = tl.zeros([kBlockM, kBlockDv], tl.float32)
    row_max = tl.full([kBlockM], float("-inf"), tl.float32)
    row_sum = tl.zeros([kBlockM], tl.float32)
    for col0 in range(key_begin, key_end, kBlockN):
        cols = col0 + tl.arange(0, kBlockN)
        # No row sees the keys beyond: they may be NaN, and a probability of 0 times NaN is NaN.
        is_key = cols < key_end
        block, key_rows = _block_of_keys(page_table_ptr, batch_idx_ptr, sample, seq.k_begin + cols, is_key,
                                         page_table_stride, num_sequences, kPageSize)
        is_key &= block >= 0
        k_tile = _gather(k_base, block, key_rows, k_strides.batch, k_strides.row, is_key, head_dim, kMaskCols,
                         kTile.kBlockD)
        acc_s = tl.dot(q, k_tile.T, input_precision="ieee")
        acc_s = shifted(scores, capped(scores, acc_s), tokens[:, None], cols[None, :])
        is_seen = sees(mask, visible, cols)
        if tree_ptr is not None:
            is_seen &= _sees_in_tree(trees, cols - (seq.seqlen_k - seq.seqlen_q))
        acc_s = tl.where(is_seen, acc_s, float("-inf"))
        p, rescale, row_max, row_sum = online_softmax(acc_s, row_max, row_sum, unit_log2, True)
        v_tile = _gather(v_base, block, key_rows, v_strides.batch, v_strides.row, is_key, head_dim_v, kMaskCols,
                         kBlockDv)
        acc_o = add_product(acc_o, p.to(q.dtype), v_tile, rescale)

    cols = tl.arange(0, kBlockDv)
    o_accum_ptr, max_accum_ptr, sum_accum_ptr = partial
    if o_accum_ptr is not None and share.num_splits > 1:
        part = (tl.cast(sample, tl.int64) * nheads_k + h_k) * max_splits + split_idx
        places = part * split_tokens * kGroup + rows
        tl.store(max_accum_ptr + places, row_max, mask=is_row)
        tl.store(sum_accum_ptr + places, row_sum, mask=is_row)
        tl.store(o_accum_ptr + places[:, None] * head_dim_v + cols[None, :],
                 tl.where(row_sum[:, None] == 0.0, 0.0, acc_o), mask=is_row[:, None] & (cols[None, :] < head_dim_v))
    is_empty = row_sum == 0.0
    factor, lse = finish(tl.where(is_empty, 0.0, row_max) * numbers.unit, row_sum, is_empty, 1.0, sinks_ptr, heads,
                         is_row)
    # combine_splits stores the rows that are split, but no padding. Triton 3.9's interpreter takes no mask that has a
    # scalar condition in it.
    first_stored = tl.where(share.num_splits == 1, 0, seq.seqlen_q)
    is_stored = (tokens >= first_stored) & (tokens < seq.padded_q)
    tl.store(lse_ptr + (tl.cast(b, tl.int64) * nheads_k * kGroup + heads) * seqlen_q + seq.q_begin + tokens, lse,
             mask=is_stored)
    # The out of an empty row is 0 even where V, times probabilities of 0, gave NaN.
    out = tl.where(is_empty[:, None], 0.0, acc_o * factor[:, None])
    places = heads.to(tl.int64) * o_strides.head + tokens.to(tl.int64) * o_strides.row
    o_base = head_of(o_ptr, o_strides, b, 0, seq.q_begin)
    tl.store(o_base + places[:, None] + cols[None, :], out.to(o_ptr.dtype.element_ty),
             mask=is_stored[:, None] & (cols[None, :] < head_dim_v))


@triton.jit(do_not_specialize=[*WINDOW, *SIZES])
def combine_splits(partial, o_ptr, lse_ptr, lengths, leftpad_k_ptr, sinks_ptr, softmax_scale, score_options, o_strides,
                   batch_size, nheads_k, seqlen_q, capacity, max_splits, split_tokens, head_dim_v,
                   window_left, window_right, kIsCausal: tl.constexpr, kIsLocal: tl.constexpr, kChunk: tl.constexpr,
                   kGroup: tl.constexpr, kBlockM: tl.constexpr, kBlockDv: tl.constexpr):
    """One program adds up the splits of one packed row. The result of a row that is not split is stored already."""
    row, bh = tl.program_id(0) % (split_tokens * kGroup), tl.program_id(0) // (split_tokens * kGroup)
    sample, h_k, token = bh // nheads_k, bh % nheads_k, row // kGroup
    h = h_k * kGroup + row % kGroup
    o_accum_ptr, max_accum_ptr, sum_accum_ptr = partial
    seq = sequence(lengths, sample, batch_size, seqlen_q, capacity, leftpad_k_ptr)
    mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal, kChunk)
    share = share_keys(seq, mask, row // kBlockM * kBlockM, max_splits, split_tokens, kGroup, kBlockM)
    if (token >= seq.seqlen_q) | (share.num_splits == 1):
        return
    unit = unit_of(tl.abs(tl.cast(softmax_scale, tl.float32)), score_options)
    unit_log2 = log2_unit(unit)
    cols = tl.arange(0, kBlockDv)
    acc_o = tl.zeros([kBlockDv], tl.float32)
    row_max, row_sum = float("-inf"), 0.0
    for split0 in range(0, share.num_splits, 16):
        splits = split0 + tl.arange(0, 16)
        is_split = splits < share.num_splits
        places = (tl.cast(bh, tl.int64) * max_splits + splits) * split_tokens * kGroup + row
        maxima = tl.load(max_accum_ptr + places, mask=is_split, other=float("-inf"))
        new_max = tl.maximum(row_max, tl.max(maxima, 0))
        max_sub = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale, weights = tl.exp2((row_max - max_sub) * unit_log2), tl.exp2((maxima - max_sub) * unit_log2)
        sums = tl.load(sum_accum_ptr + places, mask=is_split, other=0.0)
        row_sum = row_sum * rescale + tl.sum(weights * sums, 0)
        o_accum = tl.load(o_accum_ptr + places[:, None] * head_dim_v + cols[None, :],
                          mask=is_split[:, None] & (cols[None, :] < head_dim_v), other=0.0)
        acc_o = acc_o * rescale + tl.sum(weights[:, None] * o_accum, 0)
        row_max = new_max
    is_empty = row_sum == 0.0
    factor, lse = finish(tl.where(is_empty, 0.0, row_max) * unit, row_sum, is_empty, 1.0, sinks_ptr, h, True)
    b = 0 if lengths.cu_seqlens_q is not None else sample
    tl.store(lse_ptr + (tl.cast(b, tl.int64) * nheads_k * kGroup + h) * seqlen_q + seq.q_begin + token, lse)
    o_base = head_of(o_ptr, o_strides, b, h, seq.q_begin + token)
    tl.store(o_base + cols, tl.where(is_empty, 0.0, acc_o * factor).to(o_ptr.dtype.element_ty), mask=cols < head_dim_v)


# (kBlockM with up to 16 packed rows a sample, with more, kBlockN, num_warps) by bytes of an element and the larger of
# kBlockD and kBlockDv. kBlockN divides MIN_KEYS.
TILES = {
    # Products of true fp32 keep both operands in registers.
    (4, 128): (16, 32, 32, 4),
    (4, 256): (16, 32, 16, 8),
    (2, 128): (16, 64, 64, 4),
    (2, 256): (16, 32, 32, 4),
}


def choose_config(dtype, rows, head_dim, head_dim_v, is_paged, max_shared_memory):
    """Launch options for samples of so many packed rows."""
    kBlockD, kBlockDv = block_d(dtype, head_dim), block_d(dtype, head_dim_v)
    largest = max(kBlockD, kBlockDv)
    few_rows, more_rows, kBlockN, num_warps = TILES[dtype.itemsize, max(128, largest)]
    kBlockM = few_rows if rows <= few_rows else more_rows
    num_stages = next((n for n in (3, 2) if dtype.itemsize < 4
                       and shared_memory(dtype, kBlockM, kBlockN, largest, n) <= max_shared_memory), 1)
    if is_paged:  # page numbers come two stages before keys: Triton then takes two stages for each tile in flight
        num_stages = 2 * num_stages - 1
    return config_of(kBlockM, kBlockN, num_warps, num_stages, kBlockD, kBlockDv)


def launches(q, k, v, out, options, cache, split_tokens, max_splits, rows):
    """The Launch of _decode, and that of combine_splits or None. Samples with more than split_tokens are not split."""
    lengths, page_table = options.lengths, cache.page_table
    (nheads, seqlen_q, head_dim), nheads_k, head_dim_v = q.shape[1:], k.shape[1], v.shape[-1]
    group, batch_size = nheads // nheads_k, lengths.num_samples(q)
    capacity = capacity_of(k, cache)
    if max(capacity, seqlen_q * group) > MAX_SEQLEN:
        raise ValueError(f"keys of a sample and rows times query heads of a key/value head go up to {MAX_SEQLEN}, got "
                         f"{capacity} and {seqlen_q} times {group}")
    config = choose_config(q.dtype, rows, head_dim, head_dim_v, page_table is not None,
                           properties(q.device).max_shared_memory)
    kBlockM, _, _, kBlockDv, num_warps, num_stages = config.values()
    slots = num_slots.fn(lengths.cu_seqlens_q, batch_size, seqlen_q, kBlockM, group) * q.shape[0]
    of_mask = mask_of(options)
    page_size = 1 if page_table is None else max(1, k.shape[2])  # one kernel for caches of any length
    table_strides = (None if x is None else x.stride(0) for x in (page_table, cache.tree_mask))
    decode = Launch(_decode, slots * max_splits * nheads_k, (
        strides_of(q, k, v, out), *table_strides, score_strides(q, score_options(options)), batch_size, nheads_k,
        seqlen_q, capacity, k.shape[0], max_splits, split_tokens, head_dim, head_dim_v, *of_mask,
        options.softmax_scale < 0, page_size, group, tile_of(config, head_dim, head_dim_v)), num_warps=num_warps,
        num_stages=num_stages)
    if max_splits == 1:
        return decode, None
    combine = Launch(combine_splits, batch_size * nheads_k * split_tokens * group, (
        *strides_of(out), batch_size, nheads_k, seqlen_q, capacity, max_splits, split_tokens, head_dim_v, *of_mask,
        group, kBlockM, kBlockDv), num_warps=4)
    return decode, combine


_plans = {}  # {all that the launches depend on: the launches}


def run(q, k, v, options, cache):
    """(out, lse) of checked inputs, minimal_attn.options.Options and Cache. k and v are the caches."""
    out, lse = empty_outputs(q, v)
    if not out.numel():
        return out, lse
    lengths, group, capacity = options.lengths, q.shape[1] // k.shape[1], capacity_of(k, cache)
    # Not by the number of all rows: no sample's result may depend on its batch. max_seqlen_q is a number of the call.
    max_seqlen_q = (cache.max_seqlen_q or SPLIT_ROWS) if lengths.is_packed else q.shape[2]
    rows, split_tokens = min(max_seqlen_q * group, SPLIT_ROWS), min(max_seqlen_q, max(1, SPLIT_ROWS // group))
    max_splits = max(1, min(cache.num_splits or MAX_SPLITS, triton.cdiv(capacity, MIN_KEYS.value)))
    with torch.accelerator.device_index(q.device.index):  # None on the CPU: nothing to switch
        partial = None, None, None
        if max_splits > 1:
            shape = lengths.num_samples(q), k.shape[1], max_splits, split_tokens * group
            o_accum = q.new_empty((*shape, v.shape[-1]), dtype=torch.float32)
            partial = o_accum, o_accum.new_empty(shape), o_accum.new_empty(shape)
        tables, scores = cache[:4], score_options(options)
        key = (q.device, options.softmax_scale < 0, options.mask, scores.softcap is None,
               rows, split_tokens, max_splits, *layouts(q, k, v, *lengths, *tables, options.sinks, scores.slopes))
        decode, combine = _plans.get(key) or remember(
            _plans, key, launches(q, k, v, out, options, cache, split_tokens, max_splits, rows), q.device)
        decode(q, k, v, out, lse, partial, lengths, tables, options.sinks, options.softmax_scale, scores)
        if combine is not None:
            combine(partial, out, lse, lengths, cache.leftpad_k, options.sinks, options.softmax_scale, scores)
    return out, lse
