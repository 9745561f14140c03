"""Whether a function multiplies matrices, or attends, as it should: judged by the same in double precision.

A result of 16 bits cannot be nearer to the truth than its rounding, so the tolerance is the larger of what the caller
gives and what torch's own error in that dtype allows, by the error rule of tests/cases.py: twice torch's largest error,
and half an ulp of the largest value.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..reference.definition import reference_attention


def validate_matmul(triton_fn: Callable, m: int, n: int, k: int, rtol: float = 1e-3, atol: float = 1e-3,
                    dtype: torch.dtype = torch.float16, device: str = "cuda",
                    verbose: bool = False) -> tuple[bool, float]:
    """Compare triton_fn(a, b), on normal a (m, k) and b (k, n), with torch in double precision.

    Returns (whether every element passes, the largest difference). |difference| <= atol + rtol · |truth| passes,
    and so does what the dtype's rounding allows. NaN never passes. verbose: print the verdict.
    """
    a, b = (torch.randn(shape, device=device, dtype=dtype) for shape in ((m, k), (k, n)))
    truth = a.double() @ b.double()
    return _judge(f"matmul ({m},{n},{k}) {dtype}", triton_fn(a, b), truth, a @ b, rtol, atol, verbose)


def validate_attention(flash_fn: Callable, batch: int, heads: int, seq_len: int, head_dim: int, causal: bool = False,
                       rtol: float = 1e-3, atol: float = 1e-3, dtype: torch.dtype = torch.float16,
                       device: str = "cuda", verbose: bool = False) -> tuple[bool, float]:
    """As validate_matmul, of flash_fn(q, k, v, causal=causal) on normal (batch, heads, seq_len, head_dim)."""
    q, k, v = (torch.randn(batch, heads, seq_len, head_dim, device=device, dtype=dtype) for _ in "qkv")
    truth = reference_attention(q.double(), k.double(), v.double(), causal)
    with sdpa_kernel(SDPBackend.MATH):
        base = scaled_dot_product_attention(q, k, v, is_causal=causal)
    what = f"attention ({batch},{heads},{seq_len},{head_dim}) {dtype}{' causal' * causal}"
    return _judge(what, flash_fn(q, k, v, causal=causal), truth, base, rtol, atol, verbose)


def allowed_error(base: Tensor, truth: Tensor) -> float:
    """The largest error that a right result may have: twice the largest error of base plus half an ulp of the largest
    value of truth. base is torch's own result in the judged dtype, truth is in double precision."""
    return (2 * (base.double() - truth).abs().max() + torch.finfo(base.dtype).eps / 2 * truth.abs().max()).item()


def _judge(what: str, out: Tensor, truth: Tensor, base: Tensor, rtol: float, atol: float,
           verbose: bool) -> tuple[bool, float]:
    if out.shape != truth.shape:
        raise ValueError(f"{what}: the result has shape {tuple(out.shape)}, expected {tuple(truth.shape)}")
    difference = (out.double() - truth).abs()
    passed = bool((difference <= (atol + rtol * truth.abs()).clamp(min=allowed_error(base, truth))).all())
    largest = difference.max().item()
    if verbose:
        print(f"{what}: {'passed' if passed else 'FAILED'}, max difference {largest:.2e}")
    return passed, largest
