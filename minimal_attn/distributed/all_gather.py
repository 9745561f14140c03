"""Context parallelism by all-gather: every rank gets all keys and values, some heads at a time.

A rank's rows see all of their keys in one call of a kernel, so nothing is merged, and a row's result is that of one
GPU. While the kernel computes with some heads, the keys of the next ones are on their way. Calls run beside one
another, so that the next one fills the GPU where one ends. The backward pass gathers the keys again rather than keeping
them. It sends each rank the sum of what all ranks have for its dk and dv.

    heads            0   1..7
    communication   |gather|gather            |
    computation            |attend| attend                     |

Read next: ring.py, where not all keys fit.
"""

import math

import torch
from torch.autograd.function import once_differentiable

from ..checks import sum_dtype
from .layout import exchange_chunks, reduce_scatter
from .local import gradient_of_sinks
from .pieces import all_rows, longest_first
from .side_streams import SideStreams

MIN_BYTES = 4 << 20  # of a rank's keys and values: to gather less takes about as long, on two H200s
ROWS_OF_A_KEY = 4096  # attention of so many rows to a key takes as long as to send it, on two H200s


def head_groups(q, k, v):
    """The slices of key/value heads that are gathered one after another.

    The first one is small, since nothing is computed before it is there. The others grow as fast as computing hides
    communication: a group may be as many times as large as the one before as attention to a head takes longer than to
    gather it.
    """
    heads = k.shape[1]
    bytes_of_head = k.element_size() * (k.numel() + v.numel()) // heads
    growth = max(1, q.shape[2] * (q.shape[1] // heads) // ROWS_OF_A_KEY)
    ends = [min(heads, -(-MIN_BYTES // bytes_of_head))]
    size = ends[0]
    while ends[-1] < heads:
        size *= growth
        ends.append(min(heads, ends[-1] + size))
    return [slice(begin, end) for begin, end in zip([0, *ends], ends)]


class Gathering:
    """An all-gather of keys and values that has begun.

    A chunk is sent from its place in the whole sequence, and arrives at its place, so that nothing has to be put in
    order. Rows come first, (P·T, B, Hk, D + Dv): then a chunk is one piece of memory.
    """

    def __init__(self, k, v, shards, number):
        head_dims = k.shape[3], v.shape[3]
        everything = k.new_empty(shards.size * k.shape[2], *k.shape[:2], sum(head_dims))
        self.keys = heads_first(everything).split(head_dims, -1)
        for x, x_all in zip((k, v), self.keys):
            for chunk in shards.chunks(shards.rank, k.shape[2]):
                x_all[:, :, chunk.begin:chunk.end] = x[:, :, chunk.local_slice(chunk.begin, chunk.end)]
        self.works = exchange_chunks(everything, shards, number)

    def wait(self):
        """k (B, Hk, P·T, D) and v, in the order of the sequence."""
        for work in self.works:
            work.wait()
        return self.keys


class Summing:
    """A reduce-scatter of gradients of keys and values that has begun: each rank gets the sums of its own rows.

    parts: of each call (its keys, their dk, their dv). They are added up in fp32. Rows lie in the order of the ranks.
    """

    def __init__(self, parts, k, v, shards):
        self.head_dims, num_rows = (k.shape[3], v.shape[3]), k.shape[2]
        by_rank = k.new_empty(shards.size * num_rows, *k.shape[:2], sum(self.head_dims), dtype=sum_dtype(k.dtype))
        for rank in range(shards.size):
            of_rank = heads_first(by_rank[rank * num_rows:(rank + 1) * num_rows])
            for chunk in shards.chunks(rank, num_rows):
                self.add(of_rank[:, :, chunk.local_slice(chunk.begin, chunk.end)], chunk, parts)
        self.own = by_rank.new_empty(num_rows, *by_rank.shape[1:])
        self.work = reduce_scatter(self.own, by_rank, shards.group)

    def add(self, total, chunk, parts):
        """Make total (B, Hk, rows, D + Dv) the sum of what the parts have for the keys of a Chunk."""
        is_empty = True
        for keys, *gradients in parts:
            begin, end = max(keys.start, chunk.begin), min(keys.stop, chunk.end)
            if begin >= end:
                continue
            has_all = (begin, end) == (chunk.begin, chunk.end)
            if is_empty and not has_all:
                total.zero_()
            for x, part in zip(total[:, :, begin - chunk.begin:end - chunk.begin].split(self.head_dims, -1), gradients):
                part = part[:, :, begin - keys.start:end - keys.start]
                x.copy_(part) if is_empty and has_all else x.add_(part)
            is_empty = False
        if is_empty:
            total.zero_()

    def wait(self):
        """dk (B, Hk, T, D) and dv, in fp32."""
        self.work.wait()
        return heads_first(self.own).split(self.head_dims, -1)


def heads_first(rows):
    """(S, B, Hk, D) -> (B, Hk, S, D), a view."""
    return rows.permute(1, 2, 0, 3)


def empty_rows(q, head_dim):
    """(B, H, T, head_dim), in the order of q's memory: rows or heads first."""
    batch, heads, rows, _ = q.shape
    if q.stride(2) > q.stride(1):
        return q.new_empty(batch, rows, heads, head_dim).transpose(1, 2)
    return q.new_empty(batch, heads, rows, head_dim)


def query_heads(heads, q, k):
    """The query heads that read these key/value heads."""
    group = q.shape[1] // k.shape[1]
    return slice(heads.start * group, heads.stop * group)


class AllGatherAttention(torch.autograd.Function):
    """(q, k, v, sinks, attention, an Attention) -> out; all of this rank."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, attention):
        room, shards = attention.room, attention.shards
        rows, groups = room.extended(q), head_groups(q, k, v)
        calls = longest_first(attention.calls(rows, shards.size * k.shape[2], None, share_keys=True))
        out, lse = empty_rows(rows, v.shape[3]), rows.new_empty(rows.shape[:3], dtype=sum_dtype(q.dtype))
        if not all_rows(calls, rows):
            out.zero_(), lse.fill_(-math.inf)  # as rows without a document have
        gatherings = [Gathering(k[:, heads], v[:, heads], shards, i) for i, heads in enumerate(groups)]
        with SideStreams(q.device) as side:
            for heads, gathering in zip(groups, gatherings):
                of_q = query_heads(heads, q, k)
                k_all, v_all = gathering.wait()
                part = attention.of_heads(of_q)
                for call in calls:
                    side.run(part.attend, call, rows[:, of_q], k_all, v_all, out[:, of_q], lse[:, of_q])
        out, lse = room.own(out), room.own(lse)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.attention = attention
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        attention, shards, room = ctx.attention, ctx.attention.shards, ctx.attention.room
        rows = *map(room.extended, (dout, q, out)), room.extended(lse, -math.inf)
        calls = longest_first(attention.calls(rows[1], shards.size * k.shape[2], None, share_keys=False))
        dq, dk, dv = empty_rows(rows[1], q.shape[3]), torch.empty_like(k), torch.empty_like(v)
        if not all_rows(calls, rows[1]):
            dq.zero_()
        groups = head_groups(q, k, v)[::-1]  # the last sum is the one that nothing hides
        gatherings = [Gathering(k[:, heads], v[:, heads], shards, i) for i, heads in enumerate(groups)]
        sums = []
        for heads, gathering in zip(groups, gatherings):
            of_q = query_heads(heads, q, k)
            k_all, v_all = gathering.wait()
            part, of_rows = attention.of_heads(of_q), [x[:, of_q] for x in rows]
            with SideStreams(q.device) as side:
                parts = [(call.keys, *side.run(part.key_gradients, call, *of_rows, k_all, v_all, dq[:, of_q]))
                         for call in calls]
            if sums:
                sums[-1].work.wait()  # until then it keeps the sums for all ranks in memory
            sums.append(Summing(parts, k[:, heads], v[:, heads], shards))
        for heads, total in zip(groups, sums):
            dk[:, heads], dv[:, heads] = total.wait()
        dsinks = None if sinks is None else gradient_of_sinks(sinks, dout, out, lse)
        return room.own(dq), dk, dv, dsinks, None
