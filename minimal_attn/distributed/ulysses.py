"""Context parallelism by heads (Ulysses): every rank gets all rows of some heads, attends, and gives the results back.

Jacobs et al., DeepSpeed Ulysses, 2023. An all-to-all before the call turns a share of the sequence into a share of the
heads, and one after it does the inverse. Between them runs flash_attention of the whole sequence.
"""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


class AllToAll(torch.autograd.Function):
    """x (P, ...): x[r] goes to rank r, and the result[r] comes from it. The gradients go back in the same way."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return AllToAll.forward(ctx, dx, ctx.group), None


def rows_to_heads(x, shards):
    """(B, H, T, D), this rank's rows of all heads -> (B, H / P, P·T, D), the whole sequence of this rank's heads."""
    by_rank = x.unflatten(1, (shards.size, -1)).permute(1, 3, 0, 2, 4)  # (P, T, B, H / P, D)
    return shards.in_order(AllToAll.apply(by_rank, shards.group).flatten(0, 1)).permute(1, 2, 0, 3)


def heads_to_rows(x, shards):
    """The inverse of rows_to_heads."""
    by_rank = shards.by_rank(x.permute(2, 0, 1, 3)).unflatten(0, (shards.size, -1))
    return AllToAll.apply(by_rank, shards.group).permute(2, 0, 3, 1, 4).flatten(1, 2)  # of (P, T, B, H / P, D)


def ulysses_attention(attend, q, k, v, shards):
    """out of this rank's rows, by attend(q, k, v) -> out of the whole sequence and this rank's heads."""
    if shards.size == 1:
        return attend(q, k, v)
    return heads_to_rows(attend(*(rows_to_heads(x, shards) for x in (q, k, v))), shards)
