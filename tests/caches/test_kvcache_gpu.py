"""csrc's kernels for caches on a GPU: CUDA graphs, streams, calls in a row, and bits that do not depend on the batch
with num_splits.

test_kvcache.py has its results, decode_driver.cpp its shapes.
"""

import itertools

import pytest
import torch

from cached_calls import ints
from conftest import captured
from minimal_attn import append_to_kvcache, attention_with_kvcache, force_kernel
from test_activate_gpu import kernels_of

pytestmark = pytest.mark.gpu
LENGTHS = (1000, 0, 1, 63, 64, 65, 3000, 129, 700, 2048)
PAGE_SIZE = 16
# From how many rows on decode_sm90.cu and flash_sm90.cu serve a sample of 8 heads on 2 (see cache_launches.h).
TALL, PREFILL = 9, 1345


class Batch:
    """q (B, 8, rows, 128), pages with 2 key heads in a random order, and LENGTHS."""

    def __init__(self, seed, rows=1):
        generator = torch.Generator("cuda").manual_seed(seed)

        def randn(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device="cuda")

        max_pages = -(-max(LENGTHS) // PAGE_SIZE)
        num_pages = len(LENGTHS) * max_pages
        self.q = randn(len(LENGTHS), 8, rows, 128)
        self.k, self.v = (randn(num_pages, PAGE_SIZE, 2, 128).transpose(1, 2) for _ in "kv")
        order = torch.randperm(num_pages, generator=generator, dtype=torch.int32, device="cuda")
        self.table = order.view(-1, max_pages)
        self.lengths = ints(*LENGTHS)

    def attend(self, samples=slice(None), **keywords):
        return attention_with_kvcache(self.q[samples], self.k, self.v, self.lengths[samples], causal=True,
                                      page_table=self.table[samples], return_lse=True,
                                      **{"backend": "cuda"} | keywords)

    def change(self):
        """Other lengths, and another sample's pages."""
        self.lengths.copy_(self.lengths.flip(0))
        self.table.copy_(self.table.roll(3, 0))


def assert_same_bits(got, wanted):
    assert all(x.count_nonzero() for x in wanted) and all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("rows", [1, TALL - 1, TALL, 20, PREFILL])
def test_bits_of_a_sample_do_not_depend_on_its_batch(rows):
    """With num_splits. Without, blocks of threads share the keys of the batch evenly."""
    batch = Batch(0, rows)
    truth = batch.attend(backend="torch")[0]
    torch.testing.assert_close(batch.attend()[0], truth, atol=2e-2, rtol=2e-2)
    out, lse = batch.attend(num_splits=16)
    torch.testing.assert_close(out, truth, atol=2e-2, rtol=2e-2)
    for b in range(len(LENGTHS)):
        one = slice(b, b + 1)
        assert all(map(torch.equal, batch.attend(one, num_splits=16), (out[one], lse[one])))


def test_memory_of_a_call_is_freed_after_its_last_launch():
    """The launches of a mixed batch run beside each other, so none may get memory that another one still uses."""
    rows = PREFILL, 1, TALL
    begins = ints(0, *itertools.accumulate(rows))
    q = torch.randn(1, 8, sum(rows), 64, dtype=torch.float16, device="cuda")
    k, v = torch.randn(2, 3, 2, 8192, 64, dtype=torch.float16, device="cuda")
    torch.cuda.memory._record_memory_history(context=None)
    attention_with_kvcache(q, k, v, causal=True, cu_seqlens_q=begins, max_seqlen_q=PREFILL, num_splits=8,
                           backend="cuda")
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    actions = [event["action"] for event in snapshot["device_traces"][q.device.index]]
    of_call = [action for action in actions if action in ("alloc", "free_requested")]
    frees = of_call.count("free_requested")
    assert of_call.count("alloc") >= 2 + 3 and of_call[-frees:] == ["free_requested"] * frees


def test_attention_waits_for_the_append_before_it():
    """It may begin while the append still runs."""
    batch = Batch(4)
    new = [torch.randn(len(LENGTHS), 2, 500, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    batch.lengths.fill_(1000)
    results = []
    for wait in (torch.cuda.synchronize, lambda: None):
        for _ in range(50):
            for x in new:
                x.copy_(x.roll(1, 0))
            append_to_kvcache(*new, batch.k, batch.v, ints(*[500] * len(LENGTHS)), page_table=batch.table)
            wait()
            results.append(batch.attend())
    torch.cuda.synchronize()
    for got, wanted in zip(results[50:], results[:50]):
        assert_same_bits(got, wanted)


def test_a_call_waits_for_the_last_one():
    """Each call's rows are the output of the last call, which may still run when the next begins."""
    batch, first = Batch(2), Batch(2).q
    results = []
    for wait in (torch.cuda.synchronize, lambda: None):
        batch.q = first
        for _ in range(30):
            batch.q, _ = batch.attend()
            wait()
        results.append(batch.q)
    assert_same_bits(*([x] for x in results))


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_graph_serves_other_lengths_and_tables(backend):
    batch = Batch(3)
    graph, results = captured(lambda: batch.attend(backend=backend))
    for _ in range(3):
        graph.replay()
        assert_same_bits(results, batch.attend(backend=backend))
        batch.change()


def test_graphs_on_two_streams_do_not_share_counters():
    """Both graphs are captured on one stream, beside calls without a graph."""
    batches = [Batch(seed) for seed in (5, 6)]
    graphs, results = zip(*(captured(batch.attend) for batch in batches))
    wanted = [batch.attend() for batch in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        assert_same_bits(batches[0].attend(), wanted[0])
    torch.cuda.synchronize()
    for got, want in zip(results, wanted):
        assert_same_bits(got, want)


class Mixed(Batch):
    """This cache, with a packed q of samples that decode and of prompts."""

    ROWS = (1, PREFILL - 1, TALL - 1, 63, PREFILL, TALL, 1500, 0, 1, 900)

    def __init__(self, seed):
        super().__init__(seed)
        self.begins = ints(0, *itertools.accumulate(self.ROWS))
        self.longest = max(self.ROWS)
        generator = torch.Generator("cuda").manual_seed(seed)
        self.q = torch.randn(1, 8, sum(self.ROWS), 128, generator=generator, dtype=torch.bfloat16, device="cuda")

    def attend(self, **keywords):
        return attention_with_kvcache(self.q, self.k, self.v, self.lengths, causal=True, page_table=self.table,
                                      cu_seqlens_q=self.begins, max_seqlen_q=self.longest, return_lse=True,
                                      **{"backend": "cuda"} | keywords)

    def attend_one(self, b, **keywords):
        """The result of sample b alone, in a q that is not packed."""
        begin, end, one = *self.begins[b:b + 2].tolist(), slice(b, b + 1)
        return attention_with_kvcache(self.q[:, :, begin:end], self.k, self.v, self.lengths[one], causal=True,
                                      page_table=self.table[one], return_lse=True, backend="cuda", **keywords)


on_hopper = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
                               reason="needs a GPU of sm_90")


# {fewest rows: a part of the names of these kernels}
KERNELS = {1: "sm80::decode", TALL: "sm90::decode", PREFILL: "sm90::flash_fwd"}


def kernels_here(attend):
    """The fewest rows of the kernels of a call."""
    names = " ".join(kernels_of(attend))
    return {rows for rows, name in KERNELS.items() if name in names}


@on_hopper
@pytest.mark.parametrize("rows, kernel", [(1, 1), (TALL - 1, 1), (TALL, TALL), (PREFILL - 1, TALL), (PREFILL, PREFILL)])
def test_rows_decide_which_kernel_serves(rows, kernel):
    batch = Batch(7, rows)
    assert kernels_here(batch.attend) == {kernel}
    results = batch.attend()
    with force_kernel("sm80"):
        assert kernels_here(batch.attend) == {1}
        torch.testing.assert_close(results, batch.attend(), atol=1e-2, rtol=1e-2)


@on_hopper
def test_all_kernels_serve_a_mixed_batch():
    batch = Mixed(8)
    assert kernels_here(batch.attend) == {1, TALL, PREFILL}
    truth = batch.attend(backend="torch")[0]
    torch.testing.assert_close(batch.attend()[0], truth, atol=2e-2, rtol=2e-2)
    out, lse = batch.attend(num_splits=16)
    torch.testing.assert_close(out, truth, atol=2e-2, rtol=2e-2)
    for b, rows in enumerate(batch.ROWS):
        own = slice(batch.begins[b], batch.begins[b + 1])
        assert rows == 0 or all(map(torch.equal, batch.attend_one(b, num_splits=16),
                                    (out[:, :, own], lse[:, :, own])))


@on_hopper
@pytest.mark.parametrize("max_seqlen_q, kernels", [(1, {1}), (TALL, {1, TALL}), (None, {1, TALL, PREFILL})])
def test_longest_sample_decides_which_kernels_are_launched(max_seqlen_q, kernels):
    """The kernel for the most rows serves longer samples too."""
    batch = Mixed(8)
    wanted = batch.attend()
    batch.longest = max_seqlen_q
    assert kernels_here(batch.attend) == kernels
    torch.testing.assert_close(batch.attend(), wanted, atol=1e-2, rtol=1e-2)


@on_hopper
def test_graph_serves_a_prompt_that_becomes_another():
    """Which kernel serves a sample is found on the device."""
    batch = Mixed(9)
    graph, results = captured(batch.attend)
    for rows in batch.ROWS, batch.ROWS[::-1], (1500, *[0] * 9):
        batch.begins.copy_(torch.tensor([0, *itertools.accumulate(rows)]))
        graph.replay()
        assert_same_bits(results, batch.attend())
        batch.change()


def test_mixed_batch_where_torch_writes_the_zeros():
    """cudaStreamPerThread is one name for many streams, so no counters are kept for it."""
    batch = Mixed(10)
    wanted = batch.attend()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(2)):
        got = [batch.attend() for _ in range(20)]
    torch.cuda.synchronize()
    for results in got:
        assert_same_bits(results, wanted)
