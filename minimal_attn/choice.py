"""Which of csrc and the twin makes gradients where backend="auto" may take either: the faster one, as measured.

The choice depends on the lengths of the tensors, on head_dim and on the query heads per key head, not on batch_size or
the number of heads. Padding a batch further can change it, and with it the last bits of a result.

Read next: checks.py, what every call is checked for.
"""

import functools

import torch

# (head_dim, heads, length): the twin is faster up to this head_dim, from so many query heads per key head on, and from so
# many rows and keys on. Measured in 16 bits on an H200 (benchmarks/journal.md, "Gradients that never starve"), and
# compared with benchmarks/h200/backward.json by tests/test_bench.py. On other GPUs than Hopper's nothing was measured,
# and csrc, whose kernel was written for them, is taken.
TWIN_IS_FASTER = (
    (64, 1, 512),
    (128, 1, 1024),
    (128, 4, 512),
)


def twin_trains(q: torch.Tensor, k: torch.Tensor, seq_major: bool = False) -> bool:
    """Whether "triton" is the faster backend for a forward and a backward pass.

    Args:
        q: (B, H, Sq, D); k: (B, Hk, Sk, D), or both (B, S, D), on a GPU. They need not be checked yet: where they are
            wrong, any answer is right.
        seq_major: they are (B, S, H, D).
    """
    if q.dtype not in (torch.float16, torch.bfloat16) or q.ndim not in (3, 4) or k.ndim != q.ndim:
        return False
    heads, rows = (2, 1) if seq_major else (1, -2)
    group = q.shape[heads] // max(k.shape[heads], 1) if q.ndim == 4 else 1
    length = min(q.shape[rows], k.shape[rows])
    is_faster = any(q.shape[-1] <= d and group >= least and length >= n for d, least, n in TWIN_IS_FASTER)
    return is_faster and _is_hopper(q.device)


@functools.cache
def _is_hopper(device):
    """Without a GPU there are fake tensors alone, for which the table is meant as it is."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] == 9
