"""Which keys a query row sees, and which rows see a key: one mask for all kernels of the twin, forward and backward.

It is the mask of csrc/common/mask.cuh. keys_of alone says which keys a row sees, and rows_of which rows see a key. Each
is one range, and neither end of it moves back from one row, or key, to the next. So the blocks that a tile needs are a
range too, and so are those of them that it sees whole and that need no mask.

The compiler knows the flags of a mask, and so that without a window a row's range begins at key 0, and without a mask a
key's at row 0. That saves registers, and so may fit another block on an SM. attention_hopper.py relies on the first.

Triton and Gluon share these functions: a jit function is compiled in the language of the kernel that calls it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Mask(NamedTuple):
    seqlen_q: Any  # those of the Sequence
    seqlen_k: Any
    left: Any  # with kIsLocal row i sees the keys j >= i + left
    right: Any  # with kIsCausal or kIsLocal row i sees the keys j <= i + right
    kIsCausal: Any  # these three are compiled in; with neither of two every row sees every key
    kIsLocal: Any
    kChunk: Any  # with kIsLocal, of the positions of keys; 0 is none


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
def make_mask(seq, window_left, window_right, kIsCausal: tl.constexpr, kIsLocal: tl.constexpr,
              kChunk: tl.constexpr = 0):
    """The Mask of a Sequence, aligned bottom-right: the last row is at the last key. With kIsLocal a row sees the keys
    from window_left before its own to window_right after it, of those in its own chunk."""
    left, right = 0, seq.seqlen_k  # beyond every key, for every row
    if kIsCausal:
        right = seq.seqlen_k - seq.seqlen_q
    if kIsLocal:  # a window that reaches beyond all keys is cut, so that no sum overflows
        left = seq.seqlen_k - seq.seqlen_q - tl.minimum(window_left, seq.seqlen_k)
        right = seq.seqlen_k - seq.seqlen_q + tl.minimum(window_right, seq.seqlen_q)
    return Mask(seq.seqlen_q, seq.seqlen_k, left, right, kIsCausal, kIsLocal, kChunk)


@triton.jit
def _chunk_of(mask, position):
    """The keys of a position's chunk; none before the first key."""
    size = tl.maximum(mask.kChunk, 1)
    begin = tl.maximum(position, 0) // size * size
    return Range(begin, tl.where(position < 0, 0, begin + tl.minimum(size, mask.seqlen_k - begin)))  # no sum overflows


@triton.jit
def keys_of(mask, row):
    """The keys that a row, or each of several, sees. A row beyond seqlen_q sees none."""
    begin = tl.where(mask.kIsLocal, tl.maximum(row + mask.left, 0), 0)
    end = tl.minimum(row + 1, mask.seqlen_k - mask.right) + mask.right  # at most seqlen_k; no sum overflows
    chunk = _chunk_of(mask, row + (mask.seqlen_k - mask.seqlen_q))
    begin = tl.where(mask.kChunk > 0, tl.maximum(begin, chunk.begin), begin)
    end = tl.where(mask.kChunk > 0, tl.minimum(end, chunk.end), end)
    return Range(begin, tl.where(row < mask.seqlen_q, tl.maximum(end, 0), 0))


@triton.jit
def has_keys(mask, row):
    """Whether a valid row sees a key, if the sample has keys: fewer instructions than keys_of takes."""
    diagonal = mask.seqlen_k - mask.seqlen_q
    return row + tl.where(mask.kChunk > 0, tl.minimum(mask.right, diagonal), mask.right) >= 0


@triton.jit
def rows_of(mask, key):
    """The rows that see a key, or each of several. A key beyond seqlen_k is seen by none."""
    begin = key - mask.right
    end = tl.minimum(key + 1, mask.seqlen_q + mask.left) - mask.left  # at most seqlen_q; no sum overflows
    chunk, diagonal = _chunk_of(mask, key), mask.seqlen_k - mask.seqlen_q
    begin = tl.where(mask.kChunk > 0, tl.maximum(begin, chunk.begin - diagonal), begin)
    end = tl.where(mask.kChunk > 0, tl.minimum(end, chunk.end - diagonal), end)
    begin = tl.maximum(tl.minimum(mask.seqlen_q, begin), 0)
    end = tl.where(mask.kIsLocal, tl.maximum(end, 0), mask.seqlen_q)
    return Range(tl.where(key < mask.seqlen_k, begin, mask.seqlen_q), end)


@triton.jit
def key_blocks(mask, row0, kBlockM: tl.constexpr, kBlockN: tl.constexpr):
    """Blocks of kBlockN keys for the rows [row0, row0 + kBlockM). Rows beyond seqlen_q do not count."""
    first, last = keys_of(mask, row0), keys_of(mask, tl.minimum(row0 + kBlockM, mask.seqlen_q) - 1)
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
    loop = Range(blocks.full_begin, blocks.full_end)
    if kMasked:
        loop = Range(blocks.begin + (blocks.full_end - blocks.full_begin), blocks.end)
    return loop


@triton.jit
def block_of(blocks, step, kMasked: tl.constexpr):
    """The block of a step of steps(blocks, kMasked)."""
    block = step
    if kMasked:  # the steps of the cut blocks before the full ones are shifted up by the number of full blocks
        block = tl.where(step < blocks.full_end, step - (blocks.full_end - blocks.full_begin), step)
    return block


@triton.jit
def sees(mask, visible, cols):
    """Whether each row sees each key: bool [rows, cols], with visible = keys_of(mask, rows)."""
    is_seen = cols[None, :] < visible.end[:, None]
    if mask.kIsLocal:
        is_seen &= cols[None, :] >= visible.begin[:, None]
    return is_seen


@triton.jit
def seen_by(mask, seeing, rows, kRaggedRows: tl.constexpr):
    """Whether each row sees each key, transposed: bool [cols, rows], with seeing = rows_of(mask, cols). Without
    kRaggedRows no row is beyond seqlen_q."""
    if mask.kIsLocal:
        is_seen = (rows[None, :] >= seeing.begin[:, None]) & (rows[None, :] < seeing.end[:, None])
    else:
        if kRaggedRows:  # row -1 sees no key, for begin is at least 0
            rows = tl.where(rows < mask.seqlen_q, rows, -1)
        is_seen = rows[None, :] >= seeing.begin[:, None]
    return is_seen
