"""Changes of a score before the softmax: softcap, ALiBi, biases and masks in bytes, for the kernels of both passes.

    score = factor · q·k, or with a softcap its tanh          factor = softmax_scale / unit
            - slope / unit · |row + seqlen_k - seqlen_q - key|
            + bias / unit, or -inf where a mask is false
            or in place of these what a score_mod makes of it, see score_function.py
    unit  = the softcap, so that its product takes no instruction of its own, or else 1
    P     = exp(unit · score - lse)

The formula is that of ../csrc/mods/score_mods.cuh. A bias is read by its strides, each tile when it is needed.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launching import INTERPRETING, properties

# The least finite bias: finfo.min, with which some models mask, would overflow to -inf, as if the row had no key.
LOWEST = tl.constexpr(-1e30)
LOG2_E = tl.constexpr(1.4426950408889634)


class ScoreOptions(NamedTuple):
    """The options of a call that change its scores, each None if the call does not use it."""
    softcap: Any
    slopes: Any  # of ALiBi
    bias: Any  # a mask in bytes
    units: Any  # of a BlockMask (minimal_attn/block_mask.py), and its bits
    bits: Any
    lists: Any  # of its tiles, see block_mask.py
    captured: Any  # tensors that a score_mod reads, and the gradients that it adds to: see score_function.py
    gradients: Any


class ScoreStrides(NamedTuple):
    """The strides of these, None for what the call does not use, and for rows or keys that all share a bias."""
    alibi_batch: Any
    batch: Any
    head: Any
    row: Any
    key: Any
    mask_batch: Any  # of a block mask, in heads
    mask_head: Any
    unit_head: Any
    unit_row: Any
    num_bits: Any
    kFastTanh: Any  # a tl.constexpr, see tanh
    sizes: Any  # of each tensor that a score_mod captures


class Numbers(NamedTuple):
    """Numbers by which the scores of one head of a sample change. One that is not needed is no None, which a function
    cannot return among others in Triton 3.6."""
    factor: Any
    unit: Any
    per_unit: Any  # 1 / unit
    slope: Any  # in units
    bias: Any  # a pointer to that of row 0 and key 0
    mask_head: Any  # which head of a block mask, counted over all samples
    seqlen_q: Any
    seqlen_k: Any
    b: Any
    h: Any


class Scores(NamedTuple):
    """All that changes the scores of a tile."""
    numbers: Any
    options: Any
    strides: Any


@triton.jit
def unit_of(scale, options):
    """The unit of scores, in fp32. scale: of q·k, and the unit of scores that nothing changes."""
    unit = tl.cast(scale, tl.float32)
    if options.softcap is not None:
        unit = tl.cast(options.softcap, tl.float32)
    elif (options.slopes is not None or options.bias is not None or options.units is not None
          or options.captured is not None):
        unit = tl.cast(1.0, tl.float32)
    return unit


@triton.jit
def log2_unit(unit):
    """unit · log2(e), for powers of two. A scale of 0 makes all scores alike; so does the least number, which does not
    turn a masked -inf into NaN."""
    return tl.maximum(unit * LOG2_E, 1e-37)


@triton.jit
def score_numbers(scale, options, strides, seq, h):
    """The Numbers of head h of a Sequence. scale: of q·k."""
    unit = unit_of(scale, options)
    factor, per_unit, slope, bias, mask_head = scale, 1.0, 0.0, 0, 0
    if options.softcap is not None:
        factor, per_unit = scale / unit, 1 / unit
    if options.slopes is not None:
        slope = tl.load(options.slopes + seq.b * strides.alibi_batch + h) * per_unit
    if options.bias is not None:
        bias = options.bias + tl.cast(seq.b, tl.int64) * strides.batch + tl.cast(h, tl.int64) * strides.head
    if options.units is not None:
        mask_head = tl.cast(seq.b, tl.int64) * strides.mask_batch + h * strides.mask_head
    return Numbers(factor, unit, per_unit, slope, bias, mask_head, seq.seqlen_q, seq.seqlen_k, seq.b, h)


@triton.jit
def online_softmax(s, row_max, row_sum, unit_log2, kExact: tl.constexpr = False, kShift: tl.constexpr = 0.0):
    """(P = exp2(unit_log2 · (s - max) + kShift), the factor that rescales earlier sums, the new row_max and row_sum).
    With kExact the maximum has P = 1; otherwise an element takes one FMA."""
    new_max = tl.maximum(row_max, tl.max(s, 1))
    # A row that has seen no key, or only scores of -inf: exp2(-inf) is 0, not NaN.
    max_sub = tl.where(new_max == float("-inf"), 0.0, new_max)
    if kExact:
        p = tl.exp2((s - max_sub[:, None]) * unit_log2)
    else:
        p = tl.exp2(s * unit_log2 - (max_sub * unit_log2 - kShift)[:, None])
    rescale = tl.exp2((row_max - max_sub) * unit_log2)
    return p, rescale, new_max, row_sum * rescale + tl.sum(p, 1)


@triton.jit
def capped(scores, s):
    """Turns s = q·k into factor · q·k, or into its tanh with a softcap. s is kept where nothing changes scores."""
    options = scores.options
    if (options.softcap is not None or options.slopes is not None or options.bias is not None
            or options.units is not None or options.captured is not None):
        s *= scores.numbers.factor
    if options.softcap is not None:
        s = tanh(s, scores.strides.kFastTanh)
    return s


@triton.jit
def through_cap(scores, ds, s, rows, cols, kScoreMod: tl.constexpr):
    """Turns ds, the derivative by the score, into the derivative by factor · q·k. s: the result of capped. rows, cols
    and kScoreMod: as of shifted."""
    if scores.options.softcap is not None:
        ds *= 1 - s * s
    if kScoreMod is not None:
        derivative = kScoreMod.derivative(s, scores.numbers.b, scores.numbers.h, rows, cols, scores.options.captured,
                                          scores.strides.sizes)
        ds = tl.where(ds == 0, 0.0, ds * derivative)  # where a key is hidden, it may be NaN
    return ds


@triton.jit
def add_to_captured(scores, ds, s, rows, cols, kScoreMod: tl.constexpr):
    """Adds to the gradients of what a score_mod captures, by ds [rows, keys] as of through_cap."""
    if kScoreMod is not None:
        if kScoreMod.add_gradients is not None:
            kScoreMod.add_gradients(ds, s, scores.numbers.b, scores.numbers.h, rows, cols, scores.options.captured,
                                    scores.strides.sizes, scores.options.gradients)


@triton.jit
def shifted(scores, s, rows, cols, kIsFull: tl.constexpr = False, kClamps: tl.constexpr = True,
            kScoreMod: tl.constexpr = None):
    """Adds ALiBi and the bias to s, the result of capped, or has a score_mod change it. One of rows and cols is
    [:, None], the other [None, :].

    kIsFull: there is a key for each of cols. kClamps: a finite bias below LOWEST counts as LOWEST. Without kClamps a
    low bias is kept, unless there is a softcap. kScoreMod: the Functions of score_function.py, or None.
    """
    if scores.options.slopes is not None:
        distances = (rows + (scores.numbers.seqlen_k - scores.numbers.seqlen_q)).to(tl.float32) - cols.to(tl.float32)
        s -= scores.numbers.slope * tl.abs(distances)
    if scores.options.bias is not None:
        bias = _load_bias(scores, rows, cols, kIsFull)
        if bias.dtype == tl.uint8:  # a mask
            s = tl.where(bias != 0, s, float("-inf"))
        elif not kClamps and scores.options.softcap is None:
            s += bias.to(tl.float32)
        else:
            bias = bias.to(tl.float32)
            in_units = bias
            if scores.options.softcap is not None:
                in_units *= scores.numbers.per_unit
            # -inf and NaN stay what they are.
            s += tl.where(bias > float("-inf"), tl.maximum(in_units, LOWEST), bias)
    if kScoreMod is not None:
        s = kScoreMod.changed(s, scores.numbers.b, scores.numbers.h, rows, cols, scores.options.captured,
                              scores.strides.sizes)
        s = tl.where(s > float("-inf"), tl.maximum(s, LOWEST), s)  # as with a bias
    return s


@triton.jit
def _load_bias(scores, rows, cols, kIsFull: tl.constexpr):
    """The bias of a tile, of size 1 where all rows or keys share one. Rows beyond the end read the last row. Keys
    beyond the end get 0; with kIsFull there are none."""
    pointers = scores.numbers.bias
    if scores.strides.row is not None:
        pointers += tl.maximum(tl.minimum(rows, scores.numbers.seqlen_q - 1), 0).to(tl.int64) * scores.strides.row
    if scores.strides.key is not None:
        pointers += cols.to(tl.int64) * scores.strides.key
    if scores.strides.key is None or kIsFull:
        bias = tl.load(pointers)
    else:
        bias = tl.load(pointers, mask=cols < scores.numbers.seqlen_k, other=0)
    return bias


@triton.jit
def tanh(x, kFast: tl.constexpr = False):
    """tanh(x). kFast: NVIDIA's approximation, right to 11 bits. Else Cephes' tanhf (Moshier, 1992), right to the last
    bits of fp32."""
    if kFast:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        z = x * x
        small = tl.fma(z, -5.70498872745e-3, 2.06390887954e-2)
        small = tl.fma(z, small, -5.37397155531e-2)
        small = tl.fma(z, small, 1.33314422036e-1)
        small = tl.fma(z, small, -3.33332819422e-1)
        small = tl.fma(z * small, x, x)
        large = 1 - 2 / (tl.exp2(tl.abs(x) * 2.8853900817779268) + 1)  # infinite powers make it 1
        y = tl.where(tl.abs(x) >= 0.625, tl.where(x < 0, -large, large), small)
    return y


def score_options(options):
    """The ScoreOptions of minimal_attn.options.Options."""
    bias = options.attn_bias
    if bias is not None and bias.dtype == torch.bool:
        bias = bias.view(torch.uint8)
    elif bias is not None and bias.dtype == torch.bfloat16 and INTERPRETING:  # see launching.py
        bias = bias.float()
    of_mask = (x if x is None else x.contiguous() for x in (options.mask_units, options.mask_bits))
    mod = options.score_mod
    of_mod = (None,) * 2 if mod is None else (mod.captured, mod.gradients)
    return ScoreOptions(options.softcap or None, options.alibi_slopes, bias, *of_mask, None, *of_mod)


def functions_of(options):
    """kScoreMod of the kernels. Its add_gradients is None where none are wanted: Triton 3.6 cannot ask this of a tuple
    that has a None in it."""
    mod = options.score_mod
    return mod and (mod.functions if mod.gradients else mod.functions._replace(add_gradients=None))


def score_strides(q, scores):
    """The ScoreStrides of ScoreOptions, as a kernel takes them."""
    slopes, bias = scores.slopes, scores.bias
    alibi_batch = None if slopes is None else slopes.stride(0) if slopes.ndim == 2 else 0
    strides = [None] * 4
    if bias is not None:
        shared = 0, 0, None, None
        strides = [x if n == 1 else stride for n, stride, x in zip(bias.shape, bias.stride(), shared)]
    of_units = [None] * 5
    if scores.units is not None:
        batch_size, nheads, rows, keys = scores.units.shape
        of_units = 0 if batch_size == 1 else nheads, int(nheads > 1), rows * keys, keys, scores.bits.shape[0]
    # To 16 bits an approximation is enough.
    is_fast = scores.softcap is not None and q.itemsize < 4 and properties(q.device).capability >= 75
    sizes = None if scores.captured is None else tuple(tuple(x.shape) for x in scores.captured)
    return ScoreStrides(alibi_batch, *strides, *of_units, tl.constexpr(is_fast), sizes)


def bytes_of_scores(options):
    """Bytes that are read for each score of a tile, of a bias or by a score_mod. A row or a column counts nothing."""
    if options.score_mod is not None:
        return options.score_mod.bytes_of_scores
    return 0 if options.attn_bias is None or 1 in options.attn_bias.shape[2:] else options.attn_bias.itemsize
