"""Context parallelism by all-gather: every rank gets all keys and values, some heads at a time.

A rank's rows see all of their keys in one call of a kernel, so nothing is merged, and a row's result is that of one
GPU. While the kernel computes with some heads, the keys of the next ones are on their way. The backward pass gathers
them again rather than keeping them. It sends each rank the sum of what all ranks have for its dk and dv.

    heads            0     1     2     3
    communication   |gather|gather|gather|gather|
    computation             |attend|attend|attend|attend|

Read next: ring.py, where not all keys fit.
"""

import math

import torch
from torch.autograd.function import once_differentiable

from ..checks import sum_dtype
from .layout import all_gather, reduce_scatter
from .local import gradient_of_sinks

MIN_BYTES = 16 << 20  # of a rank's keys and values: an all-gather of less takes about as long, on two H200s
MAX_GROUPS = 4


def head_groups(k, v):
    """How the key/value heads are divided: slices of one length, at most MAX_GROUPS."""
    num_bytes = k.element_size() * (k.numel() + v.numel())
    most = min(MAX_GROUPS, max(1, num_bytes // MIN_BYTES))
    groups = next(n for n in range(most, 0, -1) if k.shape[1] % n == 0)
    each = k.shape[1] // groups
    return [slice(i * each, (i + 1) * each) for i in range(groups)]


class Gathering:
    """An all-gather of keys and values that has begun."""

    def __init__(self, k, v, shards):
        # Rows first, so that what ranks send one after the other lies in memory as a sequence: (T, B, Hk, D + Dv).
        self.own = torch.cat((k, v), -1).permute(2, 0, 1, 3).contiguous()
        self.all = self.own.new_empty(shards.size * self.own.shape[0], *self.own.shape[1:])
        self.work = all_gather(self.all, self.own, shards.group)
        self.shards, self.head_dims = shards, (k.shape[3], v.shape[3])

    def wait(self):
        """k (B, Hk, P·T, D) and v, in the order of the sequence."""
        self.work.wait()
        everything, self.own, self.all = self.all, None, None  # the call needs no more than what is in order
        return heads_first(self.shards.in_order(everything)).split(self.head_dims, -1)


def heads_first(rows):
    """(S, B, Hk, D) -> (B, Hk, S, D), a view."""
    return rows.permute(1, 2, 0, 3)


def gathered(k, v, shards):
    """For each group of heads (heads, k, v), of the whole sequence. That of the next group begins before."""
    groups = head_groups(k, v)
    following = Gathering(k[:, groups[0]], v[:, groups[0]], shards)
    for heads, next_heads in zip(groups, [*groups[1:], None]):
        current, following = following, next_heads and Gathering(k[:, next_heads], v[:, next_heads], shards)
        yield heads, *current.wait()


def query_heads(heads, q, k):
    """The query heads that read these key/value heads."""
    group = q.shape[1] // k.shape[1]
    return slice(heads.start * group, heads.stop * group)


class AllGatherAttention(torch.autograd.Function):
    """(q, k, v, sinks, attention, an Attention) -> out; all of this rank."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, attention):
        parts, rows = [], attention.room.extended(q)
        for heads, k_all, v_all in gathered(k, v, attention.shards):
            of_q = query_heads(heads, q, k)
            parts.append(attention.of_heads(of_q).attend(rows[:, of_q], k_all, v_all))
        out, lse = (attention.room.own(x[0] if len(x) == 1 else torch.cat(x, 1)) for x in zip(*parts))
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.attention = attention
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        attention, shards = ctx.attention, ctx.attention.shards
        dtype, num_rows, room = sum_dtype(q.dtype), k.shape[2], attention.room
        rows = *map(room.extended, (dout, q, out)), room.extended(lse, -math.inf)
        dq, reduced, work = torch.zeros(rows[1].shape, dtype=dtype, device=q.device), [], None
        for heads, k_all, v_all in gathered(k, v, shards):
            of_q = query_heads(heads, q, k)
            sizes = k_all.shape[2], k.shape[0], heads.stop - heads.start, k.shape[3] + v.shape[3]
            dkv_all = torch.zeros(sizes, dtype=dtype, device=k.device)
            dk, dv = heads_first(dkv_all).split((k.shape[3], v.shape[3]), -1)
            attention.of_heads(of_q).add_gradients(*(x[:, of_q] for x in rows), k_all, v_all, None, dq[:, of_q], dk, dv)
            if work:
                work.wait()  # until then it keeps the sums for all ranks in memory
            reduced.append(dkv_all.new_empty(num_rows, *sizes[1:]))
            work = reduce_scatter(reduced[-1], shards.by_rank(dkv_all), shards.group)
        work.wait()
        dkv = heads_first(torch.cat(reduced, 2))
        dk, dv = (x.to(k.dtype) for x in dkv.split((k.shape[3], v.shape[3]), -1))
        dsinks = None if sinks is None else gradient_of_sinks(sinks, dout, out, lse)
        return room.own(dq).to(q.dtype), dk, dv, dsinks, None
