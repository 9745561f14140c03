"""The gradient of a bias in Triton: dbias = Σ dS over the samples, heads, rows and keys that share an element of it.

A program owns kBlockM rows and kBlockN keys of one head of dbias and walks along the scores that share them: of all
samples, of all heads, of all blocks of rows or keys, whichever the bias has once. It forms S and dP once more for each.
So dbias is summed in registers, without atomics, and every run gives the same bits.

The twin of ../csrc/simt/flash_bwd_bias.cu. Read next: preprocess.py, delta.
"""

import math

import triton
import triton.language as tl

from .attention import _load, block_d
from .dropout import keep_tile
from .launching import WINDOW, Launch, mask_of
from .mask import key_blocks, keys_of, make_mask, sees
from .preprocess import load_per_row, probabilities
from .scores import Scores, capped, score_constants, score_numbers, shifted
from .sequence import head_of, sequence


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
def _ds(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, q_batch_stride, q_head_stride, q_row_stride, k_batch_stride,
        k_head_stride, k_row_stride, v_batch_stride, v_head_stride, v_row_stride, dout_batch_stride, dout_head_stride,
        dout_row_stride, b, h, h_k, bh, row0, col0, seq, mask, scores, seqlen_pad, head_dim, head_dim_v, seed_ptr,
        keep_count, keep_scale, kBlockM: tl.constexpr, kBlockN: tl.constexpr, kBlockD: tl.constexpr,
        kBlockDv: tl.constexpr):
    """dS [kBlockM, kBlockN] of one head of a sample, 0 where a row does not see a key."""
    rows, cols = row0 + tl.arange(0, kBlockM), col0 + tl.arange(0, kBlockN)
    q = _load(head_of(q_ptr, b, h, 0, q_batch_stride, q_head_stride, q_row_stride), b, h, row0, 0, q_row_stride,
              seq.seqlen_q, head_dim, True, True, kBlockM, kBlockD, False)
    k = _load(head_of(k_ptr, b, h_k, 0, k_batch_stride, k_head_stride, k_row_stride), b, h_k, col0, 0, k_row_stride,
              seq.seqlen_k, head_dim, True, True, kBlockN, kBlockD, False)
    s = shifted(scores, capped(scores, tl.dot(q, k.T, input_precision="ieee")), rows[:, None], cols[None, :])
    lse = load_per_row(lse_ptr, bh, row0, seqlen_pad, kBlockM, False)
    p = probabilities(s, lse[:, None], scores.numbers.unit, q.dtype == tl.float32)
    dout = _load(head_of(dout_ptr, b, h, 0, dout_batch_stride, dout_head_stride, dout_row_stride), b, h, row0, 0,
                 dout_row_stride, seq.seqlen_q, head_dim_v, True, True, kBlockM, kBlockDv, False)
    v = _load(head_of(v_ptr, b, h_k, 0, v_batch_stride, v_head_stride, v_row_stride), b, h_k, col0, 0, v_row_stride,
              seq.seqlen_k, head_dim_v, True, True, kBlockN, kBlockDv, False)
    dp = tl.dot(dout, v.T, input_precision="ieee")
    if seed_ptr is not None:
        keep = keep_tile(seed_ptr, keep_count, b, h, row0, col0, kBlockM, kBlockN)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    delta = load_per_row(delta_ptr, bh, row0, seqlen_pad, kBlockM, False)
    # Without a key, or with keys of -inf alone, a row's dO may be NaN.
    is_seen = sees(keys_of(mask, rows), cols, True) & (p != 0)
    return tl.where(is_seen, p * (dp - delta[:, None]), 0.0)


