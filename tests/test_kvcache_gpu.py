"""csrc's kernel for caches on a GPU: CUDA graphs, streams, calls in a row, and bits that do not depend on the batch.

test_kvcache.py has its results, decode_driver.cpp its shapes.
"""

import pytest
import torch

from minimal_attn import attention_with_kvcache

pytestmark = pytest.mark.gpu
LENGTHS = (1000, 0, 1, 63, 64, 65, 3000, 129, 700, 2048)
PAGE_SIZE = 16


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


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
        self.table = torch.randperm(num_pages, generator=generator, dtype=torch.int32, device="cuda").view(-1, max_pages)
        self.lengths = ints(*LENGTHS)

    def attend(self, samples=slice(None), backend="cuda"):
        return attention_with_kvcache(self.q[samples], self.k, self.v, self.lengths[samples], causal=True,
                                      page_table=self.table[samples], return_lse=True, backend=backend)

    def change(self):
        """Other lengths, and another sample's pages."""
        self.lengths.copy_(self.lengths.flip(0))
        self.table.copy_(self.table.roll(3, 0))


def assert_same_bits(got, wanted):
    assert all(x.count_nonzero() for x in wanted) and all(map(torch.equal, got, wanted))


def captured(attend):
    """(graph, what it writes); the call has run before, as CUDA graphs want it."""
    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend()
    return graph, results


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_bits_of_a_sample_do_not_depend_on_its_batch(rows):
    batch = Batch(0, rows)
    out, lse = batch.attend()
    torch.testing.assert_close(out, batch.attend(backend="torch")[0], atol=2e-2, rtol=2e-2)
    for b in range(len(LENGTHS)):
        one = slice(b, b + 1)
        assert all(map(torch.equal, batch.attend(one), (out[one], lse[one])))


def test_calls_in_a_row_have_the_same_bits():
    """So every call leaves its counters at 0."""
    batch = Batch(1)
    wanted = batch.attend()
    for got in [batch.attend() for _ in range(100)]:
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


def test_graph_serves_other_lengths_and_tables():
    batch = Batch(3)
    graph, results = captured(batch.attend)
    for _ in range(3):
        graph.replay()
        assert_same_bits(results, batch.attend())
        batch.change()


def test_streams_do_not_share_counters():
    batches = [Batch(seed) for seed in range(4)]
    wanted = [batch.attend() for batch in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    got = []
    for _ in range(50):
        for batch, stream in zip(batches, streams):
            with torch.cuda.stream(stream):
                got.append(batch.attend())
    torch.cuda.synchronize()
    for i, results in enumerate(got):
        assert_same_bits(results, wanted[i % len(batches)])


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
