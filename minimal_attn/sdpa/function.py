"""torch.nn.functional.scaled_dot_product_attention, by its signature and its conventions, over flash_attention: a
causal mask is aligned top-left, all leading dimensions broadcast, and masks have the name attn_mask.
"""

import math

import torch
from torch import Tensor

from ..attention import flash_attention
from ..checks import (NO_WINDOW, autocast, broadcasts, check_apart, check_attn_bias, check_number, check_shapes,
                      check_tensor, holds, is_causal_bias, is_known, is_static, is_top_left)
from ..options import Lengths


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                                 dropout_p: float = 0, is_causal: bool = False, scale: float | None = None,
                                 enable_gqa: bool = False, *, backend: str = "auto") -> Tensor:
    """softmax(scale · Q Kᵀ + attn_mask) V, a drop-in for torch.nn.functional.scaled_dot_product_attention.

    Args:
        query: (..., Sq, D); key: (..., Sk, D); value: (..., Sk, Dv). Any number of leading dimensions, which broadcast
            among the three, the last one that of the heads. Only several batch dimensions that broadcast in part are
            copied. Dtypes and head dimensions are those of flash_attention.
        attn_mask: broadcastable to (..., Sq, Sk). bool: True where a key takes part. Otherwise it is added to the
            scores: of query's dtype or float32. Differentiable. Or a causal bias of torch.nn.attention.bias for Sq
            rows and Sk keys, of which no mask is formed. Not together with is_causal.
        dropout_p: share of the probabilities to drop, whenever it is above 0, also in evaluation. Other elements are
            dropped than by torch.
        is_causal: row i sees the keys j <= i (top-left aligned, other than in flash_attention).
        scale: factor of the scores; 1/sqrt(D) if None.
        enable_gqa: query may have several times the heads of key and of value, and query head h reads key head
            h // (H // Hk). Without it, heads broadcast.
        backend: of flash_attention.

    Returns:
        (..., Sq, Dv) in query's dtype, or in autocast's. Rows that see no key are 0.

    Raises:
        As flash_attention. ValueError: shapes that do not fit, or attn_mask together with is_causal.
    """
    for name, x in {"query": query, "key": key, "value": value}.items():
        check_tensor(name, x)
    for name, x in {"is_causal": is_causal, "enable_gqa": enable_gqa, "sm_scale": scale}.items():
        check_number(name, x, {"sm_scale": "scale"})
    if attn_mask is not None:
        check_apart("attn_mask", is_causal=is_causal)
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)  # before they are expanded
    leading, heads_k, key, value = _matched(query, key, value, enable_gqa)
    q, k, v = _as_4d(query, leading), *(_as_4d(x, (*leading[:-1], heads_k)) for x in (key, value))
    window, bias = NO_WINDOW, None
    if is_causal_bias(attn_mask):
        is_causal, attn_mask, window = is_top_left(attn_mask, q, k, "attn_mask"), None, (-1, 0)
    if is_causal and is_known(q.shape[2] < k.shape[2]):
        k, v = k[:, :, :q.shape[2]], v[:, :, :q.shape[2]]  # no row sees the keys from Sq on
    if is_causal and is_known(q.shape[2] == k.shape[2]):
        window = -1, 0
    elif is_causal and is_static(q.shape[2] - k.shape[2]):
        window = -1, q.shape[2] - k.shape[2]
    elif is_causal:  # a window is a constant of a graph
        bias = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        bias = check_attn_bias(_as_bias(attn_mask, q, k, leading), q, k, Lengths(), "attn_mask")
    out = flash_attention(q, k, v, sm_scale=scale, dropout_p=dropout_p, window_size=window, attn_bias=bias,
                          backend=backend)
    has_heads = max(query.ndim, key.ndim, value.ndim) > 2
    return out.reshape(*(leading if has_heads else ()), *out.shape[2:])


def _matched(query, key, value, enable_gqa):
    """(leading, heads_k, key, value): the leading dimensions of the result, batch and heads, the number of key/value
    heads, and key and value, repeated if they alone have different numbers of heads."""
    given, ndim = dict(query=query, key=key, value=value), min(query.ndim, key.ndim, value.ndim)
    if ndim < 2:
        check_shapes(False, "query, key and value must have at least 2 dimensions", **given)
    heads, heads_k, heads_v = (x.shape[-3] if x.ndim > 2 else 1 for x in (query, key, value))
    if enable_gqa:
        check_shapes(ndim > 2 and not any(is_known(n == 0) or not holds(heads % n == 0) for n in (heads_k, heads_v)),
                     "with enable_gqa=True, the number of query heads must be a multiple of those of key and value",
                     **given)
        if not is_known(heads_k == heads_v):
            key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
            heads_k = heads
    of_keys = [(*x.shape[:-3], heads) if enable_gqa else x.shape[:-2] for x in (key, value)]
    try:
        leading = torch.broadcast_shapes((1,), query.shape[:-2], *of_keys)
    except RuntimeError:
        check_shapes(False, "the leading dimensions must broadcast; heads need not with enable_gqa=True", **given)
    if not enable_gqa and not (is_known(heads_k == 1) and is_known(heads_v == 1)):
        heads_k = leading[-1]  # otherwise all query heads read one key head
    return leading, heads_k, key, value


def _as_4d(x, leading):
    """x (..., S, D) with these leading dimensions, all but the last merged into one: a view if there is one."""
    return x.expand(*leading, *x.shape[-2:]).reshape(math.prod(leading[:-1]), leading[-1], *x.shape[-2:])


def _as_bias(attn_mask, q, k, leading):
    """attn_mask, broadcastable to (*leading, Sq, Sk), as one that is broadcastable to (B, H, Sq, Sk)."""
    check_tensor("attn_mask", attn_mask)
    shape = *leading, q.shape[2], k.shape[2]
    check_shapes(broadcasts(attn_mask.shape, shape), f"attn_mask must broadcast to {shape}", attn_mask=attn_mask)
    sizes = (1,) * (len(shape) - attn_mask.ndim) + tuple(attn_mask.shape)
    # Only batch dimensions are expanded here, since merging them may make a copy.
    batch = sizes[:-3] if all(is_known(n == 1) for n in sizes[:-3]) else leading[:-1]
    bias = attn_mask.expand(*batch, *sizes[-3:]).reshape(math.prod(batch), *sizes[-3:])
    return bias.double() if q.dtype == torch.float64 and bias.dtype == torch.float32 else bias
