"""Which keys a query row sees, and which rows see a key: one mask for all kernels of the twin, forward and backward.

It is the mask of csrc/common/mask.cuh. The keys of a row are one range, and neither end of it moves back from one row
to the next. So the blocks that a tile of rows needs are a range too. The full blocks, which all its rows see whole, are
a range within it. They need no mask. The other ones, before and after them, are cut by the mask.

Without a window the range of a row begins at key 0, and without a mask that of a key at row 0. The compiler finds out
both, since it knows the flags of a mask. That saves registers, and so may fit another block on an SM.
attention_hopper.py relies on the first.

Triton and Gluon share these functions: a jit function is compiled in the language of the kernel that calls it. A value
of a NamedTuple is a number or a tensor there.

Read next: launching.py, what the host does for a launch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Mask(NamedTuple):
    seqlen_q: Any  # those of the Sequence
    seqlen_k: Any
    left: Any  # with kIsLocal row i sees the keys j >= i + left
    right: Any  # with kIsCausal or kIsLocal row i sees the keys j <= i + right
    kIsCausal: Any  # these two are compiled in; with neither every row sees every key
    kIsLocal: Any


class Range(NamedTuple):
    """[begin, end)"""
    begin: Any
    end: Any


class BlockRange(NamedTuple):
    """Blocks [begin, end) are needed, and those of them in [full_begin, full_end) need no mask."""
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


@triton.jit
def make_mask(seq, window_left, window_right, kIsCausal: tl.constexpr, kIsLocal: tl.constexpr):
    """The Mask of a Sequence, aligned bottom-right: the last row is at the last key. A row sees all keys, or with
    kIsCausal those up to its own, or with kIsLocal those from window_left before its own to window_right after it."""
    left, right = 0, seq.seqlen_k  # beyond every key, for every row
    if kIsCausal:
        right = seq.seqlen_k - seq.seqlen_q
    if kIsLocal:  # a window that reaches beyond all keys is cut, so that no sum overflows
        left = seq.seqlen_k - seq.seqlen_q - tl.minimum(window_left, seq.seqlen_k)
        right = seq.seqlen_k - seq.seqlen_q + tl.minimum(window_right, seq.seqlen_q)
    return Mask(seq.seqlen_q, seq.seqlen_k, left, right, kIsCausal, kIsLocal)


@triton.jit
def keys_of(mask, row):
    """The keys that a row, or each of several, sees. A row beyond seqlen_q sees none."""
    begin = tl.where(mask.kIsLocal, tl.maximum(row + mask.left, 0), 0)
    end = tl.minimum(row + 1, mask.seqlen_k - mask.right) + mask.right  # at most seqlen_k; no sum overflows
    return Range(begin, tl.where(row < mask.seqlen_q, tl.maximum(end, 0), 0))


@triton.jit
def has_keys(mask, row):
    """Whether a valid row sees a key, if the sample has keys. This takes fewer instructions than keys_of."""
    return row + mask.right >= 0


@triton.jit
def rows_of(mask, key):
    """The rows that see a key, or each of several. A key beyond seqlen_k is seen by none."""
    begin = tl.maximum(tl.minimum(mask.seqlen_q, key - mask.right), 0)
    end = tl.minimum(key + 1, mask.seqlen_q + mask.left) - mask.left  # at most seqlen_q; no sum overflows
    end = tl.where(mask.kIsLocal, tl.maximum(end, 0), mask.seqlen_q)
    return Range(tl.where(key < mask.seqlen_k, begin, mask.seqlen_q), end)


@triton.jit
def key_blocks(mask, row0, kBlockM: tl.constexpr, kBlockN: tl.constexpr):
    """Blocks of kBlockN keys for the rows [row0, row0 + kBlockM). Rows beyond seqlen_q do not count."""
    first = keys_of(mask, row0)
    last = keys_of(mask, tl.minimum(row0 + kBlockM, mask.seqlen_q) - 1)
    end = tl.where(row0 < mask.seqlen_q, tl.cdiv(last.end, kBlockN), 0)
    full_begin, full_end = tl.cdiv(last.begin, kBlockN), first.end // kBlockN
    full_end = tl.where(mask.kIsLocal, tl.maximum(full_end, full_begin), full_end)
    return BlockRange(first.begin // kBlockN, full_begin, full_end, end)


@triton.jit
def row_blocks(mask, key0, kBlockM: tl.constexpr, kBlockN: tl.constexpr):
    """Blocks of kBlockM rows for the keys [key0, key0 + kBlockN). Keys beyond seqlen_k do not count."""
    end = tl.where(key0 < mask.seqlen_k, mask.seqlen_q, 0)
    begin, full_begin, full_end = 0, 0, end // kBlockM
    if mask.kIsCausal or mask.kIsLocal:
        first, last = rows_of(mask, key0), rows_of(mask, tl.minimum(key0 + kBlockN, mask.seqlen_k) - 1)
        full_end = tl.minimum(first.end, end) // kBlockM
        end = tl.minimum(last.end, end)
        begin = tl.minimum(first.begin, end) // kBlockM
        full_begin = tl.cdiv(tl.minimum(last.begin, end), kBlockM)
    return BlockRange(begin, full_begin, tl.maximum(full_end, full_begin), tl.cdiv(end, kBlockM))


@triton.jit
def steps(blocks, kMasked: tl.constexpr):
    """The range of a loop over the full blocks, with kMasked over the cut ones. block_of gives the block of a step."""
    begin, end = blocks.full_begin, blocks.full_end
    if kMasked:
        begin, end = blocks.begin + (blocks.full_end - blocks.full_begin), blocks.end
    return Range(begin, end)


@triton.jit
def block_of(blocks, step, kMasked: tl.constexpr):
    """The block of a step of steps(blocks, kMasked)."""
    block = step
    if kMasked:  # the steps of the cut blocks before the full ones are shifted up by the number of full blocks
        block = tl.where(step < blocks.full_end, step - (blocks.full_end - blocks.full_begin), step)
    return block


@triton.jit
def sees(visible, cols, kIsLocal: tl.constexpr):
    """Whether each row sees each key: bool [rows, cols], with visible = keys_of(mask, rows)."""
    is_seen = cols[None, :] < visible.end[:, None]
    if kIsLocal:
        is_seen &= cols[None, :] >= visible.begin[:, None]
    return is_seen


@triton.jit
def seen_by(seeing, rows, seqlen_q, kIsLocal: tl.constexpr, kRaggedRows: tl.constexpr):
    """Whether each row sees each key, transposed: bool [cols, rows], with seeing = rows_of(mask, cols). Without
    kRaggedRows no row is beyond seqlen_q, that of the mask."""
    if kIsLocal:
        is_seen = (rows[None, :] >= seeing.begin[:, None]) & (rows[None, :] < seeing.end[:, None])
    else:
        if kRaggedRows:  # row -1 sees no key, for begin is at least 0
            rows = tl.where(rows < seqlen_q, rows, -1)
        is_seen = rows[None, :] >= seeing.begin[:, None]
    return is_seen
