"""FlashAttention backward in Triton: dq, dk, dv, dsinks and dbias from dout, and from dlse where lse was used as well.

P is formed again from lse. With dP = dO Vᵀ and delta = rowsum(dO ∘ O), dS = P ∘ (dP - delta), and the gradients are
dV = Pᵀ dO, dK = softmax_scale · dSᵀ Q, dQ = softmax_scale · dS K; d lse / d S = P makes dlse a part of delta. A sink is
a score whose value is 0, and thus its dP: its gradient is the sum of -P · delta.

There are three kernels, and that of attention_bwd_bias.py where a bias has a gradient. That of preprocess.py computes
delta, and what each row adds to dsinks. _flash_bwd_kv computes dK and dV of one block of keys and loops over the rows
that see it; _flash_bwd_q computes dQ of one block of rows and loops over the keys. Q Kᵀ and dO Vᵀ are therefore formed
twice, but there are no atomics, and every run gives the same bits. Where query heads share keys, several programs may
share a block of keys: each sums over a part of the heads, in fp32 in memory, and sum_splits adds these up. Otherwise
there is no workspace of Q's size.

With dropout, M its mask and s its scale, dV = (P ∘ M · s)ᵀ dO and dP = (dO Vᵀ) ∘ M · s. With a softcap, dS goes through
its tanh, see scores.py.

Tri Dao, FlashAttention-2, 2023, Algorithm 2, which adds dQ up in memory instead. Read next: preprocess.py, delta;
attention_bwd_bias.py, the gradient of a bias.
"""

import contextlib
import functools
import math

import torch
import triton
import triton.language as tl

from minimal_attn.backends import Lengths
from minimal_attn.checks import empty_like

from . import autotune as tuner
from .attention import _clear_keys, _load, block_d, can_use_tma, in_float
from .attention_bwd_bias import launch_bias
from .dropout import keep_tile, threshold_and_scale
from .launching import (INTERPRETING, PACKED_SIZES, WINDOW, Launch, kind_of, layouts, mask_of, num_samples, once,
                        properties, remember, sum_splits, to_float)
from .mask import block_of, has_keys, key_blocks, keys_of, make_mask, row_blocks, rows_of, seen_by, sees, steps
from .preprocess import first_padded_row, launch_preprocess, load_per_row, padded_rows, probabilities
from .scores import (Scores, bias_bytes, capped, kind_of_scores, score_constants, score_numbers, score_tensors,
                     shifted, through_cap)
from .sequence import block_of_slot, head_of, num_slots, sequence


@triton.jit
def _add_product(acc, a, b):
    """acc + a b. In fp32 the product is summed apart: short sums round less, and a plain addition would be folded back
    into it."""
    if a.dtype == tl.float32:
        acc = tl.fma(acc, tl.full(acc.shape, 1.0, tl.float32), tl.dot(a, b, input_precision="ieee"))
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _accumulate_dkdv(dk, dv, k, v, q, dout, lse_ptr, delta_ptr, b, h, bh, q_row_stride, dout_row_stride, blocks, mask,
                     seq, pad_begin, col0, seqlen_pad, head_dim, head_dim_v, scores, seed_ptr, threshold,
                     keep_scale, kMasked: tl.constexpr, kIsLocal: tl.constexpr, kEmptyRows: tl.constexpr,
                     kClearDelta: tl.constexpr, kRaggedRows: tl.constexpr, kMaskCols: tl.constexpr,
                     kBlockM: tl.constexpr, kBlockN: tl.constexpr, kBlockD: tl.constexpr, kBlockDv: tl.constexpr,
                     kTma: tl.constexpr):
    """dk [kBlockN, kBlockD] and dv / keep_scale [kBlockN, kBlockDv] with what one query head adds: its full blocks of
    rows, or with kMasked the cut ones. kEmptyRows: rows without a key, or the next sample's, may be among those of the
    cut ones. kClearDelta: and delta may be NaN there."""
    seqlen_q = mask.seqlen_q
    cols = col0 + tl.arange(0, kBlockN)
    seeing = rows_of(mask, cols)
    loop = steps(blocks, kMasked)
    for step in range(loop.begin, loop.end):
        row0 = block_of(blocks, step, kMasked) * kBlockM
        rows = row0 + tl.arange(0, kBlockM)
        q_tile = _load(q, b, h, row0, 0, q_row_stride, seqlen_q, head_dim, True, kMaskCols, kBlockM, kBlockD, kTma,
                       seq.q_begin)
        if kMasked and kEmptyRows:  # Q and dO may be NaN there, and 0 · NaN would reach dK and dV
            is_used = has_keys(mask, rows)
            if kRaggedRows:
                is_used &= rows < seqlen_q
            q_tile = tl.where(is_used[:, None], q_tile, tl.zeros_like(q_tile))
        s = capped(scores, tl.dot(k, q_tile.T, input_precision="ieee"))  # Sᵀ
        lse = load_per_row(lse_ptr, bh, pad_begin + row0, seqlen_pad, kBlockM, kTma)
        p = probabilities(shifted(scores, s, rows[None, :], cols[:, None]), lse[None, :], scores.numbers.unit,
                          k.dtype == tl.float32)
        if kMasked:  # rows beyond the end as well: Q is 0 there, and the score NaN where a key is infinite
            p = tl.where(seen_by(seeing, rows, seqlen_q, kIsLocal, kRaggedRows), p, 0.0)
        p_dropped = p
        if seed_ptr is not None:
            keep = keep_tile(seed_ptr, threshold, seq.b, h, row0, col0, kBlockM, kBlockN).T
            p_dropped = tl.where(keep, p, 0.0)
        dout_tile = _load(dout, b, h, row0, 0, dout_row_stride, seqlen_q, head_dim_v, True, kMaskCols, kBlockM,
                          kBlockDv, kTma, seq.q_begin)
        if kMasked and kEmptyRows:
            dout_tile = tl.where(is_used[:, None], dout_tile, tl.zeros_like(dout_tile))
        dv = _add_product(dv, p_dropped.to(k.dtype), dout_tile)
        dp = tl.dot(v, dout_tile.T, input_precision="ieee")  # dPᵀ, beside the product before it
        if seed_ptr is not None:
            dp = tl.where(keep, dp * keep_scale, 0.0)
        delta = load_per_row(delta_ptr, bh, pad_begin + row0, seqlen_pad, kBlockM, kTma)
        if kMasked and kClearDelta:
            delta = tl.where(is_used, delta, 0.0)
        ds = through_cap(scores, p * (dp - delta[None, :]), s)  # dSᵀ
        dk = _add_product(dk, ds.to(k.dtype), q_tile)
    return dk, dv


