"""Which sample a program works on, how long it is, and where its rows are, as csrc/common/sequence.cuh does.

In a padded batch every sample is an element of the first dimension. In a packed one the samples lie one after the other
in the rows of a single element, and cu_seqlens says where each begins. The host never reads it: the programs of a head
have slots, of kBlock rows each, and every program finds out on the device whose slot it has.

Only this file reads cu_seqlens, seqused and leftpad in a kernel, and clamps their values to the tensors. Triton and
Gluon share its functions, as those of mask.py. Read next: mask.py, which keys a row sees.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Strides(NamedTuple):
    """The strides of the first three dimensions of a tensor."""
    batch: Any
    head: Any
    row: Any


class Sequence(NamedTuple):
    """Rows [0, seqlen_q) and keys [0, seqlen_k) of sample b are valid. The rest is padding, up to padded_q and
    padded_k. Kernels write zeros there."""
    b: Any
    q_begin: Any  # its first row in q and in k: 0 in a padded batch
    k_begin: Any
    seqlen_q: Any
    seqlen_k: Any
    padded_q: Any
    padded_k: Any


@triton.jit
def sequence(lengths, b, batch_size, seqlen_q, seqlen_k, leftpad_k_ptr=None):
    """The Sequence of sample b. lengths: minimal_attn.options.Lengths. seqlen_q, seqlen_k: rows of the tensors, or the
    keys that a cache has room for."""
    q_begin, padded_q = 0, seqlen_q  # numbers that the compiler knows save registers
    k_begin, padded_k = 0, seqlen_k
    if lengths.cu_seqlens_q is not None:
        q_begin, padded_q, seqlen_q = _packed(lengths.cu_seqlens_q, b, batch_size, seqlen_q)
    if lengths.cu_seqlens_k is not None:
        k_begin, padded_k, packed_k = _packed(lengths.cu_seqlens_k, b, batch_size, seqlen_k)
        if lengths.seqused_k is None:
            seqlen_k = packed_k
        else:  # the keys of several samples may be the same ones
            seqlen_k -= k_begin
    seqlen_q, seqlen_k = used(lengths.seqused_q, b, seqlen_q), used(lengths.seqused_k, b, seqlen_k)
    if leftpad_k_ptr is not None:
        k_begin = tl.maximum(tl.load(leftpad_k_ptr + b), 0)
        seqlen_k = tl.maximum(seqlen_k - k_begin, 0)
    return Sequence(b, q_begin, k_begin, seqlen_q, seqlen_k, padded_q, padded_k)


@triton.jit
def new_rows(cu_seqlens_new_ptr, seqused_k_ptr, b, batch_size, seqlen_new, capacity):
    """(how many new rows sample b has for a cache, how many of the places that it has there are taken before them)."""
    count = seqlen_new
    if cu_seqlens_new_ptr is not None:
        _, _, count = _packed(cu_seqlens_new_ptr, b, batch_size, seqlen_new)
    return count, used(seqused_k_ptr, b, capacity)


@triton.jit
def rotary_row(cos_ptr, rotary_seqlens_ptr, seqused_k_ptr, b, i, capacity, seqlen_rotary):
    """The row for row i of sample b in the tables of cos and sin, or 0 without tables."""
    row = 0
    if cos_ptr is not None:
        if rotary_seqlens_ptr is not None:
            first = tl.load(rotary_seqlens_ptr + b)
        else:
            first = used(seqused_k_ptr, b, capacity)
        position = tl.cast(first, tl.int64) + i
        row = tl.maximum(tl.minimum(position, tl.cast(seqlen_rotary, tl.int64) - 1), 0)
    return row


@triton.jit
def used(seqused_ptr, b, seqlen):
    """How many rows sample b uses, of the seqlen rows that it may use."""
    if seqused_ptr is not None:
        seqlen = tl.minimum(tl.maximum(tl.load(seqused_ptr + b), 0), seqlen)
    return seqlen


@triton.jit
def _packed(cu_seqlens_ptr, b, batch_size, total):
    """(where sample b begins, how many rows it owns, how many of them it could use). The last sample also owns the rows
    that cu_seqlens leaves over."""
    begin = _begin(cu_seqlens_ptr, b, total)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b + 1), 0), total)
    padded = tl.where(b + 1 == batch_size, total, end) - begin
    return begin, tl.maximum(padded, 0), tl.maximum(end - begin, 0)


@triton.jit
def _begin(cu_seqlens_ptr, b, total):
    """The first row of sample b."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + b), 0), total)
    return tl.where(b == 0, 0, begin)


@triton.jit
def num_slots(cu_seqlens_ptr, batch_size, seqlen, kBlock: tl.constexpr, kGroup: tl.constexpr = 1):
    """How many blocks of kBlock rows a head has, in a packed batch at most. The kernels and the host call this. kGroup:
    each row of the tensor counts as so many."""
    slots = (seqlen * kGroup + kBlock - 1) // kBlock
    if cu_seqlens_ptr is not None:
        slots = seqlen * kGroup // kBlock + batch_size
    return slots


@triton.jit
def _first_slot(cu_seqlens_ptr, b, total, kBlock: tl.constexpr, kGroup: tl.constexpr, kSpare: tl.constexpr):
    """First slot of sample b in a packed batch. With a spare slot a sample there are enough slots for all its rows."""
    return _begin(cu_seqlens_ptr, b, total) * kGroup // kBlock + b * kSpare


@triton.jit
def block_of_slot(cu_seqlens_ptr, slot, batch_size, total, kBlock: tl.constexpr, kGroup: tl.constexpr = 1,
                  kSpare: tl.constexpr = 1):
    """(b, block) of a slot of a packed batch: the last sample whose first slot is not behind it, by bisection. The
    block may lie behind the sample's end."""
    b, end = 0, batch_size
    while b + 1 < end:
        middle = (b + end) // 2
        is_behind = _first_slot(cu_seqlens_ptr, middle, total, kBlock, kGroup, kSpare) > slot
        b = tl.where(is_behind, b, middle)
        end = tl.where(is_behind, middle, end)
    return b, slot - _first_slot(cu_seqlens_ptr, b, total, kBlock, kGroup, kSpare)


@triton.jit
def sample_row(cu_seqlens_ptr, index, batch_size, seqlen):
    """(b, i, element, row) of the row `index` of a padded or packed tensor: it is row i of sample b, and `row` of
    `element` in the tensor."""
    if cu_seqlens_ptr is not None:
        b, i = block_of_slot(cu_seqlens_ptr, index, batch_size, seqlen, 1, 1, 0)
        element, row = 0, index
    else:
        b, i = index // seqlen, index % seqlen
        element, row = b, i
    return b, i, element, row


@triton.jit
def head_of(x, strides, b, h, begin):
    """A pointer to row `begin` of head h of element b of the first dimension of x. strides: the Strides of x."""
    return (x + tl.cast(b, tl.int64) * strides.batch + tl.cast(h, tl.int64) * strides.head
            + tl.cast(begin, tl.int64) * strides.row)


def strides_of(*tensors):
    """The Strides of each tensor, or of None, as a kernel takes them."""
    return tuple(Strides(*(None,) * 3 if x is None else x.stride()[:3]) for x in tensors)
