"""Masks and biases of scores: windows, lengths, ALiBi and attn_bias.

The score of row i and key j is s = softmax_scale · q_i · k_j. With softcap it becomes softcap · tanh(s / softcap).
ALiBi then subtracts slope · |i + seqlen_k - seqlen_q - j|, and a bias is added. A score_mod takes the place of these. A
mask hides scores.
"""

import contextlib
import math

import torch
from torch.compiler import is_compiling

from ..block_mask import dense_of
from ..checks import is_known, sum_dtype, wants_gradient
from ..options import NO_MASK


def positions(seqlen_q, seqlen_k, lengths, device):
    """Rows (Sq, 1) and keys (Sk,) of a padded batch, and each row's own key i + seqlen_k - seqlen_q: (Sq, 1), or
    (B, 1, Sq, 1) where samples have lengths of their own."""
    rows, cols = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)
    if lengths.seqused_q is not None:
        seqlen_q = lengths.seqused_q.long().clamp(0, seqlen_q)[:, None, None, None]
    if lengths.seqused_k is not None:
        seqlen_k = lengths.seqused_k.long().clamp(0, seqlen_k)[:, None, None, None]
    return rows, cols, rows + seqlen_k - seqlen_q


def visible_keys(seqlen_q, seqlen_k, options, device):
    """Which keys a row of a padded batch sees: bool, broadcastable to (B, H, Sq, Sk), or None if all see all."""
    (left, right), seqused_q, seqused_k = options.window, options.seqused_q, options.seqused_k
    if options.mask == NO_MASK and seqused_q is seqused_k is None:
        return None
    rows, cols, own = positions(seqlen_q, seqlen_k, options.lengths, device)
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    for place, seqused in ((rows, seqused_q), (cols, seqused_k)):
        if seqused is not None:
            mask = mask & (place < seqused[:, None, None, None])
    if left >= 0:
        mask = mask & (cols >= own - left)
    if right >= 0:
        mask = mask & (cols <= own + right)
    if chunk := options.attention_chunk:
        mask = mask & (cols // chunk == own // chunk)
    return mask


def as_attn_mask(q, k, options, visible):
    """SDPA's attn_mask of ALiBi, attn_bias, a block mask and visible keys, broadcastable to (B, H, Sq, Sk), or None."""
    if options.mask_units is not None:
        dense = dense_of(options.mask_units, options.mask_bits, q.shape[2], k.shape[2])
        visible = dense if visible is None else dense & visible
    bias = None if options.attn_bias is None else without_repeats(options.attn_bias)
    if bias is not None and bias.dtype == torch.bool:
        visible, bias = bias if visible is None else bias & visible, None
    if options.alibi_slopes is not None:
        _, cols, own = positions(q.shape[2], k.shape[2], options.lengths, q.device)
        alibi = -options.alibi_slopes[..., None, None].to(sum_dtype(q.dtype)) * (own - cols).abs()
        bias = alibi if bias is None else bias + alibi
    if bias is None or visible is None:
        return visible if bias is None else bias
    return torch.where(visible, bias, -math.inf)  # NaN in what is hidden changes nothing


def with_mask(scores, mask):
    """scores (B, H, Sq, Sk) with an attn_mask of SDPA, or None. Those of -inf pass no gradient on: the derivative of
    logsumexp is NaN in rows that hold nothing else."""
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.masked_fill(scores == -math.inf, -math.inf)


def with_score_mod(scores, score_mod):
    """score_mod of scores (B, H, Sq, Sk), in their dtype, under torch.vmap."""
    if any(is_known(n == 0) for n in scores.shape):
        return scores
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # takes a second or two

    of_each = score_mod
    for dim in range(3, -1, -1):
        of_each = torch.vmap(of_each, in_dims=(0, *(0 if i == dim else None for i in range(4))))
    # table[q_idx] may be written, where vmap has tensors and indexing wants numbers. Dynamo does so by itself.
    with contextlib.nullcontext() if is_compiling() else TransformGetItemToIndex():
        changed = of_each(scores, *(torch.arange(n, device=scores.device) for n in scores.shape))
    if changed.shape != scores.shape:
        raise ValueError("score_mod must return a tensor without dimensions for each score, got one of shape "
                         f"{tuple(changed.shape[4:])}")
    return changed.to(scores.dtype)


def without_repeats(x):
    """x, of size 1 along dimensions that are expanded. One that requires grad stays: slices have large gradients."""
    if wants_gradient(x):
        return x
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride())):
        if is_known(stride == 0) and is_known(size > 1):
            x = x.narrow(dim, 0, 1)
    return x
