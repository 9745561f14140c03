"""The mask of minimal_attn/dropout.py, one tile at a time, for the kernels of both passes.

Read next: attention.py and attention_bwd_kernels.py, which drop by it.
"""

import torch
import triton
import triton.language as tl

from minimal_attn.dropout import MASK32, drop_threshold, keep_scale


@triton.jit
def keep_tile(seed_ptr, threshold, b, h, row0, col0, kBlockM: tl.constexpr, kBlockN: tl.constexpr):
    """Which probabilities survive: bool [kBlockM, kBlockN] from row0 and col0 on, multiples of 16 and of 2.

    tl.philox is Philox-4x32-10. One call serves rows r, r + 8 and columns 2c, 2c + 1, which one thread of a tensor core
    product holds: the compiler finds that, so that joining the words moves nothing between threads.

    seed_ptr: to uint64 if the origins of the samples follow, see seed_of.
    """
    if seed_ptr.dtype.element_ty == tl.uint64:
        origin_ptr = seed_ptr + 1 + 4 * b
        row0 += tl.load(origin_ptr).to(tl.int32)
        col0 += tl.load(origin_ptr + 1).to(tl.int32)
        h += tl.load(origin_ptr + 2).to(tl.int32)
        b = tl.load(origin_ptr + 3).to(tl.int32)
    rows = row0 // 2 + tl.arange(0, kBlockM // 2)  # row // 16 * 8 + row % 8
    pairs = col0 // 2 + tl.arange(0, kBlockN // 2)
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), rows[:, None], pairs[None, :], h, b)
    threshold = threshold.to(tl.uint32, bitcast=True)
    even = tl.join(w0 >= threshold, w2 >= threshold)  # [kBlockM / 2, kBlockN / 2, row // 8 % 2]
    odd = tl.join(w1 >= threshold, w3 >= threshold)
    keep = tl.join(even, odd).reshape(kBlockM // 16, 8, kBlockN // 2, 2, 2)
    return keep.permute(0, 3, 1, 2, 4).reshape(kBlockM, kBlockN)


def seed_of(options):
    """The seed of a kernel, or None for no dropout. A seed_with_origins goes as uint64: a kernel is compiled for it."""
    seed = options.dropout_seed
    return seed if seed is None or seed.numel() == 1 else seed.view(torch.uint64)


def threshold_and_scale(dropout_p):
    """(threshold, keep_scale) of a kernel; those of 0 where a seed of None says that there is no dropout.

    The threshold goes as the int32 with its bits, the only type that every launch then has. At dropout_p = 1 it keeps
    one element in 2³², and the scale of 0 drops that.
    """
    threshold = min(drop_threshold(dropout_p), MASK32)
    return threshold - (threshold >> 31 << 32), keep_scale(dropout_p)
