"""Context parallelism by a ring: keys and values go round the ranks, and each rank attends to those it holds.

Liu et al., Ring Attention, 2023. The keys of one rank give a part of the result, and parts are merged by their lse. In
the backward pass dk and dv travel with the keys, one step behind, and each rank adds its part. After P steps they are
home.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks import sum_dtype

KEYS, GRADIENTS = 0, 1  # tags of messages


class Transfer:
    """Begins to send x to the next rank. wait() returns a tensor like x from the rank before."""

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


def turns(k, v, padding):
    """Yields (rank, its k, its v), by pad_keys, of each rank, this one first. The next keys travel meanwhile."""
    kv, shards = padding.pad_keys(torch.cat((k, v), -1)), padding.shards
    for step in range(shards.size):
        transfer = Transfer(kv, shards, KEYS) if step + 1 < shards.size else None
        yield (shards.rank - step) % shards.size, *kv.split((k.shape[3], v.shape[3]), -1)
        if transfer:
            kv = transfer.wait()


def attend(q, k, v, attention):
    """(out, lse) of the rows q."""
    without_sinks, sinks = attention._replace(options=attention.options._replace(sinks=None)), attention.options.sinks
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=sum_dtype(q.dtype), device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, dtype=out.dtype, device=q.device)  # no row has seen a key yet
    for source, k_part, v_part in turns(k, v, attention.padding):
        for call in without_sinks.calls(q, k_part.shape[2], source, share_keys=True):
            merge(out[:, :, call.rows], lse[:, :, call.rows], *without_sinks.forward(call, q, k_part, v_part))
    if sinks is not None:  # a part without values; a row of padding, which has seen no key, stays as it is
        merge(out, lse, out.new_zeros(1), torch.where(lse == -math.inf, lse, sinks[:, None]))
    return out.to(q.dtype), lse


def gradients(dout, q, out, lse, k, v, attention):
    """(dq, dk, dv), from the rows of the first four tensors."""
    padding, head_dims, arriving = attention.padding, (k.shape[3], v.shape[3]), None
    dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    for source, k_part, v_part in turns(k, v, padding):
        dkv = torch.zeros(*k_part.shape[:3], sum(head_dims), dtype=lse.dtype, device=k.device)
        for call in attention.calls(q, k_part.shape[2], source, share_keys=False):
            parts = attention.backward(call, dout, q, out, lse, k_part, v_part)
            for total, run, part in zip((dq, *dkv.split(head_dims, -1)), (call.rows, call.keys, call.keys), parts):
                total[:, :, run].add_(part)
        if arriving:
            dkv += arriving.wait()
        arriving = Transfer(dkv, padding.shards, GRADIENTS)
    dk, dv = padding.unpad_key_gradients(arriving.wait()).split(head_dims, -1)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add the keys of a part to the result: out (B, H, S, D) and lse (B, H, S) become those of all keys, in place."""
    total = torch.logaddexp(lse, part_lse)
    finite = total.masked_fill(total == -math.inf, 0)  # rows that have seen no key yet: exp(-inf - 0) is 0, not NaN
    out.mul_((lse - finite).exp_()[..., None]).add_(part * (part_lse - finite).exp_()[..., None])
    lse.copy_(total)
