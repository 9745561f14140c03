"""Cases of caches of keys and values: decoding, appending a new key, and a prefill beside samples that decode.

A call is bound by the reading of K and V, so its rate in GB/s stands beside that of a plain read of as many bytes. It
lasts microseconds, and a model replays many as a CUDA graph. So the time is that of a graph of calls, divided by their
number. Each call has a cache of its own, so that no L2 holds what the next one reads, or all share a warm one.
"""

import functools
import math
import random

import torch

from .. import attention_with_kvcache, flash_attention, options, reference_attention
from ..reference.append import rotated
from ..toolkit.benchmark import captured, gpu_times, quantiles_of
from .cases import Case
from .impls import IMPLS, Call
from .measure import Impl, WrongResult, normal

CACHES = {"cuda": (2, 32), "cpu": (1, 1)}  # at least and at most in a graph, as many as reach CACHE_BYTES together
CACHE_BYTES = 400_000_000  # well beyond the L2 of any GPU
WARM_CALLS = 20  # calls of a graph that share one cache
WARMUP_MS, REPLAYS = 50, 15  # of the graph. Right after a pause, reads have been seen 12 % slower


def ours(q, k, v, call, way, backend):
    out = tuple(function(*tensors, backend=backend, **keywords) for function, tensors, keywords in call.ways[way])
    return out if len(out) > 1 else out[0]


def plain_read(q, k, v, call):
    from .read import read  # needs Triton

    return read(call.words)


def ways(*names):
    """{name: Impl} of ours by both backends. A prefill without cache (":dense") serves no pages."""
    return {f"{backend}{way}": Impl(functools.partial(ours, way=way, backend=backend), backend=backend,
                                    kinds=("dense", "pages")[:1 + (way != ":dense")])
            for backend in ("cuda", "triton") for way in names}


DECODE = {"read": Impl(plain_read, ("cuda",), kinds=("dense", "pages")), **ways(""),
          **{name: IMPLS[name] for name in ("torch:cudnn", "torch:flash")}}
APPEND = ways(":attend", "", ":rotary")
MIXED = ways("", ":apart", ":dense")


