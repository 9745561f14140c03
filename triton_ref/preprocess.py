"""Numbers of each row that the backward pass needs beside its tensors: delta, and lse, from which P is formed again.

_preprocess writes both to tensors whose rows are padded, so that every tile is whole. If dsinks is
needed, it also writes what each row adds to it. Read next: attention.py.
"""

import triton
import triton.language as tl

from .attention import _load, block_d, matrix_of
from .launching import PACKED_SIZES, Launch, num_samples
from .sequence import block_of_slot, head_of, num_slots, sequence, strides_of

LOG2_E = tl.constexpr(1.4426950408889634)
PAD = 128  # rows of delta and lse_padded come in multiples of this, as no tile has more
kPad = tl.constexpr(PAD)


@triton.jit(do_not_specialize=["batch_size"])
def _preprocess(o_ptr, dout_ptr, lse_ptr, dlse_ptr, sinks_ptr, delta_ptr, lse_padded_ptr, dsinks_ptr, lengths,
                softmax_scale, strides, batch_size, nheads, seqlen_q, seqlen_pad, head_dim_v, kBlockM: tl.constexpr,
                kBlockDv: tl.constexpr):
    """delta = rowsum(dO ∘ O) - dlse, and lse as probabilities takes it, both (B, H, seqlen_pad). In a packed batch
    sample b begins at its first slot of kPad rows. With sinks_ptr also -exp(sink - lse) · delta of each row.

    Rows whose lse is -inf get delta 0, whatever dO and dlse hold, and lse inf, so that their P is 0. So do the rows
    behind a sample's end, which make every tile whole. A row without keys may have a sink as its lse: its O is 0, and
    its dO may be NaN.
    """
    m_blocks = tl.cdiv(seqlen_pad, kBlockM)
    bh = (tl.program_id(0) // m_blocks).to(tl.int64)
    b, h = bh // nheads, bh % nheads
    row0 = tl.program_id(0) % m_blocks * kBlockM  # of delta; row 0 of a sample is row q_begin of o
    rows_of_delta = row0 + tl.arange(0, kBlockM)
    q_begin, row_end = 0, seqlen_q
    o_strides, dout_strides, dlse_strides = strides
    if lengths.cu_seqlens_q is not None:
        sample, slot = block_of_slot(lengths.cu_seqlens_q, row0 // kPad, batch_size, seqlen_q, kPad)
        seq = sequence(lengths, sample, batch_size, seqlen_q, seqlen_q)
        q_begin, row_end, row0 = seq.q_begin, seq.seqlen_q, slot * kPad + row0 % kPad
    rows = row0 + tl.arange(0, kBlockM)
    is_row = rows < row_end
    o = matrix_of(o_ptr, o_strides, b, h, q_begin, row_end, head_dim_v)
    dout = matrix_of(dout_ptr, dout_strides, b, h, q_begin, row_end, head_dim_v)
    o, dout = _load(o, row0, True, True, kBlockM, kBlockDv), _load(dout, row0, True, True, kBlockM, kBlockDv)
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
        # The factor is not log2(e) but what the rounded softmax_scale_log2 has made of it. One rounding, hence fp64.
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
    """P = exp(softmax_scale · S - lse), with lse of _preprocess, which broadcasts to the shape of S.

    At large scores the exponent is a small difference of large numbers. lse was rounded, and the FMA here adds no other
    rounding. lse is natural in fp32, and in powers of two in 16 bits, which spares a multiplication an element.

    Only rounding can make the exponent positive. Its sign is then flipped: the error keeps its size, and P is at most
    1. Unlike a minimum, this takes no instruction of its own, and a NaN stays NaN.
    """
    if kIsFp32:
        p = tl.exp2(tl.abs(s * softmax_scale - lse) * -LOG2_E)
    else:
        p = tl.exp2(tl.abs(s * in_log2(softmax_scale) - lse) * -1.0)  # a sign, where Triton's minus is 0 - x
    return p


@triton.jit
def first_padded_row(seq):
    """The first row of a Sequence of a packed batch in delta and lse_padded."""
    return (seq.q_begin // kPad + seq.b) * kPad


@triton.jit
def load_per_row(x, bh, row0, seqlen_pad, kBlockM: tl.constexpr, kTma: tl.constexpr):
    """[kBlockM] of delta or lse_padded. By TMA they come once; as a load of pointers each thread would copy all that it
    needs, four bytes at a time."""
    if kTma:
        values = x.load([bh, row0]).reshape(kBlockM)
    else:
        values = tl.load(x + bh.to(tl.int64) * seqlen_pad + row0 + tl.arange(0, kBlockM))
    return values


_preprocess_packed = triton.jit(do_not_specialize=PACKED_SIZES)(_preprocess.fn)


def padded_rows(seqlen_q, lengths, num_samples):
    """How many rows of a head delta and lse_padded have."""
    return num_slots.fn(lengths.cu_seqlens_q, num_samples, seqlen_q, PAD) * PAD


def launch_preprocess(out, dout, lse, dlse, sinks, delta, lse_padded, dsinks, lengths):
    """A Launch of _preprocess, to be called with these and softmax_scale. sinks and dsinks: None where the gradient is
    not needed. lengths: those of the rows alone."""
    (nheads, seqlen_q, head_dim_v), seqlen_pad, kBlockM = out.shape[1:], delta.shape[1], 64
    constants = (strides_of(out, dout, dlse), num_samples(out, lengths), nheads, seqlen_q, seqlen_pad, head_dim_v,
                 kBlockM, block_d(out.dtype, head_dim_v))
    function = _preprocess_packed if lengths.is_packed else _preprocess
    return Launch(function, seqlen_pad // kBlockM * delta.shape[0], constants)
