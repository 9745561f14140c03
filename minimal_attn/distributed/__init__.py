"""Attention of a sequence that is split over several processes: context parallelism on torch.distributed."""

# torch imports this module late, with torch._dynamo. Its functions have the default group of that moment as a default
# argument, which keeps the group for ever, so that Gloo's threads outlive destroy_process_group and may then abort the
# process at its end (pytorch/pytorch#190489). Now there is no group yet.
import torch.distributed.nn  # noqa: F401

from .attention import context_parallel_attention
from .layout import shard, shard_labels, shard_positions, unshard

__all__ = ["context_parallel_attention", "shard", "shard_labels", "shard_positions", "unshard"]
