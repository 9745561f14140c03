"""Attention for PyTorch in a few CUDA C++ and Triton kernels that are written to be read, behind one function.

Read next: interface.py, the facade; then csrc/flash.cu, the kernel.
"""

import sys

try:
    import torch  # noqa: F401: this takes a second or two
except KeyboardInterrupt:
    if sys.argv[0] == "-m" or sys.argv[0].endswith(("minimal-attn", "bench.py")):  # a command ends without a traceback
        sys.exit(130)
    raise

from ._build import load
from .activation import activate, activated, deactivate
from .as_flash_attn import install_as_flash_attn, uninstall_as_flash_attn
from .benchmark import BenchmarkResult, BenchmarkRunner, benchmark_fn
from .cuda import force_kernel
from .flash_attn import (flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func,
                         flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func)
from .flash_attn_kvcache import flash_attn_combine, flash_attn_with_kvcache, get_scheduler_metadata
from .gpu import GPUArch, GPUCapabilities, check_hopper_features, detect_gpu, print_gpu_info, supports_fp8
from .interface import (available_backends, flash_attention, forward, triton_matmul, which_kernel)
from .kvcache import append_to_kvcache, attention_with_kvcache, reshape_and_cache
from .mha import FlashMHA
from .packed import pad_input, unpad_input
from .reference import blockwise_attention, reference_attention
from .selector import (AdaptiveKernelSelector, get_attention_config, get_matmul_config, get_optimal_attention,
                       get_optimal_matmul)
from .torch_sdpa import scaled_dot_product_attention
from .tree_mask import pack_tree_mask
from .validation import validate_attention, validate_matmul

__version__ = "0.1.0"

__all__ = [
    "AdaptiveKernelSelector",
    "BenchmarkResult",
    "BenchmarkRunner",
    "FlashMHA",
    "GPUArch",
    "GPUCapabilities",
    "activate",
    "activated",
    "append_to_kvcache",
    "attention_with_kvcache",
    "available_backends",
    "benchmark_fn",
    "blockwise_attention",
    "check_hopper_features",
    "deactivate",
    "detect_gpu",
    "flash_attention",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "force_kernel",
    "forward",
    "get_attention_config",
    "get_matmul_config",
    "get_optimal_attention",
    "get_optimal_matmul",
    "get_scheduler_metadata",
    "install_as_flash_attn",
    "load",
    "pack_tree_mask",
    "pad_input",
    "print_gpu_info",
    "reference_attention",
    "reshape_and_cache",
    "scaled_dot_product_attention",
    "supports_fp8",
    "triton_matmul",
    "uninstall_as_flash_attn",
    "unpad_input",
    "validate_attention",
    "validate_matmul",
    "which_kernel",
]
