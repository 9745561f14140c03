"""Attention of a few query tokens to a cache of keys and values, in Triton: one tensor of sequences, or pages.

Decoding is bound by the reading of K and V. So one program serves all query heads of a key/value head, and all tokens
that fit. Its tile has packed rows: row r is token r // kGroup and query head h_k · kGroup + r % kGroup. Tensor cores
want 16 rows at least.

One sample has too few programs for a GPU, so its keys are split, and a second kernel adds up the parts. The host reads
no lengths: it launches as many programs as the cache may need, and those without keys return at once. So a CUDA graph
stays valid while lengths and tables change.

Read next: splits.py, how keys are split; ../minimal_attn/reference/pages.py, the same in plain torch.
"""

import torch
import triton
import triton.language as tl

from minimal_attn.checks import MAX_SEQLEN, empty_outputs
from minimal_attn.reference.pages import capacity_of

from .attention import block_d, shared_memory
from .launching import INTERPRETING, WINDOW, Launch, layouts, mask_of, num_samples, properties, remember, to_float
from .mask import keys_of, make_mask, sees
from .scores import Scores, capped, score_constants, score_numbers, shifted
from .sequence import block_of_slot, cached_sequence, head_of, num_slots
from .splits import MAX_SPLITS, MIN_KEYS, SIZES, SPLIT_ROWS, combine_splits, finish, score_units, share_keys


@triton.jit
def _gather(x, block, row, block_stride, row_stride, is_row, num_cols, kMaskCols: tl.constexpr, kBlock: tl.constexpr):
    """[rows, kBlock] of x: each row lies in its block, a page or a head, or all in one. 0 where is_row is False."""
    cols = tl.arange(0, kBlock)
    pointers = x + (block.to(tl.int64) * block_stride + row.to(tl.int64) * row_stride)[:, None] + cols[None, :]
    if kMaskCols:
        tile = tl.load(pointers, mask=is_row[:, None] & (cols[None, :] < num_cols), other=0.0)
    else:
        tile = tl.load(pointers, mask=is_row[:, None], other=0.0)
    return tile


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
    """Whether rows see keys, by the rows' words of a tree mask: bool [rows, keys]. new: which of the new keys each key
    is; those before them are negative."""
    bits = trees[:, None] >> tl.minimum(tl.maximum(new, 0), 63).to(tl.int64)[None, :]
    return (new < 0)[None, :] | ((bits & 1) != 0)


