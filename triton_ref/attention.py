"""FlashAttention forward in Triton, the twin of csrc/flash.cu: the same function of the same arguments, and fp8.

One program owns kBlockM query rows of one head and walks along the keys with the online softmax, first along the blocks
that every row sees whole, which need no mask. Tiles come by tensor descriptors, that is TMA, where the GPU, the dtype
and the strides allow it, else through pointers, as other Triton backends and Triton's interpreter need it.

Tri Dao, FlashAttention-2, 2023, Algorithm 1. Read next: mask.py; scores.py; ../csrc/flash.cu, the same in CUDA C++.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError

from minimal_attn.checks import FP8_DTYPES, MAX_HEAD_DIM, empty_outputs
from minimal_attn.options import CAUSAL_MASK, NO_MASK, Options, warn

from . import autotune as tuner
from .block_mask import hidden, places_of, tile_at, tiles_of, with_lists
from .dropout import dropout_of, keep_tile
from .launching import INTERPRETING, WINDOW, Launch, kind_of, mask_of, packed, plan_key, properties, remember
from .mask import block_of, key_blocks, keys_of, make_mask, sees, steps
from .scores import (LOWEST, Scores, bytes_of_scores, capped, functions_of, log2_unit, online_softmax, score_numbers,
                     score_options, score_strides, shifted)
from .sequence import block_of_slot, head_of, num_slots, sequence, strides_of

try:
    from . import attention_hopper
    hopper_error = None
except Exception as error:  # Gluon is experimental, so its import can fail in any way. warn_hopper says so once.
    attention_hopper, hopper_error = None, f"{type(error).__name__}: {error}"


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
def load_tile(matrix, row0, kMaskRows: tl.constexpr, kMaskCols: tl.constexpr, kRows: tl.constexpr, kCols: tl.constexpr,
              kTma: tl.constexpr = False, col0=0, first_row=None):
    """[kRows, kCols] of a Matrix. Elements beyond its ends become 0; without its mask, a pointer's rows or columns must
    all be there. A descriptor ends with the tensor: see clear_keys. With kMaskRows, what a pointer has before first_row
    becomes 0 too."""
    if kTma:
        tile = matrix.x.load([matrix.b, matrix.h, matrix.begin + row0, col0]).reshape(kRows, kCols)
    else:
        rows = row0 + tl.arange(0, kRows)
        cols = col0 + tl.arange(0, kCols)
        pointers = matrix.x + rows.to(tl.int64)[:, None] * matrix.row_stride + cols[None, :]
        is_row = rows < matrix.rows
        if first_row is not None:
            is_row &= rows >= first_row
        is_there = (is_row | (not kMaskRows))[:, None] & ((cols < matrix.cols) | (not kMaskCols))[None, :]
        tile = tl.load(pointers, mask=is_there, other=0.0)
    return tile


@triton.jit
def clear_keys(tile, cols, first_key, seqlen_k, kClear: tl.constexpr):
    """A tile [kBlockN, kBlockD] of K or V, which TMA has loaded, with 0 in keys that no row of the program sees: those
    before first_key, if there is one, and with kClear those beyond the sample. They may be NaN, and 0 · NaN is NaN."""
    is_key = (cols < seqlen_k) | (not kClear)
    if first_key is not None:
        is_key &= cols >= first_key
    return tl.where(is_key[:, None], tile, tl.zeros_like(tile))


@triton.jit
def store_tile(x, strides, b, h, begin, rows, row_end, num_cols, tile, kMaskCols: tl.constexpr = True):
    """Stores a tile to the rows of head h of element b of x, which count from row `begin` and end before row_end."""
    cols = tl.arange(0, tile.shape[1])
    pointers = head_of(x, strides, b, h, begin) + rows.to(tl.int64)[:, None] * strides.row + cols[None, :]
    is_there = (rows < row_end)[:, None] & ((cols < num_cols) | (not kMaskCols))[None, :]
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=is_there)


@triton.jit
def add_product(acc, a, b, rescale=None):
    """acc + a b, or with the factor rescale of each row rescale · acc + a b. In fp32 the product is summed apart: short
    sums round less, and a plain addition would be folded back into it."""
    factor = tl.full(acc.shape, 1.0, tl.float32)
    if rescale is not None:
        factor = tl.broadcast_to(rescale[:, None], acc.shape)
    if a.dtype == tl.float32:
        acc = tl.fma(acc, factor, tl.dot(a, b, input_precision="ieee"))
    else:
        acc = tl.dot(a, b, acc * factor)
    return acc


@triton.jit(do_not_specialize=WINDOW)
def _transpose_v(v_ptr, vt_ptr, lengths, v_strides, nheads_k, seqlen_q, seqlen_k, seqlen_vt, head_dim_v, window_left,
                 window_right, kIsCausal: tl.constexpr, kIsLocal: tl.constexpr, kChunk: tl.constexpr,
                 kBlockN: tl.constexpr, kBlockDv: tl.constexpr):
    """Vᵀ (B, Hk, Dv, seqlen_vt), contiguous, of fp8 V: tensor cores take an 8-bit second operand that way alone. Keys
    that no row sees become 0.

    Within 16 keys, the two axes of [2, 4] pairs are exchanged. If P's columns have this order as well, a thread's
    results of Q Kᵀ already lie in its registers as its operand of P V needs them.
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
        is_key &= keys >= keys_of(make_mask(seq, window_left, window_right, kIsCausal, kIsLocal, kChunk), 0).begin
    v = tl.load(head_of(v_ptr, v_strides, b, h_k, 0) + keys.to(tl.int64)[:, None] * v_strides.row + dims[None, :],
                mask=is_key[:, None] & (dims[None, :] < head_dim_v), other=0.0)
    tl.store(vt_ptr + (bh * head_dim_v + dims[:, None]) * seqlen_vt + places[None, :], v.T,
             mask=(dims[:, None] < head_dim_v) & (places[None, :] < seqlen_vt))


