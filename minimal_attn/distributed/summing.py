"""Gradients of keys and values: each rank has some for all keys, and gets the sums for its own ones, in fp32.

Through peer memory a rank fetches what the others have for it and adds it up. Otherwise each rank adds up what it has
for every rank, and a collective adds up these sums. Read next: peer_memory.py.
"""

import functools
from typing import NamedTuple

import torch

from ..checks import sum_dtype
from .gathering import copy, heads_first
from .layout import reduce_scatter, runs_of
from .pieces import length

MAX_SUM_BYTES = 128 << 20  # of gradients in peer memory, which is kept


class Part(NamedTuple):
    """Rows of gradients that one rank has for one, from one Call. Those of the calls of all ranks are summed."""

    rank: int  # that holds these rows
    rows: slice  # among its own
    call: int  # number
    keys: slice  # of the call
    sent: slice  # rows among those that go to other ranks, by the order of these


@functools.lru_cache
def parts_of(key_ranges, rank, size, chunks_per_rank, num_rows):
    """The Parts that a rank has, whose Calls have these (begin, end) of keys, in the order of the ranks."""
    parts, num_sent = [], 0
    for to in range(size):
        for run in runs_of(to, size, chunks_per_rank, num_rows):
            for call, (first, last) in enumerate(key_ranges):
                begin, end = max(first, run.begin), min(last, run.end)
                if begin >= end:
                    continue
                sent = slice(num_sent, num_sent + (end - begin if to != rank else 0))
                parts.append(Part(to, run.local_slice(begin, end), call, slice(begin - first, end - first), sent))
                num_sent = sent.stop
    return tuple(parts)


class Summing:
    """A reduce-scatter of gradients of keys and values that has begun: each rank gets the sums of its rows, in fp32.

    gradients: of each Call its dk and dv. sent: of each rank its Parts.
    """

    def __init__(self, gradients, k, v, shards, sent):
        self.head_dims, (batch, heads, num_rows, _) = (k.shape[3], v.shape[3]), k.shape
        by_rank = k.new_zeros(shards.size, num_rows, batch, heads, sum(self.head_dims), dtype=sum_dtype(k.dtype))
        for part in sent[shards.rank]:
            self.each(torch.Tensor.add_, by_rank[part.rank, part.rows], gradients[part.call], part.keys)
        self.own = torch.empty_like(by_rank[0])
        self.work = reduce_scatter(self.own, by_rank.flatten(0, 1), shards.group)

    def each(self, function, rows, gradients, keys):
        """function(rows (n, B, Hk, D + Dv), dk and dv of these keys), of both halves of rows."""
        for to, gradient in zip(rows.split_with_sizes(self.head_dims, -1), gradients):
            function(to, gradient[:, :, keys].permute(2, 0, 1, 3))

    def wait(self):
        """dk (B, Hk, T, D) and dv."""
        self.work.wait()
        return heads_first(self.own).split_with_sizes(self.head_dims, -1)


class PeerSumming(Summing):
    """The same through peer memory: each rank fetches its Parts from the others and adds them up. Parts are in k's
    dtype, as kernels write them, so that fewer bytes are sent than of sums."""

    def __init__(self, gradients, k, v, shards, sent, memory):
        self.head_dims, (batch, heads, num_rows, _) = (k.shape[3], v.shape[3]), k.shape
        row = batch, heads, sum(self.head_dims)
        slot = memory.slot((max(parts[-1].sent.stop if parts else 0 for parts in sent), *row), k.dtype)
        for_others = slot.of_rank(shards.rank)
        for part in sent[shards.rank]:
            if part.rank != shards.rank:
                self.each(copy, for_others[part.sent], gradients[part.call], part.keys)
        self.own = k.new_zeros(num_rows, *row, dtype=sum_dtype(k.dtype))
        self.arriving = []  # (rows of own, what is to be added)
        for distance in range(1, shards.size):
            source = (shards.rank + distance) % shards.size
            of_source = slot.of_rank(source)
            self.arriving += [(part.rows, k.new_empty(length(part.sent), *row),
                               of_source[part.sent]) for part in sent[source] if part.rank == shards.rank]
        self.work = slot.fetch((here, there) for _, here, there in self.arriving)
        for part in sent[shards.rank]:
            if part.rank == shards.rank:  # meanwhile
                self.each(torch.Tensor.add_, self.own[part.rows], gradients[part.call], part.keys)

    def wait(self):
        self.work.wait()
        for rows, here, _ in self.arriving:
            self.own[rows] += here
        self.arriving = []
        return heads_first(self.own).split_with_sizes(self.head_dims, -1)


def begin_sums(heads, gradients, k, v, shards, sent, peers):
    """[(heads, Summing)] of a group of heads. In peer memory, which is kept, there is room for some heads at a time."""
    if not peers:
        return [(heads, Summing(gradients, k[:, heads], v[:, heads], shards, sent))]
    bytes_of_head = k.element_size() * k.shape[0] * shards.size * k.shape[2] * (k.shape[3] + v.shape[3])
    step, sums = max(1, MAX_SUM_BYTES // bytes_of_head), []
    for begin in range(heads.start, heads.stop, step):
        some = slice(begin, min(heads.stop, begin + step))
        of_some = [[x[:, some.start - heads.start:some.stop - heads.start] for x in pair] for pair in gradients]
        sums.append((some, PeerSumming(of_some, k[:, some], v[:, some], shards, sent, peers.summed)))
    return sums
