"""Which backend serves backend="auto". Gradients are computed by the faster one of csrc and Triton.

The choice depends on dtype, head_dim and the lengths of the tensors, not on batch_size or the number of heads. Padding
a batch further can change it, and with it the last bits of a result.

Read next: backends.py, what a backend is.
"""

import functools

import torch

from . import _build, twin
from ._build import assume_constant_result
from .backends import Lengths, warn
from .checks import FP8_DTYPES, check_tensor, is_transformed, wants_gradient

# In 16 bits on Hopper, the Triton kernels are faster up to this head_dim and from so many rows and keys on, however
# many query heads share keys. tests/test_bench.py compares this with backward.json and backward_lengths.json in
# benchmarks/h200. On other GPUs nothing was measured, and csrc is taken, whose kernel was written for Ampere.
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


def auto_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths = Lengths(),
                 sinks: torch.Tensor | None = None, attn_bias: torch.Tensor | None = None,
                 has_scores: bool = False) -> str:
    """The name of the backend that serves a call with backend="auto", of inputs that are not checked yet. has_scores:
    with softcap, alibi_slopes or attn_bias."""
    for name, x in (("q", q), ("k", k), ("v", v)):  # twin_trains asks for dtypes and shapes
        check_tensor(name, x)
    if not q.is_cuda:
        return "torch"
    if q.dtype in FP8_DTYPES:
        return "triton"
    needs_grad = any(map(wants_gradient, (q, k, v, sinks, attn_bias)))
    if needs_grad and is_transformed():
        return "torch"
    # How long a packed batch is says nothing of its samples, whose results must not depend on it. Of scores that are
    # changed nothing was measured.
    return _first_available(needs_grad and not lengths.is_packed and not has_scores and twin_trains(q, k))


def csrc_trains(q: torch.Tensor, k: torch.Tensor, seq_major: bool) -> bool:
    """Whether "auto" takes csrc for a forward and a backward pass; arguments as of twin_trains."""
    return not twin_trains(q, k, seq_major) or _first_available(True) == "cuda"


# Dynamo looks through functools.cache, so the cached function is not itself the constant one.
@assume_constant_result
def _first_available(prefers_triton):
    return _choose_first_available(prefers_triton)


@functools.cache
def _choose_first_available(prefers_triton):
    """"auto" for CUDA tensors. csrc has the faster kernels, but for what twin_trains says."""
    reasons = []
    for name in ("triton", "cuda") if prefers_triton else ("cuda", "triton"):
        reason = twin.why_not_imported() if name == "triton" else _build.why_not(on_gpu=True)
        if reason is None:
            break
        reasons.append(f"{name} is not available: {reason}")
    else:
        name = "torch"
    if reasons:
        what = " for inputs that require grad" if prefers_triton else ""
        warn(f"backend='auto' takes {name}{what}, since {'; '.join(reasons)}")
    return name
