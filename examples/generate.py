"""A server of a language model: continuous batching over a paged cache, by attention_with_kvcache.

    python -m examples.generate --requests 12 --pages 24

From the repository's root. In each step the scheduler packs what the requests need into one batch: the next token of
each request that generates, and chunks of the prompts of those that do not yet (Yu et al., Orca, 2022; Agrawal et al.,
Sarathi-Serve, 2024). Keys and values lie in pages (Kwon et al., PagedAttention, 2023). A request takes pages as it
grows, and gives them back when it ends. If none is free, new requests wait, and the youngest that runs gives its pages
back and waits too. It computes its keys again later.

The weights are random, so the text means nothing. But it must be the same text whatever else is in the batch: at the
end, each request's tokens are compared with those of the same model without a cache. Read next: tiny_lm.py, the model.
"""

import argparse
import itertools
import math
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from random import Random

import torch

from examples.tiny_lm import VOCABULARY, TinyLM
from examples.train_tiny_gpt import count
from minimal_attn import attention_with_kvcache
from minimal_attn.attention import BACKENDS
from minimal_attn.cli import guarded

# (on a GPU, on a CPU)
MODEL = {"layers": (8, 2), "embed_dim": (1024, 64), "heads": (8, 4), "heads_k": (2, 2)}
OPTIONS = {"requests": (256, 24, "how many arrive"), "pages": (1024, 20, "in the cache"),
           "chunk": (512, 32, "tokens of prompts in a step"), "batch": (64, 8, "requests that run at once")}
LONGEST_PROMPT, LONGEST_NEW = (1024, 60), (256, 40)
PAGE_SIZE = 16
# How far a token's logit without a cache may be below the best: ten times a logit's standard error, or a little more.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.016, torch.bfloat16: 0.13}


@dataclass(eq=False)
class Request:
    tokens: list[int]  # the prompt, to which the server adds num_new tokens
    num_new: int
    arrives: int = 0  # in this step
    leaves: int | None = None  # in this step the client hangs up, if the request has not finished
    status: str = "waiting"  # or running, finished, cancelled
    num_cached: int = 0  # of how many tokens the keys and values are in the cache
    pages: list[int] = field(default_factory=list)  # which hold them

    def __post_init__(self):
        self.num_prompt, self.num_total = len(self.tokens), len(self.tokens) + self.num_new


