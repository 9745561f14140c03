"""Cases: the inputs of one setting, the truth in fp64, the error that it allows, and the work that a row counts."""

import argparse
import functools
import math
import re
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from .. import BlockMask, reference_attention
from ..checks import MAX_HEAD_DIM
from ..reference.dropout import seed_with_origins
from ..toolkit.benchmark import peak_bytes
from ..toolkit.validation import allowed_error
from .impls import KINDS, MASKED, SCORES, Call, backward_of, causal_mask, deterministic_torch, forced, sdpa, step_of
from .masks import MASKS, build, native_options
from .measure import FP8_DTYPE_NAMES, MEASURED, each, judge, normal, timed, truth_fits

# The columns of rows, by their op: those between sizes and numbers, and those behind the numbers.
SIZES = ("head_dim", "causal", "batch_size", "nheads", "nheads_k", "seqlen_q", "seqlen_k")
COLUMNS = {op: ("op", "impl", "dtype", *SIZES, *more.split(), *MEASURED, *behind.split()) for op, more, behind in (
    ("forward", "head_dim_v", ""), ("backward", "head_dim_v deterministic dropout_p", ""),
    ("forward_backward", "head_dim_v", ""),
    ("varlen", "lengths", ""), ("varlen_backward", "lengths", ""), ("window", "window_size", ""), ("sinks", "", ""),
    ("scores", "score", ""), ("decode", "page_size lengths", "us read_gbps"), ("append", "page_size lengths", "us"),
    ("mixed", "page_size prefill", "us"), ("block_masks", "mask", ""), ("block_masks_backward", "mask", ""))}
COLUMNS |= {op: ("op", "impl", "dtype", *sizes, *MEASURED)
            for op, sizes in (("matmul", "mnk"), ("block_masks_build", ("seqlen",)))}

# Lengths that were drawn once, by their name.
DRAWN = {"16 of 64..4096": (862, 1654, 712, 3359, 1799, 1201, 2383, 3162, 2852, 3536, 3181, 2413, 457, 1050, 3908,
                            3372)}
SOFTCAP = 30.0  # far above most scores of normal q and k: what ignores it is only judged wrong in float32
SEEN = 0.75  # of the keys, by a mask


@functools.lru_cache
def lengths_of(text):
    """(32, 32, 8) of "2 x 32 + 8", or those of DRAWN."""
    if text in DRAWN:
        return DRAWN[text]
    lengths = ()
    for part in text.split(" + "):
        found = re.fullmatch(r"(?:([1-9]\d*) x )?([1-9]\d*)", part, re.ASCII)
        if not found:
            fail(f"{text!r} is neither {', '.join(map(repr, DRAWN))} nor lengths such as '8192 + 64 x 128'")
        lengths += (int(found[2]),) * int(found[1] or 1)
    return lengths


class Shape(NamedTuple):
    """The sizes of q (B, H, Sq, D) and of k and v (B, Hk, Sk, D), and in words what else a call has, such as "window
    512", or the lengths of a packed batch, whose B and S are the number of samples and the longest one."""

    batch_size: int
    nheads: int
    seqlen_q: int
    head_dim: int
    nheads_k: int
    seqlen_k: int
    more: str = ""

    def __str__(self):
        if self.kind == "packed":
            return f"{self.more},{self.nheads},{self.head_dim},{self.nheads_k}"
        sizes = self[:4] if self[4:6] == (self.nheads, self.seqlen_q) else self[:6]
        return f"{','.join(map(str, sizes))} {self.more}".rstrip()

    @property
    def options(self):
        """{word: its number, or True}"""
        found = re.findall(r"([a-z]+)(?: (\d\S*))?", "" if self.more[:1].isdecimal() else self.more)
        return {name: (int(x) if x.isdecimal() else float(x)) if x else True for name, x in found}

    @property
    def kind(self):
        """One of KINDS."""
        words = self.more.split()
        if self.more[:1].isdecimal():
            return "packed"
        if "page" in words or "drawn" in words:
            return "pages"
        return self.more if "masked" in words else next((x for x in words if x in KINDS), "dense")


