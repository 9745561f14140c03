"""Benchmark of attention: the table of implementations, ours and every peer that can be imported, and a Case.

Read next: varlen.py, window.py, scores.py and decode.py, calls that ask for more; measure.py, which makes a row of the
JSON from one of each.
"""

import functools
import importlib
import importlib.util
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .. import activated, flash_attention, flash_attn_func, flash_attn_varlen_func, force_kernel, reference_attention
from ..checks import MAX_HEAD_DIM
from ..options import Lengths
from ..reference.scores import visible_keys
from ..toolkit.validation import allowed_error
from .measure import DTYPE_NAMES, FP8_DTYPE_NAMES, MEASURED, Impl, host_us, normal, timed, truth_fits

DTYPES = DTYPE_NAMES + FP8_DTYPE_NAMES
HALVES = ("float16", "bfloat16")
TITLE = "Attention forward pass"
BASELINE = "manual"  # of the speed-ups
ROW = ("op", "impl", "dtype", "head_dim", "causal", "batch_size", "nheads", "nheads_k", "seqlen_q", "seqlen_k",
       *MEASURED)
SHAPES = "B,H,S,D or B,H,Sq,D,Hk,Sk"


class Shape(NamedTuple):
    batch_size: int
    nheads: int
    seqlen_q: int
    head_dim: int
    nheads_k: int
    seqlen_k: int

    def __str__(self):
        return ",".join(map(str, self[:4] if self[4:] == (self.nheads, self.seqlen_q) else self))

    @classmethod
    def of(cls, sizes):
        """From the integers of SHAPES. Raises ValueError."""
        if len(sizes) not in (4, 6):
            raise ValueError(f"neither {SHAPES.replace(' or', ' nor')}")
        shape = cls(*sizes) if len(sizes) == 6 else cls(*sizes, sizes[1], sizes[2])
        if shape.nheads % shape.nheads_k or shape.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"H must be a multiple of Hk, and D at most {MAX_HEAD_DIM}")
        return shape

    @property
    def x(self):
        return self.seqlen_q

    @property
    def parts(self):
        """{letter: size}. H and S are of the queries and, behind a slash, of the keys where they differ."""
        heads, lengths = (str(x) if x == y else f"{x}/{y}" for x, y in ((self.nheads, self.nheads_k),
                                                                        (self.seqlen_q, self.seqlen_k)))
        return {"B": str(self.batch_size), "H": heads, "S": lengths, "D": str(self.head_dim)}

    @property
    def sweeps(self):
        """The sweeps over S that it can be part of, as (head_dim, what else is fixed): B·S, or else B."""
        heads = f"H {self.parts['H']}"
        fixed = f"B·S {self.batch_size * self.seqlen_q}", f"B {self.batch_size}"
        return [(f"head_dim {self.head_dim}", f"{heads}, {x}") for x in fixed] if self.seqlen_q == self.seqlen_k else []

    @property
    def elements(self):
        return self.batch_size * self.nheads * self.seqlen_q * self.seqlen_k


DEFAULT_SHAPES = {device: [Shape(16, 12, 64, 64, 12, 64)] for device in ("cuda", "cpu")}
DEFAULT_SEQLENS = {"cuda": "64,128,256,512,1024,2048,4096", "cpu": "32,64,128"}  # Triton's interpreter is slow


@dataclass(eq=False)  # one is like no other, so that what is cached by it is its own
class Call:
    """Arguments of a call beside q, k and v, where there are more than a causal mask."""

    causal: bool
    keywords: dict = field(default_factory=dict)  # of flash_attention and reference_attention
    mask_mod: Callable | None = None  # (b, h, row, col) -> whether the row sees the key, for FlexAttention
    score_mod: Callable | None = None  # (score, b, h, row, col) -> score, for FlexAttention


def flash_call(q, k, v, call, backend):
    return flash_attention(q, k, v, call.causal, backend=backend, **call.keywords)


@functools.lru_cache(maxsize=1)  # not part of what is timed
def causal_mask(seqlen_q, seqlen_k, device):
    return visible_keys(seqlen_q, seqlen_k, (-1, 0), Lengths(), device)


def manual_attn(q, k, v, causal):
    """Plain attention, the baseline: all scores go to memory and come back, several times."""
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    att = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]))
    if causal:
        att = att.masked_fill(~causal_mask(q.shape[2], k.shape[2], q.device), -math.inf)
    return att.softmax(-1) @ v


def sdpa(q, k, v, causal, dropout_p=0.0):
    is_square = q.shape[2] == k.shape[2]  # only then is SDPA's is_causal, aligned top-left, the same as ours
    mask = causal_mask(q.shape[2], k.shape[2], q.device) if causal and not is_square else None
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=causal and is_square,
                                        enable_gqa=q.shape[1] != k.shape[1])


