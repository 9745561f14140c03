"""backend="triton": the way to triton_ref, which needs Triton and is therefore imported on first use."""

from collections.abc import Callable

import torch

from .._build import assume_constant_result
from ..checks import TWIN_DTYPES
from ..options import Backend

_twin = None  # the module triton_ref.ops, once it is imported


# torch.compile runs this while it traces and keeps the answer: an import cannot be part of a graph.
@assume_constant_result
def why_not_imported() -> str | None:
    """Import triton_ref: None, or why that fails."""
    global _twin
    try:
        from triton_ref import ops as _twin
    except Exception as error:  # no Triton, or one that is broken
        return f"{type(error).__name__}: {error}"
    return None


@assume_constant_result
def _is_interpreted():
    return _twin.INTERPRETING


def matmul() -> Callable:
    """triton_ref's product; ModuleNotFoundError without Triton."""
    if error := why_not_imported():
        raise ModuleNotFoundError(f"triton is required for triton_matmul (pip install triton): {error}")
    return _twin.triton_matmul


def _backward(dout, q, k, v, out, lse, options):
    is_fixed = options.deterministic or torch.are_deterministic_algorithms_enabled()  # as in triton_ref/ops.py
    return torch.ops.minimal_attn.triton_backward(dout, None, q, k, v, out, lse, *options.of_op(),
                                                  options.autotune and not is_fixed)[:3]


def _append(k, v, k_cache, v_cache, append):
    return torch.ops.minimal_attn.triton_append(k, v, k_cache, v_cache, *append)


def _why_not(device=None):
    if error := why_not_imported():
        return ModuleNotFoundError(f"triton is required for backend='triton' (pip install triton): {error}")
    on_cpu = device.type == "cpu" if device is not None else not torch.accelerator.is_available()
    if on_cpu and not _is_interpreted():
        return ValueError("CUDA tensors required: backend='triton' got CPU tensors, and Triton's interpreter, which "
                          "runs the kernel on the CPU, is off; set TRITON_INTERPRET=1 before Python starts")
    return None


BACKEND = Backend(lambda *inputs: _twin.forward(*inputs), TWIN_DTYPES, False,
                  lambda *inputs: _twin.forward_cached(*inputs), _append, _backward, _why_not)
