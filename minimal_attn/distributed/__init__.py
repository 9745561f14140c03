"""Attention of a sequence that is split over several processes: context parallelism on torch.distributed.

Read next: attention.py, the function; layout.py, which rows each process holds.
"""

from .attention import context_parallel_attention
from .layout import shard, shard_labels, shard_positions, unshard

__all__ = ["context_parallel_attention", "shard", "shard_labels", "shard_positions", "unshard"]
