"""Which of csrc and the twin makes gradients where backend="auto" may take either: the faster one, as measured.

The choice depends on dtype, head_dim and the lengths of the tensors, not on batch_size or the number of heads. Padding a
batch further can change it, and with it the last bits of a result.

Read next: checks.py, what every call is checked for.
"""

import functools

import torch

from ._build import assume_constant_result

# In 16 bits on Hopper the twin is the faster one up to this head_dim, from so many rows and keys on, however many query
# heads share keys. The runs behind this are backward.json and backward_lengths.json in benchmarks/h200, with which
# tests/test_bench.py compares it. On other GPUs nothing was measured, and csrc, whose kernel was written for Ampere, is
# taken.
TWIN_HEAD_DIM, TWIN_LENGTH = 128, 512


def twin_trains(q: torch.Tensor, k: torch.Tensor, seq_major: bool = False) -> bool:
    """Whether "triton" is the faster backend for a forward and a backward pass.

    Args:
        q: (B, H, Sq, D); k: (B, Hk, Sk, D), or both (B, S, D), on a GPU. They need not be checked yet: where they are
            wrong, any answer is right.
        seq_major: they are (B, S, H, D).
    """
    if q.dtype not in (torch.float16, torch.bfloat16) or q.ndim not in (3, 4) or k.ndim != q.ndim:
        return False
    rows = 1 if seq_major else -2
    is_long = min(q.shape[rows], k.shape[rows]) >= TWIN_LENGTH
    return is_long and q.shape[-1] <= TWIN_HEAD_DIM and _is_hopper(q.device)


# Dynamo looks through functools.cache, so the cached function is not itself the constant one.
@assume_constant_result
def _is_hopper(device):
    return _device_is_hopper(device)


@functools.cache
def _device_is_hopper(device):
    """Without a GPU there are fake tensors alone, for which the rule holds as it is."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] == 9
