"""attn_implementation="minimal_attn" for the models of transformers.

register() gives transformers attend, which computes the attention of a layer by flash_attention, and make_mask of
masks.py, which says once for each forward pass what the rows of all layers see. The mask alone decides: attend leaves
out a layer's sliding_window, as the eager attention of transformers does.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor
from torch.nn.attention import flex_attention  # which transformers has imported
from transformers import AttentionInterface, AttentionMaskInterface

from ..attention import BACKENDS, flash_attention
from ..block_mask import BlockMask
from ..checks import NO_WINDOW, check_choice, shown
from .masks import Mask, can_read, cu_seqlens_of, make_mask, same_sequence

# transformers treats names with these in them in a way of its own.
RESERVED = "flash", "sdpa", "eager", "flex", "paged", "/", "|", ":", "@"

# Keywords that a few models pass to their attention and that change its result, and the reason given to refuse them.
REFUSED = {
    "cache": "paged caches, as of continuous batching",
    "block_table": "paged caches, as of continuous batching",
    "indices": "sparse attention by indices",
    "block_indices": "sparse attention by block_indices",
    "sinks": "sinks of each row; s_aux, one of each head, is served",
    "output_attentions": 'attention weights; attn_implementation="eager" returns them',
}


def register(name: str = "minimal_attn", *, backend: str = "auto", block_masks: bool = False) -> None:
    """Make our attention known to transformers, so that models take attn_implementation=name.

    Args:
        name: without "flash", "sdpa", "eager", "flex", "paged" and the characters / | : @, which transformers treats in
            ways of its own. A name that is registered here already gets the new backend and block_masks.
        backend: of flash_attention.
        block_masks: masks that would become dense ones, such as those of images in a text, become block masks, as with
            attn_implementation="flex_attention": less memory, and kernels skip what they hide. Not for models that read
            or change their mask.

    Raises:
        TypeError: a name that is no string. ValueError: a name that is reserved or belongs to something else, or an
        unknown backend.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {shown(name)}")
    if not name or any(part in name for part in RESERVED):
        raise ValueError(f"name must not be empty nor contain any of {', '.join(RESERVED)}, got {shown(name)}")
    check_choice("backend", backend, ("auto", *BACKENDS))
    found, mask = AttentionInterface().get(name), AttentionMaskInterface().get(name)
    if getattr(found, "func", found) not in (None, attend) or getattr(mask, "func", mask) not in (None, make_mask):
        raise ValueError(f"name {name!r} is registered with transformers already, by something else")
    AttentionMaskInterface.register(name, functools.partial(make_mask, block_masks=True) if block_masks else make_mask)
    AttentionInterface.register(name, functools.partial(attend, backend=backend))


def attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | Mask | None,
           dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
           softcap: float | None = None, s_aux: Tensor | None = None, position_bias: Tensor | None = None,
           deterministic: bool | None = None, cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None,
           position_ids: Tensor | None = None, backend: str = "auto", **others) -> tuple[Tensor, None]:
    """The attention function of transformers' AttentionInterface.

    Args:
        module: the layer. If is_causal is None, its is_causal counts.
        query: (B, H, Sq, D); key, value: (B, Hk, Sk, D), value also with another head_dim.
        attention_mask: of make_mask, a block_mask of flash_attention, or a tensor that broadcasts to (B, H, Sq, Sk), as
            attn_bias of flash_attention. is_causal counts only where it is None.
        dropout, scaling, softcap, s_aux, deterministic, backend: dropout_p, sm_scale, softcap, sinks, deterministic and
            backend of flash_attention. None is no softcap and not deterministic.
        position_bias: added to the scores, broadcastable to (B, H, Sq, Sk).
        cu_seq_lens_q, cu_seq_lens_k: cu_seqlens_q and cu_seqlens_k of flash_attention, of the flattened batch.
        position_ids: (B or 1, Sq). Where the positions of a causal layer begin anew, a new sequence begins, unless the
            model has got an attention_mask or cu_seq_lens_q. make_mask sees to this where there is no cache.
        others: what does not change attention, or is refused.

    Returns:
        (B, Sq, H, D), with value's head_dim and contiguous, and None in the place of attention weights.

    Raises:
        NotImplementedError: what is not served. TypeError, ValueError: a mask of another kind, or as flash_attention.
    """
    for name, what in REFUSED.items():
        if others.get(name) is not None and others[name] is not False:
            raise NotImplementedError(f"minimal_attn does not serve {what}, but {name} is given")
    mask, bias = _mask_and_bias(module, query, key, attention_mask, is_causal, cu_seq_lens_q)
    key, value = key[:, :, :mask.num_keys], value[:, :, :mask.num_keys]
    cu_seqlens, bias = _packing(mask, bias, query, cu_seq_lens_q, cu_seq_lens_k, position_ids)
    if position_bias is not None:
        position_bias = position_bias[..., :key.shape[2]]
        if bias is not None:
            position_bias = (position_bias.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool
                             else position_bias + bias)
        bias = position_bias
    options = dict(causal=mask.causal, sm_scale=scaling, dropout_p=dropout, deterministic=bool(deterministic),
                   window_size=mask.window, sinks=s_aux, softcap=0 if softcap is None else softcap, attn_bias=bias,
                   block_mask=mask.block_mask, backend=backend)
    if cu_seqlens is None:
        out = flash_attention(query, key, value, seqused_q=mask.seqused_q, seqused_k=mask.seqused_k, **options)
    else:  # of sequences that lie one after the other in the flattened batch
        q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
        out = flash_attention(q, k, v, cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1], **options)
        out = out[0].unflatten(1, (query.shape[0], query.shape[2])).transpose(0, 1)
    # Models take views of it. There is no copy if query lies in memory as (B, Sq, H, D).
    return out.transpose(1, 2).contiguous(), None


