"""Which rows of a sequence each rank holds, and how tensors are split over the ranks and put together again.

A sequence is padded and cut into chunks of one length. In the contiguous layout, rank r of P holds chunk r of P. In the
zigzag layout it holds the chunks r and 2P - 1 - r of 2P, so that all ranks have the same work under a causal mask. Read
next: padding.py, for dropout; calls.py.
"""

import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ..checks import check_choice, check_tensor, check_tensor_of, is_int, shown, wants_gradient

LAYOUTS = "zigzag", "contiguous"
# torch 2.13 has new names, and warns of the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Chunk(NamedTuple):
    """Rows `begin` to `end` of the sequence, which lie from row `local` on in a tensor."""

    begin: int
    end: int
    local: int

    def local_slice(self, begin, end):
        """The slice of the tensor where rows `begin` to `end` of the sequence lie, which are in this chunk."""
        return slice(begin - self.begin + self.local, end - self.begin + self.local)


class Shards(NamedTuple):
    """How a sequence lies on the ranks of a process group."""

    group: "dist.ProcessGroup"
    rank: int  # of this process, within the group
    size: int  # P, the number of ranks
    layout: str

    @property
    def chunks_per_rank(self):
        return 2 if self.layout == "zigzag" else 1

    def chunks(self, rank, num_rows):
        """The Chunks of a rank, which has num_rows rows of the sequence, in the order in which it holds them."""
        each = num_rows // self.chunks_per_rank
        numbers = (rank, 2 * self.size - 1 - rank)[:self.chunks_per_rank]
        return tuple(Chunk(number * each, (number + 1) * each, i * each) for i, number in enumerate(numbers))

    def runs(self, rank, num_rows):
        """The Chunks of a rank, with adjacent ones merged. Only the last rank of "zigzag" has adjacent ones."""
        chunks = self.chunks(rank, num_rows)
        if chunks[0].end == chunks[-1].begin:
            return chunks[0]._replace(end=chunks[-1].end),
        return chunks

    def of_rank(self, x, rank):
        """The rows of a rank in x (P·T, ...), the sequence in order: a view (chunks_per_rank, rows of one, ...)."""
        chunks = x.unflatten(0, (self.size * self.chunks_per_rank, -1))
        last = chunks.shape[0] - 1 - rank if self.chunks_per_rank == 2 else rank
        return chunks[rank:last + 1:max(1, last - rank)]

    def in_order(self, x):
        """x (P·T, ...), the rows of one rank after the other, in the order of the sequence."""
        if self.layout == "contiguous":
            return x
        early, late = x.unflatten(0, (self.size, 2, -1)).unbind(1)  # (P, T / 2, ...) each
        return torch.cat((early, late.flip(0))).flatten(0, 1)

    def by_rank(self, x):
        """The inverse of in_order."""
        if self.layout == "contiguous":
            return x
        early, late = x.unflatten(0, (2, self.size, -1))
        return torch.stack((early, late.flip(0)), 1).flatten(0, 2)

    def check_rows(self, num_rows):
        """ValueError unless a rank can have num_rows rows."""
        if num_rows % self.chunks_per_rank:
            raise ValueError("the zigzag layout has two chunks of one length on each rank, so that T is even, got "
                             f"{num_rows} rows: minimal_attn.distributed.shard pads them")

    def all_gather(self, x):
        """The rows of all ranks (P·T, ...) in the order of the sequence, from the x (T, ...) of each."""
        everything = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        all_gather_single(everything, x, group=self.group)
        return self.in_order(everything)


def shards_of(group, layout):
    """The Shards of a group, or of the default one if it is None, with the errors of shard."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("context parallelism needs a process group: call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # new_group returns it to processes outside
        raise ValueError("this process is not a member of the group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup or None, got {shown(group)}")
    check_choice("layout", layout, LAYOUTS)
    return Shards(group, dist.get_rank(group), dist.get_world_size(group), layout)


def spans_nodes(group):
    """Whether the ranks of a group are on several nodes, as far as LOCAL_WORLD_SIZE tells."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    return per_node > 0 and len({rank // per_node for rank in dist.get_process_group_ranks(group)}) > 1


