"""Exchange between ranks for the all-gather: keys and values of all ranks, and the way back of their gradients.

Both go through peer memory, from which ranks copy, or by messages of torch.distributed. Keys and values lie with rows
first, (P·T, B, Hk, D + Dv), so that a chunk is one piece of memory and goes straight to its place in the sequence.
Gradients are summed in fp32: each rank has some for all keys and gets the sums for its own, by peer memory or by a
reduce-scatter.
"""

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import sum_dtype
from .calls import length
from .layout import reduce_scatter_single

MAX_SUM_BYTES = 128 << 20  # of gradients in peer memory, which is kept
FIRST_TAG = 1 << 20  # of messages, far from the tags of a caller


def gathered(k, v, groups, shards, peers):
    """Yields (heads, k, v) of each group: k (B, heads, P·T, D) and v, in the order of the sequence. The next group is
    on its way meanwhile."""
    fill = (filling_by_peers if peers else filling_by_messages)(k, v, groups, shards, peers)

    def begin(number):
        heads = groups[number].stop - groups[number].start
        everything = k.new_empty(shards.size * k.shape[2], k.shape[0], heads, k.shape[3] + v.shape[3])
        return everything, fill(number, everything)

    begun = map(begin, range(len(groups)))
    following = next(begun)
    try:
        for heads in groups:
            (everything, works), following = following, next(begun, ((), ()))
            for work in works:
                work.wait()
            yield heads, *everything.permute(1, 2, 0, 3).split_with_sizes((k.shape[3], v.shape[3]), -1)
    finally:
        for work in following[1]:  # if the caller failed: this memory must not be used again while it is written
            work.wait()


def filling_by_messages(k, v, groups, shards, _):
    """fill(number of a group, everything), which starts to exchange chunks with all ranks and returns works to wait
    for. A chunk goes into another node as often as that has ranks, where a collective could send it once."""
    def fill(number, everything):
        write_rows(copy, shards.of_rank(everything, shards.rank), k[:, groups[number]], v[:, groups[number]])
        operations, tag = [], FIRST_TAG + number * shards.chunks_per_rank
        for distance in range(1, shards.size):  # all ranks do not send to the same one first
            to, source = ((shards.rank + step) % shards.size for step in (distance, -distance))
            for function, peer, chunks_of in ((dist.isend, to, shards.rank), (dist.irecv, source, source)):
                operations += [dist.P2POp(function, everything[run.begin:run.end], group=shards.group, group_peer=peer,
                                          tag=tag + i) for i, run in enumerate(shards.runs(chunks_of, k.shape[2]))]
        return dist.batch_isend_irecv(operations)

    return fill


def filling_by_peers(k, v, groups, shards, peers):
    """fill of filling_by_messages, by peer memory: this rank writes its keys and values now, and all ranks copy."""
    batch, heads, num_rows, _ = k.shape
    of_head = num_rows * batch * (k.shape[3] + v.shape[3])
    slot = peers.gathered.slot((heads * of_head,), k.dtype)

    def rows_of(rank, heads):
        flat = slot.of_rank(rank)[heads.start * of_head:heads.stop * of_head]
        return flat.view(num_rows, batch, -1, k.shape[3] + v.shape[3])

    for heads in groups:
        write_rows(copy, rows_of(shards.rank, heads)[None], k[:, heads], v[:, heads])

    def chunks(heads, everything):
        for distance in range(1, shards.size):  # all ranks do not read from the same one first
            source = (shards.rank + distance) % shards.size
            rows = rows_of(source, heads)
            for run in shards.runs(source, num_rows):
                yield everything[run.begin:run.end], rows[run.local_slice(run.begin, run.end)]

    def fill(number, everything):
        heads = groups[number]
        copied = slot.fetch(chunks(heads, everything))
        write_rows(copy, shards.of_rank(everything, shards.rank), k[:, heads], v[:, heads])  # meanwhile
        return copied,

    return fill


class Part(NamedTuple):
    """Rows of gradients that one rank has for another, from one Call. Parts are summed over calls and ranks."""

    rank: int  # that holds these rows
    rows: slice  # among its own
    call: int  # number
    keys: slice  # of the call
    sent: slice  # rows among those that go to other ranks, by the order of these


@functools.lru_cache
def parts_of(key_ranges, shards, num_rows):
    """The Parts of shards.rank, whose Calls have these (begin, end) of keys. shards has no group, which this keeps."""
    parts, num_sent = [], 0
    for to in range(shards.size):
        for run in shards.runs(to, num_rows):
            for call, (first, last) in enumerate(key_ranges):
                begin, end = max(first, run.begin), min(last, run.end)
                if begin >= end:
                    continue
                sent = slice(num_sent, num_sent + (end - begin if to != shards.rank else 0))
                parts.append(Part(to, run.local_slice(begin, end), call, slice(begin - first, end - first), sent))
                num_sent = sent.stop
    return tuple(parts)


