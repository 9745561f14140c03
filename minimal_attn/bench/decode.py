"""Benchmark of decoding: one query token of each sample, or a few, and the keys and values of a cache.

A call is bound by the reading of K and V. So its rate in GB/s stands beside that of a plain read of as many bytes. One
call lasts microseconds, and a model replays many of them as a CUDA graph. So the time is that of a graph of calls on
the GPU, divided by their number. Each call has a cache of its own, so that no L2 holds what the next one reads.

Read next: append.py and mixed.py, calls that do more; read.py, the plain read; measure.py.
"""

import functools
import math
import random
import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

from .. import attention_with_kvcache, reference_attention
from ..toolkit.benchmark import QUANTILES
from . import attention, measure
from .attention import HALVES
from .measure import MEASURED, Impl, WrongResult, normal, truth_fits

DTYPES = HALVES
TITLE = "Attention to caches"
BASELINE = "read"
ROW = (*attention.ROW[:-len(MEASURED)], "page_size", "lengths", *MEASURED, "us", "read_gbps")
SHAPES = "B,H,S,D or B,H,Sq,D,Hk,Sk, also with ' page SIZE' or ' drawn' behind it"

CACHES = {"cuda": (2, 32), "cpu": (1, 1)}  # at least and at most in a graph, as many as reach CACHE_BYTES together
CACHE_BYTES = 400_000_000  # well beyond the L2 of any GPU
WARMUP_MS, REPLAYS = 50, 15  # of the graph. Right after a pause, reads have been seen 12 % slower


class OfCache:
    """Base of the shapes of calls to caches. Their first six fields are a dense shape, and seqlens gives the valid keys
    of each sample."""

    __slots__ = ()
    rate = "gbps"

    @property
    def dense(self):
        return attention.Shape(*self[:6])

    @property
    def bytes(self):
        """Bytes of the valid keys and their values, in 16 bits."""
        return 2 * 2 * self.nheads_k * self.head_dim * sum(self.seqlens)

    x = bytes


class Shape(OfCache, NamedTuple("Shape", [*attention.Shape.__annotations__.items(), ("page_size", int),
                                          ("lengths", str)])):
    """The shape of a dense batch whose caches hold up to seqlen_k keys for each sample.

    page_size: 0 for a cache that is one tensor. lengths: "full" if all keys are valid, or "drawn" if the number of
    valid keys of each sample is drawn from 1 to seqlen_k.
    """

    __slots__ = ()

    def __str__(self):
        return f"{self.dense}{f' page {self.page_size}' * bool(self.page_size)}{' drawn' * self.is_drawn}"

    @property
    def is_drawn(self):
        return self.lengths == "drawn"

    @property
    def seqlens(self):
        """How many keys of each sample are valid; drawn ones are the same in every run."""
        if self.is_drawn:
            return random.Random(0).choices(range(1, self.seqlen_k + 1), k=self.batch_size)
        return [self.seqlen_k] * self.batch_size

    @property
    def parts(self):
        paged = {"page": str(self.page_size)} if self.page_size else {}
        return self.dense.parts | paged | ({"lengths": self.lengths} if self.is_drawn else {})

    @property
    def sweeps(self):
        """Calls of one token and full lengths are points over the bytes, for each size of pages."""
        pages = f"pages of {self.page_size}" if self.page_size else "dense caches"
        is_point = self.seqlen_q == 1 and not self.is_drawn
        return [(f"head_dim {self.head_dim}", f"{pages}, one token")] if is_point else []

    @property
    def elements(self):
        """Elements in fp64 that the truth needs: the keys, repeated for each query head, or the scores where these are
        more."""
        return self.batch_size * self.nheads * self.seqlen_k * max(self.head_dim, self.seqlen_q)


def shape_of(text, ints):
    """A shape of SHAPES; ints(text) reads integers between commas. Raises ValueError."""
    sizes, _, more = text.partition(" ")
    dense = attention.Shape.of(ints(sizes))
    found = re.fullmatch(r"(?:page ([1-9]\d*))? ?(drawn)?", more, re.ASCII)
    if not found:
        raise ValueError(f"behind the sizes there is ' page SIZE', ' drawn' or ' page SIZE drawn', not {more!r}")
    page_size = int(found[1] or 0)
    if page_size and dense.seqlen_k % page_size:
        raise ValueError(f"Sk must be a multiple of the page size, {page_size}")
    return Shape(*dense, page_size, found[2] or "full")


