"""Tree masks: which of a sample's new tokens see each other, where a draft for speculative decoding branches.

A draft of up to 64 tokens is a tree: a token sees itself and the tokens on its way to the root (Miao et al., SpecInfer,
2024). All of them see the keys before the new ones. Kernels take a tree mask as words: bit j of the word of a token
says whether it sees the j-th new key.
"""

import torch
from torch import Tensor

from ..checks import check_apart, check_shapes, check_tensor, check_tensor_of, holds
from .scores import positions

MAX_TOKENS = 64  # bits of a word


def pack_tree_mask(tree_mask: Tensor) -> Tensor:
    """The words of a tree mask, to be packed once for all layers of a model.

    Args:
        tree_mask: bool (Sq, Sq) or (B, Sq, Sq), Sq at most 64: True where a row's token sees a column's.

    Returns:
        int64 (Sq,) or (B, Sq): bit j of a row is its column j. TypeError: what is no dense tensor of bool. ValueError:
        a wrong shape.
    """
    check_tensor("tree_mask", tree_mask)
    seqlen = tree_mask.shape[-1] if tree_mask.ndim else 0
    check_tensor_of("tree_mask", tree_mask, tree_mask.device, {"Sq": seqlen}, dtypes=(torch.bool,),
                    shapes=(("Sq", "Sq"), ("B", "Sq", "Sq")))
    _check_tokens(seqlen)
    return (tree_mask.long() << torch.arange(seqlen, device=tree_mask.device)).sum(-1)


def _check_tokens(seqlen):
    if not holds(seqlen <= MAX_TOKENS):
        raise ValueError(f"tree_mask serves up to {MAX_TOKENS} rows, got {seqlen}")


def check_tree_mask(tree_mask, q, causal, others):
    """The words (B, Sq) of tree_mask, contiguous in their last dimension, for q (B, H, Sq, D), which is checked.
    others: {name of an argument that cannot be given with it: (whether it is given, what to do instead)}."""
    check_tensor("tree_mask", tree_mask)
    check_apart("tree_mask", ", whose place it takes", causal=causal)
    for name, (is_given, instead) in others.items():
        if is_given:
            raise NotImplementedError(f"{name} is not supported together with tree_mask: {instead}")
    _check_tokens(q.shape[2])
    rows = ("Sq", "Sq") if tree_mask.dtype == torch.bool else ("Sq",)
    check_tensor_of("tree_mask", tree_mask, q.device, {"B": q.shape[0], "Sq": q.shape[2]},
                    dtypes=(torch.bool, torch.int64), shapes=(rows, ("B", *rows)))
    words = pack_tree_mask(tree_mask) if tree_mask.dtype == torch.bool else tree_mask
    return words.contiguous().expand(q.shape[0], q.shape[2])


def seen_in_tree(words, seqlen_k, lengths):
    """Which keys of a padded batch a row sees by the words (B, Sq) of a tree mask: bool (B, 1, Sq, Sk)."""
    rows, cols, own = positions(words.shape[1], seqlen_k, lengths, words.device)
    new = cols - (own - rows)
    return (new < 0) | (words[:, None, :, None] >> new.clamp(0, MAX_TOKENS - 1) & 1).bool()