class Sum(NamedTuple):
    """A sum of the gradients of this rank's keys, in fp32, that has begun."""

    own: Tensor  # (T, B, Hk, D + Dv)
    head_dims: tuple[int, int]
    work: object
    arriving: tuple = ()  # (rows of own, a tensor to be added to them)

    def wait(self):
        """dk (B, Hk, T, D) and dv."""
        self.work.wait()
        for rows, part in self.arriving:
            self.own[rows].add_(part)
        return self.own.permute(1, 2, 0, 3).split_with_sizes(self.head_dims, -1)


def begin_sums(heads, gradients, k, v, shards, parts, peers):
    """Yields (heads, Sum) for a group of heads, by some at a time in peer memory, which is kept and small. gradients:
    (dk, dv) of each Call, for these heads. parts: {rank: its Parts}, of all ranks if there are peers."""
    if not peers:
        yield heads, sum_by_messages(gradients, k[:, heads], v[:, heads], shards, parts[shards.rank])
        return
    most_sent = max(of_rank[-1].sent.stop if of_rank else 0 for of_rank in parts.values())
    bytes_of_head = k.element_size() * k.shape[0] * most_sent * (k.shape[3] + v.shape[3])
    step = max(1, MAX_SUM_BYTES // max(1, bytes_of_head))
    for begin in range(heads.start, heads.stop, step):
        some = slice(begin, min(heads.stop, begin + step))
        of_some = [[x[:, some.start - heads.start:some.stop - heads.start] for x in pair] for pair in gradients]
        yield some, sum_by_peers(of_some, k[:, some], v[:, some], shards, parts, most_sent, peers.summed)


def sum_by_messages(gradients, k, v, shards, parts):
    """A Sum by a reduce-scatter. parts: those of this rank."""
    head_dims, (batch, heads, num_rows, _) = (k.shape[3], v.shape[3]), k.shape
    by_rank = k.new_zeros(shards.size, num_rows, batch, heads, sum(head_dims), dtype=sum_dtype(k.dtype))
    for part in parts:
        write_part(torch.Tensor.add_, by_rank[part.rank, part.rows], part, gradients)
    own = torch.empty_like(by_rank[0])
    work = reduce_scatter_single(own, by_rank.flatten(0, 1), group=shards.group, async_op=True)
    return Sum(own, head_dims, work)


def sum_by_peers(gradients, k, v, shards, parts, most_sent, memory):
    """A Sum through peer memory: each rank fetches its Parts from the others, in k's dtype, as kernels write them.
    most_sent: the most rows that any rank sends."""
    head_dims, (batch, heads, num_rows, _) = (k.shape[3], v.shape[3]), k.shape
    row = batch, heads, sum(head_dims)
    slot = memory.slot((most_sent, *row), k.dtype)
    for_others = slot.of_rank(shards.rank)
    for part in parts[shards.rank]:
        if part.rank != shards.rank:
            write_part(copy, for_others[part.sent], part, gradients)
    own = k.new_zeros(num_rows, *row, dtype=sum_dtype(k.dtype))
    arriving, pairs = [], []
    for distance in range(1, shards.size):
        source = (shards.rank + distance) % shards.size
        of_source = slot.of_rank(source)
        for part in parts[source]:
            if part.rank == shards.rank:
                arriving.append((part.rows, k.new_empty(length(part.sent), *row)))
                pairs.append((arriving[-1][1], of_source[part.sent]))
    work = slot.fetch(pairs)
    for part in parts[shards.rank]:
        if part.rank == shards.rank:  # meanwhile
            write_part(torch.Tensor.add_, own[part.rows], part, gradients)
    return Sum(own, head_dims, work, arriving)


def write_part(write, rows, part, gradients):
    """write_rows of a Part, from the gradients of the Calls, to rows (n, B, Hk, D + Dv)."""
    write_rows(write, rows[None], *(x[:, :, part.keys] for x in gradients[part.call]))


def write_rows(write, rows, k, v):
    """write(to, x) of k and v (B, Hk, T, D) and their columns of rows (chunks, rows of one, B, Hk, D + Dv)."""
    for to, x in zip(rows.split_with_sizes((k.shape[3], v.shape[3]), -1), (k, v)):
        write(to, x.permute(2, 0, 1, 3).unflatten(0, to.shape[:2]))


def copy(to, x):
    """to.copy_(x), of one dtype, in elements of 16 bytes if possible: torch moves one strided element after another."""
    width = 16 // x.element_size()
    if all(t.stride(-1) == 1 and t.data_ptr() % 16 == 0
           and not any(n % width for n in (t.shape[-1], *t.stride()[:-1], t.storage_offset())) for t in (to, x)):
        to, x = to.view(torch.complex128), x.view(torch.complex128)
    to.copy_(x)