def shape(batch_size, nheads, nheads_k, seqlen_k, page_size=0, seqlen_q=1, lengths="full"):
    return Shape(batch_size, nheads, seqlen_q, 128, nheads_k, seqlen_k, page_size, lengths)


# (B, H, Hk, Sk) in the order of their bytes.
SIZES = ((1, 32, 8, 1024), (1, 32, 8, 8192), (8, 32, 8, 8192), (64, 32, 1, 8192), (1, 32, 8, 131072),
         (128, 32, 8, 1024), (32, 32, 8, 8192), (64, 32, 8, 4096), (16, 64, 8, 32768), (16, 32, 32, 8192))
PAGE_SIZES = 0, 16, 64, 128
DEFAULT_SHAPES = {
    "cuda": [*(shape(*size, page_size) for size in SIZES for page_size in PAGE_SIZES),
             *(shape(8, 32, 8, 8192, page_size) for page_size in (1, 8)),
             *(shape(8, 32, 8, 8192, seqlen_q=seqlen_q) for seqlen_q in (2, 4, 8, 16)),
             shape(32, 32, 8, 8192, lengths="drawn")],
    "cpu": [Shape(2, 4, seqlen_q, 64, 2, 64, page_size, lengths)  # Triton's interpreter is slow
            for seqlen_q, page_size, lengths in ((1, 0, "full"), (1, 16, "full"), (3, 0, "full"), (1, 16, "drawn"))],
}
DEFAULTS = {"dtypes": "bfloat16", "causal": "yes"}  # the mask of several tokens; a single one sees every key


@dataclass(eq=False)
class Call(attention.Call):
    words: torch.Tensor | None = None  # int32, as many as the valid keys and values have: what the plain read reads
    has_sequences: bool = True  # one tensor of full sequences, as SDPA takes it


def cached_call(q, k, v, call, backend):
    return attention_with_kvcache(q, k, v, causal=call.causal, backend=backend, **call.keywords)


def sdpa_with(backend):
    forward = attention.sdpa_with(backend)

    def of_sequences(q, k, v, call):
        if not call.has_sequences:
            raise NotImplementedError("SDPA has neither pages nor lengths")
        return forward(q, k, v, call.causal and q.shape[2] > 1)

    return of_sequences


def read_call(q, k, v, call):
    from .read import read  # needs Triton

    return read(call.words)


def judge_read(case):
    """None: there is no error to tell. Raises WrongResult if the read has missed a word."""
    from .read import xor_of

    if xor_of(read_call(*case.args)) != xor_of(case.args[-1].words):
        raise WrongResult("the xor of all words is another")


IMPLS = {
    "read": Impl(read_call, ("cuda",), judge=judge_read),
    "cuda": Impl(functools.partial(cached_call, backend="cuda"), backend="cuda"),
    "triton": Impl(functools.partial(cached_call, backend="triton"), backend="triton"),
    "torch:cudnn": Impl(sdpa_with(SDPBackend.CUDNN_ATTENTION), ("cuda",)),
    "torch:flash": Impl(sdpa_with(SDPBackend.FLASH_ATTENTION)),
}
PROFILES = {"read": ("a plain read", read_call),
            "cuda": ("minimal flash decoding", IMPLS["cuda"].forward),
            "triton": ("triton flash decoding", IMPLS["triton"].forward),
            "torch": ("scaled_dot_product_attention", IMPLS["torch:flash"].forward)}


def measured(case, impl):
    """Adds µs and the rate of the plain read to the numbers of measure.measured. The read has neither FLOPs nor
    memory of its own."""
    numbers = case.read if impl == "read" else measure.measured(case, impl)
    more = {"us": 1e3 * numbers["ms"], "read_gbps": case.read.get("gbps")}
    return numbers | {key: float(f"{x:.6g}") for key, x in more.items() if x is not None}


