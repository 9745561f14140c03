"""Peer memory: memory of each rank that the others of its node read, by torch's symmetric memory.

A rank writes what others need into a slot, which all ranks of the group can address. Behind a barrier it copies what it
needs out of the slots of the others. Copy engines do that over NVLink, beside kernels that fill all multiprocessors.

Two slots take turns. All copies and barriers are on one stream, so that a rank reads a slot before it comes to the
barrier of the next one. So when a rank has passed a barrier, all ranks have read the slot of the barrier before, and it
may be written again.
"""

import datetime
import math
import os
import socket
import weakref
from contextlib import suppress

import torch
import torch.distributed as dist

from ..options import warn
from .layout import spans_nodes

SLOT_STEP = 2 << 20  # bytes: pages of a GPU's memory
DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)  # for groups that do not tell theirs; NCCL's default


class PeerMemory:
    """Two slots of each rank of a group. The group is not kept alive."""

    def __init__(self, group, device):
        self.group, self.group_name, self.device = weakref.ref(group), group.group_name, device
        options = getattr(group._get_backend(device), "options", None)
        self.timeout = getattr(options, "_timeout", DEFAULT_TIMEOUT)
        self.stream = torch.cuda.Stream(device, priority=-1)  # so that a barrier starts while kernels run
        self.slot_bytes = self.number = 0  # size of a slot; number of barriers of slots so far
        self.memory = self.handle = self.passed = None  # the last one: the event after the latest barrier

    def slot(self, shape, dtype):
        """The next Slot, for a tensor of this shape on each rank, which the current stream may write. All ranks ask for
        the same shapes in the same order, and have issued all fetches from the slot before. A slot that nobody fetches
        from is given out again: then its writes must be over."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self.slot_bytes:
            self.grow(num_bytes)
        if self.passed is not None:
            self.passed.wait(torch.cuda.current_stream(self.device))
        return Slot(self, shape, dtype, (self.number + 1) % 2 * self.slot_bytes // dtype.itemsize)

    def grow(self, num_bytes):
        """Larger slots, by half at least, on all ranks at once, which wait for one another. All ranks raise
        OutOfMemoryError if one has no memory for them, RuntimeError if one cannot address that of the others."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        wanted = -(-max(num_bytes, self.slot_bytes * 3 // 2) // SLOT_STEP) * SLOT_STEP
        if self.handle is not None:
            with torch.cuda.stream(self.stream):
                self.barrier()
            torch.cuda.synchronize(self.device)  # all ranks have read the slots
        self.slot_bytes, self.memory, self.handle = 0, None, None  # the old ones go first
        torch.cuda.empty_cache()  # the caching allocator keeps what is free, and symmetric memory is none of its own
        memory = handle = None
        with suppress(RuntimeError):
            memory = symmetric_memory.empty(2 * wanted, dtype=torch.uint8, device=self.device)
        if not on_all_ranks(memory is not None, self.group(), self.device):  # before they wait for one another
            raise torch.OutOfMemoryError(f"a rank has no {2 * wanted} bytes for memory that its peers read; "
                                         "MINIMAL_ATTN_PEER_MEMORY=0 does without")
        with suppress(RuntimeError):
            handle = symmetric_memory.rendezvous(memory, self.group_name)
        if not on_all_ranks(handle is not None, self.group(), self.device):
            raise RuntimeError("a rank cannot address the memory of its peers; MINIMAL_ATTN_PEER_MEMORY=0 does without")
        self.slot_bytes, self.memory, self.handle = wanted, memory, handle

    def barrier(self):
        """Put a barrier of all ranks on the stream of copies, which is the current one."""
        self.handle.barrier(timeout_ms=int(self.timeout.total_seconds() * 1000))
        self.passed = self.stream.record_event()


class Slot:
    """A tensor of each rank. A rank writes its own on the current stream, and then fetches from the others."""

    def __init__(self, memory, shape, dtype, offset):
        self.memory, self.shape, self.dtype, self.offset = memory, shape, dtype, offset
        self.is_published = False

    def of_rank(self, rank):
        return self.memory.handle.get_buffer(rank, self.shape, self.dtype, self.offset)

    def fetch(self, pairs):
        """Start copying pairs (to, view of a tensor of of_rank), the first time behind a barrier. wait() of the result
        lets the current stream wait for the copies, which comes before this memory serves anything else, also after an
        error. If a rank does not come, the time-out of the group ends this with an error of CUDA."""
        memory = self.memory
        memory.stream.wait_stream(torch.cuda.current_stream(memory.device))
        with torch.cuda.stream(memory.stream):
            if not self.is_published:
                memory.barrier()
                memory.number += 1
                self.is_published = True
            for here, there in pairs:
                here.copy_(there)
            return memory.stream.record_event()


class Peers:
    """The peer memory of a group, for keys that are gathered and gradients that are summed. Each has barriers of its
    own: some keys are fetched after other gradients have been written."""

    def __init__(self, group, device):
        self.gathered, self.summed = (PeerMemory(group, device) for _ in range(2))


# {group: Peers or None}, and the ranks of the group that has had peer memory, if any.
KNOWN = weakref.WeakKeyDictionary()
RANKS = []


def peers_of(group, device):
    """The Peers of a group, or None on all ranks: on a CPU, between nodes, in a CUDA graph, where torch cannot set up
    such memory, for other ranks than those that used it first, and with MINIMAL_ATTN_PEER_MEMORY=0."""
    if device.type != "cuda" or os.environ.get("MINIMAL_ATTN_PEER_MEMORY") == "0":
        return None
    if torch.cuda.is_current_stream_capturing():  # a CUDA graph cannot wait for a barrier before it
        return None
    if group not in KNOWN:
        KNOWN[group] = None if spans_nodes(group) else opened(group, device)
    return KNOWN[group]


def opened(group, device):
    """Peers, or None if the ranks are on several hosts, as their names say, or if it fails on any rank, with a warning.
    Only one set of ranks has them: torch counts what a process sets up for all groups, and the counts must agree."""
    ranks = dist.get_process_group_ranks(group)
    hosts = [None] * len(ranks)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    may_open = len(set(hosts)) == 1 and RANKS in ([], [ranks])
    if not on_all_ranks(may_open, group, device):
        return None
    RANKS[:] = [ranks]
    try:
        peers = Peers(group, device)
        for memory in (peers.gathered, peers.summed):
            memory.grow(1)
            memory.slot((1,), torch.uint8).fetch(())  # some backends of symmetric memory have no barrier
    except (ImportError, AttributeError, RuntimeError) as error:
        warn(f"context parallelism sends messages, since there is no peer memory: {error}")
        peers = None
    return peers if on_all_ranks(peers is not None, group, device) else None


def on_all_ranks(condition, group, device):
    on_all = torch.tensor(int(condition), device=device)
    dist.all_reduce(on_all, dist.ReduceOp.MIN, group=group)
    return bool(on_all.item())