@triton.jit
def _splits_of(rows, max_splits):
    """How many programs share a block of keys, at most max_splits. `rows` counts the query rows of all heads that read
    it. A split has at least 1024 of them, to be worth its sums in memory. The kernel and the host call this."""
    return max(1, min(max_splits, rows // 1024))


@triton.jit(do_not_specialize=["threshold", *WINDOW])
def _flash_bwd_kv(q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, cu_seqlens_q_ptr,
                  cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, alibi_ptr, bias_ptr, seed_ptr, threshold, keep_scale,
                  softmax_scale, softcap, alibi_batch_stride, bias_batch_stride, bias_head_stride, bias_row_stride,
                  bias_key_stride, kFastTanh: tl.constexpr,
                  q_batch_stride, q_head_stride, q_row_stride, k_batch_stride, k_head_stride, k_row_stride,
                  v_batch_stride, v_head_stride, v_row_stride, dout_batch_stride, dout_head_stride, dout_row_stride,
                  dk_batch_stride, dk_head_stride, dk_row_stride, dv_batch_stride, dv_head_stride, dv_row_stride,
                  batch_size, nheads, nheads_k, seqlen_q, seqlen_k, seqlen_pad, head_dim, head_dim_v, max_splits,
                  split_stride, kRaggedRows: tl.constexpr, kClearDelta: tl.constexpr, window_left, window_right,
                  kIsCausal: tl.constexpr, kIsLocal: tl.constexpr, kEmptyRows: tl.constexpr, kMaskCols: tl.constexpr,
                  kTma: tl.constexpr, kBlockM: tl.constexpr, kBlockN: tl.constexpr, kBlockD: tl.constexpr,
                  kBlockDv: tl.constexpr):
    """dK and dV of kBlockN keys of one key/value head, summed over the query heads that read it, or over the part of
    them that one of several splits has."""
    # The keys that most rows see under a causal mask go first.
    kIsPacked: tl.constexpr = cu_seqlens_k_ptr is not None
    n_blocks = num_slots(cu_seqlens_k_ptr, batch_size, seqlen_k, kBlockN)
    split_idx, tile = tl.program_id(0) % max_splits, tl.program_id(0) // max_splits
    n_block = tile % n_blocks
    bh_k = tile // n_blocks
    b, h_k = bh_k // nheads_k, bh_k % nheads_k
    sample = b
    if kIsPacked:
        sample, n_block = block_of_slot(cu_seqlens_k_ptr, n_block, batch_size, seqlen_k, kBlockN)
    col0 = n_block * kBlockN
    cols = col0 + tl.arange(0, kBlockN)
    seq = sequence(cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, sample, batch_size, seqlen_q,
                   seqlen_k)
    pad_begin = 0
    if kIsPacked:
        if col0 >= seq.padded_k:
            return
        pad_begin = first_padded_row(seq)
    mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal)
    blocks = row_blocks(mask, col0, kBlockM, kBlockN)

    k_base, v_base = k_ptr, v_ptr
    if not kTma:
        k_base = head_of(k_ptr, b, h_k, seq.k_begin, k_batch_stride, k_head_stride, k_row_stride)
        v_base = head_of(v_ptr, b, h_k, seq.k_begin, v_batch_stride, v_head_stride, v_row_stride)
    # Keys beyond the sample's end are 0 here, or the next sample's. Those that a window hides from all rows may be NaN.
    # Their rows of Pᵀ and dSᵀ reach no other key's gradient, and 0 is stored for them.
    k = _load(k_base, b, h_k, col0, 0, k_row_stride, seq.seqlen_k, head_dim, True, kMaskCols, kBlockN, kBlockD, kTma,
              seq.k_begin)
    v = _load(v_base, b, h_k, col0, 0, v_row_stride, seq.seqlen_k, head_dim_v, True, kMaskCols, kBlockN, kBlockDv, kTma,
              seq.k_begin)
    dk = tl.zeros([kBlockN, kBlockD], tl.float32)
    dv = tl.zeros([kBlockN, kBlockDv], tl.float32)
    group = nheads // nheads_k
    num_splits = tl.cast(_splits_of(group * tl.cast(seq.seqlen_q, tl.int64), max_splits), tl.int32)
    begin = tl.minimum(group, (group * split_idx + num_splits - 1) // num_splits)
    end = tl.minimum(group, (group * (split_idx + 1) + num_splits - 1) // num_splits)
    for i in range(begin, end):  # none in a split that a short sample does without
        h = h_k * group + i
        q_base, dout_base = q_ptr, dout_ptr
        if not kTma:
            q_base = head_of(q_ptr, b, h, seq.q_begin, q_batch_stride, q_head_stride, q_row_stride)
            dout_base = head_of(dout_ptr, b, h, seq.q_begin, dout_batch_stride, dout_head_stride, dout_row_stride)
        bh = b * nheads + h
        numbers = score_numbers(softmax_scale, softcap, alibi_ptr, bias_ptr, alibi_batch_stride,
                                bias_batch_stride, bias_head_stride, seq, h)
        scores = Scores(numbers, softcap, alibi_ptr, bias_ptr, bias_row_stride, bias_key_stride, kFastTanh)
        if kIsCausal or kIsLocal or kRaggedRows:
            dk, dv = _accumulate_dkdv(dk, dv, k, v, q_base, dout_base, lse_ptr, delta_ptr, b, h, bh, q_row_stride,
                                      dout_row_stride, blocks, mask, seq, pad_begin, col0, seqlen_pad, head_dim,
                                      head_dim_v, scores, seed_ptr, threshold, keep_scale, True, kIsLocal,
                                      kEmptyRows, kClearDelta, kRaggedRows, kMaskCols, kBlockM, kBlockN, kBlockD,
                                      kBlockDv, kTma)
        dk, dv = _accumulate_dkdv(dk, dv, k, v, q_base, dout_base, lse_ptr, delta_ptr, b, h, bh, q_row_stride,
                                  dout_row_stride, blocks, mask, seq, pad_begin, col0, seqlen_pad, head_dim,
                                  head_dim_v, scores, seed_ptr, threshold, keep_scale, False, kIsLocal,
                                  kEmptyRows, kClearDelta, kRaggedRows, kMaskCols, kBlockM, kBlockN, kBlockD,
                                  kBlockDv, kTma)

    dims, dims_v = tl.arange(0, kBlockD), tl.arange(0, kBlockDv)
    is_key = cols[:, None] < seq.padded_k
    is_dk, is_dv = is_key, is_key
    if kMaskCols:
        is_dk, is_dv = is_key & (dims[None, :] < head_dim), is_key & (dims_v[None, :] < head_dim_v)
    dk_ptr += split_idx.to(tl.int64) * split_stride
    dv_ptr += split_idx.to(tl.int64) * split_stride
    dk_base = head_of(dk_ptr, b, h_k, seq.k_begin, dk_batch_stride, dk_head_stride, dk_row_stride)
    dv_base = head_of(dv_ptr, b, h_k, seq.k_begin, dv_batch_stride, dv_head_stride, dv_row_stride)
    is_used = cols[:, None] < seq.seqlen_k
    if kIsLocal:
        is_used &= cols[:, None] >= keys_of(mask, 0).begin
    dk = tl.where(is_used, dk * softmax_scale, 0.0)
    dv = tl.where(is_used, dv * keep_scale, 0.0)
    tl.store(dk_base + cols.to(tl.int64)[:, None] * dk_row_stride + dims[None, :], dk.to(dk_ptr.dtype.element_ty),
             mask=is_dk)
    tl.store(dv_base + cols.to(tl.int64)[:, None] * dv_row_stride + dims_v[None, :], dv.to(dv_ptr.dtype.element_ty),
             mask=is_dv)


@triton.jit
def _accumulate_dq(dq, q, dout, lse, delta, k, v, b, h, h_k, row0, k_row_stride, v_row_stride, blocks, visible,
                   first_key, seq, head_dim, head_dim_v, scores, seed_ptr, threshold, keep_scale,
                   kMasked: tl.constexpr, kIsLocal: tl.constexpr, kClearKeys: tl.constexpr, kMaskCols: tl.constexpr,
                   kBlockM: tl.constexpr, kBlockN: tl.constexpr, kBlockD: tl.constexpr, kBlockDv: tl.constexpr,
                   kTma: tl.constexpr):
    """dq [kBlockM, kBlockD] with what the full blocks of keys add, or with kMasked the cut ones."""
    loop = steps(blocks, kMasked)
    for step in range(loop.begin, loop.end):
        col0 = block_of(blocks, step, kMasked) * kBlockN
        cols = col0 + tl.arange(0, kBlockN)
        k_tile = _load(k, b, h_k, col0, 0, k_row_stride, seq.seqlen_k, head_dim, kMasked, kMaskCols, kBlockN, kBlockD,
                       kTma, seq.k_begin, first_key)
        v_tile = _load(v, b, h_k, col0, 0, v_row_stride, seq.seqlen_k, head_dim_v, kMasked, kMaskCols, kBlockN,
                       kBlockDv, kTma, seq.k_begin, first_key)
        if kMasked and kTma:
            k_tile = _clear_keys(k_tile, cols, first_key, seq.seqlen_k, kClearKeys)
            v_tile = _clear_keys(v_tile, cols, first_key, seq.seqlen_k, kClearKeys)
        s = capped(scores, tl.dot(q, k_tile.T, input_precision="ieee"))
        shifted_s = shifted(scores, s, (row0 + tl.arange(0, kBlockM))[:, None], cols[None, :])
        p = probabilities(shifted_s, lse[:, None], scores.numbers.unit, q.dtype == tl.float32)
        if kMasked:
            p = tl.where(sees(visible, cols, kIsLocal), p, 0.0)
        dp = tl.dot(dout, v_tile.T, input_precision="ieee")
        if seed_ptr is not None:
            keep = keep_tile(seed_ptr, threshold, seq.b, h, row0, col0, kBlockM, kBlockN)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = through_cap(scores, p * (dp - delta[:, None]), s)
        dq = _add_product(dq, ds.to(q.dtype), k_tile)
    return dq


@triton.jit(do_not_specialize=["threshold", *WINDOW])
def _flash_bwd_q(q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, lse_ptr, delta_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
                 seqused_q_ptr, seqused_k_ptr, alibi_ptr, bias_ptr, seed_ptr, threshold, keep_scale, softmax_scale,
                 softcap, alibi_batch_stride, bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride,
                 kFastTanh: tl.constexpr,
                 q_batch_stride, q_head_stride, q_row_stride, k_batch_stride, k_head_stride, k_row_stride,
                 v_batch_stride, v_head_stride, v_row_stride, dout_batch_stride, dout_head_stride, dout_row_stride,
                 dq_batch_stride, dq_head_stride, dq_row_stride, batch_size, nheads, nheads_k, seqlen_q, seqlen_k,
                 seqlen_pad, head_dim, head_dim_v, window_left, window_right, kIsCausal: tl.constexpr,
                 kIsLocal: tl.constexpr, kEmptyRows: tl.constexpr, kMaskCols: tl.constexpr, kTma: tl.constexpr,
                 kBlockM: tl.constexpr, kBlockN: tl.constexpr, kBlockD: tl.constexpr, kBlockDv: tl.constexpr):
    """dQ of kBlockM rows of one head."""
    kIsPacked: tl.constexpr = cu_seqlens_q_ptr is not None
    m_blocks = num_slots(cu_seqlens_q_ptr, batch_size, seqlen_q, kBlockM)
    m_block = m_blocks - 1 - tl.program_id(0) % m_blocks
    bh = tl.program_id(0) // m_blocks
    b, h = bh // nheads, bh % nheads
    h_k = h // (nheads // nheads_k)
    sample = b
    if kIsPacked:
        sample, m_block = block_of_slot(cu_seqlens_q_ptr, m_block, batch_size, seqlen_q, kBlockM)
    row0 = m_block * kBlockM
    rows = row0 + tl.arange(0, kBlockM)
    seq = sequence(cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, sample, batch_size, seqlen_q,
                   seqlen_k)
    pad_begin = 0
    if kIsPacked:
        if row0 >= seq.padded_q:
            return
        pad_begin = first_padded_row(seq)
    mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal)
    visible = keys_of(mask, rows)
    blocks = key_blocks(mask, row0, kBlockM, kBlockN)
    first_key = None
    if kIsLocal:  # the rows see no key before it
        first_key = keys_of(mask, row0).begin

    q_base, k_base, v_base, dout_base = q_ptr, k_ptr, v_ptr, dout_ptr
    if not kTma:
        q_base = head_of(q_ptr, b, h, seq.q_begin, q_batch_stride, q_head_stride, q_row_stride)
        k_base = head_of(k_ptr, b, h_k, seq.k_begin, k_batch_stride, k_head_stride, k_row_stride)
        v_base = head_of(v_ptr, b, h_k, seq.k_begin, v_batch_stride, v_head_stride, v_row_stride)
        dout_base = head_of(dout_ptr, b, h, seq.q_begin, dout_batch_stride, dout_head_stride, dout_row_stride)
    q = _load(q_base, b, h, row0, 0, q_row_stride, seq.seqlen_q, head_dim, True, kMaskCols, kBlockM, kBlockD, kTma,
              seq.q_begin)
    dout = _load(dout_base, b, h, row0, 0, dout_row_stride, seq.seqlen_q, head_dim_v, True, kMaskCols, kBlockM,
                 kBlockDv, kTma, seq.q_begin)
    lse = load_per_row(lse_ptr, bh, pad_begin + row0, seqlen_pad, kBlockM, kTma)
    delta = load_per_row(delta_ptr, bh, pad_begin + row0, seqlen_pad, kBlockM, kTma)
    if kEmptyRows:  # a row without a key has an lse if there are sinks
        lse = tl.where(visible.begin >= visible.end, float("inf"), lse)
        dout = tl.where((lse == float("inf"))[:, None], tl.zeros_like(dout), dout)
    numbers = score_numbers(softmax_scale, softcap, alibi_ptr, bias_ptr, alibi_batch_stride,
                            bias_batch_stride, bias_head_stride, seq, h)
    scores = Scores(numbers, softcap, alibi_ptr, bias_ptr, bias_row_stride, bias_key_stride, kFastTanh)
    dq = tl.zeros([kBlockM, kBlockD], tl.float32)
    dq = _accumulate_dq(dq, q, dout, lse, delta, k_base, v_base, b, h, h_k, row0, k_row_stride, v_row_stride, blocks,
                        visible, first_key, seq, head_dim, head_dim_v, scores, seed_ptr, threshold, keep_scale,
                        False, kIsLocal, kIsPacked, kMaskCols, kBlockM, kBlockN, kBlockD, kBlockDv, kTma)
    dq = _accumulate_dq(dq, q, dout, lse, delta, k_base, v_base, b, h, h_k, row0, k_row_stride, v_row_stride, blocks,
                        visible, first_key, seq, head_dim, head_dim_v, scores, seed_ptr, threshold, keep_scale,
                        True, kIsLocal, kIsPacked, kMaskCols, kBlockM, kBlockN, kBlockD, kBlockDv, kTma)
    dq = tl.where((lse == float("inf"))[:, None], 0.0, dq)  # without a key 0, where a sum of 0 · NaN is not
    dims = tl.arange(0, kBlockD)
    dq_base = head_of(dq_ptr, b, h, seq.q_begin, dq_batch_stride, dq_head_stride, dq_row_stride)
    tl.store(dq_base + rows.to(tl.int64)[:, None] * dq_row_stride + dims[None, :],
             (dq * softmax_scale).to(dq_ptr.dtype.element_ty),
             mask=(rows[:, None] < seq.padded_q) & (dims[None, :] < head_dim))


_flash_bwd_kv_packed, _flash_bwd_q_packed = (triton.jit(do_not_specialize=["threshold", *WINDOW, *PACKED_SIZES])(x.fn)
                                             for x in (_flash_bwd_kv, _flash_bwd_q))

# (kBlockM, kBlockN, num_warps, num_stages) by bytes of an element and the larger of kBlockD and kBlockDv, as TILES in
# attention.py: rows and keys of a tile. dK and dV take two sums and two operands, twice the registers of dQ: a program
# has fewer keys than rows.
KV_TILES = {
    (4, 64): [(32, 32, 4, 1)],
    (4, 128): [(16, 32, 4, 1)],
    (4, 256): [(16, 16, 4, 1)],
    (2, 64): [(128, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2)],
    (2, 128): [(64, 64, 4, 2), (32, 64, 4, 2)],
    (2, 256): [(32, 64, 8, 2), (32, 32, 4, 1)],
}
# In 16 bits with scores that something changes, which takes registers: by the larger of kBlockD and kBlockDv.
SCORES_KV_TILES = {64: [(64, 64, 8, 2), (64, 64, 4, 2)], 128: [(64, 64, 8, 2), (32, 64, 8, 2)],
                   256: [(32, 64, 8, 2), (32, 32, 4, 1)]}
Q_TILES = {
    (4, 64): [(32, 32, 4, 1)],
    (4, 128): [(32, 16, 4, 1)],
    (4, 256): [(16, 16, 4, 1)],
    (2, 64): [(64, 64, 4, 2), (128, 64, 8, 3)],
    (2, 128): [(128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)],
    (2, 256): [(64, 32, 8, 2), (32, 32, 4, 1)],
}


@functools.cache
def tile_configs(side, dtype, head_dim, max_shared_memory=227 << 10, head_dim_v=None, bias_bytes=0, has_scores=False):
    """Launch options to choose from; the first is the choice without tuning.

    Args:
        side: "kv" or "q", whose gradients the kernel computes.
        dtype, head_dim: of q.
        max_shared_memory: bytes that one program can have; 227 KB on Hopper.
        head_dim_v: of v, if it is another.
        bias_bytes: of a bias, for each score. has_scores: something changes the scores.
    """
    kBlockD, kBlockDv = block_d(dtype, head_dim), block_d(dtype, head_dim_v or head_dim)
    largest = max(kBlockD, kBlockDv)

    def fits(kBlockM, kBlockN, num_warps, num_stages):
        """Two tiles of the program's own block, and num_stages of each of the two that the loop loads."""
        own, other = (kBlockN, kBlockM) if side == "kv" else (kBlockM, kBlockN)
        of_tiles = 2 * (own + num_stages * other) * largest * dtype.itemsize
        return of_tiles + num_stages * kBlockM * kBlockN * bias_bytes + 4096 <= max_shared_memory

    tiles = (KV_TILES if side == "kv" else Q_TILES)[dtype.itemsize, max(64, largest)]
    if side == "kv" and has_scores and dtype.itemsize == 2:
        tiles = SCORES_KV_TILES[max(64, largest)]
    return [dict(kBlockM=kBlockM, kBlockN=kBlockN, kBlockD=kBlockD, kBlockDv=kBlockDv, num_warps=num_warps,
                 num_stages=num_stages)
            for kBlockM, kBlockN, num_warps, num_stages in
            [tile for tile in tiles if fits(*tile)] or [(16, 16, 4, 1)]]


def _num_splits(group, seqlen_q, seqlen_k, is_packed=False):
    """How many programs share a block of keys that `group` query heads read: num_splits of csrc/bwd_workspace_sm80.cuh,
    which says why. Here a split has whole heads. The kernel calls _splits_of with the rows of its sample and this
    result as max_splits. That is of the padded lengths. Where seqused_q and seqused_k differ, a sample may thus have
    another number of splits than it would have alone, and the last bits of its dK and dV depend on the padding.

    One in a packed batch, whose lengths the host does not know."""
    if is_packed:
        return 1
    rows = group * seqlen_q
    return _splits_of.fn(rows, min(group, 16, rows // seqlen_k))


def _split_stride(k, v):
    """Elements from one split's sums of dK, or of dV, to the next one's."""
    return max(k.numel(), v.numel())


def _has_empty_rows(q, k, lengths, window):
    """Whether lengths or a window may leave rows without a key. The host does not read lengths. It sees whether those
    of q and of k are one tensor: then a sample has more rows than keys only where q is longer than k."""
    used_q, used_k = (None if x is None else x.data_ptr() for x in (lengths.seqused_q, lengths.seqused_k))
    return lengths.is_packed or window[1] >= 0 and (used_q != used_k or q.shape[2] > k.shape[2] + window[1])


def _launch(side, config, tma, tensors, softcap, window, has_empty_rows, clears_delta):
    """A Launch for the gradients of one side, "kv" or "q", to be called with (*tensors, threshold, keep_scale,
    softmax_scale, softcap). tensors: q, k, v, dout, the gradients of this side, lse_padded, delta, *lengths,
    alibi_slopes, bias, seed.

    clears_delta: delta may be NaN in rows without a key."""
    q, k, v, dout, *gradients, lse_padded, delta = tensors[:-7]
    lengths, alibi_slopes, bias = Lengths(*tensors[-7:-3]), *tensors[-3:-1]
    (nheads, seqlen_q, head_dim), head_dim_v = q.shape[1:], v.shape[-1]
    nheads_k, seqlen_k = k.shape[1:3]
    batch_size, is_packed = num_samples(q, lengths), lengths.is_packed
    kBlockM, kBlockN, kBlockD, kBlockDv, num_warps, num_stages = config.values()
    if side == "kv":
        function = _flash_bwd_kv_packed if is_packed else _flash_bwd_kv
        max_splits = _num_splits(nheads // nheads_k, seqlen_q, seqlen_k, is_packed)
        blocks = num_slots.fn(lengths.cu_seqlens_k, batch_size, seqlen_k, kBlockN) * nheads_k * max_splits
        has_ragged_rows = is_packed or lengths.seqused_q is not None or seqlen_q % kBlockM != 0
        of_side = max_splits, _split_stride(k, v), has_ragged_rows, clears_delta
    else:
        function, of_side = _flash_bwd_q_packed if is_packed else _flash_bwd_q, ()
        blocks = num_slots.fn(lengths.cu_seqlens_q, batch_size, seqlen_q, kBlockM) * nheads
    tiles = [(q, (1, 1, kBlockM, kBlockD)), (k, (1, 1, kBlockN, kBlockD)), (v, (1, 1, kBlockN, kBlockDv)),
             (dout, (1, 1, kBlockM, kBlockDv)), *[None] * len(gradients), (lse_padded, (1, kBlockM)),
             (delta, (1, kBlockM))]
    strides = (stride for x in (q, k, v, dout, *gradients) for stride in x.stride()[:3])
    constants = (*score_constants(q, alibi_slopes, bias, softcap), *strides, batch_size, nheads, nheads_k, seqlen_q,
                 seqlen_k, delta.shape[1], head_dim, head_dim_v, *of_side, *mask_of(window), has_empty_rows,
                 head_dim < kBlockD or head_dim_v < kBlockDv, tma, kBlockM, kBlockN, kBlockD, kBlockDv)
    return Launch(function, blocks * q.shape[0], constants, tiles if tma else (), num_warps=num_warps,
                  num_stages=num_stages)


# {all that the launches depend on: {"preprocess", "kv", "q", "bias", "sum_k" or "sum_v", those that are needed: the
# Launch}}
_plans = {}


def run(dout, dlse, q, k, v, out, lse, options, need_dq=True, need_dkv=True, need_dsinks=False, need_dbias=False):
    """(dq, dk, dv, dsinks, dbias) of checked inputs and what the forward made of them with these options; dlse may be
    None. Without need_dq dq is None, without need_dkv dk and dv are, and so on, and nothing is spent on them.

    Raises:
        NotImplementedError: a packed batch with seqused_k; on a GPU, float32 with dropout and a bias or a mask.
    """
    lengths, window, seed = options.lengths, options.window, options.dropout_seed
    if lengths.is_packed and lengths.seqused_k is not None:
        raise NotImplementedError("backend='triton' has no backward pass for cu_seqlens with seqused_k: key ranges may "
                                  "overlap")
    # Triton 3.6 compiles it to a kernel whose dV is wrong on an H200, where its interpreter and 16 bits are right.
    if q.dtype == torch.float32 and seed is not None and options.attn_bias is not None and not INTERPRETING:
        raise NotImplementedError("backend='triton' has no backward pass in float32 for dropout with attn_bias")
    if INTERPRETING and q.dtype == torch.bfloat16:
        *gradients, dsinks, dbias = run(*map(to_float, (dout, dlse, q, k, v, out)), lse, in_float(options), need_dq,
                                        need_dkv, need_dsinks, need_dbias)
        return (*(x if x is None else x.bfloat16() for x in gradients), dsinks,
                dbias if dbias is None else dbias.to(options.attn_bias.dtype))
    dq = empty_like(q) if need_dq else None
    dk, dv = (empty_like(k), empty_like(v)) if need_dkv else (None, None)
    dbias = lse.new_zeros(options.attn_bias.shape) if need_dbias else None  # a sum of many, so as they are
    if not q.numel() or not k.numel():  # without keys out does not depend on the sinks, and lse is its row's sink
        dsinks = torch.zeros_like(options.sinks) if need_dsinks else None
        if need_dsinks and dlse is not None:
            dsinks += dlse.masked_fill(lse == -math.inf, 0).sum((0, 2))
        return *(x if x is None else x.zero_() for x in (dq, dk, dv)), dsinks, dbias_of(options, dbias)
    if dout.stride(-1) != 1:  # as the gradient of a sum
        dout = dout.contiguous()
    batch_size, nheads, seqlen_q, _ = q.shape
    *score_inputs, softcap = *score_tensors(options), options.softcap or None
    numbers = *threshold_and_scale(options.dropout_p if seed is not None else 0.0), options.softmax_scale, softcap
    unit = options.softmax_scale if not options.has_scores else softcap or 1.0
    seqlen_pad = padded_rows(seqlen_q, lengths, num_samples(q, lengths))
    lse_padded, delta = (lse.new_empty(batch_size * nheads, seqlen_pad) for _ in range(2))
    sinks, dsinks_of_rows = (options.sinks, torch.empty_like(delta)) if need_dsinks else (None, None)
    preprocessed = out, dout, lse, dlse, sinks, delta, lse_padded, dsinks_of_rows, lengths.cu_seqlens_q
    max_splits = _num_splits(nheads // k.shape[1], seqlen_q, k.shape[2], lengths.is_packed) if need_dkv else 1
    sides = {}
    if need_dkv:
        split_stride = _split_stride(k, v)
        dkv_accum = [lse.new_empty(max_splits, split_stride) for _ in range(2)] if max_splits > 1 else []
        # A split's sums lie in memory as the gradient does.
        sums = [x.as_strided(dx.shape, dx.stride()) for x, dx in zip(dkv_accum, (dk, dv))] or (dk, dv)
        sides["kv"] = q, k, v, dout, *sums, lse_padded, delta, *lengths, *score_inputs, seed
    if need_dq:
        sides["q"] = q, k, v, dout, dq, lse_padded, delta, *lengths, *score_inputs, seed
    of_bias = q, k, v, dout, dbias, lse_padded, delta, *lengths[2:], *score_inputs, seed
    with torch.accelerator.device_index(q.device.index):  # None on the CPU: nothing to switch
        autotune = options.autotune and tuner.is_on()
        has_empty_rows = _has_empty_rows(q, k, lengths, window)
        # A row without a key has an lse if there are sinks, and so its dlse counts.
        clears_delta = has_empty_rows and dlse is not None and options.sinks is not None
        key = (q.device, window, has_empty_rows, clears_delta, autotune, *sides, need_dbias, softcap is None,
               *layouts(q, k, v, out, dout, lse, dlse, sinks, *lengths, *score_inputs, seed))
        plan = _plans.get(key)
        is_new = plan is None
        if is_new:
            plan = {"preprocess": launch_preprocess(*preprocessed)}
        plan["preprocess"](*preprocessed, unit)
        if is_new:  # tiles are timed on what preprocess.py made
            plan |= {side: _choose(side, autotune, tensors, numbers, lengths, window, has_empty_rows, clears_delta)
                     for side, tensors in sides.items()}
            if need_dbias:
                plan["bias"] = launch_bias(of_bias, softcap, window)
            if max_splits > 1:
                plan |= {"sum_k": sum_splits(dk, split_stride, max_splits),
                         "sum_v": sum_splits(dv, split_stride, max_splits)}
            remember(_plans, key, plan, q.device)
        with _beside(q.device, need_dq and need_dkv and _pays_beside(q, k, v)) as second_stream:
            if need_dkv:
                plan["kv"](*sides["kv"], *numbers)
            if need_dq:
                with second_stream:
                    plan["q"](*sides["q"], *numbers)
            if max_splits > 1:
                plan["sum_k"](dkv_accum[0], dk)
                plan["sum_v"](dkv_accum[1], dv)
        if need_dbias:
            plan["bias"](*of_bias, *numbers)
    dsinks = dsinks_of_rows.view(batch_size, nheads, -1).sum((0, 2)) if need_dsinks else None
    return dq, dk, dv, dsinks, dbias_of(options, dbias)


def dbias_of(options, dbias):
    """The gradient of a bias in its dtype, or None."""
    return dbias if dbias is None else dbias.to(options.attn_bias.dtype)


@functools.cache
def _stream(device, first):
    """A stream for each other one: one thread's may be part of a CUDA graph in the making."""
    return torch.cuda.Stream(device)


MIN_WORK_FOR_A_STREAM = 2**34  # elements of Q times keys


def _pays_beside(q, k, v):
    """Whether the two kernels should run beside each other: one fills the multiprocessors that the other leaves at its
    end. At head_dim 128 that is worth 2 to 5 %, at 64 it can cost as much. In a small call the second stream costs the
    host more than it saves."""
    is_large = q.numel() * k.shape[2] >= MIN_WORK_FOR_A_STREAM
    return q.is_cuda and is_large and block_d(q.dtype, max(q.shape[-1], v.shape[-1])) >= 128


@contextlib.contextmanager
def _beside(device, pays):
    """A context for launches on a second stream, which begins with the current one and ends before it goes on."""
    if not pays:
        yield contextlib.nullcontext()
        return
    first = torch.cuda.current_stream(device)
    second = _stream(device, first.cuda_stream)
    second.wait_stream(first)
    try:
        yield torch.cuda.stream(second)
    finally:
        first.wait_stream(second)


def _choose(side, autotune, tensors, numbers, lengths, window, has_empty_rows, clears_delta):
    """The Launch of one of tile_configs: the first, or the fastest."""
    q, k, v, dout, *_, alibi_slopes, bias, seed = tensors
    scores = alibi_slopes, bias, numbers[3]
    configs = tile_configs(side, q.dtype, q.shape[-1], properties(q.device).max_shared_memory, v.shape[-1],
                           bias_bytes(bias), any(x is not None for x in scores))
    # A descriptor ends with the tensor, not with a padded sample.
    tma = (lengths.is_packed or all(x is None for x in lengths)) and can_use_tma(q, k, v, dout)
    launch_of = once(lambda config: _launch(side, config, tma, tensors, numbers[3], window, has_empty_rows,
                                            clears_delta))
    if not autotune:
        return launch_of(configs[0])
    head_dims = configs[0]["kBlockD"], configs[0]["kBlockDv"]
    key = (str(q.dtype), *head_dims, *kind_of(q, k, lengths, window), tma, seed is not None, *kind_of_scores(*scores))
    run_config = lambda config: launch_of(config)(*tensors, *numbers)  # noqa: E731
    return launch_of(tuner.fastest(f"attention_bwd_{side}", key, configs, run_config, q.device))
