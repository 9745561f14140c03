"""Tree masks: which of a sample's new tokens see each other, where a draft for speculative decoding branches.

A draft of up to 64 tokens is a tree: a token sees itself and the tokens on its way to the root (Miao et al.,
SpecInfer, 2024). All of them see the keys before the new ones. Kernels take a tree mask as words: bit j of the word of
a token says whether it sees the j-th new key. Read next: definition.py, which takes it as a bias.
"""

import torch
from torch import Tensor

from ..checks import check_tensor, holds, same_sizes
from ..lengths import NO_WINDOW
from .scores import positions

MAX_TOKENS = 64  # bits of a word


def pack_tree_mask(tree_mask: Tensor) -> Tensor:
    """The words of a tree mask, to be packed once for all layers of a model.

    Args:
        tree_mask: bool (Sq, Sq) or (B, Sq, Sq), Sq at most 64: True where a row's token sees a column's.

    Returns:
        int64 (Sq,) or (B, Sq): bit j of a row is its column j. Other bits are 0.

    Raises:
        TypeError: what is no dense tensor of bool. ValueError: a wrong shape.
    """
    check_tensor("tree_mask", tree_mask)
    if tree_mask.dtype != torch.bool:
        raise TypeError(f"tree_mask must be bool to be packed, got {tree_mask.dtype}")
    if tree_mask.ndim not in (2, 3) or not holds(tree_mask.shape[-1] == tree_mask.shape[-2]):
        raise ValueError(f"tree_mask must be (Sq, Sq) or (B, Sq, Sq), got {tuple(tree_mask.shape)}")
    if not holds(tree_mask.shape[-1] <= MAX_TOKENS):
        raise ValueError(f"tree_mask serves up to {MAX_TOKENS} rows, got {tree_mask.shape[-1]}")
    bits = torch.arange(tree_mask.shape[-1], device=tree_mask.device)
    return (tree_mask.long() << bits).sum(-1)


def check_tree_mask(tree_mask, q, lengths, causal, window_size, alibi_slopes, rotary_cos):
    """None, or the words (B, Sq) of tree_mask, which is bool or already words, as attention_with_kvcache describes it.
    Their last dimension is contiguous. q (B, H, Sq, D) and lengths are checked.

    TypeError for what is no dense tensor of bool or int64, ValueError for a wrong shape or device and together with
    causal, NotImplementedError together with an argument that it is not supported with.
    """
    if tree_mask is None:
        return None
    check_tensor("tree_mask", tree_mask)
    if tree_mask.dtype not in (torch.bool, torch.int64):
        raise TypeError(f"tree_mask must be bool, or int64 as pack_tree_mask gives it, got {tree_mask.dtype}")
    if tree_mask.device != q.device:
        raise ValueError(f"tree_mask must be on the same device as q ({q.device}), got {tree_mask.device}")
    if causal:
        raise ValueError("causal=True cannot be given together with tree_mask, which takes its place")
    for name, is_given, reason in (
            ("cu_seqlens_q", lengths.is_packed, "give a padded q, and seqused_q"),
            ("window_size", window_size != NO_WINDOW, "hide keys by tree_mask or leftpad_k"),
            ("alibi_slopes", alibi_slopes is not None, "places in the cache are not positions in the text"),
            ("rotary_cos", rotary_cos is not None, "rotate q and k by the depths of their tokens before")):
        if is_given:
            raise NotImplementedError(f"{name} is not supported together with tree_mask: {reason}")
    batch_size, seqlen_q = q.shape[0], q.shape[2]
    if not holds(seqlen_q <= MAX_TOKENS):
        raise ValueError(f"tree_mask serves up to {MAX_TOKENS} rows of q, got {seqlen_q}")
    rows = (seqlen_q, seqlen_q) if tree_mask.dtype == torch.bool else (seqlen_q,)
    if not any(same_sizes(tree_mask.shape, x) for x in (rows, (batch_size, *rows))):
        raise ValueError(f"tree_mask in {tree_mask.dtype} must have shape {rows} or {(batch_size, *rows)}, got "
                         f"{tuple(tree_mask.shape)}")
    words = pack_tree_mask(tree_mask) if tree_mask.dtype == torch.bool else tree_mask
    if words.stride(-1) != 1:
        words = words.contiguous()
    return words.expand(batch_size, seqlen_q)


def seen_in_tree(words, seqlen_k, lengths):
    """Which keys of a padded batch the words (B, Sq) of a tree mask let a row see: bool (B, 1, Sq, Sk), without regard
    to where rows and keys end."""
    _, cols, seqlens_q, seqlens_k = positions(words.shape[1], seqlen_k, lengths, words.device)
    new = cols - (seqlens_k - seqlens_q)
    return (new < 0) | (words[:, None, :, None] >> new.clamp(0, MAX_TOKENS - 1) & 1).bool()
