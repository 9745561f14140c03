"""The two Triton kernels of the backward pass: _flash_bwd_kv computes dK and dV of one block of keys and loops over the
rows that see it; _flash_bwd_q computes dQ of one block of rows and loops over the keys.

Each forms P = exp(scores - lse) and dS = P ∘ (dP - delta) again, with dP = dO Vᵀ. There are no atomics. Where query heads
share keys, several programs may share a block of keys: each sums over a part of the heads, in fp32 in memory, and
sum_splits adds these up.

With dropout, M its mask and s its scale, dV = (P ∘ M · s)ᵀ dO and dP = (dO Vᵀ) ∘ M · s. With a softcap, dS goes through
its tanh, see scores.py.

Read next: preprocess.py, delta; attention_bwd_bias.py, the gradient of a bias.
"""

import triton
import triton.language as tl

from .attention import _clear_keys, _load
from .dropout import keep_tile
from .launching import PACKED_SIZES, WINDOW
from .mask import block_of, has_keys, key_blocks, keys_of, make_mask, row_blocks, rows_of, seen_by, sees, steps
from .preprocess import first_padded_row, load_per_row, probabilities
from .scores import Scores, capped, score_numbers, shifted, through_cap
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
                     seq, pad_begin, col0, seqlen_pad, head_dim, head_dim_v, scores, seed_ptr, keep_count,
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
            keep = keep_tile(seed_ptr, keep_count, seq.b, h, row0, col0, kBlockM, kBlockN).T
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


@triton.jit(do_not_specialize=["keep_count", "batch_size", *WINDOW])
def _flash_bwd_kv(q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, cu_seqlens_q_ptr,
                  cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, alibi_ptr, bias_ptr, seed_ptr, keep_count, keep_scale,
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
                                      head_dim_v, scores, seed_ptr, keep_count, keep_scale, True, kIsLocal,
                                      kEmptyRows, kClearDelta, kRaggedRows, kMaskCols, kBlockM, kBlockN, kBlockD,
                                      kBlockDv, kTma)
        dk, dv = _accumulate_dkdv(dk, dv, k, v, q_base, dout_base, lse_ptr, delta_ptr, b, h, bh, q_row_stride,
                                  dout_row_stride, blocks, mask, seq, pad_begin, col0, seqlen_pad, head_dim,
                                  head_dim_v, scores, seed_ptr, keep_count, keep_scale, False, kIsLocal,
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
                   first_key, seq, head_dim, head_dim_v, scores, seed_ptr, keep_count, keep_scale,
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
            keep = keep_tile(seed_ptr, keep_count, seq.b, h, row0, col0, kBlockM, kBlockN)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = through_cap(scores, p * (dp - delta[:, None]), s)
        dq = _add_product(dq, ds.to(q.dtype), k_tile)
    return dq


@triton.jit(do_not_specialize=["keep_count", "batch_size", *WINDOW])
def _flash_bwd_q(q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, lse_ptr, delta_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
                 seqused_q_ptr, seqused_k_ptr, alibi_ptr, bias_ptr, seed_ptr, keep_count, keep_scale, softmax_scale,
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
                        visible, first_key, seq, head_dim, head_dim_v, scores, seed_ptr, keep_count, keep_scale,
                        False, kIsLocal, kIsPacked, kMaskCols, kBlockM, kBlockN, kBlockD, kBlockDv, kTma)
    dq = _accumulate_dq(dq, q, dout, lse, delta, k_base, v_base, b, h, h_k, row0, k_row_stride, v_row_stride, blocks,
                        visible, first_key, seq, head_dim, head_dim_v, scores, seed_ptr, keep_count, keep_scale,
                        True, kIsLocal, kIsPacked, kMaskCols, kBlockM, kBlockN, kBlockD, kBlockDv, kTma)
    dq = tl.where((lse == float("inf"))[:, None], 0.0, dq)  # without a key 0, where a sum of 0 · NaN is not
    dims = tl.arange(0, kBlockD)
    dq_base = head_of(dq_ptr, b, h, seq.q_begin, dq_batch_stride, dq_head_stride, dq_row_stride)
    tl.store(dq_base + rows.to(tl.int64)[:, None] * dq_row_stride + dims[None, :],
             (dq * softmax_scale).to(dq_ptr.dtype.element_ty),
             mask=(rows[:, None] < seq.padded_q) & (dims[None, :] < head_dim))


_flash_bwd_kv_packed, _flash_bwd_q_packed = (triton.jit(do_not_specialize=["keep_count", *WINDOW, *PACKED_SIZES])(x.fn)
                                             for x in (_flash_bwd_kv, _flash_bwd_q))
