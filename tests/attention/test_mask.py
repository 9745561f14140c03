"""The mask of the Triton kernels, function by function, against boolean matrices for all small lengths and windows."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = pytest.importorskip("triton.language")

from conftest import HAS_GPU  # noqa: E402

from triton_ref.launching import mask_of  # noqa: E402
from triton_ref.mask import (block_of, has_keys, key_blocks, keys_of, make_mask, row_blocks,  # noqa: E402
                             rows_of, seen_by, sees, steps)
from triton_ref.sequence import sequence  # noqa: E402

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
def _masks(seqused_q_ptr, seqused_k_ptr, windows_ptr, sees_ptr, seen_by_ptr, has_keys_ptr, key_visits_ptr,
           row_visits_ptr, kIsCausal: tl.constexpr, kIsLocal: tl.constexpr, kBlockM: tl.constexpr,
           kBlockN: tl.constexpr, kSize: tl.constexpr):
    """All of one sample: matrices [kSize, kSize], and the blocks that each tile visits, [tiles, blocks]."""
    b = tl.program_id(0)
    seq = sequence(None, None, seqused_q_ptr, seqused_k_ptr, b, 0, kSize - 5, kSize - 5)
    mask = make_mask(seq, tl.load(windows_ptr + 2 * b), tl.load(windows_ptr + 2 * b + 1), kIsCausal, kIsLocal)
    rows, cols = tl.arange(0, kSize), tl.arange(0, kSize)
    matrix = b * kSize * kSize + tl.arange(0, kSize)[:, None] * kSize + tl.arange(0, kSize)[None, :]
    tl.store(sees_ptr + matrix, sees(keys_of(mask, rows), cols, kIsLocal))
    tl.store(seen_by_ptr + matrix, seen_by(rows_of(mask, cols), rows, mask.seqlen_q, kIsLocal, True))
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


def visible(seqlen_q, seqlen_k, window):
    """Which key [.., cols] a row [rows, ..] sees."""
    rows, cols = torch.arange(SIZE)[:, None], torch.arange(SIZE)[None, :]
    is_seen = (rows < seqlen_q) & (cols < seqlen_k)
    left, right = window
    if left >= 0:
        is_seen &= cols >= rows + seqlen_k - seqlen_q - left
    if right >= 0:
        is_seen &= cols <= rows + seqlen_k - seqlen_q + right
    return is_seen


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


def check(samples, kBlockM, kBlockN):
    """Run the kernel for samples (seqlen_q, seqlen_k, window), all with the same flags, and compare all it found."""
    n = len(samples)
    sees_out, seen_by_out = (torch.zeros(n, SIZE, SIZE, dtype=torch.bool, device=DEVICE) for _ in range(2))
    has_keys_out = torch.zeros(n, SIZE, dtype=torch.bool, device=DEVICE)
    key_visits = torch.zeros(n, SIZE // kBlockM, SIZE // kBlockN, dtype=torch.int32, device=DEVICE)
    row_visits = torch.zeros(n, SIZE // kBlockN, SIZE // kBlockM, dtype=torch.int32, device=DEVICE)
    masks = [mask_of(window) for _, _, window in samples]
    flags, = {mask[2:] for mask in masks}
    inputs = [torch.tensor(x, dtype=torch.int32, device=DEVICE)
              for x in ([x[0] for x in samples], [x[1] for x in samples], [mask[:2] for mask in masks])]
    _masks[(n,)](*inputs, sees_out, seen_by_out, has_keys_out, key_visits, row_visits, *flags, kBlockM, kBlockN, SIZE)
    for b, (seqlen_q, seqlen_k, window) in enumerate(samples):
        seqlen_q, seqlen_k = (max(0, min(x, SIZE - 5)) for x in (seqlen_q, seqlen_k))
        is_seen, name = visible(seqlen_q, seqlen_k, window), f"{seqlen_q} rows, {seqlen_k} keys, window {window}"
        assert torch.equal(sees_out[b].cpu(), is_seen), name
        assert torch.equal(seen_by_out[b].cpu(), is_seen.T), name
        if seqlen_k:
            assert torch.equal(has_keys_out[b, :seqlen_q].cpu(), is_seen.any(1)[:seqlen_q]), name
        assert torch.equal(key_visits[b].cpu(), visits(is_seen, seqlen_q, kBlockM, kBlockN)), name
        assert torch.equal(row_visits[b].cpu(), visits(is_seen.T, seqlen_k, kBlockN, kBlockM)), name


CAUSAL, NO_MASK = (-1, 0), (-1, -1)
each_tile = pytest.mark.parametrize("kBlockM, kBlockN", [(4, 2), (2, 4)])
def of_lengths(lengths, window):
    return [(n, m, window) for n in lengths for m in lengths]


def of_sides(sides, seqlen_q, seqlen_k):
    return [(seqlen_q, seqlen_k, (left, right)) for left in sides for right in sides
            if (left, right) not in (NO_MASK, CAUSAL)]


def test_some_lengths_and_windows():
    """About the ends of blocks."""
    check(of_lengths([0, 1, 3, 4, 5, 7, 11], CAUSAL), 4, 2)
    check(of_sides([-1, 0, 1, 4, 7, 2**31 - 1], 5, 7), 2, 4)


@pytest.mark.slow
@pytest.mark.campaign
@each_tile
@pytest.mark.parametrize("window", [NO_MASK, CAUSAL, (3, 1), (0, 0), (5, -1), (-1, 2), (2, 6)], ids=str)
def test_every_length(window, kBlockM, kBlockN):
    check(of_lengths(range(SIZE - 4), window), kBlockM, kBlockN)


@pytest.mark.slow
@pytest.mark.campaign
@each_tile
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(7, 7), (5, 7), (7, 5), (1, 7), (7, 1)])
def test_every_window(seqlen_q, seqlen_k, kBlockM, kBlockN):
    check(of_sides([-1, *range(9), 2**31 - 257, 2**31 - 1], seqlen_q, seqlen_k), kBlockM, kBlockN)


@pytest.mark.parametrize("window", [NO_MASK, CAUSAL, (3, 1)], ids=str)
def test_lengths_out_of_range(window):
    """Lengths below 0 and above those of the tensors, which only the GPU may see, are brought into them."""
    lengths = [-(2**31), -3, 0, 5, 11, 12, 2**31 - 1]
    check(of_lengths(lengths, window), 4, 4)