@triton.jit(do_not_specialize=["keep_count", *WINDOW])
def _flash_bwd_bias(q_ptr, k_ptr, v_ptr, dout_ptr, dbias_ptr, lse_ptr, delta_ptr, seqused_q_ptr, seqused_k_ptr,
                    alibi_ptr, bias_ptr, seed_ptr, keep_count, keep_scale, softmax_scale, softcap, alibi_batch_stride,
                    bias_batch_stride, bias_head_stride, bias_row_stride, bias_key_stride, kFastTanh: tl.constexpr,
                    q_batch_stride, q_head_stride, q_row_stride, k_batch_stride, k_head_stride, k_row_stride,
                    v_batch_stride, v_head_stride, v_row_stride, dout_batch_stride, dout_head_stride, dout_row_stride,
                    dbias_batch_stride, dbias_head_stride, dbias_row_stride,  # 0 where it is shared; keys lie in a row
                    batch_size, nheads, nheads_k, seqlen_q, seqlen_k, seqlen_pad, head_dim, head_dim_v, window_left,
                    window_right, kIsCausal: tl.constexpr, kIsLocal: tl.constexpr, kSharesBatch: tl.constexpr,
                    kSharesHeads: tl.constexpr, kSharesRows: tl.constexpr, kSharesKeys: tl.constexpr,
                    kBlockM: tl.constexpr, kBlockN: tl.constexpr, kBlockD: tl.constexpr, kBlockDv: tl.constexpr):
    n_begin, n_end, idx = _owned(tl.program_id(0), tl.cdiv(seqlen_k, kBlockN), kSharesKeys)
    m_begin, m_end, idx = _owned(idx, tl.cdiv(seqlen_q, kBlockM), kSharesRows)
    h_begin, h_end, idx = _owned(idx, nheads, kSharesHeads)
    b_begin, b_end, idx = _owned(idx, batch_size, kSharesBatch)
    dbias = tl.zeros([kBlockM, kBlockN], tl.float32)
    for b in range(b_begin, b_end):
        seq = sequence(None, None, seqused_q_ptr, seqused_k_ptr, b, batch_size, seqlen_q, seqlen_k)
        mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal)
        for h in range(h_begin, h_end):
            numbers = score_numbers(softmax_scale, softcap, alibi_ptr, bias_ptr, alibi_batch_stride,
                                    bias_batch_stride, bias_head_stride, seq, h)
            scores = Scores(numbers, softcap, alibi_ptr, bias_ptr, bias_row_stride, bias_key_stride, kFastTanh)
            for m in range(m_begin, m_end):
                blocks = key_blocks(mask, m * kBlockM, kBlockM, kBlockN)
                for n in range(tl.maximum(n_begin, blocks.begin), tl.minimum(n_end, blocks.end)):
                    dbias += _ds(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, q_batch_stride, q_head_stride,
                                 q_row_stride, k_batch_stride, k_head_stride, k_row_stride, v_batch_stride,
                                 v_head_stride, v_row_stride, dout_batch_stride, dout_head_stride, dout_row_stride, b,
                                 h, h // (nheads // nheads_k), b * nheads + h, m * kBlockM, n * kBlockN, seq, mask,
                                 scores, seqlen_pad, head_dim, head_dim_v, seed_ptr, keep_count, keep_scale,
                                 kBlockM, kBlockN, kBlockD, kBlockDv)

    to = head_of(dbias_ptr, b_begin, h_begin, 0, dbias_batch_stride, dbias_head_stride, dbias_row_stride)
    rows, cols = m_begin * kBlockM + tl.arange(0, kBlockM), n_begin * kBlockN + tl.arange(0, kBlockN)
    to_rows = to + rows.to(tl.int64) * dbias_row_stride
    if kSharesRows and kSharesKeys:
        tl.store(to, tl.sum(tl.sum(dbias, 1), 0))
    elif kSharesRows:
        tl.store(to + cols, tl.sum(dbias, 0), mask=cols < seqlen_k)
    elif kSharesKeys:
        tl.store(to_rows, tl.sum(dbias, 1), mask=rows < seqlen_q)
    else:
        is_there = (rows[:, None] < seqlen_q) & (cols[None, :] < seqlen_k)
        tl.store(to_rows[:, None] + cols[None, :], dbias, mask=is_there)


def launch_bias(tensors, softcap, window):
    """A Launch for dbias, to be called with (*tensors, keep_count, keep_scale, softmax_scale, softcap). tensors: q, k,
    v, dout, dbias, lse_padded, delta, seqused_q, seqused_k, alibi_slopes, bias, seed. dbias is fp32 and contiguous."""
    q, k, v, dout, dbias, _, delta, _, _, alibi_slopes, bias, _ = tensors
    (batch_size, nheads, seqlen_q, head_dim), (nheads_k, seqlen_k), head_dim_v = q.shape, k.shape[1:3], v.shape[-1]
    kBlockD, kBlockDv = block_d(q.dtype, head_dim), block_d(q.dtype, head_dim_v)
    # Both operands of both products are in shared memory, in fp32 in registers.
    block = (32 if q.itemsize == 4 else 64) // (2 if max(kBlockD, kBlockDv) > 128 else 1)
    shares = [n == 1 for n in dbias.shape]
    sizes = batch_size, nheads, triton.cdiv(seqlen_q, block), triton.cdiv(seqlen_k, block)
    programs = math.prod(1 if is_shared else size for size, is_shared in zip(sizes, shares))
    strides = (stride for x in (q, k, v, dout) for stride in x.stride()[:3])
    of_dbias = (0 if is_shared else stride for is_shared, stride in zip(shares[:3], dbias.stride()))
    constants = (*score_constants(q, alibi_slopes, bias, softcap), *strides, *of_dbias, batch_size, nheads, nheads_k,
                 seqlen_q, seqlen_k, delta.shape[1], head_dim, head_dim_v, *mask_of(window), *shares, block, block,
                 kBlockD, kBlockDv)
    return Launch(_flash_bwd_bias, programs, constants, num_warps=4, num_stages=1)
