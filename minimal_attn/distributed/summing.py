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
    """Rows of gradients that one rank has for another, from one Call. The Parts of all calls of all ranks are
    summed."""

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


def num_sent(parts):
    """How many rows these Parts of a rank have for other ranks."""
    return parts[-1].sent.stop if parts else 0


def for_both(function, rows, head_dims, gradients, keys):
    """Calls function(half of rows, gradient of these keys) for dk and for dv. rows: (n, B, Hk, D + Dv), whose halves
    are columns of dk and of dv."""
    for to, gradient in zip(rows.split_with_sizes(head_dims, -1), gradients):
        function(to, gradient[:, :, keys].permute(2, 0, 1, 3))


class Summing:
    """A reduce-scatter of gradients of keys and values that has begun: each rank gets the sums of its rows, in fp32.

    gradients: of each Call its dk and dv. parts: those of this rank.
    """

    def __init__(self, gradients, k, v, shards, parts):
        self.head_dims, (batch, heads, num_rows, _) = (k.shape[3], v.shape[3]), k.shape
        by_rank = k.new_zeros(shards.size, num_rows, batch, heads, sum(self.head_dims), dtype=sum_dtype(k.dtype))
        for part in parts:
            for_both(torch.Tensor.add_, by_rank[part.rank, part.rows], self.head_dims, gradients[part.call], part.keys)
        self.own = torch.empty_like(by_rank[0])
        self.work = reduce_scatter(self.own, by_rank.flatten(0, 1), shards.group)

    def wait(self):
        """dk (B, Hk, T, D) and dv."""
        self.work.wait()
        return heads_first(self.own).split_with_sizes(self.head_dims, -1)


class PeerSumming:
    """A Summing through peer memory: each rank fetches its Parts from the others and adds them up in fp32. The Parts
    are in k's dtype, as kernels write them, so fewer bytes are sent than for sums.

    parts: a list of Parts for each rank. most_sent: the most rows that any rank sends.
    """

    def __init__(self, gradients, k, v, shards, parts, most_sent, memory):
        self.head_dims, (batch, heads, num_rows, _) = (k.shape[3], v.shape[3]), k.shape
        row = batch, heads, sum(self.head_dims)
        slot = memory.slot((most_sent, *row), k.dtype)
        for_others = slot.of_rank(shards.rank)
        for part in parts[shards.rank]:
            if part.rank != shards.rank:
                for_both(copy, for_others[part.sent], self.head_dims, gradients[part.call], part.keys)
        self.own = k.new_zeros(num_rows, *row, dtype=sum_dtype(k.dtype))
        self.arriving = []  # (rows of own, what is to be added, where it is now)
        for distance in range(1, shards.size):
            source = (shards.rank + distance) % shards.size
            of_source = slot.of_rank(source)
            self.arriving += [(part.rows, k.new_empty(length(part.sent), *row), of_source[part.sent])
                              for part in parts[source] if part.rank == shards.rank]
        self.work = slot.fetch((here, there) for _, here, there in self.arriving)
        for part in parts[shards.rank]:
            if part.rank == shards.rank:  # meanwhile
                for_both(torch.Tensor.add_, self.own[part.rows], self.head_dims, gradients[part.call], part.keys)

    def wait(self):
        self.work.wait()
        for rows, here, _ in self.arriving:
            self.own[rows].add_(here)
        self.arriving = []
        return heads_first(self.own).split_with_sizes(self.head_dims, -1)


def begin_sums(heads, gradients, k, v, shards, parts, peers):
    """Yields (heads, their Summing) for a group of heads. Peer memory is kept, so it is small: it takes some of the
    heads at a time. parts: {rank: its Parts}, of all ranks if there are peers."""
    if not peers:
        yield heads, Summing(gradients, k[:, heads], v[:, heads], shards, parts[shards.rank])
        return
    most_sent = max(map(num_sent, parts.values()))
    bytes_of_head = k.element_size() * k.shape[0] * most_sent * (k.shape[3] + v.shape[3])
    step = max(1, MAX_SUM_BYTES // max(1, bytes_of_head))
    for begin in range(heads.start, heads.stop, step):
        some = slice(begin, min(heads.stop, begin + step))
        of_some = [[x[:, some.start - heads.start:some.stop - heads.start] for x in pair] for pair in gradients]
        yield some, PeerSumming(of_some, k[:, some], v[:, some], shards, parts, most_sent, peers.summed)
