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
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..checks import sum_dtype
from .layout import exchange_chunks, reduce_scatter, runs_of
from .local import gradient_of_sinks
from .peer_memory import peers_of
from .pieces import all_rows, length
from .side_streams import SideStreams

MIN_BYTES = 4 << 20  # of a rank's keys and values: to gather less takes about as long, on two H200s
MAX_BYTES = 1 << 30  # of all ranks' keys and values: heads with more take long enough to hide what comes next
ROWS_OF_A_KEY = 4096  # attention of so many rows to a key takes as long as to gather it, on two H200s
# Without peer memory.
NUM_GROUPS = 3  # unless MAX_BYTES asks for more
MIN_FLOP = 1.5e12  # of each group, counted without a mask: a group costs the host 0.7 to 1 ms
MAX_GROWTH = 10  # beyond it, calls with a part of the heads lose more time than they hide
# With it. To fetch fewer bytes takes less time than another group. (forward, backward)
NUM_PEER_GROUPS, MIN_FETCHED = (2, 3), (64 << 20, 512 << 20)
MAX_SUM_BYTES = 128 << 20  # of gradients in peer memory, which is kept


def head_groups(q, k, v, num_ranks, has_peers, is_backward=False):
    """The slices of key/value heads that are gathered one after another.

    The first one is small, since nothing is computed before it is there. The others grow as fast as computing hides
    communication: a group may be as many times as large as the one before as attention to a head takes longer than to
    gather it. In the backward pass the last one is as small as the first one, for the sum of its gradients, which
    nothing hides. There is one group where more would cost more than they hide.
    """
    heads = k.shape[1]
    bytes_of_head = k.element_size() * k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3])
    share_sent = 2 * (num_ranks - 1) / num_ranks  # of the keys, in units of that of two ranks
    growth = max(1, int(q.shape[2] * (q.shape[1] // heads) / ROWS_OF_A_KEY / share_sent)) if num_ranks > 1 else 1
    most = max(1, MAX_BYTES // (num_ranks * bytes_of_head))
    if has_peers:
        is_worth_it = (num_ranks - 1) * heads * bytes_of_head >= MIN_FETCHED[is_backward]
        num_groups = NUM_PEER_GROUPS[is_backward] if is_worth_it else 1
    else:
        flop = 2 * q.shape[0] * q.shape[1] * q.shape[2] ** 2 * num_ranks * (k.shape[3] + v.shape[3])
        flop *= 2.5 if is_backward else 1
        num_groups = max(1, int(min(NUM_GROUPS, flop // MIN_FLOP))) if growth <= MAX_GROWTH else 1
    sizes = [growth**i for i in range(num_groups)]  # in units of the first one
    if is_backward:
        sizes[-1] = 1
    first = max(-(-MIN_BYTES // bytes_of_head), -(-heads // sum(sizes)))
    size = first = min(heads, most, first)
    ends, last = [first], min(first, heads - first) if is_backward else 0
    while ends[-1] < heads - last:
        size = min(most, size * growth)
        ends.append(min(heads - last, ends[-1] + size))
    if last:
        ends.append(heads)
    return [slice(begin, end) for begin, end in zip([0, *ends], ends)]


class Gathering:
    """An all-gather of keys and values that has begun.

    A chunk goes from its place in the whole sequence to its place there, so that nothing has to be put in order. Rows
    come first, (P·T, B, Hk, D + Dv): then a chunk is one piece of memory.
    """

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
        self.shards, (batch, heads, num_rows, _) = shards, k.shape
        self.shape = num_rows, batch, k.shape[3] + v.shape[3]
        self.slot = memory.slot((math.prod(self.shape) * heads,), k.dtype)
        own = self.slot.of_rank(shards.rank)
        for heads in groups:
            rows = self.rows(own, heads).split_with_sizes((k.shape[3], v.shape[3]), -1)
            write_rows((x[None] for x in rows), k[:, heads], v[:, heads])

    def rows(self, flat, heads):
        """Those of a group, (T, B, Hk, D + Dv), of a rank's slot."""
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
        own = shards.of_rank(everything, shards.rank)
        copy(own, self.rows(self.slot.of_rank(shards.rank), heads).view_as(own))  # meanwhile
        return copied,


def write_rows(rows, *tensors):
    """Each of tensors (B, Hk, T, D) to its rows (chunks, rows of one, B, Hk, D)."""
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


def heads_first(rows):
    """(S, B, Hk, D) -> (B, Hk, S, D), a view."""
    return rows.permute(1, 2, 0, 3)


def empty_rows(q, head_dim):
    """(B, H, T, head_dim), in the order of q's memory: rows or heads first."""
    batch, heads, rows, _ = q.shape
    if q.stride(2) > q.stride(1):
        return q.new_empty(batch, rows, heads, head_dim).transpose(1, 2)
    return q.new_empty(batch, heads, rows, head_dim)


def query_heads(heads, num_heads, num_heads_k):
    """The query heads that read these key/value heads."""
    group = num_heads // num_heads_k
    return slice(heads.start * group, heads.stop * group)


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


class AllGatherAttention(torch.autograd.Function):
    """(q, k, v, sinks, attention, an Attention) -> out; all of this rank."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, attention):
        room, shards = attention.room, attention.shards
        peers = peers_of(shards.group, q.device)
        rows, groups = room.extended(q), head_groups(q, k, v, shards.size, bool(peers))
        calls = attention.calls(rows, shards.size * k.shape[2], None, share_keys=True)
        parts = gathered(k, v, groups, shards, peers)
        if len(groups) == len(calls) == 1 and all_rows(calls, rows):  # then its results are those of all
            (_, *keys), = parts
            out, lse = attention.run(calls[0], rows, *keys)
        else:
            out, lse = attend_by_groups(attention, calls, rows, parts, v.shape[3], k.shape[1])
        out, lse = room.own(out), room.own(lse)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.attention = attention
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        attention, shards, room = ctx.attention, ctx.attention.shards, ctx.attention.room
        peers = peers_of(shards.group, q.device)
        q_rows = room.extended(q)
        rows = room.extended(dout), q_rows, room.extended(out), room.extended(lse, -math.inf)
        groups = head_groups(q, k, v, shards.size, bool(peers), is_backward=True)
        num_keys = shards.size * k.shape[2]
        calls = attention.calls(q_rows, num_keys, None, share_keys=False)
        sent = [parts_of(attention.key_ranges(rank, k.shape[0], num_keys), rank, shards.size, shards.chunks_per_rank,
                         k.shape[2]) for rank in range(shards.size)]
        dq, dk, dv = empty_rows(q_rows, q.shape[3]), torch.empty_like(k), torch.empty_like(v)
        if not all_rows(calls, q_rows):
            dq.zero_()
        sums = []
        with SideStreams(q.device) as side, ExitStack() as at_end:
            for heads, *keys in gathered(k, v, groups, shards, peers):
                of_q = query_heads(heads, q.shape[1], k.shape[1])
                tensors = *(x[:, of_q] for x in rows), *keys, dq[:, of_q]
                gradients = side.run(attention.of_heads(of_q).key_gradients, [(call, *tensors) for call in calls])
                side.join()
                if sums and not peers:
                    sums[-1][1].work.wait()  # until then it keeps the sums for all ranks in memory
                of_group = begin_sums(heads, gradients, k, v, shards, sent, peers)
                if peers:
                    for _, total in of_group:
                        at_end.callback(total.work.wait)
                sums += of_group
                del keys, tensors, gradients  # their memory serves the next groups
        for heads, total in sums:
            dk[:, heads], dv[:, heads] = total.wait()
        dsinks = None if sinks is None else gradient_of_sinks(sinks, dout, out, lse)
        return room.own(dq), dk, dv, dsinks, None


def attend_by_groups(attention, calls, q, parts, head_dim_v, heads_k):
    """(out, lse) of the rows q, by the Calls of each group of heads: (heads, k, v)."""
    out, lse = empty_rows(q, head_dim_v), q.new_empty(q.shape[:3], dtype=sum_dtype(q.dtype))
    if not all_rows(calls, q):
        out.zero_()  # as rows without a document have
        lse.fill_(-math.inf)
    with SideStreams(q.device) as side:
        for heads, *keys in parts:
            of_q = query_heads(heads, q.shape[1], heads_k)
            tensors = q[:, of_q], *keys, out[:, of_q], lse[:, of_q]
            side.run(attention.of_heads(of_q).attend, [(call, *tensors) for call in calls])
            side.join(but=len(calls))  # those of this group may go on beside those of the next one
    return out, lse
