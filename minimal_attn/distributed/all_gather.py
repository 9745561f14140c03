"""Context parallelism by all-gather: every rank gets all keys and values, of all heads or of some at a time.

Each row sees all of its keys in one call of a kernel, so nothing is merged, and its result is that of one GPU. With
groups of heads, the keys of the next ones are on their way while the kernel computes with some. Calls run beside one
another, so that the next one fills the GPU where one ends. The backward pass gathers the keys again rather than keeping
them. It sends each rank the sum of what all ranks have for its dk and dv. With 32 heads in three groups:

    communication   |gather 0..3|gather 4..27|sum 0..3, gather 28..31|      |sum 4..27|     |sum 28..31|
    gradients                   |of 0..3     |of 4..27                      |of 28..31      |

Read next: ring.py, where not all keys fit.
"""

import functools
import math

import torch
from torch.autograd.function import once_differentiable

from ..checks import sum_dtype
from .layout import exchange_chunks, reduce_scatter, runs_of
from .local import gradient_of_sinks
from .pieces import all_rows
from .side_streams import SideStreams

MIN_BYTES = 4 << 20  # of a rank's keys and values: to gather less takes about as long, on two H200s
MAX_BYTES = 1 << 30  # of all ranks' keys and values: heads with more take long enough to hide what comes next
NUM_GROUPS = 3  # unless MAX_BYTES asks for more
MIN_FLOP = 1.5e12  # of each group, counted without a mask: a group costs the host 0.7 to 1 ms
MAX_GROWTH = 10  # beyond it, calls with a part of the heads lose more time than they hide
ROWS_OF_A_KEY = 4096  # attention of so many rows to a key takes as long as to gather it, on two H200s