def shape_of(text, form):
    """The shape that a text names, such as "1,16,16384,128 window 512". form: a regular expression for what stands
    behind the sizes, or "packed" if lengths may be in their place."""
    sizes, _, more = text.partition(" ")
    if form == "packed" and not text.split(",")[0].isdecimal():
        more, *sizes = text.split(",")
        lengths = lengths_of(more)
        nheads, head_dim, nheads_k = ints(sizes, 3)
        shape = Shape(len(lengths), nheads, max(lengths), head_dim, nheads_k, max(lengths), more)
    else:
        if not re.fullmatch("" if form == "packed" else form, more, re.ASCII):
            fail(f"{more!r} stands behind the sizes")
        b, h, seqlen_q, d, *keys = ints(sizes.split(","), 4, 6)
        shape = Shape(b, h, seqlen_q, d, *(keys or (h, seqlen_q)), more or "none" * ("none" in form))
    page, prefill, head_dim_v = (shape.options.get(x, 1) for x in ("page", "prefill", "v"))
    if shape.nheads % shape.nheads_k or max(shape.head_dim, head_dim_v) > MAX_HEAD_DIM:
        fail(f"H must be a multiple of Hk, and D at most {MAX_HEAD_DIM}")
    if shape.seqlen_k % page or prefill > shape.seqlen_k:
        fail("Sk must be a multiple of the page size, and a prefill at most Sk")
    return shape


def fail(message):
    """Tells argparse that an option cannot be read, and why."""
    raise argparse.ArgumentTypeError(message)


def ints(words, *counts):
    """Positive ints, as many as one of counts."""
    if counts and len(words) not in counts:
        fail(f"there are {len(words)} numbers, not {' or '.join(map(str, counts))}")
    return [count(x) for x in words]


def count(text):
    """A positive int."""
    return int(text) if text.isdecimal() and int(text) else fail(f"{text!r} is not a positive integer")


def fp8_base(q, k, v, causal):
    """Attention in fp32 but for P, which is rounded to fp8, in bf16: the base of the error rule for fp8."""
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q.float() @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]))
    if causal:
        scores = scores.masked_fill(~causal_mask(q.shape[2], k.shape[2], q.device), -math.inf)
    P = (scores - scores.amax(-1, keepdim=True)).exp_()
    return (P.to(q.dtype).float() @ v / P.sum(-1, keepdim=True)).bfloat16()


def gradients_of(forward, q, k, v, dout):
    return torch.autograd.grad(forward(q, k, v), (q, k, v), dout)


