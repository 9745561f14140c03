"""The masks that are timed as block masks, and what builds them."""

import functools

import torch

from ..block_mask import create_block_mask
from .measure import Impl


def bounds_of(size, device):
    """The beginnings of 12 documents, of lengths as 1, 3, 5, ... 23, and the end of the last one."""
    return torch.tensor([size * i * i // 144 for i in range(13)], device=device)


def documents(size, device):
    document = torch.searchsorted(bounds_of(size, device), torch.arange(size, device=device), right=True)
    return lambda b, h, row, col: (document[row] == document[col]) & (col <= row)


def eighth(size, device):
    """One of eight of the blocks of 128 before a row's own block, at random, and the past within that."""
    blocks = -(-size // 128)
    seen = (torch.rand(blocks, blocks, device=device) < 1 / 8) | torch.eye(blocks, dtype=torch.bool, device=device)
    return lambda b, h, row, col: seen[row // 128, col // 128] & (col <= row)


# {name: (size, device) -> (b, h, row, col) -> whether the row sees the key}, for as many rows as keys.
MASKS = {
    "causal": lambda size, device: lambda b, h, row, col: col <= row,
    "window": lambda size, device: lambda b, h, row, col: (col <= row) & (col >= row - size // 16),
    "documents": documents,
    "prefix": lambda size, device: lambda b, h, row, col: (col <= row) | (col < size // 4),
    "global": lambda size, device: lambda b, h, row, col: (
        (col <= row) & ((col >= row - size // 16) | (col < size // 128))),
    "eighth": eighth,
}


def native_options(name, batch_size, size, device):
    """The options of flash_attention that say the same as a mask, or None. Documents are those of a packed batch."""
    ends = size * torch.arange(batch_size, device=device)[:, None] + bounds_of(size, device)[1:]
    bounds = torch.nn.functional.pad(ends.flatten(), (1, 0)).int()
    return {"causal": dict(causal=True), "window": dict(window_size=(size // 16, 0)),
            "documents": dict(causal=True, cu_seqlens_q=bounds, cu_seqlens_k=bounds)}.get(name)


def build(mask_mod, size, device, compile=False):
    return create_block_mask(mask_mod, None, None, size, size, device, compile=compile)


def build_by_torch(mask_mod, size, device, compile=True):
    from torch.nn.attention import flex_attention  # takes a second or two

    return flex_attention.create_block_mask(mask_mod, None, None, size, size, device, _compile=compile)


BUILDERS = {"ours": Impl(build, dtypes=("bool",)),
            "ours:compiled": Impl(functools.partial(build, compile=True), ("cuda",), dtypes=("bool",)),
            "torch:compiled": Impl(build_by_torch, ("cuda",), dtypes=("bool",))}