class Server:
    """submit and cancel requests at any time; each step() is one forward pass of the model."""

    def __init__(self, model, num_pages, chunk, max_batch, backend):
        self.model, self.chunk, self.max_batch, self.backend = model, chunk, max_batch, backend
        weight, max_pages = model.head.weight, pages_of(len(model.cos))
        # (layer, K or V, page, head, place, D). Whoever reads what was never written gets NaN.
        self.cache = weight.new_full((len(model.layers), 2, num_pages, PAGE_SIZE, model.heads_k, model.head_dim),
                                     math.nan).transpose(3, 4)
        self.free_pages, self.running, self.waiting, self.counts = list(range(num_pages)), [], deque(), Counter()
        # Inputs of a forward pass. They never move in memory, since CUDA graphs need fixed addresses.
        size = padded(max_batch)
        self.tokens, self.seqused_k, self.cu_seqlens, self.page_table = (
            torch.zeros(shape, dtype=torch.int32, device=weight.device)
            for shape in (chunk + size, size, size + 1, (size, max_pages)))
        self.graphs = {}  # number of samples, a power of two: (graph, what it writes)
        while size and weight.is_cuda and backend in ("auto", "cuda", "triton"):
            self.graphs[size] = self.captured(size)
            size //= 2

    def submit(self, request):
        longest = min(len(self.model.cos), self.cache.shape[2] * PAGE_SIZE)
        if not 1 <= request.num_prompt < request.num_total <= longest:
            raise ValueError(f"a prompt of {request.num_prompt} tokens and {request.num_new} new ones are not served: "
                             f"there must be some of both, and no more than {longest} in all")
        self.waiting.append(request)

    def cancel(self, request):
        """Ends a request that has not ended yet; its pages are free at once."""
        if request.status in ("waiting", "running"):
            (self.running if request.status == "running" else self.waiting).remove(request)
            self.give_back(request, "cancelled")

    def step(self):
        batch = self.schedule()
        for (request, n), token in zip(batch, self.next_tokens(batch) if batch else ()):
            request.num_cached += n
            if request.num_cached == len(request.tokens):  # else more of its prompt follows
                request.tokens.append(token)
                self.counts["tokens"] += 1
            if len(request.tokens) == request.num_total:
                self.running.remove(request)
                self.give_back(request, "finished")

    def schedule(self):
        """[(request, how many of its tokens come next)], for which there are pages."""
        batch, budget, has_preempted = [], self.chunk, False  # budget: of prompts' tokens in this step
        for request in (*self.running, *self.waiting):  # the oldest that runs comes first, and so always goes on
            left = len(request.tokens) - request.num_cached
            n = 1 if left == 1 else min(left, budget)
            missing = pages_of(request.num_cached + n) - len(request.pages)
            if request.status == "waiting":
                if len(self.running) == self.max_batch or missing > len(self.free_pages) or not n or has_preempted:
                    break
                self.running.append(self.waiting.popleft())
                request.status = "running"
            while missing > len(self.free_pages):
                self.waiting.appendleft(youngest := self.running.pop())
                self.give_back(youngest, "waiting")
                has_preempted = True
                if youngest is request:
                    return batch
            request.pages += (self.free_pages.pop() for _ in range(missing))
            budget -= n if left > 1 else 0  # who generates does not wait for prompts
            if n:
                batch.append((request, n))
        return batch

    def give_back(self, request, status):
        self.counts[status] += 1  # "waiting": how many gave way to older ones
        self.free_pages += request.pages
        request.pages, request.num_cached, request.status = [], 0, status

    def next_tokens(self, batch):
        """The token that the model likes best after those of each (request, n)."""
        num_rows, max_rows, size = sum(n for _, n in batch), max(n for _, n in batch), len(batch)
        self.counts["decode" if max_rows == 1 else "mixed"] += 1
        if max_rows == 1:  # padded by samples without rows, of which nothing goes into the cache
            num_rows = size = padded(size)
        padding, width = [0] * (size - len(batch)), max(len(r.pages) for r, _ in batch)
        new = [token for r, n in batch for token in r.tokens[r.num_cached:r.num_cached + n]]
        ends = list(itertools.accumulate([n for _, n in batch] + padding))
        self.tokens[:len(new)], self.cu_seqlens[1:size + 1] = torch.tensor(new), torch.tensor(ends)
        self.seqused_k[:size] = torch.tensor([r.num_cached for r, _ in batch] + padding)
        self.page_table[:len(batch), :width] = torch.tensor([r.pages + [0] * (width - len(r.pages)) for r, _ in batch])
        if max_rows == 1 and self.graphs:
            graph, best = self.graphs[size]
            graph.replay()
        else:
            best = self.forward(size, num_rows, max_rows)
        return best[:len(batch)].tolist()

    def forward(self, num_samples, num_rows, max_seqlen_q):
        attend = partial(self.attend, num_samples, max_seqlen_q)
        hidden = self.model(self.tokens[:num_rows], attend)
        return self.model.head(hidden[self.cu_seqlens[1:num_samples + 1] - 1]).argmax(-1)  # of each sample's last row

    def attend(self, num_samples, max_seqlen_q, layer, q, k, v):
        cu_seqlens = self.cu_seqlens[:num_samples + 1]
        return attention_with_kvcache(
            q, *self.cache[layer], self.seqused_k[:num_samples], page_table=self.page_table[:num_samples],
            cu_seqlens_q=cu_seqlens, max_seqlen_q=max_seqlen_q, causal=True, k=k, v=v, cu_seqlens_k_new=cu_seqlens,
            rotary_cos=self.model.cos, rotary_sin=self.model.sin, rotary_interleaved=False, backend=self.backend)

    def captured(self, size):
        """(graph of a decode step, what it writes). Samples have no rows yet, so nothing goes into the cache."""
        self.forward(size, size, 1)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            best = self.forward(size, size, 1)
        return graph, best


