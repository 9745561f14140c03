"""How decode.py splits the keys of a sample among programs, and the kernel that adds up what they found.

The keys are split by the lengths of the sample alone, not by its batch or by the room in the cache, so that its bits do
not depend on them. Each split leaves the maximum of its scores, the sum of exp(score - maximum), and its o, which is
not normalised. They are added up in a fixed order (Dao et al., Flash-Decoding, 2023).

Read next: decode.py, the kernel that walks along the keys.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .attention import add_sink
from .launching import WINDOW
from .mask import keys_of, make_mask
from .sequence import cached_sequence, head_of

MAX_SPLITS = 32  # where num_splits is 0
# Every split but the last has a multiple of MIN_KEYS keys, and so of kBlockN: no block has keys of two splits.
MIN_KEYS = tl.constexpr(64)
# Samples with more packed rows are not split: they have programs enough, and partial results take memory.
SPLIT_ROWS = 64
# Parameters that change from call to call, for which the kernels should not be compiled anew.
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
def score_units(softmax_scale, softcap, alibi_ptr):
    """Returns (unit of scores, see scores.py; this unit times log2(e), for powers of two).

    A scale of 0 would turn a masked -inf into NaN. The second unit is therefore at least 1e-37, which also makes all
    scores alike.
    """
    unit = tl.abs(tl.cast(softmax_scale, tl.float32))
    if softcap is not None:
        unit = tl.cast(softcap, tl.float32)
    elif alibi_ptr is not None:
        unit = tl.cast(1.0, tl.float32)
    return unit, tl.maximum(unit * 1.4426950408889634, 1e-37)


@triton.jit
def finish(row_max, row_sum, unit, sinks_ptr, heads, is_row):
    """(whether a row sees no key, the factor of its o, its lse). Rows that are padding, not is_row, have no sink."""
    is_empty = row_sum == 0.0
    row_max, row_sum = tl.where(is_empty, 0.0, row_max) * unit, tl.where(is_empty, 1.0, row_sum)
    factor, empty_lse = 1.0, float("-inf")
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads)
        row_max, row_sum, factor = add_sink(row_max, row_sum, sink)
        empty_lse = tl.where(is_row, sink, float("-inf"))
    # "/" would round to two ulps.
    return is_empty, tl.div_rn(factor, row_sum), tl.where(is_empty, empty_lse, row_max + tl.log(row_sum))


@triton.jit(do_not_specialize=[*WINDOW, *SIZES])
def combine_splits(o_accum_ptr, max_accum_ptr, sum_accum_ptr, o_ptr, lse_ptr,
                   cu_seqlens_q_ptr, seqused_q_ptr, seqused_k_ptr, leftpad_k_ptr,
                   sinks_ptr, alibi_ptr, softmax_scale, softcap,  # all of these as decode.py has them
                   o_batch_stride, o_head_stride, o_row_stride, batch_size, nheads_k, seqlen_q, capacity, max_splits,
                   split_tokens, head_dim_v, window_left, window_right, kIsCausal: tl.constexpr,
                   kIsLocal: tl.constexpr, kGroup: tl.constexpr, kBlockM: tl.constexpr, kBlockDv: tl.constexpr):
    """One program adds up the splits of one packed row. The result of a row that is not split is stored already."""
    row, bh = tl.program_id(0) % (split_tokens * kGroup), tl.program_id(0) // (split_tokens * kGroup)
    sample, h_k, token = bh // nheads_k, bh % nheads_k, row // kGroup
    h = h_k * kGroup + row % kGroup
    seq = cached_sequence(cu_seqlens_q_ptr, seqused_q_ptr, seqused_k_ptr, leftpad_k_ptr, sample, batch_size, seqlen_q,
                          capacity)
    mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal)
    share = share_keys(seq, mask, row // kBlockM * kBlockM, max_splits, split_tokens, kGroup, kBlockM)
    if (token >= seq.seqlen_q) | (share.num_splits == 1):
        return
    unit, unit_log2 = score_units(softmax_scale, softcap, alibi_ptr)
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
    is_empty, factor, lse = finish(row_max, row_sum, unit, sinks_ptr, h, True)
    b = 0 if cu_seqlens_q_ptr is not None else sample
    tl.store(lse_ptr + (tl.cast(b, tl.int64) * nheads_k * kGroup + h) * seqlen_q + seq.q_begin + token, lse)
    o_base = head_of(o_ptr, b, h, seq.q_begin + token, o_batch_stride, o_head_stride, o_row_stride)
    tl.store(o_base + cols, tl.where(is_empty, 0.0, acc_o * factor).to(o_ptr.dtype.element_ty), mask=cols < head_dim_v)