class Decode(Case):
    """Caches in memory (2, N, S or page_size, Hk, D), K and then V, with pages in random order, and a call on each.
    GB/s count the valid keys and values alone."""

    def __init__(self, op, setting, device):
        self.seqlens = self.seqlens_of(setting.shape)
        self.valid_bytes = 2 * 2 * setting.shape.nheads_k * setting.shape.head_dim * sum(self.seqlens)
        super().__init__(op, setting, device)  # the truth of the first cache
        self.bytes = self.valid_bytes
        self.calls = [self.call_of(self.args[0], *cache) for cache in self.caches]
        self.calls *= WARM_CALLS if "warm" in self.options else 1
        self.args = self.calls[0]

    def seqlens_of(self, shape):
        """How many keys of each sample are valid; drawn ones are the same in every run."""
        if "drawn" in shape.options:
            return random.Random(0).choices(range(1, shape.seqlen_k + 1), k=shape.batch_size)
        return [shape.seqlen_k] * shape.batch_size

    def inputs(self):
        """q, and the keys and values of the first cache in the order of its table."""
        shape, page = self.shape, self.options.get("page") or self.shape.seqlen_k
        self.seqused_k = torch.tensor(self.seqlens, dtype=torch.int32, device=self.device)
        pages, (least, most) = len(self.seqlens) * shape.seqlen_k // page, CACHES[self.device]
        self.caches = []  # (memory, page table or None)
        for _ in range(1 if "warm" in self.options else max(least, min(most, -(-CACHE_BYTES // self.valid_bytes)))):
            memory = normal((2, pages, page, shape.nheads_k, shape.head_dim), self.device, self.dtype)
            ids = torch.randperm(pages, dtype=torch.int32, device=self.device) if "page" in self.options else None
            self.caches.append((memory, None if ids is None else ids.view(len(self.seqlens), -1)))
        memory, table = self.caches[0]
        k, v = memory if table is None else memory[:, table].flatten(2, 3)
        prefill = self.options.get("prefill")  # whose q is packed
        rows = (shape.batch_size, shape.seqlen_q) if prefill is None else (1, shape.batch_size + prefill)
        q = normal((rows[0], shape.nheads, rows[1], shape.head_dim), self.device, self.dtype)
        return q, k.transpose(1, 2), v.transpose(1, 2)

    def call_of(self, q, memory, table):
        """The arguments of implementations for one cache."""
        keywords = {"seqused_k": self.seqused_k} | ({} if table is None else {"page_table": table})
        k, v = memory.transpose(2, 3)
        call = Call(self.causal and self.shape.seqlen_q > 1,  # a single row sees every key
                    words=memory.view(torch.int32).flatten()[:self.valid_bytes // 4])
        call.ways = {way: [(function, tensors, more | {"causal": self.causal}) for function, tensors, more in calls]
                     for way, calls in self.ways_of(q, k, v, keywords).items()}
        return q, k, v, call

    def ways_of(self, q, k, v, keywords):
        return {"": [(attention_with_kvcache, (q, k, v), keywords)]}

    def pairs(self):
        shortened = range(self.shape.seqlen_q) if self.causal else [0] * self.shape.seqlen_q
        return sum(max(n - i, 0) for n in self.seqlens for i in shortened)

    def exact(self, q, k, v):
        return reference_attention(q, k, v, self.causal, seqused_k=self.seqused_k[-q.shape[0]:])

    base = exact  # by plain torch in the dtype of the inputs, with scores in fp32 as in SDPA's math backend

    def results(self, name, out):
        """The read has no result to compare. Raises WrongResult if it has missed a word."""
        if name != "read":
            return super().results(name, out)
        if (out.sum() - self.args[-1].words.sum()) % 2**32 != 0:
            raise WrongResult("the sum of all words is another")
        return ()

    def timed(self, function):
        """(median, 20th and 80th percentile) in ms of a call, in a CUDA graph of one call on each cache."""
        if self.device == "cpu":
            return super().timed(function)
        graph = captured(lambda: [function(*args) for args in self.calls])
        warmups = math.ceil(WARMUP_MS / gpu_times(graph.replay, 1)[0])
        # The host is ahead of the GPU, so that no launch is timed.
        return quantiles_of(ms / len(self.calls) for ms in gpu_times(graph.replay, warmups + REPLAYS)[warmups:])

    @functools.cached_property
    def read(self):
        """The numbers of the plain read; {} where there is none."""
        if "read" not in self.op.impls or self.device not in self.op.impls["read"].devices:
            return {}
        numbers = super().measured("read")
        return {key: numbers[key] for key in ("ms", "ms_p20", "ms_p80", "gbps", "us")}

    def measured(self, name):
        return (self.read if name == "read" else super().measured(name)) | {"read_gbps": self.read.get("gbps")}


class Append(Decode):
    """The caches of decoding. The last key of each sample is the new one, which every call writes again."""

    def places_of(self, page_table):
        """The indices of the new keys in a cache (N, Hk, S, D)."""
        samples, last = torch.arange(self.shape.batch_size, device=self.device), self.seqused_k.long() - 1
        size = self.options.get("page", self.shape.seqlen_k)
        return samples if page_table is None else page_table[samples, last // size].long(), slice(None), last % size

    def prepare(self, name):
        """Fills the places of the new keys and values with NaN, if the call writes them."""
        if not name.endswith(":attend"):
            for x in self.args[1:3]:
                x[self.places_of(self.caches[0][1])] = torch.nan

    def ways_of(self, q, k, v, keywords):
        places, before = self.places_of(keywords.get("page_table")), self.seqused_k - 1
        k_new, v_new = (x[places].unsqueeze(2) for x in (k, v))
        # Cosines and sines (positions, rotary_dim / 2) of multiples of 90°: to rotate back and forth is exact.
        turns = torch.arange(self.shape.seqlen_k)[:, None] + torch.arange(self.shape.head_dim // 16 * 8)
        cos, sin = (torch.tensor(values)[turns % 4].to(q) for values in ([1, 0, -1, 0], [0, 1, 0, -1]))
        back, position = options.Append(rotary_cos=cos, rotary_sin=-sin, rotary_interleaved=False), before[:, None]
        append = keywords | {"seqused_k": before, "k": k_new, "v": v_new}
        rotary = append | {"k": rotated(k_new, position, back), "rotary_cos": cos, "rotary_sin": sin,
                           "rotary_interleaved": False}
        return {":attend": [(attention_with_kvcache, (q, k, v), keywords)],
                "": [(attention_with_kvcache, (q, k, v), append)],
                ":rotary": [(attention_with_kvcache, (rotated(q, position, back), k, v), rotary)]}


class Mixed(Decode):
    """Samples that decode a token each and, last, a prefill of as many keys as rows. q is packed; out is parts_of()."""

    def seqlens_of(self, shape):
        return [shape.seqlen_k] * shape.batch_size + [shape.options["prefill"]]

    def ways_of(self, q, k, v, keywords):
        samples, prefill = self.shape.batch_size, self.options["prefill"]
        begins = torch.tensor([*range(samples + 1), samples + prefill], dtype=torch.int32, device=self.device)
        apart = [(attention_with_kvcache, (x, *((k, v) if "page_table" in keywords else (k[part], v[part]))),
                  {name: values[part] for name, values in keywords.items()})
                 for x, part in zip(self.parts_of(q), (slice(0, samples), slice(samples, samples + 1)))]
        rows = [x[:, :, :prefill] for x in apart[1][1]]
        return {"": [(attention_with_kvcache, (q, k, v), keywords | {"cu_seqlens_q": begins, "max_seqlen_q": prefill})],
                ":apart": apart, ":dense": [apart[0], (flash_attention, rows, {})]}

    def parts_of(self, q):
        """q, or out, of the samples that decode (B, H, 1, D) and of the prefill (1, H, prefill, D)."""
        samples = self.shape.batch_size
        return q[0, :, :samples].transpose(0, 1).unsqueeze(2).contiguous(), q[:, :, samples:].contiguous()

    def results(self, name, out):
        return out if isinstance(out, tuple) else self.parts_of(out)

    def pairs(self):
        prefill = self.options["prefill"]
        return self.shape.batch_size * self.shape.seqlen_k + prefill**2 / (2 if self.causal else 1)

    def exact(self, q, k, v):
        (decoding, prefilled), rows = self.parts_of(q), self.options["prefill"]
        return (reference_attention(decoding, k[:-1], v[:-1]),
                reference_attention(prefilled, k[-1:, :, :rows], v[-1:, :, :rows], self.causal))

    base = exact

    @staticmethod
    def truth_size(op, shape):
        """All samples count, as one head is judged in all: the keys, or the scores of the prefill if they are more."""
        keys = (shape.batch_size + 1) * shape.seqlen_k * shape.head_dim
        return shape.nheads // shape.nheads_k * max(keys, shape.options["prefill"]**2)

    def one_head(self, x):
        return x[:, -(x.shape[1] // self.shape.nheads_k):]