class Case:
    """One setting of attention. truth and tolerance are tuples, or None where not even one head fits in fp64."""

    # {gradients: (op of rows, products as wide as q and as v)}. A backward pass has five, as it forms Q Kᵀ again.
    passes = {None: ("forward", 1, 1), backward_of: ("backward", 3, 2), step_of: ("forward_backward", 4, 3)}
    columns = Shape._fields  # that have the sizes in rows

    def __init__(self, op, setting, device):
        self.op, self.device = op, device
        self.shape, self.dtype, self.causal = setting
        self.options = self.shape.options
        self.truth = self.tolerance = None
        torch.manual_seed(0)
        self.make(self.has_truth(op, self.shape, device))

    def make(self, has_truth):
        """Makes args, truth and tolerance, and counts the work."""
        op, (q, k, v) = self.op, self.inputs()
        self.call = self.make_call()
        self.pass_name, of_q, of_v = self.passes[op.gradients]
        head_dim, head_dim_v = self.shape.head_dim, v.shape[-1]
        self.flops = 2 * self.shape.nheads * (of_q * head_dim + of_v * head_dim_v) * self.pairs()
        self.out_bytes = q.nbytes * head_dim_v // head_dim * (2 if self.dtype in FP8_DTYPE_NAMES else 1)
        bias = self.call.keywords.get("attn_bias")
        self.bytes = q.nbytes + k.nbytes + v.nbytes + self.out_bytes + (0 if bias is None else bias.nbytes)
        tensors = [q, k, v]
        if op.gradients:
            dout = torch.randn_like(q[..., :1].expand(*q.shape[:-1], head_dim_v))
            tensors = [*(x.requires_grad_() for x in tensors), dout]
            forward_bytes, self.out_bytes = self.bytes, q.nbytes + k.nbytes + v.nbytes
            self.bytes = 2 * self.out_bytes + 2 * dout.nbytes  # dout and out, which gives delta
            self.bytes += forward_bytes if op.gradients is step_of else 0
        self.args = *tensors, self.call
        if has_truth:
            judged = [self.judged(x) for x in tensors]
            exact, base = (functools.partial(gradients_of, f) if op.gradients else f for f in (self.exact, self.base))
            self.truth, by_torch = each(exact(*(x.double() for x in judged))), each(base(*judged))
            # Four times the base's error, where the forward has two: MATH keeps P, all others form it again from lse.
            factor = 2 if op.gradients else 1
            self.tolerance = tuple(factor * allowed_error(*pair) for pair in zip(by_torch, self.truth))

    def inputs(self):
        """q, k and v. Those of a packed batch are views (1, H, T, D) of memory (T, H, D), as a model has them. With
        a block mask they are views (B, H, S, D) of memory (B, S, H, D), which can be packed."""
        b, h, seqlen_q, d, h_k, seqlen_k = self.shape[:6]
        if self.shape.kind in MASKED:
            return [normal((b, seqlen_q, x, d), self.device, self.dtype).transpose(1, 2) for x in (h, h_k, h_k)]
        if self.shape.kind == "packed":
            total = sum(lengths_of(self.shape.more))
            return [normal((total, heads, d), self.device, self.dtype).transpose(0, 1)[None] for heads in (h, h_k, h_k)]
        sizes = (b, h, seqlen_q, d), (b, h_k, seqlen_k, d), (b, h_k, seqlen_k, self.options.get("v", d))
        return [normal(size, self.device, self.dtype) for size in sizes]

    def make_call(self):
        """The options of the call, by the kind of the shape."""
        batch_size, nheads, seqlen_q, _, _, seqlen_k, more = self.shape
        shift, causal, kind, device = seqlen_k - seqlen_q, self.causal, self.shape.kind, self.device
        call, keywords = Call(causal, mask_mod=(lambda b, h, row, col: col <= row + shift) if causal else None), {}
        bias = None
        if kind == "packed":
            lengths = torch.tensor(lengths_of(more), device=device)
            bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
            sample = torch.repeat_interleave(lengths)
            keywords = dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=seqlen_q, max_seqlen_k=seqlen_q)
            call.mask_mod = lambda b, h, row, col: (
                (sample[row] == sample[col]) & (col <= row) if causal else sample[row] == sample[col])
        elif kind == "window":
            left, right = keywords["window_size"] = self.window_size
            call.mask_mod = lambda b, h, row, col: (col >= row + shift - left) & (col <= row + shift + right)
        elif kind == "sinks":
            keywords["sinks"] = torch.randn(nheads, device=device)
        elif kind == "softcap":
            keywords["softcap"] = SOFTCAP
            call.score_mod = lambda score, b, h, row, col: SOFTCAP * torch.tanh(score / SOFTCAP)
        elif kind == "alibi":  # the slopes of Press et al.: a geometric sequence from 2^(-8/H) down to 2^-8
            slopes = 2 ** (-8 / nheads * torch.arange(1, nheads + 1, device=device, dtype=torch.float32))
            keywords["alibi_slopes"] = slopes
            call.score_mod = lambda score, b, h, row, col: score - slopes[h] * abs(row + shift - col)
        elif kind == "bias":
            bias = normal((1, nheads, seqlen_q, seqlen_k), device, self.dtype)
            call.score_mod = lambda score, b, h, row, col: score + bias[0, h, row, col]
        elif kind == "mask":
            bias = torch.rand(1, 1, seqlen_q, seqlen_k, device=device) < SEEN
            bias[..., 0] = True  # no row is empty, causal or not
            call.score_mod = lambda score, b, h, row, col: torch.where(bias[0, 0, row, col], score, -math.inf)
        elif kind in MASKED:
            mask = kind.split()[1]
            call.mask_mod = MASKS[mask](seqlen_k, device)
            call.native = native_options(mask, batch_size, seqlen_k, device)
            keywords["block_mask"] = build(call.mask_mod, seqlen_k, device)
        elif kind == "deterministic":
            keywords["deterministic"] = True
        elif kind == "dropout":
            keywords = dict(dropout_p=self.options["dropout"], deterministic=False,
                            dropout_seed=torch.zeros(1, dtype=torch.int64, device=device))
        if bias is not None:  # SDPA takes no is_causal beside attn_mask
            keywords["attn_bias"] = call.attn_mask = bias
            if causal:
                seen = causal_mask(seqlen_q, seqlen_k, device)
                call.attn_mask = bias & seen if bias.dtype == torch.bool else bias.masked_fill(~seen, -math.inf)
        call.keywords = keywords
        return call

    @property
    def window_size(self):
        """(left, right); the right side is 0 with a causal mask, else equal to the left one."""
        left = self.options["window"]
        return left, 0 if self.causal else left

    def pairs(self):
        """The pairs of a row and a key that FLOPs count, in each head."""
        batch, _, seqlen_q, _, _, seqlen_k, more = self.shape
        if self.shape.kind in MASKED:
            return batch * self.call.keywords["block_mask"].to_dense().sum().item()
        if self.shape.kind != "window":
            is_packed = self.shape.kind == "packed"
            pairs = sum(x * x for x in lengths_of(more)) if is_packed else batch * seqlen_q * seqlen_k
            return pairs / (2 if self.causal else 1)
        left, right = self.window_size
        seen = (min(x + right, seqlen_k - 1) - max(x - left, 0) + 1 for x in range(seqlen_k - seqlen_q, seqlen_k))
        return batch * sum(max(x, 0) for x in seen)

    # The truth.

    def exact(self, q, k, v):
        """The result for judged heads, which are the last ones, in the precision of q."""
        if self.shape.kind == "packed":
            return self.by_sample(functools.partial(reference_attention, causal=self.causal), q, k, v)
        keywords = {x: y for x, y in self.call.keywords.items() if x != "deterministic"}
        for name in keywords.keys() & {"sinks", "alibi_slopes"}:
            keywords[name] = keywords[name][-q.shape[1]:]
        if "sinks" in keywords:
            keywords["sinks"] = keywords["sinks"].to(torch.promote_types(q.dtype, torch.float32))
        if "attn_bias" in keywords:
            bias = keywords["attn_bias"][:, -q.shape[1]:]
            keywords["attn_bias"] = bias if bias.dtype == torch.bool else bias.to(q.dtype)
        if "dropout_seed" in keywords:  # the same elements are dropped as in the whole call
            head, first = self.shape.nheads - q.shape[1], self.shape.batch_size - q.shape[0]
            origins = torch.tensor([[0, 0, head, x] for x in range(first, self.shape.batch_size)], device=self.device)
            keywords["dropout_seed"] = seed_with_origins(keywords["dropout_seed"], origins)
        return reference_attention(q, k, v, self.causal, **keywords)

    def base(self, q, k, v):
        """PyTorch's result in the dtype of the inputs, whose error sets what is allowed: by SDPA's math backend, or
        where SDPA has no such call by the reference."""
        if self.dtype in FP8_DTYPE_NAMES:
            return fp8_base(q, k, v, self.causal)
        if self.shape.kind not in ("dense", "packed"):
            return self.exact(q, k, v)
        math_sdpa = functools.partial(sdpa, call=Call(self.causal), backend=SDPBackend.MATH)
        return self.by_sample(math_sdpa, q, k, v) if self.shape.kind == "packed" else math_sdpa(q, k, v)

    def by_sample(self, forward, *qkv):
        """forward of each sample of a packed batch. The scores of one alone are in memory, in both passes."""
        samples = zip(*(x.split(lengths_of(self.shape.more), dim=2) for x in qkv))
        return torch.cat([checkpoint(forward, *sample, use_reentrant=False) for sample in samples], 2)

    @staticmethod
    def truth_size(op, shape):
        """Elements in fp64 that the truth of one key/value head of one sample needs: the keys, repeated for each query
        head, or the scores where these are more, and what autograd and dropout make of them."""
        copies = 1 if not op.gradients else 4 if shape.kind in ("deterministic", "dropout") else 3
        return copies * (shape.nheads // shape.nheads_k) * shape.seqlen_k * max(shape.seqlen_q, shape.head_dim)

    @classmethod
    def has_truth(cls, op, shape, device):
        return truth_fits(cls.truth_size(op, shape), device)

    def judged(self, x):
        """The part of x (B, H or Hk, S, D) that is compared with the truth: all if that fits in fp64, else the last
        key/value head of the last sample, or the query heads that read it."""
        heads = self.shape.batch_size * self.shape.nheads_k
        return x if truth_fits(heads * self.truth_size(self.op, self.shape), self.device) else self.one_head(x)

    def one_head(self, x):
        return x[-1:, -(x.shape[1] // self.shape.nheads_k):]

    # Functions that are timed.

    def function(self, name):
        """The function of args that runs an implementation."""
        impl = self.op.impls[name]
        function = self.op.gradients(impl.forward) if self.op.gradients else impl.forward
        if self.shape.kind == "deterministic" and not impl.backend:
            return deterministic_torch()(function)
        return forced(impl.kernel, function) if impl.kernel else function

    def prepare(self, name):
        """Called before a call that is judged."""

    def results(self, name, out):
        """The tensors of a result that are compared with the truth; () where nobody knows it: what a peer drops."""
        return () if self.shape.kind == "dropout" and not self.op.impls[name].backend else each(out)

    def timed(self, function):
        return timed(self.device, function, *self.args)

    def measured(self, name):
        """{key of MEASURED, or "us": number}. peak_mb is 10^6 bytes beyond inputs and output; what frees its scratch
        before it makes its output, such as "manual", needs up to one output more than that."""
        errors, function = judge(self, name), self.function(name)  # and the warm-up: builds, tunes, makes workspaces
        peak = peak_bytes(function, *self.args)
        peak_mb = None if peak is None else (peak - self.out_bytes) / 1e6
        ms, ms_p20, ms_p80 = self.timed(function)
        numbers = ms, ms_p20, ms_p80, self.flops / ms / 1e9, self.bytes / ms / 1e6, peak_mb, errors and max(errors)
        return {key: float(f"{x:.6g}") for key, x in zip((*MEASURED, "us"), (*numbers, 1e3 * ms))
                if x is not None and math.isfinite(x)}

    def row(self, name, numbers):
        """A row of the JSON. In a run of packed batches, windows or sinks, dense shapes have the op of dense runs."""
        kind, options = self.shape.kind, self.options
        of_kind = {"packed": "varlen_backward" if self.op.gradients else "varlen", "window": "window", "sinks": "sinks"}
        op = of_kind.get(kind, self.op.row or self.pass_name)
        known = {"op": op, "impl": name, "dtype": self.dtype, "causal": self.causal, "prefill": options.get("prefill"),
                 "deterministic": kind == "deterministic", "dropout_p": options.get("dropout", 0.0),
                 "score": kind if kind in SCORES else "none", "page_size": options.get("page", 0),
                 "mask": kind.partition(" ")[2],
                 "lengths": self.shape.more if kind == "packed" else
                 "drawn" if "drawn" in options else "full, warm" if "warm" in options else "full",
                 "window_size": list(self.window_size) if kind == "window" else None}
        known |= dict(zip(self.columns, self.shape)) | numbers
        known["head_dim_v"] = options.get("v", known.get("head_dim"))
        return {key: known.get(key) for key in COLUMNS[op]}


class Sizes(tuple):
    """M, N and K of a matrix product, or S of a mask."""

    kind, options = "dense", {}  # as of a Shape

    def __str__(self):
        return ",".join(map(str, self))


class Matmul(Case):
    """Normal a (m, k) and b (k, n), their product in fp64, and the error it allows."""

    columns = "m", "n", "k"

    def make(self, has_truth):
        m, n, k = self.shape
        a, b = self.args = normal((m, k), self.device, self.dtype), normal((k, n), self.device, self.dtype)
        self.flops, self.out_bytes = 2 * m * n * k, m * n * a.element_size()
        self.bytes = a.nbytes + b.nbytes + self.out_bytes
        if has_truth:
            self.truth = (a.double() @ b.double(),)
            self.tolerance = (allowed_error(a @ b, *self.truth),)

    @staticmethod
    def truth_size(op, shape):
        m, n, k = shape
        return m * k + k * n + m * n

    def judged(self, x):
        return x


class Build(Matmul):
    """The function of the mask of documents, and what it says of all rows and keys. No error is allowed."""

    columns = ("seqlen",)

    def make(self, has_truth):
        size, = self.shape
        self.args = MASKS["documents"](size, self.device), size, self.device
        mask = build(*self.args)
        self.flops, self.bytes = 0, sum(x.nbytes for x in (mask.units, mask.row_words, mask.key_words, mask.bits))
        self.out_bytes = self.bytes
        if has_truth:
            rows = torch.arange(size, device=self.device)
            self.truth, self.tolerance = (self.args[0](0, 0, rows[:, None], rows).double(),), (0,)

    @staticmethod
    def truth_size(op, shape):
        return shape[0]**2

    def results(self, name, out):
        """Torch's mask has no bits to compare. Without a truth, a dense mask would be too large."""
        return (out.to_dense()[0, 0],) if self.truth and isinstance(out, BlockMask) else ()