@triton.jit
def finish(row_max, row_sum, is_empty, scale_o, sinks_ptr, h, is_row):
    """(the factor that acc_o is to be multiplied with, lse). row_max is a natural logarithm. A sink is one more term
    exp(sink - max) of rows that are no padding."""
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
    """(b, h, bh, sample, row0): the rows of this program begin at row0 of a sample, in element b of the tensor. Blocks
    of one head are neighbours, to share its K and V in L2. The rows that see most under a causal mask go first."""
    m_blocks = num_slots(cu_seqlens_q_ptr, batch_size, seqlen_q, kBlockM)
    m_block = m_blocks - 1 - tl.program_id(0) % m_blocks
    bh = tl.program_id(0) // m_blocks
    b, h = bh // nheads, bh % nheads
    sample = b
    if cu_seqlens_q_ptr is not None:
        sample, m_block = block_of_slot(cu_seqlens_q_ptr, m_block, batch_size, seqlen_q, kBlockM)
    return b, h, bh, sample, m_block * kBlockM


@triton.jit(do_not_specialize=["batch_size", *WINDOW])
def _flash_fwd(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,  # as AttnParams in csrc/flash.h; v is Vᵀ in fp8, if not packed
               max_ptr,  # (B, H, Sq), or None
               lengths, sinks_ptr, descales, dropout, softmax_scale, score_options, strides, score_strides, batch_size,
               nheads, nheads_k, seqlen_q, seqlen_k, head_dim, head_dim_v, window_left, window_right,
               kIsCausal: tl.constexpr, kIsLocal: tl.constexpr, kChunk: tl.constexpr, kNegateQ: tl.constexpr,
               kTile: tl.constexpr, kScoreMod: tl.constexpr):
    """lengths, descales: those of minimal_attn.options.Options. strides: of q, k, v and o."""
    kIsPacked: tl.constexpr = lengths.cu_seqlens_q is not None
    kBlockM: tl.constexpr = kTile.kBlockM
    kBlockN: tl.constexpr = kTile.kBlockN
    kBlockDv: tl.constexpr = kTile.kBlockDv
    q_strides, k_strides, v_strides, o_strides = strides
    b, h, bh, sample, row0 = block_of_rows(lengths.cu_seqlens_q, batch_size, nheads, seqlen_q, kBlockM)
    h_k = h // (nheads // nheads_k)
    rows = row0 + tl.arange(0, kBlockM)
    seq = sequence(lengths, sample, batch_size, seqlen_q, seqlen_k)
    if kIsPacked and row0 >= seq.padded_q:
        return
    mask = make_mask(seq, window_left, window_right, kIsCausal, kIsLocal, kChunk)
    visible, blocks = keys_of(mask, rows), key_blocks(mask, row0, kBlockM, kBlockN)
    first_key = keys_of(mask, row0).begin if kIsLocal else None  # the rows see no key before it

    q = matrix_of(q_ptr, q_strides, b, h, seq.q_begin, seq.seqlen_q, head_dim, kTile.kTma)
    k = matrix_of(k_ptr, k_strides, b, h_k, seq.k_begin, seq.seqlen_k, head_dim, kTile.kTma)
    v = matrix_of(v_ptr, v_strides, b, h_k, seq.k_begin, seq.seqlen_k, head_dim_v, kTile.kTma)
    q = load_tile(q, row0, True, kTile.kMaskCols, kBlockM, kTile.kBlockD, kTile.kTma)
    kIsFp8: tl.constexpr = q.dtype.primitive_bitwidth == 8
    if kIsFp8 and not kIsPacked:  # Vᵀ, whose keys are its columns
        v = Matrix(v.x, b, h_k, 0, v.row_stride, head_dim_v, tl.cdiv(seqlen_k, 16) * 16)
    if kNegateQ:  # a masked score of -inf needs a scale above 0
        q = (-q.to(tl.float32)).to(q.dtype)
    scale, scale_o = tl.abs(tl.cast(softmax_scale, tl.float32)), dropout.keep_scale
    q_descale_ptr, k_descale_ptr, v_descale_ptr = descales
    if q_descale_ptr is not None:
        scale *= tl.load(q_descale_ptr + seq.b * nheads_k + h_k)
    if k_descale_ptr is not None:
        scale *= tl.load(k_descale_ptr + seq.b * nheads_k + h_k)
    if v_descale_ptr is not None:
        scale_o *= tl.load(v_descale_ptr + seq.b * nheads_k + h_k)
    # A descale below 0 is an error that only the GPU can see.
    numbers = score_numbers(tl.where(scale < 0, float("nan"), scale), score_options, score_strides, seq, h)
    unit_log2 = tl.where(scale < 0, float("nan"), log2_unit(numbers.unit))
    scores = Scores(numbers, score_options, score_strides)
    tiles = tiles_of(scores, row0 // kBlockM, tl.cdiv(seqlen_q, kBlockM), tl.cdiv(seqlen_k, kBlockN))
    places = places_of(scores, tiles, blocks)
    acc_o = tl.zeros([kBlockM, kBlockDv], tl.float32)
    row_max = tl.full([kBlockM], float("-inf"), tl.float32)
    row_sum = tl.zeros([kBlockM], tl.float32)
    kIsFloat32: tl.constexpr = q.dtype == tl.float32
    kHasBias: tl.constexpr = (kScoreMod is not None if score_options.bias is None else
                              score_options.bias.dtype.element_ty != tl.uint8)
    kClearV: tl.constexpr = kIsPacked or lengths.seqused_k is not None
    for kMasked in tl.static_range(2):  # first the blocks that every row sees whole, then those that a mask cuts
        loop = steps(places, kMasked)
        for step in range(loop.begin, loop.end):
            col0, is_partial = tile_at(scores, tiles, block_of(places, step, kMasked), kBlockN)
            cols = col0 + tl.arange(0, kBlockN)
            k_tile = load_tile(k, col0, kMasked, kTile.kMaskCols, kBlockN, kTile.kBlockD, kTile.kTma)
            acc_s = tl.dot(q, k_tile.T, input_precision="ieee")
            acc_s = shifted(scores, capped(scores, acc_s), rows[:, None], cols[None, :], not kMasked, kIsFloat32,
                            kScoreMod)
            acc_s = hidden(scores, acc_s, row0, col0, is_partial)
            if kMasked:
                acc_s = tl.where(sees(mask, visible, cols), acc_s, float("-inf"))
            # In fp32 a key that a row sees alone has p = 1 exactly. With a bias the product of a low score could
            # overflow. In fp8 p goes up to 2^8, so that less of it is subnormal.
            p, rescale, row_max, row_sum = online_softmax(acc_s, row_max, row_sum, unit_log2, kIsFloat32 or kHasBias,
                                                          8.0 if kIsFp8 else 0.0)
            if dropout.seed is not None:  # of what meets V alone: the sum normalises what there was before
                p = tl.where(keep_tile(dropout, seq.b, h, row0, col0, kBlockM, kBlockN), p, 0.0)
            if kIsFp8 and not kIsPacked:  # v is Vᵀ, its keys in the order of _transpose_v
                v_tile = load_tile(v, 0, kTile.kMaskCols, kMasked, kTile.kBlockDv, kBlockN, kTile.kTma, col0).T
                p_tile = p.to(q.dtype).reshape(kBlockM, kBlockN // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(p.shape)
            else:
                v_tile = load_tile(v, col0, kMasked, kTile.kMaskCols, kBlockN, kTile.kBlockDv, kTile.kTma, 0, first_key)
                if kMasked and kTile.kTma:
                    v_tile = clear_keys(v_tile, cols, first_key, seq.seqlen_k, kClearV)
                p_tile = p.to(q.dtype)
            acc_o = add_product(acc_o, p_tile, v_tile, rescale)

    is_empty = (visible.begin >= visible.end) | (row_sum == 0.0)
    row_max *= numbers.unit
    is_stored = rows < seq.padded_q
    if max_ptr is not None:
        tl.store(max_ptr + bh.to(tl.int64) * seqlen_q + seq.q_begin + rows,
                 tl.where(visible.begin < visible.end, row_max + (row_sum - row_sum), float("-inf")), mask=is_stored)
    if score_options.bias is not None:  # the backward pass clamps low scores, see shifted
        row_max = tl.maximum(row_max, LOWEST)
    if kIsFp8:  # p was 2^8 times what it is
        row_max -= 8 * 0.6931471805599453
    factor, lse = finish(row_max, row_sum, is_empty, scale_o, sinks_ptr, h, rows < seq.seqlen_q)
    tl.store(lse_ptr + bh.to(tl.int64) * seqlen_q + seq.q_begin + rows, lse, mask=is_stored)
    # The out of an empty row is 0 even where V, times probabilities of 0, gave NaN.
    store_tile(o_ptr, o_strides, b, h, seq.q_begin, rows, seq.padded_q, head_dim_v,
               tl.where(is_empty[:, None], 0.0, acc_o * factor[:, None]))


# (kBlockM, kBlockN, num_warps, num_stages) by bytes of an element and the larger of kBlockD and kBlockDv. The first
# that fits serves without tuning; each list ends with one for the 99 KB of sm_86, sm_89 and sm_120.
TILES = {
    # Products of true fp32 run on the plain FMA units and keep both operands in registers.
    (4, 64): [(64, 32, 4, 2)], (4, 128): [(32, 32, 4, 1)], (4, 256): [(32, 32, 4, 1)],
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
    """Columns of a tile: head_dim, rounded up to what Triton and the tensor cores take. A graph of torch.export may get
    sizes that no other check has seen."""
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"Unsupported head_dim {head_dim}: 1 to {MAX_HEAD_DIM} is supported")
    return max(32 if dtype in FP8_DTYPES else 16, triton.next_power_of_2(head_dim))


def shared_memory(dtype, kBlockM, kBlockN, kBlockD, num_stages, bias_bytes=0):
    """Bytes that a program asks for at most: Q, a ring of K, V and the bias, and barriers. kBlockD: V's if larger."""
    ring = num_stages * kBlockN * (2 * kBlockD * dtype.itemsize + kBlockM * bias_bytes)
    return kBlockM * kBlockD * dtype.itemsize + ring + 1024


def config_of(kBlockM, kBlockN, num_warps, num_stages, kBlockD, kBlockDv):
    """The launch options of a tile."""
    return dict(kBlockM=kBlockM, kBlockN=kBlockN, kBlockD=kBlockD, kBlockDv=kBlockDv, num_warps=num_warps,
                num_stages=num_stages)


def tile_of(config, head_dim, head_dim_v, tma=False):
    """The Tile of launch options."""
    kBlockM, kBlockN, kBlockD, kBlockDv, *_ = config.values()
    return Tile(kBlockM, kBlockN, kBlockD, kBlockDv, head_dim < kBlockD or head_dim_v < kBlockDv, tma)


@functools.cache
def tile_configs(dtype, head_dim, max_shared_memory=227 << 10, is_hopper=False, head_dim_v=None, bias_bytes=0):
    """Launch options to choose from, as dictionaries; the first is the choice without tuning. They do not depend on
    batch and heads, so that a sample's result does not depend on its batch.

    Args:
        dtype, head_dim: of q. head_dim_v: of v, if it is another.
        max_shared_memory: bytes that one program can have; 227 KB on Hopper.
        is_hopper: attention_hopper.py can serve as well.
        bias_bytes: of a bias, for each score.
    """
    kBlockD, kBlockDv = block_d(dtype, head_dim), block_d(dtype, head_dim_v or head_dim)
    largest = max(kBlockD, kBlockDv)
    smallest = (16, 16, 4, 1) if dtype == torch.float32 else (32, 32, 4, 1)  # for 64 KB, as Turing and AMD have

    def fitting(tiles):
        return [x for x in tiles if shared_memory(dtype, *x[:2], largest, x[3], bias_bytes) <= max_shared_memory]

    beside_bias = BIAS_TILES if bias_bytes and dtype.itemsize == 2 else []
    tiles = fitting(TILES[dtype.itemsize, max(64, largest)]) or fitting(beside_bias) or [smallest]
    of_hopper = attention_hopper.configs(dtype, kBlockD) if is_hopper else []
    return of_hopper + [config_of(*tile, kBlockD, kBlockDv) for tile in tiles]


def can_use_tma(*tensors):
    """Whether tensor descriptors reach these tensors: TMA is there from Hopper on, and counts in units of 16 bytes. Not
    fp32, whose products take operands from registers, nor rows that overlap, as windows of a signal do."""
    if properties(tensors[0].device).capability < 90:
        return False
    return all(x.itemsize < 4 and x.numel() and x.data_ptr() % 16 == 0
               and all(n == 1 or (stride >= x.shape[-1] and stride * x.itemsize % 16 == 0)
                       for n, stride in zip(x.shape[:-1], x.stride()[:-1])) for x in tensors)


def transposed(v, seqlen_q, lengths, mask):
    """Vᵀ of fp8 V by _transpose_v. Its length is rounded up to 16, so that rows start where TMA can."""
    batch_size, nheads_k, seqlen_k, head_dim_v = v.shape
    seqlen_vt = triton.cdiv(seqlen_k, 16) * 16
    vt = v.new_empty(batch_size, nheads_k, head_dim_v, seqlen_vt)
    if vt.numel():
        grid = (triton.cdiv(seqlen_vt, 64) * batch_size * nheads_k,)
        _transpose_v[grid](v, vt, lengths, *strides_of(v), nheads_k, seqlen_q, seqlen_k, seqlen_vt, head_dim_v,
                           *mask, kBlockN=64, kBlockDv=block_d(v.dtype, head_dim_v))
    return vt


def launch(config, arguments, mask, tma, score_mod=None):
    """A Launch for mask_of and functions_of a call and the arguments that _flash_fwd has first. tma: descriptors reach
    q, k and v."""
    q, k, v, out, _, _, lengths, *_, softmax_scale, scores = arguments
    if "kConsumers" in config:
        return attention_hopper.launch(config, q, k, v, out, mask[2], properties(q.device).num_sms)
    (nheads, seqlen_q, head_dim), head_dim_v, batch_size = q.shape[1:], out.shape[-1], lengths.num_samples(q)
    kBlockM, kBlockN, kBlockD, kBlockDv, num_warps, num_stages = config.values()
    v_tile = (kBlockDv, kBlockN) if q.dtype in FP8_DTYPES and not lengths.is_packed else (kBlockN, kBlockDv)
    tiles = [(x, (1, 1, *tile)) for x, tile in ((q, (kBlockM, kBlockD)), (k, (kBlockN, kBlockD)), (v, v_tile))]
    constants = (strides_of(q, k, v, out), score_strides(q, scores), batch_size, nheads, k.shape[1], seqlen_q,
                 k.shape[2], head_dim, head_dim_v, *mask, softmax_scale < 0,
                 tile_of(config, head_dim, head_dim_v, tma), score_mod)
    slots = num_slots.fn(lengths.cu_seqlens_q, batch_size, seqlen_q, kBlockM)
    start = Launch(packed(_flash_fwd) if lengths.is_packed else _flash_fwd, slots * q.shape[0] * nheads, constants,
                   tiles if tma else (), num_warps=num_warps, num_stages=num_stages)
    return with_lists(start, scores.units, kBlockM, kBlockN, seqlen_q, k.shape[2])


_plans = {}  # {all that a launch depends on: the launch}


def run(q, k, v, options, config=None):
    """(out, lse, max_logits or None) of checked inputs and minimal_attn.options.Options, by config or else by one of
    tile_configs."""
    if INTERPRETING and q.dtype in FP8_DTYPES:  # for the same reason as bfloat16 in launching.py
        out, *more = run(*(x.float().contiguous() for x in (q, k, v)), options, config)
        return empty_outputs(q, v)[0].copy_(out), *more
    out, lse = empty_outputs(q, v)
    outputs = out, lse, torch.empty_like(lse) if options.return_max_logits else None
    if not out.numel():
        return outputs
    with torch.accelerator.device_index(q.device.index):  # None on the CPU: nothing to switch
        if q.dtype in FP8_DTYPES and not options.lengths.is_packed:
            v = transposed(v, q.shape[2], options.lengths, mask_of(options))
        arguments = (q, k, v, *outputs, options.lengths, options.sinks, options.descales, dropout_of(options),
                     options.softmax_scale, score_options(options))
        key = (*plan_key(options, q, k, v, outputs[-1]), options.autotune and tuner.is_on(),
               config and tuple(config.values()))
        plan = _plans.get(key)
        if plan is not None:
            plan(*arguments)
            return outputs
        tma = can_use_tma(q, k, v)
        configs, is_hopper = ([config], False) if config else candidates(q, out, tma, options)
        kind = (str(q.dtype), block_d(q.dtype, q.shape[-1]), block_d(q.dtype, out.shape[-1]),
                *kind_of(q, k, options), tma, is_hopper)
        try:
            plan = tuner.fastest_launch("attention", kind, configs, lambda config: launch(
                config, arguments, mask_of(options), tma, functions_of(options)), arguments, options.autotune)
            plan(*arguments)
        except CompilationError as error:
            if not is_hopper:
                raise
            give_up_hopper(f"{type(error).__name__}: {error}")
            return run(q, k, v, options)
        remember(_plans, key, plan, q.device)
    return outputs


def give_up_hopper(reason):
    """Lets attention.py serve alone from now on, since this Triton cannot compile attention_hopper.py."""
    global hopper_error
    hopper_error = reason
    _plans.clear()


@functools.cache  # once a reason
def warn_hopper(reason):
    """Warns that attention_hopper.py does not work. Gluon changes from one release of Triton to the next."""
    warn(f"attention_hopper.py does not work with Triton {triton.__version__}, calls are slower without it: {reason}")


def hopper_serves(q, out, tma, options):
    """Whether attention_hopper.py is for a call, if it works."""
    return (properties(q.device).capability // 10 == 9 and tma and can_use_tma(out) and q.dtype.itemsize == 2
            and q.shape[-1] > 32 and q.shape[-1] == out.shape[-1] and options.mask in (NO_MASK, CAUSAL_MASK)
            and not (options.return_max_logits or options.softcap or options.score_mod) and options.softmax_scale >= 0
            and all(x is None for x in options.tensors))


def candidates(q, out, tma, options=Options(1.0)):
    """tile_configs for a call, and whether attention_hopper.py is among them."""
    is_hopper = hopper_serves(q, out, tma, options)
    if is_hopper and hopper_error is not None:
        warn_hopper(hopper_error)
        is_hopper = False
    return tile_configs(q.dtype, q.shape[-1], properties(q.device).max_shared_memory, is_hopper, out.shape[-1],
                        bytes_of_scores(options)), is_hopper