def shard(x: Tensor, group: "dist.ProcessGroup | None" = None, dim: int = 1, layout: str = "zigzag",
          pad_value: float = 0) -> Tensor:
    """This rank's rows of x, which every rank has whole: x's shape but for T rows in dim, the same number on every
    rank. Nothing is sent. Differentiable.

    Args:
        x: any shape and dtype.
        group: the ranks among which x is split; the default process group if None.
        dim: the dimension of the sequence.
        layout: "zigzag" or "contiguous", as for context_parallel_attention.
        pad_value: the value of rows after the end. A length that the ranks do not divide is rounded up to a multiple of
            2P ("zigzag") or P ("contiguous") rows.

    Raises:
        RuntimeError: torch.distributed is not initialised. TypeError: x is no dense tensor, or group no process group.
        ValueError: an unknown layout, or a group without this process.
    """
    check_tensor("x", x)
    shards = shards_of(group, layout)
    rows = x.movedim(dim, 0)
    each = -(-rows.shape[0] // (shards.size * shards.chunks_per_rank)) * shards.chunks_per_rank
    own = torch.cat([rows[chunk.begin:chunk.end] for chunk in shards.chunks(shards.rank, each)])
    missing = each - own.shape[0]  # a chunk that lacks rows is a rank's last one, or the next is empty
    return pad(own, (0, 0) * (x.ndim - 1) + (0, missing), value=pad_value).movedim(0, dim)


def unshard(x: Tensor, group: "dist.ProcessGroup | None" = None, dim: int = 1, layout: str = "zigzag",
            seqlen: int | None = None) -> Tensor:
    """The whole sequence on every rank, from the rows of each: x's shape but for seqlen rows in dim. The inverse of
    shard, an all-gather.

    Args:
        x: this rank's rows, of one shape and dtype on all ranks.
        group, dim, layout: as for shard.
        seqlen: the number of rows without padding; all P·T if None.

    Raises:
        NotImplementedError: x requires grad. TypeError, ValueError, RuntimeError: as shard, and a seqlen out of range.
    """
    check_tensor("x", x)
    shards = shards_of(group, layout)
    if wants_gradient(x):
        raise NotImplementedError("unshard has no gradient, but x requires grad: pass x.detach(), and compute losses "
                                  "from the rows of each rank")
    rows = x.movedim(dim, 0).contiguous()
    seqlen = check_seqlen(seqlen, shards.size * rows.shape[0])
    shards.check_rows(rows.shape[0])
    return shards.all_gather(rows)[:seqlen].movedim(0, dim)


def check_seqlen(seqlen, total):
    """seqlen, or total if it is None; TypeError unless it is an int, ValueError unless it is in 1..total."""
    if seqlen is None:
        return total
    if not is_int(seqlen):
        raise TypeError(f"seqlen must be None or an int, got {shown(seqlen)}")
    if not 1 <= seqlen <= total:
        raise ValueError(f"seqlen must be in 1..{total}, the rows of all ranks, got {seqlen}")
    return seqlen


def shard_positions(seqlen: int, group: "dist.ProcessGroup | None" = None, layout: str = "zigzag",
                    device: torch.device | str | None = None) -> Tensor:
    """The positions of this rank's rows in the whole sequence, for position embeddings: int64 (T,), 0 in the padding.
    For positions in documents, shard those.

    Args:
        seqlen: the length of the whole sequence.
        group, layout: as for shard, and so are the errors.
    """
    return shard(torch.arange(seqlen, device=device), group, 0, layout)


def shard_labels(tokens: Tensor, group: "dist.ProcessGroup | None" = None, layout: str = "zigzag",
                 ignore_index: int = -100) -> Tensor:
    """The labels of this rank's rows in next-token prediction: the token after each, also where another rank holds it.
    int64 (B, T).

    Args:
        tokens: (B, S), int64, the whole sequence.
        group, layout: as for shard.
        ignore_index: the label of the last token and of padding, which cross_entropy leaves out.

    Raises:
        As shard; also TypeError for tokens that are not int64, ValueError for those that are not 2D.
    """
    check_tensor("tokens", tokens)
    check_tensor_of("tokens", tokens, tokens.device)
    return shard(pad(tokens[:, 1:], (0, 1), value=ignore_index), group, 1, layout, ignore_index)
