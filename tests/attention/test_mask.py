"""The mask and the sequences of the Triton kernels, function by function, against boolean matrices for all small
lengths and windows, and against lists of samples."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = pytest.importorskip("triton.language")

from conftest import HAS_GPU  # noqa: E402

from minimal_attn.options import Lengths  # noqa: E402
from triton_ref.launching import mask_of  # noqa: E402
from triton_ref.mask import (block_of, has_keys, key_blocks, keys_of, make_mask, row_blocks,  # noqa: E402
                             rows_of, seen_by, sees, steps)
from triton_ref.sequence import block_of_slot, num_slots, sequence  # noqa: E402

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
    seq = sequence(Lengths(None, None, seqused_q_ptr, seqused_k_ptr), b, 0, kSize - 5, kSize - 5)
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


@triton.jit
def _sequences(cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, batch_size, total_q, total_k, out_ptr):
    """The six numbers of each sample."""
    b = tl.program_id(0)
    lengths = Lengths(cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr)
    seq = sequence(lengths, b, batch_size, total_q, total_k)
    tl.store(out_ptr + 6 * b, seq.q_begin)
    tl.store(out_ptr + 6 * b + 1, seq.k_begin)
    tl.store(out_ptr + 6 * b + 2, seq.seqlen_q)
    tl.store(out_ptr + 6 * b + 3, seq.seqlen_k)
    tl.store(out_ptr + 6 * b + 4, seq.padded_q)
    tl.store(out_ptr + 6 * b + 5, seq.padded_k)


@triton.jit
def _slots(cu_seqlens_ptr, batch_size, total, out_ptr, kBlock: tl.constexpr):
    """(b, block) of each slot."""
    slot = tl.program_id(0)
    b, block = block_of_slot(cu_seqlens_ptr, slot, batch_size, total, kBlock)
    tl.store(out_ptr + 2 * slot, b)
    tl.store(out_ptr + 2 * slot + 1, block)


def int32(values):
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=DEVICE)


def sequences(cu_seqlens_q, cu_seqlens_k, total_q, total_k, seqused_q=None, seqused_k=None):
    batch_size = len(cu_seqlens_q) - 1
    out = torch.zeros(batch_size, 6, dtype=torch.int32, device=DEVICE)
    _sequences[(batch_size,)](*map(int32, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)), batch_size, total_q,
                              total_k, out)
    return out.tolist()


def test_sequences_of_a_packed_batch():
    # q_begin, k_begin, seqlen_q, seqlen_k, padded_q, padded_k; the last sample owns what cu_seqlens leaves over
    assert sequences([0, 3, 3, 9], [0, 5, 6, 7], 12, 8) == [[0, 0, 3, 5, 3, 5], [3, 5, 0, 1, 0, 1], [3, 6, 6, 1, 9, 2]]
    used = sequences([0, 3, 3, 9], [0, 0, 6, 2], 12, 8, [2, 4, -1], [8, 9, 1])
    assert [x[:5] for x in used] == [[0, 0, 2, 8, 3], [3, 0, 0, 8, 0], [3, 6, 0, 1, 9]]


GARBAGE = [[7, -2, 50, 4, 3], [-(2**31), 2**31 - 1, -(2**31), 2**31 - 1, -5], [9, 8, 7, 6, 5], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("cu_seqlens", GARBAGE, ids=str)
def test_garbage_gives_rows_within_the_tensors(cu_seqlens):
    for q_begin, k_begin, seqlen_q, seqlen_k, padded_q, padded_k in [
            *sequences(cu_seqlens, cu_seqlens, 11, 13),
            *sequences(cu_seqlens, cu_seqlens, 11, 13, cu_seqlens[1:], cu_seqlens[:4])]:
        assert 0 <= q_begin <= q_begin + seqlen_q <= q_begin + padded_q <= 11
        assert 0 <= k_begin <= k_begin + seqlen_k <= 13 and 0 <= padded_k <= 13 - k_begin
    for b, block in slots(cu_seqlens, 11, 4):
        assert 0 <= b < 4 and block >= 0


def slots(cu_seqlens, total, kBlock):
    batch_size = len(cu_seqlens) - 1
    count = num_slots.fn(cu_seqlens, batch_size, total, kBlock)
    out = torch.zeros(count, 2, dtype=torch.int32, device=DEVICE)
    _slots[(count,)](int32(cu_seqlens), batch_size, total, out, kBlock)
    return out.tolist()


@pytest.mark.parametrize("lengths", [[1], [0], [16], [5, 0, 0, 4, 1], [0, 0, 7], [4, 4, 4, 4], [3] * 9, [17, 1, 0, 30]],
                         ids=str)
@pytest.mark.parametrize("left_over", [0, 6])
def test_slots_cover_every_row_once(lengths, left_over):
    cu_seqlens = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    owned = [*lengths[:-1], lengths[-1] + left_over]
    found = [(b, block) for b, block in slots(cu_seqlens, sum(owned), 4) if block * 4 < owned[b]]
    assert found == [(b, block) for b, n in enumerate(owned) for block in range(-(-n // 4))]
