"""Which of csrc and the twin makes gradients where backend="auto" may take either: the faster one, as measured.

The choice depends on nothing that a batch does: not on batch_size, nor on the number of heads, but for that of query
heads per key head. So the bits of a sample do not depend on the batch that it is in.

Read next: interface.py, which asks.
"""

import torch

# benchmarks/h200/backward.json is the run behind this table, and tests/test_bench.py compares the two. It is for 16
# bits on Hopper: from so many query heads per key head and so many rows and keys on, up to so large a head_dim, the twin
# is the faster one. Everywhere else csrc is, or nothing was measured.
TWIN_IS_FASTER = (  # (head_dim, query heads per key head, length)
    (64, 1, 512),
    (128, 1, 1024),
    (128, 4, 512),
)


def twin_trains(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether "triton" is the faster backend for a forward and a backward pass.

    Args:
        q: (B, H, Sq, D); k: (B, Hk, Sk, D), or both (B, S, D), on a GPU. They need not be checked yet: where they are
            wrong, any answer is right.
    """
    if q.dtype not in (torch.float16, torch.bfloat16) or q.ndim not in (3, 4) or k.ndim != q.ndim:
        return False
    group = q.shape[1] // max(k.shape[1], 1) if q.ndim == 4 else 1
    length = min(q.shape[-2], k.shape[-2])
    is_faster = any(q.shape[-1] <= d and group >= heads and length >= n for d, heads, n in TWIN_IS_FASTER)
    return is_faster and _is_hopper(q.device)


def _is_hopper(device):
    """Also for fake tensors where there is no GPU."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] == 9
