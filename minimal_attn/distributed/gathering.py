"""Keys and values of all ranks: through peer memory, or by messages.

A chunk goes from its place in the whole sequence to its place there, so that nothing has to be put in order. Rows come
first, (P·T, B, Hk, D + Dv): then a chunk is one piece of memory. Read next: summing.py, the way back of gradients.
"""

import functools
import math

import torch

from .layout import exchange_chunks


class Gathering:
    """An all-gather of keys and values that has begun. begin(everything) fills a tensor and gives what to wait for."""

    def __init__(self, k, v, shards, begin):
        self.head_dims, (batch, heads, num_rows, _) = (k.shape[3], v.shape[3]), k.shape
        self.everything = k.new_empty(shards.size * num_rows, batch, heads, sum(self.head_dims))
        self.works = begin(self.everything)

    def wait(self):
        """k (B, Hk, P·T, D) and v, in the order of the sequence."""
        for work in self.works:
            work.wait()
        return heads_first(self.everything).split_with_sizes(self.head_dims, -1)


def exchange(k, v, shards, number, everything):
    """Fill everything by messages between ranks. Groups that are under way at once have numbers of their own."""
    own = shards.of_rank(everything, shards.rank)
    write_rows(own.split_with_sizes((k.shape[3], v.shape[3]), -1), k, v)
    return exchange_chunks(everything, shards, number)


class Published:
    """This rank's keys and values in peer memory, from where all ranks copy them, one group of heads after another."""

    def __init__(self, k, v, groups, shards, memory):
        self.k, self.v, self.shards, (batch, heads, num_rows, _) = k, v, shards, k.shape
        self.shape = num_rows, batch, k.shape[3] + v.shape[3]
        self.slot = memory.slot((math.prod(self.shape) * heads,), k.dtype)
        own = self.slot.of_rank(shards.rank)
        for heads in groups:
            rows = self.rows(own, heads).split_with_sizes((k.shape[3], v.shape[3]), -1)
            write_rows((x[None] for x in rows), k[:, heads], v[:, heads])

    def rows(self, flat, heads):
        """View of a group of heads in a rank's slot: (T, B, heads, D + Dv)."""
        num_rows, batch, head_dims = self.shape
        of_head = math.prod(self.shape)
        return flat[heads.start * of_head:heads.stop * of_head].view(num_rows, batch, -1, head_dims)

    def copy(self, heads, everything):
        """Fill everything with those of all ranks."""
        shards, num_rows = self.shards, self.shape[0]

        def chunks():
            for distance in range(1, shards.size):  # all ranks do not read from the same one first
                source = (shards.rank + distance) % shards.size
                rows = self.rows(self.slot.of_rank(source), heads)
                for run in shards.runs(source, num_rows):
                    yield everything[run.begin:run.end], rows[run.local_slice(run.begin, run.end)]

        copied = self.slot.fetch(chunks())
        own = shards.of_rank(everything, shards.rank).split_with_sizes((self.k.shape[3], self.v.shape[3]), -1)
        write_rows(own, self.k[:, heads], self.v[:, heads])  # meanwhile
        return copied,


def gathered(k, v, groups, shards, peers):
    """(heads, k and v of all ranks, as Gathering has them) of one group of heads after the other.

    The next group is on its way then. The one after it begins when the caller is back for the next one. So if the
    caller has dropped what it does not compute with any more, there is memory for three groups.
    """
    published = Published(k, v, groups, shards, peers.gathered) if peers else None

    def begin(number):
        if number >= len(groups):
            return None
        heads = groups[number]
        parts = k[:, heads], v[:, heads], shards
        fill = functools.partial(published.copy, heads) if peers else functools.partial(exchange, *parts, number)
        return Gathering(*parts, fill)

    following = begin(0)
    try:
        for number, heads in enumerate(groups, 1):
            gathering, following = following, begin(number)
            yield heads, *gathering.wait()
    finally:
        if following:  # the caller failed; this memory must not be used again while it is written
            following.wait()


def write_rows(rows, *tensors):
    """Copies each of the tensors (B, Hk, T, D) to its rows (chunks, rows of a chunk, B, Hk, D)."""
    for x_rows, x in zip(rows, tensors):
        copy(x_rows, x.permute(2, 0, 1, 3).unflatten(0, x_rows.shape[:2]))


def copy(to, x):
    """to.copy_(x), of the same dtype: in elements of 16 bytes if possible. torch's kernel for strided tensors moves one
    element after another, whatever their size."""
    width = 16 // x.element_size()
    if all(t.stride(-1) == 1 and t.data_ptr() % 16 == 0
           and not any(n % width for n in (t.shape[-1], *t.stride()[:-1], t.storage_offset())) for t in (to, x)):
        to, x = to.view(torch.complex128), x.view(torch.complex128)
    to.copy_(x)


def heads_first(rows):
    """(S, B, Hk, D) -> (B, Hk, S, D), a view."""
    return rows.permute(1, 2, 0, 3)
