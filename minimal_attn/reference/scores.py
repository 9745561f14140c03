"""Changes of a score before the softmax: softcap, ALiBi, biases and masks. Plain torch for them.

The score of row i and key j is s = softmax_scale · q_i · k_j. With softcap it becomes softcap · tanh(s / softcap).
ALiBi then subtracts slope · |i + seqlen_k - seqlen_q - j|, and a bias is added. A mask hides scores. Read next:
definition.py, which forms all scores.
"""

import functools
import math

import torch

from ..checks import is_known, sum_dtype, wants_gradient


def positions(seqlen_q, seqlen_k, lengths, device):
    """Positions and lengths of a padded batch: rows (Sq, 1), keys (Sk,), seqlen_q and seqlen_k. A length is an int, or
    (B, 1, 1, 1) where samples have lengths of their own."""
    rows, cols = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)
    if lengths.seqused_q is not None:
        seqlen_q = lengths.seqused_q.long().clamp(0, seqlen_q)[:, None, None, None]
    if lengths.seqused_k is not None:
        seqlen_k = lengths.seqused_k.long().clamp(0, seqlen_k)[:, None, None, None]
    return rows, cols, seqlen_q, seqlen_k


def visible_keys(seqlen_q, seqlen_k, window, lengths, device):
    """Which keys a row of a padded batch sees: bool, broadcastable to (B, H, Sq, Sk), or None when every row sees every
    key. window and lengths as in Options."""
    left, right = window
    if left < 0 and right < 0 and lengths.seqused_q is None and lengths.seqused_k is None:
        return None
    rows, cols, seqlen_q, seqlen_k = positions(seqlen_q, seqlen_k, lengths, device)
    conditions = []
    if lengths.seqused_q is not None:
        conditions.append(rows < seqlen_q)
    if lengths.seqused_k is not None:
        conditions.append(cols < seqlen_k)
    diagonal = rows + seqlen_k - seqlen_q  # the last row sees up to the last key
    if left >= 0:
        conditions.append(cols >= diagonal - left)
    if right >= 0:
        conditions.append(cols <= diagonal + right)
    mask = functools.reduce(torch.logical_and, conditions)
    return mask.expand(*mask.shape[:-2], rows.shape[0], cols.shape[0])


def alibi_bias(slopes, seqlen_q, seqlen_k, lengths, dtype):
    """The bias that ALiBi adds to the scores of a padded batch: of this dtype, broadcastable to (B, H, Sq, Sk)."""
    rows, cols, seqlen_q, seqlen_k = positions(seqlen_q, seqlen_k, lengths, slopes.device)
    distances = (rows + seqlen_k - seqlen_q - cols).abs()
    return -slopes[..., None, None].to(dtype) * distances


def with_scores(scores, options):
    """scores (B, H, Sq, Sk) of a padded batch, after softcap, ALiBi and attn_bias."""
    if options.softcap > 0:
        scores = options.softcap * (scores / options.softcap).tanh()
    if (slopes := options.alibi_slopes) is not None:
        scores = scores + alibi_bias(slopes, *scores.shape[2:], options.lengths, scores.dtype)
    if options.attn_bias is None:
        return scores
    if options.attn_bias.dtype == torch.bool:
        return scores.masked_fill(~without_repeats(options.attn_bias), -math.inf)
    return scores + options.attn_bias


def as_attn_mask(q, k, options, visible):
    """attn_mask of SDPA for ALiBi, attn_bias and the keys that are visible (None: all): None, bool or float,
    broadcastable to (B, H, Sq, Sk)."""
    bias = None if options.attn_bias is None else without_repeats(options.attn_bias)
    if bias is not None and bias.dtype == torch.bool:
        visible, bias = bias if visible is None else bias & visible, None
    if (slopes := options.alibi_slopes) is not None:
        alibi = alibi_bias(slopes, q.shape[2], k.shape[2], options.lengths, sum_dtype(q.dtype))
        bias = alibi if bias is None else bias + alibi
    if bias is None or visible is None:
        return visible if bias is None else bias
    return torch.where(visible, bias, -math.inf)  # NaN in what is hidden changes nothing


def without_repeats(x):
    """x with one of each of its repeats: a view of size 1 along dimensions that are expanded. One that requires grad
    stays, since the gradient of a slice is filled up with zeros."""
    if wants_gradient(x):
        return x
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride())):
        if is_known(stride == 0) and is_known(size > 1):
            x = x.narrow(dim, 0, 1)
    return x
