"""Dropout: Philox against its published answers, and the mask against plain Python."""

import math

import pytest
import torch

from conftest import HAS_GPU
from minimal_attn.dropout import drop_threshold, keep_mask, keep_scale, philox

DEVICE = "cuda" if HAS_GPU else "cpu"
SEED = 0x1234567890ABCDEF


def seed_of(value=SEED, device=DEVICE):
    return torch.tensor([value], device=device)


@pytest.mark.parametrize("counter, key, answer", [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
])
def test_philox_gives_the_known_answers(counter, key, answer):
    """Of Random123's kat_vectors, philox4x32 with 10 rounds."""
    words = lambda text: tuple(torch.tensor(int(x, 16), device=DEVICE) for x in text.split())  # noqa: E731
    assert philox(words(counter), words(key)) == words(answer)


def keep_one(seed, dropout_p, batch, head, row, col):
    """One element of the mask, in Python's integers."""
    c = [row // 16 * 8 + row % 8, col // 2, head, batch]
    k = [seed % 2**32, seed % 2**64 >> 32]
    for i in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        ki = [(k[0] + i * 0x9E3779B9) % 2**32, (k[1] + i * 0xBB67AE85) % 2**32]
        c = [b >> 32 ^ c[1] ^ ki[0], b % 2**32, a >> 32 ^ c[3] ^ ki[1], a % 2**32]
    return c[2 * (row // 8 % 2) + col % 2] >= round(dropout_p * 2**32)


@pytest.mark.parametrize("seed", [0, SEED, -1, -2**63, 2**63 - 1])
def test_the_mask_is_that_of_plain_python(seed):
    shape = B, H, Sq, Sk = 2, 3, 37, 5
    mask = keep_mask(seed_of(seed), 0.3, *shape, DEVICE)
    assert mask.dtype == torch.bool and mask.shape == shape
    assert mask.tolist() == [[[[keep_one(seed, 0.3, b, h, i, j) for j in range(Sk)] for i in range(Sq)]
                              for h in range(H)] for b in range(B)]


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 16, 8), (3, 2, 17, 33), (1, 5, 40, 47), (0, 5, 0, 47)], ids=str)
def test_an_element_does_not_know_the_shape(shape):
    whole = keep_mask(seed_of(), 0.5, 3, 5, 50, 48, DEVICE)
    B, H, Sq, Sk = shape
    assert keep_mask(seed_of(), 0.5, *shape, DEVICE).equal(whole[:B, :H, :Sq, :Sk])


@pytest.mark.parametrize("dropout_p", [1e-3, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_the_keep_rate(dropout_p):
    kept = keep_mask(seed_of(), dropout_p, 2, 4, 256, 256, DEVICE)
    for part in kept, kept[:, :, ::16, 1::2]:  # all, and one word of the four
        sigma = math.sqrt(dropout_p * (1 - dropout_p) / part.numel())
        assert abs(part.double().mean().item() - (1 - dropout_p)) < 5 * sigma


def test_nothing_and_everything():
    assert keep_mask(seed_of(), 0.0, 2, 2, 64, 64, DEVICE).all()
    assert not keep_mask(seed_of(), 1.0, 2, 2, 64, 64, DEVICE).any()
    assert drop_threshold(math.nextafter(1, 0)) == 2**32 - 1  # 32 bits for all that is not 1
    assert drop_threshold(0.5) == 2**31 and drop_threshold(0.0) == 0 and drop_threshold(1.0) == 2**32
    assert keep_scale(0.75) == 4 and keep_scale(1.0) == 0


def test_masks_of_seeds_heads_and_batches_differ():
    seeds = [0, 1, 2, 2**32, 2**63 - 1, -1]  # the high half counts as well
    masks = torch.cat([keep_mask(seed_of(seed), 0.5, 2, 3, 32, 64, DEVICE) for seed in seeds]).flatten(0, 1)
    agreement = (masks[:, None] == masks).double().mean((-1, -2))
    others = agreement[~torch.eye(len(masks), dtype=torch.bool, device=DEVICE)]
    assert (others - 0.5).abs().max() < 5.5 * 0.5 / math.sqrt(32 * 64)  # 630 pairs
