"""The names that Triton's attention examples have in common, over the kernels of this package.

python -m triton_ref checks them as those examples do. Read next: attention.py.
"""

import math
import operator

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.runtime.errors import OutOfResources

from minimal_attn.checks import (FP8_DTYPES, MAX_HEAD_DIM, TWIN_DTYPES, check_fp8, check_no_derivative, check_number,
                                 check_qkv, check_tile)
from minimal_attn.flash_attn import flash_attn_func as minimal_flash_attn_func
from minimal_attn.options import Options
from minimal_attn.reference import reference_attention

from . import attention_bwd
from .attention import INTERPRETING, block_d, config_of, properties, run, shared_memory


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, BM: int, BN: int) -> Tensor:
    """flash_attention with tiles of BM query rows and BN keys, on the device of Triton's active driver: differentiable,
    but for fp8. Any two tiles are right, also where BN does not divide BM, and any lengths.

    Args:
        q, k, v, causal, sm_scale: as minimal_attn.flash_attention, in 4D.
        BM, BN: powers of two from 16 on, from 32 on for fp8; BM times BN, and times head_dim, up to 32768 (8192 in
            fp32), which is what registers hold.

    Returns:
        (B, H, Sq, D) in q's dtype, bfloat16 for fp8.

    Raises:
        ValueError: BM or BN, also where tiles of this size are more than the GPU's shared memory; a device that is not
            the driver's; otherwise as flash_attention.
    """
    check_qkv(q, k, v, TWIN_DTYPES)
    check_number("causal", causal)
    check_number("sm_scale", sm_scale)
    if q.ndim != 4:
        raise ValueError(f"attention: q, k and v must be (B, H, S, D), got {tuple(q.shape)}")
    if v.shape != k.shape:
        raise ValueError("attention: k and v must have the same shape, here also the same head_dim, got "
                         f"{tuple(k.shape)} and {tuple(v.shape)}")
    smallest, head_dim = 32 if q.dtype in FP8_DTYPES else 16, q.shape[-1]
    for name, block in (("BM", BM), ("BN", BN)):
        if type(block) is not int or block < smallest or block & (block - 1):
            raise ValueError(f"{name} must be a power of two from {smallest} on, got {block!r}")
    check_tile(q.dtype, BM=BM, BN=BN)
    check_tile(q.dtype, BM=BM, head_dim=block_d(q.dtype, head_dim))
    device = _driver_device()
    if q.device.type != device:
        raise ValueError(f"{device.upper()} tensors required: Triton's active driver runs on {device}, q is on "
                         f"{q.device}")
    check_fp8(q)
    check_no_derivative("attention", "minimal_attn.flash_attention with backend='torch'", q=q, k=k, v=v,
                        has_backward=q.dtype not in FP8_DTYPES)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    scale = 1 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale)
    kBlockD, limit = block_d(q.dtype, head_dim), properties(q.device).max_shared_memory
    num_stages = next((n for n in (3, 2) if shared_memory(q.dtype, BM, BN, kBlockD, n) <= limit), 1)
    config = config_of(BM, BN, 8 if BM >= 128 else 4, num_stages, kBlockD, kBlockD)
    try:
        return _Attention.apply(q, k, v, scale, bool(causal), config)
    except OutOfResources as error:
        raise ValueError(f"tiles of BM {BM}, BN {BN} and head_dim {head_dim} do not fit {q.device}: {error}") from None


class _Attention(torch.autograd.Function):
    """Attention whose forward pass has the tiles of `config`. attention_bwd.py chooses those of the backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, causal, config):
        ctx.options = Options.of(softmax_scale, (-1, 0 if causal else -1))
        out, lse = run(q, k, v, ctx.options, config)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        check_no_derivative("the backward pass of attention", "minimal_attn.flash_attention with backend='reference'",
                            has_backward=True, dout=dout)
        return (*attention_bwd.run(dout, None, *ctx.saved_tensors, ctx.options)[:3], None, None, None)


def _driver_device():
    if INTERPRETING:
        return "cpu"
    try:
        return triton.runtime.driver.active.get_active_torch_device().type
    except RuntimeError:  # no driver: a machine without a GPU
        return "cuda"


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """minimal_attn.flash_attn_func by the Triton twin. q: (B, Sq, H, D); k, v: (B, Sk, Hk, D); out as q."""
    return minimal_flash_attn_func(q, k, v, backend="triton")


def calculate_block_sizes(head_dim: int, sram_size_kb: int = 48) -> tuple[int, int]:
    """(br, bc), rows of Q and of K and V, of which four fp32 tiles fit in sram_size_kb KB of shared memory.

    The rule of Dao et al. 2022, Algorithm 1, line 1, in powers of two: bc = memory / (4 · head_dim · 4 bytes), br no
    larger than head_dim. At least 16 each, the least that a matrix product takes, also where that does not fit. For
    comparison with the paper: the kernel's own tiles are those of attention.tile_configs.

    Raises:
        TypeError: no integers; ValueError: a head_dim not from 1 to 256, a sram_size_kb not above 0.
    """
    head_dim, sram_size_kb = operator.index(head_dim), operator.index(sram_size_kb)
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"Unsupported head_dim {head_dim}: 1 to {MAX_HEAD_DIM} is supported")
    if sram_size_kb <= 0:
        raise ValueError(f"sram_size_kb must be above 0, got {sram_size_kb}")
    rows = sram_size_kb * 1024 // (4 * head_dim * 4)
    bc, br = (max(16, 1 << n.bit_length() - 1 if n else 1) for n in (rows, min(rows, head_dim)))
    return br, bc


# Z, H, N_CTX, HEAD_DIM, causal, dtype, BM, BN
OP_CASES = [
    (4, 32, 32, 64, False, torch.float16, 32, 32),
    (4, 32, 64, 64, False, torch.float16, 32, 64),
    (1, 2, 128, 128, False, torch.float16, 32, 128),
    (1, 1, 128, 128, False, torch.float16, 64, 128),
    (1, 1, 128, 128, False, torch.float16, 32, 128),
    (2, 2, 128, 256, False, torch.float16, 32, 128),
    (1, 2, 256, 256, False, torch.float16, 32, 256),
]


def check_op(Z: int, H: int, N_CTX: int, HEAD_DIM: int, causal: bool, dtype: torch.dtype, BM: int, BN: int) -> None:
    """attention against the oracle on inputs of standard deviation 0.5; AssertionError beyond 1e-2, else a line that
    says so."""
    torch.manual_seed(20)
    q, k, v = (torch.empty(Z, H, N_CTX, HEAD_DIM, dtype=dtype, device=_driver_device()).normal_(0.0, 0.5)
               for _ in "qkv")
    torch.testing.assert_close(attention(q, k, v, causal, 0.5, BM, BN), reference_attention(q, k, v, causal, 0.5),
                               atol=1e-2, rtol=1e-2)
    print(f"Attention BM: {BM}, BN: {BN}, dtype: {dtype} PASSED!")


def main() -> None:
    """The checks that the examples end with."""
    q, k, v = (torch.randn(2, 512, 8, 64, device=_driver_device()) for _ in "qkv")
    out = flash_attn_func(q, k, v)
    expected = reference_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    print(f"Maximum absolute error: {(out - expected).abs().max().item()}")
    print(f"Approximately equal: {torch.allclose(out, expected, atol=1e-2, rtol=1e-2)}")
    for case in OP_CASES:
        check_op(*case)
