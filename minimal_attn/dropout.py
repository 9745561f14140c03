"""Dropout that anyone can compute again: which probabilities survive, as a pure function of a seed and a position.

keep_mask numbers the elements of (B, H, Sq, Sk) and asks Philox-4x32-10, a random number generator without state, for
their words. No tile size, no order of threads and no other call has a say in it, so a kernel that forms one tile at a
time, forward or backward, drops what reference.py drops. Nor does it matter which part of the elements a call has, if
it is told where they begin: seed_with_origins. Read next: _build.py, which compiles csrc.
"""

import torch

MASK32 = 2**32 - 1
# Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # 32 bits of the fractions of the golden ratio and of sqrt(3)
ROUNDS = 10


def _multiply(x, factor):
    """The high and the low 32 bits of x · factor. The product itself would not fit int64, so factor comes in halves."""
    upper = x * (factor >> 16)
    lower = x * (factor & 0xFFFF) + ((upper & 0xFFFF) << 16)
    return (upper >> 16) + (lower >> 32), lower & MASK32


def philox(counter, key):
    """Philox-4x32-10: four random words of a counter of four words and a key of two.

    Args:
        counter, key: int64 tensors with values from 0 to 2³² - 1, broadcastable among themselves.

    Returns:
        A tuple of four int64 tensors with values from 0 to 2³² - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK32, (k1 + KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3


def drop_threshold(dropout_p):
    """The word below which an element is dropped. Below 2³² for every dropout_p but 1, where no word is high enough."""
    return 2**32 if dropout_p == 1 else min(round(dropout_p * 2**32), MASK32)


def keep_scale(dropout_p):
    """What survivors are multiplied by, so that the expectation stays; 0 where there are none."""
    return 0.0 if dropout_p == 1 else 1 / (1 - dropout_p)


def seed_with_origins(seed, origins):
    """A dropout_seed of a call that is a part of a larger problem, and drops what a call with all of it would.

    Args:
        seed: int64, one element.
        origins: int64 (B, 4), on its device, one row a sample: its first row in the larger problem, a multiple of 16,
            its first key, a multiple of 2, the number of its first query head, and that of the sample.

    Returns:
        int64 (1 + 4 · B,).
    """
    return torch.cat((seed.view(1), origins.flatten()))


def keep_mask(seed, dropout_p, batch_size, nheads, seqlen_q, seqlen_k, device):
    """Which probabilities survive dropout.

    One Philox call serves four elements: rows r and r + 8 of each 16 (r < 8), columns 2c and 2c + 1. These are what one
    thread holds of a 16 x 8 tile of scores (PTX ISA, accumulator of mma.m16n8; wgmma's has the same rows in each warp),
    so that a kernel needs a quarter of the calls and no exchange between threads:

        key     = low and high 32 bits of the seed
        counter = row // 16 * 8 + row % 8, column // 2, query head, batch
        word    = 2 * (row // 8 % 2) + column % 2, which is the number of the accumulator's register

    and an element is kept if its word is at least drop_threshold(dropout_p), as an unsigned number. Rows, columns,
    heads and samples are numbered from the origins in the seed, if it has some.

    Args:
        seed: int64, one element, or a seed_with_origins, on `device`; its value is not read on the host, so CUDA graphs
            may change it.
        dropout_p: share to drop, in [0, 1].

    Returns:
        bool (B, H, Sq, Sk). About 24 bytes an element are in use on the way, for the words are int64.
    """
    seed, origins = seed.view(-1).tensor_split((1,))
    key = seed & MASK32, seed >> 32 & MASK32
    # Both rounded up to whole groups; the rest is cut off at the end.
    tiles, pairs = (seqlen_q + 15) // 16, (seqlen_k + 1) // 2
    batch, head, row, col = (torch.arange(n, device=device) for n in (batch_size, nheads, tiles * 8, pairs))
    batch = batch[:, None, None, None]
    row0 = pair0 = head0 = 0
    if origins.numel():
        row0, pair0, head0, batch = (x[:, None, None, None] for x in origins.view(batch_size, 4).unbind(1))
        row0, pair0 = row0 // 2, pair0 // 2
    counter = row[:, None] + row0, col + pair0, head[:, None, None] + head0, batch
    words = philox([word & MASK32 for word in counter], key)
    keep = torch.stack([word >= drop_threshold(dropout_p) for word in words], -1)
    keep = keep.view(batch_size, nheads, tiles, 8, pairs, 2, 2)  # [..., row % 8, column // 2, row // 8 % 2, column % 2]
    keep = keep.permute(0, 1, 2, 5, 3, 4, 6).reshape(batch_size, nheads, tiles * 16, pairs * 2)
    return keep[:, :, :seqlen_q, :seqlen_k]
