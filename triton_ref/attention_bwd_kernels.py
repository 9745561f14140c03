"""The Triton kernels of the backward pass: _flash_bwd_kv computes dK and dV of one block of keys and loops over the
rows that see it; _flash_bwd_q computes dQ of one block of rows and loops over the keys; _flash_bwd_bias computes the
gradient of a bias.

Each forms P = exp(scores - lse) and dS = P ∘ (dP - delta) again, with dP = dO Vᵀ. There are no atomics. Where query
heads share keys, several programs may share a block of keys: each sums over a part of the heads, in fp32 in memory, and
sum_splits adds these up. With dropout, M its mask and s its scale, dV = (P ∘ M · s)ᵀ dO and dP = (dO Vᵀ) ∘ M · s. With
a softcap, dS goes through its tanh, see scores.py.

dbias = Σ dS over the samples, heads, rows and keys that share an element of it. A program owns kBlockM rows and kBlockN
keys of one head of dbias and walks along the scores that share them: of all samples, of all heads, of all blocks of
rows or keys, whichever the bias has once.

Read next: preprocess.py, delta.
"""

import triton
import triton.language as tl

from .attention import _clear_keys, _load, block_of_rows, matrix_of
from .dropout import Dropout, keep_tile
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
def _accumulate_dkdv(dk, dv, k, v, q, dout, lse_ptr, delta_ptr, h, bh, blocks, mask, seq, pad_begin, col0, seqlen_pad,
                     scores, dropout, kMasked: tl.constexpr, kIsLocal: tl.constexpr, kEmptyRows: tl.constexpr,
                     kClearDelta: tl.constexpr, kRaggedRows: tl.constexpr, kTile: tl.constexpr):
    """dk [kBlockN, kBlockD] and dv / keep_scale [kBlockN, kBlockDv] with what one query head adds: its full blocks of
    rows, or with kMasked the cut ones. kEmptyRows: rows without a key, or the next sample's, may be among those of the
    cut ones. kClearDelta: and delta may be NaN there."""
    seqlen_q = mask.seqlen_q
    kBlockM: tl.constexpr = kTile.kBlockM
    kBlockN: tl.constexpr = kTile.kBlockN
    cols = col0 + tl.arange(0, kBlockN)
    seeing = rows_of(mask, cols)
    loop = steps(blocks, kMasked)
    for step in range(loop.begin, loop.end):
        row0 = block_of(blocks, step, kMasked) * kBlockM
        rows = row0 + tl.arange(0, kBlockM)
        q_tile = _load(q, row0, True, kTile.kMaskCols, kBlockM, kTile.kBlockD, kTile.kTma)
        if kMasked and kEmptyRows:  # Q and dO may be NaN there, and 0 · NaN would reach dK and dV
            is_used = has_keys(mask, rows)
            if kRaggedRows:
                is_used &= rows < seqlen_q
            q_tile = tl.where(is_used[:, None], q_tile, tl.zeros_like(q_tile))
        s = capped(scores, tl.dot(k, q_tile.T, input_precision="ieee"))  # Sᵀ
        lse = load_per_row(lse_ptr, bh, pad_begin + row0, seqlen_pad, kBlockM, kTile.kTma)
        p = probabilities(shifted(scores, s, rows[None, :], cols[:, None]), lse[None, :], scores.numbers.unit,
                          k.dtype == tl.float32)
        if kMasked:  # rows beyond the end as well: Q is 0 there, and the score NaN where a key is infinite
            p = tl.where(seen_by(seeing, rows, seqlen_q, kIsLocal, kRaggedRows), p, 0.0)
        p_dropped = p
        if dropout.seed is not None:
            keep = keep_tile(dropout, seq.b, h, row0, col0, kBlockM, kBlockN).T
            p_dropped = tl.where(keep, p, 0.0)
        dout_tile = _load(dout, row0, True, kTile.kMaskCols, kBlockM, kTile.kBlockDv, kTile.kTma)
        if kMasked and kEmptyRows:
            dout_tile = tl.where(is_used[:, None], dout_tile, tl.zeros_like(dout_tile))
        dv = _add_product(dv, p_dropped.to(k.dtype), dout_tile)
        dp = tl.dot(v, dout_tile.T, input_precision="ieee")  # dPᵀ, beside the product before it
        if dropout.seed is not None:
            dp = tl.where(keep, dp * dropout.keep_scale, 0.0)
        delta = load_per_row(delta_ptr, bh, pad_begin + row0, seqlen_pad, kBlockM, kTile.kTma)
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
def _flash_bwd_kv(q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, lengths, seed_ptr, keep_count,
                  keep_scale, softmax_scale, score_options, strides, score_strides, batch_size, nheads, nheads_k,
                  seqlen_q, seqlen_k, seqlen_pad, head_dim, head_dim_v, max_splits, split_stride, window_left,
                  window_right, kIsCausal: tl.constexpr, kIsLocal: tl.constexpr, kFastTanh: tl.constexpr,
                  kEmptyRows: tl.constexpr, kClearDelta: tl.constexpr, kRaggedRows: tl.constexpr,
                  kTile: tl.constexpr):
    """dK and dV of kBlockN keys of one key/value head, summed over the query heads that read it, or over the part of
    them that one of several splits has. strides: of q, k, v, dout, dk and dv."""
    # The keys that most rows see under a causal mask go first.
    kBlockN: tl.constexpr = kTile.kBlockN
    kBlockD: tl.constexpr = kTile.kBlockD
    kBlockDv: tl.constexpr = kTile.kBlockDv
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides = strides
    n_blocks = num_slots(lengths.cu_seqlens_k, batch_size, seqlen_k, kBlockN)
    split_idx, tile = tl.program_id(0) % max_splits, tl.program_id(0) // max_splits
    n_block = tile % n_blocks
    bh_k = tile // n_blocks
    b, h_k = bh_k // nheads_k, bh_k % nheads_k
    sample, pad_begin = b, 0
    if lengths.cu_seqlens_k is not None:
        sample, n_block = block_of_slot(lengths.cu_seqlens_k, n_block, batch_size, seqlen_k, kBlockN)
    col0 = n_block * kBlockN
    cols = col0 + tl.arange(0, kBlockN)
    seq = sequence(lengths, sample, batch_size, seqlen_q, seqlen_k)
    if lengths.cu_seqlens_k is not None:
        if col0 >= seq.padded_k:
            return
        pad_begin = first_padded_row(seq)
    mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal)
    blocks = row_blocks(mask, col0, kTile.kBlockM, kBlockN)

    # Keys beyond the sample's end are 0 here, or the next sample's. Those that a window hides from all rows may be NaN.
    # Their rows of Pᵀ and dSᵀ reach no other key's gradient, and 0 is stored for them.
    k = matrix_of(k_ptr, k_strides, b, h_k, seq.k_begin, seq.seqlen_k, head_dim, kTile.kTma)
    v = matrix_of(v_ptr, v_strides, b, h_k, seq.k_begin, seq.seqlen_k, head_dim_v, kTile.kTma)
    k = _load(k, col0, True, kTile.kMaskCols, kBlockN, kBlockD, kTile.kTma)
    v = _load(v, col0, True, kTile.kMaskCols, kBlockN, kBlockDv, kTile.kTma)
    dk = tl.zeros([kBlockN, kBlockD], tl.float32)
    dv = tl.zeros([kBlockN, kBlockDv], tl.float32)
    dropout = Dropout(seed_ptr, keep_count, keep_scale)
    group = nheads // nheads_k
    num_splits = tl.cast(_splits_of(group * tl.cast(seq.seqlen_q, tl.int64), max_splits), tl.int32)
    begin = tl.minimum(group, (group * split_idx + num_splits - 1) // num_splits)
    end = tl.minimum(group, (group * (split_idx + 1) + num_splits - 1) // num_splits)
    for i in range(begin, end):  # none in a split that a short sample does without
        h = h_k * group + i
        q = matrix_of(q_ptr, q_strides, b, h, seq.q_begin, mask.seqlen_q, head_dim, kTile.kTma)
        dout = matrix_of(dout_ptr, dout_strides, b, h, seq.q_begin, mask.seqlen_q, head_dim_v, kTile.kTma)
        numbers = score_numbers(softmax_scale, score_options, score_strides, seq, h)
        scores = Scores(numbers, score_options, score_strides, kFastTanh)
        # First the cut blocks, if there may be any.
        for kStep in tl.static_range(0 if kIsCausal or kIsLocal or kRaggedRows else 1, 2):
            dk, dv = _accumulate_dkdv(dk, dv, k, v, q, dout, lse_ptr, delta_ptr, h, b * nheads + h, blocks, mask, seq,
                                      pad_begin, col0, seqlen_pad, scores, dropout, kStep == 0, kIsLocal, kEmptyRows,
                                      kClearDelta, kRaggedRows, kTile)

    dims, dims_v = tl.arange(0, kBlockD), tl.arange(0, kBlockDv)
    is_key = cols[:, None] < seq.padded_k
    is_dk, is_dv = is_key, is_key
    if kTile.kMaskCols:
        is_dk, is_dv = is_key & (dims[None, :] < head_dim), is_key & (dims_v[None, :] < head_dim_v)
    dk_ptr += split_idx.to(tl.int64) * split_stride
    dv_ptr += split_idx.to(tl.int64) * split_stride
    dk_base = head_of(dk_ptr, dk_strides, b, h_k, seq.k_begin)
    dv_base = head_of(dv_ptr, dv_strides, b, h_k, seq.k_begin)
    is_used = cols[:, None] < seq.seqlen_k
    if kIsLocal:
        is_used &= cols[:, None] >= keys_of(mask, 0).begin
    dk = tl.where(is_used, dk * softmax_scale, 0.0)
    dv = tl.where(is_used, dv * keep_scale, 0.0)
    tl.store(dk_base + cols.to(tl.int64)[:, None] * dk_strides.row + dims[None, :], dk.to(dk_ptr.dtype.element_ty),
             mask=is_dk)
    tl.store(dv_base + cols.to(tl.int64)[:, None] * dv_strides.row + dims_v[None, :], dv.to(dv_ptr.dtype.element_ty),
             mask=is_dv)


@triton.jit
def score_gradients(q, k, v, dout, lse, delta, h, row0, col0, seq, visible, scores, dropout, kMasked: tl.constexpr,
                    kIsLocal: tl.constexpr):
    """(the result of capped, P, dS) of a tile of rows and one of keys: [kBlockM, kBlockN]. dS is the derivative by the
    result of shifted. P and dS are 0 with kMasked where a row does not see a key."""
    rows, cols = row0 + tl.arange(0, q.shape[0]), col0 + tl.arange(0, k.shape[0])
    s = capped(scores, tl.dot(q, k.T, input_precision="ieee"))
    p = probabilities(shifted(scores, s, rows[:, None], cols[None, :]), lse[:, None], scores.numbers.unit,
                      q.dtype == tl.float32)
    if kMasked:
        p = tl.where(sees(visible, cols, kIsLocal), p, 0.0)
    dp = tl.dot(dout, v.T, input_precision="ieee")
    if dropout.seed is not None:
        kept = keep_tile(dropout, seq.b, h, row0, col0, q.shape[0], k.shape[0])
        dp = tl.where(kept, dp * dropout.keep_scale, 0.0)
    return s, p, p * (dp - delta[:, None])


@triton.jit
def _accumulate_dq(dq, q, dout, lse, delta, k, v, h, row0, blocks, visible, first_key, seq, scores, dropout,
                   kMasked: tl.constexpr, kIsLocal: tl.constexpr, kClearKeys: tl.constexpr, kTile: tl.constexpr):
    """dq [kBlockM, kBlockD] with what the full blocks of keys add, or with kMasked the cut ones."""
    kBlockN: tl.constexpr = kTile.kBlockN
    loop = steps(blocks, kMasked)
    for step in range(loop.begin, loop.end):
        col0 = block_of(blocks, step, kMasked) * kBlockN
        k_tile = _load(k, col0, kMasked, kTile.kMaskCols, kBlockN, kTile.kBlockD, kTile.kTma, 0, first_key)
        v_tile = _load(v, col0, kMasked, kTile.kMaskCols, kBlockN, kTile.kBlockDv, kTile.kTma, 0, first_key)
        if kMasked and kTile.kTma:
            cols = col0 + tl.arange(0, kBlockN)
            k_tile = _clear_keys(k_tile, cols, first_key, seq.seqlen_k, kClearKeys)
            v_tile = _clear_keys(v_tile, cols, first_key, seq.seqlen_k, kClearKeys)
        s, _, ds = score_gradients(q, k_tile, v_tile, dout, lse, delta, h, row0, col0, seq, visible, scores, dropout,
                                   kMasked, kIsLocal)
        dq = _add_product(dq, through_cap(scores, ds, s).to(q.dtype), k_tile)
    return dq


@triton.jit(do_not_specialize=["keep_count", "batch_size", *WINDOW])
def _flash_bwd_q(q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, lse_ptr, delta_ptr, lengths, seed_ptr, keep_count, keep_scale,
                 softmax_scale, score_options, strides, score_strides, batch_size, nheads, nheads_k, seqlen_q, seqlen_k,
                 seqlen_pad, head_dim, head_dim_v, window_left, window_right, kIsCausal: tl.constexpr,
                 kIsLocal: tl.constexpr, kFastTanh: tl.constexpr, kEmptyRows: tl.constexpr, kTile: tl.constexpr):
    """dQ of kBlockM rows of one head. strides: of q, k, v, dout and dq."""
    kIsPacked: tl.constexpr = lengths.cu_seqlens_q is not None
    kBlockM: tl.constexpr = kTile.kBlockM
    kBlockD: tl.constexpr = kTile.kBlockD
    q_strides, k_strides, v_strides, dout_strides, dq_strides = strides
    b, h, bh, sample, row0 = block_of_rows(lengths.cu_seqlens_q, batch_size, nheads, seqlen_q, kBlockM)
    h_k = h // (nheads // nheads_k)
    rows = row0 + tl.arange(0, kBlockM)
    seq = sequence(lengths, sample, batch_size, seqlen_q, seqlen_k)
    pad_begin = 0
    if kIsPacked:
        if row0 >= seq.padded_q:
            return
        pad_begin = first_padded_row(seq)
    mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal)
    visible = keys_of(mask, rows)
    blocks = key_blocks(mask, row0, kBlockM, kTile.kBlockN)
    first_key = None
    if kIsLocal:  # the rows see no key before it
        first_key = keys_of(mask, row0).begin

    q = matrix_of(q_ptr, q_strides, b, h, seq.q_begin, seq.seqlen_q, head_dim, kTile.kTma)
    k = matrix_of(k_ptr, k_strides, b, h_k, seq.k_begin, seq.seqlen_k, head_dim, kTile.kTma)
    v = matrix_of(v_ptr, v_strides, b, h_k, seq.k_begin, seq.seqlen_k, head_dim_v, kTile.kTma)
    dout = matrix_of(dout_ptr, dout_strides, b, h, seq.q_begin, seq.seqlen_q, head_dim_v, kTile.kTma)
    q = _load(q, row0, True, kTile.kMaskCols, kBlockM, kBlockD, kTile.kTma)
    dout = _load(dout, row0, True, kTile.kMaskCols, kBlockM, kTile.kBlockDv, kTile.kTma)
    lse = load_per_row(lse_ptr, bh, pad_begin + row0, seqlen_pad, kBlockM, kTile.kTma)
    delta = load_per_row(delta_ptr, bh, pad_begin + row0, seqlen_pad, kBlockM, kTile.kTma)
    if kEmptyRows:  # a row without a key has an lse if there are sinks
        lse = tl.where(visible.begin >= visible.end, float("inf"), lse)
        dout = tl.where((lse == float("inf"))[:, None], tl.zeros_like(dout), dout)
    scores = Scores(score_numbers(softmax_scale, score_options, score_strides, seq, h), score_options, score_strides,
                    kFastTanh)
    dropout = Dropout(seed_ptr, keep_count, keep_scale)
    dq = tl.zeros([kBlockM, kBlockD], tl.float32)
    for kMasked in tl.static_range(2):
        dq = _accumulate_dq(dq, q, dout, lse, delta, k, v, h, row0, blocks, visible, first_key, seq, scores, dropout,
                            kMasked, kIsLocal, kIsPacked, kTile)
    dq = tl.where((lse == float("inf"))[:, None], 0.0, dq)  # without a key 0, where a sum of 0 · NaN is not
    dims = tl.arange(0, kBlockD)
    dq_base = head_of(dq_ptr, dq_strides, b, h, seq.q_begin)
    tl.store(dq_base + rows.to(tl.int64)[:, None] * dq_strides.row + dims[None, :],
             (dq * softmax_scale).to(dq_ptr.dtype.element_ty),
             mask=(rows[:, None] < seq.padded_q) & (dims[None, :] < head_dim))


@triton.jit
def _owned(idx, size, kIsShared: tl.constexpr):
    """[begin, end) of what a program owns of a dimension, and what is left of idx for the others: all of a dimension
    that is shared, otherwise one."""
    begin, end = idx % size, idx % size + 1
    rest = idx // size
    if kIsShared:
        begin, end, rest = 0, size, idx
    return begin, end, rest


@triton.jit
def _ds(tensors, strides, h, h_k, bh, row0, col0, seq, mask, scores, dropout, seqlen_pad, head_dim, head_dim_v,
        kTile: tl.constexpr):
    """dS [kBlockM, kBlockN] of one head of a sample, 0 where a row does not see a key."""
    kBlockM: tl.constexpr = kTile.kBlockM
    kBlockN: tl.constexpr = kTile.kBlockN
    q, k, v, dout, lse_ptr, delta_ptr = tensors
    q = matrix_of(q, strides[0], seq.b, h, 0, seq.seqlen_q, head_dim)
    k = matrix_of(k, strides[1], seq.b, h_k, 0, seq.seqlen_k, head_dim)
    v = matrix_of(v, strides[2], seq.b, h_k, 0, seq.seqlen_k, head_dim_v)
    dout = matrix_of(dout, strides[3], seq.b, h, 0, seq.seqlen_q, head_dim_v)
    q, k = _load(q, row0, True, True, kBlockM, kTile.kBlockD), _load(k, col0, True, True, kBlockN, kTile.kBlockD)
    v = _load(v, col0, True, True, kBlockN, kTile.kBlockDv)
    dout = _load(dout, row0, True, True, kBlockM, kTile.kBlockDv)
    lse = load_per_row(lse_ptr, bh, row0, seqlen_pad, kBlockM, False)
    delta = load_per_row(delta_ptr, bh, row0, seqlen_pad, kBlockM, False)
    visible = keys_of(mask, row0 + tl.arange(0, kBlockM))
    _, p, ds = score_gradients(q, k, v, dout, lse, delta, h, row0, col0, seq, visible, scores, dropout, True, True)
    return tl.where(p != 0, ds, 0.0)  # without a key, or with keys of -inf alone, a row's dO may be NaN


@triton.jit(do_not_specialize=["keep_count", *WINDOW])
def _flash_bwd_bias(q_ptr, k_ptr, v_ptr, dout_ptr, dbias_ptr, lse_ptr, delta_ptr, lengths, seed_ptr, keep_count,
                    keep_scale, softmax_scale, score_options, strides, score_strides, batch_size, nheads, nheads_k,
                    seqlen_q, seqlen_k, seqlen_pad, head_dim, head_dim_v, window_left, window_right,
                    kIsCausal: tl.constexpr, kIsLocal: tl.constexpr, kFastTanh: tl.constexpr,
                    kSharesBatch: tl.constexpr, kSharesHeads: tl.constexpr, kSharesRows: tl.constexpr,
                    kSharesKeys: tl.constexpr, kTile: tl.constexpr):
    """strides: of q, k, v, dout and dbias, whose keys lie in a row."""
    kBlockM: tl.constexpr = kTile.kBlockM
    kBlockN: tl.constexpr = kTile.kBlockN
    tensors, dbias_strides = (q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr), strides[4]
    n_begin, n_end, idx = _owned(tl.program_id(0), tl.cdiv(seqlen_k, kBlockN), kSharesKeys)
    m_begin, m_end, idx = _owned(idx, tl.cdiv(seqlen_q, kBlockM), kSharesRows)
    h_begin, h_end, idx = _owned(idx, nheads, kSharesHeads)
    b_begin, b_end, idx = _owned(idx, batch_size, kSharesBatch)
    dbias = tl.zeros([kBlockM, kBlockN], tl.float32)
    for b in range(b_begin, b_end):
        seq = sequence(lengths, b, batch_size, seqlen_q, seqlen_k)
        mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal)
        for h in range(h_begin, h_end):
            numbers = score_numbers(softmax_scale, score_options, score_strides, seq, h)
            scores = Scores(numbers, score_options, score_strides, kFastTanh)
            for m in range(m_begin, m_end):
                blocks = key_blocks(mask, m * kBlockM, kBlockM, kBlockN)
                for n in range(tl.maximum(n_begin, blocks.begin), tl.minimum(n_end, blocks.end)):
                    dbias += _ds(tensors, strides, h, h // (nheads // nheads_k), b * nheads + h, m * kBlockM,
                                 n * kBlockN, seq, mask, scores, Dropout(seed_ptr, keep_count, keep_scale), seqlen_pad,
                                 head_dim, head_dim_v, kTile)

    to = head_of(dbias_ptr, dbias_strides, b_begin, h_begin, 0)
    rows, cols = m_begin * kBlockM + tl.arange(0, kBlockM), n_begin * kBlockN + tl.arange(0, kBlockN)
    to_rows = to + rows.to(tl.int64) * dbias_strides.row
    if kSharesRows and kSharesKeys:
        tl.store(to, tl.sum(tl.sum(dbias, 1), 0))
    elif kSharesRows:
        tl.store(to + cols, tl.sum(dbias, 0), mask=cols < seqlen_k)
    elif kSharesKeys:
        tl.store(to_rows, tl.sum(dbias, 1), mask=rows < seqlen_q)
    else:
        is_there = (rows[:, None] < seqlen_q) & (cols[None, :] < seqlen_k)
        tl.store(to_rows[:, None] + cols[None, :], dbias, mask=is_there)


_flash_bwd_kv_packed, _flash_bwd_q_packed = (triton.jit(do_not_specialize=["keep_count", *WINDOW, *PACKED_SIZES])(x.fn)
                                             for x in (_flash_bwd_kv, _flash_bwd_q))
