"""Changes of a score before the softmax: softcap, ALiBi, biases and masks. Their checks, and plain torch for them.

The score of row i and key j is s = softmax_scale · q_i · k_j. With softcap it becomes softcap · tanh(s / softcap).
ALiBi then subtracts slope · |i + seqlen_k - seqlen_q - j|, and a bias is added. A mask hides scores. Read next:
definition.py, which forms all scores.
"""

import functools
import math
import numbers

import torch

from ..checks import (FP8_DTYPES, KERNEL_DTYPES, MAX_SCALE, broadcasts, check_tensor, is_causal_bias, is_known,
                      same_sizes, shown, sum_dtype, wants_gradient)


def check_softcap(softcap):
    """softcap as a float; TypeError unless it is a real number, ValueError unless it is 0 or in
    [1e-30, MAX_SCALE]."""
    if isinstance(softcap, bool) or not isinstance(softcap, (numbers.Real, torch.SymFloat)):
        raise TypeError(f"softcap must be a number, and 0 is none, got {shown(softcap)}")
    if not 0 <= softcap <= MAX_SCALE:  # kernels keep it in fp32
        raise ValueError(f"softcap must be at least 0 and at most {MAX_SCALE:g}, got {softcap}")
    # Kernels divide by it. The bound has no name, since torch.compile(dynamic=True) makes symbols of global floats.
    if 0 < softcap < 1e-30:
        raise ValueError(f"softcap must be 0 or at least 1e-30, got {softcap}")
    return float(softcap)


def check_alibi_slopes(alibi_slopes, q, lengths):
    """None, or alibi_slopes (H,) or (B, H), contiguous, B samples in a packed batch too. q and lengths are checked.

    TypeError for what is no dense float32 tensor, ValueError for everything else, and where a gradient is wanted of it.
    """
    if alibi_slopes is None:
        return None
    check_tensor("alibi_slopes", alibi_slopes)
    if alibi_slopes.dtype != torch.float32:
        raise TypeError(f"Unsupported dtype: alibi_slopes is {alibi_slopes.dtype}, allowed is float32")
    batch_size = lengths.num_samples(q)
    nheads = q.shape[1] if q.ndim == 4 else 1
    if alibi_slopes.ndim == 0 or not same_sizes(alibi_slopes.shape, (batch_size, nheads)[-alibi_slopes.ndim:]):
        raise ValueError(f"alibi_slopes must have shape ({nheads},) or ({batch_size}, {nheads}), one for each query "
                         f"head, got {tuple(alibi_slopes.shape)}")
    if alibi_slopes.device != q.device:
        raise ValueError(f"alibi_slopes must be on the same device as q ({q.device}), got {alibi_slopes.device}")
    if wants_gradient(alibi_slopes):
        raise ValueError("alibi_slopes has no gradient, but requires grad: pass alibi_slopes.detach()")
    return alibi_slopes.contiguous()


def is_top_left(causal_bias, q, k, name="attn_bias"):
    """Whether this CausalBias of torch, which the caller calls `name`, aligns its mask top-left, and not bottom-right.

    ValueError unless it is for the rows of q and the keys of k.
    """
    shape = causal_bias.seq_len_q, causal_bias.seq_len_kv
    if not same_sizes(shape, (q.shape[-2], k.shape[-2])):
        raise ValueError(f"{name} must be for {q.shape[-2]} rows and {k.shape[-2]} keys, got a CausalBias of {shape}")
    return causal_bias.variant.name == "UPPER_LEFT"


def with_causal_bias(window, attn_bias, q, k, lengths):
    """Returns (window, attn_bias), in which a CausalBias has become a part of the window if possible. It is not with
    lengths, which move the window, or if the bound would be negative. All but attn_bias are checked."""
    if not is_causal_bias(attn_bias) or lengths.are_given:
        return window, attn_bias
    bound = q.shape[-2] - k.shape[-2] if is_top_left(attn_bias, q, k) else 0  # beyond the bottom-right diagonal
    if bound < 0:
        return window, attn_bias
    left, right = window
    return (left, bound if right < 0 else min(right, bound)), None


def check_attn_bias(attn_bias, q, k, lengths, name="attn_bias"):
    """None, or attn_bias, which the caller calls `name`, as a view that broadcasts to (B, H, Sq, Sk), of 3D inputs to
    (B·H, 1, Sq, Sk): a dimension of size 1 is shared. q, k and lengths are checked.

    A CausalBias becomes the mask that it means. TypeError for what is no dense tensor of an allowed dtype, ValueError
    for everything else, and for any with packed batches and fp8.
    """
    if attn_bias is None:
        return None
    if lengths.is_packed:
        raise ValueError(f"{name} cannot be given with cu_seqlens: samples of a packed batch have no rows and keys in "
                         "common")
    if is_causal_bias(attn_bias):
        diagonal = 0 if is_top_left(attn_bias, q, k, name) else k.shape[-2] - q.shape[-2]
        attn_bias = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(diagonal)
    check_tensor(name, attn_bias)
    if q.dtype in FP8_DTYPES:
        raise ValueError(f"{name} cannot be given with float8 inputs, and q is {q.dtype}")
    allowed = (torch.bool, q.dtype, torch.float32) if q.dtype in KERNEL_DTYPES else (torch.bool, q.dtype)
    if attn_bias.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(allowed))
        raise TypeError(f"Unsupported dtype: {name} is {attn_bias.dtype}, allowed for q in {q.dtype} are {names}")
    if attn_bias.device != q.device:
        raise ValueError(f"{name} must be on the same device as q ({q.device}), got {attn_bias.device}")
    shape = *q.shape[:-1], k.shape[-2]
    if attn_bias.ndim == 0 or not broadcasts(attn_bias.shape, shape):
        raise ValueError(f"{name} must have 1 to {len(shape)} dimensions and broadcast to {shape}, (batch size, heads, "
                         f"rows, keys), got {tuple(attn_bias.shape)}")
    attn_bias = attn_bias[(None,) * (len(shape) - attn_bias.ndim)]
    return attn_bias if q.ndim == 4 else attn_bias.unsqueeze(1)


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


def alibi_bias(alibi_slopes, seqlen_q, seqlen_k, lengths, dtype):
    """The bias that ALiBi adds to the scores of a padded batch: of this dtype, broadcastable to (B, H, Sq, Sk)."""
    rows, cols, seqlen_q, seqlen_k = positions(seqlen_q, seqlen_k, lengths, alibi_slopes.device)
    distances = (rows + seqlen_k - seqlen_q - cols).abs()
    return -alibi_slopes[..., None, None].to(dtype) * distances


def with_scores(scores, options):
    """scores (B, H, Sq, Sk) of a padded batch, after softcap, ALiBi and attn_bias."""
    if options.softcap > 0:
        scores = options.softcap * (scores / options.softcap).tanh()
    if options.alibi_slopes is not None:
        scores = scores + alibi_bias(options.alibi_slopes, *scores.shape[2:], options.lengths, scores.dtype)
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
    if options.alibi_slopes is not None:
        alibi = alibi_bias(options.alibi_slopes, q.shape[2], k.shape[2], options.lengths, sum_dtype(q.dtype))
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