def _mask_and_bias(module, query, key, attention_mask, is_causal, cu_seq_lens_q):
    """attention_mask and is_causal as a Mask, and an attn_bias or None."""
    rows, keys = query.shape[2], key.shape[2]
    if isinstance(attention_mask, Mask):
        if attention_mask.hides_nothing:  # transformers does not count the keys of an encoder's cache
            attention_mask = dataclasses.replace(attention_mask, kv_length=keys, num_keys=keys)
        if (rows, keys) != (attention_mask.q_length, attention_mask.kv_length):
            raise ValueError(f"attention_mask is for {attention_mask.q_length} rows and {attention_mask.kv_length} "
                             f"keys, but the layer has {rows} rows and {keys} keys")
        return attention_mask, None if attention_mask.keys is None else attention_mask.keys[:, None, None]
    if attention_mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and rows > 1 and rows != keys and cu_seq_lens_q is None:
            raise ValueError(f"attention_mask must be given where {rows} rows of a causal layer meet {keys} keys")
        return Mask(rows, keys, causal and rows > 1, NO_WINDOW, keys), None
    if isinstance(attention_mask, (BlockMask, flex_attention.BlockMask)):
        return Mask(rows, keys, False, NO_WINDOW, keys, block_mask=attention_mask), None
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be None, a tensor or a mask of minimal_attn, got {shown(attention_mask)}")
    if attention_mask.ndim != 4:
        raise ValueError("attention_mask must broadcast to (B, H, Sq, Sk) and have 4 dimensions, got "
                         f"{shown(attention_mask)}")
    return Mask(rows, keys, False, NO_WINDOW, keys), attention_mask


def _packing(mask, bias, query, cu_seq_lens_q, cu_seq_lens_k, position_ids):
    """Returns (cu_seqlens of queries and keys, or None if the batch is not packed; bias). Where the host cannot read
    the positions, the bias separates the sequences."""
    if mask.cu_seqlens is not None:
        return (mask.cu_seqlens,) * 2, bias
    has_lengths = not (bias is mask.seqused_k is mask.block_mask is None)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if has_lengths:
            raise ValueError("cu_seq_lens_q and cu_seq_lens_k cannot be given together with padding or another mask. "
                             "Under torch.compile without a cache there always is a mask: give position_ids alone")
        return tuple(None if x is None else x.int() for x in (cu_seq_lens_q, cu_seq_lens_k)), bias
    if has_lengths or mask.is_padded or not mask.causal or position_ids is None or position_ids.ndim != 2 or not (
            mask.num_keys == query.shape[2] == position_ids.shape[1]):
        return None, bias
    if not can_read(position_ids):
        return None, same_sequence(position_ids)
    found = cu_seqlens_of(position_ids, query.shape[0])
    return None if found is None else (found, found), bias

