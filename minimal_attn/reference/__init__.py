"""Attention in plain PyTorch: the definition that every kernel is tested against.

definition.py has attention itself, scores.py masks and biases, dropout.py the random numbers, packed.py packed batches,
pages.py caches of keys and values, append.py new keys for them, and tree_mask.py the masks of speculative decoding.
"""

from .definition import blockwise_attention, reference_attention

__all__ = ["blockwise_attention", "reference_attention"]
