"""The Triton kernels of the backward pass: _preprocess computes delta; _flash_bwd_kv dK and dV of one block of keys, in
a loop over the rows that see it; _flash_bwd_q dQ of one block of rows; _flash_bwd_bias the gradient of a bias.

Where query heads share keys, several programs may share a block of keys: each sums over a part of the heads, in fp32 in
memory, and sum_splits adds these up. With dropout, M its mask and s its scale, dV = (P ∘ M · s)ᵀ dO and
dP = (dO Vᵀ) ∘ M · s. With a softcap, dS goes through its tanh, see scores.py.
"""

import triton
import triton.language as tl

from .attention import add_product, block_of_rows, clear_keys, load_tile, matrix_of, store_tile
from .block_mask import hidden, place_of, places_of, tile_at, tiles_of
from .dropout import keep_tile
from .launching import WINDOW
from .mask import block_of, has_keys, key_blocks, keys_of, make_mask, row_blocks, rows_of, seen_by, sees, steps
from .scores import LOG2_E, Scores, add_to_captured, capped, score_numbers, shifted, through_cap
from .sequence import block_of_slot, head_of, num_slots, sequence

PAD = tl.constexpr(128)  # rows of delta and lse_padded come in multiples of this, as no tile has more


@triton.jit(do_not_specialize=["batch_size"])
def _preprocess(o_ptr, dout_ptr, lse_ptr, dlse_ptr, sinks_ptr, delta_ptr, lse_padded_ptr, dsinks_ptr, lengths,
                softmax_scale, strides, batch_size, nheads, seqlen_q, seqlen_pad, head_dim_v, kBlockM: tl.constexpr,
                kBlockDv: tl.constexpr):
    """delta = rowsum(dO ∘ O) - dlse, and lse as probabilities takes it, both (B, H, seqlen_pad). In a packed batch
    sample b begins at its first slot of PAD rows. With sinks_ptr also -exp(sink - lse) · delta of each row.

    Rows whose lse is -inf get delta 0, whatever dO and dlse hold, and lse inf, so that their P is 0. So do the rows
    behind a sample's end. A row without keys may have a sink as its lse: its O is 0, and its dO may be NaN.
    """
    m_blocks = tl.cdiv(seqlen_pad, kBlockM)
    bh = (tl.program_id(0) // m_blocks).to(tl.int64)
    b, h = bh // nheads, bh % nheads
    row0 = tl.program_id(0) % m_blocks * kBlockM  # of delta; row 0 of a sample is row q_begin of o
    rows_of_delta = row0 + tl.arange(0, kBlockM)
    q_begin, row_end = 0, seqlen_q
    o_strides, dout_strides, dlse_strides = strides
    if lengths.cu_seqlens_q is not None:
        sample, slot = block_of_slot(lengths.cu_seqlens_q, row0 // PAD, batch_size, seqlen_q, PAD)
        seq = sequence(lengths, sample, batch_size, seqlen_q, seqlen_q)
        q_begin, row_end, row0 = seq.q_begin, seq.seqlen_q, slot * PAD + row0 % PAD
    rows = row0 + tl.arange(0, kBlockM)
    is_row = rows < row_end
    o = matrix_of(o_ptr, o_strides, b, h, q_begin, row_end, head_dim_v)
    dout = matrix_of(dout_ptr, dout_strides, b, h, q_begin, row_end, head_dim_v)
    o = load_tile(o, row0, True, True, kBlockM, kBlockDv)
    dout = load_tile(dout, row0, True, True, kBlockM, kBlockDv)
    delta = tl.sum(tl.where(o == 0, 0.0, o.to(tl.float32) * dout.to(tl.float32)), 1)
    if dlse_ptr is not None:
        dlse = head_of(dlse_ptr, dlse_strides, b, h, q_begin)
        delta -= tl.load(dlse + rows.to(tl.int64) * dlse_strides.row, mask=is_row, other=0.0)
    lse = tl.load(lse_ptr + bh * seqlen_q + q_begin + rows, mask=is_row, other=float("-inf"))
    is_empty = lse == float("-inf")
    delta = tl.where(is_empty, 0.0, delta)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h)
        p = tl.where(sink == lse, 1.0, tl.exp(sink - lse))  # also where both are infinite
        p = tl.where(is_empty, 0.0, p)
        tl.store(dsinks_ptr + bh * seqlen_pad + rows_of_delta, -p * delta)
    if o.dtype != tl.float32:
        # The factor is not log2(e) but what in_log2 has made of it. One rounding, hence fp64.
        scale = tl.cast(softmax_scale, tl.float32)
        # A scale below 2^-126 has few bits or none to be exact with.
        is_small = tl.abs(scale) < 1.1754944e-38
        factor = in_log2(scale).to(tl.float64) / tl.where(is_small, 1.0, scale).to(tl.float64)
        lse = (lse.to(tl.float64) * tl.where(is_small, 1.4426950408889634, factor)).to(tl.float32)
    tl.store(delta_ptr + bh * seqlen_pad + rows_of_delta, delta)
    tl.store(lse_padded_ptr + bh * seqlen_pad + rows_of_delta, tl.where(is_empty, float("inf"), lse))


@triton.jit
def in_log2(softmax_scale):
    """softmax_scale_log2, rounded to fp32 alike in every kernel."""
    return tl.cast(softmax_scale, tl.float32) * LOG2_E


@triton.jit
def probabilities(s, lse, softmax_scale, kIsFp32: tl.constexpr):
    """P = exp(softmax_scale · S - lse), with lse of _preprocess, which broadcasts to the shape of S: natural in fp32,
    in powers of two in 16 bits, which spares a multiplication an element.

    At large scores the exponent is a small difference of large numbers, so the FMA here adds no rounding to that of
    lse. Only rounding can make the exponent positive. Its sign is then flipped: P is at most 1, the error keeps its
    size, and unlike a minimum this takes no instruction and keeps a NaN.
    """
    if kIsFp32:
        p = tl.exp2(tl.abs(s * softmax_scale - lse) * -LOG2_E)
    else:
        p = tl.exp2(tl.abs(s * in_log2(softmax_scale) - lse) * -1.0)  # a sign, where Triton's minus is 0 - x
    return p


@triton.jit
def first_padded_row(seq):
    """The first row of a Sequence of a packed batch in delta and lse_padded."""
    return (seq.q_begin // PAD + seq.b) * PAD


@triton.jit
def load_per_row(x, bh, row0, seqlen_pad, kBlockM: tl.constexpr, kTma: tl.constexpr):
    """[kBlockM] of delta or lse_padded. By TMA they come once; by pointers each thread copies all that it needs."""
    if kTma:
        values = x.load([bh, row0]).reshape(kBlockM)
    else:
        values = tl.load(x + bh.to(tl.int64) * seqlen_pad + row0 + tl.arange(0, kBlockM))
    return values


@triton.jit
def _splits_of(rows, max_splits):
    """How many programs share a block of keys that `rows` query rows of all heads read. A split has at least 1024 of
    them, to be worth its sums in memory. The kernel and the host call this."""
    return max(1, min(max_splits, rows // 1024))


@triton.jit(do_not_specialize=["batch_size", *WINDOW])
def _flash_bwd_kv(q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, lengths, dropout, softmax_scale,
                  score_options, strides, score_strides, batch_size, nheads, nheads_k, seqlen_q, seqlen_k, seqlen_pad,
                  head_dim, head_dim_v, max_splits, split_stride, window_left, window_right, kIsCausal: tl.constexpr,
                  kIsLocal: tl.constexpr, kChunk: tl.constexpr, kEmptyRows: tl.constexpr, kClearDelta: tl.constexpr,
                  kRaggedRows: tl.constexpr, kTile: tl.constexpr, kScoreMod: tl.constexpr):
    """dK and dV of kBlockN keys of one key/value head, summed over the query heads that read it, or over those of a
    split. strides: of q, k, v, dout, dk and dv. kEmptyRows: the cut blocks may have rows without a key, or the next
    sample's. kClearDelta: and delta may be NaN there."""
    kIsPacked: tl.constexpr = lengths.cu_seqlens_k is not None
    kBlockM: tl.constexpr = kTile.kBlockM
    kBlockN: tl.constexpr = kTile.kBlockN
    kBlockD: tl.constexpr = kTile.kBlockD
    kBlockDv: tl.constexpr = kTile.kBlockDv
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides = strides
    n_blocks = num_slots(lengths.cu_seqlens_k, batch_size, seqlen_k, kBlockN)
    split_idx, tile = tl.program_id(0) % max_splits, tl.program_id(0) // max_splits
    n_block, bh_k = tile % n_blocks, tile // n_blocks  # the keys that most rows see under a causal mask go first
    b, h_k = bh_k // nheads_k, bh_k % nheads_k
    sample = b
    if kIsPacked:
        sample, n_block = block_of_slot(lengths.cu_seqlens_k, n_block, batch_size, seqlen_k, kBlockN)
    col0 = n_block * kBlockN
    cols = col0 + tl.arange(0, kBlockN)
    seq = sequence(lengths, sample, batch_size, seqlen_q, seqlen_k)
    if kIsPacked and col0 >= seq.padded_k:
        return
    pad_begin = first_padded_row(seq) if kIsPacked else 0
    mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal, kChunk)
    seeing, blocks = rows_of(mask, cols), row_blocks(mask, col0, kBlockM, kBlockN)

    # Keys beyond the sample's end are 0 here, or the next sample's. Those that a window hides from all rows may be NaN.
    # Their rows of Pᵀ and dSᵀ reach no other key's gradient, and 0 is stored for them.
    k = matrix_of(k_ptr, k_strides, b, h_k, seq.k_begin, seq.seqlen_k, head_dim, kTile.kTma)
    v = matrix_of(v_ptr, v_strides, b, h_k, seq.k_begin, seq.seqlen_k, head_dim_v, kTile.kTma)
    k = load_tile(k, col0, True, kTile.kMaskCols, kBlockN, kBlockD, kTile.kTma)
    v = load_tile(v, col0, True, kTile.kMaskCols, kBlockN, kBlockDv, kTile.kTma)
    dk = tl.zeros([kBlockN, kBlockD], tl.float32)
    dv = tl.zeros([kBlockN, kBlockDv], tl.float32)
    group = nheads // nheads_k
    num_splits = tl.cast(_splits_of(group * tl.cast(seq.seqlen_q, tl.int64), max_splits), tl.int32)
    begin = tl.minimum(group, (group * split_idx + num_splits - 1) // num_splits)
    end = tl.minimum(group, (group * (split_idx + 1) + num_splits - 1) // num_splits)
    for i in range(begin, end):  # none in a split that a short sample does without
        h = h_k * group + i
        q = matrix_of(q_ptr, q_strides, b, h, seq.q_begin, seq.seqlen_q, head_dim, kTile.kTma)
        dout = matrix_of(dout_ptr, dout_strides, b, h, seq.q_begin, seq.seqlen_q, head_dim_v, kTile.kTma)
        scores = Scores(score_numbers(softmax_scale, score_options, score_strides, seq, h), score_options,
                        score_strides)
        tiles = tiles_of(scores, n_block, tl.cdiv(seqlen_k, kBlockN), tl.cdiv(seqlen_q, kBlockM))
        places = places_of(scores, tiles, blocks)
        # First the blocks of rows that a mask or an end cuts, if there may be any.
        for kMasked in tl.static_range(1 if kIsCausal or kIsLocal or kRaggedRows else 0, -1, -1):
            loop = steps(places, kMasked)
            for step in range(loop.begin, loop.end):
                row0, is_partial = tile_at(scores, tiles, block_of(places, step, kMasked), kBlockM)
                rows = row0 + tl.arange(0, kBlockM)
                q_tile = load_tile(q, row0, True, kTile.kMaskCols, kBlockM, kBlockD, kTile.kTma)
                if kMasked and kEmptyRows:  # Q and dO may be NaN there, and 0 · NaN would reach dK and dV
                    is_used = has_keys(mask, rows)
                    if kRaggedRows:
                        is_used &= rows < mask.seqlen_q
                    q_tile = tl.where(is_used[:, None], q_tile, tl.zeros_like(q_tile))
                s = capped(scores, tl.dot(k, q_tile.T, input_precision="ieee"))  # Sᵀ
                lse = load_per_row(lse_ptr, b * nheads + h, pad_begin + row0, seqlen_pad, kBlockM, kTile.kTma)
                changed = shifted(scores, s, rows[None, :], cols[:, None], kScoreMod=kScoreMod)
                shown = hidden(scores, changed, row0, col0, is_partial, True)
                p = probabilities(shown, lse[None, :], scores.numbers.unit, k.dtype == tl.float32)
                if kMasked:  # rows beyond the end as well: Q is 0 there, and the score NaN where a key is infinite
                    p = tl.where(seen_by(mask, seeing, rows, kRaggedRows), p, 0.0)
                p_dropped = p
                if dropout.seed is not None:
                    keep = keep_tile(dropout, seq.b, h, row0, col0, kBlockM, kBlockN).T
                    p_dropped = tl.where(keep, p, 0.0)
                dout_tile = load_tile(dout, row0, True, kTile.kMaskCols, kBlockM, kBlockDv, kTile.kTma)
                if kMasked and kEmptyRows:
                    dout_tile = tl.where(is_used[:, None], dout_tile, tl.zeros_like(dout_tile))
                dv = add_product(dv, p_dropped.to(k.dtype), dout_tile)
                dp = tl.dot(v, dout_tile.T, input_precision="ieee")  # dPᵀ, beside the product before it
                if dropout.seed is not None:
                    dp = tl.where(keep, dp * dropout.keep_scale, 0.0)
                delta = load_per_row(delta_ptr, b * nheads + h, pad_begin + row0, seqlen_pad, kBlockM, kTile.kTma)
                if kMasked and kClearDelta:
                    delta = tl.where(is_used, delta, 0.0)
                ds = p * (dp - delta[None, :])  # dSᵀ
                ds = through_cap(scores, ds, s, rows[None, :], cols[:, None], kScoreMod)
                dk = add_product(dk, ds.to(k.dtype), q_tile)

    is_used = cols[:, None] < seq.seqlen_k
    if kIsLocal:
        is_used &= cols[:, None] >= keys_of(mask, 0).begin
    dk = tl.where(is_used, dk * softmax_scale, 0.0)
    dv = tl.where(is_used, dv * dropout.keep_scale, 0.0)
    dk_ptr += split_idx.to(tl.int64) * split_stride
    dv_ptr += split_idx.to(tl.int64) * split_stride
    store_tile(dk_ptr, dk_strides, b, h_k, seq.k_begin, cols, seq.padded_k, head_dim, dk, kTile.kMaskCols)
    store_tile(dv_ptr, dv_strides, b, h_k, seq.k_begin, cols, seq.padded_k, head_dim_v, dv, kTile.kMaskCols)


@triton.jit
def score_gradients(q, k, v, dout, lse, delta, h, row0, col0, is_partial, seq, mask, visible, scores, dropout,
                    kMasked: tl.constexpr, kScoreMod: tl.constexpr = None):
    """(the result of capped, P, dS) of a tile of rows and one of keys: [kBlockM, kBlockN]. dS is the derivative by the
    result of shifted. P and dS are 0 with kMasked where a row does not see a key."""
    rows, cols = row0 + tl.arange(0, q.shape[0]), col0 + tl.arange(0, k.shape[0])
    s = capped(scores, tl.dot(q, k.T, input_precision="ieee"))
    changed = shifted(scores, s, rows[:, None], cols[None, :], kScoreMod=kScoreMod)
    shown = hidden(scores, changed, row0, col0, is_partial)
    p = probabilities(shown, lse[:, None], scores.numbers.unit, q.dtype == tl.float32)
    if kMasked:
        p = tl.where(sees(mask, visible, cols), p, 0.0)
    dp = tl.dot(dout, v.T, input_precision="ieee")
    if dropout.seed is not None:
        kept = keep_tile(dropout, seq.b, h, row0, col0, q.shape[0], k.shape[0])
        dp = tl.where(kept, dp * dropout.keep_scale, 0.0)
    return s, p, p * (dp - delta[:, None])


@triton.jit(do_not_specialize=["batch_size", *WINDOW])
def _flash_bwd_q(q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, lse_ptr, delta_ptr, lengths, dropout, softmax_scale,
                 score_options, strides, score_strides, batch_size, nheads, nheads_k, seqlen_q, seqlen_k, seqlen_pad,
                 head_dim, head_dim_v, window_left, window_right, kIsCausal: tl.constexpr, kIsLocal: tl.constexpr,
                 kChunk: tl.constexpr, kEmptyRows: tl.constexpr, kTile: tl.constexpr, kScoreMod: tl.constexpr):
    """dQ of kBlockM rows of one head. strides: of q, k, v, dout and dq."""
    kIsPacked: tl.constexpr = lengths.cu_seqlens_q is not None
    kBlockM: tl.constexpr = kTile.kBlockM
    kBlockN: tl.constexpr = kTile.kBlockN
    kBlockD: tl.constexpr = kTile.kBlockD
    kBlockDv: tl.constexpr = kTile.kBlockDv
    q_strides, k_strides, v_strides, dout_strides, dq_strides = strides
    b, h, bh, sample, row0 = block_of_rows(lengths.cu_seqlens_q, batch_size, nheads, seqlen_q, kBlockM)
    h_k = h // (nheads // nheads_k)
    rows = row0 + tl.arange(0, kBlockM)
    seq = sequence(lengths, sample, batch_size, seqlen_q, seqlen_k)
    if kIsPacked and row0 >= seq.padded_q:
        return
    pad_begin = first_padded_row(seq) if kIsPacked else 0
    mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal, kChunk)
    visible, blocks = keys_of(mask, rows), key_blocks(mask, row0, kBlockM, kBlockN)
    first_key = keys_of(mask, row0).begin if kIsLocal else None  # the rows see no key before it

    q = matrix_of(q_ptr, q_strides, b, h, seq.q_begin, seq.seqlen_q, head_dim, kTile.kTma)
    k = matrix_of(k_ptr, k_strides, b, h_k, seq.k_begin, seq.seqlen_k, head_dim, kTile.kTma)
    v = matrix_of(v_ptr, v_strides, b, h_k, seq.k_begin, seq.seqlen_k, head_dim_v, kTile.kTma)
    dout = matrix_of(dout_ptr, dout_strides, b, h, seq.q_begin, seq.seqlen_q, head_dim_v, kTile.kTma)
    q = load_tile(q, row0, True, kTile.kMaskCols, kBlockM, kBlockD, kTile.kTma)
    dout = load_tile(dout, row0, True, kTile.kMaskCols, kBlockM, kBlockDv, kTile.kTma)
    lse = load_per_row(lse_ptr, bh, pad_begin + row0, seqlen_pad, kBlockM, kTile.kTma)
    delta = load_per_row(delta_ptr, bh, pad_begin + row0, seqlen_pad, kBlockM, kTile.kTma)
    if kEmptyRows:  # a row without a key has an lse if there are sinks
        lse = tl.where(visible.begin >= visible.end, float("inf"), lse)
        dout = tl.where((lse == float("inf"))[:, None], tl.zeros_like(dout), dout)
    scores = Scores(score_numbers(softmax_scale, score_options, score_strides, seq, h), score_options, score_strides)
    tiles = tiles_of(scores, row0 // kBlockM, tl.cdiv(seqlen_q, kBlockM), tl.cdiv(seqlen_k, kBlockN))
    places = places_of(scores, tiles, blocks)
    dq = tl.zeros([kBlockM, kBlockD], tl.float32)
    for kMasked in tl.static_range(2):
        loop = steps(places, kMasked)
        for step in range(loop.begin, loop.end):
            col0, is_partial = tile_at(scores, tiles, block_of(places, step, kMasked), kBlockN)
            k_tile = load_tile(k, col0, kMasked, kTile.kMaskCols, kBlockN, kBlockD, kTile.kTma, 0, first_key)
            v_tile = load_tile(v, col0, kMasked, kTile.kMaskCols, kBlockN, kBlockDv, kTile.kTma, 0, first_key)
            cols = col0 + tl.arange(0, kBlockN)
            if kMasked and kTile.kTma:
                k_tile = clear_keys(k_tile, cols, first_key, seq.seqlen_k, kIsPacked)
                v_tile = clear_keys(v_tile, cols, first_key, seq.seqlen_k, kIsPacked)
            s, _, ds = score_gradients(q, k_tile, v_tile, dout, lse, delta, h, row0, col0, is_partial, seq, mask,
                                       visible, scores, dropout, kMasked, kScoreMod)
            add_to_captured(scores, ds, s, rows[:, None], cols[None, :], kScoreMod)
            ds = through_cap(scores, ds, s, rows[:, None], cols[None, :], kScoreMod)
            dq = add_product(dq, ds.to(q.dtype), k_tile)
    dq = tl.where((lse == float("inf"))[:, None], 0.0, dq)  # without a key 0, where a sum of 0 · NaN is not
    store_tile(dq_ptr, dq_strides, b, h, seq.q_begin, rows, seq.padded_q, head_dim, dq * softmax_scale)


@triton.jit
def _owned(idx, size, kIsShared: tl.constexpr):
    """[begin, end) of what a program owns of a dimension, all if it is shared, and the rest of idx for the others."""
    begin, end, rest = idx % size, idx % size + 1, idx // size
    if kIsShared:
        begin, end, rest = 0, size, idx
    return begin, end, rest


@triton.jit(do_not_specialize=WINDOW)
def _flash_bwd_bias(q_ptr, k_ptr, v_ptr, dout_ptr, dbias_ptr, lse_ptr, delta_ptr, lengths, dropout, softmax_scale,
                    score_options, strides, score_strides, batch_size, nheads, nheads_k, seqlen_q, seqlen_k, seqlen_pad,
                    head_dim, head_dim_v, window_left, window_right, kIsCausal: tl.constexpr, kIsLocal: tl.constexpr,
                    kChunk: tl.constexpr, kSharesBatch: tl.constexpr, kSharesHeads: tl.constexpr,
                    kSharesRows: tl.constexpr, kSharesKeys: tl.constexpr, kTile: tl.constexpr):
    """dbias = Σ dS over the samples, heads, rows and keys that share an element of it. A program owns kBlockM rows and
    kBlockN keys of one head of dbias and walks along the scores that share them. strides: of q, k, v, dout and dbias,
    whose keys lie in a row."""
    kBlockM: tl.constexpr = kTile.kBlockM
    kBlockN: tl.constexpr = kTile.kBlockN
    kBlockD: tl.constexpr = kTile.kBlockD
    kBlockDv: tl.constexpr = kTile.kBlockDv
    q_strides, k_strides, v_strides, dout_strides, dbias_strides = strides
    n_begin, n_end, idx = _owned(tl.program_id(0), tl.cdiv(seqlen_k, kBlockN), kSharesKeys)
    m_begin, m_end, idx = _owned(idx, tl.cdiv(seqlen_q, kBlockM), kSharesRows)
    h_begin, h_end, idx = _owned(idx, nheads, kSharesHeads)
    b_begin, b_end, idx = _owned(idx, batch_size, kSharesBatch)
    dbias = tl.zeros([kBlockM, kBlockN], tl.float32)
    for b in range(b_begin, b_end):
        seq = sequence(lengths, b, batch_size, seqlen_q, seqlen_k)
        mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal, kChunk)
        for h in range(h_begin, h_end):
            h_k, bh = h // (nheads // nheads_k), b * nheads + h
            scores = Scores(score_numbers(softmax_scale, score_options, score_strides, seq, h), score_options,
                            score_strides)
            q = matrix_of(q_ptr, q_strides, b, h, 0, seq.seqlen_q, head_dim)
            k = matrix_of(k_ptr, k_strides, b, h_k, 0, seq.seqlen_k, head_dim)
            v = matrix_of(v_ptr, v_strides, b, h_k, 0, seq.seqlen_k, head_dim_v)
            dout = matrix_of(dout_ptr, dout_strides, b, h, 0, seq.seqlen_q, head_dim_v)
            for m in range(m_begin, m_end):
                row0 = m * kBlockM
                visible = keys_of(mask, row0 + tl.arange(0, kBlockM))
                blocks = key_blocks(mask, row0, kBlockM, kBlockN)
                tiles = tiles_of(scores, m, tl.cdiv(seqlen_q, kBlockM), tl.cdiv(seqlen_k, kBlockN))
                for place in range(place_of(scores, tiles, tl.maximum(n_begin, blocks.begin)),
                                   place_of(scores, tiles, tl.minimum(n_end, blocks.end))):
                    col0, is_partial = tile_at(scores, tiles, place, kBlockN)
                    lse = load_per_row(lse_ptr, bh, row0, seqlen_pad, kBlockM, False)
                    delta = load_per_row(delta_ptr, bh, row0, seqlen_pad, kBlockM, False)
                    q_tile = load_tile(q, row0, True, True, kBlockM, kBlockD)
                    k_tile = load_tile(k, col0, True, True, kBlockN, kBlockD)
                    v_tile = load_tile(v, col0, True, True, kBlockN, kBlockDv)
                    dout_tile = load_tile(dout, row0, True, True, kBlockM, kBlockDv)
                    _, p, ds = score_gradients(q_tile, k_tile, v_tile, dout_tile, lse, delta, h, row0, col0, is_partial,
                                               seq, mask, visible, scores, dropout, True)
                    # Without a key, or with keys of -inf alone, a row's dO may be NaN.
                    dbias += tl.where(p != 0, ds, 0.0)

    rows = m_begin * kBlockM + tl.arange(0, kBlockM)[:, None]
    cols = n_begin * kBlockN + tl.arange(0, kBlockN)[None, :]
    if kSharesKeys:
        dbias, cols = tl.sum(dbias, 1, keep_dims=True), tl.zeros([1, 1], tl.int32)
    if kSharesRows:
        dbias, rows = tl.sum(dbias, 0, keep_dims=True), tl.zeros([1, 1], tl.int32)
    to = head_of(dbias_ptr, dbias_strides, b_begin, h_begin, 0) + rows.to(tl.int64) * dbias_strides.row + cols
    tl.store(to, dbias, mask=(rows < seqlen_q) & (cols < seqlen_k))
