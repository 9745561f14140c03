"""Which keys a query row sees, and which rows see a key: one mask for all kernels of the twin, forward and backward.

It is that of csrc/sequence.cuh and csrc/mask.cuh. The keys of a row are one range, and neither end of it moves back
from one row to the next. So the blocks that a tile of rows needs are a range too. The full blocks, which all its rows
see whole, are a range within it. They need no mask. The other ones, before and after them, are cut by the mask. Today
the range of a row begins at key 0. sees and attention_hopper.py rely on that.

Triton and Gluon share these functions: a jit function is compiled in the language of the kernel that calls it. A value
of a NamedTuple is a number or a tensor there.

Read next: launching.py, what the host does for a launch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Sequence(NamedTuple):
    """How many rows and keys of a sample are valid. After them comes padding, up to the sizes of the tensors."""
    seqlen_q: Any
    seqlen_k: Any


class Mask(NamedTuple):
    seqlen_q: Any  # those of the Sequence
    seqlen_k: Any
    diagonal: Any  # row i sees the keys j <= i + diagonal
    kIsCausal: Any  # False: every row sees every key


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
def sequence(seq_lens_ptr, b, seqlen_q, seqlen_k):
    """The Sequence of sample b. Only this function reads seq_lens."""
    if seq_lens_ptr is not None:
        seq_len = tl.maximum(tl.load(seq_lens_ptr + b), 0)
        seqlen_q = tl.minimum(seq_len, seqlen_q)
        seqlen_k = tl.minimum(seq_len, seqlen_k)
    return Sequence(seqlen_q, seqlen_k)


@triton.jit
def make_mask(seq, kIsCausal: tl.constexpr):
    """The Mask of a sample: of all its keys, or with kIsCausal aligned bottom-right."""
    diagonal = seq.seqlen_k  # beyond every key, for every row
    if kIsCausal:
        diagonal = seq.seqlen_k - seq.seqlen_q
    return Mask(seq.seqlen_q, seq.seqlen_k, diagonal, kIsCausal)


@triton.jit
def keys_of(mask, row):
    """The keys that a row, or each of several, sees. A row beyond seqlen_q sees none."""
    end = tl.minimum(row + 1, mask.seqlen_k - mask.diagonal) + mask.diagonal  # at most seqlen_k; no sum overflows
    return Range(0, tl.where(row < mask.seqlen_q, tl.maximum(end, 0), 0))


@triton.jit
def has_keys(mask, row):
    """Whether a valid row sees a key, if the sample has keys. This takes fewer instructions than keys_of."""
    return row + mask.diagonal >= 0


@triton.jit
def rows_of(mask, key):
    """The rows that see a key, or each of several. A key beyond seqlen_k is seen by none."""
    begin = tl.maximum(tl.minimum(mask.seqlen_q, key - mask.diagonal), 0)
    return Range(tl.where(key < mask.seqlen_k, begin, mask.seqlen_q), mask.seqlen_q)


@triton.jit
def key_blocks(mask, row0, kBlockM: tl.constexpr, kBlockN: tl.constexpr):
    """Blocks of kBlockN keys for the rows [row0, row0 + kBlockM). Rows beyond seqlen_q do not count."""
    first = keys_of(mask, row0)
    last = keys_of(mask, tl.minimum(row0 + kBlockM, mask.seqlen_q) - 1)
    end = tl.where(row0 < mask.seqlen_q, tl.cdiv(last.end, kBlockN), 0)
    return BlockRange(0, 0, first.end // kBlockN, end)


@triton.jit
def row_blocks(mask, key0, kBlockM: tl.constexpr, kBlockN: tl.constexpr):
    """Blocks of kBlockM rows for the keys [key0, key0 + kBlockN). Keys beyond seqlen_k do not count."""
    end = tl.where(key0 < mask.seqlen_k, mask.seqlen_q, 0)
    begin, full_begin = 0, 0  # numbers that the compiler knows save registers, and so may fit another block on an SM
    if mask.kIsCausal:
        last_key = tl.minimum(key0 + kBlockN, mask.seqlen_k) - 1
        begin = tl.minimum(rows_of(mask, key0).begin, end) // kBlockM
        full_begin = tl.cdiv(tl.minimum(rows_of(mask, last_key).begin, end), kBlockM)
    return BlockRange(begin, full_begin, tl.maximum(end // kBlockM, full_begin), tl.cdiv(end, kBlockM))


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
def sees(visible, cols):
    """Whether each row sees each key: bool [rows, cols], with visible = keys_of(mask, rows)."""
    return cols[None, :] < visible.end[:, None]  # visible.begin is 0


@triton.jit
def seen_by(seeing, rows, kRaggedRows: tl.constexpr):
    """Whether each row sees each key, transposed: bool [cols, rows], with seeing = rows_of(mask, cols). Without
    kRaggedRows no row is beyond seqlen_q."""
    if kRaggedRows:  # row -1 sees no key, for begin is at least 0
        rows = tl.where(rows < seeing.end, rows, -1)
    return rows[None, :] >= seeing.begin[:, None]
