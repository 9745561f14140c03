"""Peer memory for processes without GPUs: files that all of them map, in place of torch's symmetric memory.

Copies are made at once there. So what is tested is what is written and read, and that no rank writes what another one
still reads: one of them is slow.
"""

import time
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist

from minimal_attn.distributed import all_gather, peer_memory

SLOW, SECONDS = 1, 0.003  # rank, before it reads


def use(patch, folder):
    """Let the all-gather of this process take files in `folder`, the same one on all ranks."""
    event = SimpleNamespace(wait=lambda *_: None)
    stream = SimpleNamespace(wait_stream=lambda _: None, record_event=lambda: event)
    for name, value in (("Stream", lambda *_, **__: stream), ("current_stream", lambda _: stream),
                        ("stream", lambda _: nullcontext()), ("synchronize", lambda _: None)):
        patch.setattr(torch.cuda, name, value)
    from torch.distributed import _symmetric_memory as symmetric_memory

    handles = []

    def rendezvous(memory, group_name):
        handles.append(group_name)
        return Files(folder / f"{group_name}_{handles.count(group_name)}", memory.numel(),
                     dist.distributed_c10d._resolve_process_group(group_name))

    patch.setattr(symmetric_memory, "empty", torch.empty)
    patch.setattr(symmetric_memory, "rendezvous", rendezvous)
    known = {}

    def peers_of(group, device):
        if group not in known:
            known[group] = peer_memory.Peers(group, device)
        return known[group]

    patch.setattr(all_gather, "peers_of", peers_of)


class Files:
    """A handle of symmetric memory, as far as peer_memory.py uses it."""

    def __init__(self, path, num_bytes, group):
        self.group, self.rank = group, dist.get_rank(group)
        paths = [f"{path}_{rank}" for rank in range(dist.get_world_size(group))]
        with open(paths[self.rank], "wb") as file:
            file.truncate(num_bytes)
        dist.barrier(group)
        self.memory = [torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8) for path in paths]

    def get_buffer(self, rank, shape, dtype, offset):
        return self.memory[rank].view(dtype)[offset:offset + torch.Size(shape).numel()].view(shape)

    def barrier(self, timeout_ms):
        dist.barrier(self.group)
        time.sleep(SECONDS if self.rank == SLOW else 0)