def sdpa_with(backend):
    def forward(q, k, v, causal, dropout_p=0.0):
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backend that cannot serve warns of every reason, then raises
            return sdpa(q, k, v, causal, dropout_p)

    return forward


def by_kernel(kernel, function):
    """function, which calls flash_attention or its derivative, by one kernel of csrc for GPUs."""
    def forced(*args):
        with force_kernel(kernel):
            return function(*args)

    return forced


@functools.lru_cache(maxsize=1)  # one shape at a time, tuned at its first call and forgotten at that of the next
def compiled_flex(shape_q, shape_k, dtype, mask_mod, score_mod=None):
    """FlexAttention compiled for one shape: (q, k, v) -> out. Its mask is made here, outside of what is timed."""
    from torch._inductor import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    config.compile_threads = 1  # threads alone: what worker processes compile, this one compiles again to time it
    mask = mask_mod and create_block_mask(mask_mod, None, None, shape_q[2], shape_k[2], device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs")
    return functools.partial(compiled, score_mod=score_mod, block_mask=mask, enable_gqa=shape_q[1] != shape_k[1])


@functools.lru_cache(maxsize=1)  # the same function for the same shift, as compiled_flex is cached by it
def causal_mask_mod(shift):
    return lambda b, h, row, col: col <= row + shift


def flex(q, k, v, causal):
    mask_mod = causal_mask_mod(k.shape[2] - q.shape[2]) if causal else None
    return compiled_flex(q.shape, k.shape, q.dtype, mask_mod)(q, k, v)


def flex_call(q, k, v, call):
    return compiled_flex(q.shape, k.shape, q.dtype, call.mask_mod, call.score_mod)(q, k, v)


def package(module):
    """flash_attn_func of a package, whose tensors are (B, S, H, D); some of its versions return (out, lse)."""
    def forward(q, k, v, causal):
        function = importlib.import_module(module).flash_attn_func
        out = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return forward


CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def ours(forward):
    """Each kernel of this library, by forward(*args, backend=...)."""
    by_cuda = functools.partial(forward, backend="cuda")
    return {
        "cuda:simt": Impl(by_kernel("simt", by_cuda), ("cuda",), "cuda"),
        "cuda:sm80": Impl(by_kernel("sm80", by_cuda), ("cuda",) * (CAPABILITY >= (8, 0)), "cuda", HALVES),
        "cuda:sm90": Impl(by_kernel("sm90", by_cuda), ("cuda",) * (CAPABILITY == (9, 0)), "cuda", HALVES),
        "cuda:dmma": Impl(by_kernel("dmma", by_cuda), ("cuda",) * (CAPABILITY == (9, 0)), "cuda", ("float32",)),
        "cuda:host": Impl(by_cuda, ("cpu",), "cuda"),
        "triton": Impl(functools.partial(forward, backend="triton"), backend="triton", dtypes=DTYPES),
    }


flash_cuda = functools.partial(flash_attention, backend="cuda")
flash_triton = functools.partial(flash_attention, backend="triton")
IMPLS = {
    "manual": Impl(manual_attn),
    **ours(flash_attention),
    "torch:cudnn": Impl(sdpa_with(SDPBackend.CUDNN_ATTENTION), ("cuda",)),
    "torch:flash": Impl(sdpa_with(SDPBackend.FLASH_ATTENTION)),
    "torch:efficient": Impl(sdpa_with(SDPBackend.EFFICIENT_ATTENTION), ("cuda",)),
    "torch:math": Impl(sdpa_with(SDPBackend.MATH)),
    "flex": Impl(flex, ("cuda",), dtypes=HALVES),  # each shape is compiled and tuned, too long for a demo in fp32
    **{module: Impl(package(module), ("cuda",), dtypes=HALVES)  # FlashAttention-2 and -3
       for module in ("flash_attn", "flash_attn_interface") if importlib.util.find_spec(module)},
}
# Functions to profile, by the first part of a name in IMPLS.
PROFILES = {
    "manual": ("manual attention", manual_attn),
    "cuda": ("minimal flash attention", flash_cuda),
    "triton": ("triton flash attention", flash_triton),
    "torch": ("scaled_dot_product_attention", sdpa),
    "flex": ("FlexAttention", flex),
    **{module: (module, package(module)) for module in ("flash_attn", "flash_attn_interface")},
}

HOST_CONTEXTS = {"torch:flash": functools.partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION),
                 "torch:efficient": functools.partial(sdpa_kernel, SDPBackend.EFFICIENT_ATTENTION),
                 "torch:cudnn": functools.partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION), "activated": activated}