@triton.jit(do_not_specialize=[*WINDOW, *SIZES])
def _decode(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
            o_accum_ptr, max_accum_ptr, sum_accum_ptr,  # fp32 (B, Hk, max_splits, split_tokens · kGroup[, Dv])
            cu_seqlens_q_ptr, seqused_q_ptr, seqused_k_ptr, page_table_ptr, batch_idx_ptr, leftpad_k_ptr,
            tree_ptr, sinks_ptr, alibi_ptr, softmax_scale, softcap,  # None in these four lines: not given or needed
            q_batch_stride, q_head_stride, q_row_stride, k_batch_stride, k_head_stride, k_row_stride,
            v_batch_stride, v_head_stride, v_row_stride, o_batch_stride, o_head_stride, o_row_stride,
            page_table_stride, tree_batch_stride, alibi_batch_stride, batch_size, nheads_k, seqlen_q, capacity,
            num_sequences, max_splits, split_tokens, head_dim, head_dim_v, window_left, window_right,
            kIsCausal: tl.constexpr, kIsLocal: tl.constexpr, kFastTanh: tl.constexpr, kNegateQ: tl.constexpr,
            kMaskCols: tl.constexpr, kPageSize: tl.constexpr, kGroup: tl.constexpr, kBlockM: tl.constexpr,
            kBlockN: tl.constexpr, kBlockD: tl.constexpr, kBlockDv: tl.constexpr):
    # Key/value heads are neighbours, for those of one page may be so in memory.
    h_k, split_idx = tl.program_id(0) % nheads_k, tl.program_id(0) // nheads_k % max_splits
    slot = tl.program_id(0) // nheads_k // max_splits
    if cu_seqlens_q_ptr is not None:
        sample, m_block = block_of_slot(cu_seqlens_q_ptr, slot, batch_size, seqlen_q, kBlockM, kGroup)
        b = 0
    else:
        m_blocks = num_slots(None, batch_size, seqlen_q, kBlockM, kGroup)
        sample, m_block = slot // m_blocks, slot % m_blocks
        b = sample
    seq = cached_sequence(cu_seqlens_q_ptr, seqused_q_ptr, seqused_k_ptr, leftpad_k_ptr, sample, batch_size, seqlen_q,
                          capacity)
    mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal)
    row0 = m_block * kBlockM
    share = share_keys(seq, mask, row0, max_splits, split_tokens, kGroup, kBlockM)
    if (split_idx >= share.num_splits) | (row0 // kGroup >= seq.padded_q):
        return
    key_begin = share.begin + split_idx * share.size
    key_end = key_begin + tl.minimum(share.size, share.end - key_begin)

    rows = row0 + tl.arange(0, kBlockM)
    tokens, heads = rows // kGroup, h_k * kGroup + rows % kGroup
    is_row = tokens < seq.seqlen_q
    q = _gather(head_of(q_ptr, b, 0, seq.q_begin, q_batch_stride, q_head_stride, q_row_stride), heads, tokens,
                q_head_stride, q_row_stride, is_row, head_dim, kMaskCols, kBlockD)
    if kNegateQ:  # a masked score of -inf needs a scale above 0
        q = (-q.to(tl.float32)).to(q.dtype)
    k_base = head_of(k_ptr, 0, h_k, 0, k_batch_stride, k_head_stride, k_row_stride)
    v_base = head_of(v_ptr, 0, h_k, 0, v_batch_stride, v_head_stride, v_row_stride)
    unit, unit_log2 = score_units(softmax_scale, softcap, alibi_ptr)
    numbers = score_numbers(tl.abs(tl.cast(softmax_scale, tl.float32)), softcap, alibi_ptr, None, alibi_batch_stride,
                            None, None, seq, heads[:, None])
    scores = Scores(numbers, softcap, alibi_ptr, None, None, None, kFastTanh)
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
        k_tile = _gather(k_base, block, key_rows, k_batch_stride, k_row_stride, is_key, head_dim, kMaskCols, kBlockD)
        acc_s = tl.dot(q, k_tile.T, input_precision="ieee")
        acc_s = shifted(scores, capped(scores, acc_s), tokens[:, None], cols[None, :])
        is_seen = sees(visible, cols, kIsLocal)
        if tree_ptr is not None:
            is_seen &= _sees_in_tree(trees, cols - (seq.seqlen_k - seq.seqlen_q))
        acc_s = tl.where(is_seen, acc_s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(acc_s, 1))
        max_sub = tl.where(new_max == float("-inf"), 0.0, new_max)  # exp2(-inf) is 0, not NaN
        p = tl.exp2((acc_s - max_sub[:, None]) * unit_log2)
        rescale = tl.exp2((row_max - max_sub) * unit_log2)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        row_max = new_max
        v_tile = _gather(v_base, block, key_rows, v_batch_stride, v_row_stride, is_key, head_dim_v, kMaskCols, kBlockDv)
        if q.dtype == tl.float32:  # summed apart from acc_o, as in attention.py
            acc_o = tl.fma(acc_o, tl.broadcast_to(rescale[:, None], acc_o.shape),
                           tl.dot(p, v_tile, input_precision="ieee"))
        else:
            acc_o = tl.dot(p.to(q.dtype), v_tile, acc_o * rescale[:, None])

    cols = tl.arange(0, kBlockDv)
    if o_accum_ptr is not None:
        if share.num_splits > 1:
            part = (tl.cast(sample, tl.int64) * nheads_k + h_k) * max_splits + split_idx
            places = part * split_tokens * kGroup + rows
            tl.store(max_accum_ptr + places, row_max, mask=is_row)
            tl.store(sum_accum_ptr + places, row_sum, mask=is_row)
            tl.store(o_accum_ptr + places[:, None] * head_dim_v + cols[None, :],
                     tl.where(row_sum[:, None] == 0.0, 0.0, acc_o), mask=is_row[:, None] & (cols[None, :] < head_dim_v))
    is_empty, factor, lse = finish(row_max, row_sum, unit, sinks_ptr, heads, is_row)
    # combine_splits stores the rows that are split, but no padding. Triton 3.9's interpreter takes no mask that has a
    # scalar condition in it.
    first_stored = tl.where(share.num_splits == 1, 0, seq.seqlen_q)
    is_stored = (tokens >= first_stored) & (tokens < seq.padded_q)
    tl.store(lse_ptr + (tl.cast(b, tl.int64) * nheads_k * kGroup + heads) * seqlen_q + seq.q_begin + tokens, lse,
             mask=is_stored)
    # The out of an empty row is 0 even where V, times probabilities of 0, gave NaN.
    out = tl.where(is_empty[:, None], 0.0, acc_o * factor[:, None])
    o_base = head_of(o_ptr, b, 0, seq.q_begin, o_batch_stride, o_head_stride, o_row_stride)
    places = heads.to(tl.int64) * o_head_stride + tokens.to(tl.int64) * o_row_stride
    tl.store(o_base + places[:, None] + cols[None, :], out.to(o_ptr.dtype.element_ty),
             mask=is_stored[:, None] & (cols[None, :] < head_dim_v))


# (kBlockM with up to 16 packed rows a sample, with more, kBlockN, num_warps) by bytes of an element and the larger of
# kBlockD and kBlockDv. kBlockN divides MIN_KEYS.
TILES = {
    # Products of true fp32 keep both operands in registers.
    (4, 128): (16, 32, 32, 4),
    (4, 256): (16, 32, 16, 8),
    (2, 128): (16, 64, 64, 4),
    (2, 256): (16, 32, 32, 4),
}


def tile_of(dtype, rows, head_dim, head_dim_v, is_paged, max_shared_memory):
    """Launch options for samples of so many packed rows."""
    kBlockD, kBlockDv = block_d(dtype, head_dim), block_d(dtype, head_dim_v)
    largest = max(kBlockD, kBlockDv)
    few_rows, more_rows, kBlockN, num_warps = TILES[dtype.itemsize, max(128, largest)]
    kBlockM, num_stages = few_rows if rows <= few_rows else more_rows, 1
    while (num_stages < 3 and dtype.itemsize < 4
           and shared_memory(dtype, kBlockM, kBlockN, largest, num_stages + 1) <= max_shared_memory):
        num_stages += 1
    if is_paged:  # page numbers come two stages before keys: Triton then takes two stages for each tile in flight
        num_stages = 2 * num_stages - 1
    return dict(kBlockM=kBlockM, kBlockN=kBlockN, kBlockD=kBlockD, kBlockDv=kBlockDv, num_warps=num_warps,
                num_stages=num_stages)


def launches(q, k, v, out, options, cache, split_tokens, max_splits, rows):
    """The Launch of _decode, and that of combine_splits or None. Samples with more than split_tokens are not split."""
    lengths, page_table = options.lengths, cache.page_table
    (nheads, seqlen_q, head_dim), nheads_k, head_dim_v = q.shape[1:], k.shape[1], v.shape[-1]
    group, batch_size = nheads // nheads_k, num_samples(q, lengths)
    capacity = capacity_of(k, cache)
    if max(capacity, seqlen_q * group) > MAX_SEQLEN:
        raise ValueError(f"keys of a sample and rows times query heads of a key/value head go up to {MAX_SEQLEN}, got "
                         f"{capacity} and {seqlen_q} times {group}")
    config = tile_of(q.dtype, rows, head_dim, head_dim_v, page_table is not None,
                     properties(q.device).max_shared_memory)
    kBlockM, kBlockN, kBlockD, kBlockDv, num_warps, num_stages = config.values()
    slots = num_slots.fn(lengths.cu_seqlens_q, batch_size, seqlen_q, kBlockM, group)
    slots *= 1 if lengths.is_packed else batch_size
    of_scores = score_constants(q, options.alibi_slopes, None, options.softcap or None)
    of_mask, is_masked = mask_of(options.window), head_dim < kBlockD or head_dim_v < kBlockDv
    page_size = 1 if page_table is None else max(1, k.shape[2])  # one kernel for caches of any length
    table_strides = (None if x is None else x.stride(0) for x in (page_table, cache.tree_mask))
    decode = Launch(_decode, slots * max_splits * nheads_k, (
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        *table_strides, of_scores[0], batch_size, nheads_k, seqlen_q, capacity, k.shape[0], max_splits, split_tokens,
        head_dim, head_dim_v, *of_mask, of_scores[-1], options.softmax_scale < 0, is_masked, page_size, group,
        kBlockM, kBlockN, kBlockD, kBlockDv),
        num_warps=num_warps, num_stages=num_stages)
    if max_splits == 1:
        return decode, None
    combine = Launch(combine_splits, batch_size * nheads_k * split_tokens * group, (
        *out.stride()[:3], batch_size, nheads_k, seqlen_q, capacity, max_splits, split_tokens, head_dim_v, *of_mask,
        group, kBlockM, kBlockDv), num_warps=4)
    return decode, combine


_plans = {}  # {all that the launches depend on: the launches}


def run(q, k, v, options, cache):
    """(out, lse) of checked inputs, minimal_attn.options.Options and Cache. k and v are the caches."""
    if INTERPRETING and q.dtype == torch.bfloat16:
        out, lse = run(*map(to_float, (q, k, v)), options, cache)
        return empty_outputs(q, v)[0].copy_(out), lse
    out, lse = empty_outputs(q, v)
    if not out.numel():
        return out, lse
    lengths, page_table, group = options.lengths, cache.page_table, q.shape[1] // k.shape[1]
    capacity = capacity_of(k, cache)
    # Not by the number of all rows: no sample's result may depend on its batch. max_seqlen_q is a number of the call.
    max_seqlen_q = (cache.max_seqlen_q or SPLIT_ROWS) if lengths.is_packed else q.shape[2]
    rows, split_tokens = min(max_seqlen_q * group, SPLIT_ROWS), min(max_seqlen_q, max(1, SPLIT_ROWS // group))
    max_splits = max(1, min(cache.num_splits or MAX_SPLITS, triton.cdiv(capacity, MIN_KEYS.value)))
    with torch.accelerator.device_index(q.device.index):  # None on the CPU: nothing to switch
        partial = None, None, None
        if max_splits > 1:
            shape = num_samples(q, lengths), k.shape[1], max_splits, split_tokens * group
            partial = [q.new_empty(sizes, dtype=torch.float32) for sizes in ((*shape, v.shape[-1]), shape, shape)]
        of_q, of_k = (lengths.cu_seqlens_q, lengths.seqused_q), (lengths.seqused_k, *cache[:4])
        numbers = options.softmax_scale, options.softcap or None
        key = (q.device, options.softmax_scale < 0, options.window, numbers[1] is None, rows, split_tokens, max_splits,
               *layouts(q, k, v, *of_q, *of_k, options.sinks, options.alibi_slopes))
        plan = _plans.get(key)
        if plan is None:
            plan = launches(q, k, v, out, options, cache, split_tokens, max_splits, rows)
            remember(_plans, key, plan, q.device)
        decode, combine = plan
        decode(q, k, v, out, lse, *partial, *of_q, *of_k, options.sinks, options.alibi_slopes, *numbers)
        if combine is not None:
            combine(*partial, out, lse, *of_q, lengths.seqused_k, cache.leftpad_k, options.sinks, options.alibi_slopes,
                    *numbers)
    return out, lse
