"""The names that Triton's attention examples have in common. Read next: __main__.py, which checks them."""

import math
import operator

import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from minimal_attn.checks import (FP8_DTYPES, MAX_HEAD_DIM, TWIN_DTYPES, check_fp8, check_no_derivative, check_number,
                                 check_qkv, check_tile)
from minimal_attn.flash_attn import flash_attn_func as minimal_flash_attn_func
from minimal_attn.options import Options

from . import ops
from .attention import INTERPRETING, block_d, config_of, properties, shared_memory


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, BM: int, BN: int) -> Tensor:
    """flash_attention with tiles of BM query rows and BN keys, on the device of Triton's active driver: differentiable,
    but for fp8. Returns (B, H, Sq, D) in q's dtype, bfloat16 for fp8.

    Args:
        q, k, v, causal, sm_scale: as minimal_attn.flash_attention, in 4D.
        BM, BN: powers of two from 16 on, from 32 on for fp8; BM times BN, and times head_dim, up to 32768 (8192 in
            fp32), which is what registers hold. BN need not divide BM.

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
    device = driver_device()
    if q.device.type != device:
        raise ValueError(f"{device.upper()} tensors required: Triton's active driver runs on {device}, q is on "
                         f"{q.device}")
    check_fp8(q)
    check_no_derivative("attention", "minimal_attn.flash_attention with backend='torch'", q=q, k=k, v=v,
                        has_backward=q.dtype not in FP8_DTYPES)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    options = Options.of(1 / math.sqrt(head_dim) if sm_scale is None else float(sm_scale), (-1, 0 if causal else -1))
    kBlockD, limit = block_d(q.dtype, head_dim), properties(q.device).max_shared_memory
    num_stages = next((n for n in (3, 2) if shared_memory(q.dtype, BM, BN, kBlockD, n) <= limit), 1)
    config = config_of(BM, BN, 8 if BM >= 128 else 4, num_stages, kBlockD, kBlockD)
    try:
        return ops.Attention.apply(q, k, v, *options.of_op(), options.autotune, *options.descales, config)[0]
    except OutOfResources as error:
        raise ValueError(f"tiles of BM {BM}, BN {BN} and head_dim {head_dim} do not fit {q.device}: {error}") from None


def driver_device():
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
    larger than head_dim, and at least 16 each. The kernel's own tiles are those of attention.tile_configs.

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
