"""backend="torch": scaled_dot_product_attention, brought to the conventions of this project."""

import math

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..checks import holds, is_known, is_static, sum_dtype
from ..options import CAUSAL_MASK, Backend
from ..reference.append import append_in_torch
from ..reference.definition import DTYPES, reference_forward, without_autocast, without_padding
from ..reference.packed import as_padded
from ..reference.pages import over_gathered
from ..reference.scores import as_attn_mask, visible_keys, with_mask
from .reference import by_autograd


def _copied_if_needed(x):
    """x, or a copy of what SDPA's kernels cannot take.

    On the CPU they do not write an output whose last dimension is not the innermost one, as it is not in the empty_like
    of a q whose rows overlap. On a GPU they fail with a misaligned address for some tensors that do not start at a
    multiple of 16 bytes, or have rows that do not, after which the process has no GPU any more.
    """
    width = x.shape[-1]
    is_apart = all(is_known(n >= width) or is_known(n == 0) or holds(n >= width) for n in x.stride()[:-1])
    if not is_apart or x.is_cuda and not _is_aligned(x):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _expanded_if_needed(mask, sizes):
    """Expands mask along dimensions whose size only data will tell: SDPA would ask whether it is 1, as in the mask."""
    is_decided = [is_static(n) or is_known(n > 1) for n in sizes[-mask.ndim:]]
    if all(is_decided):
        return mask
    return mask.expand([m if decided else n for m, n, decided in zip(mask.shape, sizes[-mask.ndim:], is_decided)])


def _is_aligned(x):
    step = 16 // x.element_size()
    # Tracing cannot tell the offset.
    return not (torch.compiler.is_compiling() or x.storage_offset() % step
                or any(stride % step for stride in x.stride()[:-1]))


@without_autocast
def _forward(q, k, v, options):
    # SDPA takes none of these, and on a GPU no mask that is wider than q, as ALiBi and a bias in fp32 may be.
    is_wide = options.alibi_slopes is not None and sum_dtype(q.dtype) != q.dtype or (
        options.attn_bias is not None and options.attn_bias.dtype not in (torch.bool, q.dtype))
    if (options.dropout_seed is not None or options.sinks is not None or options.softcap > 0 or is_wide
            or options.return_max_logits or options.score_mod is not None):
        return reference_forward(q, k, v, options)
    if options.lengths.is_packed:
        return as_padded(_forward, q, k, v, options)
    softmax_scale, has_lengths = options.softmax_scale, options.lengths.are_given
    is_causal = options.mask == CAUSAL_MASK
    # SDPA aligns its own causal mask top-left, which is ours only for equal lengths.
    square_causal = is_causal and is_known(q.shape[2] == k.shape[2]) and not (has_lengths or options.has_scores)
    is_grouped = not is_known(q.shape[1] == k.shape[1])
    visible = None if square_causal else visible_keys(q.shape[2], k.shape[2], options, q.device)
    if visible is not None and (has_lengths or not is_causal or not is_known(q.shape[2] <= k.shape[2])):
        q, k, v = without_padding(q, k, v, visible)
    mask = as_attn_mask(q, k, options, visible)
    if mask is not None:
        mask = _expanded_if_needed(mask, (*q.shape[:3], k.shape[2]))
    if softmax_scale <= 0:  # SDPA's kernels mask before they scale: -inf times such a scale is NaN or inf
        q, softmax_scale = (-q, -softmax_scale) if softmax_scale < 0 else (q * 0, 1.0)
    q, k, v = map(_copied_if_needed, (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=square_causal, scale=softmax_scale,
                                       enable_gqa=is_grouped)
    if mask is not None:  # SDPA's own backends differ on rows that see no key
        is_hidden = ~mask if mask.dtype == torch.bool else mask.detach() == -math.inf
        out = out.masked_fill(is_hidden.all(-1, keepdim=True), 0)
    if not options.return_lse:
        return out, None
    if square_causal:
        mask = visible_keys(q.shape[2], k.shape[2], options, q.device)
    return out, _lse(q, k, softmax_scale, mask)


LSE_ROWS = 128  # how many rows of scores _lse forms at a time


def _lse(q, k, softmax_scale, mask):
    """SDPA does not return lse (B, H, Sq): form the scores again, a few rows at a time. mask: its attn_mask."""
    acc_dtype = sum_dtype(q.dtype)
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], q.shape[2], k.shape[2])
    q = q.unflatten(1, (k.shape[1], -1)).to(acc_dtype)  # (B, Hk, group, Sq, D)
    k = k.to(acc_dtype).transpose(-2, -1).unsqueeze(2)
    parts = []
    # A loop over a dynamic length would be compiled anew for each number of blocks: it is one block.
    blocks = range(0, q.shape[3], LSE_ROWS) if is_static(q.shape[3]) else [0]
    for row0 in blocks:
        rows = slice(row0, row0 + LSE_ROWS if is_static(q.shape[3]) else None)
        scores = (q[..., rows, :] @ k * softmax_scale).flatten(1, 2)
        parts.append((scores if mask is None else with_mask(scores, mask[..., rows, :])).logsumexp(-1))
    return torch.cat(parts, -1)


BACKEND = Backend(_forward, DTYPES, True, over_gathered(_forward), append_in_torch, by_autograd(_forward))
