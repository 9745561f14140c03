"""The implementations of attention that are compared: ours by each kernel, and every peer that can be imported.

Each is a function (q, k, v, call) -> out of tensors (B, H, S, D), or it raises where it cannot serve them.
"""

import functools
import importlib
import importlib.util
import inspect
import math
import statistics
import timeit
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from .. import activated, flash_attention, flash_attn_func, flash_attn_varlen_func, force_kernel
from ..options import Options
from ..reference.scores import visible_keys
from .masks import MASKS, build_by_torch
from .measure import DTYPE_NAMES, FP8_DTYPE_NAMES, Impl

HALVES = ("float16", "bfloat16")
SCORES = ("none", "softcap", "alibi", "bias", "mask")
MASKED = tuple(f"masked {name}" for name in MASKS)
# Kinds of calls: the option that each has beside a causal mask.
KINDS = ("dense", "packed", "window", "sinks", *SCORES[1:], *MASKED, "deterministic", "dropout", "pages")


@dataclass(eq=False)  # one is like no other, so that what is cached by it is its own
class Call:
    """Arguments beside q, k and v."""

    causal: bool
    keywords: dict = field(default_factory=dict)  # of flash_attention and reference_attention
    mask_mod: Callable | None = None  # (b, h, row, col) -> whether the row sees the key, for FlexAttention
    score_mod: Callable | None = None  # (score, b, h, row, col) -> score, for FlexAttention
    native: dict | None = None  # keywords of flash_attention that say the same as a block mask
    attn_mask: torch.Tensor | None = None  # the bias or the mask, with a causal mask in it, for SDPA
    ways: dict = field(default_factory=dict)  # {way: [(function, tensors, keywords), ...]} of a call to caches
    words: torch.Tensor | None = None  # int32, as many as the valid keys and values have, for the plain read


def flash(q, k, v, call, backend):
    return flash_attention(q, k, v, call.causal, backend=backend, **call.keywords)


@functools.lru_cache(maxsize=1)  # not part of what is timed
def causal_mask(seqlen_q, seqlen_k, device):
    return visible_keys(seqlen_q, seqlen_k, Options(window_right=0), device)


def manual(q, k, v, call):
    """Plain attention: all scores go to memory and come back, several times."""
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    att = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]))
    if call.causal:
        att = att.masked_fill(~causal_mask(q.shape[2], k.shape[2], q.device), -math.inf)
    return att.softmax(-1) @ v


def sdpa(q, k, v, call, backend):
    mask = call.attn_mask
    if mask is None and call.causal and q.shape[2] != k.shape[2]:  # SDPA's is_causal is aligned top-left
        mask = causal_mask(q.shape[2], k.shape[2], q.device)
    with sdpa_kernel(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a backend that cannot serve warns of every reason, then raises
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=call.keywords.get("dropout_p", 0.0),
                                            is_causal=call.causal and mask is None,
                                            enable_gqa=q.shape[1] != k.shape[1])


@functools.lru_cache(maxsize=1)  # one shape at a time, tuned at its first call and forgotten at that of the next
def compiled_flex(shape_q, shape_k, dtype, mask_mod, score_mod, mode):
    """FlexAttention compiled for one shape: (q, k, v) -> out. Its mask is made here, outside of what is timed."""
    from torch._inductor import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    config.compile_threads = 1  # threads alone: what worker processes compile, this one compiles again to time it
    mask = mask_mod and create_block_mask(mask_mod, None, None, shape_q[2], shape_k[2], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
    return functools.partial(compiled, score_mod=score_mod, block_mask=mask, enable_gqa=shape_q[1] != shape_k[1])


def flex(q, k, v, call, mode="max-autotune-no-cudagraphs"):
    return compiled_flex(q.shape, k.shape, q.dtype, call.mask_mod, call.score_mod, mode)(q, k, v)


def package(q, k, v, call, module):
    """flash_attn_func of a package, whose tensors are (B, S, H, D); some of its versions return (out, lse)."""
    function = importlib.import_module(module).flash_attn_func
    out = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=call.causal)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


@functools.lru_cache(maxsize=1)  # not part of what is timed
def repeated(k, v, times):
    return tuple(x.repeat_interleave(times, dim=1) for x in (k, v))


def torch_varlen(q, k, v, call):
    """varlen_attn of torch, FlashAttention-2. In torch 2.11, it needs as many heads of k and v as of q."""
    keywords = {"window_size": (-1, 0 if call.causal else -1)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        keywords["enable_gqa"] = True
    else:
        k, v = repeated(k, v, q.shape[1] // k.shape[1])
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    bounds, longest = call.keywords["cu_seqlens_q"], call.keywords["max_seqlen_q"]
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, **keywords).transpose(0, 1)[None]


mask_of_torch = functools.lru_cache(maxsize=1)(functools.partial(build_by_torch, compile=False))


def from_torch(q, k, v, call):
    """Ours with torch's BlockMask, in blocks of 128 x 128."""
    return flash_attention(q, k, v, backend="cuda", block_mask=mask_of_torch(call.mask_mod, q.shape[2], q.device))


def native(q, k, v, call):
    """Ours without a block mask, by options that say the same."""
    if "cu_seqlens_q" not in call.native:
        return flash_attention(q, k, v, backend="cuda", **call.native)
    packed = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v))  # views
    out = flash_attention(*packed, backend="cuda", **call.native)
    return out[0].transpose(0, 1).unflatten(0, (q.shape[0], -1)).transpose(1, 2)


CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def forced(kernel, function):
    """function by one kernel of csrc."""
    def by_this(*args):
        with force_kernel(kernel):
            return function(*args)

    return by_this


def ours(backend, devices=("cuda", "cpu"), dtypes=DTYPE_NAMES, kernel=None):
    return Impl(functools.partial(flash, backend=backend), devices, backend, dtypes, KINDS, kernel)


def of_torch(backend, devices=("cuda",)):
    return Impl(functools.partial(sdpa, backend=backend), devices,
                kinds=("dense", "bias", "mask", "deterministic", "dropout"))


IMPLS = {
    "manual": Impl(manual),
    "cuda": ours("cuda", ("cuda",)),  # the kernel that serves a call as it comes; not by default, since others repeat it
    "cuda:simt": ours("cuda", ("cuda",), kernel="simt"),
    "cuda:sm80": ours("cuda", ("cuda",) * (CAPABILITY >= (8, 0)), HALVES, "sm80"),
    "cuda:sm90": ours("cuda", ("cuda",) * (CAPABILITY == (9, 0)), HALVES, "sm90"),
    "cuda:dmma": ours("cuda", ("cuda",) * (CAPABILITY == (9, 0)), ("float32",), "dmma"),
    "cuda:host": ours("cuda", ("cpu",)),
    "cuda:from_torch": Impl(from_torch, backend="cuda", kinds=MASKED),
    "cuda:native": Impl(native, backend="cuda", kinds=tuple(f"masked {x}" for x in ("causal", "window", "documents"))),
    "triton": ours("triton", dtypes=DTYPE_NAMES + FP8_DTYPE_NAMES),
    "torch:cudnn": of_torch(SDPBackend.CUDNN_ATTENTION),
    "torch:flash": of_torch(SDPBackend.FLASH_ATTENTION, ("cuda", "cpu")),
    "torch:efficient": of_torch(SDPBackend.EFFICIENT_ATTENTION),
    "torch:math": of_torch(SDPBackend.MATH, ("cuda", "cpu")),
    "torch:varlen": Impl(torch_varlen, ("cuda",), dtypes=HALVES, kinds=("packed",)),
    "flex": Impl(flex, ("cuda",), dtypes=HALVES,  # each shape is compiled and tuned, too long for a demo in fp32
                 kinds=("dense", "packed", "window", *SCORES[1:])),
    **{module: Impl(functools.partial(package, module=module), ("cuda",), dtypes=HALVES)  # FlashAttention-2 and -3
       for module in ("flash_attn", "flash_attn_interface") if importlib.util.find_spec(module)},
}


# Gradients: (q, k, v, dout, call) -> (dq, dk, dv).

def backward_of(forward):
    """Only the backward pass, by the graph that the first call with these tensors made."""
    def backward(q, k, v, dout, call):
        return torch.autograd.grad(graph_of(forward, q, k, v, call), (q, k, v), dout, retain_graph=True)

    return backward


@functools.lru_cache(maxsize=1)  # what one implementation saves must not take memory from the next
def graph_of(forward, q, k, v, call):
    return forward(q, k, v, call)


def step_of(forward):
    """Both passes, by a graph that is made in the call."""
    def step(q, k, v, dout, call):
        return torch.autograd.grad(forward(q, k, v, call), (q, k, v), dout)

    return step


@contextmanager
def deterministic_torch():
    """torch's own operations are deterministic, or raise. New memory is not filled, which would take time."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def host_cost(gradients):
    """{name: µs} of a small call from Python to its return, without waiting for the GPU; median of 7 times 1000 calls,
    in turns, since a host's clock changes. A call is a forward pass, or both passes if gradients are wanted."""
    q, k, v, dout = torch.randn(4, 1, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
    rows = q.transpose(1, 2).contiguous()  # (B, S, H, D)
    packed, bounds = rows[0], torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    contexts = {f"torch:{name}": functools.partial(sdpa_kernel, getattr(SDPBackend, f"{name.upper()}_ATTENTION"))
                for name in ("flash", "efficient", "cudnn")}
    contexts |= {"torch": nullcontext, "activated": activated}
    forwards = {"flash_attention": flash_attention, **dict.fromkeys(contexts, scaled_dot_product_attention)}
    if gradients:
        qkv = [x.requires_grad_() for x in (q, k, v)]
        forwards["triton"] = functools.partial(flash_attention, backend="triton")
        calls = {name: lambda f=f: torch.autograd.grad(f(*qkv), qkv, dout) for name, f in forwards.items()}
    else:
        calls = {name: lambda f=f: f(q, q, q) for name, f in forwards.items()}
        calls |= {"flash_attn_func": lambda: flash_attn_func(rows, rows, rows), "flash_attn_varlen_func": lambda:
                  flash_attn_varlen_func(packed, packed, packed, bounds, bounds, 64, 64)}
    times = {name: [] for name in calls}
    for _ in range(8):  # the first is the warm-up
        for name, call in calls.items():
            with torch.set_grad_enabled(bool(gradients)), contexts.get(name, nullcontext)():
                times[name].append(timeit.timeit(call, torch.cuda.synchronize, number=1000))
    return {name: round(statistics.median(of_name[1:]) * 1e3, 2) for name, of_name in times.items()}
