"""Context parallelism by all-gather: every rank gets all keys and values, of all heads or of some at a time.

Each row sees all of its keys in one call of a kernel, so its result is that of one GPU. The keys of the next group of
heads are on their way while kernels compute with one. Calls overlap on side streams: one fills the multiprocessors that
another leaves idle near its end. The backward pass gathers the keys again, and sums dk and dv over ranks. With 32 heads
in three groups:

    communication   |gather 0..3|gather 4..27|sum 0..3, gather 28..31|      |sum 4..27|     |sum 28..31|
    gradients                   |of 0..3     |of 4..27                      |of 28..31      |
"""

import functools
import math
from contextlib import AbstractContextManager, ExitStack

import torch

from ..checks import empty_like, empty_outputs
from .calls import has_all_rows
from .exchange import begin_sums, gathered, parts_of
from .peer_memory import peers_of

NUM_STREAMS = 4  # calls that may wait for multiprocessors at once
# Groups of heads.
MIN_BYTES = 4 << 20  # of a rank's keys and values: to gather less takes about as long, on two H200s
MAX_BYTES = 1 << 30  # of all ranks' keys and values: heads with more take long enough to hide what comes next
# With peer memory: bytes that a rank fetches. Below these there is one group, since another one costs the host time.
MIN_FETCHED, MIN_FETCHED_BACKWARD = 64 << 20, 512 << 20
FIRST_PART = 8  # the first group has an eighth of the heads
# Without it.
NUM_GROUPS = 3  # unless MAX_BYTES asks for more
MIN_FLOP = 1.5e12  # of each group, counted without a mask: a group costs the host 0.7 to 1 ms
MAX_GROWTH = 10  # beyond it, calls with a part of the heads lose more time than they hide
ROWS_OF_A_KEY = 4096  # attention of so many rows to a key takes as long as to send it, on two H200s


