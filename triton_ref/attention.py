"""FlashAttention forward in Triton, the twin of csrc/flash.cu: the same function of the same arguments, and fp8.

One program owns kBlockM query rows of one head and walks along the keys with the online softmax. Blocks that every row
sees whole go first, without a mask; only the blocks at the edges of a window and at the end take the masked path. Tiles
come by tensor descriptors, that is TMA, where the GPU, the dtype and the strides allow it, else through pointers. V and
out may have another head_dim than Q and K, that is head_dim_v.
Nothing here belongs to one vendor, so other Triton backends and Triton's interpreter (TRITON_INTERPRET=1) run it too.

Tri Dao, FlashAttention-2, 2023, Algorithm 1. Read next: mask.py, the mask; scores.py, softcap, ALiBi and biases;
../csrc/flash.cu, the same in CUDA C++.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError

from minimal_attn.checks import FP8_DTYPES, MAX_HEAD_DIM, empty_outputs
from minimal_attn.options import Options, warn

from . import autotune as tuner, late
from .dropout import Dropout, count_and_scale, keep_tile, seed_of
from .launching import (INTERPRETING, PACKED_SIZES, WINDOW, Launch, kind_of, mask_of, num_samples, plan_key,
                        properties, remember, to_float)
from .mask import block_of, key_blocks, keys_of, make_mask, sees, steps
from .scores import (LOWEST, Scores, bias_bytes, capped, score_constants, score_numbers, score_options,
                     shifted)
from .sequence import block_of_slot, head_of, num_slots, sequence, strides_of

try:
    from . import attention_hopper
    hopper_error = None
except Exception as error:  # Gluon is experimental, so its import can fail in any way. warn_hopper says so once.
    attention_hopper, hopper_error = None, f"{type(error).__name__}: {error}"
hopper_works = attention_hopper is not None  # as far as is known


class Tile(NamedTuple):
    """How a program reads its blocks of rows and of keys."""
    kBlockM: int
    kBlockN: int
    kBlockD: int
    kBlockDv: int
    kMaskCols: bool = True  # these are more columns than there are
    kTma: bool = False


class Matrix(NamedTuple):
    """The rows of one head of a sample."""
    x: Any  # a pointer to the first one, or a descriptor of the whole tensor with kTma
    b: Any
    h: Any
    begin: Any  # the first row in the tensor
    row_stride: Any
    rows: Any
    cols: Any


@triton.jit
def matrix_of(x, strides, b, h, begin, rows, cols, kTma: tl.constexpr = False):
    """The Matrix of head h of element b of x, from row `begin` on."""
    if not kTma:
        x = head_of(x, strides, b, h, begin)
    return Matrix(x, b, h, begin, strides.row, rows, cols)


@triton.jit
def _load(matrix, row0, kMaskRows: tl.constexpr, kMaskCols: tl.constexpr, kRows: tl.constexpr, kCols: tl.constexpr,
          kTma: tl.constexpr = False, col0=0, row_begin=None):
    """[kRows, kCols] of a Matrix. Elements beyond its ends become 0; without its mask, a pointer's rows or columns must
    all be there. A descriptor ends with the tensor: in a packed batch, rows beyond the end may be the next sample's.

    row_begin: with kMaskRows, what a pointer has before this row becomes 0 too."""
    if kTma:
        tile = matrix.x.load([matrix.b, matrix.h, matrix.begin + row0, col0]).reshape(kRows, kCols)
    else:
        rows = row0 + tl.arange(0, kRows)
        cols = col0 + tl.arange(0, kCols)
        pointers = matrix.x + rows.to(tl.int64)[:, None] * matrix.row_stride + cols[None, :]
        is_row = rows[:, None] < matrix.rows
        if row_begin is not None:
            is_row &= rows[:, None] >= row_begin
        if kMaskRows and kMaskCols:
            tile = tl.load(pointers, mask=is_row & (cols[None, :] < matrix.cols), other=0.0)
        elif kMaskRows:
            tile = tl.load(pointers, mask=is_row, other=0.0)
        elif kMaskCols:
            tile = tl.load(pointers, mask=cols[None, :] < matrix.cols, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def _clear_keys(tile, cols, first_key, seqlen_k, kClear: tl.constexpr):
    """A tile [kBlockN, kBlockD] of K or V, which TMA has loaded, with 0 in keys that no row of the program sees: those
    before first_key, if a window hides any, and with kClear those of the next sample, or of padding. They may be NaN,
    and a probability of 0 times NaN is NaN."""
    if first_key is not None and kClear:
        tile = tl.where(((cols >= first_key) & (cols < seqlen_k))[:, None], tile, tl.zeros_like(tile))
    elif first_key is not None:
        tile = tl.where(cols[:, None] >= first_key, tile, tl.zeros_like(tile))
    elif kClear:
        tile = tl.where(cols[:, None] < seqlen_k, tile, tl.zeros_like(tile))
    return tile


@triton.jit
def _attend(acc_o, row_max, row_sum, q, k, v, h, row0, seq, blocks, visible, first_key, softmax_scale_log2, scores,
            dropout, kMasked: tl.constexpr, kIsLocal: tl.constexpr, kClearV: tl.constexpr, kIsPacked: tl.constexpr,
            kTile: tl.constexpr):
    """Online softmax over the full blocks of keys, with kMasked over the cut ones: the new acc_o, row_max, row_sum."""
    kIsFp8: tl.constexpr = q.dtype.primitive_bitwidth == 8
    kIsFloat32: tl.constexpr = q.dtype == tl.float32
    kHasBias: tl.constexpr = False if scores.options.bias is None else scores.options.bias.dtype.element_ty != tl.uint8
    kBlockN: tl.constexpr = kTile.kBlockN
    loop = steps(blocks, kMasked)
    for step in range(loop.begin, loop.end):
        col0 = block_of(blocks, step, kMasked) * kBlockN
        cols = col0 + tl.arange(0, kBlockN)
        k_tile = _load(k, col0, kMasked, kTile.kMaskCols, kBlockN, kTile.kBlockD, kTile.kTma)
        acc_s = tl.dot(q, k_tile.T, input_precision="ieee")
        acc_s = shifted(scores, capped(scores, acc_s), (row0 + tl.arange(0, acc_s.shape[0]))[:, None], cols[None, :],
                        not kMasked, kIsFloat32)
        if kMasked:
            acc_s = tl.where(sees(visible, cols, kIsLocal), acc_s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(acc_s, 1))
        # A row that has seen no key, or only scores of -inf: exp2(-inf) is 0, not NaN.
        max_sub = tl.where(new_max == float("-inf"), 0.0, new_max)
        # In fp32 a key that a row sees alone has p = 1 exactly. With a bias the product of a low score could overflow.
        if kIsFloat32 or kHasBias:
            p = tl.exp2((acc_s - max_sub[:, None]) * softmax_scale_log2)
        else:  # one FMA an element; in fp8 p goes up to 2^8, so that less of it is subnormal
            p = tl.exp2(acc_s * softmax_scale_log2 - (max_sub * softmax_scale_log2 - (8.0 if kIsFp8 else 0.0))[:, None])
        rescale = tl.exp2((row_max - max_sub) * softmax_scale_log2)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        if dropout.seed is not None:  # of what meets V alone: the sum normalises what there was before
            p = tl.where(keep_tile(dropout, seq.b, h, row0, col0, p.shape[0], kBlockN), p, 0.0)
        if kIsFp8 and not kIsPacked:  # v is Vᵀ, its keys in the order of _transpose_v
            v_tile = _load(v, 0, kTile.kMaskCols, kMasked, kTile.kBlockDv, kBlockN, kTile.kTma, col0).T
            p_tile = p.to(q.dtype).reshape(p.shape[0], kBlockN // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(p.shape)
        else:
            v_tile = _load(v, col0, kMasked, kTile.kMaskCols, kBlockN, kTile.kBlockDv, kTile.kTma, 0, first_key)
            p_tile = p.to(q.dtype)
            if kMasked and kTile.kTma:
                v_tile = _clear_keys(v_tile, cols, first_key, seq.seqlen_k, kClearV)
        if q.dtype == tl.float32:
            # Summed apart from acc_o: short sums round less. A plain addition would be folded back into the dot.
            acc_o = tl.fma(acc_o, tl.broadcast_to(rescale[:, None], acc_o.shape),
                           tl.dot(p_tile, v_tile, input_precision="ieee"))
        else:
            acc_o = tl.dot(p_tile, v_tile, acc_o * rescale[:, None])
        row_max = new_max
    return acc_o, row_max, row_sum


@triton.jit(do_not_specialize=WINDOW)
def _transpose_v(v_ptr, vt_ptr, lengths, v_strides, nheads_k, seqlen_q, seqlen_k, seqlen_vt, head_dim_v, window_left,
                 window_right, kIsCausal: tl.constexpr, kIsLocal: tl.constexpr, kBlockN: tl.constexpr,
                 kBlockDv: tl.constexpr):
    """Vᵀ (B, Hk, Dv, seqlen_vt), contiguous, of fp8 V: tensor cores take an 8-bit second operand that way alone.

    Within 16 keys, the two axes of [2, 4] pairs are exchanged. If P's columns have this order as well, a thread's
    results of Q Kᵀ already lie in its registers as its operand of P V needs them. Keys beyond a sample's end become 0,
    and so do keys that a window hides from all of its rows.
    """
    n_blocks = tl.cdiv(seqlen_vt, kBlockN)
    bh = (tl.program_id(0) // n_blocks).to(tl.int64)
    b, h_k = bh // nheads_k, bh % nheads_k
    places = tl.program_id(0) % n_blocks * kBlockN + tl.arange(0, kBlockN)
    keys = places // 16 * 16 + places // 2 % 2 * 8 + places // 4 % 4 * 2 + places % 2
    dims = tl.arange(0, kBlockDv)
    seq = sequence(lengths, b, 1, seqlen_q, seqlen_k)
    is_key = keys < seq.seqlen_k
    if kIsLocal:
        is_key &= keys >= keys_of(make_mask(seq, window_left, window_right, kIsCausal, kIsLocal), 0).begin
    v = tl.load(head_of(v_ptr, v_strides, b, h_k, 0) + keys.to(tl.int64)[:, None] * v_strides.row + dims[None, :],
                mask=is_key[:, None] & (dims[None, :] < head_dim_v), other=0.0)
    tl.store(vt_ptr + (bh * head_dim_v + dims[:, None]) * seqlen_vt + places[None, :], v.T,
             mask=(dims[:, None] < head_dim_v) & (places[None, :] < seqlen_vt))


@triton.jit
def finish(row_max, row_sum, is_empty, scale_o, sinks_ptr, h, is_row):
    """(the factor that acc_o is to be multiplied with, lse). row_max is a natural logarithm, and a sink one more term
    exp(sink - max), as far from row_max as can be. Rows that are padding, not is_row, have none."""
    row_sum, empty_lse = tl.where(is_empty, 1.0, row_sum), float("-inf")
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h)
        above = row_max - sink
        factor = tl.exp(tl.minimum(above, 0.0))
        row_max, row_sum = tl.maximum(row_max, sink), row_sum * factor + tl.exp(tl.minimum(-above, 0.0))
        scale_o *= factor
        empty_lse = tl.where(is_row, sink, float("-inf"))
    # "/" would round to two ulps.
    return tl.div_rn(scale_o, row_sum), tl.where(is_empty, empty_lse, row_max + tl.log(row_sum))


@triton.jit
def block_of_rows(cu_seqlens_q_ptr, batch_size, nheads, seqlen_q, kBlockM: tl.constexpr):
    """(b, h, bh, sample, row0): the rows of this program begin at row0 of a sample, in element b of the tensor.

    Blocks of one head are neighbours, to share its K and V in L2. The rows that see most under a causal mask go first.
    """
    m_blocks = num_slots(cu_seqlens_q_ptr, batch_size, seqlen_q, kBlockM)
    m_block = m_blocks - 1 - tl.program_id(0) % m_blocks
    bh = tl.program_id(0) // m_blocks
    b, h = bh // nheads, bh % nheads
    sample = b
    if cu_seqlens_q_ptr is not None:
        sample, m_block = block_of_slot(cu_seqlens_q_ptr, m_block, batch_size, seqlen_q, kBlockM)
    return b, h, bh, sample, m_block * kBlockM


@triton.jit(do_not_specialize=["keep_count", "batch_size", *WINDOW])
def _flash_fwd(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,  # as AttnParams in csrc/flash.h; v is Vᵀ in fp8, if not packed
               lengths, sinks_ptr, descales, seed_ptr, keep_count, keep_scale, softmax_scale, score_options,
               strides, score_strides, batch_size, nheads, nheads_k, seqlen_q, seqlen_k, head_dim, head_dim_v,
               window_left, window_right, kIsCausal: tl.constexpr, kIsLocal: tl.constexpr, kFastTanh: tl.constexpr,
               kNegateQ: tl.constexpr, kTile: tl.constexpr):
    """lengths, descales: those of minimal_attn.options.Options. strides: of q, k, v and o."""
    kIsPacked: tl.constexpr = lengths.cu_seqlens_q is not None
    kBlockM: tl.constexpr = kTile.kBlockM
    kBlockDv: tl.constexpr = kTile.kBlockDv
    q_strides, k_strides, v_strides, o_strides = strides
    b, h, bh, sample, row0 = block_of_rows(lengths.cu_seqlens_q, batch_size, nheads, seqlen_q, kBlockM)
    h_k = h // (nheads // nheads_k)
    rows = row0 + tl.arange(0, kBlockM)
    seq = sequence(lengths, sample, batch_size, seqlen_q, seqlen_k)
    if kIsPacked:
        if row0 >= seq.padded_q:
            return
    mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal)
    visible = keys_of(mask, rows)
    blocks = key_blocks(mask, row0, kBlockM, kTile.kBlockN)
    first_key = None
    if kIsLocal:  # the rows see no key before it
        first_key = keys_of(mask, row0).begin

    k = matrix_of(k_ptr, k_strides, b, h_k, seq.k_begin, seq.seqlen_k, head_dim, kTile.kTma)
    v = matrix_of(v_ptr, v_strides, b, h_k, seq.k_begin, seq.seqlen_k, head_dim_v, kTile.kTma)
    q = matrix_of(q_ptr, q_strides, b, h, seq.q_begin, seq.seqlen_q, head_dim, kTile.kTma)
    q = _load(q, row0, True, kTile.kMaskCols, kBlockM, kTile.kBlockD, kTile.kTma)
    if q.dtype.primitive_bitwidth == 8 and not kIsPacked:  # Vᵀ, whose keys are its columns
        v = Matrix(v.x, b, h_k, 0, v.row_stride, head_dim_v, tl.cdiv(seqlen_k, 16) * 16)
    if kNegateQ:  # a masked score of -inf needs a scale above 0
        q = (-q.to(tl.float32)).to(q.dtype)
    # exp(scale · (s - max)) = exp2(softmax_scale_log2 · (s - max)). A scale of 0 makes all scores alike; so does the
    # least number, which does not turn a masked -inf into NaN. A descale below 0 is an error that only the GPU can see.
    scale, scale_o = tl.abs(tl.cast(softmax_scale, tl.float32)), keep_scale
    q_descale_ptr, k_descale_ptr, v_descale_ptr = descales
    if q_descale_ptr is not None:
        scale *= tl.load(q_descale_ptr + seq.b * nheads_k + h_k)
    if k_descale_ptr is not None:
        scale *= tl.load(k_descale_ptr + seq.b * nheads_k + h_k)
    if v_descale_ptr is not None:
        scale_o *= tl.load(v_descale_ptr + seq.b * nheads_k + h_k)
    softmax_scale_log2 = tl.where(scale < 0, float("nan"), tl.maximum(scale * 1.4426950408889634, 1e-37))
    numbers = score_numbers(tl.where(scale < 0, float("nan"), scale), score_options, score_strides, seq, h)
    scores = Scores(numbers, score_options, score_strides, kFastTanh)
    if score_options.softcap is not None or score_options.slopes is not None or score_options.bias is not None:
        scale = numbers.unit
        softmax_scale_log2 = scale * 1.4426950408889634
    dropout = Dropout(seed_ptr, keep_count, keep_scale)
    acc_o = tl.zeros([kBlockM, kBlockDv], tl.float32)
    row_max = tl.full([kBlockM], float("-inf"), tl.float32)
    row_sum = tl.zeros([kBlockM], tl.float32)
    kClearV: tl.constexpr = kIsPacked or lengths.seqused_k is not None
    for kMasked in tl.static_range(2):  # first the blocks that every row sees whole, then those that a mask cuts
        acc_o, row_max, row_sum = _attend(acc_o, row_max, row_sum, q, k, v, h, row0, seq, blocks, visible, first_key,
                                          softmax_scale_log2, scores, dropout, kMasked, kIsLocal, kClearV, kIsPacked,
                                          kTile)

    is_empty = (visible.begin >= visible.end) | (row_sum == 0.0)
    row_max *= scale
    if score_options.bias is not None:  # the backward pass clamps low scores, see shifted
        row_max = tl.maximum(row_max, LOWEST)
    if q.dtype.primitive_bitwidth == 8:  # p was 2^8 times what it is
        row_max -= 8 * 0.6931471805599453
    factor, lse = finish(row_max, row_sum, is_empty, scale_o, sinks_ptr, h, rows < seq.seqlen_q)
    tl.store(lse_ptr + bh.to(tl.int64) * seqlen_q + seq.q_begin + rows, lse, mask=rows < seq.padded_q)
    # The out of an empty row is 0 even where V, times probabilities of 0, gave NaN.
    out = tl.where(is_empty[:, None], 0.0, acc_o * factor[:, None])
    cols = tl.arange(0, kBlockDv)
    o_base = head_of(o_ptr, o_strides, b, h, seq.q_begin)
    tl.store(o_base + rows.to(tl.int64)[:, None] * o_strides.row + cols[None, :], out.to(o_ptr.dtype.element_ty),
             mask=(rows[:, None] < seq.padded_q) & (cols[None, :] < head_dim_v))


_flash_fwd_packed = triton.jit(do_not_specialize=["keep_count", *WINDOW, *PACKED_SIZES])(_flash_fwd.fn)

# (kBlockM, kBlockN, num_warps, num_stages) by bytes of an element and the larger of kBlockD and kBlockDv. The first
# that fits the GPU's shared memory is the one without tuning; each list ends with one for the 99 KB of sm_86, sm_89 and
# sm_120.
TILES = {
    # Products of true fp32 run on the plain FMA units and keep both operands in registers.
    (4, 64): [(64, 32, 4, 2)],
    (4, 128): [(32, 32, 4, 1)],
    (4, 256): [(32, 32, 4, 1)],
    # Two or three programs of four warps an SM hide each other's softmax. One of eight warps with large tiles moves
    # less memory, which pays for long sequences.
    (2, 64): [(128, 64, 4, 3), (64, 128, 4, 3), (64, 64, 4, 3)],
    (2, 128): [(64, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2)],
    (2, 256): [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2)],
    (1, 64): [(64, 128, 4, 3), (128, 64, 4, 3)],
    (1, 128): [(64, 128, 4, 3), (128, 128, 8, 3), (64, 128, 4, 2)],
    (1, 256): [(128, 128, 8, 2), (128, 64, 8, 2)],
}
# In 16 bits beside a bias, where none of these fits.
BIAS_TILES = [(64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 1)]


def block_d(dtype, head_dim):
    """Columns of a tile: head_dim, rounded up to what Triton and the tensor cores take. ValueError for what a graph of
    torch.export may be given, whose sizes no check has seen."""
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"Unsupported head_dim {head_dim}: 1 to {MAX_HEAD_DIM} is supported")
    return max(32 if dtype in FP8_DTYPES else 16, triton.next_power_of_2(head_dim))


def shared_memory(dtype, kBlockM, kBlockN, kBlockD, num_stages, bias_bytes=0):
    """Bytes that a program asks for at most: Q, a ring of K, V and the bias, and barriers. kBlockD: the larger one, if
    V has another."""
    of_bias = num_stages * kBlockM * kBlockN * bias_bytes
    return (kBlockM + 2 * num_stages * kBlockN) * kBlockD * dtype.itemsize + of_bias + 1024


def config_of(kBlockM, kBlockN, num_warps, num_stages, kBlockD, kBlockDv):
    """The launch options of a tile."""
    return dict(kBlockM=kBlockM, kBlockN=kBlockN, kBlockD=kBlockD, kBlockDv=kBlockDv, num_warps=num_warps,
                num_stages=num_stages)


@functools.cache
def tile_configs(dtype, head_dim, max_shared_memory=227 << 10, is_hopper=False, head_dim_v=None, bias_bytes=0):
    """Launch options to choose from, as a list of dictionaries; the first is the choice without tuning.

    Not by batch and heads, so that a sample's result does not depend on its batch.

    Args:
        dtype, head_dim: of q.
        max_shared_memory: bytes that one program can have; 227 KB on Hopper.
        is_hopper: attention_hopper.py can serve as well.
        head_dim_v: of v, if it is another.
        bias_bytes: of a bias, for each score.
    """
    kBlockD, kBlockDv = block_d(dtype, head_dim), block_d(dtype, head_dim_v or head_dim)
    largest = max(kBlockD, kBlockDv)
    smallest = (16, 16, 4, 1) if dtype == torch.float32 else (32, 32, 4, 1)  # for 64 KB, as Turing and AMD have

    def fits(tile):
        return shared_memory(dtype, *tile[:2], largest, tile[3], bias_bytes) <= max_shared_memory

    tiles = list(filter(fits, TILES[dtype.itemsize, max(64, largest)]))
    if not tiles and bias_bytes and dtype.itemsize == 2:
        tiles = list(filter(fits, BIAS_TILES))
    tiles = tiles or [smallest]
    of_hopper = attention_hopper.configs(dtype, kBlockD) if is_hopper else []
    return of_hopper + [config_of(*tile, kBlockD, kBlockDv) for tile in tiles]


def can_use_tma(*tensors):
    """Whether tensor descriptors reach these tensors: TMA is there from Hopper on, and counts in units of 16 bytes.

    Not fp32: its products take both operands from registers. Nor rows that overlap, as windows of a signal do.
    """
    if properties(tensors[0].device).capability < 90:
        return False
    return all(x.itemsize < 4 and x.numel() and x.data_ptr() % 16 == 0
               and all(n == 1 or (stride >= x.shape[-1] and stride * x.itemsize % 16 == 0)
                       for n, stride in zip(x.shape[:-1], x.stride()[:-1])) for x in tensors)


def transposed(v, seqlen_q, lengths, window):
    """Vᵀ of fp8 V by _transpose_v; the length is rounded up to 16, for its rows to start where TMA can."""
    batch_size, nheads_k, seqlen_k, head_dim_v = v.shape
    seqlen_vt = triton.cdiv(seqlen_k, 16) * 16
    vt = v.new_empty(batch_size, nheads_k, head_dim_v, seqlen_vt)
    if vt.numel():
        grid = (triton.cdiv(seqlen_vt, 64) * batch_size * nheads_k,)
        _transpose_v[grid](v, vt, lengths, *strides_of(v), nheads_k, seqlen_q, seqlen_k, seqlen_vt, head_dim_v,
                           *mask_of(window), kBlockN=64, kBlockDv=block_d(v.dtype, head_dim_v))
    return vt


def launch(config, arguments, window, tma):
    """A Launch for a window and the arguments that _flash_fwd has first. tma: descriptors reach q, k and v."""
    q, k, v, out, _, lengths, *_, softmax_scale, scores = arguments
    if "kConsumers" in config:
        return attention_hopper.launch(config, q, k, v, out, window == (-1, 0), properties(q.device).num_sms)
    (nheads, seqlen_q, head_dim), head_dim_v = q.shape[1:], out.shape[-1]
    function, batch_size = (_flash_fwd_packed if lengths.is_packed else _flash_fwd), num_samples(q, lengths)
    kBlockM, kBlockN, kBlockD, kBlockDv, num_warps, num_stages = config.values()
    v_tile = (kBlockDv, kBlockN) if q.dtype in FP8_DTYPES and not lengths.is_packed else (kBlockN, kBlockDv)
    tiles = [(x, (1, 1, *tile)) for x, tile in ((q, (kBlockM, kBlockD)), (k, (kBlockN, kBlockD)), (v, v_tile))]
    strides, is_fast = score_constants(q, scores)
    constants = (strides_of(q, k, v, out), strides, batch_size, nheads, k.shape[1], seqlen_q, k.shape[2], head_dim,
                 head_dim_v, *mask_of(window), is_fast, softmax_scale < 0,
                 Tile(kBlockM, kBlockN, kBlockD, kBlockDv, head_dim < kBlockD or head_dim_v < kBlockDv, tma))
    slots = num_slots.fn(lengths.cu_seqlens_q, batch_size, seqlen_q, kBlockM)
    return Launch(function, slots * q.shape[0] * nheads, constants, tiles if tma else (), num_warps=num_warps,
                  num_stages=num_stages)


_plans = {}  # {all that a launch depends on: the launch}


def in_float(options):
    """Converts the tensors in options to fp32, for inputs converted by to_float."""
    bias = options.attn_bias
    descales = {name: to_float(getattr(options, name)) for name in ("q_descale", "k_descale", "v_descale")}
    return options._replace(attn_bias=bias if bias is None or bias.dtype != torch.bfloat16 else to_float(bias),
                            **descales)


def run(q, k, v, options, config=None):
    """(out, lse) of checked inputs and minimal_attn.options.Options, by config or else by one of tile_configs."""
    if INTERPRETING and q.dtype not in (torch.float32, torch.float16):
        options = in_float(options)
        out, lse = run(*map(to_float, (q, k, v)), options, config)
        return empty_outputs(q, v)[0].copy_(out), lse
    out, lse = empty_outputs(q, v)
    if not out.numel():
        return out, lse
    seed = seed_of(options)
    numbers = *count_and_scale(options.dropout_p if seed is not None else 0.0), options.softmax_scale
    with torch.accelerator.device_index(q.device.index):  # None on the CPU: nothing to switch
        if q.dtype in FP8_DTYPES and not options.lengths.is_packed:
            v = transposed(v, q.shape[2], options.lengths, options.window)
        arguments = (q, k, v, out, lse, options.lengths, options.sinks, options.descales, seed, *numbers,
                     score_options(options))
        key = (*plan_key(options, q, k, v), options.autotune and tuner.is_on(), config and tuple(config.values()))
        plan = _plans.get(key)
        if plan is not None:
            plan(*arguments)
            return out, lse
        tma = can_use_tma(q, k, v)
        suits_hopper = not config and hopper_serves(q, out, tma, options)
        if suits_hopper and attention_hopper is None:
            warn_hopper(hopper_error)
        try:
            plan = choose(config, arguments, options, tma)
            plan(*arguments)
        except CompilationError as error:
            if not suits_hopper:
                raise
            give_up_hopper(f"{type(error).__name__}: {error}")
            plan = choose(config, arguments, options, tma)
            plan(*arguments)
        remember(_plans, key, plan, q.device)
    return out, lse


def give_up_hopper(reason):
    """Lets attention.py serve alone from now on, since this Triton cannot compile attention_hopper.py."""
    global hopper_works
    hopper_works = False
    _plans.clear()
    warn_hopper(reason)


@functools.cache  # once a reason
def warn_hopper(reason):
    """Warns that attention_hopper.py does not work. Gluon changes from one release of Triton to the next."""
    warn(f"attention_hopper.py does not work with Triton {triton.__version__}, calls are slower without it: {reason}")


def hopper_serves(q, out, tma, options):
    """Whether attention_hopper.py is for a call, if it works. Its TILES begin at kBlockD 64."""
    return (properties(q.device).capability // 10 == 9 and tma and can_use_tma(out) and q.dtype.itemsize == 2
            and q.shape[-1] > 32 and q.shape[-1] == out.shape[-1] and options.window in ((-1, -1), (-1, 0))
            and options.softmax_scale >= 0 and not options.softcap and all(x is None for x in options.tensors))


def candidates(q, out, tma, options=Options(1.0)):
    """tile_configs for a call, and whether attention_hopper.py is among them."""
    is_hopper = hopper_works and hopper_serves(q, out, tma, options)
    max_shared_memory = properties(q.device).max_shared_memory
    of_bias = bias_bytes(options.attn_bias)
    return tile_configs(q.dtype, q.shape[-1], max_shared_memory, is_hopper, out.shape[-1], of_bias), is_hopper


def choose(config, arguments, options, tma):
    """The Launch of config, or else of one of the candidates: the first, or the fastest."""
    q, k, _, out, *_ = arguments
    configs, is_hopper = ([config], False) if config else candidates(q, out, tma, options)
    key = (str(q.dtype), block_d(q.dtype, q.shape[-1]), block_d(q.dtype, out.shape[-1]), *kind_of(q, k, options), tma,
           is_hopper)
    launch_of = lambda config: launch(config, arguments, options.window, tma)  # noqa: E731
    return tuner.fastest_launch("attention", key, configs, launch_of, arguments, options.autotune)


def __getattr__(name):
    """Gives classic.py's attention and calculate_block_sizes, for callers who look for them beside the kernel."""
    if name in ("attention", "calculate_block_sizes"):
        return late.of_classic(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