@torch.no_grad()
def host_cost(device):
    """{name: µs} that a small forward pass takes on the host."""
    q = torch.randn(1, 4, 64, 64, device=device, dtype=torch.bfloat16)
    rows = q.transpose(1, 2).contiguous()  # (B, S, H, D)
    packed, bounds = rows[0], torch.tensor([0, 64], dtype=torch.int32, device=device)
    return host_us({"flash_attention": lambda: flash_attention(q, q, q),
                    "flash_attn_func": lambda: flash_attn_func(rows, rows, rows),
                    "flash_attn_varlen_func": lambda: flash_attn_varlen_func(packed, packed, packed, bounds, bounds,
                                                                             64, 64),
                    "torch:flash": lambda: scaled_dot_product_attention(q, q, q),
                    "torch:efficient": lambda: scaled_dot_product_attention(q, q, q),
                    "torch:cudnn": lambda: scaled_dot_product_attention(q, q, q),
                    "torch": lambda: scaled_dot_product_attention(q, q, q),
                    "activated": lambda: scaled_dot_product_attention(q, q, q),
                    "empty_like": lambda: torch.empty_like(q)}, HOST_CONTEXTS)


def attention_with_fp8_probabilities(q, k, v, causal):
    """Attention in fp32 but for P, which is rounded to fp8. Its error is the base of the error rule for fp8. Returns
    bf16."""
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q.float() @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]))
    if causal:
        scores = scores.masked_fill(~causal_mask(q.shape[2], k.shape[2], q.device), -math.inf)
    P = (scores - scores.amax(-1, keepdim=True)).exp_()
    row_sum = P.sum(-1, keepdim=True)
    return (P.to(q.dtype).float() @ v / row_sum).bfloat16()


class Case:
    """Inputs of a setting, the result in fp64 of what is judged, and the error that it allows: None where even one head
    in fp64 would not fit."""

    impls = IMPLS
    op = "forward"
    columns = ROW
    scores_kept = 1  # the memory that the truth takes, in that of the forward pass

    def __init__(self, setting, device):
        self.shape, self.dtype, self.causal = self.setting = setting
        self.device = device
        torch.manual_seed(0)
        q, k, v = self.inputs()
        self.args = q, k, v, self.call()
        self.flops = 4 * self.shape.nheads * self.shape.head_dim * self.pairs()
        self.out_bytes = q.nbytes * (2 if self.dtype in FP8_DTYPE_NAMES else 1)
        self.bytes = q.nbytes + k.nbytes + v.nbytes + self.out_bytes  # each read or written once
        self.truth = self.tolerance = None
        if self.has_truth(self.shape, device):
            q, k, v = map(self.judged, (q, k, v))
            self.truth = self.exact(q.double(), k.double(), v.double())
            self.tolerance = self.allowed(self.base(q, k, v), self.truth)

    def inputs(self):
        b, h, seqlen_q, d, h_k, seqlen_k = self.shape[:6]
        sizes = (b, h, seqlen_q, d), (b, h_k, seqlen_k, d), (b, h_k, seqlen_k, d)
        return [normal(size, self.device, self.dtype) for size in sizes]

    def call(self):
        """The argument of implementations after q, k and v."""
        return self.causal

    def pairs(self):
        """How many pairs of a row and a key FLOPs count, in each head."""
        return self.shape.batch_size * self.shape.seqlen_q * self.shape.seqlen_k / (2 if self.causal else 1)

    def exact(self, q, k, v):
        return reference_attention(q, k, v, self.causal)

    def base(self, q, k, v):
        """PyTorch's result in the dtype of the inputs. Its error sets the error that is allowed."""
        is_fp8 = self.dtype in FP8_DTYPE_NAMES
        forward = attention_with_fp8_probabilities if is_fp8 else IMPLS["torch:math"].forward
        return forward(q, k, v, self.causal)

    def allowed(self, base, truth):
        return allowed_error(base, truth)

    @classmethod
    def has_truth(cls, shape, device):
        heads = shape.nheads // shape.nheads_k
        return truth_fits(cls.scores_kept * heads * shape.seqlen_q * shape.seqlen_k, device)

    def judged(self, x):
        """The part of x (B, H or Hk, S, D) that is compared with the truth. This is all of x if that fits in fp64. Else
        it is the last key/value head of the last sample, or the query heads that read it."""
        if truth_fits(self.scores_kept * self.shape.elements, self.device):
            return x
        return x[-1:, -(x.shape[1] // self.shape.nheads_k):]

    def timed(self, forward):
        return timed(self.device, forward, *self.args)

    def row(self, impl, measured):
        known = dict(op=self.op, impl=impl, dtype=self.dtype, causal=self.causal, **self.sizes(), **measured)
        return {key: known.get(key) for key in self.columns}

    def sizes(self):
        return self.shape._asdict()


CASES = {Shape: Case}
