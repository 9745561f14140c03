"""FlashAttention forward in Triton, the twin of csrc/flash.cu: the same function of the same arguments.

One program owns kBlockM query rows of one head and walks along the keys with the online softmax. Blocks that every row
sees whole go first, without a mask; only the blocks at the causal diagonal and at the end take the masked path. Nothing
here belongs to one vendor, so other Triton backends and Triton's interpreter (TRITON_INTERPRET=1) run it too.

Tri Dao, FlashAttention-2, 2023, Algorithm 1. Read next: ../csrc/flash.cu, the same in CUDA C++.
"""

from contextlib import nullcontext
from typing import Optional, Tuple

import torch
import triton
import triton.language as tl

# With TRITON_INTERPRET=1 at import the kernels run on the CPU, in numpy.
INTERPRETING = triton.knobs.runtime.interpret


@triton.jit
def _load(base, rows, row_stride, row_end, head_dim, kMaskRows: tl.constexpr, kMaskCols: tl.constexpr,
          kBlockD: tl.constexpr):
    """[len(rows), kBlockD] of a matrix; rows from row_end on and columns from head_dim on are not read and become 0.
    Without their mask, rows or columns must all be there."""
    cols = tl.arange(0, kBlockD)
    pointers = base + rows.to(tl.int64)[:, None] * row_stride + cols[None, :]
    if kMaskRows and kMaskCols:
        return tl.load(pointers, mask=(rows[:, None] < row_end) & (cols[None, :] < head_dim), other=0.0)
    elif kMaskRows:
        return tl.load(pointers, mask=rows[:, None] < row_end, other=0.0)
    elif kMaskCols:
        return tl.load(pointers, mask=cols[None, :] < head_dim, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _attend(acc_o, row_max, row_sum, q, k_base, v_base, k_row_stride, v_row_stride, n_block_min, n_block_max, visible,
            seq_len, head_dim, scale_log2, kMasked: tl.constexpr, kMaskCols: tl.constexpr, kBlockN: tl.constexpr,
            kBlockD: tl.constexpr):
    """Online softmax over the key blocks [n_block_min, n_block_max): the new acc_o, row_max, row_sum."""
    for n_block in range(n_block_min, n_block_max):
        cols = n_block * kBlockN + tl.arange(0, kBlockN)
        k = _load(k_base, cols, k_row_stride, seq_len, head_dim, kMasked, kMaskCols, kBlockD)
        acc_s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if kMasked:
            acc_s = tl.where(cols[None, :] < visible[:, None], acc_s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(acc_s, 1))
        # A row that has seen no key yet: exp2(-inf) is 0, not NaN.
        max_sub = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2((acc_s - max_sub[:, None]) * scale_log2)
        rescale = tl.exp2((row_max - max_sub) * scale_log2)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        v = _load(v_base, cols, v_row_stride, seq_len, head_dim, kMasked, kMaskCols, kBlockD)
        if v.dtype == tl.float32:
            # Summed apart from acc_o: short sums round less. A plain addition would be folded back into the dot.
            acc_o = tl.fma(acc_o, tl.broadcast_to(rescale[:, None], acc_o.shape), tl.dot(p, v, input_precision="ieee"))
        else:
            acc_o = tl.dot(p.to(v.dtype), v, acc_o * rescale[:, None])
        row_max = new_max
    return acc_o, row_max, row_sum


@triton.jit
def _flash_fwd(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, seq_lens_ptr,  # shapes and strides as AttnParams in csrc/flash.h
               q_batch_stride, q_head_stride, q_row_stride, k_batch_stride, k_head_stride, k_row_stride,
               v_batch_stride, v_head_stride, v_row_stride, o_batch_stride, o_head_stride, o_row_stride,
               nheads, nheads_k, seqlen_q, seqlen_k, head_dim, softmax_scale, kIsCausal: tl.constexpr,
               kMaskCols: tl.constexpr, kBlockM: tl.constexpr, kBlockN: tl.constexpr, kBlockD: tl.constexpr):
    # Blocks of one head are neighbours, to share its K and V in L2; the rows that see most under a causal mask go
    # first.
    m_blocks = tl.cdiv(seqlen_q, kBlockM)
    m_block = m_blocks - 1 - tl.program_id(0) % m_blocks
    bh = (tl.program_id(0) // m_blocks).to(tl.int64)
    b, h = bh // nheads, bh % nheads
    h_k = h // (nheads // nheads_k)
    rows = m_block * kBlockM + tl.arange(0, kBlockM)

    # The whole mask is one number a row: it sees the keys [0, visible).
    seq_len, row_end = seqlen_k, seqlen_q
    if seq_lens_ptr is not None:
        seq_len = tl.maximum(0, tl.minimum(tl.load(seq_lens_ptr + b), seqlen_k))
        row_end = seq_len
    last_row = tl.minimum((m_block + 1) * kBlockM, row_end) - 1
    visible = tl.full([kBlockM], 0, tl.int32) + seq_len
    first_visible, last_visible = seq_len, seq_len
    if kIsCausal:
        shift = 1 + seqlen_k - seqlen_q
        visible = tl.minimum(visible, rows + shift)
        first_visible = tl.minimum(seq_len, m_block * kBlockM + shift)
        last_visible = tl.minimum(seq_len, last_row + shift)
    visible = tl.where(rows < row_end, visible, 0)
    n_block_max = tl.where(m_block * kBlockM < row_end, tl.cdiv(tl.maximum(last_visible, 0), kBlockN), 0)
    n_block_full = tl.minimum(tl.maximum(first_visible, 0) // kBlockN, n_block_max)

    q_base = q_ptr + b * q_batch_stride + h * q_head_stride
    k_base = k_ptr + b * k_batch_stride + h_k * k_head_stride
    v_base = v_ptr + b * v_batch_stride + h_k * v_head_stride
    q = _load(q_base, rows, q_row_stride, row_end, head_dim, True, kMaskCols, kBlockD)
    # exp(scale · (s - max)) = exp2(scale_log2 · (s - max)) needs scale_log2 > 0 to hide a masked score of -inf: the
    # sign of the scale goes to q, and a scale of 0 makes every score 0.
    q = tl.where(softmax_scale < 0, -q, tl.where(softmax_scale == 0, q * 0.0, q))
    scale_log2 = tl.where(softmax_scale == 0, 1.0, tl.abs(softmax_scale) * 1.4426950408889634)
    acc_o = tl.zeros([kBlockM, kBlockD], tl.float32)
    row_max = tl.full([kBlockM], float("-inf"), tl.float32)
    row_sum = tl.zeros([kBlockM], tl.float32)
    # First the blocks that every row sees whole, then those that a mask cuts.
    acc_o, row_max, row_sum = _attend(acc_o, row_max, row_sum, q, k_base, v_base, k_row_stride, v_row_stride, 0,
                                      n_block_full, visible, seq_len, head_dim, scale_log2, False, kMaskCols, kBlockN,
                                      kBlockD)
    acc_o, row_max, row_sum = _attend(acc_o, row_max, row_sum, q, k_base, v_base, k_row_stride, v_row_stride,
                                      n_block_full, n_block_max, visible, seq_len, head_dim, scale_log2, True,
                                      kMaskCols, kBlockN, kBlockD)

    empty = (visible <= 0) | (row_sum == 0.0)
    lse = tl.where(empty, float("-inf"), row_max * tl.abs(softmax_scale) + tl.log(tl.where(empty, 1.0, row_sum)))
    scale_o = tl.where(empty, 0.0, tl.div_rn(1.0, tl.where(empty, 1.0, row_sum)))  # "/" would round to two ulps
    tl.store(lse_ptr + bh * seqlen_q + rows, lse, mask=rows < seqlen_q)
    cols_d = tl.arange(0, kBlockD)
    o_pointers = o_ptr + b * o_batch_stride + h * o_head_stride + rows.to(tl.int64)[:, None] * o_row_stride
    out = tl.where(empty[:, None], 0.0, acc_o * scale_o[:, None])  # 0 even where V, times probabilities of 0, gave NaN
    tl.store(o_pointers + cols_d[None, :], out.to(o_ptr.dtype.element_ty),
             mask=(rows[:, None] < seqlen_q) & (cols_d[None, :] < head_dim))


def tile_config(dtype, head_dim):
    """Launch options by dtype and head_dim alone, so that a sample's result does not depend on its batch.

    fp32 products run on the plain FMA units and keep both operands in registers, so their tiles are small; the 16-bit
    ones fit the 99 KB of shared memory of sm_86, sm_89 and sm_120.
    """
    kBlockD = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        kBlockM, kBlockN, num_warps, num_stages = (64, 32, 4, 2) if kBlockD <= 64 else (32, 32, 4, 1)
    elif kBlockD <= 128:
        kBlockM, kBlockN, num_warps, num_stages = (128, 64, 4, 3) if kBlockD <= 64 else (128, 64, 8, 2)
    else:
        kBlockM, kBlockN, num_warps, num_stages = 64, 32, 4, 2
    return dict(kBlockM=kBlockM, kBlockN=kBlockN, kBlockD=kBlockD, num_warps=num_warps, num_stages=num_stages)


def empty_outputs(q):
    """out like q, and lse, to be written."""
    out = torch.empty_like(q)
    if out.stride(-1) != 1:  # q overlaps itself, as sliding windows do
        out = q.new_empty(q.shape)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("minimal_attn::triton_forward", mutates_args=())
def triton_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: Optional[torch.Tensor],
                   softmax_scale: float, causal: bool) -> Tuple[torch.Tensor, torch.Tensor]:
    """out like q, and lse fp32 (B, H, Sq), of checked inputs: q (B, H, Sq, D), k and v (B, Hk, Sk, D), all with a
    contiguous last dimension, seq_lens int32 (B,) or None. minimal_attn.flash_attention checks and describes them."""
    if INTERPRETING and q.dtype == torch.bfloat16:  # Triton's interpreter (3.6 to 3.9) gets bf16 dots and casts wrong
        out, lse = triton_forward(q.float(), k.float(), v.float(), seq_lens, softmax_scale, causal)
        return empty_outputs(q)[0].copy_(out), lse
    batch_size, nheads, seqlen_q, head_dim = q.shape
    out, lse = empty_outputs(q)
    config = tile_config(q.dtype, head_dim)
    grid = (triton.cdiv(seqlen_q, config["kBlockM"]) * batch_size * nheads,)
    if grid[0]:
        with nullcontext() if q.device.type == "cpu" else torch.get_device_module(q.device).device(q.device):
            _flash_fwd[grid](q, k, v, out, lse, seq_lens, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
                             *out.stride()[:3], nheads, k.shape[1], seqlen_q, k.shape[2], head_dim, softmax_scale,
                             kIsCausal=causal, kMaskCols=head_dim < config["kBlockD"], **config)
    return out, lse


@triton_forward.register_fake
def _(q, k, v, seq_lens, softmax_scale, causal):
    return empty_outputs(q)
