"""Memory that the ranks of a node read from one another: no collective, and no multiprocessor for it.

A rank writes what others need into a slot, which all ranks of the group can address (torch's symmetric memory). At a
barrier it waits until all have done so, and then copies what it needs out of the slots of the others. The copy engines
of the GPUs do that over NVLink, beside kernels that fill all multiprocessors, and to start a copy takes the host
microseconds.

There are two slots, which take turns. A rank reads a slot before it comes to the barrier of the next one, since all
copies and barriers are on one stream. So when a rank has passed a barrier, all ranks have read the slot of the barrier
before, and it may be written again. Read next: gathering.py, which sends messages where there is no such memory.
"""

import datetime
import math
import os
import weakref

import torch
import torch.distributed as dist

from .layout import spans_nodes

SLOT_STEP = 2 << 20  # bytes, by which slots grow: pages of a GPU's memory
DEFAULT_TIMEOUT = datetime.timedelta(minutes=10)  # of groups that do not tell theirs; that of NCCL


class PeerMemory:
    """Two slots of each rank of a group. It does not keep the group alive."""

    def __init__(self, group, device):
        self.group_name, self.device = group.group_name, device
        options = getattr(group._get_backend(device), "options", None)
        self.timeout = getattr(options, "_timeout", DEFAULT_TIMEOUT)
        self.stream = torch.cuda.Stream(device, priority=-1)  # a barrier is to get a place beside kernels
        self.slot_bytes = self.number = 0
        self.memory = self.handle = self.passed = None  # the last one: the event after the latest barrier

    def slot(self, shape, dtype):
        """The next Slot, for a tensor of this shape of each rank, which the current stream may write. By now all fetches
        from the slot before have begun. All ranks ask for the same shapes in the same order."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self.slot_bytes:
            self.grow(num_bytes)
        self.number += 1
        if self.passed is not None:
            self.passed.wait(torch.cuda.current_stream(self.device))
        return Slot(self, shape, dtype, self.number % 2 * self.slot_bytes // dtype.itemsize)

    def grow(self, num_bytes):
        """Larger slots, on all ranks at once."""
        if self.handle is not None:
            with torch.cuda.stream(self.stream):
                self.barrier()
            torch.cuda.synchronize(self.device)  # all ranks have read the slots
        from torch.distributed import _symmetric_memory as symmetric_memory

        self.memory = self.handle = None  # the old ones go first
        self.slot_bytes = -(-num_bytes // SLOT_STEP) * SLOT_STEP
        self.memory = symmetric_memory.empty(2 * self.slot_bytes, dtype=torch.uint8, device=self.device)
        self.handle = symmetric_memory.rendezvous(self.memory, self.group_name)

    def barrier(self):
        """On the stream of copies, which is the current one."""
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
        """Start copying: (to, from what of_rank gives). The first time, all ranks wait for one another before that, so
        that each has written its own tensor.

        wait() of the result lets the current stream wait for the copies. A caller does so before this memory serves
        anything else, also after an error. If a rank does not come, the time-out of the group ends this with an error
        of CUDA.
        """
        memory = self.memory
        memory.stream.wait_stream(torch.cuda.current_stream(memory.device))
        with torch.cuda.stream(memory.stream):
            if not self.is_published:
                memory.barrier()
                self.is_published = True
            for here, there in pairs:
                here.copy_(there)
            return memory.stream.record_event()


class Peers:
    """The memory of a group: for what is gathered, and for what is summed. Each has barriers of its own: some keys are
    fetched after other gradients have been written."""

    def __init__(self, group, device):
        self.gathered, self.summed = (PeerMemory(group, device) for _ in range(2))


# {group: Peers or None}
KNOWN = weakref.WeakKeyDictionary()


def peers_of(group, device):
    """The Peers of a group, or None: on a CPU, between nodes, where torch cannot set up such memory, in a CUDA graph,
    and with MINIMAL_ATTN_PEER_MEMORY=0. The same on all ranks, which call this together."""
    if device.type != "cuda" or os.environ.get("MINIMAL_ATTN_PEER_MEMORY") == "0":
        return None
    if torch.cuda.is_current_stream_capturing():  # a CUDA graph cannot wait for a barrier before it
        return None
    if group not in KNOWN:
        KNOWN[group] = None if spans_nodes(group) or dist.get_world_size(group) == 1 else opened(group, device)
    return KNOWN[group]


def opened(group, device):
    """Peers, or None if it fails on any rank."""
    try:
        peers = Peers(group, device)
        for memory in (peers.gathered, peers.summed):
            memory.grow(1)
    except (ImportError, AttributeError, RuntimeError):
        peers = None
    on_all = torch.tensor(int(peers is not None), device=device)
    dist.all_reduce(on_all, dist.ReduceOp.MIN, group=group)
    return peers if on_all.item() else None
