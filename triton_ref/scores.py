"""Changes of a score before the softmax: softcap, ALiBi, biases and masks, for the kernels of both passes.

    score = factor · q·k, or with a softcap its tanh          factor = softmax_scale / unit
            - slope / unit · |row + seqlen_k - seqlen_q - key|
            + bias / unit, or -inf where a mask is false
    unit  = the softcap, so that its product takes no instruction of its own, or else 1
    P     = exp(unit · score - lse)

The formula is that of ../csrc/mods/score_mods.cuh. A bias is read by its strides, each tile when it is needed.

Read next: attention_bwd_kernels.py, which changes its scores by it as well; attention_bwd_bias.py, the gradient of a
bias.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launching import properties

# A finite bias below this is this: finfo.min, with which some models mask, would overflow to -inf, and rows that have
# no other are not without keys.
LOWEST = tl.constexpr(-1e30)


class Numbers(NamedTuple):
    """Numbers by which the scores of one head of a sample change. An option that the call does not use is a number that
    nobody reads, since a function cannot return None among others in Triton 3.6."""
    factor: Any
    unit: Any
    per_unit: Any  # 1 / unit
    slope: Any  # in units
    bias: Any  # a pointer to that of row 0 and key 0
    seqlen_q: Any
    seqlen_k: Any


class Scores(NamedTuple):
    """All that changes the scores of a tile. A parameter is None if the call does not use its option."""
    numbers: Any
    softcap: Any
    alibi_ptr: Any
    bias_ptr: Any
    row_stride: Any  # None: all rows share one
    key_stride: Any
    kFastTanh: Any


@triton.jit
def score_numbers(scale, softcap, alibi_ptr, bias_ptr, alibi_batch_stride, bias_batch_stride, bias_head_stride, seq, h):
    """The Numbers of head h of a Sequence. scale: of q·k, and the unit of scores that nothing changes."""
    factor, unit, per_unit, slope, bias = scale, scale, 1.0, 0.0, 0
    if softcap is not None:
        unit = tl.cast(softcap, tl.float32)
        factor, per_unit = scale / unit, 1 / unit
    elif alibi_ptr is not None or bias_ptr is not None:
        unit = 1.0
    if alibi_ptr is not None:
        slope = tl.load(alibi_ptr + seq.b * alibi_batch_stride + h) * per_unit
    if bias_ptr is not None:
        bias = bias_ptr + tl.cast(seq.b, tl.int64) * bias_batch_stride + tl.cast(h, tl.int64) * bias_head_stride
    return Numbers(factor, unit, per_unit, slope, bias, seq.seqlen_q, seq.seqlen_k)


@triton.jit
def capped(scores, s):
    """Turns s = q·k into factor · q·k, or into its tanh with a softcap. s is kept where nothing changes scores."""
    if scores.softcap is not None or scores.alibi_ptr is not None or scores.bias_ptr is not None:
        s *= scores.numbers.factor
    if scores.softcap is not None:
        s = _tanh(s, scores.kFastTanh)
    return s


@triton.jit
def through_cap(scores, ds, s):
    """Turns ds, the derivative by the score, into the derivative by factor · q·k. s: the result of capped."""
    if scores.softcap is not None:
        ds *= 1 - s * s
    return ds


@triton.jit
def shifted(scores, s, rows, cols, kIsFull: tl.constexpr = False, kClamps: tl.constexpr = True):
    """Adds ALiBi and the bias to s, the result of capped. One of rows and cols is [:, None], the other [None, :].

    kIsFull: there is a key for each of cols. kClamps: a finite bias below LOWEST counts as LOWEST. Without kClamps a
    low bias is kept, unless there is a softcap.
    """
    if scores.alibi_ptr is not None:
        distances = (rows + (scores.numbers.seqlen_k - scores.numbers.seqlen_q)).to(tl.float32) - cols.to(tl.float32)
        s -= scores.numbers.slope * tl.abs(distances)
    if scores.bias_ptr is not None:
        bias = _load_bias(scores, rows, cols, kIsFull)
        if bias.dtype == tl.uint8:  # a mask
            s = tl.where(bias != 0, s, float("-inf"))
        elif not kClamps and scores.softcap is None:
            s += bias.to(tl.float32)
        else:
            bias = bias.to(tl.float32)
            in_units = bias
            if scores.softcap is not None:
                in_units *= scores.numbers.per_unit
            # -inf and NaN stay what they are.
            s += tl.where(bias > float("-inf"), tl.maximum(in_units, LOWEST), bias)
    return s


@triton.jit
def _load_bias(scores, rows, cols, kIsFull: tl.constexpr):
    """Loads the bias of a tile. Along a dimension in which all share one bias, the size is 1. Rows beyond the end read
    the last row. Keys beyond the end get 0; with kIsFull there are none."""
    pointers = scores.numbers.bias
    if scores.row_stride is not None:
        pointers += tl.maximum(tl.minimum(rows, scores.numbers.seqlen_q - 1), 0).to(tl.int64) * scores.row_stride
    if scores.key_stride is not None:
        pointers += cols.to(tl.int64) * scores.key_stride
    if scores.key_stride is None or kIsFull:
        bias = tl.load(pointers)
    else:
        bias = tl.load(pointers, mask=cols < scores.numbers.seqlen_k, other=0)
    return bias


@triton.jit
def _tanh(x, kFast: tl.constexpr):
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


def score_tensors(options):
    """(alibi_slopes, attn_bias) as kernels take them: a mask in bytes."""
    bias = options.attn_bias
    return options.alibi_slopes, bias.view(torch.uint8) if bias is not None and bias.dtype == torch.bool else bias


def score_constants(q, alibi_slopes, bias, softcap):
    """alibi_batch_stride, the four strides of the bias and kFastTanh of a kernel; None for what it goes without."""
    alibi_batch_stride = None if alibi_slopes is None else alibi_slopes.stride(0) if alibi_slopes.ndim == 2 else 0
    strides = [None] * 4
    if bias is not None:
        shared = 0, 0, None, None
        strides = [x if n == 1 else stride for n, stride, x in zip(bias.shape, bias.stride(), shared)]
    # To 16 bits an approximation is enough.
    is_fast = softcap is not None and q.itemsize < 4 and properties(q.device).capability >= 75
    return alibi_batch_stride, *strides, is_fast


def bias_bytes(bias):
    """Bytes of a bias for each score of a tile, 0 where a row or a column is enough."""
    return 0 if bias is None or 1 in bias.shape[2:] else bias.itemsize


def kind_of_scores(alibi_slopes, bias, softcap):
    """The part of a tuning key that says how a call changes its scores."""
    of_bias = None if bias is None else (str(bias.dtype), bias.shape[2] > 1, bias.shape[3] > 1)
    return alibi_slopes is not None, of_bias, softcap is not None
