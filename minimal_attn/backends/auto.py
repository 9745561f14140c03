"""Which backend serves backend="auto"."""

import functools

import torch

from .. import _build
from .._build import assume_constant_result
from ..checks import FP8_DTYPES, is_transformed, wants_gradient
from ..options import Options, warn
from . import triton


def auto_backend(q: torch.Tensor, *others: torch.Tensor | None, options: Options = Options()) -> str:
    """The backend that "auto" means. others: what else may want a gradient. options: of the call, maybe unchecked."""
    if not q.is_cuda:
        return "torch"
    if q.dtype in FP8_DTYPES:
        return "triton"
    if is_transformed() and any(map(wants_gradient, (q, *others))):
        return "torch"
    if options.score_mod is not None and (torch.compiler.is_compiling() or is_transformed()):
        return "torch"  # the twin reads it only where nothing traces or transforms
    name = _first_available()
    if name == "cuda" and options.score_mod is not None:
        return "torch" if triton.why_not_imported() else "triton"
    return name


# Dynamo looks through functools.cache, so the cached function is not itself the constant one.
@assume_constant_result
def _first_available():
    return _choose_first_available()


@functools.cache
def _choose_first_available():
    """"auto" for CUDA tensors. csrc has the faster kernels."""
    if (why_not_cuda := _build.why_not(on_gpu=True)) is None:
        return "cuda"
    why_not_triton = triton.why_not_imported()
    name = "triton" if why_not_triton is None else "torch"
    others = "" if why_not_triton is None else f"; triton is not available: {why_not_triton}"
    warn(f"backend='auto' takes {name}, since cuda is not available: {why_not_cuda}{others}")
    return name
