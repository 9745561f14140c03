"""Dropout that anyone can compute again: which probabilities survive, as a pure function of a seed and a position.

keep_mask numbers the elements of (B, H, Sq, Sk) and asks Philox-4x32-7, a random number generator without state, for
their words. The result depends on no tile size, order of threads or other call, so a kernel that forms one tile at a
time, forward or backward, drops what definition.py drops.
"""

import torch

MASK32 = 2**32 - 1
# Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # 32 bits of the fractions of the golden ratio and of sqrt(3)
ROUNDS = 7  # the fewest of Philox-4x32 that passed all tests of that paper
BITS = 15  # of a random number, for one element


def _multiply(x, factor):
    """The high and the low 32 bits of x · factor, which itself would not fit int64."""
    upper = x * (factor >> 16)
    lower = x * (factor & 0xFFFF) + ((upper & 0xFFFF) << 16)
    return (upper >> 16) + (lower >> 32), lower & MASK32


def philox(counter, key):
    """Philox-4x32-7: four random words of a counter of four and a key of two: int64, below 2³². They broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK32, (k1 + KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3


def keep_count(dropout_p):
    """How many of 2¹⁵ elements are kept. So dropout_p is rounded to a multiple of 2⁻¹⁵."""
    return 2**BITS - round(dropout_p * 2**BITS)


def keep_scale(dropout_p):
    """The factor by which surviving probabilities are multiplied, so that the expectation stays. 0 if none survive."""
    count = keep_count(dropout_p)
    return 2**BITS / count if count else 0.0


def seed_with_origins(seed, origins):
    """A dropout_seed (1 + 4 · B,) of a call that is a part of a larger problem, and drops what a call with all would.

    seed: int64, one element. origins: int64 (B, 4), on its device, one row a sample: its first row and its first key in
    the larger problem, multiples of 16, the number of its first query head, and that of the sample.
    """
    return torch.cat((seed.view(1), origins.flatten()))


def keep_mask(seed, dropout_p, batch_size, nheads, seqlen_q, seqlen_k, device):
    """Which probabilities survive dropout: bool (B, H, Sq, Sk). The words on the way take 16 bytes an element.

    One Philox call serves eight elements of a tile of 16 rows and 16 columns: rows r and r + 8, r < 8, and columns 2c,
    2c + 1, 2c + 8 and 2c + 9, c < 4. These are what one thread holds of such a tile (PTX ISA, operand A of
    mma.m16n8k16; that of wgmma is the same in each warp). So a kernel needs an eighth of the calls and no exchange
    between threads:

        key     = low and high 32 bits of the seed
        counter = row // 16 * 8 + row % 8, column // 16 * 4 + column % 8 // 2, query head, batch
        word    = row // 8 % 2 + 2 * (column // 8 % 2), which is the number of the operand's register
        number  = the low 15 bits of the word's low half for an even column, of its high half for an odd one

    and an element is kept if number + keep_count(dropout_p) is at least 2¹⁵. Rows, columns, heads and samples are
    numbered from the origins in the seed, if it has some. The host does not read the seed.
    """
    seed, origins = seed.view(-1).tensor_split((1,))
    key = seed & MASK32, seed >> 32 & MASK32
    # Both rounded up to whole groups; the rest is cut off at the end.
    rows, cols = (seqlen_q + 15) // 16, (seqlen_k + 15) // 16  # of tiles
    batch, head, row, col = (torch.arange(n, device=device) for n in (batch_size, nheads, rows * 8, cols * 4))
    batch = batch[:, None, None, None]
    row0 = col0 = head0 = 0
    if origins.numel():
        row0, col0, head0, batch = (x[:, None, None, None] for x in origins.view(batch_size, 4).unbind(1))
        row0, col0 = row0 // 2, col0 // 4
    counter = row[:, None] + row0, col + col0, head[:, None, None] + head0, batch
    words = philox([word & MASK32 for word in counter], key)
    keep = torch.stack([(word >> shift & 2**BITS - 1) + keep_count(dropout_p) >= 2**BITS
                        for word in words for shift in (0, 16)], -1)
    # [..., tile, row % 8, tile, column % 8 // 2, column // 8 % 2, row // 8 % 2, column % 2]
    keep = keep.view(batch_size, nheads, rows, 8, cols, 4, 2, 2, 2)
    keep = keep.permute(0, 1, 2, 7, 3, 4, 6, 5, 8).reshape(batch_size, nheads, rows * 16, cols * 16)
    return keep[:, :, :seqlen_q, :seqlen_k]
