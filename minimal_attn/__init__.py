"""Attention for PyTorch that can be read in a sitting: CUDA C++ kernels and their Triton twin behind one facade.

Read next: interface.py, the facade; then csrc/flash.cu, the kernel.
"""

from ._build import load
from .interface import available_backends, flash_attention, flash_attn_func, forward, which_kernel
from .reference import blockwise_attention, reference_attention

__version__ = "0.1.0"

__all__ = [
    "available_backends",
    "blockwise_attention",
    "flash_attention",
    "flash_attn_func",
    "forward",
    "load",
    "reference_attention",
    "which_kernel",
]