def head_groups(q, k, v, num_ranks, has_peers, is_backward=False):
    """The slices of key/value heads that are gathered one after another. The first is small, since nothing is computed
    before it is there. In the backward pass so is the last, whose sum of gradients nothing hides."""
    heads = k.shape[1]
    bytes_of_head = k.element_size() * k.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3])
    most = max(1, MAX_BYTES // (num_ranks * bytes_of_head))
    if has_peers:  # one group, or a small first one and a second one with all other heads
        num_fetched = (num_ranks - 1) * k.element_size() * (k.numel() + v.numel())
        is_one = num_fetched < (MIN_FETCHED_BACKWARD if is_backward else MIN_FETCHED)
        first, growth = heads if is_one else -(-heads // FIRST_PART), heads
    else:
        first, growth = growth_of_messages(q, k, v, num_ranks, is_backward)
    size = first = min(heads, most, max(first, -(-MIN_BYTES // bytes_of_head)))
    ends, last = [first], min(first, heads - first) if is_backward else 0
    while ends[-1] < heads - last:
        size = min(most, size * growth)
        ends.append(min(heads - last, ends[-1] + size))
    if last:
        ends.append(heads)
    return [slice(begin, end) for begin, end in zip([0, *ends], ends)]


def growth_of_messages(q, k, v, num_ranks, is_backward):
    """(heads of the first group, largest ratio of a group to the one before) for exchange by messages. The ratio is how
    much longer attention to a head takes than sending it: computing one group then hides the messages of the next."""
    heads = k.shape[1]
    share_sent = 2 * (num_ranks - 1) / num_ranks  # of the keys, in units of that of two ranks
    growth = max(1, int(q.shape[2] * (q.shape[1] // heads) / ROWS_OF_A_KEY / share_sent)) if num_ranks > 1 else 1
    flop = 2 * q.shape[0] * q.shape[1] * q.shape[2] ** 2 * num_ranks * (k.shape[3] + v.shape[3])
    flop *= 2.5 if is_backward else 1
    num_groups = max(1, int(min(NUM_GROUPS, flop // MIN_FLOP))) if growth <= MAX_GROWTH else 1
    sizes = [growth**i for i in range(num_groups)]  # in units of the first one
    if is_backward:
        sizes[-1] = 1
    return -(-heads // sum(sizes)), growth


def query_heads(heads, num_heads, num_heads_k):
    """The query heads that read these key/value heads."""
    group = num_heads // num_heads_k
    return slice(heads.start * group, heads.stop * group)


class SideStreams(AbstractContextManager):
    """Streams for calls of kernels that a GPU may run at the same time; the end of a `with` block is join(). On a CPU,
    one call runs after the other. Results lie in memory of the side streams. A result may be dropped once the current
    stream has been given all work that reads it: the next call on a side stream waits for that work."""

    def __init__(self, device):
        self.current = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.streams = () if self.current is None else streams_of(self.current)
        # Each running call: the event at its end, and its function and arguments. They keep memory alive until join().
        self.number, self.running = 0, []

    def __exit__(self, *error):
        self.join()

    def run(self, function, calls):
        """[function(*args) for args in calls], to be used after join()."""
        if not self.streams:
            return [function(*args) for args in calls]
        begin, results = self.current.record_event(), []
        for args in calls:
            stream = self.streams[self.number % NUM_STREAMS]
            self.number += 1
            stream.wait_event(begin)
            with torch.cuda.stream(stream):
                try:
                    results.append(function(*args))
                finally:
                    self.running.append((stream.record_event(), (function, args)))
        return results

    def join(self, but=0):
        """Let the current stream wait for all calls but the last `but` ones."""
        num_over = max(0, len(self.running) - but)
        for event, _ in self.running[:num_over]:
            self.current.wait_event(event)
        del self.running[:num_over]
        if not self.running:
            self.number = 0  # each stream that is used keeps memory of its own


@functools.cache
def streams_of(current):
    """Side streams for the calls from one stream: calls from another could reuse memory that is still read."""
    return tuple(torch.cuda.Stream(current.device) for _ in range(NUM_STREAMS))


def attend(q, k, v, attention):
    """(out, lse) of the rows q."""
    shards = attention.padding.shards
    peers = peers_of(shards.group, q.device)
    groups = head_groups(q, k, v, shards.size, bool(peers))
    calls = attention.calls(q, shards.size * k.shape[2], None, share_keys=True)
    parts = gathered(k, v, groups, shards, peers)
    if len(groups) == len(calls) == 1 and has_all_rows(calls, q):  # its results need no copy
        (_, *keys), = parts
        return attention.forward(calls[0], q, *keys)
    out, lse = empty_outputs(q, v)
    if not has_all_rows(calls, q):
        out.zero_()  # as rows without a document have
        lse.fill_(-math.inf)
    with SideStreams(q.device) as side:
        for heads, *keys in parts:
            of_q = query_heads(heads, q.shape[1], k.shape[1])
            of_heads, tensors = attention.of_heads(of_q), (q[:, of_q], *keys, out[:, of_q], lse[:, of_q])
            side.run(write_out, [(of_heads, call, *tensors) for call in calls])
            side.join(but=len(calls))  # those of this group may go on beside those of the next one
    return out, lse


def gradients(dout, q, out, lse, k, v, attention):
    """(dq, dk, dv), from the rows of the first four tensors."""
    shards = attention.padding.shards
    peers = peers_of(shards.group, q.device)
    groups = head_groups(q, k, v, shards.size, bool(peers), is_backward=True)
    num_keys = shards.size * k.shape[2]
    calls = attention.calls(q, num_keys, None, share_keys=False)
    parts = {rank: parts_of(attention.key_ranges(rank, k.shape[0], num_keys), shards._replace(group=None, rank=rank),
                            k.shape[2])
             for rank in (range(shards.size) if peers else (shards.rank,))}
    dq, dk, dv = empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not has_all_rows(calls, q):
        dq.zero_()
    sums = []  # of the group before

    def end_sums():
        for heads, total in sums:
            dk[:, heads], dv[:, heads] = total.wait()
        sums.clear()

    with SideStreams(q.device) as side, ExitStack() as at_end:
        for heads, *keys in gathered(k, v, groups, shards, peers):
            of_q = query_heads(heads, q.shape[1], k.shape[1])
            tensors = *(x[:, of_q] for x in (dout, q, out, lse)), *keys, dq[:, of_q]
            of_heads = attention.of_heads(of_q)
            of_calls = side.run(write_dq, [(of_heads, call, *tensors) for call in calls])
            side.join()
            end_sums()  # which came in while this group was computed
            for some, total in begin_sums(heads, of_calls, k, v, shards, parts, peers):
                sums.append((some, total))
                if peers:  # after an error, too, this memory serves nothing else until then
                    at_end.callback(total.work.wait)
            del keys, tensors, of_calls, total  # their memory serves the next groups
    end_sums()
    return dq, dk, dv


def write_out(attention, call, q, k, v, out, lse):
    """Write out (B, H, T, Dv) and lse of the rows of a Call."""
    for whole, part in zip((out, lse), attention.forward(call, q, k, v)):
        copy_rows(call, whole, part)


def write_dq(attention, call, dout, q, out, lse, k, v, dq):
    """(dk, dv) of call.keys. Writes dq (B, H, T, D) of the rows of a Call."""
    part, dk, dv = attention.backward(call, dout, q, out, lse, k, v)
    copy_rows(call, dq, part)
    return dk, dv


def copy_rows(call, whole, part):
    """Copy the rows of the pieces of a Call from part (B, H, rows of the call, ...) to whole (B, H, T, ...)."""
    for piece in call.pieces:
        begin, end = piece.rows.start - call.rows.start, piece.rows.stop - call.rows.start
        whole[:, :, piece.rows].copy_(part[:, :, begin:end])