def times_of_replays(graph, count):
    """ms of each of some replays in a row."""
    spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for start, end in spans:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in spans]


class Case(attention.Case):
    """Caches in memory (2, N, S or page_size, Hk, D), K and then V, and a call on each. Pages are in random order.
    GB/s count the valid keys and values alone."""

    impls = IMPLS
    op = "decode"
    columns = ROW

    def __init__(self, setting, device):
        super().__init__(setting, device)  # the truth of the first cache
        self.bytes = self.shape.bytes
        self.calls = [self.call_of(self.args[0], *cache) for cache in self.caches]
        self.args = self.calls[0]

    def inputs(self):
        """q, and the keys and values of the first cache in the order of its table."""
        shape = self.shape
        k, v = self.make_caches(shape.batch_size)
        size = shape.batch_size, shape.nheads, shape.seqlen_q, shape.head_dim
        return normal(size, self.device, self.dtype), k, v

    def make_caches(self, sequences):
        """The keys and values (sequences, Hk, Sk, D) of the first one."""
        shape = self.shape
        seqlen_k, page_size = shape.seqlen_k, shape.page_size
        pages = sequences * seqlen_k // (page_size or seqlen_k)
        least, most = CACHES[self.device]
        self.seqused_k = torch.tensor(shape.seqlens, dtype=torch.int32, device=self.device)
        self.caches = []  # (memory, page table or None)
        for _ in range(max(least, min(most, -(-CACHE_BYTES // shape.bytes)))):
            size = 2, pages, page_size or seqlen_k, shape.nheads_k, shape.head_dim
            memory = normal(size, self.device, self.dtype)
            ids = torch.randperm(pages, dtype=torch.int32, device=self.device) if page_size else None
            self.caches.append((memory, None if ids is None else ids.view(sequences, -1)))
        memory, table = self.caches[0]
        k, v = memory if table is None else memory[:, table].flatten(2, 3)
        return k.transpose(1, 2), v.transpose(1, 2)

    def call_of(self, q, memory, table):
        """The arguments of implementations for one cache."""
        keywords = {"seqused_k": self.seqused_k} | ({} if table is None else {"page_table": table})
        words = memory.view(torch.int32).flatten()[:self.shape.bytes // 4]
        k, v = memory.transpose(2, 3)
        return q, k, v, Call(self.causal, keywords, words=words,
                             has_sequences=table is None and not self.shape.is_drawn)

    def pairs(self):
        shortened = range(self.shape.seqlen_q) if self.causal else [0] * self.shape.seqlen_q
        return sum(max(n - i, 0) for n in self.shape.seqlens for i in shortened)

    def exact(self, q, k, v):
        return reference_attention(q, k, v, self.causal, seqused_k=self.seqused_k[-q.shape[0]:])

    base = exact  # by plain torch in the dtype of the inputs, with scores in fp32 as in SDPA's math backend

    @classmethod
    def has_truth(cls, shape, device):
        return truth_fits(shape.elements // (shape.batch_size * shape.nheads_k), device)

    def timed(self, forward):
        """(median, 20th and 80th percentile) in ms of a call, in a CUDA graph of one call on each cache."""
        if self.device == "cpu":
            return super().timed(forward)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for args in self.calls:
                forward(*args)
        warmups = math.ceil(WARMUP_MS / times_of_replays(graph, 1)[0])
        # The host is ahead of the GPU, so that no launch is timed.
        times = [time / len(self.calls) for time in times_of_replays(graph, warmups + REPLAYS)[warmups:]]
        return torch.tensor(times, dtype=torch.float64).quantile(torch.tensor(QUANTILES, dtype=torch.float64)).tolist()

    @functools.cached_property
    def read(self):
        """{key of MEASURED: number} of the plain read; {} where there is none."""
        if self.device not in IMPLS["read"].devices:
            return {}
        numbers = measure.measured(self, "read")
        return {key: numbers[key] for key in ("ms", "ms_p20", "ms_p80", "gbps")}


CASES = {Shape: Case}