def head_groups(q, k, v, num_ranks, ends_small=False):
    """The slices of key/value heads that are gathered one after another.

    The first one is small, since nothing is computed before it is there. The others grow as fast as computing hides
    communication: a group may be as many times as large as the one before as attention to a head takes longer than to
    gather it. If it takes much longer, there is one group. ends_small: the last one is as small as the first one, for
    the sum of its gradients, which nothing hides.
    """
    heads = k.shape[1]
    bytes_of_head = k.element_size() * k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3])
    share_sent = 2 * (num_ranks - 1) / num_ranks  # of the keys, in units of that of two ranks
    growth = max(1, int(q.shape[2] * (q.shape[1] // heads) / ROWS_OF_A_KEY / share_sent)) if num_ranks > 1 else 1
    most = max(1, MAX_BYTES // (num_ranks * bytes_of_head))
    flop = 2 * q.shape[0] * q.shape[1] * q.shape[2] ** 2 * num_ranks * (k.shape[3] + v.shape[3])
    flop *= 2.5 if ends_small else 1  # of the backward pass
    num_groups = max(1, int(min(NUM_GROUPS, flop // MIN_FLOP))) if growth <= MAX_GROWTH else 1
    sizes = [growth**i for i in range(num_groups)]  # in units of the first one
    if ends_small:
        sizes[-1] = 1
    first = max(-(-MIN_BYTES // bytes_of_head), -(-heads // sum(sizes)))
    size = first = min(heads, most, first)
    ends, last = [first], min(first, heads - first) if ends_small else 0
    while ends[-1] < heads - last:
        size = min(most, size * growth)
        ends.append(min(heads - last, ends[-1] + size))
    if last:
        ends.append(heads)
    return [slice(begin, end) for begin, end in zip([0, *ends], ends)]


class Gathering:
    """An all-gather of keys and values that has begun.

    A chunk is sent from its place in the whole sequence, and arrives at its place, so that nothing has to be put in
    order. Rows come first, (P·T, B, Hk, D + Dv): then a chunk is one piece of memory.
    """

    def __init__(self, k, v, shards, number):
        self.head_dims, (batch, heads, num_rows, _) = (k.shape[3], v.shape[3]), k.shape
        self.everything = k.new_empty(shards.size * num_rows, batch, heads, sum(self.head_dims))
        own = shards.of_rank(self.everything, shards.rank).split_with_sizes(self.head_dims, -1)
        for x, x_own in zip((k, v), own):
            x_own.copy_(x.permute(2, 0, 1, 3).unflatten(0, x_own.shape[:2]))
        self.works = exchange_chunks(self.everything, shards, number)

    def wait(self):
        """k (B, Hk, P·T, D) and v, in the order of the sequence."""
        for work in self.works:
            work.wait()
        return heads_first(self.everything).split_with_sizes(self.head_dims, -1)


def gathered(k, v, groups, shards):
    """(heads, k and v of all ranks, as Gathering has them) of one group of heads after the other.

    The next group is on its way then. The one after it begins when the caller is back for the next one. So if the
    caller has dropped what it does not compute with any more, there is memory for three groups.
    """
    def begin(number):
        return Gathering(k[:, groups[number]], v[:, groups[number]], shards, number) if number < len(groups) else None

    following = begin(0)
    for number, heads in enumerate(groups, 1):
        gathering, following = following, begin(number)
        yield heads, *gathering.wait()


class Summing:
    """A reduce-scatter of gradients of keys and values that has begun: each rank gets the sums of its own rows.

    parts: of each Call its dk and dv. They are added up in fp32. Rows lie in the order of the ranks.
    """

    def __init__(self, calls, parts, k, v, shards):
        self.head_dims, (batch, heads, num_rows, _) = (k.shape[3], v.shape[3]), k.shape
        by_rank = k.new_empty(shards.size * num_rows, batch, heads, sum(self.head_dims), dtype=sum_dtype(k.dtype))
        totals = heads_first(by_rank).split_with_sizes(self.head_dims, -1)
        ends = tuple((call.keys.start, call.keys.stop) for call in calls)
        zeros, summands = summands_of(ends, shards.size, shards.chunks_per_rank, num_rows)
        for rows in zeros:
            by_rank[rows].zero_()
        for rows, number, keys, is_first in summands:
            for total, part in zip(totals, parts[number]):
                total, part = total[:, :, rows], part[:, :, keys]
                total.copy_(part) if is_first else total.add_(part)
        self.own = by_rank.new_empty(num_rows, *by_rank.shape[1:])
        self.work = reduce_scatter(self.own, by_rank, shards.group)

    def wait(self):
        """dk (B, Hk, T, D) and dv, in fp32."""
        self.work.wait()
        return heads_first(self.own).split_with_sizes(self.head_dims, -1)


@functools.lru_cache
def summands_of(ends, size, chunks_per_rank, num_rows):
    """How rows in the order of the ranks are summed, where each call has keys with these ends in the sequence: those
    that begin with 0, and (rows, number of the call, which of its keys, whether they are the first there)."""
    zeros, summands = [], []
    for rank in range(size):
        for run in runs_of(rank, size, chunks_per_rank, num_rows):
            run, is_empty = run._replace(local=rank * num_rows + run.local), True
            for number, (first, last) in enumerate(ends):
                begin, end = max(first, run.begin), min(last, run.end)
                if begin >= end:
                    continue
                has_all = (begin, end) == (run.begin, run.end)
                if is_empty and not has_all:
                    zeros.append(run.local_slice(run.begin, run.end))
                summands.append((run.local_slice(begin, end), number, slice(begin - first, end - first),
                                 is_empty and has_all))
                is_empty = False
            if is_empty:
                zeros.append(run.local_slice(run.begin, run.end))
    return tuple(zeros), tuple(summands)


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
        rows, groups = room.extended(q), head_groups(q, k, v, shards.size)
        calls = attention.calls(rows, shards.size * k.shape[2], None, share_keys=True)
        if len(groups) == len(calls) == 1 and all_rows(calls, rows):  # then its results are those of all
            out, lse = attention.run(calls[0], rows, *Gathering(k, v, shards, 0).wait())
        else:
            out, lse = attend_by_groups(attention, calls, rows, k, v, groups)
        out, lse = room.own(out), room.own(lse)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.attention = attention
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        attention, shards, room = ctx.attention, ctx.attention.shards, ctx.attention.room
        q_rows = room.extended(q)
        rows = room.extended(dout), q_rows, room.extended(out), room.extended(lse, -math.inf)
        groups = head_groups(q, k, v, shards.size, ends_small=True)
        calls = attention.calls(q_rows, shards.size * k.shape[2], None, share_keys=False)
        dq, dk, dv = empty_rows(q_rows, q.shape[3]), torch.empty_like(k), torch.empty_like(v)
        if not all_rows(calls, q_rows):
            dq.zero_()
        sums = []
        with SideStreams(q.device) as side:
            for heads, *keys in gathered(k, v, groups, shards):
                of_q = query_heads(heads, q, k)
                tensors = *(x[:, of_q] for x in rows), *keys, dq[:, of_q]
                parts = side.run(attention.of_heads(of_q).key_gradients, [(call, *tensors) for call in calls])
                side.join()
                if sums:
                    sums[-1].work.wait()  # until then it keeps the sums for all ranks in memory
                sums.append(Summing(calls, parts, k[:, heads], v[:, heads], shards))
                del keys, tensors, parts  # their memory serves the next groups
        for heads, total in zip(groups, sums):
            dk[:, heads], dv[:, heads] = total.wait()
        dsinks = None if sinks is None else gradient_of_sinks(sinks, dout, out, lse)
        return room.own(dq), dk, dv, dsinks, None


def attend_by_groups(attention, calls, q, k, v, groups):
    """(out, lse) of the rows q, by the Calls of each group of heads."""
    out, lse = empty_rows(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=sum_dtype(q.dtype))
    if not all_rows(calls, q):
        out.zero_()  # as rows without a document have
        lse.fill_(-math.inf)
    with SideStreams(q.device) as side:
        for heads, *keys in gathered(k, v, groups, attention.shards):
            of_q = query_heads(heads, q, k)
            tensors = q[:, of_q], *keys, out[:, of_q], lse[:, of_q]
            side.run(attention.of_heads(of_q).attend, [(call, *tensors) for call in calls])
            side.join(but=len(calls))  # those of this group may go on beside those of the next one
    return out, lse