def pages_of(num_tokens):
    return -(-num_tokens // PAGE_SIZE)


def padded(n):
    """The smallest power of two from n on."""
    return 1 << (n - 1).bit_length()


def draw_requests(num, longest_prompt, longest_new, seed):
    """num requests of random lengths, about one a step. Every sixth client hangs up at some time."""
    random = Random(seed)
    for i in range(num):
        prompt = [random.randrange(VOCABULARY) for _ in range(random.randint(1, longest_prompt))]
        arrives, num_new = random.randint(0, num), random.randint(1, longest_new)
        yield Request(prompt, num_new, arrives, arrives + random.randint(1, num_new) if i % 6 == 5 else None)


def serve(server, requests, console):
    """Run until all requests have ended; the seconds that it took."""
    start = time.perf_counter()
    with console.status("") as line:
        for step in itertools.count():
            for request in requests:
                if step == request.arrives:
                    server.submit(request)
                if step == request.leaves:
                    server.cancel(request)
            if server.counts["finished"] + server.counts["cancelled"] == len(requests):
                return time.perf_counter() - start
            server.step()
            speed = server.counts["tokens"] / (time.perf_counter() - start)
            line.update(f"step {step}: {len(server.running)} run, {len(server.waiting)} wait, "
                        f"{len(server.free_pages)} pages are free, {speed:,.0f} tokens/s")


def check(model, requests, backend):
    """How many tokens are the best without a cache. RuntimeError if one is worse by more than rounding explains."""
    num_best, tolerance = 0, TOLERANCE[model.head.weight.dtype]
    for i, request in enumerate(requests):
        gaps = model.gaps_without_cache(request.tokens, backend)[request.num_prompt - 1:]
        num_best += int((gaps == 0).sum())
        if not (gaps <= tolerance).all():
            raise RuntimeError(f"request {i}: without a cache, a logit is {gaps.max():.3g} below the best")
    return num_best


def main(argv=None):
    is_cpu = not torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--backend", choices=["auto", *BACKENDS], default="auto")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"],
                        default="float32" if is_cpu else "bfloat16", help="default: bfloat16, on a CPU float32")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the requests")
    for name, (gpu, cpu, meaning) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=count, default=cpu if is_cpu else gpu,
                            help=f"{meaning}; default: {gpu}, on a CPU {cpu}")
    args = parser.parse_args(argv)
    from rich.console import Console  # here, where guarded() says in one line that it is missing
    from rich.table import Table
    torch.manual_seed(args.seed)  # the weights are drawn on the CPU for any device
    longest = LONGEST_PROMPT[is_cpu], LONGEST_NEW[is_cpu]
    model = TinyLM(**{name: sizes[is_cpu] for name, sizes in MODEL.items()}, max_seqlen=sum(longest))
    model.to("cpu" if is_cpu else "cuda", getattr(torch, args.dtype))
    server = Server(model, args.pages, args.chunk, args.batch, args.backend)
    requests, console = list(draw_requests(args.requests, *longest, args.seed)), Console(highlight=False)
    seconds = serve(server, requests, console)
    num_best, counts = check(model, requests, args.backend), server.counts
    assert sorted(server.free_pages) == list(range(args.pages)), "a page was lost, or given back twice"

    table = Table("finished", "cancelled", "gave way", "decode steps", "mixed steps", "tokens", "tokens/s")
    table.add_row(*(f"{counts[name]:,}" for name in ("finished", "cancelled", "waiting", "decode", "mixed", "tokens")),
                  f"{counts['tokens'] / seconds:,.0f}")
    console.print(table)
    console.print(f"{num_best:,} of {counts['tokens']:,} tokens are those of a run without a cache"
                  + (", the others within rounding of them." if num_best < counts["tokens"] else "."))
    console.print(f"All {args.pages:,} pages are free.")


if __name__ == "__main__":
    sys.exit(guarded("generate", main))
