"""Context parallelism by a ring: keys and values go round the ranks, and each rank attends to those it holds.

Liu et al., Ring Attention, 2023. Beside its own keys, a rank has those that it attends to and those that arrive
meanwhile. The parts of the result are merged by their lse. In the backward pass, dk and dv travel with the
keys, one step behind, and each rank adds its part. After P steps they are home. Read next: ulysses.py, which divides
the heads instead.
"""

import math

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ..checks import sum_dtype
from .local import add_sinks, empty_lse, gradient_of_sinks

KEYS, GRADIENTS = 0, 1  # tags of what is sent


class Transfer:
    """Sends x to the next rank and receives a tensor of the same shape and dtype from the one before. The transfer
    begins at once, and wait() returns the received tensor."""

    def __init__(self, x, shards, tag):
        self.sent, self.received = x, torch.empty_like(x)
        after, before = ((shards.rank + step) % shards.size for step in (1, -1))
        operations = [dist.P2POp(dist.isend, x, group=shards.group, group_peer=after, tag=tag),
                      dist.P2POp(dist.irecv, self.received, group=shards.group, group_peer=before, tag=tag)]
        self.works = dist.batch_isend_irecv(operations)

    def wait(self):
        for work in self.works:
            work.wait()
        return self.received


def turns(k, v, room):
    """Yields (rank, its k, its v) for each rank whose keys come by, this rank first. k and v are as Room has them. The
    keys of the next rank already travel meanwhile."""
    kv, shards = room.with_next_keys(torch.cat((k, v), -1)), room.shards
    for step in range(shards.size):
        transfer = Transfer(kv, shards, KEYS) if step + 1 < shards.size else None
        yield (shards.rank - step) % shards.size, *kv.split((k.shape[3], v.shape[3]), -1)
        if transfer:
            kv = transfer.wait()


class RingAttention(torch.autograd.Function):
    """The function (q, k, v, sinks, Attention) -> out, with this rank's rows of all tensors."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, attention):
        without_sinks = attention._replace(options=attention.options._replace(sinks=None))
        rows = attention.room.extended(q)
        out = torch.zeros(*rows.shape[:3], v.shape[3], dtype=sum_dtype(q.dtype), device=q.device)
        lse = empty_lse(rows)
        for source, k_part, v_part in turns(k, v, attention.room):
            without_sinks.attend_part(rows, k_part, v_part, source, out, lse)
        out, lse = map(attention.room.own, (out, lse))
        if sinks is not None:
            add_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.attention = attention
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        attention, room = ctx.attention, ctx.attention.room
        rows = *map(room.extended, (dout, q, out)), room.extended(lse, -math.inf)
        dq = torch.zeros(rows[1].shape, dtype=lse.dtype, device=q.device)
        head_dims, arriving = (k.shape[3], v.shape[3]), None
        for source, k_part, v_part in turns(k, v, room):
            dkv = torch.zeros(*k_part.shape[:3], sum(head_dims), dtype=lse.dtype, device=k.device)
            attention.add_gradients(*rows, k_part, v_part, source, dq, *dkv.split(head_dims, -1))
            if arriving:
                dkv += arriving.wait()
            arriving = Transfer(dkv, room.shards, GRADIENTS)
        dk, dv = (x.to(k.dtype) for x in room.with_gradients_at_home(arriving.wait()).split(head_dims, -1))
        dsinks = None if sinks is None else gradient_of_sinks(sinks, dout, out, lse)
        return room.own(dq).to(q.dtype), dk, dv, dsinks, None
