"""The functions of flash-attn 3 for caches of keys and values, by their names and in its order. What flash-attn 2, vLLM
and SGLang call otherwise, or add, are keywords.
"""

import math

import torch
from torch import Tensor

from ..checks import (KERNEL_DTYPES, MAX_SPLITS, NO_WINDOW, check_dtype, check_is, check_layout, check_no_derivative,
                      check_range, check_shapes, check_tensor, check_tensor_of, dtype_names, is_int, sum_dtype)
from ..options import Append, Cache, Options
from ..reference.append import check_room
from .functions import Result, attend_rows, check_out, heads_first, one_of, refuse

NAMES = {"function": "flash_attn_with_kvcache", "sm_scale": "softmax_scale", "seqused_k": "cache_seqlens",
         "leftpad_k": "cache_leftpad"}


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None,
                            v: Tensor | None = None, qv: Tensor | None = None, rotary_cos: Tensor | None = None,
                            rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
                            cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
                            page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
                            cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | Tensor | None = None,
                            rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None,
                            k_descale: Tensor | None = None, v_descale: Tensor | None = None,
                            softmax_scale: float | None = None, causal: bool = False,
                            window_size: tuple[int, int] = NO_WINDOW, attention_chunk: int = 0, softcap: float = 0,
                            rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None,
                            num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
                            return_softmax_lse: bool = False, *, block_table: Tensor | None = None,
                            alibi_slopes: Tensor | None = None, s_aux: Tensor | None = None,
                            learnable_sink: Tensor | None = None, sinks: Tensor | None = None,
                            out: Tensor | None = None, return_lse: bool = False, ver: int | None = None,
                            fa_version: int | None = None, backend: str = "auto") -> Result:
    """attention_with_kvcache with the signature and the layout of flash-attn 3 (flash_attn_with_kvcache).

    Args:
        q: (B, Sq, H, D), or with cu_seqlens_q (Tq, H, D), packed.
        k_cache, v_cache: (N, S, Hk, D), or with a page table (num_pages, page_size, Hk, D), as attention_with_kvcache.
        cache_seqlens: its seqused_k, how many keys of a sample are valid: int32 (B,), or an int for all samples.
        cache_leftpad, softmax_scale: its leftpad_k and its sm_scale.
        page_table, block_table: two names of one argument, those of flash-attn 3 and 2.
        s_aux, learnable_sink, sinks: three names of the sinks (H,).
        window_size: also None.
        return_softmax_lse, return_lse: return (out, lse).
        out: of the result's shape and dtype, on q's device: the result is copied into it.
        k, v: (B, Sn, Hk, D), or with cu_seqlens_k_new (T, Hk, D), packed: new keys and values, as of
            attention_with_kvcache. Alone, cu_seqlens_k_new changes nothing, nor rotary_seqlens without rotary_cos.
        qv, q_descale, k_descale, v_descale: only their defaults are supported.
        scheduler_metadata, pack_gqa, sm_margin, ver, fa_version: change nothing.
        All others: as attention_with_kvcache.

    Returns:
        out (B, Sq, H, D) or (Tq, H, D), with v_cache's head_dim; lse (B, H, Sq) or (H, Tq) in fp32, natural log.

    Raises:
        As attention_with_kvcache. NotImplementedError: also an argument that is not supported yet.
    """
    refuse(NAMES, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    table = one_of(NAMES, page_table=page_table, block_table=block_table)
    sinks = one_of(NAMES, s_aux=s_aux, learnable_sink=learnable_sink, sinks=sinks)
    names = NAMES if block_table is None else {**NAMES, "page_table": "block_table"}
    check_layout("(B, S, H, D)" if cu_seqlens_q is None else "(T, H, D)", names, q=q)
    check_layout("(B, S, Hk, D)" if table is None else "(num_pages, page_size, Hk, D)", names, k_cache=k_cache,
                 v_cache=v_cache)
    is_packed = cu_seqlens_k_new is not None
    check_layout("(T, Hk, D)" if is_packed else "(B, Sn, Hk, D)", names,
                 **{name: x for name, x in (("k", k), ("v", v)) if x is not None})
    if k is v is None:
        cu_seqlens_k_new = None  # SGLang gives it without k
    if rotary_cos is None:
        rotary_seqlens = None  # flash-attn 3's own tests give it without rotary_cos
    if is_int(cache_seqlens):
        num_new = k.shape[1] if k is not None and not is_packed else 0
        cache_seqlens = _of_each_sample(cache_seqlens, num_new, q, k_cache, table, names, cu_seqlens_q)
    given = Options(cu_seqlens_q, None, None, cache_seqlens, sinks, alibi_slopes, None, softmax_scale, softcap,
                    attention_chunk=attention_chunk, return_lse=return_lse or return_softmax_lse)
    cache = Cache(table, cache_batch_idx, cache_leftpad, None, num_splits, max_seqlen_q)
    append = Append(cu_seqlens_k_new=cu_seqlens_k_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                    rotary_seqlens=rotary_seqlens, rotary_interleaved=rotary_interleaved)
    return attend_rows(names, q, k_cache, v_cache, given, cache, append, heads_first(k, is_packed),
                       heads_first(v, is_packed), out, False, causal, NO_WINDOW if window_size is None else window_size,
                       backend)


def _of_each_sample(cache_seqlens, num_new, q, k_cache, table, names, cu_seqlens_q):
    """An int cache_seqlens as int32 (B,). ValueError unless the cache has room for them and num_new new keys."""
    room, batch_size = k_cache.shape[1], q.shape[0]
    if table is not None:
        check_tensor_of("page_table", table, q.device, names=names)
        room *= table.shape[1]
    if cu_seqlens_q is not None:
        check_tensor_of("cu_seqlens_q", cu_seqlens_q, q.device)
        batch_size = max(0, cu_seqlens_q.shape[0] - 1)
    check_range("cache_seqlens", cache_seqlens, 0, room)
    check_room("", "cache_seqlens", cache_seqlens, num_new, room)
    return torch.full((batch_size,), cache_seqlens, dtype=torch.int32, device=q.device)


def flash_attn_combine(out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None,
                       out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """The result over all keys, of results over parts of them (flash-attn 3's flash_attn_combine).

    Args:
        out_partial: (num_splits, B, Sq, H, D) or (num_splits, Tq, H, D), float32, float16, bfloat16 or float64: what
            attention to each of up to 256 parts gives. A part with lse -inf saw no key, and is not read here.
        lse_partial: (num_splits, B, Sq, H) or (num_splits, Tq, H), natural log, float32, or float64 for float64. Our
            functions return lse with the heads before the rows: transpose it.
        out: (B, Sq, H, D) or (Tq, H, D), in out_dtype: the result is copied into it.
        out_dtype: out's dtype, or out_partial's, if None.

    Returns:
        (out, lse), lse (B, Sq, H) or (Tq, H) with the rows of a head one after the other in memory, as in flash-attn 3.
        Where no part saw a key, out is 0 and lse -inf. Sinks count once for each part that had them: give them to one.

    TypeError: no dense tensor, a wrong dtype. ValueError: shapes, devices. NotImplementedError: an input requires grad.
    """
    dtypes = *KERNEL_DTYPES, torch.float64
    check_tensor("out_partial", out_partial)
    check_dtype(out_partial, dtypes, "out_partial")
    check_shapes(out_partial.ndim in (4, 5) and 1 <= out_partial.shape[0] <= MAX_SPLITS, "out_partial must be "
                 f"(num_splits, B, S, H, D) or (num_splits, T, H, D), with 1 to {MAX_SPLITS} splits",
                 out_partial=out_partial)
    check_tensor_of("lse_partial", lse_partial, out_partial.device, dtypes=(sum_dtype(out_partial.dtype),),
                    shapes=(out_partial.shape[:-1],))
    dtype = getattr(out, "dtype", out_partial.dtype) if out_dtype is None else out_dtype
    check_is("out_dtype", dtype, dtype in dtypes, f"None or one of {dtype_names(dtypes)}", TypeError)
    check_out(out, dtype, out_partial.shape[1:], out_partial.device)
    check_no_derivative("flash_attn_combine", "flash_attention", out_partial=out_partial, lse_partial=lse_partial)

    lse = lse_partial.logsumexp(0)
    is_empty = lse_partial == -math.inf
    # Where all parts are empty, -inf - -inf would be NaN.
    weights = (lse_partial - lse.masked_fill(lse == -math.inf, 0)).exp()[..., None]
    parts = out_partial.to(weights.dtype).masked_fill(is_empty[..., None], 0)
    result = (weights * parts).sum(0).to(dtype)
    rows_last = lse.transpose(-1, -2).contiguous().transpose(-1, -2)
    return result if out is None else out.copy_(result), rows_last


def get_scheduler_metadata(batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int,
                           headdim: int, cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16,
                           headdim_v: int | None = None, cu_seqlens_q: Tensor | None = None,
                           cu_seqlens_k_new: Tensor | None = None, cache_leftpad: Tensor | None = None,
                           page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
                           window_size: tuple[int, int] = NO_WINDOW, attention_chunk: int = 0,
                           has_softcap: bool = False, num_splits: int = 0, pack_gqa: bool | None = None,
                           sm_margin: int = 0) -> Tensor:
    """An empty int32 tensor on the device of cache_seqlens: no kernel here needs the plan that flash-attn 3 makes. Its
    arguments change nothing. TypeError if cache_seqlens is no dense tensor."""
    check_tensor("cache_seqlens", cache_seqlens)
    return cache_seqlens.new_empty(0, dtype=torch.int32)
