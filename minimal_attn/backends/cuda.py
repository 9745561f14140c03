"""backend="cuda": the way to csrc, and the choice of one of its kernels."""

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import _build
from ..checks import check_choice, empty_outputs, is_aligned, is_eager, wants_gradient
from ..options import OF_OP, Backend, Options, warn
from ..reference.definition import DTYPES
from ..reference.pages import over_gathered


# torch.compile runs this while it traces and keeps the answer: building a library cannot be part of a graph.
@_build.assume_constant_result
def _load_ops():
    global _fast_forward
    library = _build.load()
    _fast_forward = library.fast_forward if library.has_cuda else None
    return True


_fast_forward = None  # of csrc/binding/fast_path.cpp, once it is loaded
ON_TENSOR_CORES = torch.float16, torch.bfloat16


@functools.cache  # once a reason
def _warn_slow(reason):
    warn(f"tensor cores cannot serve this call, which is slower without them: {reason}")


def _needs_copies(q, k, v):
    """Whether tensor cores cannot read these tensors, but could read copies of them."""
    if not q.is_cuda or q.dtype not in ON_TENSOR_CORES:
        return False
    if torch.compiler.is_compiling():
        return not all(map(is_aligned, (q, k, v)))
    choice = type(q) in (Tensor, torch.nn.Parameter) and _choice_of(q, k, v, Options())
    return bool(choice and choice[1])


def _choice_of(q, k, v, options):
    """(kernel, why it is slow or None) for checked arguments on the GPU that is here; None for memory of vmap's."""
    return _build.load().which_kernel(q, k, v, *options[:OF_OP + 1], None, True)


def _forward_of_copies(q, k, v, options):
    """_forward of aligned copies, with zeros up to the next multiple of 8 columns. Gradients go through them."""
    try:
        copies = [pad(x, (0, -x.shape[-1] % 8)) for x in (q, k, v)]  # or clones
    except torch.OutOfMemoryError:
        return _launch(q, k, v, options)  # slower, which it says
    out, *more = _launch(*copies, options)
    return empty_outputs(q, v)[0].copy_(out[..., :v.shape[-1]]), *more


def _forward(q, k, v, options):
    if options.score_mod is not None:
        raise NotImplementedError("backend='cuda' does not serve score_mod: its kernels are compiled before they could "
                                  "know the function; use backend='auto'")
    if q.is_cuda and q.dtype == torch.float64:
        raise TypeError("Unsupported dtype: q is torch.float64, which backend='cuda' takes on the CPU alone; allowed "
                        "on a GPU are float32, float16, bfloat16")
    _load_ops()
    return (_forward_of_copies if _needs_copies(q, k, v) else _launch)(q, k, v, options)


def _launch(q, k, v, options):
    inputs = q, k, v, *options[:OF_OP + 1]
    if is_eager(q, k, v, *options.tensors):
        library = _build.load()
        needs_grad = any(map(wants_gradient, (q, k, v, *options.differentiable)))
        attend = library.differentiable_forward if needs_grad else library.flash_forward
        *output, slow_because = attend(*inputs)
    else:
        output, slow_because = torch.ops.minimal_attn.flash_forward(*inputs), None  # without a reason
    if slow_because:
        _warn_slow(slow_because)
    return output if options.return_max_logits else output[:2]


_host_forward_cached = over_gathered(_forward)


def can_read_cache(q, *caches):
    """Whether "cuda" serves q's dtype, and head_dims, strides and addresses of q and of caches that are read."""
    return not q.is_cuda or q.dtype in ON_TENSOR_CORES and (not caches or all(map(is_aligned, (q, *caches))))


def _forward_cached(q, k, v, options, cache):
    if not q.is_cuda:
        return _host_forward_cached(q, k, v, options, cache)
    _check_cache_dtype("q", q, "reads")
    _load_ops()
    return torch.ops.minimal_attn.flash_decode(q, k, v, *options.of_decode(cache))


def _append(k, v, k_cache, v_cache, append):
    if k.is_cuda:
        _check_cache_dtype("k", k, "writes")
        if append.q is not None and not can_read_cache(append.q, k_cache, v_cache):  # before anything is written
            raise NotImplementedError("backend='cuda' cannot serve this call: it reads caches whose head_dims, strides "
                                      "and addresses are multiples of 16 bytes; use backend='triton'")
    _load_ops()
    return torch.ops.minimal_attn.append_kvcache(k, v, k_cache, v_cache, *append)


def _check_cache_dtype(name, x, verb):
    if x.dtype not in ON_TENSOR_CORES:
        raise TypeError(f"Unsupported dtype: {name} is {x.dtype}, and backend='cuda' {verb} caches on a GPU in float16 "
                        "and bfloat16 alone: use backend='triton' for float32")


def _why_not(device=None):
    if device is not None and device.type not in ("cuda", "cpu", "meta"):
        return ValueError(f"CUDA tensors required: backend='cuda' takes CUDA or CPU tensors, got {device}")
    reason = _build.why_not(on_gpu=device is not None and device.type == "cuda")
    return RuntimeError(reason) if reason else None


def _backward(dout, q, k, v, out, lse, options):
    _load_ops()
    is_deterministic = options.deterministic or torch.are_deterministic_algorithms_enabled()
    return torch.ops.minimal_attn.flash_backward(dout, None, q, k, v, out, lse, *options.of_op(), is_deterministic,
                                                 True, True, False, False)[:3]


BACKEND = Backend(_forward, DTYPES, False, _forward_cached, _append, _backward, _why_not)


def kernel_of(q, k, v, options):
    """attention.which_kernel of checked arguments."""
    if (why_not := _why_not(q.device)) is not None:
        raise why_not
    if not q.is_cuda and not q.is_meta:
        return "host"
    # As a call does, which copies what is not contiguous to rows that are aligned as far as head_dim allows.
    q, k, v = (x if x.stride(-1) == 1 else x.new_empty(x.shape) for x in (q, k, v))
    choice = None if q.is_meta else _choice_of(*(x if x.ndim == 4 else x.unsqueeze(1) for x in (q, k, v)), options)
    if choice is None:
        raise ValueError("which_kernel needs tensors with memory of their own: not on the device meta, nor under "
                         "torch.func's transforms")
    if choice[1] is not None:  # copies will be aligned
        return kernel_of(*(x.new_empty(*x.shape[:-1], -(-x.shape[-1] // 8) * 8) for x in (q, k, v)), options)
    return choice[0]


class force_kernel:
    """Serve calls with backend="cuda" on a GPU by one kernel of csrc, for tests and benchmarks.

    It is "simt", "sm80", "sm90" or "dmma", from this call on, or inside a with statement: with force_kernel("sm80"):
    ... With None, it is chosen for each call again. It is forced for the whole process, so use one thread at a time.
    Forward and backward passes obey what is forced when they run. A call that it cannot serve raises ValueError.
    Attention to caches never does: with "sm90", or if none is forced, it has Hopper's kernels for samples with many
    rows, else decode.cu alone. float8 and CPU tensors do not change. With torch.compile, put the with statement around
    the compiled function. The environment variable MINIMAL_ATTN_KERNEL forces a kernel when csrc is loaded.

    Raises:
        ValueError: there is no such kernel. RuntimeError: the extension cannot be built or loaded.
    """

    def __init__(self, kernel: str | None):
        self._kernel = check_choice("kernel", kernel, (None, *_build.GPU_KERNELS))
        self._before = _build.load().force_kernel(kernel)

    def __enter__(self):
        _build.load().force_kernel(self._kernel)  # for one that is entered again
        return self

    def __exit__(self, *exception):
        _build.load().force_kernel(self._before)
