"""The mask of minimal_attn/reference/dropout.py, one tile at a time, for the kernels of both passes."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minimal_attn.reference.dropout import BITS, ROUNDS, keep_count, keep_scale

assert BITS == 15  # as the kernels have it
kRounds = tl.constexpr(ROUNDS)


class Dropout(NamedTuple):
    seed: Any  # None: no dropout. A pointer to uint64 if the origins of the samples follow, see seed_of
    keep_count: Any  # a float, for no kernel is compiled for its value
    keep_scale: Any


@triton.jit
def keep_tile(dropout, b, h, row0, col0, kBlockM: tl.constexpr, kBlockN: tl.constexpr):
    """Which probabilities survive: bool [kBlockM, kBlockN] from row0 and col0 on, all multiples of 16.

    One call of Philox serves rows r, r + 8 and columns c, c + 1, c + 8 and c + 9, which one thread of a tensor core
    product holds: the compiler finds that, so that joining the words moves nothing between threads.
    """
    if dropout.seed.dtype.element_ty == tl.uint64:
        origin_ptr = dropout.seed + 1 + 4 * b
        row0 += tl.load(origin_ptr).to(tl.int32)
        col0 += tl.load(origin_ptr + 1).to(tl.int32)
        h += tl.load(origin_ptr + 2).to(tl.int32)
        b = tl.load(origin_ptr + 3).to(tl.int32)
    rows = row0 // 2 + tl.arange(0, kBlockM // 2)  # row // 16 * 8 + row % 8
    cols = col0 // 4 + tl.arange(0, kBlockN // 4)  # col // 16 * 4 + col % 8 // 2
    w0, w1, w2, w3 = tl.philox(tl.load(dropout.seed), rows[:, None], cols[None, :], h, b, kRounds)
    count = dropout.keep_count
    low_cols = tl.join(carries(w0, count), carries(w1, count))  # [kBlockM / 2, kBlockN / 4, row // 8 % 2]
    high_cols = tl.join(carries(w2, count), carries(w3, count))
    kept = tl.join(low_cols, high_cols)  # bit 15 is for an even column, and bit 31 for an odd one
    keep = tl.join((kept & 0x8000) != 0, (kept >> 31) != 0).reshape(kBlockM // 16, 8, kBlockN // 16, 4, 2, 2, 2)
    return keep.permute(0, 4, 1, 2, 5, 3, 6).reshape(kBlockM, kBlockN)


@triton.jit
def carries(word, keep_count):
    """Adds keep_count to 15 bits of each half of a word. The 16th bit of each sum says whether an element is kept."""
    return (word & 0x7FFF7FFF) + tl.cast(keep_count, tl.uint32) * 0x10001


NO_DROPOUT = Dropout(None, float(keep_count(0.0)), keep_scale(0.0))


def dropout_of(options):
    """The Dropout of a kernel. A seed_with_origins goes as uint64: a kernel is compiled for it."""
    seed, p = options.dropout_seed, options.dropout_p
    if seed is None:
        return NO_DROPOUT
    return Dropout(seed if seed.numel() == 1 else seed.view(torch.uint64), float(keep_count(p)), keep_scale(p))
