"""Attention for PyTorch in a few CUDA C++ and Triton kernels that are written to be read, behind one function."""

import sys

try:
    import torch  # noqa: F401: this takes a second or two
except KeyboardInterrupt:
    if sys.argv[0] == "-m" or sys.argv[0].endswith(("minimal-attn", "bench.py")):  # a command ends without a traceback
        sys.exit(130)
    raise

from ._build import load
from .attention import available_backends, flash_attention, forward, triton_matmul, which_kernel
from .block_mask import BlockMask, create_block_mask
from .backends import ops  # noqa: F401: it has moved, as below
from .backends.cuda import force_kernel
from .caches import append_to_kvcache, attention_with_kvcache, reshape_and_cache
from .flash_attn import (flash_attn_combine, flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func,
                         flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func,
                         flash_attn_with_kvcache, get_scheduler_metadata, install_as_flash_attn,
                         uninstall_as_flash_attn)
from .modules import FlashMHA
from .reference import blockwise_attention, reference_attention
from .reference.packed import pad_input, unpad_input
from .reference.tree_mask import pack_tree_mask
from .sdpa.activation import activate, activated, deactivate
from .sdpa.flex import flex_attention
from .sdpa.function import scaled_dot_product_attention
from .toolkit.benchmark import BenchmarkResult, BenchmarkRunner, benchmark_fn
from .toolkit.gpu import GPUArch, GPUCapabilities, check_hopper_features, detect_gpu, print_gpu_info, supports_fp8
from .toolkit.selector import (AdaptiveKernelSelector, get_attention_config, get_matmul_config, get_optimal_attention,
                               get_optimal_matmul)
from .toolkit.validation import validate_attention, validate_matmul

__version__ = "0.1.0"

_MOVED = {  # modules by the names that they once had, which are still theirs
    "activation": "sdpa.activation", "append": "reference.append", "as_flash_attn": "flash_attn.install",
    "aten": "sdpa.aten", "benchmark": "toolkit.benchmark", "bert_padding": "flash_attn.bert_padding",
    "choice": "backends.auto", "cuda": "backends.cuda", "dropout": "reference.dropout",
    "flash_attn_interface": "flash_attn.flash_attn_interface", "flash_attn_kvcache": "flash_attn.kvcache",
    "flops": "backends.flops", "gpu": "toolkit.gpu", "interface": "attention", "kvcache": "caches", "lengths": "checks",
    "mha": "modules", "ops": "backends.ops", "packed": "reference.packed", "pages": "reference.pages",
    "scores": "reference.scores", "selector": "toolkit.selector", "torch_sdpa": "sdpa.function",
    "tree_mask": "reference.tree_mask", "twin": "backends.triton", "validation": "toolkit.validation",
}
for _old, _new in _MOVED.items():
    globals()[_old] = sys.modules[f"{__name__}.{_old}"] = sys.modules[f"{__name__}.{_new}"]


__all__ = [
    "AdaptiveKernelSelector", "BenchmarkResult", "BenchmarkRunner", "BlockMask", "FlashMHA", "GPUArch",
    "GPUCapabilities", "activate", "activated", "append_to_kvcache", "attention_with_kvcache", "available_backends",
    "benchmark_fn", "blockwise_attention", "check_hopper_features", "create_block_mask", "deactivate", "detect_gpu",
    "flash_attention", "flash_attn_combine", "flash_attn_func", "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "flex_attention", "force_kernel", "forward",
    "get_attention_config", "get_matmul_config", "get_optimal_attention", "get_optimal_matmul",
    "get_scheduler_metadata", "install_as_flash_attn", "load", "pack_tree_mask", "pad_input", "print_gpu_info",
    "reference_attention", "reshape_and_cache", "scaled_dot_product_attention", "supports_fp8", "triton_matmul",
    "uninstall_as_flash_attn", "unpad_input", "validate_attention", "validate_matmul", "which_kernel",
]
