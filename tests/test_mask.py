"""The mask of the Triton kernels, function by function, against a boolean matrix for all small lengths."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = pytest.importorskip("triton.language")

from conftest import HAS_GPU  # noqa: E402

from triton_ref.mask import (block_of, has_keys, key_blocks, keys_of, make_mask, row_blocks,  # noqa: E402
                             rows_of, seen_by, sees, sequence, steps)

DEVICE = "cuda" if HAS_GPU else "cpu"
SIZE = 16  # rows and keys of a matrix
FULL, CUT = tl.constexpr(1), tl.constexpr(100)  # what a visit adds to its block


@triton.jit
def _visit(out, blocks, kMasked: tl.constexpr):
    loop = steps(blocks, kMasked)
    for step in range(loop.begin, loop.end):
        block = out + block_of(blocks, step, kMasked)
        tl.store(block, tl.load(block) + (CUT if kMasked else FULL))


@triton.jit
def _masks(seq_lens_ptr, seqlens_q_ptr, seqlens_k_ptr, sees_ptr, seen_by_ptr, has_keys_ptr, key_visits_ptr,
           row_visits_ptr, kIsCausal: tl.constexpr, kBlockM: tl.constexpr, kBlockN: tl.constexpr, kSize: tl.constexpr):
    """All of one sample: matrices [kSize, kSize], and the blocks that each tile visits, [tiles, blocks]."""
    b = tl.program_id(0)
    seq = sequence(seq_lens_ptr, b, tl.load(seqlens_q_ptr + b), tl.load(seqlens_k_ptr + b))
    mask = make_mask(seq, kIsCausal)
    rows, cols = tl.arange(0, kSize), tl.arange(0, kSize)
    matrix = b * kSize * kSize + tl.arange(0, kSize)[:, None] * kSize + tl.arange(0, kSize)[None, :]
    tl.store(sees_ptr + matrix, sees(keys_of(mask, rows), cols))
    tl.store(seen_by_ptr + matrix, seen_by(rows_of(mask, cols), rows, True))
    tl.store(has_keys_ptr + b * kSize + rows, has_keys(mask, rows))
    kTilesM: tl.constexpr = kSize // kBlockM
    kTilesN: tl.constexpr = kSize // kBlockN
    for i in range(kTilesM):
        blocks = key_blocks(mask, i * kBlockM, kBlockM, kBlockN)
        _visit(key_visits_ptr + (b * kTilesM + i) * kTilesN, blocks, False)
        _visit(key_visits_ptr + (b * kTilesM + i) * kTilesN, blocks, True)
    for i in range(kTilesN):
        blocks = row_blocks(mask, i * kBlockN, kBlockM, kBlockN)
        _visit(row_visits_ptr + (b * kTilesN + i) * kTilesM, blocks, False)
        _visit(row_visits_ptr + (b * kTilesN + i) * kTilesM, blocks, True)


def visible(seqlen_q, seqlen_k, causal):
    """Which key [.., cols] a row [rows, ..] sees."""
    rows, cols = torch.arange(SIZE)[:, None], torch.arange(SIZE)[None, :]
    is_seen = (rows < seqlen_q) & (cols < seqlen_k)
    return is_seen & (cols <= rows + seqlen_k - seqlen_q) if causal else is_seen


def visits(is_seen, size, tile, block):
    """By tile of rows and block of columns: how a kernel visits it. Of the rows, only `size` are valid."""
    expected = torch.zeros(SIZE // tile, SIZE // block, dtype=torch.int32)
    for i in range(SIZE // tile):
        part = is_seen[i * tile:min((i + 1) * tile, size)]
        for j in range(SIZE // block):
            cell = part[:, j * block:(j + 1) * block]
            if cell.any():
                expected[i, j] = FULL.value if cell.all() else CUT.value
    return expected


def check(seq_lens, seqlens_q, seqlens_k, causal, kBlockM, kBlockN):
    """Run the kernel for samples of these sizes, cut to seq_lens unless that is None, and compare all that it found."""
    n = len(seqlens_q)
    sees_out, seen_by_out = (torch.zeros(n, SIZE, SIZE, dtype=torch.bool, device=DEVICE) for _ in range(2))
    has_keys_out = torch.zeros(n, SIZE, dtype=torch.bool, device=DEVICE)
    key_visits = torch.zeros(n, SIZE // kBlockM, SIZE // kBlockN, dtype=torch.int32, device=DEVICE)
    row_visits = torch.zeros(n, SIZE // kBlockN, SIZE // kBlockM, dtype=torch.int32, device=DEVICE)
    sizes = [None if x is None else torch.tensor(x, dtype=torch.int32, device=DEVICE)
             for x in (seq_lens, seqlens_q, seqlens_k)]
    _masks[(n,)](*sizes, sees_out, seen_by_out, has_keys_out, key_visits, row_visits, causal, kBlockM, kBlockN, SIZE)
    for b, (seqlen_q, seqlen_k) in enumerate(zip(seqlens_q, seqlens_k)):
        if seq_lens is not None:
            seqlen_q, seqlen_k = (max(0, min(seq_lens[b], x)) for x in (seqlen_q, seqlen_k))
        is_seen, name = visible(seqlen_q, seqlen_k, causal), f"{seqlen_q} rows, {seqlen_k} keys"
        assert torch.equal(sees_out[b].cpu(), is_seen), name
        assert torch.equal(seen_by_out[b].cpu(), is_seen.T), name
        if seqlen_k:
            assert torch.equal(has_keys_out[b, :seqlen_q].cpu(), is_seen.any(1)[:seqlen_q]), name
        assert torch.equal(key_visits[b].cpu(), visits(is_seen, seqlen_q, kBlockM, kBlockN)), name
        assert torch.equal(row_visits[b].cpu(), visits(is_seen.T, seqlen_k, kBlockN, kBlockM)), name


@pytest.mark.parametrize("kBlockM, kBlockN", [(4, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_length(causal, kBlockM, kBlockN):
    lengths = range(1, 12)
    check(None, [n for n in lengths for _ in lengths], [n for _ in lengths for n in lengths], causal, kBlockM, kBlockN)


@pytest.mark.parametrize("causal", [False, True])
def test_a_length_of_each_sample(causal):
    """Lengths below 0 and above that of the tensors, which only the GPU may see, are brought into them."""
    seq_lens = [-3, *range(15)]
    check(seq_lens, [11] * len(seq_lens), [11] * len(seq_lens), causal, 4, 4)
