"""Which kernel is the right one here, and with which tiles: what the kernels use, read from their own tables."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..attention import BACKENDS, backend_name, flash_attention, which_kernel
from ..checks import KERNEL_DTYPES, check_choice, check_dtype, check_fp8, check_qkv, empty_outputs
from .gpu import detect_gpu

SIZE = 4096  # of the matrices that nothing is said about


class AdaptiveKernelSelector:
    """Chooses kernels for its `device`: GPU device_id, whose GPUCapabilities `gpu` is, or the CPU, with gpu None."""

    def __init__(self, device_id: int = 0):
        self.gpu = detect_gpu(device_id) if torch.cuda.is_available() else None
        self.device = torch.device("cuda", device_id) if self.gpu else torch.device("cpu")

    def get_matmul_config(self, m: int = SIZE, n: int = SIZE, k: int = SIZE, dtype: torch.dtype = torch.float16,
                          backend: str = "auto") -> dict[str, Any]:
        """How row-major matrices (m, k) and (k, n) are multiplied.

        backend: "triton", "torch", or "auto": "triton" on a GPU that Triton serves, else "torch".

        Returns:
            {"backend", "kernel"}, with "triton" also tiles and launch options, from which autotuning may depart.

        Raises:
            ValueError: another backend. TypeError: a wrong dtype. ModuleNotFoundError: no Triton.
        """
        if backend == "auto":
            on_gpu = self.gpu and BACKENDS["triton"].why_not(self.device) is None
            backend = "triton" if on_gpu else "torch"
        if backend == "torch":
            return {"backend": "torch", "kernel": "torch.matmul"}
        check_choice("backend", backend, ("auto", "triton", "torch"))
        check_dtype(torch.empty(0, dtype=dtype), KERNEL_DTYPES, "dtype")
        from triton_ref.launching import properties
        from triton_ref.matmul import tile_config

        here = {}  # else the table is that of an H200
        if self.gpu:
            found = properties(self.device)
            is_tma = found.capability >= 90 and dtype != torch.float32 and n % 8 == k % 8 == 0
            here = {"is_tma": is_tma, "num_sms": found.num_sms, "shared_memory": found.max_shared_memory}
        return {"backend": "triton", "kernel": "triton_matmul", **tile_config(dtype, m, n, k, **here)}

    def get_attention_config(self, head_dim: int = 64, dtype: torch.dtype = torch.float16,
                             backend: str = "auto") -> dict[str, Any]:
        """How flash_attention serves contiguous tensors of a head_dim and a dtype: as get_matmul_config. The kernels of
        "cuda" have tables of their own in csrc. Errors as of flash_attention."""
        backend = backend_name(backend, torch.empty(0, device=self.device, dtype=dtype))
        if (why_not := BACKENDS[backend].why_not(self.device)) is not None:
            raise why_not
        q = torch.empty(1, 1, 64, max(head_dim, 0), device=self.device, dtype=dtype)
        check_qkv(q, q, q, BACKENDS[backend].dtypes)
        check_fp8(q)
        if backend == "triton":
            from triton_ref.attention import can_use_tma, candidates

            config, *_ = candidates(q, empty_outputs(q, q)[0], can_use_tma(q))[0]
            kernel = "attention_hopper.py" if "kConsumers" in config else "attention.py"
            return {"backend": "triton", "kernel": kernel, **config}
        if backend == "cuda":
            return {"backend": backend, "kernel": which_kernel(q, q, q)}
        names = {"torch": "scaled_dot_product_attention", "reference": "reference_attention"}
        return {"backend": backend, "kernel": names[backend]}

    def select_matmul_kernel(self) -> Callable:
        """(a, b) -> a @ b: triton_matmul on a GPU that Triton serves, else torch.matmul."""
        if self.get_matmul_config()["backend"] == "torch":
            return torch.matmul
        from triton_ref.matmul import triton_matmul

        return triton_matmul

    def select_attention_kernel(self) -> Callable:
        """flash_attention by the backend that is best here, as "auto" chooses it."""
        return functools.partial(flash_attention, backend=self.get_attention_config()["backend"])


def get_matmul_config(m: int = SIZE, n: int = SIZE, k: int = SIZE, dtype: torch.dtype = torch.float16,
                      backend: str = "auto") -> dict[str, Any]:
    """AdaptiveKernelSelector().get_matmul_config(...)"""
    return AdaptiveKernelSelector().get_matmul_config(m, n, k, dtype, backend)


def get_attention_config(head_dim: int = 64, dtype: torch.dtype = torch.float16,
                         backend: str = "auto") -> dict[str, Any]:
    """AdaptiveKernelSelector().get_attention_config(...)"""
    return AdaptiveKernelSelector().get_attention_config(head_dim, dtype, backend)


def get_optimal_matmul() -> Callable:
    """AdaptiveKernelSelector().select_matmul_kernel()"""
    return AdaptiveKernelSelector().select_matmul_kernel()


def get_optimal_attention() -> Callable:
    """AdaptiveKernelSelector().select_attention_kernel()"""
    return AdaptiveKernelSelector().select_attention_kernel()
